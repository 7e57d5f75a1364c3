"""Runs on ranks for `test_homes`: training with state in other homes, and what it is held against."""

import functools
import gc
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch
from fullshard.on_torch.offload.updates import gpu_lane
from fullshard.on_torch.optimizers.adam_update import apply_rule
from fullshard.on_torch.optimizers.low_bit_adam import low_bit_of
from fullshard.on_torch.optimizers.packed_masters import pack, unpack
from fullshard.on_torch.tensors.shard_ranges import local
from fullshard.plan import update_pieces
from fullshard.plan.plan import Home
from fullshard.planner.strategies import choose

ROWS, LENGTH, VOCABULARY = 2, 16, 64
ADAMW = fs.AdamW(lr=1e-2, weight_decay=0.1, decay_all=False)


@dataclass(frozen=True)
class Case:
    """`homes`: of the units in turn."""

    homes: tuple[Home, ...] = (Home(),)
    share: float = 0.5
    clip: float | None = 1.0
    accumulate: int = 2
    sync: str = "every"
    strategy: str = "zero3"
    arguments: tuple[tuple[str, Any], ...] = ()
    compute: str = "fp32"
    reduce: str = "fp32"
    master: str = "fp32"
    moments: str | None = None
    rounding: str = "nearest"
    optimizer: Any = ADAMW
    model: str = "llama-nano"
    frozen: str = ""
    remat: str = "none"
    steps: int = 4
    backlog: int | None = None

    def __str__(self) -> str:
        changed = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(Case(), k) and k not in ("homes", "optimizer")]
        kind = [type(self.optimizer).__name__] if self.optimizer != Case().optimizer else []
        return " ".join([*(str(h) for h in self.homes), *changed, *kind])


def resident(case: Case) -> Case:
    """The same with everything on the device, where nothing is shared out."""
    return replace(case, homes=(Home(),), backlog=None, share=Case.share)


def make(case: Case, disk: str) -> on_torch.State:
    update_pieces.PIECE = 1 << 10  # so that a unit of a small model has several
    model = on_torch.load_model(case.model)
    for name, p in model.named_parameters():
        p.requires_grad_(not (case.frozen and case.frozen in name))
    plan = choose(
        case.strategy,
        on_torch.describe(model),
        devices=dist.get_world_size(),
        batch=fs.Batch(ROWS, LENGTH, case.accumulate, case.sync),
        precision=fs.Precision(case.compute, case.reduce, case.master, moments=case.moments, rounding=case.rounding),
        remat=case.remat,
        **dict(case.arguments),
    )
    for i, unit in enumerate(plan.units):
        home = case.homes[i % len(case.homes)]
        block = unit.name.startswith(("model.layers", "transformer.h", "blocks"))
        plan = plan.change(unit.name, home=home if block else replace(home, activations="device"))
    on_disk = any("disk" in (u.home.params, u.home.optimizer, u.home.activations) for u in plan.units)
    away = any(u.home != replace(Home(), activations=u.home.activations) for u in plan.units)
    share = case.share if away else None
    plan = replace(plan, backlog=case.backlog)
    return on_torch.shard(model, plan, case.optimizer, disk=disk if on_disk else None, cpu_share=share)


def batches(state: on_torch.State, step: int) -> list[dict[str, torch.Tensor]]:
    """A step's own, so that a resumed run sees what the first one would have seen."""
    draw = torch.Generator().manual_seed(1000 * step + on_torch.data_rank(state.plan.mesh))
    ids = [torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=draw) for _ in range(state.plan.batch.accumulate)]
    return [{"input_ids": i[:, :-1], "labels": i[:, 1:]} for i in ids]


def train(case: Case, disk: str) -> dict[str, Any]:
    state = make(case, disk)
    numbers = [
        on_torch.train_step(state, batches(state, s), clip=case.clip, lr=1e-2 / (1 + s)).numbers()[:2] for s in range(case.steps)
    ]
    return {"numbers": numbers, "values": values(state), "state": state}


def values(state: on_torch.State) -> dict[str, torch.Tensor]:
    """Parameters and moments, by name."""
    low_bit = low_bit_of(state.optimizer)
    with state.values() as found:
        tensors = {n: local(t).double().clone().cpu() for n, t in found.items()}
        for name, p in state.model.named_parameters():
            for key, slot in state.optimizer.state.get(p, {}).items():
                if isinstance(slot, torch.Tensor) and slot.dtype is torch.uint8:
                    tensors[f"{name}.{key}"] = local(low_bit.shown(p, key, slot)).double().cpu()
                elif isinstance(slot, torch.Tensor):
                    tensors[f"{name}.{key}"] = local(slot).double().clone().cpu()
    return tensors


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(float((one[n] - other[n]).abs().max()) for n in one if one[n].numel())


@functools.cache
def on_the_device(case: Case) -> tuple[list, dict[str, torch.Tensor]]:
    """Numbers and values of a run without homes: it runs once in the ranks' life."""
    with tempfile.TemporaryDirectory() as disk:
        found = train(case, disk)
    return found["numbers"], found["values"]


def compare(cases: list[Case]) -> list[tuple[float, float]]:
    """How far each case is from the same run with everything on the device: numbers of steps, and all state."""
    found = []
    with tempfile.TemporaryDirectory() as disk:
        for case in cases:
            (wanted, reference), own = on_the_device(resident(case)), train(case, disk)
            pairs = zip(own["numbers"], wanted, strict=True)
            numbers = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
            found.append((numbers, apart(own["values"], reference)))
    return found


class ByTorch:
    """`triton_adam`, whose kernel needs a GPU, by torch's functions: a run of a piece in one call."""

    @staticmethod
    def words(rounded: torch.Tensor, state: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return rounded, list(state)

    @staticmethod
    def update_packed(rule, gradient, rounded, state, factors, step, group) -> None:
        low, first, second = state
        master, own = torch.empty_like(first), gradient.to(first.dtype)
        for factor in () if factors is None else factors:
            own = own * factor
        unpack(rounded, low, second, master)
        apply_rule(rule, master, own, [first, second], step, group)
        rounded.copy_(master)
        pack(master, rounded, low, second)


def by_one_kernel(cases: list[Case]) -> list[float]:
    """How far each case is from itself with a kernel for a run of a piece."""
    found, before = [], gpu_lane.triton_kernel
    with tempfile.TemporaryDirectory() as disk:
        for case in cases:
            plain = train(case, disk)
            gpu_lane.triton_kernel = lambda device, rule: ByTorch
            try:
                own = train(case, disk)
            finally:
                gpu_lane.triton_kernel = before
            assert own["state"].offload.gpu.triton_kernel is ByTorch
            assert own["state"].offload.moved() == plain["state"].offload.moved()
            found.append(apart(own["values"], plain["values"]))
    return found


def moved(case: Case) -> dict[str, Any]:
    """Bytes that the third step moved, and what the byte count by hand is made of."""
    with tempfile.TemporaryDirectory() as disk:
        state = make(case, disk)
        for s in range(3):
            if s == 2:
                state.flush()
                before = state.offload.moved()
            on_torch.train_step(state, batches(state, s), clip=case.clip)
        state.flush()
        after = state.offload.moved()
        by_lane = {"cpu": 0, "gpu": 0}
        for piece in (p for a in state.offload.units for p in a.pieces):
            by_lane[piece.lane] += piece.elements
        shards = sum(sum(a.padded) for a in state.offload.units)
        own = sum(local(p).numel() for p in state.model.parameters())
        units = {a.name: a.elements for a in state.offload.units}
        found = {k: after[k] - before[k] for k in after}
        return {"moved": found, "lanes": by_lane, "shards": shards, "own": own, "units": units, "plan": state.plan}


def skip(case: Case) -> dict[str, Any]:
    """A step whose loss is not a number, between steps that are fine."""
    with tempfile.TemporaryDirectory() as disk:
        state, plain = make(case, disk), make(resident(case), disk)
        skipped = []
        for s in range(4):
            poison = (lambda m, b: on_torch.summed_loss(m, b) * float("nan")) if s == 2 else on_torch.summed_loss
            for one in (state, plain):
                skipped.append(bool(on_torch.train_step(one, batches(one, s), clip=case.clip, loss=poison).skipped))
        return {"skipped": skipped, "apart": apart(values(state), values(plain))}


def late_nan(case: Case) -> str:
    """A finite loss whose gradient is not, without clipping: what the next step says."""
    with tempfile.TemporaryDirectory() as disk:
        state = make(case, disk)
        bad = lambda m, b: on_torch.summed_loss(m, b) + (m(b["input_ids"]).float().sum() * 0).sqrt()
        on_torch.train_step(state, batches(state, 0), clip=None)
        on_torch.train_step(state, batches(state, 1), clip=None, loss=bad)
        try:
            state.flush()
        except fs.FullshardError as error:
            return str(error)
    return ""


def carried(one: Case, other: Case, checkpoint_dir: str) -> float:
    """Save under one plan, load under another, train on in both: how far apart they end."""
    with tempfile.TemporaryDirectory() as disk:
        first = train(replace(one, steps=3), disk)["state"]
        fs.checkpoint.save(checkpoint_dir, first)
        second = make(other, disk)
        fs.checkpoint.load(checkpoint_dir, second)
        for s in range(3, 6):
            for state in (first, second):
                on_torch.train_step(state, batches(state, s), clip=one.clip, lr=1e-3)
        return apart(values(first), values(second))


def dealt(share: float, argument: float | None = None) -> tuple[float, str]:
    """Which part of the pieces the cores have under a plan that names it."""
    update_pieces.PIECE = 1 << 10
    model = on_torch.load_model("llama-nano")
    plan = fs.zero3(
        on_torch.describe(model), devices=1, batch=fs.Batch(ROWS, LENGTH), home=Home(optimizer="host"), cpu_share=share
    )
    try:
        state = on_torch.shard(model, plan, ADAMW, cpu_share=argument)
    except fs.FullshardError as error:
        return 0.0, str(error)
    given = [p.lane for a in state.offload.units for p in a.pieces]
    return round(given.count("cpu") / len(given), 2), ""


def saved_in_place(case: Case, checkpoint_dir: str) -> dict[str, Any]:
    """The same state saved through a copy in host memory and, where there is no room for one, from where it is."""
    with tempfile.TemporaryDirectory() as disk:
        state = train(replace(case, steps=3), disk)["state"]
        arenas, files, notes = [], [], []
        for room in (None, 1000):
            where = f"{checkpoint_dir}/{room}"
            writer = on_torch.Checkpointer(where, state, overlap=True, room=room)
            saving = writer.save()
            done = saving.done()
            saving.result()
            arenas.append(writer.staging.buffer.arena.nbytes)
            notes.append(saving.note)
            files.append({p.name: p.read_bytes() for p in Path(where).glob("step-*/shard-*")})
            writer.close()
        other = make(replace(case, homes=(Home(),)), disk)
        fs.checkpoint.load(f"{checkpoint_dir}/1000", other)
        found = {"apart": apart(values(state), values(other)), "same": files[0] == files[1] and len(files[0])}
        return found | {"arenas": arenas, "note": notes[1], "done": done}


def refusals(cases: list[Case], disks: list[str | None]) -> list[str]:
    said = []
    for case, disk in zip(cases, disks, strict=True):
        try:
            model = on_torch.load_model(case.model)
            plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), batch=fs.Batch(ROWS, LENGTH))
            for i, unit in enumerate(plan.units):
                plan = plan.change(unit.name, home=case.homes[i % len(case.homes)])
            on_torch.shard(model, plan, case.optimizer, disk=disk)
            said.append("")
        except fs.FullshardError as error:
            said.append(str(error))
    return said


def broken(home: Home) -> str:
    """A disk that fills up in the middle of a run: what is said."""
    with tempfile.TemporaryDirectory() as disk:
        state = make(Case((home,)), disk)
        on_torch.train_step(state, batches(state, 0), clip=1.0)
        state.flush()
        full = os.open("/dev/full", os.O_RDWR)
        memory = state.offload.memory
        os.dup2(full, (memory.params_file or memory.state_file).file.file)
        os.close(full)
        try:
            for s in range(1, 4):
                on_torch.train_step(state, batches(state, s), clip=1.0)
            state.flush()
        except fs.FullshardError as error:
            return str(error)
    return ""


def cut_short() -> str:
    """A file that has lost its end: what is said."""
    with tempfile.TemporaryDirectory() as disk:
        state = make(Case((Home("disk", "host"),)), disk)
        on_torch.train_step(state, batches(state, 0), clip=1.0)
        state.flush()
        os.ftruncate(state.offload.memory.params_file.file.file, 4096)
        try:
            for s in range(1, 3):
                on_torch.train_step(state, batches(state, s), clip=1.0)
        except fs.FullshardError as error:
            return str(error)
    return ""


def between(case: Case) -> tuple[float, float, float]:
    """Evaluations between steps, which gather in an order of their own: how far losses are from the device's, one, and state."""
    with tempfile.TemporaryDirectory() as disk:
        state, plain = make(case, disk), make(resident(case), disk)
        losses = []
        for s in range(3):
            for one in (state, plain):
                on_torch.train_step(one, batches(one, s), clip=case.clip)
                losses.append(on_torch.evaluate(one, batches(one, 100 + s))["loss"])
        return (
            max(abs(a - b) for a, b in zip(losses[::2], losses[1::2], strict=True)),
            losses[0],
            apart(values(state), values(plain)),
        )


def looked_at(case: Case) -> tuple[float, int]:
    """How far a run whose state was looked at after every step is from one that was left alone."""
    with tempfile.TemporaryDirectory() as disk:
        state, alone = make(case, disk), train(case, disk)
        seen = []
        for s in range(case.steps):
            on_torch.train_step(state, batches(state, s), clip=case.clip, lr=1e-2 / (1 + s))
            seen.append(values(state))
        again = values(state)
        assert apart(seen[-1], again) == 0.0
        return apart(again, alone["values"]), len(seen)


def _between_roundings(state: on_torch.State) -> None:
    """Put a third of the masters in the middle between two bf16."""
    with state.values(changed=True) as found:
        for name in sorted(found):
            words = local(found[name]).view(torch.int32)
            words.view(-1)[::3] = (words.view(-1)[::3] & ~0xFFFF) | 0x8000


def _in_the_middle(found: dict[str, torch.Tensor]) -> int:
    return sum(int((t.float().view(torch.int32) & 0xFFFF == 0x8000).sum()) for n, t in found.items() if n.endswith("weight"))


def beside_each_other(one: Case, other: Case, checkpoint_dir: str) -> dict[str, Any]:
    """Two cases from the same values, saved, evaluated, trained on and loaded again: losses, how far apart they end, and how
    many masters lay between two roundings after the first steps, of which nothing but moments came."""
    with tempfile.TemporaryDirectory() as disk:
        states, said = [make(case, disk) for case in (one, other)], ""
        with states[0].values() as source, states[1].values(changed=True) as target:
            for name, t in source.items():
                local(target[name]).copy_(local(t))
        for state in states:
            _between_roundings(state)
        losses, ends = [], []
        for i, state in enumerate(states):
            own = [on_torch.evaluate(state, batches(state, 100))["loss"]]
            _train_on(state, one, 2)
            middle = _in_the_middle(values(state))
            fs.checkpoint.save(f"{checkpoint_dir}/{i}", state)
            own += [on_torch.evaluate(state, batches(state, s))["loss"] for s in (100, 101)]
            _train_on(state, one, 4)
            ends.append(values(state))
            fs.checkpoint.load(f"{checkpoint_dir}/{i}", state)
            own.append(on_torch.evaluate(state, batches(state, 101))["loss"])
            _train_on(state, one, 4)
            losses.append([*own, on_torch.evaluate(state, batches(state, 101))["loss"], apart(values(state), ends[-1])])
        with states[1].values():
            try:
                on_torch.evaluate(states[1], batches(states[1], 100))["loss"]
            except fs.FullshardError as error:
                said = str(error)
        return {"losses": losses, "apart": apart(*ends), "middle": middle, "said": said}


def _train_on(state: on_torch.State, case: Case, end: int) -> None:
    for s in range(state.step, end):
        on_torch.train_step(state, batches(state, s), clip=case.clip, lr=0.0 if s < 2 else 1e-2)


def _slowly(apply: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*arguments: Any) -> Any:
        time.sleep(0.01)
        return apply(*arguments)

    return slow


def waiting(case: Case) -> tuple[list[int], list[int]]:
    """Lanes that are slower than backward: after each unit of a step, how many pieces hold their gradients; and how many
    pieces units have."""
    with tempfile.TemporaryDirectory() as disk:
        state = make(case, disk)
        offload, counts = state.offload, []
        for lane in (offload.gpu_lane, offload.cpu_lane):
            lane.worker.apply = _slowly(lane.worker.apply)
        reduced = offload._reduced

        def counted(unit: Any) -> None:
            reduced(unit)
            counts.append(sum(len(u.pieces) for u in offload.units if u.update and u.update.gradients))

        if case.backlog is None:
            on_torch.train_step(state, batches(state, 0))  # whose checks look at all gradients
        offload._reduced = counted
        on_torch.train_step(state, batches(state, 1))
        state.flush()
        return counts, [len(a.pieces) for a in offload.units]


def lane_breaks(case: Case) -> tuple[str, bool]:
    """What a step says whose lanes fail in its middle, and whether it was backward that said so."""
    with tempfile.TemporaryDirectory() as disk:
        state = make(case, disk)
        on_torch.train_step(state, batches(state, 0))
        state.flush()

        def fail(*arguments: Any) -> Any:
            time.sleep(0.01)
            raise fs.FullshardError("a lane broke")

        state.offload.gpu.apply = state.offload.cpu.apply = fail
        done = state.offload.backward_done
        passed = []
        state.offload.backward_done = lambda: (passed.append(1), done())
        try:
            on_torch.train_step(state, batches(state, 1))
            state.flush()
        except fs.FullshardError as error:
            state.offload.close()  # no thread waits for what does not come
            return str(error), not passed
    return "", False


def leftovers() -> list[str]:
    """Names in the disk's directory while a run uses it: none."""
    with tempfile.TemporaryDirectory() as disk:
        state = make(Case((Home("disk", "disk"),)), disk)
        on_torch.train_step(state, batches(state, 0), clip=1.0)
        return [p.name for p in Path(disk).iterdir()]


def outlived(case: Case) -> int:
    """Parameters that are still there when nobody holds the state any more."""
    with tempfile.TemporaryDirectory() as disk:
        state = make(case, disk)
        on_torch.train_step(state, batches(state, 0), clip=case.clip)
        found = [weakref.ref(p) for p in state.model.parameters()]
        del state
        gc.collect()
        return sum(p() is not None for p in found)


def given_up(case: Case) -> dict[str, Any]:
    """A step whose loss raises, then training as if it had not been; beside the same without it."""
    found = {}
    with tempfile.TemporaryDirectory() as disk:
        for kind in ("whole", "given up"):
            state = make(case, disk)
            for s in range(4):
                if s == 2 and kind == "given up":
                    _raise_in_a_step(state, case)
                numbers = on_torch.train_step(state, batches(state, s), clip=case.clip).numbers()[:2]
            found[kind] = (numbers, values(state))
    (a, one), (b, other) = found.values()
    return {"numbers": max(abs(x - y) for x, y in zip(a, b, strict=True)), "values": apart(one, other)}


def _raise_in_a_step(state: on_torch.State, case: Case) -> None:
    calls = []

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("the second micro-batch")
        return on_torch.summed_loss(model, batch)

    try:
        on_torch.train_step(state, batches(state, 2), loss=loss, clip=case.clip)
    except ValueError:
        state.optimizer.zero_grad()
    else:
        raise AssertionError("the step went through")


def start_memory(path: str) -> tuple[int, int]:
    """Bytes of a model's masters, and how far the anonymous memory of this process rose above what stays, while the model was
    sharded with all its state on disk."""
    from fullshard.model.presets import LlamaSize
    from fullshard.on_torch.model.built_in import Llama

    with torch.device("meta"):
        model = Llama(LlamaSize(dim=320, layers=12, heads=4, kv_heads=4, ffn=960, vocab=1024, sequence=64))
    plan = fs.zero3(on_torch.describe(model), devices=1, batch=fs.Batch(1, 16)).change("*", home=Home(optimizer="disk"))
    masters = 4 * sum(p.numel() for p in model.parameters())
    peak, ended = [_anonymous()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            peak.append(_anonymous())

    watching = threading.Thread(target=watch)
    watching.start()
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3), disk=path)
    ended.set()
    watching.join()
    rose = max(peak) - _anonymous()
    state.offload.close()
    return masters, rose


def _anonymous() -> int:
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024
