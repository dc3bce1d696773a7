"""The work of one rank in a step: the forward and backward passes of its virtual ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unisono.data.batch import Batch, Share
from unisono.engine import BufferTransaction, Engine, Trained
from unisono.engine.totals import Wants
from unisono.job.user_function import count_collectives, enter, leave, refuse_collectives_since
from unisono.parallel.losses import WeightedSum, further_values
from unisono.trainer.carried import CarriedStates
from unisono.trainer.global_loss import (
    EncodedShare,
    GlobalGradients,
    assemble_batch,
    encode_share,
    gradients_of,
    rows_of,
    run_backward,
)
from unisono.trainer.modules import to_device
from unisono.trainer.run_context import RunContext
from unisono.trainer.step_gradients import Loss, StepGradients, StepOptions, gradient_marks, model_stream

__all__ = ["VirtualRankGradients"]


class VirtualRankGradients(StepGradients):
    """Computes the gradients of this rank's shares, and hands them to the engine."""

    def __init__(
        self,
        run: RunContext,
        *,
        models: Any,
        modules: Mapping[str, nn.Module],
        buffers: BufferTransaction,
        carried: CarriedStates,
        autocast: Literal["bf16", "fp16"] | None,
    ) -> None:
        super().__init__(run, models=models, modules=modules, autocast=autocast)
        self._carried, self._buffers = carried, buffers
        self._carries = bool(carried)
        self.engine: Engine
        """Sums the gradients; the owner of this object sets it."""
        self._trained = Trained((), ())
        self._inputs: tuple[Tensor, ...] | None = None

    def prepare(self, loss_fn: Loss, batch: Batch) -> None:
        """Do nothing: shares need no preparation."""

    def compute(
        self, loss_fn: Loss, batch: Batch, trained: Trained, *, restricted: bool, call: int, options: StepOptions
    ) -> None:
        """Run forward and backward for all shares of this rank; see `StepGradients`."""
        self._trained, self._inputs = trained, trained.parameters if restricted else None
        self.losses = []
        if not self.values.is_empty:
            self.values.clear()
        inside = enter("the loss function")
        try:
            if options.encode is not None:
                self._compute_globally(loss_fn, batch, call, options)
            else:
                counted = count_collectives()  # as long as none is called, for all shares
                wants = self._run.wants()
                for share in batch.shares:
                    self._compute(loss_fn, share, batch, call, counted=counted, wants=wants)
        finally:
            leave(inside)

    def _compute(self, loss_fn: Loss, share: Share, batch: Batch, call: int, *, counted: int, wants: Wants) -> None:
        """Compute the gradient of one virtual rank's share, divided by the size of the global batch.

        Args:
            loss_fn: The loss function.
            share: The share.
            batch: The batch.
            call: The number of steps already taken with this batch.
            counted: The number of collectives before.
            wants: What this rank wants to be done after the step.
        """
        share_loss, share_weight = None, 0.0
        carried = self._carried if self._carries else None
        note, values = self._run.note, self.values
        for part, micro_batch in enumerate(share.micro_batches):
            # Each from its own numbers: where a model is cut, the first stage does not wait for the draws of the last.
            self._run.set_generators(*model_stream(batch, call, share.virtual_rank, part))
            samples = len(micro_batch.indices)
            items = to_device(micro_batch.items, self._run.device)
            if carried is not None:
                carried.begin(share.virtual_rank, micro_batches=len(share.micro_batches))
            note("forward", share.virtual_rank, micro_batch.indices)
            before = gradient_marks(self._trained) if part else None
            if self._autocast is None and samples > 1:
                result = loss_fn(self._models, items)
            else:
                with self._forward_context(samples):
                    result = loss_fn(self._models, items)
            refuse_collectives_since(counted)
            if before is not None:
                self._refuse_changed_gradients(self._trained, before)
            elif share is batch.shares[0]:
                self._refuse_own_backward(self._trained)
            if carried is not None:
                carried.end()
            value, weight = self._read(result, samples=samples, needs_graph=self.scaler is not None)
            if type(result) is dict and (further := further_values(result)):
                values.add(share.virtual_rank, further, samples=samples)
            total = value.total if value.losses is not None else value.total.detach()
            if total.dtype != torch.float32:
                total = total.float()
            share_loss = total if share_loss is None else share_loss + total
            share_weight += weight
            if micro_batch is share.micro_batches[-1]:
                self.losses.append((share, share_loss))
                self.engine.close_forward(
                    share.virtual_rank,
                    share_loss,
                    share_weight,
                    new_buffers=self._buffers.new_buffers(sends_early=self.engine.sends_early),
                    has_values=not values.is_empty,
                    wants=wants,
                )
            note("backward", share.virtual_rank)
            try:
                self._run_backward(value, batch.size)
            except RuntimeError:
                self._buffers.check_parameters()  # autograd refuses to use those that the forward pass has written to
                raise
        self.engine.close_leaf(share.virtual_rank)
        self._buffers.close_leaf(share.virtual_rank)

    def _run_backward(self, value: WeightedSum, size: int) -> None:
        """Compute the gradients of a micro-batch's loss, divided by the size of the global batch."""
        if self.scaler is None:
            root = value.total if value.losses is None else value.losses
            self._backward.run(root, samples=size, inputs=self._inputs)
        else:
            self.scaler.scale(value.total / size).backward(inputs=self._inputs)  # type: ignore[no-untyped-call]

    def _compute_globally(self, loss_fn: Loss, batch: Batch, call: int, options: StepOptions) -> None:
        """Compute the gradients of this rank's shares for a loss over the whole global batch; see `global_loss`."""
        run = self._run
        own: dict[int, EncodedShare] = {}
        failure: Exception | None = None
        try:
            for share in batch.shares:
                with torch.set_grad_enabled(not options.recompute):
                    own[share.virtual_rank] = self._encode(share, batch, call, options)
                if options.recompute:
                    self._buffers.roll_back()
                else:
                    self._buffers.close_leaf(share.virtual_rank)
        except Exception as error:  # of the user's function: it is raised once the other ranks know
            failure = error
        whole = assemble_batch(
            run.world, own, failure, size=batch.size, virtual_ranks=run.virtual_ranks, device=run.device
        )
        run.set_generators("model/loss", batch.epoch, batch.step, call)
        counted = count_collectives()
        with self._forward_context(batch.size):
            result = loss_fn(self._models, whole.value)
        refuse_collectives_since(counted)
        self._refuse_own_backward(self._trained)
        value, weight = self._read(result, samples=batch.size)
        root = value.total / batch.size
        if self.scaler is not None:
            root = self.scaler.scale(root)
        has_first = any(share.virtual_rank == 0 for share in batch.shares)
        found = gradients_of(root, whole, self._trained.parameters if has_first else ())
        for share in batch.shares:
            encoded = own[share.virtual_rank]
            if options.recompute:
                encoded = self._encode(share, batch, call, options)
            total, share_weight = torch.zeros((), device=run.device), 0.0
            if share.virtual_rank == 0:  # which the loss counts as, since one must
                total, share_weight = value.total.detach().float(), weight
                self.losses.append((share, total))
                if further := further_values(result):
                    self.values.add(0, further, samples=batch.size)
            self._hand_down(share, encoded, found, total, share_weight)
            if options.recompute:
                self._buffers.close_leaf(share.virtual_rank)

    def _encode(self, share: Share, batch: Batch, call: int, options: StepOptions) -> EncodedShare:
        """Encode the samples of a share."""
        self._run.set_generators("model", batch.epoch, batch.step, call, share.virtual_rank)
        self._run.note("forward", share.virtual_rank, (i for each in share.micro_batches for i in each.indices))

        def encode(items: Any) -> Any:
            assert options.encode is not None
            if not options.recompute:
                self._buffers.stand_in()
            self._carried.begin(share.virtual_rank, micro_batches=len(share.micro_batches))
            counted = count_collectives()
            result = options.encode(self._models, to_device(items, self._run.device))
            refuse_collectives_since(counted)
            self._carried.end()
            return result

        skeleton, parts = encode_share(share, encode, self._forward_context)
        return EncodedShare(skeleton, parts, self._buffers.new_buffers())

    def _hand_down(
        self, share: Share, encoded: EncodedShare, found: GlobalGradients, total: Tensor, weight: float
    ) -> None:
        """Run backward from the encodings of a share."""
        counts = [len(micro_batch.indices) for micro_batch in share.micro_batches]
        rows = [*rows_of(share.virtual_rank, counts, virtual_ranks=self._run.virtual_ranks)]
        for parts, where in zip(encoded.parts, rows, strict=True):
            is_last = where is rows[-1]
            if is_last:
                self.engine.close_forward(
                    share.virtual_rank,
                    total,
                    weight,
                    new_buffers=encoded.new_buffers,
                    has_values=share.virtual_rank == 0 and not self.values.is_empty,
                    wants=self._run.wants(),
                )
            direct = found.direct if share.virtual_rank == 0 and is_last else ()
            run_backward(parts, [None if g is None else g[where] for g in found.of_tensors], direct, self._inputs)
        self.engine.close_leaf(share.virtual_rank)
