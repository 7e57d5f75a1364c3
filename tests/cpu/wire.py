"""Quantised collectives and collectives of one's own, beside plain ones. Runs inside ranks."""

import copy
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fullshard as fs
from fullshard import on_torch
from fullshard.model import presets
from fullshard.on_torch.communication.collective_memory import use_memory
from fullshard.on_torch.private.fsdp_groups import gather_group
from fullshard.planner.wire_bytes import sent_bytes, wire_bytes
from tests.cpu import recipes

MODEL, DEMO, SEQUENCE = "llama-nano", "llama-bytes", 16


def make_plan(strategy: str, arguments: dict, wire: fs.Wire, model: str = MODEL, **more) -> tuple[fs.Plan, fs.Description]:
    """A plan for all ranks, and the description with costs that predictions need."""
    precision = more.pop("precision", fs.Precision())
    described = presets.describe(model)
    return fs.strategy(
        strategy, described, **arguments, precision=precision, batch=fs.Batch(1, SEQUENCE), wire=wire, **more
    ), described


def batches(mesh: fs.Mesh, step: int = 0) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1000 * step + on_torch.data_rank(mesh))
    ids = torch.randint(0, 64, (1, SEQUENCE + 1), generator=draw)
    return [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}]


def sent(strategy: str, arguments: dict, wire: fs.Wire, **more) -> dict:
    """Bytes that this rank sends in a steady step: counted, and predicted."""
    plan, described = make_plan(strategy, arguments, wire, DEMO, **more)
    state = on_torch.shard(on_torch.load_model(DEMO), plan, fs.AdamW(lr=1e-3), seed=7)
    for step in range(2):
        with on_torch.record() as traffic:
            on_torch.train_step(state, batches(plan.mesh, step), loss=on_torch.chunked_loss)
    counted = {"gather": 0.0, "reduce": 0.0, "copies": 0.0}
    for c in traffic.collectives:
        kind = {"all_to_all": "reduce", "all_reduce": "copies"}.get(c.kind, c.kind)
        counted[kind] += sent_bytes(c.kind, c.nbytes, c.ranks) if c.nbytes > 48 else 0  # else the step's own sums
    predicted = wire_bytes(plan, described, clip=False)
    return {"counted": counted, "predicted": {k: getattr(predicted, k) for k in counted}, "errors": state.wire_errors}


def gathered_errors() -> dict[str, tuple[float, float]]:
    """The largest error of each parameter that the first block computes with, and its largest value."""
    plan = make_plan("zero3", {"devices": dist.get_world_size()}, fs.Wire("int8"))[0]
    state = on_torch.shard(on_torch.load_model(MODEL), plan, fs.AdamW(lr=1e-3), seed=7)
    exact = {name: p.full_tensor() for name, p in state.model.model.layers[0].named_parameters()}
    found: dict[str, tuple[float, float]] = {}

    def compare(module: torch.nn.Module, inputs: object) -> None:
        for name, p in module.named_parameters():
            found.setdefault(name, (float((p - exact[name]).abs().max()), float(exact[name].abs().max())))

    state.model.model.layers[0].register_forward_pre_hook(compare)
    on_torch.train_step(state, batches(plan.mesh), loss=on_torch.chunked_loss)
    return found


def other_memory() -> dict:
    """Losses and FSDP's collectives with memory from the process group, beside torch's."""
    arguments = {"devices": dist.get_world_size()}
    plain, asked = (make_plan("zero3", arguments, w)[0] for w in (fs.Wire(), fs.Wire(memory="nccl")))
    found: dict = {}
    for name in ("plain", "losses"):
        state = on_torch.shard(on_torch.load_model(MODEL), plain, fs.AdamW(lr=1e-3), seed=7)
        if name == "losses":
            use_memory(asked, state.unit_modules)
        group = gather_group(state.unit_modules["model.layers.0"][0]).group
        found["set"] = [type(c).__name__ for c in (group._all_gather_comm, group._reduce_scatter_comm)]
        found["set"].append(group.force_sum_reduction_for_comms)
        steps = [on_torch.train_step(state, batches(plain.mesh, i), loss=on_torch.chunked_loss) for i in range(3)]
        found[name] = [step.loss.item() for step in steps]
    for name, more in (("refused", {}), ("beside communication", {"communication": on_torch.Communication})):
        try:
            on_torch.shard(on_torch.load_model(MODEL), asked, fs.AdamW(lr=1e-3), **more)
        except fs.FullshardError as error:
            found[name] = str(error)
    return found


def _losses(plan: fs.Plan, steps: int = 3, **more) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a few steps, and the gradients of the first."""
    state = on_torch.shard(on_torch.load_model(MODEL), plan, fs.AdamW(lr=1e-3), seed=7, **more)
    (row,) = batches(plan.mesh)
    loss = on_torch.summed_loss(state.model, row)
    loss.backward()
    gradients = {n: p.grad.full_tensor() for n, p in state.model.named_parameters() if p.grad is not None}
    state.model.zero_grad()
    return [on_torch.train_step(state, batches(plan.mesh, i)).loss.item() for i in range(steps)], gradients


def first_steps() -> dict[str, float]:
    """How far quantised steps are from plain ones."""
    world = dist.get_world_size()
    made = lambda wire, **more: make_plan("zero3", {"devices": world}, wire, **more)[0]
    int8 = fs.Wire("int8", "int8", error_feedback=True)
    (plain, exact), (found, _) = _losses(made(fs.Wire())), _losses(made(int8))
    _, gradients = _losses(made(fs.Wire(reduce="int8")), steps=1)  # rounded parameters have other gradients
    away = [_with_home(made, int8, home) for home in (fs.Home(), fs.Home("host", "host"))]
    square = lambda tensors: sum(float(t.square().sum()) for t in tensors)
    return {
        "gradient": (square(gradients[n] - g for n, g in exact.items()) / square(exact.values())) ** 0.5,
        "loss": max(abs(a / b - 1) for a, b in zip(found, plain, strict=True)),
        "offloaded": max(abs(a - b) for a, b in zip(*away, strict=True)),
        "fp8": max(abs(a / b - 1) for a, b in zip(_losses(made(fs.Wire("fp8", "fp8")))[0], plain, strict=True)),
    }


def _with_home(made, wire: fs.Wire, home: fs.Home) -> list[float]:
    plan = made(wire, home=home)
    state = on_torch.shard(on_torch.load_model(MODEL), plan, fs.AdamW(lr=1e-3), seed=7)
    return [on_torch.train_step(state, batches(plan.mesh, i)).loss.item() for i in range(3)]


class Counted(on_torch.Communication):
    """Counts the bytes that a rank sends, as the guide does."""

    sent = 0
    units: list[str] = []

    def __init__(self, unit: fs.Unit):
        super().__init__(unit)
        Counted.units.append(unit.name)

    def gather(self, output, shard, group):
        Counted.sent += shard.nbytes * (group.size() - 1)
        super().gather(output, shard, group)

    def reduce(self, output, gradients, group):
        Counted.sent += output.nbytes * (group.size() - 1)
        super().reduce(output, gradients, group)


def own_communication() -> dict:
    """A run with `Counted` beside a plain one, its bytes beside those of the log, and what is refused."""
    arguments = {"devices": dist.get_world_size()}
    plan = make_plan("zero3", arguments, fs.Wire())[0]
    Counted.units = []
    plain = _losses(plan)[0]
    losses = _losses(plan, communication=Counted)[0]
    state = on_torch.shard(on_torch.load_model(MODEL), plan, fs.AdamW(lr=1e-3), communication=Counted)
    on_torch.train_step(state, batches(plan.mesh))
    Counted.sent = 0
    with on_torch.record() as traffic:
        on_torch.train_step(state, batches(plan.mesh))
    logged = sum(sent_bytes(c.kind, c.nbytes, c.ranks) for c in traffic.collectives if c.kind != "all_reduce")
    quantized = make_plan("zero3", arguments, fs.Wire("int8"))[0]
    return {
        "counted": Counted.sent,
        "logged": logged,
        "losses": losses,
        "plain": plain,
        "units": Counted.units[: len(plan.units)],
        "beside wire": _refused(quantized, Counted),
        "no communication": _refused(plan, lambda unit: 3),
        "no effect": [_refused(plan, given) for given in (lambda unit: None, on_torch.Communication)],
    }


def _refused(plan: fs.Plan, communication) -> str:
    model = on_torch.load_model(MODEL)
    try:
        on_torch.shard(model, plan, fs.AdamW(lr=1e-3), communication=communication)
    except fs.FullshardError as error:
        assert not any(isinstance(p, DTensor) for p in model.parameters())  # as it was, for another try
        return str(error)
    return "not refused"


def recipe_run(here: Path, overrides: list[str], name: str) -> list[dict]:
    """The lines of metrics.jsonl of a small run on these ranks."""
    recipe = here / "small.toml"
    recipes.run(here, recipe, overrides, here / name)
    return [json.loads(line) for line in (here / name / "metrics.jsonl").read_text().splitlines()]


class Scaled(torch.nn.Module):
    """A linear whose output is multiplied by a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.register_buffer("scale", torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.normal_(self.linear.weight, std=0.1)
        torch.nn.init.zeros_(self.linear.bias)
        self.scale.copy_(torch.tensor([0.1, 0.2, 0.3, 1 / 3]))

    def forward(self, x):
        return self.linear(x) * self.scale


def cast_buffers() -> dict:
    """What a model with a buffer returns under a plan that casts it, and without a plan."""
    with torch.device("meta"):
        model = Scaled()
    found = {}
    x = torch.linspace(-1, 1, 16).view(2, 8)
    for kind in (None, "bf16"):
        plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), precision=fs.Precision(buffers=kind))
        state = on_torch.shard(copy.deepcopy(model), plan, seed=3)
        whole = {n: p.full_tensor().detach() for n, p in state.model.named_parameters()}
        by_hand = x @ whole["linear.weight"].T + whole["linear.bias"]
        scale = torch.tensor([0.1, 0.2, 0.3, 1 / 3]).to(torch.bfloat16 if kind else torch.float32)
        found[kind] = (state.model.scale.dtype, torch.equal(state.model(x), by_hand * scale))
    return found
