"""`unisono plan`: what it would take to train a model, in each layout."""

from __future__ import annotations

import json
import re
import sys
import traceback
from types import TracebackType

import click

from unisono.cli.status_line import show_status

__all__ = ["plan"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class MemorySize(click.ParamType):  # type: ignore[type-arg]
    """A size of memory, such as 16GiB."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the size in bytes."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        found = 0 if match is None else round(float(match[1]) * _unit(match[2], match[3]))
        if not found:
            self.fail(f"{value!r} is no size of memory: give one such as 16GiB, 16GB or 512MiB", param, ctx)
        return found


def _unit(prefix: str, binary: str) -> int:
    base = 1024 if binary else 1000
    size: int = base ** _POWERS[prefix.upper()]
    return size


@click.command(short_help="Say what it would take to train a model, in each layout.")
@click.argument("target", metavar="FILE.py[:FUNCTION]")
@click.option("-n", "--ranks", type=click.IntRange(1), required=True, help="The number of ranks.")
@click.option("--batch", type=click.IntRange(1), required=True, help="Samples of a step, over all ranks.")
@click.option("--memory", type=MemorySize(), metavar="SIZE", help="What a rank may take, such as 16GiB. Default: any")
@click.option("--virtual-ranks", type=click.IntRange(1), default=8, show_default=True, help="As in the Trainer.")
@click.option("--micro-batch", type=click.IntRange(1), help="Samples that are computed at once. Default: a share")
@click.option("--measure", is_flag=True, help="Build and run the model here, which takes its memory.")
@click.option("--train", "tries", is_flag=True, help="Also train some steps in each layout, on this machine.")
@click.option("--offload", "offloads", is_flag=True, help="Also say what GPUs hold, with shards and their offload.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: sizes in bytes, times in seconds.")
def plan(
    target: str,
    *,
    ranks: int,
    batch: int,
    memory: int | None,
    virtual_ranks: int,
    micro_batch: int | None,
    measure: bool,
    tries: bool,
    offloads: bool,
    as_json: bool,
) -> int:
    """Print the costs of training a model: memory of a rank, traffic and time of a step, in each layout.

    FUNCTION, or `build`, returns model, optimizer, loss function and data, as they are given to the Trainer. The model
    is not built: its tensors have no memory, and operators are timed one by one on this machine.

    \b
    unisono plan model.py:build --ranks 4 --memory 16GiB --batch 64
    """
    from unisono.estimate import Request, UserCodeError, as_document, as_text, make_plan  # noqa: PLC0415  imports torch

    request = Request(
        target=target,
        ranks=ranks,
        batch_size=batch,
        virtual_ranks=virtual_ranks,
        micro_batch_size=micro_batch,
        memory_nbytes=memory,
        measures=measure,
        tries=tries,
        offloads=offloads,
    )
    try:
        found = make_plan(request, tell=show_status)
    except UserCodeError as error:
        cause = error.__cause__
        assert cause is not None
        show_status("")
        frames = users_frames(cause.__traceback__)
        sys.stderr.write("".join(traceback.format_exception(type(cause), cause, frames, chain=False)))
        click.echo(f"unisono: {target} failed, see above", err=True)
        return 2
    finally:
        show_status("")
    click.echo(json.dumps(as_document(found), indent=1) if as_json else as_text(found))
    return 0


def users_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame that is not ours or Python's import machinery on."""
    first = frames
    while first is not None:
        module = first.tb_frame.f_globals.get("__name__", "")
        if not module.startswith(("unisono.", "importlib.", "_frozen_importlib", "torch.")):
            return first
        first = first.tb_next
    return frames
