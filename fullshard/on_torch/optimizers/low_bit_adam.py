"""Torch's Adam and AdamW over resident parameters, with moments in few bits.

Settings, names and step counts are torch's. `state_dict()` has moments as values: `int8` ones are decoded to fp32.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.base.errors import FullshardError
from fullshard.on_torch.optimizers.low_bit_kernel import find_low_bit
from fullshard.on_torch.optimizers.low_bit_update import LowBitRule, element_range
from fullshard.on_torch.optimizers.moment_codes import NEAREST, ElementRange, MomentFormat
from fullshard.on_torch.optimizers.one_pass_adam import OnePassAdam
from fullshard.on_torch.tensors.shard_ranges import local_part, local_tensor, shadow

ParameterState = dict[str, Any]


class LowBitAdam(OnePassAdam):
    """`how`: the update. `ranges`: which elements of each parameter this rank has, by id."""

    how: LowBitRule
    ranges: dict[int, ElementRange]

    @property
    def moments(self) -> MomentFormat:
        return self.how.moments

    def update_group(self: Any, group: dict[str, Any], factors: Tensor | None, skip: Tensor | None) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [self.state_of(p) for p in parameters]
        if not parameters:
            return
        steps = [s["step"] for s in states]
        kernel = find_low_bit(self.how, parameters[0].dtype)[0] if parameters[0].is_cuda else None
        if kernel is not None:
            return self._update_by_triton(kernel, group, parameters, factors, skip)
        if skip is not None and bool(skip):
            return
        torch._foreach_add_(steps, 1.0)
        for p, state, step in zip(parameters, states, torch.stack(steps).tolist(), strict=True):
            own = [] if factors is None else list(factors)
            master, gradient, *moments = self._flat(p, state)
            self.how.update_by_torch(master, gradient, moments, int(step), group, self.ranges[id(p)], own)

    def _update_by_triton(
        self: Any,
        kernel: ModuleType,
        group: dict[str, Any],
        parameters: list[Tensor],
        factors: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """Reads on the device whether to skip: the host does not wait."""
        steps = [self.state[p]["step"] for p in parameters]
        skip = torch.zeros((), device=steps[0].device) if skip is None else skip
        torch._foreach_add_(steps, 1.0 - skip)
        powers = kernel.step_powers(steps, group)
        for i, p in enumerate(parameters):
            tensors = tuple(self._flat(p, self.state[p]))
            kernel.update_low_bit(self.how, tensors, factors, skip, powers[i], steps[i], group, self.ranges[id(p)])

    def _flat(self, p: Tensor, state: ParameterState) -> list[Tensor]:
        """This rank's parts of the parameter, its gradient and its stored moments."""
        assert p.grad is not None
        master, *moments = (local_tensor(t).detach().view(-1) for t in (p, *(state[key] for key in self.how.rule.keys)))
        return [master, local_tensor(p.grad).contiguous().view(-1), *moments]  # a copy of another one would take the update

    def state_of(self: Any, p: nn.Parameter) -> ParameterState:
        """The parameter's state; zeros if it has none yet."""
        if not self.state.get(p):
            step = torch.zeros((), dtype=torch.float32, device=p.device)
            self.state[p] = {"step": step} | {key: self.zeros(p) for key in self.how.rule.keys}
        return self.state[p]

    def zeros(self, p: nn.Parameter) -> Tensor:
        """A moment of zeros, as it is stored. Bytes are a plain tensor for this rank's part; values are cut like `p`."""
        if not self.moments.coded:
            return torch.zeros_like(p, dtype=self.moments.dtype, requires_grad=False)
        part = local_tensor(p)
        return torch.zeros(self.moments.size(part.numel()), dtype=self.moments.dtype, device=part.device)

    def shown(self, p: nn.Parameter, key: str, stored: Tensor) -> Tensor:
        """A stored moment as values, cut like `p`."""
        part = local_tensor(p)
        values = self.moments.decode(stored, part.numel(), signed=key == self.how.rule.keys[0])
        return shadow(p, values.view(part.shape))

    def stored(self, p: nn.Parameter, key: str, values: Tensor) -> Tensor:
        """Values for a moment of `p`, cut like it or whole, as they are stored, rounded to the nearest."""
        part = local_tensor(values) if isinstance(values, DTensor) or not isinstance(p, DTensor) else local_part(values, p)
        found = self.zeros(p)
        flat = part.contiguous().view(-1).to(local_tensor(p).device, torch.float32)
        self.moments.encode(flat, NEAREST, local_tensor(found).view(-1), signed=key == self.how.rule.keys[0])
        return found

    # -- state dicts -------------------------------------------------------------------------------------------

    def hook_state_dicts(self: Any) -> None:
        self.register_state_dict_post_hook(_show_moments)
        self.register_load_state_dict_post_hook(_store_moments)


def make_low_bit_adam(
    kind: type[torch.optim.Optimizer], how: LowBitRule, names: dict[int, str], groups: list[dict[str, Any]], **settings: Any
) -> torch.optim.Optimizer:
    """An optimizer of torch's class and name. `names`: of the parameters, by id."""
    fields = {"kind": kind.__name__.lower(), "how": how, "__doc__": kind.__doc__}
    made: Any = type(kind.__name__, (LowBitAdam, kind), fields)(groups, fused=True, **settings)
    made.ranges = {id(p): element_range(names[id(p)], p) for group in groups for p in group["params"]}
    made.hook_state_dicts()
    return made


def low_bit_of(optimizer: torch.optim.Optimizer | None) -> LowBitAdam | None:
    """The optimizer, if its moments are low-bit."""
    return optimizer if isinstance(optimizer, LowBitAdam) else None


def _show_moments(optimizer: Any, found: dict[str, Any]) -> dict[str, Any]:
    if not optimizer.moments.coded:
        return found
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shown = {i: _shown_state(optimizer, parameters[i], own) for i, own in found["state"].items()}
    return found | {"state": shown}


def _shown_state(optimizer: LowBitAdam, p: nn.Parameter, own: ParameterState) -> ParameterState:
    keys = optimizer.how.rule.keys
    return {k: optimizer.shown(p, k, v) if k in keys and v.dtype is torch.uint8 else v for k, v in own.items()}


@torch.no_grad()
def _store_moments(optimizer: Any) -> None:
    """After torch has loaded a state dict: it converts all values to the parameters' dtype."""
    for p, own in optimizer.state.items():
        for key in optimizer.how.rule.keys:
            if key in own and own[key].dtype is not optimizer.moments.dtype:
                if own[key].shape != p.shape:
                    raise FullshardError(f"optimizer.load_state_dict: {key} is {list(own[key].shape)}, not {list(p.shape)}")
                own[key] = optimizer.stored(p, key, own[key])
