"""Kills: a warm process forks ranks that train, and they die at a chosen moment, by SIGKILL, as a machine would kill them.

Torch is imported once, in a parent that makes no threads and no process group; a child costs a fork. A rank
can be told to die at its n-th call into the filesystem, before, in the middle of or after it: that way every phase
of a save is met. Or it is killed from outside, at a random time.
"""

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

CALLS = ("mkdir", "open", "pwrite", "ftruncate", "fsync", "rename", "unlink", "rmdir", "replace", "write")


@dataclass(frozen=True)
class Kill:
    """How a run ends: at the `call`-th filesystem call of rank `rank`, or after `seconds`, of one rank or all."""

    rank: int | None  # None: all
    call: int | None = None
    when: str = "before"  # before | half | after
    seconds: float = 0.0


def run_once(here: str, name: str, world: int, overrides: list[str], kill: Kill | None, timeout: float = 60.0) -> list[int]:
    """Fork ranks that resume the run; the exit statuses as waitpid gives them."""
    with tempfile.TemporaryDirectory() as meeting:
        children = [_fork(here, name, rank, world, overrides, kill, meeting) for rank in range(world)]
        if kill and kill.call is None:
            time.sleep(kill.seconds)
            for rank, child in enumerate(children):
                if kill.rank in (None, rank):
                    os.kill(child, signal.SIGKILL)
        return _reap(children, timeout)


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


def _fork(here: str, name: str, rank: int, world: int, overrides: list[str], kill: Kill | None, meeting: str) -> int:
    child = os.fork()
    if child:
        return child
    try:
        with contextlib.suppress(OSError):
            os.setsid()
        log = os.open(f"{here}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _rank(here, name, rank, world, overrides, kill, meeting)
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _rank(here: str, name: str, rank: int, world: int, overrides: list[str], kill: Kill | None, meeting: str) -> None:
    import torch.distributed as dist

    from fullshard.train.prepare import prepare
    from fullshard.train.recipe import load_recipe
    from fullshard.train.run import execute

    os.environ["LOCAL_RANK"] = str(rank)
    os.chdir(here)
    dist.init_process_group("gloo", store=dist.FileStore(f"{meeting}/store", world), rank=rank, world_size=world)
    prepared = prepare(load_recipe("recipe.toml", overrides), world)
    if kill and kill.call is not None and kill.rank in (None, rank):
        _die_at(kill)
    execute(prepared, Path("runs") / name, "auto")
    dist.barrier()


def _die_at(kill: Kill) -> None:
    """Count this process's calls that change the filesystem, and die at one of them."""
    count = 0

    def wrapped(function):
        def call(*args, **kwargs):
            nonlocal count
            if function is opened and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return function(*args, **kwargs)  # reading changes nothing
            count += 1
            if count == kill.call:
                note(function.__name__, args)
                if kill.when == "half" and function is pwrite:
                    pwrite(args[0], args[1][: len(args[1]) // 2], args[2])
                if kill.when == "after":
                    function(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    pwrite, opened, write = os.pwrite, os.open, os.write

    def note(name: str, args: tuple) -> None:
        """Where death met us, for the count of phases."""
        where = next((os.fspath(a) for a in args if isinstance(a, str | os.PathLike)), "")
        write(opened("died", os.O_WRONLY | os.O_CREAT | os.O_APPEND), f"{name} {os.path.basename(where)}\n".encode())

    for name in CALLS:
        setattr(os, name, wrapped(getattr(os, name)))


def random_kill(draw: random.Random, world: int, seconds: tuple[float, float]) -> Kill:
    """Half of them meet the first rank, who commits and retires, at a call of its first two saves."""
    rank = draw.choice([None, *range(world)])
    if draw.random() < 0.3:
        return Kill(rank, seconds=draw.uniform(*seconds))
    return Kill(
        draw.choice([0, draw.randrange(world)]), call=draw.randrange(1, 50), when=draw.choice(["before", "half", "after"])
    )


# -- the judge ----------------------------------------------------------------------------------------------


def judge(here: str, name: str, wanted: dict[int, float]) -> dict:
    """After a kill: what stands is whole, what was logged is the uninterrupted run's, and garbage goes."""
    from fullshard.checkpoint import commit
    from fullshard.checkpoint.place import Local
    from fullshard.checkpoint.verify import problems

    run = Path(here) / "runs" / name
    shelf = Local(run / "checkpoints")
    names = commit.committed(shelf)
    for found in names:
        assert problems(shelf.child(found)) == []
        manifest = commit.read_manifest(shelf.child(found))
        assert manifest.cursor == manifest.step * 4, "a sample was lost or repeated"
    lines = (run / "metrics.jsonl").read_text().split("\n") if (run / "metrics.jsonl").exists() else [""]
    logged = [json.loads(line) for line in lines[:-1]]  # the last one may be cut off
    steps = [m["step"] for m in logged if "loss" in m]
    assert steps == list(range(1, len(steps) + 1)), "a step is missing or logged twice"
    assert all(m["loss"] == wanted[m["step"]] for m in logged if "loss" in m), "another loss than the uninterrupted run's"
    commit.sweep(shelf)
    left = [p.name for p in shelf.path.iterdir()] if shelf.path.exists() else []
    extra = [n for n in left if n not in names]
    assert extra == [], f"gc left {extra}"
    newest = commit.step_of(names[-1]) if names else 0
    return {"steps": len(steps), "newest": newest}


def main(here: str, kills: int, seed: int, world: int = 2) -> dict:
    """A run that is killed `kills` times and goes on each time, beside one that is not."""
    import fullshard.on_torch
    import fullshard.train.run  # noqa: F401

    draw = random.Random(seed)
    base = [f"train.steps={100_000}", "checkpoint.every=2", "checkpoint.keep=2", "schedule.kind=constant"]
    base += ["train.global_batch=4", "train.micro_batch=1"]
    wanted: dict[int, float] = {}
    killed, newest, began = 0, 0, time.monotonic()
    modes: dict[str, int] = {}
    while killed < kills:
        kill = random_kill(draw, world, (0.2, 1.2))
        statuses = run_once(here, "chaos", world, base, kill)
        if not any(os.WIFSIGNALED(s) for s in statuses):
            raise AssertionError("nobody died: " + (Path(here) / "rank0.log").read_text()[-2000:])
        killed += 1
        mode = f"{'all' if kill.rank is None else 'one'} {'by the clock' if kill.call is None else kill.when + ' a call'}"
        modes[mode] = modes.get(mode, 0) + 1
        steps = _logged(here, "chaos")
        if steps > len(wanted):
            wanted = _uninterrupted(here, 2 * steps + 40, world, base)
        found = judge(here, "chaos", wanted)
        assert found["newest"] >= newest, "a committed checkpoint was lost"
        newest = found["newest"]
    died = (Path(here) / "died").read_text().split("\n")[:-1]
    calls = {name: sum(line.startswith(f"{name} ") for line in died) for name in CALLS}
    return {"kills": killed, "modes": modes, "calls": calls, "steps": newest, "seconds": time.monotonic() - began}


def _logged(here: str, name: str) -> int:
    path = Path(here) / "runs" / name / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def _uninterrupted(here: str, steps: int, world: int, base: list[str]) -> dict[int, float]:
    """The losses of the first `steps` steps without a kill, from the beginning. The schedule is constant, so the length
    of the run changes nothing."""
    name = f"whole{steps}"
    statuses = run_once(here, name, world, [*base, f"train.steps={steps}", "checkpoint.every=0"], None, 300.0)
    assert statuses == [0] * world, (Path(here) / "rank0.log").read_text()[-3000:]
    lines = (Path(here) / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return {m["step"]: m["loss"] for m in map(json.loads, lines) if "loss" in m}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
