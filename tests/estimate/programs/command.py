"""Runs `unisono` with each line of standard input's file as its arguments, and prints what it says. Usage: FILE"""

import contextlib
import io
import json
import shlex
import sys
from pathlib import Path

import click

from unisono.cli.main import cli
from unisono.errors import UnisonoError

for line in Path(sys.argv[1]).read_text().splitlines():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(shlex.split(line), prog_name="unisono", standalone_mode=False)
        except (UnisonoError, click.UsageError) as error:
            code = 2
            err.write(error.format_message() if isinstance(error, click.UsageError) else str(error))
    print(json.dumps({"code": code, "out": out.getvalue(), "err": err.getvalue()}), flush=True)
