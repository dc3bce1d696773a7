"""Flags as the user sees them: torchrun's spellings and variables, sections in the help, one sentence for a mistake.

`Flag` is an option with its section and torchrun's variable; `Reader` reads its value. `FlagCommand` accepts
underscores for hyphens and prefixes of names, as torchrun does, and suggests the nearest flag for an unknown one.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from typing import Any

import click
from click.core import ParameterSource

__all__ = ["Flag", "FlagCommand", "Reader", "given_flags"]

_TYPED = "unisono.cli.flags.typed"
_COMPLETED = "unisono.cli.flags.completed"
_ALIKE = 0.65
_ELSEWHERE = {"--num-processes": "--nproc-per-node", "--ranks": "--nproc-per-node", "--np": "--nproc-per-node"}
"""Names of other launchers for our flags."""


class Reader(click.ParamType):  # type: ignore[type-arg]  # no parameter before click 8.2
    """Reads a value with a function. Its ValueError completes the error message: it says what was expected."""

    name = "text"

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value that the function reads.

        Raises:
            UsageError: The function raised ValueError.
        """
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except ValueError as error:
            assert param is not None and ctx is not None
            raise click.UsageError(f"{_source(param, ctx)} {value!r} {error}", ctx) from error


class Flag(click.Option):
    """An option of `unisono run`.

    Args:
        section: The heading under which the help lists it.
        torchruns: True if torchrun's variable PET_NAME sets its default.
    """

    def __init__(self, names: Sequence[str], *, section: str, torchruns: bool = True, **settings: Any) -> None:
        longest = max((name for name in names if name.startswith("--")), key=len)
        if torchruns:
            settings.setdefault("envvar", "PET_" + longest.removeprefix("--").replace("-", "_").upper())
        super().__init__([*names, settings.pop("into", longest.removeprefix("--").replace("-", "_"))], **settings)
        self.section = section

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the variable. As in torchrun, any number but 0 sets a flag that takes no value."""
        value = super().resolve_envvar_value(ctx)
        if self.is_flag and value is not None and value.isdigit():
            return str(min(int(value), 1))
        return value


class FlagCommand(click.Command):
    """A command whose flags are read as leniently as torchrun's. All arguments after the program belong to it."""

    def __init__(self, name: str, **settings: Any) -> None:
        settings["context_settings"] = {"allow_interspersed_args": False, "token_normalize_func": _hyphens}
        settings["options_metavar"] = "[FLAGS]"
        super().__init__(name, **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, with prefixes of names completed.

        Raises:
            UsageError: A flag is unknown (the message suggests the nearest one), ambiguous, or has no valid value.
        """
        ctx.meta[_TYPED] = tuple(args)
        while True:
            ctx.meta[_COMPLETED] = tuple(args)
            try:
                return super().parse_args(ctx, list(args))
            except click.NoSuchOption as error:
                args = self._complete(ctx, args, error.option_name)
            except click.UsageError as error:
                error.ctx = error.ctx or ctx  # click leaves it out where a value is missing
                raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags under their headings."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(param, "section", "Help"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def _complete(self, ctx: click.Context, args: list[str], name: str) -> list[str]:
        """Return the arguments with a full name in place of its prefix."""
        known = [name for param in self.get_params(ctx) for name in param.opts if name.startswith("--")]
        possible = [flag for flag in known if name.startswith("--") and len(name) > len("--") and flag.startswith(name)]
        if len(possible) == 1:
            at = next(i for i, word in enumerate(args) if _hyphens(word.partition("=")[0]) == name)
            _, equals, value = args[at].partition("=")
            return [*args[:at], possible[0] + equals + value, *args[at + 1 :]]
        if possible:
            *first, last = sorted(possible)
            raise click.UsageError(f"flag {name} could be {', '.join(first)} or {last}", ctx)
        near = _ELSEWHERE.get(name) or _nearest(name, known)
        hint = f"did you mean {near}?" if near else "flags of the program go behind it"
        raise click.UsageError(f"no flag {name}: {hint}", ctx)


def given_flags(ctx: click.Context) -> list[tuple[click.Parameter, str, list[str]]]:
    """Return the flags on the command line in their order, each with its name and its words, for another command line.

    Flags that variables have set are not among them.
    """
    values, _, order = ctx.command.make_parser(ctx).parse_args(list(ctx.meta[_COMPLETED]))
    left = {name: list(found) if isinstance(found, list | tuple) else [found] for name, found in values.items()}
    given: list[tuple[click.Parameter, str, list[str]]] = []
    for param in order:
        if not isinstance(param, click.Option) or param.name is None or not left.get(param.name):
            continue
        name = max(param.opts, key=len)
        # Of a flag that is given twice and counts once, the parser has kept the last value.
        value = left[param.name].pop(0)
        given.append((param, name, [name] if param.is_flag else [name, str(value)]))
    return given


def _hyphens(name: str) -> str:
    return name.replace("_", "-")


def _nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the flag that was meant, also if only its prefix was mistyped; None if none is similar.

    >>> _nearest("--nprok", ["--nproc-per-node", "--preload"]), _nearest("--lr", ["--log-dir"])
    ('--nproc-per-node', None)
    """

    def likeness(flag: str) -> float:
        return max(
            difflib.SequenceMatcher(None, name.strip("-"), part.strip("-")).ratio()
            for part in (flag, flag[: len(name)])
        )

    best = max(known, key=likeness)
    return best if likeness(best) >= _ALIKE else None


def _source(param: click.Parameter, ctx: click.Context) -> str:
    """Return the origin of a value: the flag, or the variable that sets its default."""
    if param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT:
        variables = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
        return "variable " + next((name for name in variables if os.environ.get(name)), variables[0])
    typed = [_hyphens(word) for word in ctx.meta.get(_TYPED, ())]
    long_first = sorted(param.opts, key=len, reverse=True)
    return next((name for name in long_first if any(word.startswith(name) for word in typed)), long_first[0])
