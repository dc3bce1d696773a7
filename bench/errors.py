"""The one error of the benchmarks' own."""

__all__ = ["CannotRun"]


class CannotRun(Exception):  # noqa: N818 - it is a state of the machine, not a fault
    """A benchmark lacks something that it needs; the text says what."""
