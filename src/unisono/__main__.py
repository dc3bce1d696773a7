"""Lets `python -m unisono` do what the command `unisono` does."""

from unisono.cli.main import main

if __name__ == "__main__":
    main()
