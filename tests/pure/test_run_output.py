"""What a run prints: phases with their seconds, the recipe in short, the rate of its steps, and how it ended."""

import io
import json
import re
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from fullshard.base import status
from fullshard.base.status import end_stage, phases, say, shown, tell, unsaid
from fullshard.model.presets import describe
from fullshard.plan.plan import Batch
from fullshard.plan.plan_text import plan_summary
from fullshard.planner.strategies import zero3
from fullshard.runs.announcement import differences, recipe_lines
from fullshard.runs.outcome import Outcome, outcome_lines
from fullshard.runs.progress import Bar
from fullshard.runs.recipe.recipe import Recipe, load_recipe
from fullshard.runs.run_directory import holds_run
from fullshard.storage.memory_limits import resident_bytes

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(status, "time", made)
    monkeypatch.setattr(status, "PROMPT", 0.01)  # how often the ticker looks
    return made


@pytest.fixture
def log(monkeypatch) -> io.StringIO:
    made = io.StringIO()
    monkeypatch.setattr(status, "sys", SimpleNamespace(stderr=made))  # pytest replaces that of sys itself
    return made


def wait_for(log: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 30
    while not log.getvalue().endswith(text):
        assert time.monotonic() < deadline, log.getvalue()
        time.sleep(0.01)


# -- phases -------------------------------------------------------------------------------------------------


def test_a_log_has_each_long_phase_when_it_begins_and_when_it_ends(log, clock):
    with phases("one"):
        clock.now += 3
        wait_for(log, "one …\n")
        say("brief")
        clock.now += 0.05
        say("two 1 of 2")
        clock.now += 2
        wait_for(log, "two 1 of 2 …\n")
        say("two 2 of 2")
        clock.now += 2.5
    assert log.getvalue().splitlines() == ["one …", "one: 3.0 s", "two 1 of 2 …", "two 2 of 2: 4.5 s"]


def test_a_phase_that_fails_has_no_end(log, clock):
    with pytest.raises(ZeroDivisionError):
        fail(log, clock)
    assert log.getvalue() == "one …\n"


def fail(log, clock) -> None:
    with phases("one"):
        clock.now += 3
        wait_for(log, "one …\n")
        _ = 1 / 0


def test_a_phase_may_have_begun_elsewhere(log, clock):
    with phases("starting 2 ranks", 5.0, announced=True):
        with unsaid():
            say("building the model")
        clock.now += 1
        tell("a line")
    assert log.getvalue().splitlines() == ["a line", "starting 2 ranks: 6.0 s"]


def test_what_follows_a_settled_phase_is_none(log, clock):
    with phases("one"):
        end_stage()
        clock.now += 9
        tell("a line")
    assert log.getvalue() == "a line\n"


def test_a_terminal_sees_one_line_that_changes(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(status, "sys", SimpleNamespace(stderr=terminal))
    with phases("one " + "x" * 200):
        tell("a line")
        clock.now += 3
        say("two")
        clock.now += 4
        wait_for(terminal, "two … 4 s")
    kept = [line.rpartition(status.ERASE)[2] for line in terminal.getvalue().split("\n")]
    assert kept == ["a line", f"one {'x' * 200}: 3.0 s", "two: 4.0 s", ""]
    drawn = [text for text in re.split(r"\r\x1b\[K|\n", terminal.getvalue()) if text.startswith("one") and " s" not in text]
    assert drawn
    assert all(len(text) < 80 for text in drawn)


def test_other_commands_keep_a_log_quiet(log):
    with shown("reading"):
        say("tracing 1 of 2")
        tell("a line")
    assert log.getvalue() == "a line\n"


# -- the recipe ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_only_what_a_recipe_changes_is_printed(path):
    """What a file sets is all that may differ; reading it back gives the same recipe."""
    recipe = load_recipe(path, [])
    given = tomllib.loads(path.read_text())
    given["plan"] = {"strategy": given["plan"]} if isinstance(given.get("plan"), str) else given.get("plan", {})
    found = differences(recipe)
    for section, values in found.items():
        assert values.keys() <= given[section].keys()
    restored = Recipe.model_validate(json.loads(json.dumps(found)) | {"train": given["train"], "optim": given["optim"]})
    assert restored == recipe
    assert all(len(line) <= 80 for line in recipe_lines(recipe))


def test_a_long_value_is_cut():
    tree = (
        {"name": "llama-bytes"},
        {"path": "tokens", "sequence": 8},
        {"lr": 1e-3, "clip": "none"},
        {"steps": 2, "global_batch": 2},
    )
    recipe = Recipe.model_validate(
        dict(zip(("model", "data", "optim", "train"), tree, strict=True)) | {"sample": {"every": 1, "prompts": ["a" * 500]}}
    )
    lines = list(recipe_lines(recipe))
    assert "optim       lr = 0.001, clip = none" in lines
    assert lines[-1].endswith("aaa…")
    assert len(lines[-1]) <= 80


def test_a_plan_in_a_few_lines():
    plan = zero3(describe("llama-nano"), devices=2, batch=Batch(2, 16))
    lines = plan_summary(plan).splitlines()
    assert lines[0] == "mesh        1×2×1 = 2 devices (replicate × shard × tensor)"
    assert lines[-1] == f"units       {len(plan.units)} sharded (gathered until end of forward), remat none, home device"
    assert all(len(line) <= 80 for line in lines)


# -- the rate -----------------------------------------------------------------------------------------------


def test_the_rate_is_of_steps_alone():
    """The first step compiles. What is done between steps, such as an evaluation, does not count."""
    bar = Bar(10, visible=False)
    bar.update(1, 5.0, 1000, 1, 60.0)
    assert bar.rate == 0.0
    bar.update(2, 5.0, 1000, 1, 0.5)
    assert bar.rate == 2000.0
    time.sleep(0.05)  # an evaluation
    bar.update(3, 5.0, 1000, 1, 0.2)
    bar.update(4, 5.0, 1000, 1, 0.8)
    assert bar.rate == 2000.0


# -- the end ------------------------------------------------------------------------------------------------

OPTIM, DATA, TRAIN = {"lr": 1e-3}, {"path": "tokens", "sequence": 8}, {"steps": 9, "global_batch": 2}


def ended(why: str | None, name: str = "llama-bytes", engine: str = "torch", **more) -> list[str]:
    recipe = Recipe.model_validate({"model": {"name": name}, "data": DATA, "optim": OPTIM, "train": TRAIN, **more})
    outcome = Outcome(9 if why is None else 5, why, 5, 12.0, {"loss": 2.5, "eval_loss": 3.0}, "runs/a b/checkpoints/step-5")
    return outcome_lines(outcome, recipe, Path("runs/a b"), engine=engine, again="fullshard train r.toml --resume auto")


def test_a_run_says_what_it_made_and_how_to_export_it():
    assert ended(None) == [
        "trained     5 steps in 12 s (step 9 of 9), loss 2.5000, eval loss 3.0000",
        "run         runs/a b",
        "checkpoint  runs/a b/checkpoints/step-5",
        "export      fullshard checkpoint export 'runs/a b' -o model",
    ]
    assert ended(None, "gpt-nano")[-1].endswith("-o model.pt --format torch")
    assert ended(None, "gpt-nano", "jax")[-1].endswith("-o model --format orbax")
    assert ended(None, lora={"rank": 2})[-1].endswith("-o model --format peft")
    assert ended(None, checkpoint={"path": "s3://a/b"})[-1].startswith(
        "export      fullshard checkpoint export 'runs/a b/checkpoints"
    )


def test_a_run_that_was_stopped_says_how_to_go_on():
    assert ended("stopped")[-1] == "resume      fullshard train r.toml --resume auto"
    assert ended("no improvement")[-1].startswith("export ")


# -- the directory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (None, False),
        ("", False),
        ('{"event": "kernels", "step": 0}\n{"event": "recipe changed", "step": 4}\n', False),
        ('{"event": "kernels", "step": 0}\n{"step": 1, "loss": 2.0}\n', True),
        ('{"event": "diverged", "step": 0}\n', True),
        ("something else\n", True),
        ('{"step": 1, "lo', True),
    ],
)
def test_a_directory_is_held_by_a_run_that_had_a_step(tmp_path, text, held):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert holds_run(tmp_path) == held


def test_the_host_memory_is_that_of_the_kernel():
    kept = bytearray(b"x" * (64 << 20))
    found = resident_bytes()["host_rss"]
    told = int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
    assert found == pytest.approx(told, rel=0.05)
    assert found > len(kept)
    assert resident_bytes(Path("/nowhere")) == {}
