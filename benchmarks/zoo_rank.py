"""What a rank of the zoo does: train one head sharded, and compare with the same head unsharded."""

import contextlib
import copy
import traceback
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

RANKS, STEPS, LR, EPS = 2, 3, 1e-3, 1e-4
CLOSE, CLOSE_LOSS = 5e-5, 1e-3  # the largest differences of a weight, which a step moves by up to LR, and of a loss
NOISE, DRAWS = {"fp32": 2.0**-23, "fp64": 2.0**-52}, 3  # relative changes of all weights, by which rounding is estimated
ROUNDING = 4.0  # times what such a change makes of weights and losses, is rounding
MOST_ROUNDING = 5e-4  # a weight that rounding alone moves by more shows nothing


@dataclass(frozen=True)
class Job:
    """One attempt at a head. `mode`: train or eval. `precision`: fp32, or fp64 where the model computes so. `example`: whether
    the model is described with a batch."""

    library: str
    family: str
    name: str
    mode: str = "train"
    precision: str = "fp32"
    example: bool = False


def attempt(job: Job) -> dict[str, Any]:
    """The result on this rank. The first rank compares."""
    from fullshard.base.errors import FullshardError

    try:
        with _precision(job):
            given = _reference(job)
            return given if "result" in given else _train(job, given)
    except FullshardError as error:
        return {"result": "refused", "why": str(error)}
    except Exception as error:
        return {"result": "traceback", "why": line(error), "where": traceback.format_exc()[-2500:]}


@contextlib.contextmanager
def _precision(job: Job) -> Iterator[None]:
    """Inside, what torch and plans call fp32 is in the job's precision."""
    import torch

    from fullshard.on_torch.tensors.dtypes import PLAN_DTYPES

    kind = {"fp32": torch.float32, "fp64": torch.float64}[job.precision]
    with unittest.mock.patch.dict(PLAN_DTYPES, fp32=kind):
        torch.set_default_dtype(kind)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def _build(job: Job, how: str) -> Any:
    import torch

    from benchmarks.zoo_models import build

    model = build(_head(job), how).to(torch.get_default_dtype())
    return model.train(job.mode == "train")


def line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _head(job: Job) -> Any:
    from benchmarks.zoo_models import Head

    return Head(job.library, job.family, job.name)


def _reference(job: Job) -> dict[str, Any]:
    """What the first rank found without shards; the others get the batches only."""
    import torch.distributed as dist

    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            found = _unsharded(job)
        except Exception as error:
            found = {"result": "not built", "why": line(error)}
    sent = [{k: v for k, v in found.items() if k in ("result", "why", "batches", "how")}]
    dist.broadcast_object_list(sent, 0)
    return found or sent[0]


def part_loss(model: Any, values: dict[str, Any]) -> Any:
    """A sum over everything that the model returns, with fixed weights. Draws the same random numbers for the same inputs."""
    import torch

    from benchmarks.zoo_models import outputs, seed
    from fullshard import on_torch

    number = values["number"]
    seed(number)
    total: Any = 0.0
    for t in outputs(model, {k: v for k, v in values.items() if k != "number"}):
        flat = torch.where(t.isfinite(), t, 0.0).to(torch.get_default_dtype()).flatten().clamp(-1e3, 1e3)
        weights = torch.cos(torch.arange(flat.numel(), device=flat.device).to(flat.dtype) * 1.7 + 0.3)
        total = total + (flat * weights).sum() / flat.numel() ** 0.5
    return on_torch.Loss(total, 1)


def _numbered(batches: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [[{**part, "number": 10 * i + j} for j, part in enumerate(step)] for i, step in enumerate(batches)]


def _unsharded(job: Job) -> dict[str, Any]:
    from benchmarks.zoo_models import sample

    made = sample(_head(job), STEPS, RANKS)
    batches, model = _numbered(made.batches), _build(job, made.how)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = _plain_steps(model, batches)
    weights = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    moved = max((float((weights[n] - start[n]).abs().max()) for n in start if start[n].numel()), default=0.0)
    if not moved or any(not w.isfinite().all() for w in weights.values()):
        raise ValueError("the unsharded model does not train: its weights are not finite or do not move")
    return {"batches": batches, "losses": losses, "weights": weights, "moved": moved, "how": made.how}


def _plain_steps(model: Any, batches: list[list[dict[str, Any]]]) -> list[float]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    losses = []
    for step in batches:
        total = sum(part_loss(model, copy.deepcopy(part)).sum for part in step) / RANKS
        if not total.requires_grad:
            raise ValueError("no output depends on a trained parameter")
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()))
    return losses


def _train(job: Job, given: dict[str, Any]) -> dict[str, Any]:
    """Train sharded."""
    import torch.distributed as dist

    import fullshard as fs
    from fullshard import on_torch

    rank, model = dist.get_rank(), _build(job, given["how"])
    more = {"example": copy.deepcopy(given["batches"][0][0]), "loss": part_loss, "costs": False} if job.example else {}
    description = on_torch.describe(model, **more)
    plan = fs.zero3(description, devices=RANKS, batch=fs.Batch(2, 1))
    state = on_torch.shard(model, plan, fs.AdamW(lr=LR, eps=EPS), first_step_checks=False)
    losses = []
    for step in given["batches"]:
        losses.append(float(on_torch.train_step(state, [copy.deepcopy(step[rank])], loss=part_loss).loss))
    weights = {n: p.full_tensor().detach() for n, p in state.model.named_parameters()}
    if "weights" not in given:
        return {"result": "equal"}
    name, worst, off = _apart(weights, losses, given)
    found = {"apart": worst, "moved": given["moved"], "notes": list(state.notes), "units": len(plan.units), "how": given["how"]}
    if worst <= CLOSE and off <= CLOSE_LOSS:
        return {"result": "equal", **found}
    weight, loss = _rounding(job, given)
    found |= {"rounding": weight, "rounding_loss": loss}
    if worst <= max(CLOSE, ROUNDING * weight) and off <= max(CLOSE_LOSS, ROUNDING * loss) and weight <= MOST_ROUNDING:
        return {"result": "equal", **found}
    why = f"{name} by {worst:.2g} of {given['moved']:.2g} (rounding {weight:.2g}), losses by {off:.2g} (rounding {loss:.2g})"
    return {"result": "differs", "why": why, **found}


def _apart(weights: dict[str, Any], losses: list[float], given: dict[str, Any]) -> tuple[str, float, float]:
    """The weight that differs most, by how much, and the largest relative difference of a loss."""
    worst, name = 0.0, ""
    for n, whole in weights.items():
        own = given["weights"][n]
        apart = float((whole.reshape(own.shape) - own).abs().max()) if own.numel() else 0.0
        if not apart <= worst:
            worst, name = apart, n
    return name, worst, max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, given["losses"], strict=True))


def _rounding(job: Job, given: dict[str, Any]) -> tuple[float, float]:
    """How far weights and losses of the unsharded model are apart if each weight begins with another last bit."""
    import torch

    most = [0.0, 0.0]
    for i in range(DRAWS):
        model, draw = _build(job, given["how"]), torch.Generator().manual_seed(i)
        with torch.no_grad():
            for p in model.parameters():
                p *= 1 + NOISE[job.precision] * torch.randint(-1, 2, p.shape, generator=draw)
        losses = _plain_steps(model, given["batches"])
        _, *apart = _apart({n: p.detach() for n, p in model.named_parameters()}, losses, given)
        most = [max(a, b) for a, b in zip(most, apart, strict=True)]
    return most[0], most[1]
