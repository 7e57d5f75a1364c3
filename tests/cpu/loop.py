"""Runs inside the ranks: whole runs of small recipes, without the seconds that new processes take."""

import contextlib
import io
import os
import signal
import tempfile
from itertools import islice
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fullshard as fs
from fullshard import on_torch
from fullshard.commands.train import Given, _prepare_together
from fullshard.observe.profile.profile_files import write_profile
from fullshard.on_torch.engine import trainer
from fullshard.on_torch.loss.losses import summed_loss
from fullshard.on_torch.optimizers import cpu_adam
from fullshard.on_torch.ranks.device_meshes import data_share
from fullshard.runs.prepare.open_data import batches as make_batches
from fullshard.runs.prepare.prepare import prepare
from fullshard.runs.prepare.recipe_plan import make_optimizer
from fullshard.runs.recipe.recipe import load_recipe
from fullshard.runs.run import execute
from fullshard.runs.watchdog import Watchdog


def run(directory: str, overrides: list[str], name: str) -> None:
    """Carry the recipe of `directory` out, as `fullshard train` does."""
    os.chdir(directory)
    execute(prepare(load_recipe("recipe.toml", overrides), dist.get_world_size()), Path("runs") / name)


def said(*args) -> dict:
    """What a run prints on stderr, and the error that ended it."""
    printed, error = io.StringIO(), None
    with contextlib.redirect_stderr(printed):
        try:
            run(*args)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {"said": printed.getvalue(), "error": error}


def run_offline(*args) -> None:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run(*args)


def without_a_compiler(directory: str, overrides: list[str], name: str) -> str:
    """What the run prints, on one line."""
    before, printed = dict(os.environ), io.StringIO()
    os.environ |= {"CC": "no-such-compiler", "XDG_CACHE_HOME": f"{directory}/cache"}
    cpu_adam.built.cache_clear()
    try:
        with contextlib.redirect_stderr(printed):
            run(directory, overrides, name)
    finally:
        os.environ.clear()
        os.environ |= before
        cpu_adam.built.cache_clear()
    return " ".join(printed.getvalue().split())


def batches(seed: int, count: int = 1) -> list[dict]:
    ids = torch.randint(0, 64, (count, 4, 17), generator=torch.Generator().manual_seed(seed * 100 + dist.get_rank()))
    return [{"input_ids": i[:, :-1], "labels": i[:, 1:]} for i in ids]


def make_state(optimizer: fs.AdamW | fs.SGD | fs.TorchOptimizer, compute: str = "fp32") -> on_torch.State:
    model = on_torch.load_model("llama-nano")
    plan = fs.zero3(
        on_torch.describe(model),
        devices=dist.get_world_size(),
        batch=fs.Batch(4, 16),
        precision=fs.Precision(compute=compute),
    )
    return on_torch.shard(model, plan, optimizer, seed=3)


def poisoned(model, batch):
    """A loss whose gradient is not finite on one rank."""
    return summed_loss(model, batch) * (float("nan") if dist.get_rank() == 1 else 1.0)


def skip(optimizer) -> dict:
    """A step with a gradient that is not finite, between two good ones."""
    state = make_state(optimizer)
    on_torch.train_step(state, batches(0), clip=1.0)
    before = [p.to_local().clone() for p in state.parameters()]
    bad = on_torch.train_step(state, batches(1), loss=poisoned, clip=1.0)
    after = [p.to_local().clone() for p in state.parameters()]
    good = on_torch.train_step(state, batches(2), clip=1.0)
    return {
        "skipped": [bool(bad.skipped), bool(good.skipped)],
        "unchanged": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "loss": float(good.loss),
        "changed": any(not torch.equal(a, p.to_local()) for a, p in zip(after, state.parameters(), strict=True)),
    }


def named(name: str, options: tuple) -> float:
    """How far five steps of a torch optimizer over shards are from the same over the unsharded model."""
    state = make_state(fs.TorchOptimizer(name, 1e-3, options))
    plain = on_torch.load_model("llama-nano")
    on_torch.initialize(plain, torch.device("cpu"), seed=3)
    oracle = getattr(torch.optim, name)(plain.parameters(), lr=1e-3, **dict(options))
    for seed in range(5):
        own = batches(seed)
        on_torch.train_step(state, own)
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own[0])
        rows = {k: torch.cat([g[k] for g in gathered]) for k in own[0]}
        F.cross_entropy(plain(rows["input_ids"]).flatten(0, 1), rows["labels"].flatten()).backward()
        oracle.step()
        oracle.zero_grad()
    pairs = zip(state.model.named_parameters(), plain.named_parameters(), strict=True)
    return max(float((p.full_tensor() - q).abs().max() / q.abs().max()) for (_, p), (_, q) in pairs)


def resume(directory: str, overrides: list[str], name: str, resume: str = "auto", accept: bool = False) -> None:
    """The same run again, from its newest checkpoint."""
    os.chdir(directory)
    prepared = prepare(load_recipe("recipe.toml", overrides), dist.get_world_size())
    execute(prepared, Path("runs") / name, resume, accept=accept)


def signalled(directory: str, overrides: list[str], name: str, number: int, step: int) -> int:
    """The exit code of a run of which rank 1 gets a signal in step `step`, and nobody else."""
    train_step = trainer.train_step

    def asked(state, *args, **kwargs):
        if dist.get_rank() == 1 and state.step + 1 == step:
            os.kill(os.getpid(), number)
        return train_step(state, *args, **kwargs)

    os.chdir(directory)
    prepared = prepare(load_recipe("recipe.toml", overrides), dist.get_world_size())
    with mock.patch.object(trainer, "train_step", asked):
        code = execute(prepared, Path("runs") / name)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a run that was stopped leaves it ignored
    return code


def ended_on_own_disk(directory: str, overrides: list[str], name: str, resume: str | None = None) -> tuple[int, str]:
    """As `ended`, in a directory of this rank's own, on a machine of this rank's own."""
    with mock.patch("socket.gethostname", return_value=f"node-{dist.get_rank()}"):
        return ended(f"{directory}/disk{dist.get_rank()}", overrides, name, resume)


def refused(*args) -> str:
    try:
        resume(*args)
    except fs.FullshardError as error:
        return str(error)
    return "accepted"


def ended(directory: str, overrides: list[str], name: str, resume: str | None = None) -> tuple[int, str]:
    """The exit code and the sentence that `fullshard train` would end with."""
    os.chdir(directory)
    try:
        prepared = prepare(load_recipe("recipe.toml", overrides), dist.get_world_size())
        execute(prepared, Path("runs") / name, resume, accept=True)
    except fs.FullshardError as error:
        return error.exit_code, str(error)
    return 0, ""


def ended_full(directory: str, overrides: list[str], name: str, disk: str, freed: int | None = None) -> tuple[int, str]:
    """As `ended`, of a run whose disk is filled after its first step, and freed after step `freed`."""
    train_step = trainer.train_step
    ballast = Path(disk) / "ballast"

    def counted(state, *args, **kwargs):
        result = train_step(state, *args, **kwargs)
        if state.step == 1 and dist.get_rank() == 0:
            with contextlib.suppress(OSError), ballast.open("wb") as file:
                while True:
                    file.write(b"x" * 4096)
        if state.step == freed and dist.get_rank() == 0:
            ballast.unlink()
        dist.barrier()
        return result

    trainer.train_step = counted
    try:
        return ended(directory, overrides, name)
    finally:
        trainer.train_step = train_step


def skipping(directory: str, overrides: list[str], after: int, steps: int) -> list[float]:
    """The losses of a run, by a loop of its own, that leaves out the batches of `steps` steps after step `after`."""
    os.chdir(directory)
    prepared = prepare(load_recipe("recipe.toml", overrides), dist.get_world_size())
    recipe = prepared.recipe
    state = on_torch.shard(prepared.model, prepared.plan, make_optimizer(recipe), seed=recipe.train.seed)
    source = make_batches(recipe, prepared.plan, prepared.data, data_share(prepared.plan.mesh), prepared.engine)
    taken = list(islice(source, recipe.steps + steps))
    found = []
    for batch in taken[:after] + taken[after + steps :]:
        result = on_torch.train_step(state, batch, loss=summed_loss, clip=recipe.optim.clip, lr=recipe.optim.lr)
        found.append(float(result.loss))
    return found


def with_environment(environment: dict[str, str], what: str, *args) -> None:
    os.environ |= environment
    {"run": run, "resume": resume}[what](*args)


def profiled(directory: str, overrides: list[str], name: str) -> str:
    """A run with a profile. What it prints on stderr, of all that the process writes there."""
    os.chdir(directory)
    prepared = prepare(load_recipe("recipe.toml", overrides), dist.get_world_size())
    with tempfile.TemporaryFile("w+") as printed:
        kept = os.dup(2)
        os.dup2(printed.fileno(), 2)
        try:
            execute(prepared, Path("runs") / name, reporter=write_profile)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        printed.seek(0)
        return printed.read()


def plan_to_resume(directory: str, overrides: list[str], name: str) -> tuple[str, str]:
    """The compute dtype that this rank would go on with by `fullshard train --resume auto`, and who chose it."""
    os.chdir(directory)
    run = Path("runs") / name
    given = Given(Path("recipe.toml"), overrides, run, None, "auto", False, False, 0, "torch")
    with Watchdog(run, 300.0) as watchdog:
        prepared = _prepare_together(given, watchdog)
    return prepared.plan.precision.compute, prepared.choices["compute"].origin
