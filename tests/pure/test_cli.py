import functools
import json
import os
import subprocess
from pathlib import Path

import pytest

from fullshard import Plan, zero3
from fullshard.model import presets
from tests import command

PLAN = ("plan", "llama-nano", "--devices", "4")


@pytest.fixture
def fullshard(tmp_path):
    """The command in an empty directory; in a process of its own where the environment is to differ."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return command.fullshard_process(*arguments, cwd=tmp_path, **environment) if environment else here(*arguments)

    here = functools.partial(command.fullshard_here, cwd=tmp_path)
    return call


def told(run: subprocess.CompletedProcess[str]) -> str:
    """stdout of a run that went well and said nothing else than what it was doing."""
    assert (run.returncode, [line for line in run.stderr.splitlines() if not line.endswith(" …")]) == (0, [])
    return run.stdout


# -- what it says -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["models", "units", "plan", "explain", "--version"]),
        (["plan", "--help"], ["--devices", "--strategy", "--remat", "--output", "zero3"]),
        (["units", "--help"], ["MODEL", "--class", "--names", "--min-params", "--json"]),
        (["explain", "-h"], ["PLAN", "--diff"]),
    ],
)
def test_help(fullshard, arguments, words):
    text = told(fullshard(*arguments))
    assert [w for w in words if w not in text] == []


def test_version(fullshard):
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{told(fullshard("--version")).strip()}"' in text


def test_models(fullshard):
    sizes = json.loads(told(fullshard("models", "--json")))
    assert list(sizes) == list(presets.PRESETS)
    assert sizes["gpt2"] == {"parameters": 124_439_808, "units": 13}  # twelve layers, and the tied rest
    lines = told(fullshard("models")).splitlines()
    assert len(lines) == 2 + len(presets.PRESETS)
    assert next(line.split() for line in lines if line.startswith("llama3-8b ")) == ["llama3-8b", "8.03B", "32", "4096"]


def test_units(fullshard):
    text = told(fullshard("units", "llama-nano"))
    assert text == f"{presets.describe('llama-nano')}\n"
    assert "model.layers.0 … model.layers.1" in text


def test_units_as_json(fullshard):
    data = json.loads(told(fullshard("units", "llama3-8b", "--json")))
    assert data["parameters"] == 8_030_261_248
    assert len(data["units"]) == 34
    assert sum(u["parameters"] for u in data["units"]) == data["parameters"]
    assert sum(u["share"] for u in data["units"]) == pytest.approx(1)


OWN = """
from torch import nn

class Pair(nn.Sequential):
    pass

def make():
    return nn.Sequential(Pair(nn.Linear(2, 3), nn.Linear(3, 4)), nn.Linear(4, 5))
"""


def test_units_of_a_file_by_hand(fullshard, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    units = json.loads(told(fullshard("units", "own.py:make", "--class", "Pair", "--class", "Linear", "--json")))["units"]
    assert [(u["name"], u["parameters"]) for u in units] == [("0", 25), ("1", 25)]


def test_compare(fullshard):
    data = json.loads(told(fullshard("compare", "llama-125m", "--cluster", "16xh100", "--sequence", "16", "--json")))
    assert [p["name"] for p in data["plans"]] == ["ddp", "zero1", "zero2", "zero3", "hybrid", "offload", "offload all"]
    assert (data["parameters"], data["batch"]["sequence"]) == (presets.parameters("llama-125m"), 16)
    hybrid = data["plans"][4]
    assert (hybrid["mesh"]["replicate"], hybrid["mesh"]["shard"], hybrid["fits"]) == (2, 8, True)
    assert hybrid["wire_bytes"]["total"] == sum(n for purpose, n in hybrid["wire_bytes"].items() if purpose != "total")
    assert 0 < hybrid["saving"] < 1


# -- plans, written and read back ---------------------------------------------------------------------


def test_plan_then_explain(fullshard, tmp_path):
    made = fullshard(*PLAN, "-o", "plan.json")
    assert (made.returncode, made.stderr) == (0, "plan written to plan.json\n")
    assert told(fullshard("explain", "plan.json")) == made.stdout
    assert told(fullshard("explain", "plan.json", "--json")) == (tmp_path / "plan.json").read_text()
    assert "mesh       1×4×1 = 4 devices" in made.stdout
    assert os.listdir(tmp_path) == ["plan.json"]


def test_json_on_stdout_is_a_plan(fullshard, tmp_path):
    made = fullshard(*PLAN, "--json", "-o", "plan.json")
    assert Plan.from_json(made.stdout) == Plan.load(tmp_path / "plan.json")
    assert made.stderr == "plan written to plan.json\n"


EVERY = "embed, model.layers.0 … model.layers.1 (2), head"
WHOLE = ["embed: layout: sharded → replicated", "embed: reshard: True → False"]
OPTIONS = {
    "": [],
    "--remat full --remat-every 2 --compile": ["compile: false → true", "model.layers.0: remat: none → full"],
    "--reduce bf16 --compute fp16": ["precision.compute: fp32 → fp16", "precision.reduce: fp32 → bf16"],
    "--micro-batch 2 --sequence 64 --accumulate 8 --sync last": [
        "batch.micro_batch: 1 → 2",
        "batch.sequence: 1024 → 64",
        "batch.accumulate: 1 → 8",
        "batch.sync: every → last",
    ],
    "--prefetch 2": ["prefetch.forward: 1 → 2", "prefetch.backward: 1 → 2"],
    "--strategy ddp --tensor 2": [
        "mesh.replicate: 1 → 2",
        "mesh.shard: 4 → 1",
        "mesh.tensor: 1 → 2",
        f"{EVERY}: layout: sharded → replicated",
        f"{EVERY}: reshard: True → False",
    ],
    "--strategy hybrid --replicate 2": ["mesh.replicate: 1 → 2", "mesh.shard: 4 → 2"],
    "--strategy hpz --reshard 2": [f"{EVERY}: reshard: True → 2"],
    "--strategy mixed --keep-whole embed": WHOLE,
    "--strategy mixed --replicate-below 1030": WHOLE,  # it has 1024 parameters, the head 1040
}


@pytest.mark.parametrize(("options", "said"), OPTIONS.items(), ids=OPTIONS)
def test_each_option_reaches_the_plan(fullshard, options, said):
    plain = zero3(presets.describe("llama-nano"), 4)
    assert plain.diff(Plan.from_json(told(fullshard(*PLAN, "--json", *options.split())))) == said


def test_diff_for_programs_and_of_equals(fullshard):
    fullshard(*PLAN, "-o", "a.json")
    fullshard(*PLAN, "--compile", "-o", "b.json")
    assert json.loads(told(fullshard("explain", "a.json", "--diff", "b.json", "--json"))) == ["compile: false → true"]
    assert json.loads(told(fullshard("explain", "a.json", "--diff", "a.json", "--json"))) == []
    assert told(fullshard("explain", "a.json", "--diff", "a.json")) == "the two plans are the same\n"


# -- bad input: one line on stderr, code 2, nothing written -------------------------------------------


def assert_refused(run: subprocess.CompletedProcess[str], tmp_path: Path, words: str = "") -> None:
    assert run.returncode == 2
    assert run.stdout == ""
    said = [line for line in run.stderr.splitlines() if not line.endswith(" …")]  # without what it was doing
    assert [line[:7] for line in said] == ["error: "]
    assert words in run.stderr
    assert "Traceback" not in run.stderr
    assert os.listdir(tmp_path) == []


BAD = [
    ("units llama3-8bb", "did you mean 'llama3-8b'?"),
    ("plan llama-nano --devices 0 -o plan.json", "devices must be a positive integer, not 0"),
    ("plan llama-nano --devices 4 --tensor 3 -o plan.json", "tensor = 3 must divide devices = 4"),
    ("plan llama-nano --devices 4 --replicate 2 -o plan.json", "--replicate has no effect with --strategy zero3"),
    ("plan llama-nano --devices 4 --reshard 2 -o plan.json", "write --strategy hpz, or leave it out"),
    ("plan llama-nano --devices 4 --keep-whole embed -o plan.json", "--keep-whole has no effect with --strategy zero3"),
    ("plan llama-nano --devices 4 --strategy hpz -o plan.json", "--strategy hpz needs --reshard, the number of ranks"),
    (
        "plan llama-nano --devices 4 --strategy hybrid --replicate 3 -o plan.json",
        "--replicate 3 × --tensor 1 must divide the 4 devices",
    ),
    ("plan llama-nano --devices 4 --strategy hybrid -o plan.json", "--strategy hybrid needs --replicate, the number of copies"),
    ("plan llama-nano --devices 4 --sync last -o plan.json", "batch.sync = 'last' has no effect with batch.accumulate = 1"),
    ("plan llama-nano --devices 4 --strategy mixed -o plan.json", "mixed needs replicate_below"),
    ("plan llama-nano --devices 4 --strategy ddp --prefetch 2 -o plan.json", "prefetch (2 forward, 2 backward) has no effect"),
    ("plan llama-nano --devices 4 --remat-every 2 -o plan.json", "remat_every has no effect"),
    ("plan llama-nano --devices 4 --sequence 0 -o plan.json", "batch.sequence must be a positive integer"),
    ("plan llama-nano --devices 4 -o no/such/plan.json", "cannot write no/such/plan.json: No such file or directory"),
    ("plan llama-nano --devices 4 --float8 rowwise -o plan.json", "needs precision.compute = 'bf16', not 'fp32'"),
    (
        "plan llama-nano --devices 4 --moments int4 -o plan.json",
        "'--moments': 'int4' is not one of 'fp32', 'bf16', 'int8'; see --help",
    ),
    (
        "plan llama-nano --devices 4 --compute bf16 --output-dtype fp32 --engine jax -o plan.json",
        "precision.output = 'fp32': the JAX engine casts no outputs; leave it out",
    ),
    (
        "plan llama-nano --devices 4 --compute bf16 --float8 rowwise --sequence 20 -o plan.json",
        "needs a multiple of 16 tokens in a micro-batch, not 1 × 20 = 20; change the sequence or the micro-batch",
    ),
    (
        "plan llama-nano --devices 4 --moments int8 --engine jax -o plan.json",
        "precision.moments = 'int8' has no effect on JAX: the engine has no",
    ),
    (
        "plan llama-nano --devices 4 --wire-gather int8 --engine jax -o plan.json",
        "XLA's collectives are plain, in its own memory",
    ),
    (
        "plan llama-nano --devices 4 --wire-memory nccl --engine jax -o plan.json",
        "in nccl memory) has no effect on JAX: XLA's collectives",
    ),
    ("plan llama-nano --devices 1 --wire-gather int8 -o plan.json", "has no effect: mesh.shard = 1, so nothing is gathered"),
    (
        "plan llama-nano --cluster 8xa100 --fix float8=tensorwise -o plan.json",
        "a100 has no rate for matrix products in float8; leave it out",
    ),
    (
        "plan llama-nano --cluster 8xh100 --fix rounding=stochastic -o plan.json",
        "has no effect with master = 'fp32'",
    ),
    ("explain gone.json", "cannot read plan gone.json: No such file or directory"),
    ("explain .", "cannot read plan .: Is a directory"),
]


@pytest.mark.parametrize(("line", "words"), BAD, ids=[line for line, _ in BAD])
def test_bad_input(fullshard, tmp_path, line, words):
    assert_refused(fullshard(*line.split()), tmp_path, words)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 9}', '{"version": 1}'])
def test_a_bad_plan_file(fullshard, tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    run = fullshard("explain", "plan.json")
    (tmp_path / "plan.json").unlink()
    assert_refused(run, tmp_path, "error: plan.json: ")


@pytest.mark.parametrize("options", ["--replicate 0", "--replicate 2 --tensor 0"])
def test_a_mesh_of_nothing(fullshard, tmp_path, options):
    assert_refused(fullshard(*PLAN, "--strategy", "hybrid", *options.split()), tmp_path)


@pytest.mark.parametrize("line", ["plan llama-nano", "plan llama-nano --devices x", "unit llama-nano", "units a --bogus"])
def test_usage_errors_too(fullshard, tmp_path, line):
    assert_refused(fullshard(*line.split()), tmp_path)


# -- without torch or jax -----------------------------------------------------------------------------


@pytest.fixture
def without(tmp_path_factory) -> str:
    """A PYTHONPATH on which torch and jax cannot be imported, and on which trying to is noticed."""
    path = tmp_path_factory.mktemp("without")
    for name in ("torch", "jax", "transformers"):
        (path / f"{name}.py").write_text(f"import os\nos.write(2, b'TRIED {name}')\nraise ImportError('no {name} here')\n")
    return os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "plan --help",
        "models",
        "units llama3-8b",
        "plan llama3-8b --devices 8",
        "plan gpt2 --devices 8 --strategy ddp --json",
        "compare 7B --cluster 8xh100",
    ],
)
def test_presets_need_neither_torch_nor_jax(fullshard, without, line):
    assert told(fullshard(*line.split(), PYTHONPATH=without))


def test_plan_files_need_neither(fullshard, without):
    fullshard(*PLAN, "-o", "plan.json", PYTHONPATH=without)
    assert told(fullshard("explain", "plan.json", "--diff", "plan.json", PYTHONPATH=without)) == "the two plans are the same\n"


def test_what_needs_torch_says_so(fullshard, without, tmp_path):
    run = fullshard("units", "own.py:make", PYTHONPATH=without)
    assert run.stderr.startswith("TRIED torch")  # the fake is what was found
    run.stderr = run.stderr.removeprefix("TRIED torch")
    assert_refused(run, tmp_path, "'own.py:make' needs torch (no torch here); pip install 'fullshard[torch]'")


def test_can_resume_does_not_say_no_where_the_engine_is_absent(fullshard, without, tmp_path, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    (run / "run.json").write_text('{"engine": "jax"}')
    ended = fullshard("checkpoint", "can-resume", str(run), PYTHONPATH=without)
    ended.stderr = ended.stderr.removeprefix("TRIED jax")
    assert_refused(ended, tmp_path, f"can-resume {run} needs jax (no jax here); pip install 'fullshard[jax]'")


def test_a_misspelt_preset_without_torch(fullshard, without):
    assert "did you mean 'llama3-8b'?" in fullshard("units", "llama3-8bb", PYTHONPATH=without).stderr
