"""Runs on ranks for `test_low_bit`: training with moments in few bits, and what it is held against."""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard import on_torch
from fullshard.on_torch.optimizers.adam_update import rule_of
from fullshard.on_torch.optimizers.low_bit_adam import make_low_bit_adam
from fullshard.on_torch.optimizers.low_bit_update import LowBitRule
from fullshard.on_torch.tensors.shard_ranges import local_part, local_tensor, shadow
from fullshard.plan.plan import Precision
from fullshard.planner.memory.peak_memory import at_rest
from tests.cpu import homes
from tests.cpu.homes import Case, apart, batches, make, train, values

ADAMW = fs.AdamW(lr=1e-2, weight_decay=0.1)
README = Path(__file__).parents[2] / "README.md"


def own_gradient(name: str, p: torch.Tensor, step: int) -> torch.Tensor:
    """Of the whole parameter, with elements of all sizes."""
    draw = torch.Generator().manual_seed(len(name) + 100 * step)
    size = torch.logspace(-6, 0, p.numel()).view(p.shape)
    return torch.randn(p.shape, generator=draw) * size


def sharded_and_whole(precision: Precision, strategy: str, arguments: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """Steps with given gradients on shards, and on whole parameters: how far each parameter and moment ends apart."""
    plan = getattr(fs, strategy)(on_torch.describe(on_torch.load_model("llama-nano")), precision=precision, **arguments)
    state = on_torch.shard(on_torch.load_model("llama-nano"), plan, ADAMW)
    named = dict(state.model.named_parameters())
    whole = {n: nn.Parameter(p.full_tensor().detach().clone()) for n, p in named.items()}
    how, groups = LowBitRule.of(precision, rule_of(ADAMW)), [{"params": list(whole.values())}]
    alone = make_low_bit_adam(torch.optim.AdamW, how, {id(p): n for n, p in whole.items()}, groups, **_settings(state))
    for step in range(steps):
        for n, p in named.items():
            gradient = own_gradient(n, whole[n], step).to(p.dtype)
            whole[n].grad, p.grad = gradient, shadow(p, local_part(gradient, p).contiguous())
        state.optimizer.step()
        alone.step()
    found: dict[str, list[float]] = {"parameter": [], "exp_avg": [], "exp_avg_sq": []}
    for n, p in named.items():
        found["parameter"].append(_apart(local_tensor(p.detach()), local_part(whole[n].detach(), p)))
        for key in ("exp_avg", "exp_avg_sq"):
            mine, theirs = state.optimizer.state[p][key], alone.state[whole[n]][key]
            if precision.moments == "int8":
                mine, theirs = state.optimizer.shown(p, key, mine), alone.shown(whole[n], key, theirs)
            found[key].append(_apart(local_tensor(mine), local_part(theirs, p)))
    return found


def _settings(state: on_torch.State) -> dict[str, Any]:
    return {k: state.optimizer.param_groups[0][k] for k in ("lr", "betas", "eps", "weight_decay")}


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def resumed(case: Case, other: Case, checkpoint_dir: str) -> float:
    """Six steps, with a checkpoint of the third from which another state goes on: how far apart they end."""
    with tempfile.TemporaryDirectory() as disk:
        first = train(replace(case, steps=3), disk)["state"]
        fs.checkpoint.save(checkpoint_dir, first)
        second = make(other, disk)
        fs.checkpoint.load(checkpoint_dir, second)
        loaded = apart(values(first), values(second)) if case.moments == other.moments else 0.0
        for s in range(3, 6):
            for state in (first, second):
                on_torch.train_step(state, batches(state, s), clip=case.clip, lr=1e-2)
        return max(loaded, apart(values(first), values(second)))


def converted(case: Case, other: Case, checkpoint_dir: str) -> dict[str, float]:
    """A checkpoint loaded under other moments: how far each kind of tensor is, as a share of its largest."""
    with tempfile.TemporaryDirectory() as disk:
        first = train(replace(case, steps=3), disk)["state"]
        fs.checkpoint.save(checkpoint_dir, first)
        second = make(other, disk)
        fs.checkpoint.load(checkpoint_dir, second)
        one, two, found = values(first), values(second), {}
        for name in one:
            kind = name.rpartition(".")[2] if "exp_avg" in name else "other"
            if one[name].numel():
                scale = one[name].abs().max().clamp(min=1e-30)
                found[kind] = max(found.get(kind, 0.0), float((one[name] - two[name]).abs().max() / scale))
        on_torch.train_step(second, batches(second, 3), clip=case.clip)
        second.flush()
        return found


def dict_round_trip(case: Case) -> float:
    """`state_dict()` of the optimizer into another one, then a step with both: how far apart they end."""
    with tempfile.TemporaryDirectory() as disk:
        first = train(replace(case, steps=3), disk)["state"]
        second = make(case, disk)
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        for state in (first, second):
            on_torch.train_step(state, batches(state, 3), clip=case.clip)
        return apart(values(first), values(second))


def saved_whole(case: Case, checkpoint_dir: str) -> None:
    with tempfile.TemporaryDirectory() as disk:
        fs.checkpoint.save(checkpoint_dir, train(replace(case, steps=3), disk)["state"])


def loaded_moments(case: Case, checkpoint_dir: str) -> dict[str, torch.Tensor]:
    """The moments of a checkpoint, whole, as this world has them."""
    with tempfile.TemporaryDirectory() as disk:
        state = make(case, disk)
        fs.checkpoint.load(checkpoint_dir, state)
        found = {}
        for name, p in state.model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                slot = state.optimizer.state[p][key]
                shown = state.optimizer.shown(p, key, slot) if slot.dtype is torch.uint8 else slot
                found[f"{name}.{key}"] = shown.full_tensor() if hasattr(shown, "full_tensor") else shown
        return found


def held(case: Case) -> dict[str, Any]:
    """Bytes of optimizer state after a step: counted, of fp32 moments, and the planner's."""
    with tempfile.TemporaryDirectory() as disk:
        state = train(replace(case, steps=1), disk)["state"]
        state.flush()
        description = on_torch.describe(on_torch.load_model(case.model))
        found: dict[str, Any] = {"planned": at_rest(state.plan, description, 2), "counted": state.held_bytes()["optimizer"]}
        found["parts"] = [local_tensor(p).numel() for p in state.model.parameters()]
        if state.offload:
            memory = state.offload.memory
            kept = [[t.nbytes for t in u.state.flats or []] for u in memory.units if u.home.optimizer == "host"]
            found["host"] = sum(map(sum, kept))
            found["file"] = memory.state_file.file.nbytes if memory.state_file else 0
            found["pieces"] = [p.elements for u in memory.units for p in u.pieces]
            found["moved"] = homes.moved(case)["moved"]
        return found


def byte_batches(steps: int) -> Callable[[int], list[dict[str, torch.Tensor]]]:
    text = torch.tensor(list(README.read_bytes())) % homes.VOCABULARY

    def draw(step: int) -> list[dict[str, torch.Tensor]]:
        at = torch.randint(0, len(text) - 33, (16,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([text[i : i + 33] for i in at])
        return [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]}]

    return draw


def losses(precisions: list[Precision], steps: int) -> list[float]:
    """The mean loss of the last ten steps of a small model on text, under each precision."""
    found, draw = [], byte_batches(steps)
    for precision in precisions:
        model = on_torch.load_model("llama-nano")
        description = on_torch.describe(model)
        plan = fs.zero3(description, devices=dist.get_world_size(), precision=precision, batch=fs.Batch(16, 32))
        state = on_torch.shard(model, plan, fs.AdamW(lr=1e-2, weight_decay=0.1))
        each = [float(on_torch.train_step(state, draw(s), clip=1.0).loss) for s in range(steps)]
        found.append(sum(each[-10:]) / 10)
    return found


def refusals(cases: list[Case]) -> list[str]:
    """What is said to each case; to one that can be, what is said to an optimizer of the caller's own."""
    said = []
    for case in cases:
        try:
            state = make(case, "")
            state.optimizer = torch.optim.AdamW(state.parameters())
            said.append("")
        except fs.FullshardError as error:
            said.append(str(error))
    return said
