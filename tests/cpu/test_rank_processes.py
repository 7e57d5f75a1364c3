"""Ranks that are copies of their launcher do as fresh processes do."""

import json
import subprocess
import sys

SCRIPT = """
import atexit, json, os, signal, sys, threading, time
import torch
from fullshard.launch.rank_processes import may_fork, run_ranks, stay_forkable

stay_forkable()
(torch.ones(1 << 20) * 2).sum()
atexit.register(lambda: print("the launcher's exit"))

def run():
    import torch.distributed as dist
    from fullshard import on_torch
    on_torch.start("cpu")
    big = (torch.ones(1 << 20) * 2).sum().item()  # hangs where threads of the launcher's are missing
    x = torch.ones(1, requires_grad=True)
    x.sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    found = [total.item(), torch.rand(1).item(), torch.get_num_threads(), os.getsid(0) == os.getpid()]
    dist.barrier()
    if sys.argv[1:] == ["die"]:
        from fullshard.on_torch.step.batch_loader import loader
        if dist.get_rank() == 1:
            next(loader(1, 2).each(lambda i: time.sleep(100 * i) or {"x": torch.ones(1)}, iter(range(2))))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(50)
        print("unnoticed", flush=True)
    print(json.dumps([dist.get_rank(), big, *found, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL]), flush=True)
    if sys.argv[1:] == ["agree"]:
        from fullshard.on_torch.engine.ranks import agreement
        try:
            agreement().all_or_none(lambda: [] if dist.get_rank() == 0 else 1 / 0)
        except Exception:
            time.sleep(3 - 3 * dist.get_rank())  # rank 1 is the first to say it
            raise
    if len(sys.argv) > 1 and dist.get_rank() == 1:
        from fullshard.base.errors import FullshardError
        raise FullshardError("planted")

signal.signal(signal.SIGTERM, lambda *_: None)
held = threading.Event()
thread = threading.Thread(target=held.wait)
thread.start()
while_it_runs = may_fork()
held.set()
print(while_it_runs, may_fork(), flush=True)
sys.exit(run_ranks(2, run, []))
"""


def launched(*arguments: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)


def test_copies_compute_meet_and_end_as_fresh_ranks():
    done = launched()
    assert done.returncode == 0, done.stderr
    first, *ranks, last = done.stdout.splitlines()
    assert (first, last) == ("False True", "the launcher's exit")
    told = sorted(map(json.loads, ranks))
    assert [t[:3] + t[5:] for t in told] == [[rank, 2 << 20, 2.0, True, True] for rank in range(2)]
    assert told[0][3] != told[1][3]  # random numbers of their own


def test_the_sentence_of_a_copy_is_said_once_and_its_code_survives():
    done = launched("fail")
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("error")] == ["error: rank 1: planted"]


def test_what_all_ranks_raise_names_its_rank_once_and_keeps_its_code():
    done = launched("agree")
    assert done.returncode == 1  # no refusal, but a bug of one rank
    said = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert said == ["error: rank 1: ZeroDivisionError: division by zero"]


def test_a_copy_that_is_killed_is_noticed_though_its_data_worker_was_busy():
    done = launched("die")
    assert done.returncode == 128 + 9
    assert "unnoticed" not in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: rank 1 was ended by SIGKILL")
