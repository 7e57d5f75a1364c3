"""The recipe that all cases start from: a file's, or one of a model with random tokens."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.reading import is_directory, is_plain_file, parse_toml, read_text
from fullshard.base.status import say
from fullshard.engine.engine import Engine
from fullshard.model import presets
from fullshard.observe.bench.axes import UNUSED, Axis, Choices
from fullshard.runs.recipe.recipe import MOST_BYTES

SEQUENCE = 1024  # tokens in a sample of a MODEL, unless it takes fewer
STEPS_OF_DATA = 3  # random tokens for this many of the largest steps; then they repeat
COPIES = 2  # of the model with strategy=hybrid, where none are given
Tree = dict[str, Any]


@dataclass(frozen=True)
class Base:
    """`tree`: a recipe as TOML has it. `vocab`: of the random tokens that a MODEL needs; None for a recipe with data."""

    target: str
    tree: Tree
    vocab: int | None = None

    def choices(self) -> Choices:
        """What the tree says, by `section.key`."""
        return {f"{name}.{key}": value for name, table in self.tree.items() for key, value in table.items()}


def load_base(target: str, axes: list[Axis], ranks: int, engine: Engine[Any, Any]) -> Base:
    """The base of a recipe's file or a model's name."""
    if target.endswith(".toml"):
        tree = parse_toml(read_text(target, "recipe", MOST_BYTES), target)
        return Base(target, _measured_sections(tree))
    if not (target in presets.PRESETS or ":" in target or is_directory(target) or is_plain_file(target)):
        presets.preset(target)
    say(f"building {target}")
    facts = engine.model.facts(engine.model.load(target))
    if (vocab := facts.vocabulary) is None:
        raise FullshardError(f"{target} does not tell its vocabulary, so no random tokens fit it; write a recipe with its data")
    rows = math.lcm(*next((a.values for a in axes if a.key == "train.micro_batch"), (1,)))
    return Base(
        target,
        {
            "model": {"name": target, "weights": "draw"},
            "data": {"path": "", "sequence": min(SEQUENCE, facts.longest or SEQUENCE)},
            "optim": {"lr": 1e-4},
            "train": {"steps": 1, "global_batch": ranks * rows, "micro_batch": 1},
            "plan": {"strategy": "zero3", "compute": engine.machine.local_cluster(ranks).device.peak.fastest},
        },
        vocab,
    )


def _measured_sections(tree: Tree) -> Tree:
    """The sections that a case reads: no evaluation, samples, checkpoints or logs."""
    kept = {name: table for name, table in copy.deepcopy(tree).items() if name not in UNUSED}
    if isinstance(kept.get("data"), dict):
        kept["data"].pop("valid", None)
    if isinstance(kept.get("plan"), str):  # short for one key
        kept["plan"] = {"file" if kept["plan"].endswith(".json") else "strategy": kept["plan"]}
    if not all(isinstance(table, dict) for table in kept.values()):
        raise FullshardError("a recipe consists of sections, such as [model]; see docs/reference/recipe.md")
    return kept


def with_choices(tree: Tree, choices: Choices, disk: Path) -> Tree:
    """The recipe of a case. `disk`: the directory for homes on disk, where the recipe names none."""
    recipe = copy.deepcopy(tree)
    for key, value in choices.items():
        section, _, name = key.partition(".")
        recipe.setdefault(section, {})[name] = list(value) if isinstance(value, tuple) else value
    plan, homes = recipe.get("plan", {}), recipe.get("home", {})
    if plan.get("strategy") == "hybrid":
        plan.setdefault("replicate", COPIES)
    on_disk = "disk" in homes.values()
    if on_disk:
        recipe.setdefault("disk", {}).setdefault("path", str(disk))
    elif plan.get("file") is None and plan.get("strategy") != "auto":
        recipe.pop("disk", None)  # of the cases that put something there
    return recipe


def write_tokens(base: Base, trees: list[Tree], directory: Path) -> Path:
    """Random tokens for the largest step of these recipes, always the same ones. Kept from an earlier run."""
    import numpy as np

    from fullshard.data import TokenWriter

    assert base.vocab is not None
    largest = max(t["train"]["global_batch"] * (t["data"]["sequence"] + 1) for t in trees)
    count = STEPS_OF_DATA * largest
    path = directory / f"tokens-{base.vocab}-{count}"
    if not path.exists():
        with TokenWriter(path, vocab=base.vocab, tokenizer="random") as writer:
            writer.add(np.random.default_rng(0).integers(0, base.vocab, count))
    return path
