"""One run, from a recipe to its directory: prepared once before there are ranks, then carried out on all of them.

RUN/recipe.json     the resolved recipe
RUN/plan.json       the plan
RUN/metrics.jsonl   a line a step, and a line an evaluation
"""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard import optimizer
from fullshard.data import Batches, TokenFile
from fullshard.errors import FullshardError
from fullshard.plan import Batch, Plan, Precision
from fullshard.strategies import strategy
from fullshard.train.metrics import Metrics
from fullshard.train.progress import Bar
from fullshard.train.recipe import Recipe
from fullshard.train.schedule import factor

if TYPE_CHECKING:
    from fullshard.on_torch import State


@dataclass(frozen=True)
class Prepared:
    """A recipe that has been held against its model, its data and the number of ranks."""

    recipe: Recipe
    plan: Plan
    model: Any  # on meta
    data: TokenFile
    valid: TokenFile | None


def prepare(recipe: Recipe, ranks: int | None) -> Prepared:
    """Everything that can be wrong without a rank running is found here. `ranks`: by default all GPUs, or 2."""
    from fullshard import on_torch

    ranks = ranks if ranks is not None else on_torch.local_devices()
    if ranks < 1:
        raise FullshardError(f"ranks must be at least 1, not {ranks}")
    model = on_torch.load_model(recipe.model.name)
    plan = make_plan(recipe, on_torch.describe(model, title=recipe.model.name), ranks)
    on_torch.refuse(model, plan)
    if recipe.train.loss == "chunked" and plan.mesh.tensor > 1:
        raise FullshardError("train.loss = 'chunked' does not work with a tensor axis yet; write train.loss = 'plain'")
    data = TokenFile(recipe.data.path)
    valid = TokenFile(recipe.data.valid) if recipe.data.valid else None
    vocab, longest = on_torch.limits(model)
    for tokens in [data, valid] if valid else [data]:
        if vocab is not None and tokens.vocab > vocab:
            raise FullshardError(
                f"{tokens.path} has a vocabulary of {tokens.vocab}, the model one of {vocab}; use the model's own tokenizer"
            )
    if longest is not None and recipe.data.sequence > longest:
        raise FullshardError(f"data.sequence = {recipe.data.sequence} is longer than the model's {longest}; shorten it")
    batches(recipe, plan, data, 0)  # enough tokens for one sample
    return Prepared(recipe, plan, model, data, valid)


def make_plan(recipe: Recipe, description: Any, ranks: int) -> Plan:
    wanted = recipe.plan
    if wanted.file is not None:
        plan = Plan.load(wanted.file)
        rows = plan.mesh.data * plan.batch.accumulate * plan.batch.micro_batch
        if plan.mesh.devices != ranks:
            raise FullshardError(f"{wanted.file} is for {plan.mesh.devices} devices, but {ranks} ranks will run; start that many")
        if rows != recipe.train.global_batch or plan.batch.sequence != recipe.data.sequence:
            raise FullshardError(
                f"{wanted.file} is for steps of {rows} × {plan.batch.sequence} tokens, the recipe for "
                f"{recipe.train.global_batch} × {recipe.data.sequence}; make them agree"
            )
        return plan
    rows = ranks // wanted.tensor * recipe.train.micro_batch
    if ranks % (wanted.tensor * wanted.replicate):
        raise FullshardError(f"plan.tensor = {wanted.tensor} × plan.replicate = {wanted.replicate} must divide the {ranks} ranks")
    if recipe.train.global_batch % rows:
        raise FullshardError(
            f"train.global_batch = {recipe.train.global_batch} is not a multiple of {rows}: "
            f"{ranks // wanted.tensor} data ranks × train.micro_batch = {recipe.train.micro_batch}"
        )
    hybrid = {"replicate": wanted.replicate, "shard": ranks // wanted.tensor // wanted.replicate}
    own = hybrid if wanted.strategy == "hybrid" else {"devices": ranks}
    return strategy(
        wanted.strategy,
        description,
        **own,
        tensor=wanted.tensor,
        precision=Precision(compute=wanted.compute, reduce=wanted.reduce),
        batch=Batch(recipe.train.micro_batch, recipe.data.sequence, recipe.train.global_batch // rows),
        remat=wanted.remat,
        compile=wanted.compile,
    )


def execute(prepared: Prepared, directory: Path) -> None:
    """Train. Collective: every rank calls it."""
    from fullshard import on_torch

    recipe, plan = prepared.recipe, prepared.plan
    on_torch.start()
    first = on_torch.is_first()
    if first:
        write_run(directory, prepared)
    state = on_torch.shard(prepared.model, plan, make_optimizer(recipe), seed=recipe.train.seed)
    source = iter(batches(recipe, plan, prepared.data, on_torch.data_rank(plan.mesh)))
    metrics = Metrics(directory / "metrics.jsonl" if first else None)
    stop = _StopFlag()
    try:
        with Bar(recipe.steps, visible=first) as bar:
            for index in range(recipe.steps):
                _one_step(prepared, state, source, index, metrics, bar)
                if on_torch.any_rank(stop.asked, state):
                    metrics.write(event="stopped", step=state.step)
                    break
    finally:
        metrics.close()
        on_torch.finish()


def _one_step(prepared: Prepared, state: "State", source: Iterator[Any], index: int, metrics: Metrics, bar: Bar) -> None:
    from fullshard import on_torch

    recipe = prepared.recipe
    start = time.perf_counter()
    micro_batches = next(source)
    waited = time.perf_counter() - start
    lr = recipe.optim.lr * factor(index, recipe.steps, **recipe.schedule.model_dump())
    loss = on_torch.chunked_loss if recipe.train.loss == "chunked" else on_torch.summed_loss
    result = on_torch.train_step(state, micro_batches, loss=loss, clip=recipe.optim.clip, lr=lr)
    found, norm, tokens = result.loss.item(), result.grad_norm.item(), int(result.tokens.item())
    seconds = time.perf_counter() - start
    memory = on_torch.memory(state)
    metrics.write(
        step=index + 1,
        loss=found,
        grad_norm=norm,
        lr=lr,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        seconds=seconds,
        data_wait_seconds=waited,
        skipped=result.skipped,
        **memory,
    )
    bar.update(index + 1, found, tokens, memory["memory_allocated"])
    if prepared.valid is not None and (index + 1) % recipe.eval.every == 0:
        metrics.write(step=index + 1, eval_loss=evaluate(prepared, state, prepared.valid))


def evaluate(prepared: Prepared, state: "State", valid: TokenFile) -> float:
    """The mean loss over the first samples of the held-out data."""
    from fullshard import on_torch

    recipe, plan = prepared.recipe, prepared.plan
    rank = on_torch.data_rank(plan.mesh)
    held_out = Batches(valid, recipe.data.sequence, plan.batch.micro_batch, rank=rank, ranks=plan.mesh.data, shuffle=False)
    return on_torch.evaluate(state, [step[0] for step in islice(held_out, recipe.eval.batches)])


def batches(recipe: Recipe, plan: Plan, tokens: TokenFile, rank: int) -> Batches:
    return Batches(
        tokens,
        recipe.data.sequence,
        plan.batch.micro_batch,
        plan.batch.accumulate,
        rank,
        plan.mesh.data,
        recipe.train.seed,
        recipe.data.shuffle,
        recipe.data.within_documents,
    )


def make_optimizer(recipe: Recipe) -> optimizer.Optimizer:
    o = recipe.optim
    if o.name == "sgd":
        return optimizer.SGD(lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay, decay_all=o.decay_all)
    kind = optimizer.AdamW if o.name == "adamw" else optimizer.Adam
    return kind(lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, decay_all=o.decay_all)


def refuse_run(directory: Path) -> None:
    """A run's directory is made once; two runs in one would mix their numbers."""
    if (directory / "metrics.jsonl").exists():
        raise FullshardError(f"{directory} holds a run already; give another directory with --run")


def write_run(directory: Path, prepared: Prepared) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "recipe.json").write_text(prepared.recipe.model_dump_json(indent=1) + "\n")
    prepared.plan.save(directory / "plan.json")


class _StopFlag:
    """SIGTERM and Ctrl-C ask for an end at the next step boundary; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.asked = False
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
