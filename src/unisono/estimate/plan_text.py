"""A plan as text of 80 columns, and as JSON. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

from unisono.estimate.costs import LayoutCost
from unisono.estimate.planning import Plan
from unisono.estimate.recommendation import fits, largest_part, recommend
from unisono.watch.figures import format_bytes, format_count

__all__ = ["as_document", "as_text"]

_COLUMNS = (("memory", 8), ("params", 7), ("grads", 7), ("state", 7), ("acts", 7), ("other", 7), ("sent", 7))
_NAME, _STEP, _WIDTH = 22, 8, 80
_REMEDIES = {
    "parameters": "more ranks with parallel=unisono.parallel.Shard() or Pipeline(...) keep less of them each",
    "gradients": "fewer virtual ranks keep fewer sums of gradients",
    "optimizer": "more ranks keep less of its state each; an optimizer with less state needs less",
    "activations": "a smaller --micro-batch, or activation checkpointing, needs less",
    "copies": "they replace a rank that dies: `unisono run --recover off` does without",
}


def as_text(plan: Plan) -> str:
    """Return a plan as lines for a terminal."""
    request, profile = plan.request, plan.profile
    share = f"{request.virtual_ranks} virtual ranks x {request.share} samples"
    if request.micro_batch < request.share:
        share += f", in micro-batches of {request.micro_batch}"
    lines = [
        f"{profile.model}: {format_count(profile.num_parameters)} parameters, {profile.optimizer}",
        f"batch {request.batch_size} = {share}",
        "",
    ]
    unit, unit_name = (1e9, "GB") if max(cost.memory.total for cost in plan.costs) >= 1e11 else (1e6, "MB")
    head = "".join(f"{name:>{width}}" for name, width in _COLUMNS)
    lines.append(f"{unit_name + ' of a rank':<{_NAME}}{head}{'step':>{_STEP}}")
    for cost in plan.costs:
        memory = cost.memory
        other = memory.copies + memory.holes + memory.base
        sizes = (memory.total, memory.parameters, memory.gradients, memory.optimizer, memory.activations, other)
        values = [*sizes, cost.sent_nbytes]
        row = "".join(f"{value / unit:>{width},.0f}" for value, (_, width) in zip(values, _COLUMNS, strict=True))
        keeps_limit = request.memory_nbytes is None or memory.total <= request.memory_nbytes
        mark = "" if keeps_limit else "  too large"
        lines.append(f"{cost.name:<{_NAME}}{row}{_seconds(cost.step_s):>{_STEP}}{mark}")
    lines += [
        "",
        "other: the process with torch, copies that replace a dead rank, and holes in the",
        "heap. sent: by a rank in a step. step: on cores as those here.",
    ]
    lines += [f"no {each.stages} stages: {each.reason}" for each in plan.uncut]
    if request.tries:
        lines += ["", f"{'trained here':<{_NAME}}{unit_name:>8}{'step':>{_STEP}}"]
        lines += [_trial(cost, unit, request.memory_nbytes) for cost in plan.costs]
    if plan.devices:
        lines += ["", f"{unit_name + ' of a rank with a GPU':<{_NAME + 8}}{'GPU':>8}{'CPU':>8}"]
        lines += [
            f"{each.name:<{_NAME + 8}}{each.device_nbytes / unit:>8,.0f}{each.host_nbytes / unit:>8,.0f}"
            for each in plan.devices
        ]
        lines.append("tensors at most in steps, without the process, CUDA, and gaps of its allocator.")
    return "\n".join([*lines, "", *_advice(plan)])


def _trial(cost: LayoutCost, unit: float, limit: int | None) -> str:
    """Return the line of a layout that was tried."""
    trial = cost.trial
    assert trial is not None
    if trial.why_not:
        told = f"{cost.name:<{_NAME}}  {trial.why_not}"
        return told if len(told) <= _WIDTH else f"{told[: _WIDTH - 1]}…"
    mark = "" if fits(cost, limit) else ", too large"
    figures = f"{trial.nbytes / unit:>8,.0f}{_seconds(trial.step_s):>{_STEP}}  {trial.steps} steps"
    return f"{cost.name:<{_NAME}}{figures}{mark}"


def _advice(plan: Plan) -> list[str]:
    request = plan.request
    limit = request.memory_nbytes
    chosen = recommend(plan.costs, limit)
    if chosen is None and limit is None:
        return ["No layout could be trained here."]
    if chosen is None:
        assert limit is not None
        least = min(plan.costs, key=lambda cost: cost.known_nbytes)
        part = largest_part(least.memory)
        needs = format_bytes(least.known_nbytes)
        return [
            f"Nothing fits {format_bytes(limit)}. {least.name} needs least, {needs}, most of it for",
            f"{part}: {_REMEDIES[part]}.",
        ]
    waits = f", waits {chosen.waiting:.0%} of the time for other stages" if chosen.waiting else ""
    fitting = "" if limit is None else f" of {format_bytes(limit)}"
    arguments = [f"virtual_ranks={request.virtual_ranks}"]
    if chosen.code:
        arguments.append(chosen.code)
    batches = ""
    if request.micro_batch < request.share:
        batches = f"    trainer.batches(data, batch_size={request.batch_size}, micro_batch_size={request.micro_batch})"
    return [
        f"Recommended: {chosen.name}, {format_bytes(chosen.known_nbytes)}{fitting} a rank, "
        f"{_seconds(chosen.known_step_s)} a step{waits}",
        f"    trainer = unisono.Trainer(model, optimizer, {', '.join(arguments)})",
        *([batches] if batches else []),
        f"    unisono run -n {chosen.ranks} train.py" if chosen.ranks > 1 else "    python train.py",
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{0 if seconds >= 0.01 else 1}f} ms" if seconds < 1 else f"{seconds:.3g} s"


def as_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON has it: sizes in bytes, times in seconds."""
    request = plan.request
    chosen = recommend(plan.costs, request.memory_nbytes)
    profile = {
        field.name: getattr(plan.profile, field.name)
        for field in dataclasses.fields(plan.profile)
        if field.name not in ("segments", "record")
    }
    return {
        "request": dataclasses.asdict(request),
        "profile": profile,
        "layouts": [_layout(cost, request.memory_nbytes) for cost in plan.costs],
        "uncut": [each._asdict() for each in plan.uncut],
        "devices": [each._asdict() for each in plan.devices],
        "recommended": None if chosen is None else chosen.name,
    }


def _layout(cost: LayoutCost, limit_nbytes: int | None) -> dict[str, Any]:
    memory = {**dataclasses.asdict(cost.memory), "total": cost.memory.total}
    return {**dataclasses.asdict(cost), "memory": memory, "fits": fits(cost, limit_nbytes)}
