"""Fuzz target for the command line: random arguments, run in this process. Starts no ranks and needs no network."""

import contextlib
import io
import os
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import typer

from fullshard.base.errors import FullshardError
from fullshard.commands.cli import app, refusal, refuse_arguments
from fullshard.data import TokenWriter
from fullshard.model import presets
from fullshard.planner.strategies import zero3
from tests.fuzz import mutate
from tests.fuzz.harness import Target

TEXTS = [
    "", " ", "-", "--", "a", "\0", "a\0b", "\ud800", "\udcff", "\x1b[2J", "é", "a" * 300, "a" * 5000, "../..", "/", ".",
    "/dev/zero", "/dev/null", "nope://x", "://", "a:b", "a.py:b", "a.b:c", ":", "*", "[", "%s",
    "0", "-1", "1e9", "nan", "9" * 30, "9" * 5000,
]  # fmt: skip
FILES = ["plan.json", "bad.json", "tokens", "a.txt", "a.jsonl", "pipe", "directory", "recipe.toml", "bad.toml", "gone", "locked"]
NUMBERS = ["0", "1", "2", "4", "8", "-1", "-4", "3.5", "x", "", "1e3", "9" * 12, str(2**31), str(2**63), "9" * 30, "9" * 5000]
MODELS = ["llama-nano", "gpt-nano", "llama-nanoo", "recipe.toml", "directory", "a.txt"]
CLUSTERS = ["1xcpu", "8xh100", "2xh100", "0xh100", "99999xh100", "8xh", "bad.json", "plan.json", "directory"]
COMMON = ["--json", "--help", "-h", "--version", "--no-such", "-x", "--", "extra"]
N, F, T, M, C = NUMBERS, [*FILES, *TEXTS], TEXTS, [*MODELS, *TEXTS], [*CLUSTERS, *TEXTS]
ON = [""]  # a flag
# For each command: arguments that keep it harmless, values of its positional arguments, values of its options.
COMMANDS: dict[str, tuple[list[str], list[list[str]], dict[str, list[str]]]] = {
    "models": ([], [], {}),
    "units": ([], [M], {"--class": T, "--names": T, "--min-params": N}),
    "explain": ([], [F], {"--diff": F}),
    "plan --devices": (
        [],
        [N, M],
        {
            "--strategy": ["ddp", "zero3", "hpz", "mixed", "x"], "--replicate": N, "--reshard": N, "--tensor": N,
            "--remat": ["full", "x"], "--remat-every": N, "--micro-batch": N, "--sequence": N, "--accumulate": N,
            "--sync": ["last", "x"], "--prefetch": N,
            "--replicate-below": N, "--keep-whole": T, "--compile": ON, "-o": F, "--min-params": N, "--fix": T, "--limit": T,
        },
    ),
    "plan --cluster": (
        [],
        [C, ["llama-nano"]],
        {
            "--sequence": N, "--global-batch": N, "--limit": ["1GiB", "0", "1", "9" * 20, *T], "--mtbf": ["400d", "1h", "0h", *T],
            "--price": N, "--no-clip": ON, "--loss": ["plain", "x"], "-o": F, "--call": F,
            "--fix": ["remat=full", "home.optimizer=disk", "micro_batch=2", "cpu_share=2", "tensor=2", "staging=0", "=", *T],
        },
    ),
    "compare --cluster": (
        [],
        [C, ["llama-nano", "7Q", "7000K", "1.67M", *T]],
        {
            "--sequence": N, "--global-batch": N, "--micro-batch": N, "--replicate": N, "--limit": ["1GiB", "0", "9" * 20, *T],
            "--remat": ["full", "x"], "--compute": ["fp32", "fp16", "x"], "--reduce": ["bf16"], "--master": ["bf16", "fp16"],
            "--sync": ["last", "x"], "--no-compile": ON,
        },
    ),
    "train": (["--dry-run"], [["recipe.toml", *F]], {"--run": F, "--ranks": N, "--resume": ["auto", *F]}),
    "migrate": ([], [["recipe.toml", *F]], {"-o": F, "--kind": ["deepspeed", "fsdp", "x"], "--ranks": N}),
    "measure": (["-o", "no/such/directory/x.json"], [], {"--disk": F, "--quick": ON}),
    "data pack": (
        ["--workers=1"],
        [F],
        {
            "-o": ["out", *F], "--tokenizer": ["bytes", *F], "--end": T, "--field": T, "--chat": ON, "--template": F,
            "--workers": ["0", "-4", "x", "9" * 12],
        },
    ),
    "data show": ([], [F], {"--verify": ON}),
    "checkpoint ls": ([], [F], {}),
    "checkpoint show": ([], [F], {"--tensors": T, "--no-values": ON}),
    "checkpoint verify": ([], [F], {"--all": ON}),
    "checkpoint diff": ([], [F, F], {}),
    "checkpoint gc": (["--dry-run"], [F], {"--keep": N}),
    "checkpoint average": ([], [F, F], {"-o": F}),
    "checkpoint can-resume": ([], [F], {"--ranks": N}),
    "checkpoint export": ([], [F], {"-o": F, "--format": ["hf", "torch", "peft", "x"], "--config": F, "--dtype": T}),
    "checkpoint import": ([], [F], {"-o": F, "--step": N, "--prefix": T}),
    "": ([], [T], {}),
}  # fmt: skip
RECIPE = '[model]\nname="llama-nano"\n[data]\npath="tokens"\nsequence=8\n[optim]\nlr=1e-3\n[train]\nsteps=1\nglobal_batch=2\n'


@cache
def token_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as directory:
        with TokenWriter(Path(directory, "x"), 256, "bytes") as writer:
            writer.add(list(range(200)))
        return {file.name: file.read_bytes() for file in Path(directory, "x").iterdir()}


@cache
def command() -> Any:
    """The command of `app`, cached: each call of `app` would build it again."""
    return typer.main.get_command(app)


@cache
def plan_text() -> str:
    """A plan as JSON. Also imports what the commands import, so that no case pays for it."""
    import fullshard.on_torch
    import fullshard.runs.run

    assert fullshard.on_torch.load_model("llama-nano")
    for name in presets.PRESETS:
        presets.describe(name)
    return zero3(presets.describe("llama-nano"), devices=2).to_json()


def make_arguments(random: Random, directory: Path) -> tuple[Path, list[str]]:
    here = directory / "here"
    here.mkdir()
    _fill(here)
    name = random.choice(list(COMMANDS))
    always, positions, options = COMMANDS[name]
    given = [*name.split(), *always]
    given += [random.choice(known) for known in positions if random.random() < 0.9]
    for option in mutate.some(random, list(options), 3) if options else []:
        value = random.choice(options[option])
        given += [option] if options[option] is ON else [option, value] if random.random() < 0.7 else [f"{option}={value}"]
    if random.random() < 0.15:
        given.insert(random.randrange(len(given) + 1), random.choice(COMMON))
    return here, given


def _fill(here: Path) -> None:
    (here / "plan.json").write_text(plan_text())
    (here / "bad.json").write_text('{"version": 1, "devices": ' + "[" * 500)
    (here / "a.txt").write_text("some text")
    (here / "a.jsonl").write_text('{"text": "a"}\n{"prompt": "a", "completion": "b"}\n')
    (here / "recipe.toml").write_text(RECIPE)
    (here / "bad.toml").write_text("[model]\nname = 0x" + "f" * 9000)
    (here / "directory").mkdir()
    (here / "locked").write_text("x")
    (here / "locked").chmod(0)
    os.mkfifo(here / "pipe")
    (here / "tokens").mkdir()
    for name, data in token_files().items():
        (here / "tokens" / name).write_bytes(data)


def run_arguments(given: tuple[Path, list[str]]) -> None:
    here, arguments = given
    output = io.StringIO()
    before = os.getcwd()
    os.chdir(here)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            refuse_arguments(arguments)
            command().main(arguments, prog_name="fullshard", standalone_mode=False)
    except Exception as error:
        if type(error).__name__ in ("NoArgsIsHelpError", "Exit"):
            raise FullshardError("help was printed") from None
        sentence = refusal(error)
        if sentence is None:
            raise
        raise FullshardError(sentence) from None
    finally:
        os.chdir(before)


COMMAND_LINES = [Target("cli", make_arguments, run_arguments, 256 << 20)]
