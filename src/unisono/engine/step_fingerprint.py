"""The facts that must be equal on all ranks in a step, and in other calls of a run, as one number and in words.

A loop may change hyperparameters, freeze and add parameters, switch modules between training and evaluation and set the
rate of a Dropout, and must do the same on every rank. Each step computes the number again, nearly always from the same
objects as before: that is recognized by their identity, which costs a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from itertools import chain
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.engine import StepDescription, Trained
from unisono.engine.consistency import BUFFERS, WEIGHTS
from unisono.engine.description import (
    PLAIN,
    describe_groups,
    describe_modes,
    describe_settings,
    describe_trained,
    hyperparameters,
    plain,
    settings_of,
)
from unisono.engine.model_contents import parameter_names
from unisono.engine.weight_comparison import WeightComparison
from unisono.mismatch import CALL, Document

__all__ = ["StepFingerprint", "intent_of_call"]

_groups_of, _mode_of, _version_of = attrgetter("param_groups"), attrgetter("training"), attrgetter("_version")

_MASK = 2**63 - 2
"""The bits of a fingerprint; see `StepDescription`."""
_EPOCH, _STEP, _CALL = 0x9E3779B97F4A7C14, 0xBF58476D1CE4E5B8, 0x94D049BB133111EA
"""Even factors without a pattern."""


def intent_of_call(call: str, **place: int) -> StepDescription:
    """Describe a call other than a step, at a place of the run."""
    document: Document = {CALL: call, **place}
    return StepDescription(_number(repr(document).encode()), lambda: document)


class StepFingerprint:
    """Computes the fingerprints of the steps of some optimizers.

    Args:
        optimizers: The optimizers by name; "" is that of a single one.
        modules: The models by the prefix of their names.
        call: The name of a step in messages.
    """

    def __init__(
        self, optimizers: Mapping[str, Optimizer], modules: Mapping[str, nn.Module], *, call: str = "trainer.step"
    ) -> None:
        self._optimizers, self._modules, self._call = optimizers, modules, call
        self._name = next(iter(optimizers)) if len(optimizers) == 1 else ""
        self._trained: Trained | None = None
        self._fixed = b""
        self._values: list[Any] = []
        """The values of all parameter groups, including the lists of their parameters, and settings of modules."""
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._members: list[nn.Module] = []
        self._modes: list[bool] = []
        self._settings: list[tuple[dict[str, Any], str]] = []
        self._base = 0

    def intent(
        self,
        trained: Trained,
        *,
        epoch: int,
        step: int,
        call: int,
        options: str = "",
        written: Mapping[str, str] = MappingProxyType({}),
        buffers: Callable[[], Mapping[str, str]] | None = None,
        weights: WeightComparison | None = None,
    ) -> StepDescription:
        """Describe what a step is about to do.

        Args:
            trained: The parameters that it trains.
            epoch: The epoch.
            step: The step within it.
            call: Counts the steps taken with its batch before.
            options: How the step differs from a plain one.
            written: The buffers that the loop has written since the last step, with their digests.
            buffers: Returns digests of the buffers of this rank, where others have those of other stages.
            weights: Finds the weights that it has written, where each rank has a copy of its own.
        """
        values = self._present()
        modes = list(map(_mode_of, self._members))
        if (
            trained is not self._trained
            or len(values) != len(self._values)
            or not all(map(is_, values, self._values))
            or modes != self._modes
            or (self._tensors and [*map(_version_of, self._tensors)] != self._versions)
        ):
            self._remember(trained, values, modes)
        base = self._base
        rewritten = {} if weights is None else weights.find()
        if options or written or rewritten:
            base = _number(repr((base, options, [*written.items()], [*rewritten.items()])).encode())
        # No hash, which takes longer: places near each other have different numbers, and that is what is needed.
        number = (base + epoch * _EPOCH + step * _STEP + call * _CALL) & _MASK
        return StepDescription(number, partial(self._document, (epoch, step, call), options, written, buffers, weights))

    def _remember(self, trained: Trained, values: list[Any], modes: list[bool]) -> None:
        if trained is not self._trained:
            self._members = [m for module in self._modules.values() for m in module.modules()]
            modes = list(map(_mode_of, self._members))
            self._settings = [(vars(module), key) for module in self._members for key in settings_of(module)]
            values = self._present()
            self._fixed = _digest(repr((self._name, trained.names)).encode())
        self._trained, self._values, self._modes = trained, values, modes
        self._tensors = [value for value in values if type(value) not in PLAIN and isinstance(value, Tensor)]
        self._versions = [*map(_version_of, self._tensors)]
        groups = [(len(group["params"]), hyperparameters(group)) for group in self._groups()]
        settings = [plain(attributes.get(key)) for attributes, key in self._settings]
        self._base = _number(self._fixed + bytes(modes) + repr((groups, settings)).encode())

    def _present(self) -> list[Any]:
        """Return the values of all parameter groups and settings."""
        groups = chain.from_iterable(map(_groups_of, self._optimizers.values()))
        values = [*chain.from_iterable(map(dict.values, groups))]
        values += [attributes.get(key) for attributes, key in self._settings]
        return values

    def _document(
        self,
        place: tuple[int, int, int],
        options: str,
        written: Mapping[str, str],
        buffers: Callable[[], Mapping[str, str]] | None,
        weights: WeightComparison | None,
    ) -> Document:
        epoch, step, call = place
        given = (f", optimizer={self._name!r}" if self._name else "") + options
        return {
            CALL: f"{self._call}({given.removeprefix(', ')})",
            "epoch": epoch,
            "step": step,
            "the number of steps taken with this batch before": call,
            **self._describe_groups(),
            **describe_trained(self._modules),
            **describe_modes(self._modules),
            **describe_settings(self._modules),
            **(_writes_of(written) if buffers is None else {BUFFERS: buffers()}),
            **({} if weights is None else {WEIGHTS: weights.describe()}),
        }

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]

    def _describe_groups(self) -> Document:
        names = parameter_names(self._modules)
        described: dict[str, Any] = {}
        for name, optimizer in self._optimizers.items():
            described |= describe_groups(optimizer, names, of=name)
        return described


def _writes_of(written: Mapping[str, str]) -> Document:
    return {"buffers written since the last step": [f"{name} = {sha[:8]}" for name, sha in written.items()]}


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


def _number(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") >> 2 << 1
