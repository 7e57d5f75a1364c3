"""One training step on shards: micro-batches in, updated parameters out."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.base.errors import FullshardError, checked_call, expect_number
from fullshard.on_torch.communication.quantized_collectives import relative_errors
from fullshard.on_torch.loss.batch_checks import refuse_batches
from fullshard.on_torch.loss.losses import Loss, LossFunction, as_loss, label_count, summed_loss
from fullshard.on_torch.loss.objective_losses import CAUSAL_LOSSES
from fullshard.on_torch.model.batch_norm import average_statistics
from fullshard.on_torch.offload.updates import gradient_norms
from fullshard.on_torch.optimizers.one_pass_adam import OnePassAdam
from fullshard.on_torch.optimizers.sharded_optimizer import gradients, square_norm, step_unless
from fullshard.on_torch.parallelize.forward_errors import explained
from fullshard.on_torch.parallelize.inference import inference
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.ranks.device_meshes import all_reduce_sum
from fullshard.on_torch.ranks.unit_log import explained_losses
from fullshard.on_torch.step import first_step_checks
from fullshard.on_torch.step.phase_clock import Clock
from fullshard.on_torch.step.transaction import Transaction
from fullshard.on_torch.step.unit_norms import trained_units, unit_squares
from fullshard.on_torch.step.unit_order import same_units
from fullshard.on_torch.tensors.batch_tree import on_device

OutOfMemory = torch.OutOfMemoryError


@dataclass(frozen=True)
class StepResult:
    """A step's numbers, as tensors on the device: reading one waits for the step."""

    index: int
    loss: Tensor  # mean over all that counts, of all ranks
    grad_norm: Tensor  # before clipping
    count: Tensor  # what the loss was divided by: tokens, rows or pixels of all ranks
    skipped: Tensor  # whether a gradient was not finite, so that nothing was updated
    flagged: Tensor  # for each of `flags`, whether any rank raised it
    metrics: dict[str, Tensor]  # means over all ranks, by the names that the loss function gave
    clock: Clock  # forward, backward, update
    unit_norms: dict[str, Tensor] = field(default_factory=dict)  # gradient norms by unit, if they were asked for

    def numbers(self) -> list[float]:
        """loss, grad_norm, count, skipped, then each flag, each metric and each unit's norm. Waits for the device once."""
        scalars = [t.double() for t in (self.loss, self.grad_norm, self.count, self.skipped, *self.flagged.double().unbind())]
        return torch.stack([*scalars, *self.metrics.values(), *self.unit_norms.values()]).tolist()

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase on this rank's device."""
        return self.clock.seconds()


CALL = "train_step(state, [batch]), with a list of plan.batch.accumulate batches"


@checked_call(CALL, state=State, micro_batches=Sequence, loss=Callable, clip=(Real, NoneType), lr=(Real, NoneType))  # type: ignore[arg-type]
def train_step(
    state: State,
    micro_batches: Sequence[Any],
    *,
    loss: LossFunction = summed_loss,
    clip: float | None = None,
    lr: float | None = None,
    flags: Sequence[bool] = (),
    unit_norms: bool = False,
) -> StepResult:
    """Forward, backward and update over the plan's micro-batches. Collective.

    The gradient is that of the mean loss over all that counts in the step (labelled tokens, rows, pixels), however it is
    spread over ranks and micro-batches. `loss` takes the model and a batch, any tree of tensors, and returns a `Loss`. `lr`:
    the learning rate of this step. A gradient that is not finite changes neither weights nor optimizer. `flags` travel with
    the step's own sums, so that ranks agree on something at no cost. `unit_norms`: the result has the gradient norm of each
    unit. The first step also runs the checks of `first_step_checks`.
    """
    _set_rate(state, clip, lr)
    batches = [on_device(b, state.device) for b in micro_batches]
    refuse_batches(batches, state.plan, loss)
    with _transaction(state) as step:
        first = state.checks
        if state.work:
            state.work.look()
            state.work.begin()
        if first:
            first_step_checks.before_first_step(state, batches, loss)
        labels = _count_ahead(batches, loss)
        known = None if labels is None else _over_ranks(labels, state)
        if first and known is not None:
            first_step_checks.check_labels(known)
        clock = Clock(state.device)
        # Gradients are rescaled at the end unless the count was exact from the start.
        exact = known is not None or len(batches) == 1
        before = _begin_offload(state, clip, exact=exact) if state.offload else None
        with _measured_wire(state, first=first):
            sums = _forward_backward(state, batches, loss, known, clock)
        step.computed()
        if first:
            _drop_unused(state)
            first_step_checks.after_first_backward(state, sums.count, list(sums.metrics))
        parts = gradients(state.resident())
        units = trained_units(state) if unit_norms else []
        norms, raised, totals = _over_all_ranks(state, sums, parts, units, flags)
        if state.work and state.work.borrows and not first:
            _drop_unused(state)
            parts = gradients(state.resident())
        norm, *of_units = norms.unbind()
        skipped = _update(state, parts, norm, clip, sums.rescale, before)
        step.undo_if(skipped)
        clock.mark("update")
        state.step, state.checks = state.step + 1, False
        state.copies.begin_step()
        total, *pairs = totals.unbind()
        metrics = {name: _mean(*pairs[2 * i : 2 * i + 2]) for i, name in enumerate(sums.metrics)}
        by_unit = dict(zip(units, of_units, strict=True))
        return StepResult(state.step, _mean(total, sums.count), norm, sums.count, skipped, raised > 0, metrics, clock, by_unit)


def _set_rate(state: State, clip: float | None, lr: float | None) -> None:
    """Check the numbers of a step, and give the optimizer its learning rate."""
    if state.optimizer is None:
        raise FullshardError("this state has no optimizer; write shard(model, plan, optimizer=fullshard.AdamW(lr=...))")
    if clip is not None and clip != math.inf:
        expect_number("train_step: clip", clip, zero=False)
    if lr is not None:
        expect_number("train_step: lr", lr)
    for group in state.optimizer.param_groups if lr is not None else []:
        group["lr"] = lr


@contextmanager
def _transaction(state: State) -> Iterator[Transaction]:
    """Inside, the engine takes gradients and counts the step. Afterwards the caller may. An exception undoes the step."""
    step = Transaction(state)
    try:
        with _own_step(state), explained(state.model, state.plan), explained_losses():
            yield step
    except BaseException as error:
        step.undo(error)
        raise


@contextmanager
def _own_step(state: State) -> Iterator[None]:
    """Gradients belong to the engine inside, and to the caller afterwards, also after an exception."""
    state.stepping = True
    state.copies.changed()  # whoever wrote to weights since the last step
    # Only a kernel that clips and updates in one pass takes gradients in another dtype than its parameters.
    one_pass = isinstance(state.optimizer, OnePassAdam)
    by_torch = state.plan.precision.low_bit and state.device.type != "cuda"
    state.computed_gradients.on = state.plan.keeps_computed_gradients and one_pass and not by_torch
    try:
        yield
    finally:
        state.stepping = state.computed_gradients.on = False
        if state.offload:
            state.offload.end()


def _begin_offload(state: State, clip: float | None, *, exact: bool) -> dict[str, int] | None:
    """Decide when offloaded units are updated, before the first micro-batch. `exact`: gradients are not rescaled at the end.
    Returns fingerprints of the first step's weights, which these updates may change early."""
    assert state.offload is not None
    first = state.checks
    whole = first and state.plan.backlog is None  # the checks look at whole gradients first, if there is room for them
    alike = state.work is None or not state.work.borrows  # else what no rank used is known late
    now = clip is None and state.loss_scale is None and exact and alike and not whole
    before = first_step_checks.fingerprints(state) if first else None
    state.offload.begin(eager=now, draining=not now and not first and alike)
    return before


def _drop_unused(state: State) -> None:
    """What no rank has used in this step has no gradient, as without shards. Collective."""
    if state.work is not None:
        dropped = state.work.drop_unused()
        if state.offload:
            state.offload.drop(dropped)


def _over_all_ranks(
    state: State, sums: "_Sums", parts: dict[int, list[Tensor]], units: list[str], flags: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """By one collective: the norm of all gradients and those of `units`, how many ranks raised each flag, and the loss and the
    metrics with their counts. The norm is NaN, which skips the update, if ranks have not computed the same units."""
    square = square_norm(parts, state.device) + (
        gradient_norms.square_norm(state.offload.units, state.device) if state.offload else 0.0
    )
    squares = [torch.stack([square]), *([unit_squares(state, units)] if units else [])]
    work = state.work.summands() if state.work else []
    given = torch.tensor([*work, *map(float, flags)], dtype=torch.float64).to(state.device, non_blocking=True)
    own = torch.stack([sums.loss.double(), *[t for pair in sums.metrics.values() for t in pair]]) / state.plan.mesh.tensor
    found = all_reduce_sum(torch.cat([*squares, given, own]))
    norms, works, raised, totals = found.split([1 + len(units), len(work), len(flags), len(own)])
    norms = norms.sqrt() * (1.0 if sums.rescale is None else sums.rescale) / (state.loss_scale.value if state.loss_scale else 1.0)
    if state.work:
        norms = norms.masked_fill(state.work.differs(given[: len(work)], works), torch.nan)
    return norms, raised, totals


@checked_call("evaluate(state, [batch, ...])", state=State, batches=Iterable)
def evaluate(state: State, batches: Iterable[Any], *, loss: LossFunction = summed_loss) -> dict[str, float]:
    """The mean `loss` over all that counts in all ranks' batches, and the means of the loss function's metrics. Ranks may have
    different numbers of batches. Collective."""
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    iterator = iter(batches)
    batch = next(iterator, None)
    if (having := _how_many(batch is not None, state)) < dist.get_world_size():
        raise FullshardError(
            f"evaluate: only {having} of {dist.get_world_size()} ranks have a batch; give every rank at least one"
        )
    assert batch is not None
    last = batch
    average_statistics(state.model)
    state.copies.changed()  # whoever wrote to weights since the last forward
    with explained(state.model, state.plan), explained_losses(), inference(state.model):
        while _how_many(batch is not None, state):
            last = on_device(last if batch is None else batch, state.device)
            value = as_loss(loss(state.model, last), last, state.device)  # a rank that has run out computes along, for nothing
            found = {"loss": (value.sum, value.count), **value.metrics}
            _add(sums, found, start=not sums, weight=0.0 if batch is None else 1.0)
            batch = next(iterator, None)
    totals = all_reduce_sum(torch.stack([t for pair in sums.values() for t in pair]))
    if not totals[1]:
        raise FullshardError("evaluate: no batch has anything that counts; mark the tokens that count in `labels`")
    return {name: float(_mean(*totals[2 * i : 2 * i + 2])) for i, name in enumerate(sums)}


def _how_many(has: bool, state: State) -> int:
    """The number of ranks on which `has` is true."""
    return int(all_reduce_sum(torch.tensor(int(has), device=state.device)))


def loss_factor(state: State, counts: Iterable[Tensor | float]) -> Tensor:
    """For a loop of your own: what to multiply each micro-batch's summed loss by before `backward`. Collective.

    `counts`: what each micro-batch of this rank's step counts. FSDP averages gradients over ranks; with this factor the
    average is the gradient of the mean over all that counts, on all ranks and in all micro-batches, as in `train_step`.
    """
    own = torch.stack([torch.as_tensor(c, dtype=torch.float64, device=state.device) for c in counts]).sum()
    return (state.plan.mesh.data / _divisor(_over_ranks(own, state))).float()


@contextmanager
def _measured_wire(state: State, *, first: bool) -> Iterator[None]:
    """Measure the errors of quantised collectives inside, in the first step."""
    meter = state.wire_meter if first else None
    if meter is None:
        yield
        return
    meter.on = True
    try:
        yield
    finally:
        meter.on = False
    state.wire_errors = relative_errors(meter, state.device)


# -- forward and backward ------------------------------------------------------------------------------------


@dataclass
class _Sums:
    """What forward and backward found. `loss` and `metrics` are of this rank, `count` is of all. `rescale`: what the gradients
    must still be multiplied by, if the count was not known when they were computed."""

    loss: Tensor
    count: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]
    rescale: Tensor | None = None


def _count_ahead(batches: list[Any], loss: LossFunction) -> Tensor | None:
    """What this rank's step counts, by its labels; None if only the loss function can tell."""
    return torch.stack([label_count(b["labels"]) for b in batches]).sum() if loss in CAUSAL_LOSSES else None


def _over_ranks(count: Tensor, state: State) -> Tensor:
    """The sum over ranks; those of a tensor group count the same."""
    return all_reduce_sum(count.clone()) / state.plan.mesh.tensor


def _divisor(count: Tensor) -> Tensor:
    """The count, or 1 where nothing counted."""
    return torch.where(count > 0, count, torch.ones_like(count))


def _mean(total: Tensor, count: Tensor) -> Tensor:
    return total / _divisor(count)


def _forward_backward(state: State, batches: list[Any], loss: LossFunction, known: Tensor | None, clock: Clock) -> _Sums:
    """Compute the gradients of all micro-batches. Where the count is not `known`, the first micro-batch's is taken for all
    until the last is counted."""
    divisor = None if known is None else _divisor(known)
    found = _Sums(torch.zeros((), device=state.device), torch.zeros((), dtype=torch.float64, device=state.device), {})
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        _set_sync(state, last=last)
        with same_units(state):
            value = loss(state.model, batch)
        value = as_loss(value, batch, state.device) if known is None else Loss(value, found.count)
        clock.mark("forward")
        if divisor is None:
            divisor = _divisor(_over_ranks(torch.as_tensor(value.count), state) * len(batches))
        if state.offload:
            state.offload.loss_known(found.loss + value.sum.detach(), last=last)
        # FSDP averages over ranks: the factor makes that average the gradient of the mean over all that counts.
        factor = state.plan.mesh.data / divisor * (state.loss_scale.value if state.loss_scale else 1.0)
        with same_units(state):
            (value.sum * factor.to(value.sum.dtype)).backward()
        clock.mark("backward")
        found.loss += value.sum.detach()
        if known is None:
            found.count = found.count + value.count
            _add(found.metrics, value.metrics, start=i == 0)
    if state.offload:
        state.offload.backward_done()
    assert divisor is not None
    found.count = _over_ranks(found.count, state) if known is None else known
    if known is None and len(batches) > 1:
        found.rescale = _mean(divisor, found.count)
    return found


def _add(sums: dict[str, tuple[Tensor, Tensor]], more: Mapping[str, Any], *, start: bool, weight: float = 1.0) -> None:
    """Add pairs of sum and count by name. `start`: these are the first."""
    if not start and sums.keys() != more.keys():
        raise FullshardError(
            f"the loss function returned the metrics {', '.join(more) or '(none)'} after {', '.join(sums) or '(none)'}; return "
            "the same names for every batch"
        )
    for name, (total, count) in more.items():
        before = (0.0, 0.0) if start else sums[name]
        sums[name] = (before[0] + total.detach().double() * weight, before[1] + count * weight)


def _set_sync(state: State, *, last: bool) -> None:
    """Which units reduce their gradients after this micro-batch, and which stay whole until the last."""
    if state.plan.batch.accumulate == 1:
        return
    for unit in state.plan.units:
        waits = unit.layout == "optimizer" or state.plan.batch.sync == "last"
        for module in state.unit_modules[unit.name]:
            module.set_requires_gradient_sync(last or not waits, recurse=False)
            module.set_reshard_after_backward(last or unit.layout != "optimizer", recurse=False)


def _update(
    state: State,
    parts: dict[int, list[Tensor]],
    norm: Tensor,
    clip: float | None,
    rescale: Tensor | None,
    before: dict[str, int] | None,
) -> Tensor:
    """Unscale, clip and step. Returns whether the step was skipped because a gradient was not finite.

    `rescale`: as in `_Sums`. `before`: fingerprints of the first step, if units were updated already.
    """
    assert state.optimizer is not None
    skipped = ~norm.isfinite()
    factors = []
    if state.loss_scale is not None:
        factors.append(torch.tensor(1.0 / state.loss_scale.value, device=state.device))
    if clip is not None:
        factors.append((clip / (norm + 1e-6)).clamp(max=1.0))
    if rescale is not None:
        factors[-1:] = [factors[-1] * rescale if factors else rescale]
    compares = state.checks and not bool(skipped)
    if compares and before is None:
        before = first_step_checks.fingerprints(state)
    step_unless(skipped, state.optimizer, parts, factors)
    if state.offload:
        state.offload.update(factors, skipped)
    if compares and before is not None:
        first_step_checks.after_first_update(state, before)
    state.optimizer.zero_grad()
    if state.loss_scale is not None:
        state.loss_scale.update(bool(skipped))
    return skipped
