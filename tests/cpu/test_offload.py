"""Host bytes and staging of offloaded units: the engine takes what the planner counts. And a piece on disk that is opened
again before it is closed."""

import contextlib
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

import fullshard as fs
from fullshard import Home, on_torch
from fullshard.on_torch.offload.stores.disk_state import StateFile
from fullshard.on_torch.offload.units.offloaded_unit import Piece, offloaded_units
from fullshard.on_torch.tensors.streams import DONE
from fullshard.planner.memory.peak_memory import predict
from tests.cpu import live
from tests.cpu.test_planner import BF16, ROWS, TOKENS, VOCAB, build, description

HOMES = [
    Home(optimizer="host"),
    Home("host", "host"),
    Home(params="host"),
    Home(optimizer="disk"),
    Home("disk", "host"),
    Home("disk", "disk"),
]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_parameters_and_state_in_host_memory_take_twelve_bytes_a_parameter(share):
    """And up to six buffers for the gradients of the CPU lane; each tensor takes whole pages."""
    found = description("plain")
    plan = fs.zero3(found, devices=1, precision=BF16, batch=fs.Batch(ROWS, TOKENS)).change("*", home=Home("host", "host"))
    with live.ranks(1):
        state = on_torch.shard(build("plain"), plan, fs.AdamW(lr=1e-5), device="cpu", cpu_share=share)
        memory, lanes = state.offload.memory, [p.lane for a in state.offload.units for p in a.pieces]
        state.offload.close()
    buffers = min(6, lanes.count("cpu")) * 2 * memory.sizes.largest
    assert sum(map(sum, memory.sizes.arena().values())) == 12 * found.numel + buffers
    assert memory.arena.used == memory.arena.nbytes < 12 * found.numel + buffers + 4096 * (3 * len(plan.units) + 6)


@pytest.mark.quick(9)
@pytest.mark.parametrize(("share", "clip"), [(0.0, 1.0), (0.5, 1.0), (0.5, None), (1.0, 1.0)])
@pytest.mark.parametrize("home", HOMES, ids=str)
def test_the_engine_takes_what_the_planner_counts(home, share, clip, tmp_path):
    found = description("plain")
    plan = fs.zero3(found, devices=4, precision=BF16, batch=fs.Batch(ROWS, TOKENS)).change("*", home=home)
    expected = predict(plan, found, reserved=False, clip=clip is not None, cpu_share=share)
    with live.ranks(4):
        disk = tmp_path if "disk" in (home.params, home.optimizer) else None
        state = on_torch.shard(
            build("plain"), plan, fs.AdamW(lr=1e-5), device="cpu", first_step_checks=False, cpu_share=share, disk=disk
        )
        ids = torch.randint(0, VOCAB, (ROWS, TOKENS + 1))
        on_torch.train_step(state, [{"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}], clip=clip)
        with contextlib.suppress(fs.FullshardError):  # gathers of a fake group give whatever lay in memory, infinities too
            state.flush()
        offload = state.offload
        drained = sum(t.nbytes for t in offload.host_gradients.flats.values())
        slots, workspace = [s.state for s in offload.gpu.slots], offload.gpu.workspace
        slots += [[t for t in (workspace.gradients.memory, workspace.master, workspace.rounded) if t is not None]]
        offload.close()
    assert sum(expected.host.values()) == sum(map(sum, offload.memory.sizes.arena().values())) + drained
    if offload.memory.params_file is not None:
        assert expected.disk["params"] == offload.memory.params_file.file.nbytes
    assert expected.terms.get("staging", 0) == sum(-(-sum(t.nbytes for t in slot) // 512) * 512 for slot in slots)


def test_a_piece_on_disk_that_is_still_open_is_read_again_when_it_is_written(tmp_path):
    """The next step may expect it while its state is on the way back: its parameters went ahead."""
    plan = fs.zero3(description("plain"), devices=1, precision=BF16, batch=fs.Batch(ROWS, TOKENS))
    with live.ranks(1):
        on_disk = plan.change("*", home=Home(optimizer="disk"))
        state = on_torch.shard(build("plain"), on_disk, fs.AdamW(lr=1e-5), device="cpu", cpu_share=0.0, disk=tmp_path)
        file, piece = state.offload.memory.state_file, state.offload.units[0].pieces[0]
        for step in (1.0, 2.0, 3.0):
            file.expect([piece] if step == 1.0 else [])
            found = opened(file, piece)
            assert step == 1.0 or torch.all(found[0] == step - 1)
            for tensor in found:
                tensor.fill_(step)
            file.expect([piece])  # of the next step
            file.close(piece, DONE)
        opened(file, piece)
        file.close(piece, None)
        state.offload.close()


def opened(file: StateFile, piece: Piece) -> list[torch.Tensor]:
    """In half a minute at most."""
    found: list[torch.Tensor] = []
    waiting = Thread(target=lambda: found.extend(file.open(piece)[0]), daemon=True)
    waiting.start()
    waiting.join(30)
    assert found
    return found


class _Counted(torch.nn.Sequential):
    """Counts how often its parameters are listed."""

    listed = 0

    def named_parameters(self, *arguments, **options):
        self.listed += 1
        return super().named_parameters(*arguments, **options)


def test_offloaded_units_are_found_in_one_pass_over_the_parameters():
    model = _Counted(*(torch.nn.Linear(2, 2) for _ in range(20)))
    host = Home(optimizer="host")
    plan = fs.Plan(fs.Mesh(), tuple(fs.Unit(f"unit{i}", (f"{i}",), home=host if i % 2 else Home()) for i in range(20)))
    groups = {
        f"unit{i}": SimpleNamespace(padded=lambda m=m: [(p, p.numel()) for p in m.parameters()]) for i, m in enumerate(model)
    }
    found = offloaded_units(model, plan, groups)
    assert [(u.name, u.names) for u in found] == [(f"unit{i}", [f"{i}.weight", f"{i}.bias"]) for i in range(1, 20, 2)]
    assert model.listed == 1
