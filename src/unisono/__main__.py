"""Runs the command `unisono` as `python -m unisono`."""

from unisono.cli.main import main

if __name__ == "__main__":
    main()
