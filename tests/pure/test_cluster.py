"""The cluster as a value: presets against published numbers, files both ways, measured before nominal."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from fullshard.cluster.hardware import DEVICES, NETWORKS, NODES
from fullshard.cluster.measured import MeasuredAttention, MeasuredCollective, MeasuredGemm
from fullshard.cluster.topology import Cluster, ClusterError, Measured, Quantity

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cluster.md"
# Dense bf16 TFLOP/s and HBM TB/s from the makers' datasheets, memory as labelled (GB).
DATASHEETS = {
    "a100": (312, 2.04, 80),
    "h100": (989, 3.35, 80),
    "h100e": (989, 2.4, 94.5 * 1.0737),
    "h200": (989, 4.8, 141),
    "b200": (2250, 8.0, 192),
    "gb200": (2500, 8.0, 192),
    "mi300x": (1307, 5.3, 192 * 1.0737),  # 192 GiB
    "l40s": (362, 0.864, 48),
    "rtx4090": (165, 1.008, 24 * 1.0737),
    "v5p": (459, 2.765, 95 * 1.0737),
    "v6e": (918, 1.64, 32 * 1.0737),
}
MEASURED = Measured(
    machine="a bench",
    dtype="bf16",
    hbm=4.2e12,
    pcie_up=53e9,
    gemms=(MeasuredGemm(16, 4096, 4096, 12e-6), MeasuredGemm(2048, 2048, 2048, 25e-6), MeasuredGemm(8192, 8192, 8192, 1.5e-3)),
    attention=(MeasuredAttention(128, 1024, 4e14, 3e14), MeasuredAttention(128, 4096, 5e14, 4e14)),
    collectives=(MeasuredCollective("all_gather", 8, 1, 3e-5, 3.6e11),),
    notes=("disk was left out: no space",),
)


@pytest.mark.parametrize("name", DATASHEETS)
def test_presets_hold_the_published_numbers(name):
    tera, hbm, label = DATASHEETS[name]
    device = Cluster.load(f"8x{name}").device
    assert device.peak.bf16 == pytest.approx(tera * 1e12, rel=0.002)
    assert device.hbm == pytest.approx(hbm * 1e12, rel=0.002)
    assert 0.9 * label * 1e9 < device.memory <= label * 1e9 * 1.07  # GB labels of NVIDIA are GiB on some cards


def test_the_documentation_shows_the_presets():
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| `") and line.count("|") == 10]
    shown = {cells[0].strip(" `"): [c.strip() for c in cells[1:]] for cells in rows}
    assert set(shown) == set(DEVICES)
    for name, (peak, reached, memory, hbm, node, link, link_reached, network) in shown.items():
        device, inner, outer = DEVICES[name], NODES[name].link, NETWORKS[name]
        assert float(peak.split()[0]) == pytest.approx(device.peak.bf16 / 1e12, rel=2e-3)
        assert (reached, link_reached) == (f"{device.efficiency:.0%}", f"{inner.efficiency:.0%}")
        assert float(memory) == pytest.approx(device.memory / 2**30)
        assert float(hbm) == pytest.approx(device.hbm / 1e12, rel=2e-3)
        assert int(node) == NODES[name].devices
        assert float(link.split()[-1]) == pytest.approx(inner.bandwidth / 1e9)
        assert float(network.split()[-1]) == pytest.approx(outer.bandwidth * 8 / 1e9)


def test_every_preset_has_all_its_parts():
    assert set(DATASHEETS) | {"cpu"} == set(DEVICES) == set(NODES) == set(NETWORKS)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("count", [1, 12, 16384])
def test_json_both_ways(name, count):
    cluster = Cluster.load(f"{count}x{name}")
    assert Cluster.from_json(cluster.to_json()) == cluster
    measured = dataclasses.replace(cluster, measured=MEASURED)
    assert Cluster.from_json(measured.to_json()) == measured
    assert hash(measured) != hash(cluster)
    assert cluster.name == f"{count}x{name}"


def test_a_file_is_loaded_by_its_path(tmp_path):
    cluster = dataclasses.replace(Cluster.load("2xh200"), measured=MEASURED)
    cluster.save(tmp_path / "here.json")
    assert Cluster.load(tmp_path / "here.json") == cluster == Cluster.load(str(tmp_path / "here.json"))


def test_names_are_read_in_any_case():
    assert Cluster.load("8xH100") == Cluster.load("8xh100")


def test_the_last_node_may_be_partly_filled():
    cluster = Cluster.load("12xh100")
    assert (cluster.nodes, cluster.node.devices) == (2, 8)
    assert "2 nodes of up to 8, the last with 4" in str(cluster)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("8xh10", "did you mean 'h100'?"),
        ("8xrtx409", "did you mean 'rtx4090'?"),
        ("0xh100", "1 to 16384 devices"),
        ("16385xh100", "1 to 16384 devices"),
        ("3.5xh100", "write a count and a device, as in 8xh100"),
        ("-1xa100", "as in 8xa100"),
        ("v5p", "as in 8xv5p"),
        ("", "write a count and a device"),
        ("٣xh100", "write a count and a device"),
        ("missing.json", "cannot read cluster missing.json: No such file"),
        ("nowhere/8xh100", "cannot read cluster nowhere/8xh100"),
    ],
)
def test_a_name_that_is_none_gets_one_sentence(name, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClusterError) as error:
        Cluster.load(name)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def broken(change):
    data = Cluster.load("8xh100").to_dict() | {"measured": json.loads(json.dumps(dataclasses.asdict(MEASURED)))}
    data = json.loads(json.dumps(data))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(version=2), "version 2 is not known here"),
        (lambda d: d.pop("version"), "version None"),
        (lambda d: d.update(devices=0), "devices must be a number above zero"),
        (lambda d: d.update(devices=8.5), "devices must be a whole number"),
        (lambda d: d.update(devices=20000), "at most 16384"),
        (lambda d: d.update(netwrok=1), "unknown key 'netwrok'; did you mean 'network'?"),
        (lambda d: d.pop("network"), "lacks the key 'network'"),
        (lambda d: d["device"].update(hbm="fast"), "hbm must be a number above zero, not 'fast'"),
        (lambda d: d["device"].update(efficiency=1.2), "at most 1"),
        (lambda d: d["device"].update(kind="gpu"), "must be one of cuda, cpu, tpu"),
        (lambda d: d["device"].update(name=7), "device.name must be a string"),
        (lambda d: d["node"]["link"].update(latency=-1), "latency must be a number above zero"),
        (lambda d: d["node"]["host"].update(adamw=None), "adamw must be a number above zero"),
        (lambda d: d["node"].update(link=[]), "node.link must be an object"),
        (lambda d: d["measured"].update(gemms={}), "measured.gemms must be a list"),
        (lambda d: d["measured"]["gemms"][0].update(q=1), "measured.gemms[0] has an unknown key 'q'"),
        (lambda d: d["measured"].update(hbm=float("nan")), "hbm must be a number above zero"),
        (lambda d: d["measured"]["collectives"][0].update(kind="gather"), "did you mean 'all_gather'?"),
    ],
)
def test_a_file_that_is_wrong_gets_one_sentence(change, says, tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(broken(change))
    with pytest.raises(ClusterError) as error:
        Cluster.load(path)
    assert says in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_broken_json_gets_one_sentence(text):
    with pytest.raises(ClusterError, match=r"not JSON|is a JSON object"):
        Cluster.from_json(text)


def test_a_binary_file_gets_one_sentence(tmp_path):
    (tmp_path / "c.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="not a text file"):
        Cluster.load(tmp_path / "c.json")


def test_measured_is_preferred_and_says_so():
    nominal = Cluster.load("8xh200")
    cluster = dataclasses.replace(nominal, measured=MEASURED)
    assert (cluster.of("hbm"), cluster.source_of("hbm")) == (4.2e12, "measured")
    assert (cluster.of("pcie_down"), cluster.source_of("pcie_down")) == (nominal.of("pcie_down"), "nominal")
    assert cluster.nominal("hbm") == nominal.of("hbm") == pytest.approx(0.9 * 4.8e12)
    assert nominal.source_of("gemm") == "nominal"
    assert cluster.source_of("gemm") == cluster.source_of("gemm", "fp16") == "measured"
    assert cluster.source_of("gemm", "fp32") == "nominal"
    with pytest.raises(ClusterError, match="did you mean 'hbm'"):
        cluster.of("hbm_")


def test_what_remat_costs_the_host_follows_a_launch_until_it_is_timed():
    """20, 2.2 and 2.2 launches of 5 µs; of a file from before, so many of the launch in it."""
    nominal = Cluster.load("8xh200")
    assert [nominal.of(q) for q in ("checkpointed", "saved", "dispatched")] == pytest.approx([100e-6, 11e-6, 11e-6])
    old = nominal.to_dict() | {"measured": {"machine": "a", "dtype": "bf16", "launch": 8e-6}}
    assert Cluster.from_dict(old).of("dispatched") == pytest.approx(17.6e-6)
    assert Cluster.from_dict(old).source_of("dispatched") == "nominal"
    new = dataclasses.replace(nominal, measured=dataclasses.replace(MEASURED, dispatched=9e-6))
    assert (new.of("dispatched"), new.source_of("dispatched")) == (9e-6, "measured")


@pytest.mark.parametrize("measured", [None, {"machine": "a", "dtype": "bf16", "launch": 8e-6, "issued": 22e-6}])
def test_a_slower_host_takes_longer_for_all_that_it_issues_and_nothing_else_changes(measured):
    cluster = Cluster.from_dict(Cluster.load("8xh200").to_dict() | {"measured": measured})
    slow = cluster.with_host(1.5)
    paces = {"launch", "issued", "checkpointed", "saved", "dispatched"}
    for quantity in get_args(Quantity):
        assert slow.of(quantity) == pytest.approx(cluster.of(quantity) * (1.5 if quantity in paces else 1.0))
        assert slow.source_of(quantity) == cluster.source_of(quantity)


def test_an_operation_is_timed_itself_or_follows_one_of_selective_remat():
    nominal = Cluster.load("8xh200")
    assert nominal.of("issued") == pytest.approx(1.16 * 11e-6)
    before = dataclasses.replace(nominal, measured=dataclasses.replace(MEASURED, dispatched=9e-6))
    assert before.of("issued") == pytest.approx(1.16 * 9e-6)
    timed = dataclasses.replace(nominal, measured=dataclasses.replace(MEASURED, dispatched=9e-6, issued=22e-6))
    assert (timed.of("issued"), timed.source_of("issued")) == (22e-6, "measured")
    assert Cluster.from_dict(json.loads(json.dumps(timed.to_dict()))) == timed


def test_rates_of_products_lie_on_the_measured_line():
    cluster = dataclasses.replace(Cluster.load("8xh200"), measured=MEASURED)
    small, large = 2.0 * 2048**3, 2.0 * 8192**3
    assert cluster.gemm_rate(small) == pytest.approx(small / 25e-6)
    assert cluster.gemm_rate(large) == cluster.gemm_rate(100 * large) == pytest.approx(large / 1.5e-3)
    assert cluster.gemm_rate(1.0) == cluster.gemm_rate(small)  # the thin one, bound by memory, says nothing
    middle = cluster.gemm_rate((small * large) ** 0.5)
    assert middle == pytest.approx((small / 25e-6 + large / 1.5e-3) / 2)
    assert cluster.attention_rate(2048) == pytest.approx((4.5e14, 3.5e14))
    assert Cluster.load("8xh200").gemm_rate(1e12) == pytest.approx(0.75 * 989.4e12)


def test_a_rate_nobody_published_is_refused():
    with pytest.raises(ClusterError, match="v5p has no published rate for fp32"):
        Cluster.load("8xv5p").gemm_rate(1e12, "fp32")
    with pytest.raises(ClusterError, match="dtype must be one of"):
        Cluster.load("8xv5p").peak("bf61")


def test_the_table_shows_both():
    text = str(dataclasses.replace(Cluster.load("8xh200"), measured=MEASURED))
    lines = [line.split() for line in text.splitlines()]
    assert ["memory", "bandwidth", "4.32", "TB/s", "4.20", "TB/s"] in lines
    assert ["host", "to", "device", "55.00", "GB/s", "53.00", "GB/s"] in lines
    assert ["kernel", "launch", "5.00", "µs", "–"] in lines
    assert "note: disk was left out: no space" in text


def test_importing_it_imports_no_torch():
    code = "import sys, fullshard.cluster.topology, fullshard.planner.time.collectives; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
