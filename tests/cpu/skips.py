"""Ranks of their own that end when one of them skips a unit in a later step, for `test_skips`."""

import os
import socket
import sys
import tempfile
import time
from pathlib import Path

from tests.cpu.ranks import preloaded

LATER = 2  # the step, from 0, in which the fault begins


def run(fault: str, *, world: int = 2, device: str = "cpu", **more: object) -> list[tuple[int | None, str]]:
    """The exit code and the stderr of each rank. None: it had to be killed."""
    context = preloaded()
    with socket.socket() as free, tempfile.TemporaryDirectory() as directory:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        files = [Path(directory, str(rank)) for rank in range(world)]
        processes = [
            context.Process(target=_rank, args=(rank, world, port, device, str(path), fault), kwargs=more)
            for rank, path in enumerate(files)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 200
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        return [(code, path.read_text()) for code, path in zip(codes, files, strict=True)]


def _rank(rank: int, world: int, port: int, device: str, path: str, fault: str, **more: object) -> None:
    """As a launcher starts it: rank 0 hosts the store. Ranks share one GPU, which NCCL refuses."""
    about = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in about.items()}
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("cpu:gloo,cuda:gloo" if device == "cuda" else "gloo")
    train(fault, device, **more)  # type: ignore[arg-type]


def train(fault: str, device: str, *, own: bool = False, strategy: str = "zero3") -> None:
    """Train steps of which a later one has the fault on rank 1. `own`: by a loop of the caller's own."""
    import torch.distributed as dist

    import fullshard as fs
    from fullshard import on_torch
    from tests.cpu import parity

    on_torch.start(device)
    model, world = parity.build("plain"), dist.get_world_size()
    plan = getattr(fs, strategy)(on_torch.describe(model), devices=world, batch=fs.Batch(2, parity.LENGTH))
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3), device=device)
    for step in range(LATER):
        _step(state, step, own=own)
    if dist.get_rank() == 1 or fault in ON_ALL:
        FAULTS[fault](state)
    before = [p.to_local().clone() for p in model.parameters()]
    try:
        for step in range(LATER, LATER + 3):
            _step(state, step, own=own)
    finally:
        if all(bool((p.to_local() == b).all()) for p, b in zip(model.parameters(), before, strict=True)):
            print("nothing was updated", file=sys.stderr)


def _step(state, step: int, *, own: bool) -> None:
    import torch
    import torch.distributed as dist

    from fullshard import on_torch
    from tests.cpu import parity

    seed = dist.get_world_size() * step + dist.get_rank()
    ids = torch.randint(0, parity.VOCAB, (2, parity.LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids[:, :-1].to(state.device), "labels": ids[:, 1:].to(state.device)}
    if not own:
        on_torch.train_step(state, [batch])
        return
    on_torch.summed_loss(state.model, batch).backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def held_after_a_long_computation() -> bool:
    """Whether a tensor outlives its last name, once the order of units was looked at while it had one."""
    import weakref

    import torch

    import fullshard as fs
    from fullshard import on_torch
    from fullshard.on_torch.ranks import unit_log
    from tests.cpu import parity

    model = parity.build("plain")
    on_torch.shard(model, fs.zero3(on_torch.describe(model), devices=2, batch=fs.Batch(2, parity.LENGTH)), fs.AdamW(lr=1e-3))
    before = unit_log.TICK, unit_log.STALLED
    unit_log.TICK, unit_log.STALLED = 0.01, 0.05
    time.sleep(1.1)  # the tick under way
    tensor = torch.zeros(8)
    found = weakref.ref(tensor)
    time.sleep(0.5)
    del tensor
    unit_log.TICK, unit_log.STALLED = before
    return found() is not None


def _skip(index: int):
    def plant(state) -> None:
        from tests.cpu.faults import leave_out

        leave_out(state, index)

    return plant


def _skip_another(state) -> None:
    """Each rank another unit of the same size: all have as many collectives, of the same sizes."""
    import torch.distributed as dist

    _skip(1 + dist.get_rank())(state)


def _detach(state) -> None:
    from tests.cpu.faults import detach

    detach(state)


FAULTS = {
    "skip 0": _skip(0),
    "skip 1": _skip(1),
    "skip 2": _skip(2),
    "skip another": _skip_another,
    "detach": _detach,
    "killed": lambda state: os.kill(os.getpid(), 9),
}
ON_ALL = ("skip another",)

if __name__ == "__main__":
    began = time.monotonic()
    more = {"own": "own" in sys.argv, "world": int(sys.argv[2])}
    for word in sys.argv[3:]:
        if word != "own":
            more["strategy"] = word
    for code, text in run(sys.argv[1], **more):
        print("code", code, "after", time.monotonic() - began)
        print("\n".join(line for line in text.splitlines() if not line.startswith("    "))[-1500:])
