"""`measure` on this machine: everything it times is there, sane, and leaves nothing behind."""

import dataclasses
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fullshard import on_torch
from fullshard.base.errors import FullshardError
from fullshard.cluster.measured import MeasuredGemm
from fullshard.cluster.topology import Cluster, Measured
from fullshard.on_torch.measuring import timings
from fullshard.on_torch.measuring.measure import fit
from fullshard.on_torch.ranks.device_presets import device_preset, local_cluster, measured_cluster

TIMED_ON_CPU = (
    "memory",
    "hbm",
    "launch",
    "checkpointed",
    "saved",
    "dispatched",
    "host_memory",
    "dram",
    "adamw",
    "disk_read",
    "disk_write",
    "disk_both",
    "disk",
)
CPU = torch.device("cpu")


def measured_here(directory: str) -> Cluster:
    """Module-level: ranks call it by name."""
    return on_torch.measure(Path(directory), quick=True)


@pytest.fixture(scope="module", autouse=True)
def no_gpu():
    """These tests are of the CPU, also on a machine with GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    directory, parts, start = tmp_path_factory.mktemp("disk"), [], time.process_time()
    cluster = on_torch.measure(directory, quick=True, progress=parts.append)
    return cluster, directory, parts, time.process_time() - start


def test_every_part_is_timed(alone):
    cluster, _, parts, seconds = alone
    assert cluster.name == "1xcpu"
    assert {q: cluster.source_of(q) for q in TIMED_ON_CPU} == dict.fromkeys(TIMED_ON_CPU, "measured")
    assert cluster.source_of("pcie_up") == "nominal"  # a CPU has none
    assert cluster.source_of("gemm", "fp32") == cluster.source_of("attention", "fp32") == "measured"
    assert parts[:2] == ["memory", "matrix products"]
    assert "disk" in parts
    assert seconds < 60  # of CPU time: some 3


def test_the_numbers_are_sane(alone):
    cluster, *_ = alone
    for quantity in ("hbm", "dram"):
        assert 1e8 < cluster.of(quantity) < 1e13
    assert cluster.of("memory") == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1e-7 < cluster.of("launch") < 1e-2
    assert 1e-11 < cluster.of("adamw") < 1e-6
    assert 1e6 < cluster.of("disk_read") < 1e12
    assert 1e6 < cluster.of("disk_write") < 1e12
    assert 1e6 < cluster.of("disk_both") < 1e12
    free = os.statvfs(alone[1])
    assert cluster.of("disk") == pytest.approx(free.f_bavail * free.f_frsize, rel=0.1)  # others write meanwhile


def test_products_of_many_sizes_are_timed(alone):
    gemms = alone[0].measured.gemms
    best = max(g.rate for g in gemms)
    assert len({(g.m, g.n, g.k) for g in gemms}) >= 8
    assert all(0 < g.rate <= best for g in gemms)
    assert alone[0].gemm_rate(1e9, "fp32") <= 1.05 * best
    assert 1e8 < best < 1e14


def test_nothing_is_left_on_the_disk(alone):
    assert list(alone[1].iterdir()) == []


def test_it_is_a_cluster_file(alone, tmp_path):
    alone[0].save(tmp_path / "here.json")
    assert Cluster.load(tmp_path / "here.json") == alone[0]


@pytest.mark.full
def test_two_ranks_time_their_collectives_and_agree(ranks, tmp_path):
    first, second = ranks(2).run(measured_here, str(tmp_path))
    assert first == second
    assert first.name == "2xcpu"
    found = {c.kind: c for c in first.measured.collectives}
    assert set(found) == {"all_gather", "reduce_scatter", "all_reduce", "broadcast"}
    assert all((c.ranks, c.nodes) == (2, 1) for c in found.values())
    assert all(1e-6 < c.latency < 1 and 1e5 < c.bandwidth < 1e12 for c in found.values())
    assert 0 < first.of("host_memory") <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # a share each
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_part_that_cannot_run_is_left_out_and_said_so(monkeypatch):
    monkeypatch.setattr(timings, "gemm", lambda *_: 1e-3)  # only to be quick
    monkeypatch.setattr(timings, "attention", lambda *_: (1e9, 1e9))
    cluster = on_torch.measure(Path("/proc"), quick=True)  # where nobody makes files
    assert cluster.source_of("disk_read") == "nominal"
    assert cluster.source_of("dram") == "measured"
    assert cluster.measured.notes == ("disk was left out: no file can be made in /proc: No such file or directory",)
    assert "note: disk was left out" in str(cluster)


def test_a_directory_that_is_none_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(FullshardError, match="is not a directory; write"):
        on_torch.measure(tmp_path / "missing", progress=lambda part: pytest.fail(f"{part} ran"))


def test_the_clock_tells_the_time():
    assert timings.seconds(lambda: time.sleep(0.02), CPU, 0.4) == pytest.approx(0.02, abs=0.01)


def test_the_line_through_exact_times_is_found():
    latency, slope = fit([(n, 3e-5 + n / 2e9) for n in (1e3, 1e5, 1e7)])
    assert (latency, slope) == (pytest.approx(3e-5), pytest.approx(1 / 2e9))


def test_times_without_a_line_still_give_positive_numbers():
    latency, slope = fit([(1e3, 5e-3), (1e5, 4e-3), (1e7, 3e-3)])
    assert latency > 0
    assert 0 < slope < math.inf


def test_a_cluster_measured_here_can_stand_for_more_devices(alone):
    assert dataclasses.replace(alone[0], devices=4).of("dram") == alone[0].of("dram")


@pytest.mark.parametrize(
    ("reported", "preset"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),  # and not b200
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_a_device_is_known_by_the_name_its_driver_gives(reported, preset, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: reported)
    assert device_preset(torch.device("cuda", 0)) == preset


def test_a_device_nobody_listed_stands_on_its_own_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 3060")
    found = Measured("NVIDIA GeForce RTX 3060", "bf16", memory=12 << 30, hbm=3e11, gemms=(MeasuredGemm(4096, 4096, 4096, 4e-3),))
    cluster = measured_cluster(torch.device("cuda", 0), found)
    assert cluster.name == "1xnvidiageforcertx3060"
    assert cluster.nominal("hbm") == 3e11
    assert cluster.peak("bf16") == pytest.approx(2 * 4096**3 / 4e-3)
    assert "no datasheet of NVIDIA GeForce RTX 3060 is known here" in cluster.measured.notes[0]
    assert Cluster.from_json(cluster.to_json()) == cluster


@pytest.mark.parametrize(("native", "fastest"), [(True, "bf16"), (False, "fp32")])
def test_an_unknown_gpu_that_only_emulates_bf16_is_faster_in_fp32(monkeypatch, native, fastest):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=16 << 30))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    assert local_cluster(2).device.peak.fastest == fastest
