"""Runs on ranks for `test_own_loop`: the caller's own loop over `state.model` and `state.optimizer`, with every home."""

import copy
import gc
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import fullshard as fs
from fullshard import on_torch
from fullshard.on_torch.tensors.shard_ranges import local
from fullshard.plan.plan import Home
from tests.cpu import homes
from tests.cpu.homes import Case

STEPS = 4


def on_device(state: on_torch.State, step: int) -> list[dict[str, torch.Tensor]]:
    return [{k: v.to(state.device) for k, v in b.items()} for b in homes.batches(state, step)]


def backward(state: on_torch.State, step: int, factor: float = 1.0) -> None:
    """Gradients of the mean over all tokens of all micro-batches and, by FSDP's average, of all ranks."""
    found = on_device(state, step)
    for batch in found:
        loss = on_torch.summed_loss(state.model, batch) / (batch["labels"].numel() * len(found))
        (loss * factor).backward()


def own_step(state: on_torch.State, step: int, *, clip: float | None = None, to_none: bool = True) -> None:
    """As a loop for FSDP2 is written."""
    backward(state, step)
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), clip)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=to_none)


def scheduler(state: on_torch.State) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda s: 1 / (1 + s))


def own(case: Case, disk: str, *, to_none: bool = True) -> on_torch.State:
    state = homes.make(case, disk)
    rates = scheduler(state)
    for s in range(case.steps):
        own_step(state, s, clip=case.clip, to_none=to_none)
        rates.step()
    return state


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """‖one − other‖ / ‖other‖ over all weights: on a GPU, single elements of two equal runs may differ by an update."""
    names = [n for n in other if n.endswith("weight")]
    square = lambda tensors: sum(float(t.square().sum()) for t in tensors)
    return (square(one[n] - other[n] for n in names) / square(other[n] for n in names)) ** 0.5


def from_the_device(
    cases: list[Case], *, to_none: bool = True, distance: Callable[..., float] = homes.apart
) -> list[tuple[float, float, int]]:
    """How far each case's own loop is from the same with everything on the device, and from `train_step`; steps counted."""
    found, known = [], {}
    with tempfile.TemporaryDirectory() as disk:
        for case in cases:
            plain = homes.resident(case)
            if plain not in known:
                known[plain] = homes.values(own(plain, disk)), homes.train(plain, disk)["values"]
            state = own(case, disk, to_none=to_none)
            found.append((*(distance(homes.values(state), other) for other in known[plain]), state.step))
    return found


def unsharded(case: Case, world: int) -> dict[str, torch.Tensor]:
    """The same steps by one process with nothing but torch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = on_torch.load_model(case.model)
    on_torch.initialize(model, device, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for s in range(case.steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + s)
        for rank in range(world):
            draw = torch.Generator().manual_seed(1000 * s + rank)
            for _ in range(case.accumulate):
                ids = torch.randint(0, homes.VOCABULARY, (homes.ROWS, homes.LENGTH + 1), generator=draw).to(device)
                batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
                (on_torch.summed_loss(model, batch) / (batch["labels"].numel() * world * case.accumulate)).backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().cpu() for n, p in model.named_parameters()}


def from_torch(cases: list[Case]) -> list[float]:
    """The largest difference of any weight from the unsharded run's, as a share of the tensor's largest."""
    want, found = unsharded(cases[0], dist.get_world_size()), []
    with tempfile.TemporaryDirectory() as disk:
        for case in cases:
            state = own(case, disk)
            weights = whole(state.model.state_dict())
            found.append(max(float((weights[n] - t).abs().max() / t.abs().max()) for n, t in want.items()))
    return found


def whole(state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A model's state dict, gathered; on the host."""
    on_mesh = {n: t.to(t.device_mesh.device_type) for n, t in state_dict.items()}
    return {n: t.full_tensor().detach().cpu() for n, t in on_mesh.items()}


# -- batches that count differently ---------------------------------------------------------------------------


def uneven(state: on_torch.State, step: int) -> list[dict[str, torch.Tensor]]:
    """A step's micro-batches; how many labels count differs between ranks and micro-batches."""
    found = on_device(state, step)
    for i, batch in enumerate(found):
        batch["labels"] = batch["labels"].clone()
        batch["labels"][:, : 5 * i + 7 * on_torch.data_rank(state.plan.mesh)] = -100
    return found


def uneven_step(state: on_torch.State, step: int, clip: float | None, scaler: torch.amp.GradScaler | None = None) -> None:
    """As docs/guides/own-loop.md has it."""
    found = uneven(state, step)
    factor = on_torch.loss_factor(state, [(b["labels"] != -100).sum() for b in found])
    for batch in found:
        loss = on_torch.summed_loss(state.model, batch) * factor
        (scaler.scale(loss) if scaler else loss).backward()
    if scaler:
        scaler.unscale_(state.optimizer)
    if clip is not None:
        on_torch.clip_grad_norm_(state.parameters(), clip)
    if scaler:
        scaler.step(state.optimizer)
        scaler.update()
    else:
        state.optimizer.step()
    state.optimizer.zero_grad()


def uneven_against_train_step(cases: list[Case]) -> list[tuple[float, float, bool]]:
    """How far each case's own loop ends from `train_step`, how far that moved the weights, and whether both counted alike."""
    found = []
    with tempfile.TemporaryDirectory() as disk:
        for case in cases:
            own, engine, first = homes.make(case, disk), homes.make(case, disk), homes.values(homes.make(case, disk))
            scaler = torch.amp.GradScaler(own.device.type, init_scale=2.0**16) if case.compute == "fp16" else None
            for s in range(case.steps):
                uneven_step(own, s, case.clip, scaler)
                on_torch.train_step(engine, uneven(engine, s), clip=case.clip)
            ends = [homes.values(state) for state in (own, engine)]
            moved = homes.apart({n: ends[1][n] for n in first}, first)
            found.append((homes.apart(*ends), moved, own.step == engine.step == case.steps))
    return found


def resumed(case: Case, checkpoint_dir: str, *, own: bool = False) -> float:
    """How far a loop that was interrupted after three of six steps ends from one that was not. `own`: with the caller's
    optimizer."""
    with tempfile.TemporaryDirectory() as disk:
        (whole, rates), (state, later) = (_with_rates(case, disk, own=own) for _ in range(2))
        for s in range(6):
            if s == 3:
                fs.checkpoint.save(checkpoint_dir, whole, extra={"rates": rates.state_dict()})
            uneven_step(whole, s, 1.0)
            rates.step()
        saved = fs.checkpoint.load(checkpoint_dir, state).state["extra"]
        later.load_state_dict(saved["rates"])
        for group, lr in zip(state.optimizer.param_groups, later.get_last_lr(), strict=True):
            group["lr"] = lr
        while state.step < 6:
            uneven_step(state, state.step, 1.0)
            later.step()
        return homes.apart(homes.values(whole), homes.values(state))


def _with_rates(case: Case, disk: str, *, own: bool) -> tuple[on_torch.State, torch.optim.lr_scheduler.LRScheduler]:
    state = homes.make(replace(case, optimizer=None) if own else case, disk)
    if own:
        state.optimizer = torch.optim.NAdam(state.parameters(), lr=1e-2)
    return state, scheduler(state)


# -- what is stored of it ---------------------------------------------------------------------------------


def saved(cases: list[Case], checkpoint_dir: str) -> list[dict[str, Any]]:
    """A checkpoint after own steps, read by a state with everything on the device; and steps after a second one."""
    found = []
    with tempfile.TemporaryDirectory() as disk:
        for i, case in enumerate(cases):
            state, other = own(case, disk), homes.make(homes.resident(case), disk)
            first = homes.values(homes.make(case, disk))
            where = fs.checkpoint.save(f"{checkpoint_dir}/{i}", state)
            own_step(state, 100)
            again = fs.checkpoint.save(f"{checkpoint_dir}/{i}", state)
            fs.checkpoint.load(again, other)
            names = [w.rpartition("/")[2] for w in (where, again)]
            moved = homes.apart(*({n: t[n] for n in names_of(state)} for t in (homes.values(other), first)))
            found.append({"apart": homes.apart(homes.values(state), homes.values(other)), "names": names, "moved": moved})
    return found


def names_of(state: on_torch.State) -> list[str]:
    return [n for n, _ in state.model.named_parameters()]


def through_dcp(pairs: list[tuple[Case, Case]], where: str) -> list[dict[str, Any]]:
    """Own steps, DCP's save, its load into another state, and own steps in both: how far apart, before and after."""
    found = []
    with tempfile.TemporaryDirectory() as disk:
        for i, (one, other) in enumerate(pairs):
            first, second = own(one, disk), homes.make(other, disk)
            weights, moments = get_state_dict(first.model, first.optimizer)
            dcp.save({"model": weights, "optimizer": moments, "step": first.step}, checkpoint_id=f"{where}/{i}")
            kept = {n: local(t).clone() for n, t in weights.items()}
            own_step(first, 50)  # what a state dict shows stays as it was
            kept_apart = max(float((local(weights[n]) - kept[n]).abs().max()) for n in kept if kept[n].numel())
            on_torch.State.__setattr__(first, "step", first.step - 1)
            _load_dcp(first, f"{where}/{i}")
            _load_dcp(second, f"{where}/{i}")
            loaded = homes.apart(homes.values(first), homes.values(second))
            for s in range(3):
                for state in (first, second):
                    own_step(state, 60 + s, clip=1.0)
            end = homes.apart(homes.values(first), homes.values(second))
            away = [kept_apart] if all(h != Home() for h in one.homes) else []
            found.append({"loaded": loaded, "end": end, "kept": away, "steps": (first.step, second.step)})
    return found


def _load_dcp(state: on_torch.State, where: str) -> None:
    """As docs/guides/come-from-fsdp-ddp.md has it."""
    weights, moments = get_state_dict(state.model, state.optimizer)
    loaded = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(loaded, checkpoint_id=where)
    set_state_dict(state.model, state.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    state.step = loaded["step"]


def dcp_of_a_fresh_state(case: Case) -> dict[str, Any]:
    """A state dict before the first step changes nothing, and shows slots of all parameters."""
    with tempfile.TemporaryDirectory() as disk:
        state, plain = homes.make(case, disk), homes.make(case, disk)
        moments = get_optimizer_state_dict(state.model, state.optimizer)["state"]
        shown, counted = len(moments), state.step
        keys = {k for slot in moments.values() for k in slot}
        for s in range(3):
            own_step(state, s)
            own_step(plain, s)
        apart = homes.apart(homes.values(state), homes.values(plain))
        return {"shown": shown, "of": len(names_of(state)), "keys": keys, "apart": apart, "counted": counted}


def full_state_dicts(case: Case) -> float:
    """Whole weights on the host, by torch's options, against the masters."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with tempfile.TemporaryDirectory() as disk:
        state = own(case, disk)
        full = get_model_state_dict(state.model, options=options)
        with state.values() as masters:
            want = whole(masters)
    return max(float((full[n] - want[n]).abs().max()) for n in full) if dist.get_rank() == 0 else 0.0


def plain_state_dicts(case: Case) -> dict[str, float]:
    """`state_dict` and `load_state_dict` without DCP, of the whole model, of a block, and of the optimizer."""
    with tempfile.TemporaryDirectory() as disk:
        one, other = own(case, disk), homes.make(replace(case, share=0.0), disk)
        block = lambda state: state.model.model.layers[1]
        part = {n: local(t).clone() for n, t in block(one).state_dict().items()}
        block(other).load_state_dict(block(one).state_dict())
        loaded = {n: local(t) for n, t in block(other).state_dict().items()}
        inner = max(float((loaded[n] - t).abs().max()) for n, t in part.items() if t.numel())
        other.model.load_state_dict(one.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))  # torch's, of residents, are not copies
        apart = homes.apart(homes.values(one), homes.values(other))
        for s in range(2):
            own_step(one, 20 + s)
            own_step(other, 20 + s)
        return {"block": inner, "all": apart, "after": homes.apart(homes.values(one), homes.values(other))}


# -- beside train_step ------------------------------------------------------------------------------------


def mixed(case: Case, distance: Callable[..., float] = homes.apart) -> tuple[float, int, int]:
    """Own steps and the engine's in turn, against the engine's alone; and the steps counted in both."""
    with tempfile.TemporaryDirectory() as disk:
        state, plain = homes.make(case, disk), homes.make(homes.resident(case), disk)
        for s in range(6):
            if s % 3 == 1:
                own_step(state, s, clip=case.clip)
            else:
                on_torch.train_step(state, homes.batches(state, s), clip=case.clip)
            on_torch.train_step(plain, homes.batches(plain, s), clip=case.clip)
        return distance(homes.values(state), homes.values(plain)), state.step, plain.step


def after_a_step_that_was_given_up(case: Case) -> float:
    """An own step after a `train_step` that raised in its middle."""
    with tempfile.TemporaryDirectory() as disk:
        state, plain = homes.make(case, disk), homes.make(case, disk)
        for one in (state, plain):
            on_torch.train_step(one, homes.batches(one, 0), clip=case.clip)
        homes._raise_in_a_step(state, case)
        for one in (state, plain):
            own_step(one, 1, clip=case.clip)
        return homes.apart(homes.values(state), homes.values(plain))


def after_a_skipped_step(case: Case) -> float:
    """How far an own step moves the weights right after a `train_step` whose loss was no number."""
    with tempfile.TemporaryDirectory() as disk:
        state = homes.make(case, disk)
        on_torch.train_step(state, homes.batches(state, 0), clip=1.0)
        bad = on_torch.train_step(
            state, homes.batches(state, 1), clip=1.0, loss=lambda m, b: on_torch.summed_loss(m, b) * float("nan")
        )
        assert bool(bad.skipped)
        before = homes.values(state)
        own_step(state, 1)
        return homes.apart(homes.values(state), before)


def scaled(case: Case) -> dict[str, Any]:
    """fp16 by torch's GradScaler, with gradients unscaled by it or by the optimizer, beside a step that overflows."""
    found = {}
    with tempfile.TemporaryDirectory() as disk:
        for unscales in (False, True):
            ends = []
            for one in (case, homes.resident(case)):
                state = homes.make(one, disk)
                scaler = torch.amp.GradScaler(state.device.type, init_scale=2.0**12)
                for s in range(4):
                    backward(state, s, float(scaler.scale(torch.ones((), device=state.device))))
                    if s == 2:  # as an overflow leaves it
                        for p in state.model.parameters():
                            p.grad = p.grad * float("inf")
                    if unscales:
                        scaler.unscale_(state.optimizer)
                        torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
                    scaler.step(state.optimizer)
                    scaler.update()
                    state.optimizer.zero_grad()
                ends.append((homes.values(state), scaler.get_scale(), state.step))
            (a, scale, steps), (b, plain_scale, _) = ends
            finite = all(bool(t.isfinite().all()) for t in a.values())
            found[unscales] = (homes.apart(a, b), scale, plain_scale, steps, finite)
    return found


# -- refusals -----------------------------------------------------------------------------------------------


def refusals(case: Case) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as disk:
        state = homes.make(case, disk)
        said: dict[str, Callable[[], object]] = {
            "closure": lambda: state.optimizer.step(lambda: torch.zeros(())),
            "replaced": lambda: setattr(state, "optimizer", torch.optim.AdamW(state.parameters())),
            "stranger": lambda: torch.optim.SGD(state.parameters(), lr=1e-2).step(),
            "shape": lambda: state.optimizer.load_state_dict(_cut(state.optimizer.state_dict())),
        }
        found = {name: sentence(call) for name, call in said.items()}
        return found | {"gone": sentence(lambda: outlived(case, disk)(torch.zeros(1, 4, dtype=torch.long)))}


def outlived(case: Case, disk: str) -> torch.nn.Module:
    """A model whose state nobody holds."""
    model = homes.make(case, disk).model
    gc.collect()
    return model


def _cut(found: dict[str, Any]) -> dict[str, Any]:
    found["state"][0]["exp_avg"] = torch.zeros(3)
    return found


def sentence(call: Callable[[], object]) -> str:
    try:
        call()
    except fs.FullshardError as error:
        return str(error)
    return "accepted"


def of_ones_own(checkpoint_dir: str) -> dict[str, Any]:
    """A state whose optimizer is the caller's: saved, counted, loaded and trained on."""
    with tempfile.TemporaryDirectory() as disk:
        states = []
        for _ in range(2):
            state = homes.make(Case(optimizer=None), disk)
            state.optimizer = torch.optim.NAdam(state.parameters(), lr=1e-2)
            states.append(state)
        first, second = states
        for s in range(2):
            own_step(first, s)
            fs.checkpoint.save(checkpoint_dir, first)
        fs.checkpoint.load(checkpoint_dir, second)
        loaded = homes.apart(homes.values(first), homes.values(second))
        keys = {n.rpartition(".")[2] for n in homes.values(second) if not n.endswith("weight")}
        for state in states:
            own_step(state, 2)
            on_torch.train_step(state, homes.batches(state, 3))
        end = homes.apart(homes.values(first), homes.values(second))
        return {"loaded": loaded, "end": end, "steps": (first.step, second.step), "keys": keys}


def saved_twice(checkpoint_dir: str) -> dict[str, Any]:
    """A step that is saved again: the same state, another, and another that is meant to replace it."""
    with tempfile.TemporaryDirectory() as disk:
        state = homes.make(Case(optimizer=None), disk)
        mine = torch.optim.AdamW(state.parameters(), lr=1e-2)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fs.checkpoint.save(checkpoint_dir, state)
        same = sentence(lambda: fs.checkpoint.save(checkpoint_dir, state))
        backward(state, 0)
        mine.step()
        other = sentence(lambda: fs.checkpoint.save(checkpoint_dir, state))
        meant = sentence(lambda: fs.checkpoint.save(checkpoint_dir, state, overwrite=True))
        return {"said": [str(w.message) for w in said], "same": same, "other": other, "meant": meant}


class WholeMatrices(torch.optim.Optimizer):
    """As Muon and its like: momentum in a plain buffer, and a product of whole matrices."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for g in self.param_groups for p in g["params"] if p.ndim == 2):
            buffer = self.state[p].setdefault("buffer", torch.zeros(p.shape))
            buffer.lerp_(p.grad, 0.1)
            p.sub_(buffer @ buffer.mT @ buffer, alpha=0.1)


class OwnCollectives(torch.optim.Optimizer):
    """As optimizers that reduce gradients themselves."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for g in self.param_groups for p in g["params"]):
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.sub_(p.grad, alpha=0.1)


class Broken(torch.optim.Optimizer):
    """With a mistake that has nothing to do with shards."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        raise ValueError("no such group")


def unfit_optimizers() -> dict[str, str]:
    """What is said of the first step, of an own loop and of `train_step`."""
    found = {}
    for kind in (WholeMatrices, OwnCollectives, Broken):
        state = homes.make(Case(), "")
        state.optimizer = kind(state.parameters())
        torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda step: 0.5)
        for way in ("own", "engine"):
            try:
                if way == "engine":
                    on_torch.train_step(state, homes.batches(state, 0))
                else:
                    backward(state, 0)
                    state.optimizer.step()
                found[f"{kind.__name__} {way}"] = "accepted"
            except Exception as error:
                found[f"{kind.__name__} {way}"] = f"{type(error).__name__}: {error}"
            state.optimizer.zero_grad()
    return found
