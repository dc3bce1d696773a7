"""Records a rank's calls of torch.distributed in its status block, without changes to the program.

The functions of torch.distributed stay the same objects: their decorator keeps the inner function in a closure cell,
and a recording one takes its place there. The few without this decorator are replaced. Operations that do not pass
these functions (DDP's reductions, functional collectives) are in torch's own flight recorder, which a thread reads when
the agent asks. Start reading at `install`.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from unisono.imports import when_imported
from unisono.launch.failure.error_record import record_error
from unisono.launch.failure.frames import library_of
from unisono.launch.hang import stacks
from unisono.launch.hang.call_signatures import (
    COLLECTIVES,
    OTHERS,
    Signature,
    argument,
    call_shape,
    matched_text,
    reduction_name,
    tensor_facts,
)
from unisono.launch.hang.flight_recorder import FlightRecorder, name_tensors
from unisono.launch.hang.status_block import StatusBlock, encode_call
from unisono.launch.reserved_files import OwnFile
from unisono.text import format_ranks

__all__ = ["ASK_ERROR", "ASK_RECORDER", "ASK_STACKS", "CallRecorder", "install"]

ASK_RECORDER, ASK_STACKS, ASK_ERROR = b"?", b"s", b"e"
"""The questions that the agent writes into the pipe."""

_MOST_DESCRIPTIONS = 4096
_MOST_FRAMES = 64

_UNUSUAL = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors from inspecting arguments that torch will refuse, or those of another version of it. The call continues."""

Function = Callable[..., Any]


@dataclass(eq=False, slots=True)
class _RecordedGroup:
    """A process group of this rank, and how many collectives were called in it."""

    name: str
    ranks: str
    label: str
    sequence: int = 0


def install(block: StatusBlock, *, ask: int, dump: int) -> CallRecorder:
    """Record in the status block what this process does in its process groups, from the import of torch.distributed on.

    Call it once, in the rank, after the fork.

    Args:
        block: The status block.
        ask: The read end of a pipe, which a thread reads from the first `init_process_group` on. `ASK_RECORDER` makes
            the thread write the unfinished operations in torch's flight recorder into the block, `ASK_STACKS` the
            stacks of all threads to dump, and `ASK_ERROR` the exception that the main thread handles, if any, into the
            block.
        dump: The file for stacks.
    """
    recorder = CallRecorder(block, ask=ask, dump=dump)
    block.claim(pid=os.getpid(), main_thread=threading.main_thread().ident or 0)
    # A process that the rank forks (a DataLoader worker) has the same block mapped, which is not its own.
    os.register_at_fork(after_in_child=recorder.stop)
    when_imported("torch.distributed.distributed_c10d", recorder.attach)
    return recorder


class CallRecorder:
    """Wraps the functions of torch.distributed, and records their calls in the status block."""

    def __init__(self, block: StatusBlock, *, ask: int, dump: int) -> None:
        self._block: StatusBlock | None = block
        self._ask, self._dump = OwnFile(ask), OwnFile(dump)
        self._inside = threading.local()
        self._texts: dict[Any, bytes] = {}
        self._groups: dict[str, _RecordedGroup] = {}
        self._makers: dict[str, str] = {}  # by name, the line that made the group
        self._default: _RecordedGroup | None = None
        self._setups: dict[str, int] = {}
        self._epoch = 0
        self._watching = False
        self._callers = _Callers()

    def stop(self) -> None:
        """Stop recording."""
        self._block = None
        self._watching = False  # a fork does not copy the thread

    @property
    def block(self) -> StatusBlock | None:
        """The status block; None in a process that the rank has forked."""
        return self._block

    @property
    def epoch(self) -> int:
        """How often `init_process_group` has been called."""
        return self._epoch

    def find_caller(self) -> tuple[str, int, str]:
        """Return the file, line and function of the user's frame that led to the function that calls this."""
        return self._callers.find(sys._getframe(2))

    @property
    def has_thread(self) -> bool:
        """True if this process has the thread that answers the agent."""
        return self._watching

    def attach(self, c10d: ModuleType) -> None:
        """Wrap the functions of the module `torch.distributed.distributed_c10d`."""
        self._c10d: Any = c10d
        for name, signature in {**COLLECTIVES, **OTHERS}.items():
            function = getattr(c10d, name, None)
            if function is None:  # another version of torch
                continue
            around = self._recording_setup if signature.kind == "setup" else self._recording
            cell = _inner_cell(function)
            if cell is not None:
                cell.cell_contents = around(cell.cell_contents, signature)
            else:
                replacement = around(function, signature)
                for module in (c10d, sys.modules.get("torch.distributed")):
                    if module is not None and getattr(module, name, None) is function:
                        setattr(module, name, replacement)

        leaving = self._recording_leave(c10d.destroy_process_group)
        for module in (c10d, sys.modules.get("torch.distributed")):
            if getattr(module, "destroy_process_group", None) is leaving.__wrapped__:  # type: ignore[attr-defined]
                module.destroy_process_group = leaving  # type: ignore[union-attr]

    def _recording_leave(self, function: Function) -> Function:
        """Wrap `destroy_process_group` to record the end of all groups, which fails peers that still need this rank."""

        @functools.wraps(function)
        def recorded(group: Any = None, *args: Any, **kwargs: Any) -> Any:
            block, world = self._block, self._c10d.GroupMember.WORLD
            if block is not None and world is not None and group in (None, world):
                block.note_groups(left=True)
            return function(group, *args, **kwargs)

        return recorded

    def _recording(self, function: Function, signature: Signature) -> Function:
        inside, texts, counted = self._inside, self._texts, signature.kind == "collective"
        position, keyword = signature.group
        describe_call = self._describe

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            block = self._block
            if block is None or getattr(inside, "yes", False):
                return function(*args, **kwargs)
            try:
                group = self._group(args[position] if len(args) > position else kwargs.get(keyword))
            except _UNUSUAL:
                group = None
            if group is None:
                return function(*args, **kwargs)
            place = self._callers.find(sys._getframe(1))
            try:
                key = (signature.name, place, group.name, *call_shape(signature, args, kwargs))
                text = texts.get(key)
                if text is None:
                    if len(texts) >= _MOST_DESCRIPTIONS:
                        texts.clear()
                    text = texts[key] = describe_call(signature, group, args, kwargs, place)
            except _UNUSUAL:
                # Arguments that torch will refuse, or symbolic sizes while a graph is traced.
                text = encode_call(name=signature.name, kind=signature.kind, group=group.name, ranks=group.ranks)
            if counted:
                group.sequence += 1
            number = block.begin(text, sequence=group.sequence if counted else 0, epoch=self._epoch)
            inside.yes = True
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                block.end(number, failed=True)
                if counted and isinstance(error, TypeError | ValueError):  # refused before it was issued
                    group.sequence -= 1
                raise
            finally:
                inside.yes = False
            block.end(number)
            return result

        return _leave_to_python(recorded)

    def _recording_setup(self, function: Function, signature: Signature) -> Function:
        """Wrap a function that makes groups. All ranks must call it; calls are counted by function, not by group."""
        inside = self._inside
        first = signature.name == "init_process_group"

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            block = self._block
            if block is None or getattr(inside, "yes", False):
                return function(*args, **kwargs)
            if first:
                self._epoch += 1
                self._groups.clear()
                self._makers.clear()
                self._default = None
                self._setups.clear()
                self._texts.clear()
                self._watch()
                block.note_groups(left=False)
            file, line, name = self._callers.find(sys._getframe(1))
            text = encode_call(name=signature.name, kind="setup", file=file, line=line, function=name)
            self._setups[signature.name] = sequence = self._setups.get(signature.name, 0) + 1
            number = block.begin(text, sequence=sequence, epoch=self._epoch)
            inside.yes = True
            try:
                result = function(*args, **kwargs)
            except BaseException:
                block.end(number, failed=True)
                raise
            finally:
                inside.yes = False
            block.end(number)
            made = getattr(result, "group_name", None)  # new_subgroups makes each of its groups by new_group
            if isinstance(made, str):
                self._makers[made] = f"{file}:{line}"
            return result

        return _leave_to_python(recorded)

    def _group(self, group: Any) -> _RecordedGroup | None:
        """Return a group, without keeping it alive; None if this rank is not in it, or it does not exist yet."""
        if group is None:
            if self._default is None:
                self._default = self._look_up(self._c10d.GroupMember.WORLD)
            return self._default
        return self._look_up(group)

    def _look_up(self, group: Any) -> _RecordedGroup | None:
        name = getattr(group, "group_name", None)
        if not isinstance(name, str):
            return None
        known = self._groups.get(name)
        if known is None:
            ranks = tuple(sorted(self._c10d.get_process_group_ranks(group)))
            known = self._groups[name] = _RecordedGroup(
                name, format_ranks(ranks, separator=","), self._label_of(group, name)
            )
        return known

    def _label_of(self, group: Any, name: str) -> str:
        """Return how users know a group: by its description, or by the line that made it; "" if neither is known."""
        if group is self._c10d.GroupMember.WORLD:
            return "the default group"
        description = getattr(group, "group_desc", "")
        if description and description != "undefined":
            return f"the group {description!r}"
        return f"the group made at {self._makers[name]}" if name in self._makers else ""

    def _describe(
        self, signature: Signature, group: _RecordedGroup, args: Any, kwargs: Any, place: tuple[str, int, str]
    ) -> bytes:
        tensors = tensor_facts(argument(args, kwargs, signature.tensors))
        peer = self._peer(signature, args, kwargs)
        reduction = (
            reduction_name(argument(args, kwargs, signature.reduction, default="SUM")) if signature.reduction else ""
        )
        return encode_call(
            name=signature.name,
            kind=signature.kind,
            group=group.name,
            label=group.label,
            ranks=group.ranks,
            tensors=name_tensors(tensors),
            reduction=reduction,
            peer=peer,
            signature=matched_text(signature, tensors, reduction, peer),
            file=place[0],
            line=place[1],
            function=place[2],
            asynchronous=bool(argument(args, kwargs, signature.asynchronous)),
        )

    def _peer(self, signature: Signature, args: Any, kwargs: Any) -> int | None:
        """Return the global rank of the root or of the other side."""
        if signature.peer is None:
            return None
        position, name, in_group = signature.peer
        peer = argument(args, kwargs, (position, name))
        if peer is None and (inside := kwargs.get(in_group)) is not None:
            group = argument(args, kwargs, signature.group)
            peer = self._c10d.get_global_rank(self._c10d.GroupMember.WORLD if group is None else group, inside)
        if peer is None and signature.kind == "collective":
            peer = 0  # torch's default
        return None if peer is None else int(peer)

    def _watch(self) -> None:
        # Not a `threading.Thread`: a program that lists its threads must find only those that it has started.
        if not self._watching:
            self._watching = True
            start_new_thread(self._answer, ())

    def _answer(self) -> None:
        """Answer the agent's questions."""
        reader = FlightRecorder()
        # A program that closes all files may open its own at this number.
        while self._ask.is_intact and (asked := os.read(self._ask.number, 64)) and (block := self._block) is not None:
            if ASK_STACKS in asked:
                stacks.write(self._dump)
            if ASK_ERROR in asked and (error := _error_of(block.main_thread)) is not None:
                account = {**record_error(error), "handled": True}
                if block.read_failure() is None:  # otherwise the exception has left the program by now
                    block.write_failure(account)
            if ASK_RECORDER not in asked:
                continue
            with suppress(*_UNUSUAL):
                status, pending = reader.look()
                if any(group["completed"] > 0 for group in status.values()):
                    block.note_meeting()
                groups = {name: group.ranks for name, group in self._known_groups()}
                answer = {"time_ns": time.monotonic_ns(), "status": status, "pending": pending, "groups": groups}
                block.write_answer(answer)

    def _known_groups(self) -> list[tuple[str, _RecordedGroup]]:
        for group in list(self._c10d._world.pg_group_ranks):
            self._group(group)
        return list(self._groups.items())


class _Callers:
    """Finds the user's code in the call stack."""

    def __init__(self) -> None:
        self._own: dict[str, bool] = {}

    def find(self, frame: Any) -> tuple[str, int, str]:
        """Return file, line and function of the user's frame that leads to this one; if there is none, the nearest.

        Autograd calls hooks of a GPU in a thread of its own, which Python has not started. To that leads what the main
        thread does.
        """
        nearest = frame.f_back or frame  # without torch's decorator
        found, outermost = self._own_frame(frame)
        if found is None and not outermost.f_code.co_filename.endswith("/threading.py"):
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            found = None if main is None else self._own_frame(main)[0]
        found = found or nearest
        return found.f_code.co_filename, found.f_lineno, found.f_code.co_name

    def _own_frame(self, frame: Any) -> tuple[Any, Any]:
        """Return the innermost frame of the user's code from this one outwards, None if there is none, and the last."""
        for _ in range(_MOST_FRAMES):
            file = frame.f_code.co_filename
            own = self._own.get(file)
            if own is None:
                own = self._own[file] = not library_of(file)
            if own:
                return frame, frame
            if frame.f_back is None:
                break
            frame = frame.f_back
        return None, frame


def _error_of(thread: int) -> BaseException | None:
    """Return the exception that a thread handles at this moment, in an `except`, a `finally` or an `__exit__`."""
    found: Any = sys._current_exceptions().get(thread)
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    return error if isinstance(error, BaseException) else None


def _inner_cell(function: Any) -> Any:
    """Return the closure cell in which torch's decorators keep the function that they wrap; None if there is none."""
    closure = getattr(function, "__closure__", None) or ()
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return dict(zip(names, closure, strict=False)).get("func")


def _leave_to_python(function: Function) -> Function:
    """Exclude a function and its callees from torch.compile, whose own `disable` would import the compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    with suppress(AttributeError):  # another version of torch
        native: Any = sys.modules["torch"]._C._dynamo.eval_frame
        skip = native._FrameAction.SKIP
        native.set_code_exec_strategy(function.__code__, native._FrameExecStrategy(skip, skip))
    return function
