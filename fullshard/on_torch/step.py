"""One training step on shards: micro-batches in, updated parameters out."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from types import NoneType

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.errors import FullshardError, checked_call, expect_number
from fullshard.on_torch import checks
from fullshard.on_torch.batch_checks import on_device, refuse_batches
from fullshard.on_torch.clock import Clock
from fullshard.on_torch.inference import inference
from fullshard.on_torch.loss import IGNORED, HostBatch, LossFunction, TensorBatch, summed_loss
from fullshard.on_torch.ranks import all_reduce_sum
from fullshard.on_torch.sharded_optimizer import gradients, scale, square_norm, step_unless
from fullshard.on_torch.state import State

OutOfMemory = torch.OutOfMemoryError


@dataclass(frozen=True)
class StepResult:
    """A step's numbers, as tensors on the device: reading one waits for the step."""

    index: int
    loss: Tensor  # mean over all tokens of all ranks
    grad_norm: Tensor  # before clipping
    tokens: Tensor  # over all ranks
    skipped: Tensor  # whether a gradient was not finite, so that nothing was updated
    flagged: Tensor  # for each of `flags`, whether any rank raised it
    clock: Clock  # forward, backward, update

    def numbers(self) -> list[float]:
        """loss, grad_norm, tokens, skipped, then each flag. Waits for the device once."""
        scalars = torch.stack([t.double() for t in (self.loss, self.grad_norm, self.tokens, self.skipped)])
        return torch.cat([scalars, self.flagged.double()]).tolist()

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase on this rank's device."""
        return self.clock.seconds()


CALL = "train_step(state, [batch]), with a list of plan.batch.accumulate dicts of input_ids and labels"


@checked_call(CALL, state=State, micro_batches=Sequence, loss=Callable, clip=(Real, NoneType), lr=(Real, NoneType))  # type: ignore[arg-type]
def train_step(
    state: State,
    micro_batches: Sequence[HostBatch],
    *,
    loss: LossFunction = summed_loss,
    clip: float | None = None,
    lr: float | None = None,
    flags: Sequence[bool] = (),
) -> StepResult:
    """Forward, backward and update over the plan's micro-batches. Collective.

    The gradient is that of the mean loss over all labelled tokens of the step, however they are spread over ranks and micro-
    batches. `lr`: the learning rate of this step. A gradient that is not finite changes neither weights nor optimizer.
    `flags` travel with the step's own sums, so that ranks agree on something at no cost. The first step also runs the checks
    of `checks`.
    """
    if state.optimizer is None:
        raise FullshardError("this state has no optimizer; write shard(model, plan, optimizer=fullshard.AdamW(lr=...))")
    if clip is not None and clip != math.inf:
        expect_number("train_step: clip", clip, zero=False)
    if lr is not None:
        expect_number("train_step: lr", lr)
    for group in state.optimizer.param_groups if lr is not None else []:
        group["lr"] = lr
    batches = [on_device(b, state.device) for b in micro_batches]
    refuse_batches(batches, state.plan, loss)
    with _own_step(state):
        return _train_step(state, batches, loss, clip, flags)


@contextmanager
def _own_step(state: State) -> Iterator[None]:
    """Inside, the engine takes gradients and counts the step. Afterwards, also after an exception, the caller may."""
    state.stepping = True
    try:
        yield
    finally:
        state.stepping = False
        if state.tiers:
            state.tiers.end()


def _train_step(
    state: State, batches: list[TensorBatch], loss: LossFunction, clip: float | None, flags: Sequence[bool]
) -> StepResult:
    first = state.checks
    if first:
        checks.before_first_step(state, batches, loss)
    tokens = all_reduce_sum(_count(batches)) / state.plan.mesh.tensor
    if first:
        checks.check_labels(tokens)
    clock = Clock(state.device)
    before = None
    if state.tiers:
        whole = first and state.plan.backlog is None  # the checks look at whole gradients first, if there is room for them
        now = clip is None and state.loss_scale is None and not whole
        before = checks.fingerprints(state) if first else None
        state.tiers.begin(eager=now, draining=not now and not first)
    summed = _forward_backward(state, batches, loss, tokens, clock)
    if first:
        checks.after_first_backward(state)
    parts = gradients(state.resident())
    raised = torch.tensor([float(f) for f in flags], dtype=torch.float64).to(state.device, non_blocking=True)
    square = square_norm(parts, state.device) + (state.tiers.square_norm() if state.tiers else 0.0)
    own = torch.stack([square, summed.double() / state.plan.mesh.tensor])
    totals = all_reduce_sum(torch.cat([own, raised]))
    norm = totals[0].sqrt() / (state.loss_scale.value if state.loss_scale else 1.0)
    skipped = _update(state, parts, norm, clip, before)
    clock.mark("update")
    state.step, state.checks = state.step + 1, False
    return StepResult(state.step, totals[1] / tokens.clamp(min=1), norm, tokens, skipped, totals[2:] > 0, clock)


@checked_call("evaluate(state, [batch, ...]), with dicts of input_ids and labels", state=State, batches=Iterable)
def evaluate(state: State, batches: Iterable[HostBatch], *, loss: LossFunction = summed_loss) -> float:
    """The mean loss over all tokens of all ranks' batches; ranks may have different numbers of them. Collective."""
    totals = torch.zeros(2, dtype=torch.float64, device=state.device)
    iterator = iter(batches)
    batch = next(iterator, None)
    if (having := _how_many(batch is not None, state)) < dist.get_world_size():
        raise FullshardError(
            f"evaluate: only {having} of {dist.get_world_size()} ranks have a batch; give every rank at least one"
        )
    assert batch is not None
    last = batch
    with inference(state.model):
        while _how_many(batch is not None, state):
            last = on_device(batch or last, state.device)
            value = loss(state.model, last)  # a rank that has run out computes along, for nothing
            if batch is not None:
                totals += torch.stack([value.double(), _count([last])])
            batch = next(iterator, None)
    all_reduce_sum(totals)
    if not totals[1]:
        raise FullshardError("evaluate: no token of any batch has a label; mark the tokens that count in `labels`")
    return float(totals[0] / totals[1])


def _how_many(has: bool, state: State) -> int:
    """The number of ranks on which `has` is true."""
    return int(all_reduce_sum(torch.tensor(int(has), device=state.device)))


def _forward_backward(state: State, batches: list[TensorBatch], loss: LossFunction, tokens: Tensor, clock: Clock) -> Tensor:
    """Compute the gradients of all micro-batches. Returns the sum of the losses."""
    # FSDP averages over ranks: the factor makes that average the gradient of the mean over tokens.
    factor = state.plan.mesh.data / tokens.clamp(min=1) * (state.loss_scale.value if state.loss_scale else 1.0)
    summed = torch.zeros((), device=state.device)
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        _set_sync(state, last=last)
        value = loss(state.model, batch)
        clock.mark("forward")
        if state.tiers:
            state.tiers.loss_known(summed + value.detach(), last=last)
        (value * factor.to(value.dtype)).backward()
        clock.mark("backward")
        summed += value.detach()
    if state.tiers:
        state.tiers.backward_done()
    return summed


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
    state: State, parts: dict[int, list[Tensor]], norm: Tensor, clip: float | None, before: dict[str, int] | None
) -> Tensor:
    """Unscale, clip and step. Returns whether the step was skipped because a gradient was not finite.

    `before`: fingerprints of the first step, if units were updated already.
    """
    assert state.optimizer is not None
    skipped = ~norm.isfinite()
    factors = []
    if state.loss_scale is not None:
        factors.append(torch.tensor(1.0 / state.loss_scale.value, device=state.device))
    if clip is not None:
        factors.append((clip / (norm + 1e-6)).clamp(max=1.0))
    for factor in factors:
        scale(parts, factor)
    compares = state.checks and not bool(skipped)
    if compares and before is None:
        before = checks.fingerprints(state)
    step_unless(skipped, state.optimizer)
    if state.tiers:
        state.tiers.update(factors, skipped)
    if compares and before is not None:
        checks.after_first_update(state, before)
    state.optimizer.zero_grad()
    if state.loss_scale is not None:
        state.loss_scale.update(bool(skipped))
    return skipped


def _count(batches: list[TensorBatch]) -> Tensor:
    """The number of labelled tokens, as a tensor, without waiting for the device."""
    return torch.stack([(b["labels"] != IGNORED).sum() for b in batches]).sum().double()
