"""Benchmarks: unisono beside what people use today, measured in turn on one machine. Run `python -m bench --list`."""
