"""The tensors of a state by name, as a checkpoint holds them. The names do not depend on the plan.

model.NAME              parameters (tied ones once) and persistent buffers
optimizer.NAME.KEY      the optimizer's tensors, by parameter and never by group
rng.RANK.cpu, .cuda     the random generators of each rank, as bytes

An optimizer's state for one parameter is called its slots: `exp_avg`, `exp_avg_sq`, `step` and so on.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.manifest import TensorRecord
from fullshard.on_torch.optimizers.decoded_moment import DecodedMoment
from fullshard.on_torch.optimizers.low_bit_adam import LowBitAdam, low_bit_of
from fullshard.on_torch.optimizers.moment_codes import MomentFormat
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.private.torch_internals import persistent_buffers
from fullshard.on_torch.tensors.dtypes import PLAN_DTYPES, SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from fullshard.on_torch.tensors.shard_ranges import local_tensor, shadow
from fullshard.plan.plan import Plan


def model_tensors(model: nn.Module, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Parameters and persistent buffers. `values`: the parameters of `State.values`, if not those of the model."""
    buffers = dict(model.named_buffers())
    persistent = persistent_buffers(model) if buffers else ()
    parameters = dict(model.named_parameters()) if values is None else values
    named = {**parameters, **{n: b for n, b in buffers.items() if n in persistent}}
    return {f"model.{name}": tensor for name, tensor in named.items()}


ParameterSlots = Mapping[str, Mapping[str, Any]]  # parameter name: slot: tensor or number


def optimizer_tensors(state: State, slots: ParameterSlots | None = None) -> dict[str, Tensor]:
    """The tensors among the slots. `slots`: the result of `all_slots`, if the caller has it."""
    found: dict[str, Tensor] = {}
    for name, entries in (all_slots(state) if slots is None else slots).items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                found[f"optimizer.{name}.{key}"] = value
    return found


def all_slots(state: State, values: Mapping[str, Tensor] | None = None) -> ParameterSlots:
    """The slots of each parameter that the optimizer updates. `values`: the result of `State.values`, if the caller has it."""
    own = values if values is not None and not state.offload else None
    found = {name: slots_of(state, p) for name, p in _trained(state, own).items()}
    coded = coded_slots(state)
    return {name: {**entries, **coded.get(name, {})} for name, entries in found.items()} if coded else found


def coded_slots(state: State) -> dict[str, dict[str, Tensor]]:
    """The slots of resident parameters that are stored as bytes: tensors on meta stand for their values."""
    optimizer = coded_optimizer(state)
    found: dict[str, dict[str, Tensor]] = {}
    named = dict(state.model.named_parameters())
    for name, key in coded_moments(state):
        assert optimizer is not None
        if slots_of(state, p := named[name]):
            like = torch.empty_like(local_tensor(p), dtype=optimizer.moments.saved, device="meta")
            found.setdefault(name, {})[key] = shadow(p, like)
    return found


def coded_items(state: State) -> dict[str, DecodedMoment]:
    """Where the values of `coded_slots` are read from, by their names in a checkpoint."""
    optimizer, named = coded_optimizer(state), dict(state.model.named_parameters())
    found = {}
    for name, keys in coded_slots(state).items():
        for i, key in enumerate(keys):
            assert optimizer is not None
            raw = partial(_raw, optimizer.moments, slots_of(state, named[name])[key])
            found[f"optimizer.{name}.{key}"] = DecodedMoment(raw, optimizer.moments, i == 0)
    return found


def coded_optimizer(state: State) -> LowBitAdam | None:
    """The state's optimizer, if its moments are stored as bytes."""
    optimizer = low_bit_of(state.optimizer)
    return optimizer if optimizer is not None and optimizer.moments.coded else None


def coded_moments(state: State) -> list[tuple[str, str]]:
    """Parameter and slot of the moments of resident parameters that are stored as bytes."""
    optimizer = coded_optimizer(state)
    if optimizer is None:
        return []
    resident = [n for n, p in _trained(state).items() if not (state.offload and state.offload.holds(p))]
    return [(name, key) for name in resident for key in optimizer.how.rule.keys]


def _raw(moments: MomentFormat, stored: Tensor, low: int, high: int) -> Tensor:
    return moments.part(stored, low, high)


def _trained(state: State, values: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """The parameters that the optimizer updates, by name. `values`: the model's parameters, to save a walk through it."""
    trained = {id(p) for g in state.optimizer.param_groups for p in g["params"]} if state.optimizer else set()
    named = dict(state.model.named_parameters()) if values is None else values
    return {n: p for n, p in named.items() if id(p) in trained}


def slots_of(state: State, p: nn.Parameter) -> dict[str, Any]:
    # `state` is a defaultdict: `[]` would add an entry
    return state.optimizer.state.get(p, {}) if state.optimizer else {}


def rng_tensors(state: State, rank: int) -> dict[str, Tensor]:
    found = {f"rng.{rank:05d}.cpu": torch.get_rng_state()}
    if state.device.type == "cuda":
        found[f"rng.{rank:05d}.cuda"] = torch.cuda.get_rng_state(state.device)
    return found


def numbers_of(state: State, slots: ParameterSlots) -> dict[str, Any]:
    """The parts of a state that are not tensors, as JSON for the manifest."""
    numbers = {}
    for name, entries in slots.items():
        plain = {k: v for k, v in entries.items() if not isinstance(v, Tensor)}
        if plain:
            numbers[name] = plain
    scale = state.loss_scale
    return {
        "engine": state.engine,
        "world": torch.distributed.get_world_size(),
        "optimizer": type(state.optimizer).__name__ if state.optimizer else None,
        "without_slots": [n for n, entries in slots.items() if not entries],
        "slots": numbers,
        "loss_scale": {"value": scale.value, "quiet": scale.quiet} if scale else None,
    } | ({"files": state.files} if state.files else {})


# -- the tensors that a state expects -----------------------------------------------------------------------


def slot_types(optimizer: torch.optim.Optimizer, master: torch.dtype) -> dict[str, tuple[bool, torch.dtype | None]]:
    """For each slot, whether it has its parameter's shape, and its dtype (None if it is not a tensor). Found by one step
    of such an optimizer on a parameter of two elements."""
    if (low_bit := low_bit_of(optimizer)) is not None:
        return {"step": (False, torch.float32), **dict.fromkeys(low_bit.how.rule.keys, (True, low_bit.moments.saved))}
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    probe = nn.Parameter(torch.zeros(2, dtype=master))
    settings |= {"fused": False} if "fused" in settings else {}
    probe.grad = torch.ones_like(probe)
    try:
        trial = type(optimizer)([{"params": [probe], **settings}])  # type: ignore[call-arg]
        trial.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise FullshardError(
            f"the state of {type(optimizer).__name__} cannot be determined ({str(error).splitlines()[0]}); "
            "an optimizer of your own must be constructible from parameter groups alone"
        ) from None
    found = dict(trial.state[probe])
    return {k: (isinstance(v, Tensor) and v.ndim == 1, v.dtype if isinstance(v, Tensor) else None) for k, v in found.items()}


def expected_slots(state: State, without: list[str] | str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of the optimizer's tensors after a step. `without`: parameters that have none, or `all`."""
    if state.optimizer is None or without == "all":
        return {}
    types = slot_types(state.optimizer, PLAN_DTYPES[state.plan.precision.master])
    found = {}
    for name, p in _trained(state).items():
        for key, (like_parameter, dtype) in types.items() if name not in without else ():
            if dtype is not None:
                found[f"optimizer.{name}.{key}"] = (p.shape if like_parameter else torch.Size(()), dtype)
    return found


def checkpoint_bytes(state: State) -> int:
    """The size of a checkpoint of this state, without headers and manifest."""
    master = PLAN_DTYPES[state.plan.precision.master].itemsize
    tensors = model_tensors(state.model).values()
    weights = sum(t.numel() * (master if isinstance(t, nn.Parameter) else t.element_size()) for t in tensors)
    return weights + sum(shape.numel() * dtype.itemsize for shape, dtype in expected_slots(state, []).values())


def shapes_and_dtypes(tensors: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {n: (tuple(t.shape), SAFETENSORS_NAMES[t.dtype]) for n, t in tensors.items()}


def weights_of(model: nn.Module, plan: Plan) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each weight in a checkpoint of this model under this plan. The model may be on meta."""
    parameters = {f"model.{n}" for n, _ in model.named_parameters()}
    master = SAFETENSORS_NAMES[PLAN_DTYPES[plan.precision.master]]
    found = shapes_and_dtypes(model_tensors(model))
    return {n: (shape, master if n in parameters else dtype) for n, (shape, dtype) in found.items()}


# -- loading ------------------------------------------------------------------------------------------------


def make_slots(
    state: State, tensors: Mapping[str, TensorRecord], expected: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, dict[str, Tensor]]:
    """Zeroed slots for the optimizer tensors of a checkpoint, sharded as this state is; by parameter and slot. `expected`: the
    result of `expected_slots`."""
    trained = _trained(state)
    made: dict[str, dict[str, Tensor]] = {}
    for full, record in tensors.items():
        name, _, key = full.removeprefix("optimizer.").rpartition(".")
        if full.startswith("optimizer.") and name in trained:
            dtype = expected[full][1] if full in expected else SAFETENSORS_DTYPES[record.dtype]
            made.setdefault(name, {})[key] = _slot(state, trained[name], key, record, dtype)
    return made


def _slot(state: State, p: nn.Parameter, key: str, record: TensorRecord, dtype: torch.dtype) -> Tensor:
    assert state.optimizer is not None
    if state.offload and state.offload.holds(p):  # offloaded state has its memory already
        existing = slots_of(state, p).get(key)
        return existing if isinstance(existing, Tensor) else torch.zeros(record.shape, dtype=dtype)
    coded = coded_optimizer(state)
    if coded is not None and key in coded.how.rule.keys:
        return coded.zeros(p)
    if tuple(record.shape) == tuple(p.shape) and p.ndim:
        return torch.zeros_like(p, dtype=dtype, requires_grad=False)
    group = next(g for g in state.optimizer.param_groups if any(q is p for q in g["params"]))
    on_device = group.get("fused") or group.get("capturable")  # torch then keeps the step count on the device
    return torch.zeros(record.shape, dtype=dtype, device=state.device if on_device else "cpu")


def set_slots(state: State, tensors: Mapping[str, dict[str, Tensor]], numbers: Mapping[str, dict[str, Any]]) -> None:
    """Replace the optimizer's state by these tensors and numbers, both by parameter and slot."""
    if state.optimizer is None:
        return
    for name, p in _trained(state).items():
        if state.offload and state.offload.holds(p) and name not in tensors:  # offloaded state starts from zero
            for value in slots_of(state, p).values():
                value.zero_()
    state.optimizer.state.clear()
    for name, p in _trained(state).items():
        if name in tensors or name in numbers:
            state.optimizer.state[p] = {**tensors.get(name, {}), **numbers.get(name, {})}
