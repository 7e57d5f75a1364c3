"""Torch's Adam and AdamW with unscaling, clipping and update in one pass over memory, on a GPU.

The optimizers are torch's own in all but `step`: same state, same settings, same names. Without Triton, or where its results
differ from torch's, they are torch's own altogether.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fullshard.base.errors import FullshardError
from fullshard.on_torch.optimizers.adam_update import Rule, apply_rule
from fullshard.on_torch.private.torch_internals import adam_lists
from fullshard.on_torch.tensors.shard_ranges import local_tensor
from fullshard.on_torch.tensors.usable_kernel import Found, usable_kernel


class OnePassAdam:
    """Replaces the step of torch's fused Adam. `grad_factors`: what the next step multiplies gradients by, one after the
    other. `grad_scale`, `found_inf`: as for torch's optimizers, which `torch.amp.GradScaler` sets: what gradients are divided
    by, and whether the step changes nothing."""

    grad_factors: Tensor | None = None
    kind: str

    @torch.no_grad()
    def step(self: Any, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, factors = getattr(self, "grad_scale", None), self.grad_factors
        self.grad_factors = None  # they are this step's
        if scale is not None:
            factors = torch.cat([scale.reciprocal().float().reshape(1), *([] if factors is None else [factors])])
        for group in self.param_groups:
            _refuse_settings(group)
            self.update_group(group, factors, getattr(self, "found_inf", None))
        return loss

    def update_group(self, group: dict[str, Any], factors: Tensor | None, skip: Tensor | None) -> None:
        """Update the parameters of a group. `skip`: nothing changes if it is not 0."""
        parameters, gradients, first, second, steps = adam_lists(self, group)
        if not parameters:
            return
        kernel = find_one_pass(self.kind)[0] if parameters[0].is_cuda else None
        skip = torch.zeros((), device=steps[0].device) if skip is None else skip
        torch._foreach_add_(steps, 1.0 - skip)
        powers = kernel.step_powers(steps, group) if kernel is not None else steps
        for i, tensors in enumerate(zip(parameters, gradients, first, second, strict=True)):
            p, g, m, v = map(local_tensor, tensors)
            update = _update_by_torch if kernel is None else kernel.update_parameter
            update(self.kind, (p, g.contiguous(), m, v), factors, skip, powers[i], group)


def _refuse_settings(group: dict[str, Any]) -> None:
    for name in ("amsgrad", "maximize", "differentiable"):
        if group.get(name):
            raise FullshardError(
                f"{name} = True has no effect on this optimizer, which clips and updates in one pass; leave it out, or write "
                f"state.optimizer = torch.optim.AdamW(state.parameters(), {name}=True)"
            )


def _update_by_torch(
    kind: str,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    factors: Tensor | None,
    skip: Tensor,
    step: Tensor,
    group: dict[str, Any],
) -> None:
    """`triton_one_pass.update_parameter` for a parameter that is not on a GPU, in several passes. Saving steps such a one, to
    see what state the optimizer keeps."""
    parameter, gradient, *moments = tensors
    gradient = gradient.float()
    for factor in () if factors is None else factors:
        gradient = gradient * factor
    if not skip:
        apply_rule(Rule(kind, ("exp_avg", "exp_avg_sq")), parameter, gradient, moments, int(step), group)


@cache
def one_pass(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """A subclass of torch's Adam or AdamW, of the same name, since checkpoints have it."""
    return type(kind.__name__, (OnePassAdam, kind), {"kind": kind.__name__.lower(), "__doc__": kind.__doc__})


@cache
def find_one_pass(kind: str) -> Found:
    """The module `triton_one_pass` for Adam or AdamW, or None and the reason."""

    def find() -> ModuleType | None:
        from fullshard.on_torch.optimizers import triton_one_pass

        return triton_one_pass if triton_one_pass.gives_torchs_bits(kind, torch.device("cuda")) else None

    return usable_kernel("clipping and update in one pass", find)
