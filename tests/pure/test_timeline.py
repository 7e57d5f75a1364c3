"""Seconds of a step: closed forms by hand, links that bound, published tables."""

import dataclasses

import pytest

import fullshard as fs
from benchmarks import published
from fullshard.cluster import topology as clusters
from fullshard.cluster.calibration import HOPPER, Fitted
from fullshard.cluster.topology import Cluster, Measured
from fullshard.model import presets
from fullshard.model.costs import Calls
from fullshard.model.presets import preset
from fullshard.model.reduced_description import reduced_description
from fullshard.planner.time.collectives import collective_seconds
from fullshard.planner.time.roofline import Machine
from fullshard.planner.time.timeline import timeline


def cluster(name: str, **link) -> Cluster:
    found = Cluster.named(name)
    inner = dataclasses.replace(found.node.link, **link)
    return dataclasses.replace(found, node=dataclasses.replace(found.node, devices=max(8, found.devices), link=inner))


FREE = {"bandwidth": 1e18, "latency": 1e-12, "start": 1e-12}


def plan(name: str, devices: int, *, strategy: str = "zero3", rows: int = 2, tokens: int = 2048, accumulate: int = 1, **more):
    batch = fs.Batch(rows, tokens, accumulate, more.pop("sync", "every"))
    own = more.pop("own", {"devices": devices})
    return fs.strategy(strategy, presets.describe(name), **own, batch=batch, precision=fs.Precision(compute="bf16"), **more)


def seconds(name: str, made: fs.Plan, where: Cluster, **more) -> float:
    return timeline(made, presets.describe(name), where, spread=0.0, **more).seconds


def test_matrix_products_take_their_flops_at_the_devices_rate():
    name, where = "llama3-8b", cluster("1xh100", **FREE)
    found = timeline(plan(name, 1), presets.describe(name), where, spread=0.0)
    size = preset(name)
    matrices = sum(p.numel for u in presets.describe(name).units for p in u.parameters if len(p.shape) > 1)
    flops = 6 * (matrices - size.vocab * size.dim) * 2 * 2048  # the embedding is looked up, not multiplied
    assert found.compute["gemm"] == pytest.approx(flops / (989.4e12 * 0.75), rel=1e-6)
    attention = 3.5 * 4 * size.layers * 2 * 2048**2 * size.dim / 2  # two products forward, five back, half of each
    assert found.compute["attention"] * 989.4e12 * 0.75 == pytest.approx(attention / 0.6, rel=0.2)


def test_remat_recomputes_the_forward_of_the_blocks():
    name, where = "llama3-8b", cluster("8xh100", **FREE)
    none, full = (timeline(plan(name, 8, remat=r), presets.describe(name), where) for r in ("none", "full"))
    size, blocks = preset(name), 32
    block = (2 * size.dim**2 + 2 * size.dim * 1024 + 3 * size.dim * size.ffn) * blocks
    assert full.compute["attention"] > 1.2 * none.compute["attention"]
    again = (full.compute["gemm"] - none.compute["gemm"]) * 989.4e12 * 0.75
    last = size.dim * size.ffn * blocks  # the last product need not be done again: its inputs are enough
    assert again == pytest.approx(2 * (block - last) * 2 * 2048, rel=0.01)


def test_a_slow_link_bounds_the_step_and_a_free_one_costs_nothing():
    name, made = "llama3-8b", plan("llama3-8b", 8, rows=1, tokens=512)
    slow, free = cluster("8xh100", bandwidth=1e9), cluster("8xh100", **FREE)
    units = presets.describe(name).units
    wire = sum(2 * collective_seconds("all_gather", u.numel * 2, 8, slow) for u in units)
    wire += sum(collective_seconds("reduce_scatter", u.numel * 4, 8, slow) for u in units)
    bounded = timeline(made, presets.describe(name), slow, spread=0.0)
    assert bounded.seconds == pytest.approx(wire, rel=0.05)
    assert bounded.exposed["gather"] + bounded.exposed["reduce"] > 0.9 * bounded.seconds
    unbound = timeline(made, presets.describe(name), free, spread=0.0)
    assert unbound.exposed.get("gather", 0.0) + unbound.exposed.get("reduce", 0.0) < 0.01 * unbound.seconds


def test_zero2_gathers_half_of_what_zero3_does():
    where = cluster("8xh100", bandwidth=1e9)
    for strategy, gathers in (("zero3", 2), ("zero2", 1)):
        found = timeline(plan("llama3-8b", 8, strategy=strategy, rows=1, tokens=512), presets.describe("llama3-8b"), where)
        once = sum(collective_seconds("all_gather", u.numel * 2, 8, where) for u in presets.describe("llama3-8b").units)
        assert found.busy["gather"] == pytest.approx(gathers * once, rel=1e-3)


@pytest.mark.parametrize("sync", ["every", "last"])
def test_micro_batches_that_are_left_out_are_counted(sync):
    """Eight micro-batches, of which three are placed on lanes: the step takes the sum of their parts."""
    where = cluster("8xh100")
    four, eight, twelve = (seconds("llama-1.5b", plan("llama-1.5b", 8, accumulate=n, sync=sync), where) for n in (4, 8, 12))
    assert twelve - eight == pytest.approx(eight - four, rel=1e-6)
    assert eight / four == pytest.approx(2, rel=0.03)


def test_copies_are_reduced_beside_backward():
    where = Cluster.named("64xh100")
    own = {"replicate": 8, "shard": 8}
    found = timeline(plan("llama3-8b", 64, strategy="hybrid", own=own, tokens=8192), presets.describe("llama3-8b"), where)
    assert found.busy["copies"] > 0
    assert found.exposed.get("copies", 0.0) < 0.5 * found.busy["copies"]


def test_a_small_model_waits_for_its_host():
    found = timeline(plan("gpt2", 1, rows=1, tokens=256), presets.describe("gpt2"), Cluster.named("1xh100"))
    assert found.exposed["host"] > 0.5 * found.seconds


def test_on_cpus_everything_happens_one_after_the_other():
    """Gloo's collectives block, and the CPU that issues kernels also runs them."""
    description, where = presets.describe("llama-bytes"), Cluster.named("2xcpu")
    made = fs.strategy("zero3", description, devices=2, batch=fs.Batch(8, 128))
    found = timeline(made, description, where, spread=0.0)
    assert found.seconds == pytest.approx(sum(found.busy.values()))
    gathered = 2 * sum(collective_seconds("all_gather", u.numel * 4, 2, where) for u in description.units)
    assert found.exposed["gather"] == pytest.approx(gathered)


def test_cpus_fuse_attention_where_cuda_has_products():
    """fp32 and grouped heads: the flops that count are those of the causal half, two products forward, five back."""
    description, size = presets.describe("llama-bytes"), preset("llama-bytes")
    made = fs.strategy("ddp", description, devices=1, batch=fs.Batch(8, 128))
    found = timeline(made, description, Cluster.named("1xcpu"), spread=0.0).compute
    causal = 7 * 8 * 128**2 * size.dim * size.layers
    forward, backward = Cluster.named("1xcpu").attention_rate(128, size.dim // size.heads, "fp32")
    assert causal / forward < found["attention"] < causal / backward
    assert "attention" not in timeline(made, description, Cluster.named("1xh100"), spread=0.0).compute


def test_hooks_cost_the_host_less_while_accumulating_and_on_one_rank():
    """On an H200, 16 blocks, four micro-batches, four calls: 441 and 441 ms, 452 and 423, 514 and 460, 514 and 458."""
    made = {s: plan("gpt2", 8, rows=1, tokens=128, accumulate=4, sync=s) for s in ("every", "last")}
    every, last = (timeline(p, presets.describe("gpt2"), Cluster.named("8xh100")).busy["host"] for p in made.values())
    assert 0.85 * every < last < every
    alone = plan("gpt2", 1, rows=1, tokens=128, accumulate=4)
    assert timeline(alone, presets.describe("gpt2"), Cluster.named("1xh100")).busy["host"] < every


def counted(name: str, calls: Calls) -> fs.Description:
    """A preset of which every block makes these calls in forward, and again in backward."""
    found = presets.describe(name)
    blocks = {u.name for u in found.units if u.kind == "block"}
    made = {}
    for key, trace in found.costs.traces.items():
        rows = list(trace)
        sections = tuple(
            dataclasses.replace(s, calls=calls if u in blocks and m in ("forward", "backward") else Calls()) for m, u, s in rows
        )
        made[key] = dataclasses.replace(trace, sections=sections, template=tuple(range(len(rows))))
    return dataclasses.replace(found, costs=dataclasses.replace(found.costs, traces=made))


def test_remat_costs_the_host_what_it_does_in_python():
    """12 blocks, three micro-batches, forward and again: 72 times 1 region, 5 tensors and 7 operations."""
    paces = Measured("here", "bf16", launch=1e-6, checkpointed=100e-6, saved=10e-6, dispatched=20e-6)
    where = dataclasses.replace(Cluster.named("1xh100"), measured=paces)
    made = plan("gpt2", 1, rows=1, tokens=128, accumulate=3, remat="selective")
    hosts = [timeline(made, counted("gpt2", c), where).busy["host"] for c in (Calls(), Calls(1, 5, 7))]
    assert hosts[1] - hosts[0] == pytest.approx(72 * (100e-6 + 5 * 10e-6 + 7 * 20e-6))


def test_a_cpu_bound_step_scales_with_the_time_of_an_operation():
    """Only `issued` counts, not `launch` or `dispatched`."""
    made = plan("gpt2", 8, rows=1, tokens=128)
    times = []
    for issued in (20e-6, 40e-6):
        measured = Measured("here", "bf16", launch=5e-6, dispatched=10e-6, issued=issued)
        times.append(seconds("gpt2", made, dataclasses.replace(cluster("8xh100", **FREE), measured=measured)))
    assert times[1] / times[0] == pytest.approx(2, rel=0.01)


def test_a_compiled_block_costs_the_host_its_guards(monkeypatch):
    """12 blocks, three micro-batches, forward and backward: 72 times 11 operations."""
    made, where = plan("gpt2", 8, rows=1, tokens=128, accumulate=3, compile=True), Cluster.named("8xh100")
    with_guards = timeline(made, presets.describe("gpt2"), where).busy["host"]
    monkeypatch.setattr(clusters, "calibration_of", lambda device: dataclasses.replace(HOPPER, compiled_guards=Fitted(0.0)))
    without = timeline(made, presets.describe("gpt2"), where).busy["host"]
    assert with_guards - without == pytest.approx(72 * 11 * where.of("issued"))


def test_gradients_that_wait_are_widened_once_then_added():
    """Llama 1.5B, three micro-batches, bf16 gradients and fp32 sums; each micro-batch unpacks 4 bytes an element twice."""
    where, description = cluster("8xh100", **FREE), presets.describe("llama-1.5b")
    elements, hbm, pointwise = sum(u.numel for u in description.units), where.of("hbm"), where.of("pointwise")
    made = {s: plan("llama-1.5b", 8, accumulate=3, sync=s) for s in ("every", "last")}
    every, last = (timeline(p, description, where).compute["copies"] / elements for p in made.values())
    unpacked = 3 * 2 * 4 / hbm
    assert every == pytest.approx(unpacked + 3 * 6 / hbm / 0.45, rel=0.01)
    assert last == pytest.approx(unpacked + 6 / hbm / 0.45 + 2 * 10 / pointwise + 8 / hbm / 0.84, rel=0.01)


def test_an_update_takes_its_bytes_at_the_rate_of_its_kernels():
    """AdamW with clipping, in one pass: three fp32 tensors in and out. The gradient stays in bf16, as it was computed."""
    where, description = Cluster.named("1xh100"), presets.describe("llama-1.5b")
    moved = sum(u.numel for u in description.units) / where.of("hbm")
    found = timeline(plan("llama-1.5b", 1, strategy="ddp"), description, where).compute
    assert found["update"] == pytest.approx(26 * moved / 0.85, rel=1e-6)
    assert found["norm"] == pytest.approx(2 * moved / 0.84, rel=1e-6)


def test_unequal_cores_slow_a_step_that_device_and_host_bound_equally():
    """Such a step takes the slower of the two each time. A step that one of them always bounds depends on the mean alone."""
    made, free = plan("gpt2", 8, rows=4, tokens=1024), cluster("8xh100", **FREE)

    def with_host(issued: float, quiet: float) -> Cluster:
        return dataclasses.replace(free, measured=Measured("here", "bf16", issued=issued, quiet=quiet))

    alone = timeline(made, presets.describe("gpt2"), with_host(1e-9, 1.0), spread=0.0)
    operations = timeline(made, presets.describe("gpt2"), with_host(1.0, 1.0), spread=0.0).busy["host"]
    changed = {}
    for share in (0.3, 1.2, 3.0):  # of the device's time that the host needs
        even, shared = (seconds("gpt2", made, with_host(share * alone.seconds / operations, q)) for q in (1.0, 0.8))
        changed[share] = shared / even - 1
    assert 0.02 < changed[1.2] < 0.2 / 3  # all of which if the host bounded the whole step at once
    assert abs(changed[0.3]) < 0.005
    assert abs(changed[3.0]) < 0.005


def test_reduced_models_predict_the_full_one():
    whole, where = presets.describe("llama3-70b"), cluster("64xh100")
    made = plan("llama3-70b", 64, remat="full")
    few, more = (
        timeline(dataclasses.replace(made, units=tuple(u for u in made.units if u.name in {v.name for v in m.units})), m, where)
        for m in (reduced_description(whole, 3), reduced_description(whole, 5))
    )
    extended = more.seconds + (80 - 5) / 2 * (more.seconds - few.seconds)
    assert extended == pytest.approx(timeline(made, whole, where).seconds, rel=0.01)


def test_rows_that_do_not_align_are_slow():
    machine = Machine(Cluster.named("1xh100"), "bf16")
    loss = [s for m, _, s in presets.describe("gpt2").costs.trace("bf16", "chunked", "none") if m == "chunk"]  # 50,257 rows
    aligned = [s for m, _, s in presets.describe("llama-1.5b").costs.trace("bf16", "chunked", "none") if m == "chunk"]
    odd, even = (machine.section(s[0], 1, 4096, backward=False).gemm for s in (loss, aligned))
    flops = [6 * 4096 * n * d for n, d in ((50_257, 768), (128_256, 2048))]
    assert (odd / flops[0]) / (even / flops[1]) == pytest.approx(1 / 0.16, rel=0.05)


# How far each source is off, rounded up. MosaicML's software is of 2023, and MaxText's compiler is another.
TOLERANCES = {"torchtitan": 0.05, "MosaicML": 0.22, "MaxText": 0.15}


@pytest.mark.parametrize("row", published.ROWS, ids=lambda row: row.label)
def test_published_tables(row):
    assert published.predicted(row) == pytest.approx(row.published, rel=TOLERANCES[row.label.split(",")[0]])


@pytest.mark.parametrize(("few", "many"), [(0, 2), (1, 3), (4, 5), (4, 6), (4, 7)])
def test_published_losses_of_weak_scaling(few, many):
    """Within three points, from 8 devices to 128, 256 and 512."""
    before, after = published.ROWS[few], published.ROWS[many]
    lost = [1 - after.published / before.published, 1 - published.predicted(after) / published.predicted(before)]
    assert lost[1] == pytest.approx(lost[0], abs=0.03)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_step_on_jax_is_compiled_and_issued_as_one_program(remat):
    """The kernels are those of torch's compiled blocks, whatever the plan says of compile; the host issues none of them."""
    jax, torch = (
        [timeline(plan("llama-125m", 1, own={"devices": 1}, remat=remat, compile=c), presets.describe("llama-125m"),
                  Cluster.named("1xh200"), spread=0.0, engine=engine) for c in (False, True)]
        for engine in ("jax", "torch")
    )  # fmt: skip
    assert jax[0] == jax[1]
    assert jax[0].compute == torch[1].compute
    assert jax[0].busy["host"] == 0
    assert jax[0].seconds == pytest.approx(sum(jax[0].compute.values()))
    assert jax[0].seconds < torch[1].seconds < torch[0].seconds
