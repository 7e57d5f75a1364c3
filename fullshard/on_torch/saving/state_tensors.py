"""A state as tensors by name: what a checkpoint of it holds, whatever the plan.

model.NAME              parameters (once, however tied) and persistent buffers
optimizer.NAME.KEY      an optimizer's tensors by the parameter they belong to, never by group
rng.RANK.cpu, .cuda     the generators of each rank, as bytes
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.checkpoint.manifest import TensorRecord
from fullshard.errors import FullshardError
from fullshard.on_torch.dtypes import PLAN_DTYPES, SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from fullshard.on_torch.private import persistent_buffers
from fullshard.on_torch.state import State
from fullshard.plan import Plan


def model_tensors(model: nn.Module, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """`values`: the parameters, where they are not the model's own (`State.values`)."""
    buffers = dict(model.named_buffers())
    persistent = persistent_buffers(model) if buffers else ()
    parameters = dict(model.named_parameters()) if values is None else values
    named = {**parameters, **{n: b for n, b in buffers.items() if n in persistent}}
    return {f"model.{name}": tensor for name, tensor in named.items()}


Slots = Mapping[str, Mapping[str, Any]]  # by the parameter's name: what an optimizer keeps of it, tensors and numbers


def optimizer_tensors(state: State, held: Slots | None = None) -> dict[str, Tensor]:
    """`held`: `all_slots`, where they are known."""
    found: dict[str, Tensor] = {}
    for name, entries in (all_slots(state) if held is None else held).items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                found[f"optimizer.{name}.{key}"] = value
    return found


def all_slots(state: State, values: Mapping[str, Tensor] | None = None) -> Slots:
    """Of each parameter that the optimizer holds. `values`: `State.values`, of whom they were asked already."""
    own = values if values is not None and not state.tiers else None
    return {name: slots(state, p) for name, p in _trained(state, own).items()}


def _trained(state: State, values: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """The parameters that the optimizer holds, by name. `values`: the model's own, to save a walk through it."""
    held = {id(p) for g in state.optimizer.param_groups for p in g["params"]} if state.optimizer else set()
    named = dict(state.model.named_parameters()) if values is None else values
    return {n: p for n, p in named.items() if id(p) in held}


def slots(state: State, p: nn.Parameter) -> dict[str, Any]:
    # `state` is a defaultdict: `[]` would make an entry
    return state.optimizer.state.get(p, {}) if state.optimizer else {}


def rng_tensors(state: State, rank: int) -> dict[str, Tensor]:
    found = {f"rng.{rank:05d}.cpu": torch.get_rng_state()}
    if state.device.type == "cuda":
        found[f"rng.{rank:05d}.cuda"] = torch.cuda.get_rng_state(state.device)
    return found


def numbers_of(state: State, held: Slots) -> dict[str, Any]:
    """What of a state, with these slots, is small: JSON."""
    other = {}
    for name, entries in held.items():
        plain = {k: v for k, v in entries.items() if not isinstance(v, Tensor)}
        if plain:
            other[name] = plain
    scale = state.loss_scale
    return {
        "world": torch.distributed.get_world_size(),
        "optimizer": type(state.optimizer).__name__ if state.optimizer else None,
        "without_slots": [n for n, entries in held.items() if not entries],
        "slots": other,
        "loss_scale": {"value": scale.value, "quiet": scale.quiet} if scale else None,
    }


def refuse_odd_numbers(saved: Mapping[str, Any]) -> None:
    """What `numbers_of` made comes back from a file: nothing is believed."""
    slots, scale = saved.get("slots", {}), saved.get("loss_scale")
    plain = isinstance(slots, dict) and all(isinstance(s, dict) and all(map(_is_number, s.values())) for s in slots.values())
    names = saved.get("without_slots", [])
    named = names == "all" or (isinstance(names, list) and all(isinstance(n, str) for n in names))
    scaled = scale is None or (isinstance(scale, dict) and all(isinstance(scale.get(k), int | float) for k in ("value", "quiet")))
    if not (plain and named and scaled):
        raise FullshardError("the state in its manifest makes no sense; use another checkpoint")


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)  # torch's SGD keeps a None


# -- what a state expects -----------------------------------------------------------------------------------


def expected_slots(optimizer: torch.optim.Optimizer, master: torch.dtype) -> dict[str, tuple[bool, torch.dtype | None]]:
    """For each key of the optimizer's state whether it is as large as its parameter, and its dtype if it is a
    tensor: found out by one step on a parameter of two elements."""
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    probe = nn.Parameter(torch.zeros(2, dtype=master))
    settings |= {"fused": False} if "fused" in settings else {}
    probe.grad = torch.ones_like(probe)
    try:
        trial = type(optimizer)([{"params": [probe], **settings}])  # type: ignore[call-arg]
        trial.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise FullshardError(
            f"what {type(optimizer).__name__} keeps of a parameter cannot be found out ({str(error).splitlines()[0]}); "
            "an optimizer of your own must be made from parameter groups alone"
        ) from None
    found = dict(trial.state[probe])
    return {k: (isinstance(v, Tensor) and v.ndim == 1, v.dtype if isinstance(v, Tensor) else None) for k, v in found.items()}


def wanted_slots(state: State, without: list[str] | str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The optimizer's tensors as they will be after a step, without those of the parameters `without`: names, or `all`."""
    if state.optimizer is None or without == "all":
        return {}
    kinds = expected_slots(state.optimizer, PLAN_DTYPES[state.plan.precision.master])
    found = {}
    for name, p in _trained(state).items():
        for key, (as_large, dtype) in kinds.items() if name not in without else ():
            if dtype is not None:
                found[f"optimizer.{name}.{key}"] = (p.shape if as_large else torch.Size(()), dtype)
    return found


def needed_bytes(state: State) -> int:
    """The bytes of a whole checkpoint of this state, but for headers and the manifest."""
    wide = PLAN_DTYPES[state.plan.precision.master].itemsize
    sizes = [t.numel() * (wide if isinstance(t, nn.Parameter) else t.element_size()) for t in model_tensors(state.model).values()]
    return sum(sizes) + sum(shape.numel() * dtype.itemsize for shape, dtype in wanted_slots(state, []).values())


def described(tensors: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {n: (tuple(t.shape), SAFETENSORS_NAMES[t.dtype]) for n, t in tensors.items()}


def weights_of(model: nn.Module, plan: Plan) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of the weights that a checkpoint of this model under this plan has; the model may be on meta."""
    parameters = {f"model.{n}" for n, _ in model.named_parameters()}
    found = described(model_tensors(model))
    return {
        n: (shape, SAFETENSORS_NAMES[PLAN_DTYPES[plan.precision.master]] if n in parameters else dtype)
        for n, (shape, dtype) in found.items()
    }


# -- filling ------------------------------------------------------------------------------------------------


def make_slots(state: State, tensors: Mapping[str, TensorRecord]) -> dict[str, dict[str, Tensor]]:
    """Empty optimizer tensors, shaped and sharded for this state, for all that a checkpoint has; by parameter."""
    trained = _trained(state)
    made: dict[str, dict[str, Tensor]] = {}
    for full, record in tensors.items():
        name, _, key = full.removeprefix("optimizer.").rpartition(".")
        if full.startswith("optimizer.") and name in trained:
            made.setdefault(name, {})[key] = _slot(state, trained[name], key, record)
    return made


def _slot(state: State, p: nn.Parameter, key: str, record: TensorRecord) -> Tensor:
    assert state.optimizer is not None
    if state.tiers and state.tiers.holds(p):  # its moments have their place already
        shown = slots(state, p).get(key)
        return shown if isinstance(shown, Tensor) else torch.zeros(record.shape, dtype=SAFETENSORS_DTYPES[record.dtype])
    if tuple(record.shape) == tuple(p.shape) and p.ndim:
        return torch.zeros_like(p, dtype=SAFETENSORS_DTYPES[record.dtype], requires_grad=False)
    group = next(g for g in state.optimizer.param_groups if any(q is p for q in g["params"]))
    on_device = group.get("fused") or group.get("capturable")  # where torch keeps the count of steps
    return torch.zeros(record.shape, dtype=SAFETENSORS_DTYPES[record.dtype], device=state.device if on_device else "cpu")


def set_slots(state: State, made: Mapping[str, dict[str, Tensor]], other: Mapping[str, dict[str, Any]]) -> None:
    """Give the optimizer these tensors, and the plain numbers beside them."""
    if state.optimizer is None:
        return
    for name, p in _trained(state).items():
        if state.tiers and state.tiers.holds(p) and name not in made:  # they start from nothing
            for value in slots(state, p).values():
                value.zero_()
    state.optimizer.state.clear()
    for name, p in _trained(state).items():
        if name in made or name in other:
            state.optimizer.state[p] = {**made.get(name, {}), **other.get(name, {})}
