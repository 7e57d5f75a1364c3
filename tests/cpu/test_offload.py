"""Host bytes and staging of away units: what the planner counts is what the engine takes. And a piece on disk that is wanted
again before it is closed."""

import contextlib
from threading import Thread

import pytest
import torch

import fullshard as fs
from fullshard import Home, on_torch
from fullshard.on_torch.offload.events import DONE
from fullshard.on_torch.offload.stores.disk_state import Spooled
from fullshard.on_torch.offload.units import Piece
from fullshard.planner.memory.peak import predict
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
    """And up to six trays for gradients where the cores update; whole pages are taken for each tensor."""
    found = description("plain")
    plan = fs.zero3(found, devices=1, precision=BF16, batch=fs.Batch(ROWS, TOKENS)).change("*", home=Home("host", "host"))
    with live.ranks(1):
        state = on_torch.shard(build("plain"), plan, fs.AdamW(lr=1e-5), device="cpu", cpu_share=share)
        resting, lanes = state.tiers.resting, [p.lane for a in state.tiers.units for p in a.pieces]
        state.tiers.close()
    trays = min(6, lanes.count("cpu")) * 2 * resting.largest
    assert sum(resting._sizes()) == 12 * found.numel + trays
    assert resting.arena.used == resting.arena.nbytes < 12 * found.numel + trays + 4096 * (3 * len(plan.units) + 6)


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
        tiers = state.tiers
        drained = sum(t.nbytes for t in tiers.drains.values())
        slots, bench = [s.state for s in tiers.streamed.slots], tiers.streamed.bench
        slots += [[t for t in (bench.gradients.memory, bench.master, bench.rounded) if t is not None]]
        tiers.close()
    assert sum(expected.host.values()) == sum(tiers.resting._sizes()) + drained
    if tiers.resting.filed is not None:
        assert expected.disk["params"] == tiers.resting.filed.spool.nbytes
    assert expected.terms.get("staging", 0) == sum(-(-sum(t.nbytes for t in slot) // 512) * 512 for slot in slots)


def test_a_piece_on_disk_that_is_still_open_is_read_again_when_it_is_written(tmp_path):
    """The next step may expect it while its state is on the way back: its parameters went ahead."""
    plan = fs.zero3(description("plain"), devices=1, precision=BF16, batch=fs.Batch(ROWS, TOKENS))
    with live.ranks(1):
        on_disk = plan.change("*", home=Home(optimizer="disk"))
        state = on_torch.shard(build("plain"), on_disk, fs.AdamW(lr=1e-5), device="cpu", cpu_share=0.0, disk=tmp_path)
        spooled, piece = state.tiers.resting.spooled, state.tiers.units[0].pieces[0]
        for step in (1.0, 2.0, 3.0):
            spooled.expect([piece] if step == 1.0 else [])
            found = opened(spooled, piece)
            assert step == 1.0 or torch.all(found[0] == step - 1)
            for tensor in found:
                tensor.fill_(step)
            spooled.expect([piece])  # of the next step
            spooled.close(piece, DONE)
        opened(spooled, piece)
        spooled.close(piece, None)
        state.tiers.close()


def opened(spooled: Spooled, piece: Piece) -> list[torch.Tensor]:
    """In half a minute at most."""
    found: list[torch.Tensor] = []
    waiting = Thread(target=lambda: found.extend(spooled.open(piece)[0]), daemon=True)
    waiting.start()
    waiting.join(30)
    assert found
    return found
