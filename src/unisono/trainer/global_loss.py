"""A loss over the whole global batch: the samples of each share are encoded, and the loss sees the encodings of all.

First each rank encodes its shares. The encodings are sent to all ranks and put into the order of the batch. Each rank
computes the loss of all of them and the gradient of each encoding, and propagates those of its own shares back through
the encoder. Gradients of parameters that the loss function itself uses, such as a temperature, count as virtual rank
0's. The result is that of one process with the whole batch.

With `recompute`, encodings are first computed without a graph, and again, share by share and with the same random
numbers, when their gradients are known: the memory is that of one micro-batch (Gao et al., "Scaling Deep Contrastive
Learning Batch Size under Memory Limited Setup", 2021). The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.collectives.rank_errors import gather_or_raise
from unisono.collectives.world import World
from unisono.data.batch import Share
from unisono.engine import STEP_UNDONE
from unisono.errors import LossError
from unisono.plan import dealt
from unisono.text import a_type

__all__ = [
    "EncodedBatch",
    "EncodedShare",
    "GlobalGradients",
    "assemble_batch",
    "encode_share",
    "gradients_of",
    "rows_of",
    "run_backward",
]  # fmt: skip


class EncodedShare(NamedTuple):
    """The encodings of a virtual rank's samples."""

    skeleton: Any
    """The result of the function, with a number in place of each tensor."""
    parts: list[list[Tensor]]
    """The tensors of each micro-batch."""
    new_buffers: bool
    """True if the encoder changed a buffer that no step before had changed."""

    def message(self) -> tuple[Any, list[Tensor]]:
        """Return the facts about the share that other ranks need."""
        return self.skeleton, [torch.cat(tensors).detach().cpu() for tensors in zip(*self.parts, strict=True)]


class EncodedBatch(NamedTuple):
    """The encodings of all samples of a global batch, in the order of the batch."""

    value: Any
    """In the form in which the function returns it for some samples."""
    tensors: list[Tensor]
    """The tensors in it; floating-point ones are leaves that require a gradient."""


class GlobalGradients(NamedTuple):
    """The gradients of a loss over the global batch."""

    of_tensors: list[Tensor | None]
    """Of each tensor of the batch, None for one that the loss does not depend on."""
    direct: list[tuple[Tensor, Tensor]]
    """Parameters that the loss function uses itself, and their gradients."""


def encode_share(
    share: Share,
    encode: Callable[[Any], Any],
    forward: Callable[[int], AbstractContextManager[Any]],
) -> tuple[Any, list[list[Tensor]]]:
    """Encode the samples of a share.

    Args:
        share: The share.
        encode: Encodes the items of a micro-batch.
        forward: Returns the context for this, given the number of samples.

    Returns:
        The skeleton, and the tensors by micro-batch; see `EncodedShare`.

    Raises:
        LossError: The function returned anything other than tensors with a row for each sample.
    """
    skeletons, parts = [], []
    for micro_batch in share.micro_batches:
        samples = len(micro_batch.indices)
        with forward(samples):
            result = encode(micro_batch.items)
        tensors: list[Tensor] = []
        skeletons.append(_skeleton(result, tensors, samples))
        parts.append(tensors)
    if any(skeleton != skeletons[0] for skeleton in skeletons):
        raise LossError(
            f"encode returned {_in_words(skeletons[0])} for one micro-batch and "
            f"{_in_words(next(s for s in skeletons if s != skeletons[0]))} for another: return the same for all."
        )
    return skeletons[0], parts


def assemble_batch(
    world: World, own: Mapping[int, EncodedShare], error: Exception | None, *, size: int, virtual_ranks: int,
    device: torch.device,
) -> EncodedBatch:  # fmt: skip
    """Send this rank's encodings, and put those of all ranks into the order of the batch. Every rank must call it.

    Memory: the encodings of the global batch. Traffic: each rank sends its encodings to all others.

    Args:
        world: The ranks.
        own: The encodings of this rank's shares, by virtual rank.
        error: The exception that kept this rank from computing them, if any. It is raised here once the others know.
        size: Samples of the global batch.
        virtual_ranks: Shares of a whole batch.
        device: The device of this rank.

    Raises:
        PeerError: Another rank could not encode its samples.
        LossError: On all ranks, if encodings do not match each other.
    """
    message = {} if error is not None else {v: share.message() for v, share in own.items()}
    shares: dict[int, tuple[Any, list[Tensor]]] = {}
    for found in gather_or_raise(
        world, message, error, "trainer.step(encode=...)", work="encode", remedy=f". {STEP_UNDONE}"
    ):
        shares |= found
    skeleton, first = shares[0]
    for virtual_rank, (other, tensors) in sorted(shares.items()):
        if other != skeleton or [_kind(t) for t in tensors] != [_kind(t) for t in first]:
            raise LossError(
                f"encode returned {_in_words(skeleton, first)} for virtual rank 0 and {_in_words(other, tensors)} for "
                f"virtual rank {virtual_rank}: but for the number of samples, return the same for all."
            )
    whole = []
    for k, tensor in enumerate(first):
        rows = tensor.new_empty((size, *tensor.shape[1:]))
        for virtual_rank, (_, tensors) in shares.items():
            rows[dealt(virtual_rank, virtual_ranks)] = tensors[k]
        rows = rows.to(device)
        whole.append(rows.requires_grad_() if rows.is_floating_point() else rows)
    return EncodedBatch(_filled(skeleton, whole), whole)


def gradients_of(root: Tensor, whole: EncodedBatch, parameters: Sequence[Tensor]) -> GlobalGradients:
    """Return the gradients of a loss.

    Args:
        root: The loss, as a scalar with a graph.
        whole: The encodings of the global batch.
        parameters: The parameters that may have been used directly; none on ranks without virtual rank 0.
    """
    leaves = [tensor for tensor in whole.tensors if tensor.requires_grad]
    parameters = [p for p in parameters if p.requires_grad]
    found = torch.autograd.grad(root, [*leaves, *parameters], allow_unused=True)
    by_leaf = {id(leaf): gradient for leaf, gradient in zip(leaves, found, strict=False)}
    direct = zip(parameters, found[len(leaves) :], strict=True)
    return GlobalGradients([by_leaf.get(id(t)) for t in whole.tensors], [(p, g) for p, g in direct if g is not None])


def run_backward(
    parts: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    direct: Sequence[tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor] | None,
) -> None:
    """Propagate gradients back from encodings, and add those that parameters got from the loss function itself.

    Args:
        parts: The encodings of a micro-batch.
        gradients: The gradient of each; None if the loss does not depend on it.
        direct: Parameters and their gradients, with the last micro-batch of a leaf.
        inputs: The parameters to compute gradients for. None: all that lead there.
    """
    pairs = [(p, g) for p, g in zip(parts, gradients, strict=True) if p.requires_grad and g is not None]
    pairs += direct
    if pairs:
        roots, seeds = zip(*pairs, strict=True)
        torch.autograd.backward(roots, seeds, inputs=inputs)


def rows_of(virtual_rank: int, samples: Sequence[int], *, virtual_ranks: int) -> Iterator[slice]:
    """Yield the rows of the global batch that belong to the micro-batches of a share.

    Args:
        virtual_rank: The virtual rank.
        samples: The number of samples of each micro-batch.
        virtual_ranks: Shares of a whole batch.

    >>> batch = list(range(10))
    >>> [batch[rows] for rows in rows_of(1, [2, 1], virtual_ranks=4)]
    [[1, 5], [9]]
    """
    start = virtual_rank
    for count in samples:
        stop = start + count * virtual_ranks
        yield slice(start, stop, virtual_ranks)
        start = stop


def _skeleton(value: Any, tensors: list[Tensor], samples: int) -> Any:
    """Append the tensors to a list, and return the value with their numbers in their places."""
    if isinstance(value, Tensor):
        if not value.dim() or value.shape[0] != samples:
            raise LossError(
                f"encode returned a tensor of shape {list(value.shape)} for a micro-batch of {samples} samples: return "
                f"tensors with a row for each sample, shape [{samples}, ...]."
            )
        tensors.append(value)
        return len(tensors) - 1
    if type(value) in (tuple, list):
        return type(value)(_skeleton(item, tensors, samples) for item in value)
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: _skeleton(item, tensors, samples) for key, item in value.items()}
    raise LossError(
        f"encode returned {a_type(value)}: return a tensor with a row for each sample, or a tuple, list or "
        "dict of such tensors."
    )


def _filled(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(skeleton, int):
        return tensors[skeleton]
    if isinstance(skeleton, dict):
        return {key: _filled(item, tensors) for key, item in skeleton.items()}
    return type(skeleton)(_filled(item, tensors) for item in skeleton)


def _kind(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape[1:])


def _in_words(skeleton: Any, tensors: Sequence[Tensor] = ()) -> str:
    """Describe encodings.

    >>> _in_words({"image": 0, "text": 1}, [torch.zeros(4, 8), torch.zeros(4)])
    "{'image': float32 [4, 8], 'text': float32 [4]}"
    """
    names = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors]
    if isinstance(skeleton, int):
        return names[skeleton] if names else "a tensor"
    if isinstance(skeleton, dict):
        return "{" + ", ".join(f"{key!r}: {_in_words(item, tensors)}" for key, item in skeleton.items()) + "}"
    items = ", ".join(_in_words(item, tensors) for item in skeleton)
    return f"({items})" if isinstance(skeleton, tuple) else f"[{items}]"
