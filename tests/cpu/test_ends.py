"""Runs that cannot go on: ranks that were told different things, that raise, hang or die. The user sees one sentence."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullshard.data.pack_tokens import pack
from tests.cpu.ends import compare, compare_codes, dies_while_comparing, prepare_together
from tests.cpu.ranks import Ranks
from tests.cpu.test_train import MODEL, RECIPE, command, environment, metrics

PLANTED = """
import os, resource, signal, time
import torch
from torch.nn import ModuleList
from model import make as plain

class Fewer(ModuleList):
    def __iter__(self):
        return iter([layer for i, layer in enumerate(super().__iter__()) if i != 1])

def fault(module, arguments):
    fault.calls += 1
    if os.environ.get("RANK") == "1" and fault.calls == 12:  # in the fifth step: two calls each, four in the checks
        match os.environ["FAULT"]:
            case "raise":
                raise ValueError("planted")
            case "sleep":
                time.sleep(3600)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "skip":  # from the next forward on
                fault.model.model.layers.__class__ = Fewer
            case "no memory once" if not os.path.exists("starved"):
                open("starved", "w").close()
                used = int(open("/proc/self/statm").read().split()[0]) * 4096
                resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.RLIM_INFINITY))
                torch.empty(1 << 32)
            case "die once" if not os.path.exists("died"):
                open("died", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

fault.calls = 0

def make():
    model = plain()
    model.model.layers[1].register_forward_pre_hook(fault)
    fault.model = model
    return model
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ends")
    (path / "model.py").write_text(MODEL)
    (path / "planted.py").write_text(PLANTED)
    (path / "recipe.toml").write_text(RECIPE)
    texts = sorted(Path(json.__file__).parent.glob("*.py"))
    pack(texts, path / "tokens", workers=1)
    pack(texts[:2], path / "other", workers=1)
    return path


# -- ranks that disagree ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.seed=1", "train.seed is 1 here and 0 on rank 0"),
        ("data.path=other", "the tokens of data.path is"),
        ("optim.lr=2e-3", "optim.lr is 0.002 here and 0.001 on rank 0"),
        ("optim.clip=0.25", "optim.clip is 0.25 here and 0.5 on rank 0"),
        ("data.sequence=16", "data.sequence is 16 here and 32 on rank 0"),
        ("plan.strategy=ddp", 'plan.strategy is "ddp" here and "zero3" on rank 0'),
        ("train.loss=plain", 'train.loss is "plain" here and "auto" on rank 0'),
        ("checkpoint.every=3", "checkpoint.every is 3 here and 0 on rank 0"),
        ("train.micro_batch=4", "train.micro_batch is 4 here and 2 on rank 0"),
    ],
)
def test_ranks_that_were_told_different_things_hear_which(here, ranks, override, key):
    said = ranks(2).run(compare, str(here), [[], [override]], [("runs/a", None)] * 2)
    assert said[0] == said[1]
    assert said[0].startswith(f"rank 1: {key}"), said[0]


def test_ranks_that_were_told_the_same_agree_wherever_their_data_lies(here, ranks):
    (here / "linked").symlink_to(here / "tokens")
    assert ranks(2).run(compare, str(here), [[], ["data.path=linked"]], [("runs/a", None)] * 2) == ["agreed", "agreed"]


def test_ranks_with_other_code_in_the_model_s_file_hear_so(here, ranks, tmp_path):
    (tmp_path / "other").mkdir()
    for name in ("recipe.toml", "tokens"):
        (tmp_path / "other" / name).symlink_to(here / name)
    (tmp_path / "other/model.py").write_text(MODEL)
    both = [str(here), str(tmp_path / "other")]
    assert ranks(2).run(compare_codes, both) == ["agreed", "agreed"]
    (tmp_path / "other/model.py").write_text(MODEL + "    # the same shapes")
    said = ranks(2).run(compare_codes, both)
    assert said[0] == said[1]
    assert said[0].startswith("rank 1: the code of model is "), said[0]


def test_ranks_agree_on_the_run_and_on_what_it_resumes(here, ranks):
    said = ranks(2).run(compare, str(here), [[], []], [("runs/a", None), ("runs/b", None)])
    assert '--run is "runs/b" here and "runs/a" on rank 0' in said[0]
    said = ranks(2).run(compare, str(here), [[], []], [("runs/a", "auto"), ("runs/a", None)])
    assert '--resume is null here and "auto" on rank 0' in said[0]


def test_a_rank_that_dies_while_ranks_compare_what_they_were_told_leaves_no_one_waiting():
    pool = Ranks(2)  # of its own, since one of them dies
    pool._start()
    try:
        for pipe in pool.pipes:
            pipe.send((dies_while_comparing, (), {}))
        assert pool.pipes[0].poll(60)
        assert pool.pipes[0].recv() == (True, True)
    finally:
        pool.stop()


def test_what_one_rank_cannot_do_all_refuse(here, ranks):
    said = ranks(2).run(prepare_together, str(here), [[], ["data.path=missing"]])
    assert said[0] == said[1]
    assert said[0].startswith("rank 1: missing")


@pytest.mark.full
def test_a_disagreement_ends_a_real_run_in_seconds(here):
    script = here / "told.py"
    own = "['optim.lr=2e-3'] if os.environ['RANK'] == '1' else []"
    script.write_text(
        "import os, sys\nfrom fullshard.commands import cli\n"
        f"sys.argv = ['fullshard', 'train', 'recipe.toml', *({own})]\ncli.main()"
    )
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(line, cwd=here, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    said = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert len(said) == 1
    assert "rank 1: optim.lr is 0.002 here and 0.001 on rank 0" in said[0]
    assert not (here / "runs/latest").exists()


# -- ranks that raise, hang or die --------------------------------------------------------------------------


def start(here: Path, fault: str, *arguments: str) -> subprocess.Popen:
    line = command("train", "recipe.toml", "model.name=planted.py:make", "train.steps=10", *arguments)
    surroundings = environment() | {"FAULT": fault, "PYTHONPATH": f"{here}{os.pathsep}{Path(__file__).parents[2]}"}
    return subprocess.Popen(line, cwd=here, env=surroundings, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def last_line(process: subprocess.Popen) -> str:
    return process.communicate(timeout=200)[1].strip().splitlines()[-1]


@pytest.mark.full
def test_the_first_real_error_is_the_last_line_and_its_code_survives(here):
    process = start(here, "raise", "--run", "runs/raise")
    assert last_line(process) == "error: rank 1: ValueError: planted"
    assert process.returncode == 1


@pytest.mark.full
def test_a_unit_that_a_rank_skips_in_a_later_step_is_named_once(here):
    process = start(here, "skip", "--run", "runs/skip")
    said = process.communicate(timeout=200)[1]
    (line,) = [line for line in said.splitlines() if "skipped unit" in line]
    assert line.startswith("error: ")
    assert "rank 1 skipped unit model.layers.1 in forward, and went on to unit head, where rank 0" in line
    assert "terminate called" not in said
    assert process.returncode == 2


HUNG = "rank 0 waits in the all_gather of unit model.norm, lm_head; rank 1"


def test_a_hung_run_says_who_waits_for_whom_and_ends(here):
    process = start(here, "sleep", "train.hang_seconds=4", "--run", "runs/hung")
    said = last_line(process)
    assert f"{HUNG} did not come: it is in fault (planted.py:18) during step 5" in said
    assert process.returncode == 4
    assert "fault" in (here / "runs/hung/hang/rank-00001.txt").read_text()


@pytest.mark.full
def test_a_stopped_rank_is_named_and_killed(here):
    process = start(here, "stop", "train.hang_seconds=4", "--run", "runs/stopped")
    said = last_line(process)
    assert HUNG in said
    assert "does not answer: its state is T (stopped)" in said
    assert process.returncode == 4


@pytest.mark.full
def test_a_signal_ends_a_hung_run_within_seconds(here):
    process = start(here, "sleep", "--run", "runs/asked")
    wait_for_steps(here / "runs/asked", 4, process)
    time.sleep(6)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert HUNG in last_line(process)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 60  # a loaded machine; seconds on another


def wait_for_steps(run: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 100
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < count:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)


SAVING = "checkpoint.every=2", "checkpoint.background=false"  # step 4 is on disk before step 5 kills a rank


@pytest.mark.full
def test_ranks_that_die_are_started_again(here):
    (here / "died").unlink(missing_ok=True)
    process = start(here, "die once", *SAVING, "--run", "runs/again", "--max-restarts", "1")
    said = process.communicate(timeout=200)[1]
    assert process.returncode == 0, said
    assert "error: rank 1 was ended by SIGKILL" in said
    assert "start again; restarts left: 0" in said
    assert "resumed at step 4 from" in said
    whole = start(here, "none", "checkpoint.every=2", "--run", "runs/whole")
    assert whole.wait(timeout=200) == 0
    assert [m["loss"] for m in metrics(here / "runs/again")] == [m["loss"] for m in metrics(here / "runs/whole")]


@pytest.mark.full
def test_ranks_are_started_again_where_one_ran_out_of_host_memory(here):
    (here / "starved").unlink(missing_ok=True)
    process = start(here, "no memory once", *SAVING, "--run", "runs/starved", "--max-restarts", "1")
    said = process.communicate(timeout=200)[1]
    assert process.returncode == 0, said
    assert said.count("error: rank 1: out of memory in step 5") == 1
    assert "the ranks ended with exit code 1 and start again" in said


@pytest.mark.full
def test_a_refusal_is_not_tried_again(here):
    line = command("train", "recipe.toml", "data.path=missing", "--run", "runs/refused", "--max-restarts", "3")
    done = subprocess.run(line, cwd=here, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    told = [line for line in done.stderr.splitlines() if not re.search(r" …$|: \d+\.\d s$", line)]  # without the phases
    assert len(told) == 1


@pytest.mark.full
@pytest.mark.parametrize("turn", range(3))
def test_torchrun_restarts_ranks_on_the_first_try(here, turn):
    """torch's launcher keeps one store over its restarts, full of dead ranks' addresses."""
    (here / "died").unlink(missing_ok=True)
    run, options = f"runs/torchrun{turn}", ["model.name=planted.py:make", "train.steps=10", *SAVING]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    line = [
        sys.executable,
        *launcher,
        "-m",
        "fullshard",
        "--",
        "train",
        "recipe.toml",
        *options,
        "--run",
        run,
        "--resume",
        "auto",
    ]
    surroundings = environment() | {"FAULT": "die once", "PYTHONPATH": f"{here}{os.pathsep}{Path(__file__).parents[2]}"}
    done = subprocess.run(line, cwd=here, env=surroundings, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "resumed at step 4 from" in done.stderr
    assert [m["step"] for m in metrics(here / run)] == list(range(1, 11))
