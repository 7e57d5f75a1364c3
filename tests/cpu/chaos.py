"""Kills: a warm process forks ranks that train, and they die at a chosen moment, by SIGKILL, as a machine would kill them.

Torch is imported once, in a parent that makes no threads and no process group; a child costs a fork. A rank can be told
to die in a phase of a save, before, in the middle of or after the call that makes it; or it is killed from outside, at a
random time. Each rank notes which rows every step trained on; `tests/cpu/judge.py` says what must hold after a kill.

Three circumstances make it harder: `with:full`, the disk is full when the kill comes; `with:damage`, a damaged checkpoint
lies among the checkpoints, newer than all others; `with:divergence`, some batches are bad, and the run rolls back.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cpu.ranks import preloaded

CALLS = ("mkdir", "open", "pwrite", "ftruncate", "fsync", "rename", "unlink", "rmdir", "replace", "link")
EVERYBODY = ("open shard", "pwrite shard", "fsync shard")  # phases that all ranks go through
PHASES = (
    "mkdir staging",
    *EVERYBODY,
    "open manifest",
    "pwrite manifest",
    "fsync manifest",
    "fsync staging",
    "rename staging",  # the commit
    "fsync checkpoint_dir",
    "rename checkpoint",  # retention, from here on
    "unlink shard",
    "unlink manifest",
    "rmdir removed",
)
RETENTION_PHASES = PHASES[PHASES.index("rename checkpoint") :]
LEASE_PHASES = ("link lease", "unlink lease", "open lease", "pwrite lease")  # taken, an old one broken, renewed
ROLLBACK_PHASES = ("roll back", "replace metrics")
STORE_PHASES = ("remove_file manifest", "write shard", "write manifest", "remove checkpoint")  # of an object store


@dataclass(frozen=True)
class Kill:
    """How a run ends: the `nth` time that rank `rank` comes to `phase`, or after `seconds`; of one rank or all."""

    rank: int | None  # None: all
    phase: str | None = None
    nth: int = 1
    when: str = "before"  # before | half | after
    seconds: float = 0.0
    full: float = 0.0  # seconds for which the disk was full before

    def __str__(self) -> str:
        clock = "by the clock" + (", the disk full" if self.full else "")
        return f"{'all' if self.rank is None else 'one'}, " + (f"{self.when} {self.phase}" if self.phase else clock)


@dataclass(frozen=True)
class Attempt:
    """One start of a run: its ranks write the rows that they train on to `notes`."""

    here: str
    name: str
    world: int
    overrides: list[str]
    notes: str
    kill: Kill | None = None


def run_once(attempt: Attempt, timeout: float = 200.0) -> list[int]:
    """Fork ranks that begin or resume the run; the exit statuses as waitpid gives them."""
    kill = attempt.kill
    with tempfile.TemporaryDirectory() as meeting:
        children = [_fork(attempt, rank, meeting) for rank in range(attempt.world)]
        if kill and kill.phase is None:
            if kill.full:  # not before it trains: a start without room is refused
                _wait_for(Path(f"{attempt.notes}-0"), timeout)
            time.sleep(kill.seconds)
            if kill.full:
                fill(Path(attempt.here) / "runs")
                time.sleep(kill.full)
            for rank, child in enumerate(children):
                if kill.rank in (None, rank):
                    os.kill(child, signal.SIGKILL)
        found = _reap(children, timeout)
        if kill and kill.full:
            (Path(attempt.here) / "runs/ballast").unlink()
        return found


def _wait_for(path: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not (path.exists() and path.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)


def fill(disk: Path) -> None:
    """To the last byte."""
    file = os.open(disk / "ballast", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (65536, 1):
        with contextlib.suppress(OSError):
            while os.write(file, b"x" * size):
                pass
    os.close(file)


def _reap(children: list[int], timeout: float) -> list[int]:
    """Wait for all. When one is dead the others are soon too: their collectives fail; if not, they are ended."""
    found: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while len(found) < len(children):
        for child in children:
            if child not in found:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    found[child] = status
                    if status:  # what a launcher does: one dead, all end
                        deadline = min(deadline, time.monotonic() + 0.2)
        if time.monotonic() > deadline:
            for child in children:
                if child not in found:
                    os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.005)
    return [found[c] for c in children]


def _fork(attempt: Attempt, rank: int, meeting: str) -> int:
    child = os.fork()
    if child:
        return child
    try:
        with contextlib.suppress(OSError):
            os.setsid()
        log = os.open(f"{attempt.here}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _rank(attempt, rank, meeting)
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _rank(attempt: Attempt, rank: int, meeting: str) -> None:
    import torch.distributed as dist

    from fullshard.checkpoint import lease
    from fullshard.runs.prepare.prepare import prepare
    from fullshard.runs.recipe.recipe import load_recipe
    from fullshard.runs.run import execute

    lease.RENEWAL = 0.05  # seconds: often enough to be killed in
    os.environ["LOCAL_RANK"] = str(rank)
    os.chdir(attempt.here)
    store = dist.FileStore(f"{meeting}/store", attempt.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=attempt.world)
    prepared = prepare(load_recipe("recipe.toml", attempt.overrides), attempt.world)
    _note_rows(f"{attempt.notes}-{rank}")
    if attempt.kill and attempt.kill.phase and attempt.kill.rank in (None, rank):
        _die_in(attempt.kill)
    execute(prepared, Path("runs") / attempt.name, "auto")
    dist.barrier()


def _note_rows(path: str) -> None:
    """Write down, before each step, which rows it trains on; one write, which the kernel keeps when we die."""
    from fullshard.on_torch.engine import trainer

    file, write, train_step = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.write, trainer.train_step

    def noted(state: Any, micro_batches: list[dict], **options: Any) -> Any:
        rows = [row_digest(i, t) for m in micro_batches for i, t in zip(m["input_ids"], m["labels"], strict=True)]
        write(file, (json.dumps([state.step + 1, rows]) + "\n").encode())
        return train_step(state, micro_batches, **options)

    trainer.train_step = noted


def row_digest(inputs: Any, labels: Any) -> str:
    return hashlib.blake2b(inputs.astype("<i8").tobytes() + labels.astype("<i8").tobytes(), digest_size=8).hexdigest()


# -- dying --------------------------------------------------------------------------------------------------


def _die_in(kill: Kill) -> None:
    """Watch this process's calls that change what is stored, and die in one of them."""
    count = 0

    def reached(phase: str) -> bool:
        nonlocal count
        count += phase == kill.phase
        return phase == kill.phase and count == kill.nth

    if kill.phase in STORE_PHASES:
        return _watch_store(kill, reached)
    if kill.phase == "roll back":
        return _watch_rollback(kill, reached)
    pwrite = os.pwrite

    def watched(name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            reads = name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR)  # which changes nothing
            if reads or not reached(f"{name} {_kind(args[0])}"):
                return function(*args, **kwargs)
            if kill.when == "half" and name == "pwrite":
                pwrite(args[0], args[1][: len(args[1]) // 2], args[2])
            if kill.when == "after":
                with contextlib.suppress(OSError):  # of a directory that another rank made first, for one
                    function(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in CALLS:
        setattr(os, name, watched(name, getattr(os, name)))


def _watch_rollback(kill: Kill, reached: Callable[[str], bool]) -> None:
    from fullshard.runs.checkpointing import Checkpoints

    load = Checkpoints.roll_back

    def call(*args):
        if not reached("roll back"):
            return load(*args)
        if kill.when != "before":
            load(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    Checkpoints.roll_back = call


def _watch_store(kill: Kill, reached: Callable[[str], bool]) -> None:
    from fullshard.checkpoint.directories import Remote

    def watched(name: str, function: Callable) -> Callable:
        def call(place, *args, **kwargs):
            if not reached(f"{name} {_kind(args[0] if args else place.path)}"):
                return function(place, *args, **kwargs)
            if kill.when == "half" and name == "remove":  # one object gone, the others there
                for file in sorted(place.files())[:1]:
                    place.filesystem.rm_file(f"{place.path}/{file}")
            if kill.when == "after":
                function(place, *args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in ("write", "remove_file", "remove"):
        setattr(Remote, name, watched(name, getattr(Remote, name)))


def _kind(where: Any) -> str:
    """What a path, or an open file, is to a save."""
    name = os.path.basename(os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.fspath(where))
    if name.startswith(".step-"):
        return "staging" if name.endswith(".partial") else "removed"
    heads = {
        ".lease-": "lease",
        ".metrics": "metrics",
        "step-": "checkpoint",
        "shard-": "shard",
        "manifest": "manifest",
        "checkpoints": "checkpoint_dir",
    }
    return next((kind for head, kind in heads.items() if name.startswith(head)), name)


def kills(draw: random.Random, world: int, phases: tuple[str, ...], full: bool = False) -> Iterator[Kill]:
    """Every phase in turn, in a random order; on a filesystem, every third time the clock. `full`: always the clock."""
    while True:
        for i, phase in enumerate(draw.sample(phases, len(phases))):
            if full or (i % 2 == 0 and phases is PHASES):
                after = draw.uniform(0.2, 1.5) if full else 0.0
                yield Kill(draw.choice([None, *range(world)]), seconds=draw.uniform(0.3, 2.0), full=after)
            if full:
                continue
            rank = draw.choice([None, *range(world)]) if phase in EVERYBODY else 0
            yield Kill(rank, phase, draw.choice([1, 2]), draw.choice(["before", "half", "after"]))


# -- a run that is killed again and again -------------------------------------------------------------------

DIVERGING = ["train.loss=plain", "train.max_skips=1", "train.on_divergence=rollback", "train.max_rollbacks=1000000"]
BASE = ["checkpoint.every=2", "checkpoint.keep=2", "schedule.kind=constant", "train.global_batch=4", "train.micro_batch=1"]


def _warm(here: str, world: int, store: bool) -> None:
    """Import, before the first fork, what the ranks will need."""

    from fullshard.runs.prepare.prepare import prepare
    from fullshard.runs.recipe.recipe import load_recipe

    os.chdir(here)
    prepare(load_recipe("recipe.toml", BASE), world)
    if store:
        import s3fs  # noqa: F401


def main(here: str, count: int, seed: int, world: int, options: list[str]) -> dict:
    """A run that is killed `count` times and goes on each time, beside one that is not."""
    from tests.cpu.judge import Judge

    draw = random.Random(seed)
    store = any("://" in o for o in options)
    _warm(here, world, store)
    harder = {o.removeprefix("with:") for o in options if o.startswith("with:")}
    options = [o for o in options if not o.startswith("with:")] + (DIVERGING if "divergence" in harder else [])
    judge = Judge(here, world, [*BASE, *options], diverges="divergence" in harder)
    began = time.monotonic()
    met: dict[str, int] = {}
    planned = kills(draw, world, _phases(store, harder), "full" in harder)
    for number in range(count):
        kill = next(planned)
        if "damage" in harder:
            judge.plant()
        attempt = Attempt(here, "chaos", world, [*judge.options, "train.steps=100000"], f"{here}/chaos-{number}", kill)
        statuses = run_once(attempt)
        if not any(os.WIFSIGNALED(s) for s in statuses):
            raise AssertionError(f"nobody died ({kill}): " + (Path(here) / "rank0.log").read_text()[-2000:])
        met[str(kill)] = met.get(str(kill), 0) + 1
        judge.after(attempt, in_place=draw.random() < 0.5)
    judge.end()
    seconds = round(time.monotonic() - began)
    return {"kills": count, "met": met, "steps": judge.newest, "rows": judge.newest * 4, "epoch": judge.epoch, "seconds": seconds}


def _phases(store: bool, harder: set[str]) -> tuple[str, ...]:
    if "divergence" in harder:
        return ROLLBACK_PHASES
    return STORE_PHASES if store else (*LEASE_PHASES, *RETENTION_PHASES) if "damage" in harder else PHASES


def in_process(variables: dict[str, str], *arguments: Any) -> dict:
    """`main` in a process of its own, which forks ranks: a fork itself, of a server that has imported torch."""
    with ProcessPoolExecutor(1, preloaded()) as pool:
        return pool.submit(_alone, variables, *arguments).result(3600)


def _alone(variables: dict[str, str], *arguments: Any) -> dict:
    import torch

    torch.set_num_threads(1)
    os.environ.clear()
    os.environ |= variables
    return main(*arguments)
