"""The same training with activations on the device, in host memory and in a file. Runs inside ranks."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import fullshard as fs
from fullshard import FullshardError, on_torch
from fullshard.model import presets
from fullshard.model.presets import LlamaSize
from fullshard.on_torch.model.built_in import Llama
from fullshard.on_torch.offload.activations import activation_hooks, disk_activations
from fullshard.planner.memory.peak_memory import predict
from fullshard.planner.step import saved_activations
from fullshard.planner.step.schedule import schedule
from tests.cpu import parity
from tests.cpu.activations import LENGTH, ROWS, batches, train

LAYERS = 6


@dataclass(frozen=True)
class Case:
    """`homes`: of the blocks' activations, in turn."""

    homes: tuple[str, ...] = ("disk",)
    remat: str = "none"
    accumulate: int = 1
    compute: str = "fp32"
    loss: str = "summed"
    layers: int = LAYERS

    def __str__(self) -> str:
        return "-".join((*self.homes, self.remat, f"acc{self.accumulate}", self.compute, self.loss))


def start(case: Case, disk: str | Path | None) -> on_torch.State:
    with torch.device("meta"):
        model = Llama(LlamaSize(24, case.layers, 4, 2, 42, parity.VOCAB, 64))
    plan = fs.zero3(
        on_torch.describe(model),
        devices=dist.get_world_size(),
        precision=fs.Precision(compute=case.compute),
        batch=fs.Batch(ROWS, LENGTH, case.accumulate),
        remat=case.remat,
    )
    for i in range(case.layers):
        plan = plan.change(f"*.layers.{i}", home=fs.Home(activations=case.homes[i % len(case.homes)]))
    return on_torch.shard(model, plan, fs.SGD(lr=0.1), seed=7, device=parity.DEVICE, disk=disk)


def compare(case: Case, steps: int = 2) -> dict:
    """Against activations on the device: whether all is the same, and the bytes that passed."""
    want, params, _ = train(
        start(Case(("device",), case.remat, case.accumulate, case.compute, case.loss), None), case.loss, steps
    )
    with tempfile.TemporaryDirectory() as disk:
        state = start(case, disk)
        found, other, moved = train(state, case.loss, steps)
        assert state.activations is not None
        files = state.activations.files
        assert files is not None
        return {
            "numbers": found == want,
            "params": all(torch.equal(a, b) for a, b in zip(other, params, strict=True)),
            "moved": moved,
            "spilled": state.activations.spilled,
            "filed": (files.written, files.read),
            "names": os.listdir(disk),
            "left": len(state.activations.seen),
        }


def requests(case: Case, steps: int = 1) -> dict:
    """Bytes of each request to the file, by way, and what was in host memory at most."""
    found: dict = {"write": [], "read": []}
    with tempfile.TemporaryDirectory() as disk:
        state = start(case, disk)
        file = state.activations.files.file

        def counted(way: str):
            real = getattr(file, way)

            def request(offset: int, memory: memoryview):
                found[way].append(len(memory))
                return real(offset, memory)

            return request

        file.read, file.write = counted("read"), counted("write")
        for i in range(steps):
            on_torch.train_step(state, batches(state, i))
        spill = state.activations
        return found | {"moved": (spill.spilled, spill.fetched), "most": spill.files.most}


def as_planned() -> tuple[list[int], list[int], dict[str, int]]:
    """Bytes that a step spills, fetches, writes and reads; what the schedule says of them; and the planner's on disk. Both
    leave alone what is small beside a block's input of 8 × 192 numbers in bf16."""
    before = activation_hooks.SMALL["cpu"], saved_activations.SMALL
    activation_hooks.SMALL["cpu"] = saved_activations.SMALL = 2048
    try:
        name, shape, accumulate = "llama-bytes", (1, 8), 2
        costed, bf16 = presets.describe(name), fs.Precision(compute="bf16")
        batch = fs.Batch(*shape, accumulate)
        plan = fs.zero3(costed, devices=dist.get_world_size(), batch=batch, remat="full", precision=bf16)
        plan = plan.change("*.layers.*", home=fs.Home(activations="disk"))
        model = on_torch.load_model(name)
        with tempfile.TemporaryDirectory() as disk:
            state = on_torch.shard(model, plan, fs.SGD(lr=0.1), device=parity.DEVICE, disk=disk, first_step_checks=False)
            ids = torch.zeros(shape, dtype=torch.long, device=state.device)
            on_torch.train_step(state, [{"input_ids": ids, "labels": ids}] * accumulate)
            moved, files = state.activations, state.activations.files
            found = [moved.spilled, moved.fetched, files.written, files.read]
        operations = schedule(plan, costed)
        said = [sum(op.nbytes for op in operations if op.kind == kind) for kind in ("spill", "fetch", "spill", "fetch")]
        return found, said, predict(plan, costed, reserved=False).disk
    finally:
        activation_hooks.SMALL["cpu"], saved_activations.SMALL = before


def grown(case: Case) -> tuple[list[int], bool]:
    """The file's bytes after each of some steps, if it grows by a page at a time; and whether losses are the same."""
    growth, disk_activations.GROWTH = disk_activations.GROWTH, 4096
    try:
        with tempfile.TemporaryDirectory() as disk:
            states, sizes, same = (start(case, disk), start(Case(("device",)), None)), [], True
            for i in range(3):
                losses = [on_torch.train_step(s, batches(s, i)).loss.item() for s in states]
                same = same and losses[0] == losses[1]
                sizes.append(states[0].activations.files.file.nbytes)
            return sizes, same
    finally:
        disk_activations.GROWTH = growth


def without_backward() -> dict:
    """Forwards that nobody follows with backward: their places in the file are used again."""
    with tempfile.TemporaryDirectory() as disk:
        state = start(Case(), disk)
        files = state.activations.files
        on_torch.evaluate(state, batches(state, 9))
        evaluated, written = files.written, []
        for _ in range(3):
            on_torch.summed_loss(state.model, batches(state, 0)[0])
            written.append(files.file.nbytes)
        numbers, _, _ = train(state)
        return {
            "evaluated": evaluated,
            "read": files.read == files.written // 7 * 4,
            "file": len(set(written)),
            "same": numbers == train(start(Case(("device",)), None))[0],
        }


def broken(how: str) -> str:
    """A disk that fails after a step: what is said."""
    with tempfile.TemporaryDirectory() as disk:
        state = start(Case(), disk)
        on_torch.train_step(state, batches(state, 0))
        file = state.activations.files.file
        if how == "full":
            full = os.open("/dev/full", os.O_RDWR)
            os.dup2(full, file.file)
            os.close(full)
        else:
            state.model.lm_head.register_forward_pre_hook(lambda *_: _cut(state))
        try:
            for i in range(1, 3):
                on_torch.train_step(state, batches(state, i))
        except FullshardError as error:
            return str(error)
    return ""


def _cut(state: on_torch.State) -> None:
    files = state.activations.files
    for _, written in files.leaving:
        written.result()
    os.ftruncate(files.file.file, 0)


def no_room() -> str:
    """A file that would have to grow beyond any disk."""
    growth, disk_activations.GROWTH = disk_activations.GROWTH, 1 << 60
    try:
        with tempfile.TemporaryDirectory() as disk:
            train(start(Case(), disk))
    except FullshardError as error:
        return str(error)
    finally:
        disk_activations.GROWTH = growth
    return ""


def refusals(disks: list[str | None], homes: list[tuple[str, ...]]) -> list[str]:
    said = []
    for disk, places in zip(disks, homes, strict=True):
        try:
            start(Case(places), disk)
            said.append("")
        except FullshardError as error:
            said.append(str(error))
    return said
