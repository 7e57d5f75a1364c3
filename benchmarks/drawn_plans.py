"""Plans of random choices with a fixed seed: what `same_numbers` holds predictions against beside the named strategies."""

import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import fullshard as fs
from fullshard.model.presets import LlamaSize
from fullshard.plan.optimizer import Optimizer
from fullshard.planner.memory.peak_memory import peak_bytes
from fullshard.planner.search.comparison import most_by_term
from fullshard.planner.time.lane_spans import lane_spans
from fullshard.planner.time.timeline import kernels_seconds, timeline
from fullshard.planner.wire_bytes import wire_bytes

MODELS = ("llama-125m", "llama-1.5b", "llama3-8b", "llama3.2-1b", "gpt2", "gpt2-xl", "llama3-70b")
CLUSTERS = ("1xh100", "8xh100", "8xh100", "64xh100", "4xa100", "8xcpu")
TERMS = ("params", "optimizer", "gradients", "activations", "gathered", "reduce", "staging", "fetched", "loss")
SIZE = LlamaSize(dim=1024, layers=16, heads=16, kv_heads=4, ffn=2816, vocab=32000, sequence=2048)


@lru_cache
def split_llama() -> fs.Description:
    """A model that was described for a tensor axis."""
    import torch

    from fullshard import on_torch
    from fullshard.on_torch.model.built_in import Llama

    with torch.device("meta"):
        model = Llama(SIZE)
    return on_torch.describe(model, micro_batch=1, sequence=1024, tensor=(2,))


@lru_cache
def mixture() -> fs.Description:
    """A model of experts, which were described for an axis of their own."""
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    from fullshard import on_torch

    sizes = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 14}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads, max_position_embeddings=2048))
    return on_torch.describe(model, experts=True, micro_batch=1, sequence=1024, expert=(2, 4))


def drawn(seed: int) -> Iterator[tuple[str, Any]]:
    """(name, numbers or the sentence that refuses the plan) of the plan with this seed."""
    pick = random.Random(seed)
    kind = pick.choice(("preset",) * 8 + ("tensor", "expert"))
    description = {"tensor": split_llama, "expert": mixture}.get(kind, lambda: fs.presets.describe(pick.choice(MODELS)))()
    try:
        cluster = fs.Cluster.load(pick.choice(CLUSTERS))
        plan, common = _plan(pick, kind, description, cluster)
        yield f"drawn {seed}", _numbers(plan, description, cluster, common)
    except (fs.FullshardError, ValueError) as error:
        yield f"drawn {seed}", str(error)


def _plan(pick: random.Random, kind: str, description: fs.Description, cluster: fs.Cluster) -> tuple[fs.Plan, dict[str, Any]]:
    devices, accumulate = cluster.devices, pick.choice((1, 1, 2, 3, 6))
    engine = pick.choice(("torch", "torch", "torch", "jax")) if kind == "preset" else "torch"
    name = pick.choice(("zero3", "zero3", "zero3", "zero2", "zero1", "ddp", "hybrid", "hpz")) if devices > 1 else "zero3"
    own: dict[str, Any] = {"devices": devices}
    if name == "hybrid":
        own = {"replicate": 2, "shard": devices // 2}
    if name == "hpz":
        own["reshard"] = 2
    own |= {"tensor": 2} if kind == "tensor" and name != "hybrid" and devices > 2 else {}
    own |= {"expert": pick.choice((2, 4))} if kind == "expert" and name == "zero3" and devices > 4 else {}
    precision = _precision(pick, engine)
    plan = fs.strategy(
        name,
        description,
        **own,
        batch=fs.Batch(pick.choice((1, 2, 3)), 1024, accumulate, _sync(pick, name, accumulate, engine)),
        precision=precision,
        remat=pick.choice(("none", "selective", "full")),
        compile=engine == "torch" and kind != "expert" and pick.random() < 0.4,
        prefetch=fs.Prefetch(2, 2)
        if name in ("zero3", "hybrid") and engine == "torch" and pick.random() < 0.2
        else fs.Prefetch(),
    )
    plan = _homes(pick, plan, description, engine) if pick.random() < 0.6 else plan
    if engine == "torch":
        plan = _with(pick, plan, wire=_wire(pick)) if pick.random() < 0.25 else plan
        plan = _with(pick, plan, kernels=_kernels(pick)) if pick.random() < 0.2 else plan
    optimizer = pick.choice((None, None, fs.SGD(lr=0.1, momentum=0.9), fs.SGD(lr=0.1)))
    loss = pick.choice(("chunked", "plain")) if kind == "preset" else "plain"
    return plan, {"loss": loss, "clip": pick.random() < 0.5, "optimizer": optimizer, "engine": engine}


def _sync(pick: random.Random, name: str, accumulate: int, engine: str) -> Any:
    return "last" if accumulate > 1 and name != "zero1" and engine == "torch" and pick.random() < 0.3 else "every"


def _precision(pick: random.Random, engine: str) -> fs.Precision:
    kinds: dict[str, Any] = {"compute": pick.choice(("bf16", "bf16", "bf16", "fp32")), "reduce": pick.choice(("bf16", "fp32"))}
    draw = pick.random()
    if draw < 0.15 and engine == "torch":
        kinds |= {"compute": "bf16", "float8": pick.choice(("tensorwise", "rowwise"))}
    elif draw < 0.3 and engine == "torch":
        kinds |= {"moments": pick.choice(("bf16", "int8"))}
    elif draw < 0.4:
        kinds |= {"master": "bf16"} | ({"rounding": "stochastic"} if engine == "torch" else {})
    return fs.Precision(**kinds)


def _homes(pick: random.Random, plan: fs.Plan, description: fs.Description, engine: str) -> fs.Plan:
    """Homes for all units or some of the blocks, and what the update of offloaded state may choose."""
    blocks = [u.name for u in description.units if u.kind == "block"]
    places = ("device", "host", "host", "disk") if engine == "torch" else ("device", "host")
    params, optimizer, activations = (pick.choice(places) for _ in range(3))
    if params == "disk":
        optimizer = "disk"
    outer = fs.Home(params, optimizer)
    if pick.random() < 0.6:
        plan = plan.change("*", home=outer)
    few = blocks[pick.randrange(len(blocks)) :] if pick.random() < 0.4 else blocks
    for name in few:
        plan = plan.change(name, home=replace(outer, activations=activations))
    if plan.offloads_state and engine == "torch":
        plan = replace(plan, staging=pick.choice((1, 2, 4)), cpu_share=pick.choice((None, 0.0, 0.5, 1.0)))
        plan = replace(plan, backlog=pick.choice((None, None, 2, 8)))
    return plan


def _wire(pick: random.Random) -> fs.Wire:
    gather, reduce = pick.choice(("plain", "int8", "fp8")), pick.choice(("plain", "int8", "fp8"))
    return fs.Wire(gather=gather, reduce=reduce, error_feedback=reduce != "plain" and pick.random() < 0.5)


def _kernels(pick: random.Random) -> fs.Kernels:
    return fs.Kernels(
        attention=pick.choice(("auto", "flash")), loss=pick.choice(("auto", "torch")), update=pick.choice(("auto", "torch"))
    )


def _with(pick: random.Random, plan: fs.Plan, **more: Any) -> fs.Plan:
    """The plan with another part, if it takes it."""
    try:
        return replace(plan, **more)
    except fs.FullshardError:
        return plan


def _numbers(plan: fs.Plan, description: fs.Description, cluster: fs.Cluster, common: dict[str, Any]) -> dict[str, Any]:
    found = fs.estimate(plan, description, cluster, **common)
    optimizer: Optimizer | None = common["optimizer"]
    engine, loss = common["engine"], common["loss"]
    spans = lane_spans(plan, description, cluster, loss=loss, optimizer=optimizer, clip=common["clip"])
    groups: dict[Any, str] = dict.fromkeys(TERMS, "some")
    every = ("buffers", "whole gradients", "residuals", "workspace", "batch")
    most = most_by_term(plan, description, groups | dict.fromkeys(every, "others"), **common)
    return {
        "estimate": {k: v for k, v in asdict(found).items() if k not in ("notes", "bottleneck", "calibration")},
        "peak": asdict(peak_bytes(plan, description, **common)),
        "of a fifth by the cores": asdict(peak_bytes(plan, description, **common, cpu_share=0.2)),
        "time": asdict(timeline(plan, description, cluster, **common)),
        "kernels": kernels_seconds(plan, description, cluster, loss, engine),
        "most": most,
        "wire": asdict(wire_bytes(plan, description, loss=loss, clip=common["clip"], engine=engine)),
        "spans": [len(spans.spans), spans.seconds, sum(s.end - s.start for s in spans.spans)],
    }
