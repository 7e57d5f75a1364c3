"""Which system a file belongs to, and the recipe made from it."""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fullshard.base.errors import FullshardError, first_line, nearest
from fullshard.base.reading import DEEPEST, parse_json, parse_toml, read_text
from fullshard.runs.migrate.accelerate_yaml import read_accelerate
from fullshard.runs.migrate.deepspeed_json import read_deepspeed
from fullshard.runs.migrate.fsdp_script import read_script
from fullshard.runs.migrate.recipe_draft import Draft, finish, flatten
from fullshard.runs.migrate.recipe_toml import recipe_toml, report
from fullshard.runs.migrate.script_calls import Script
from fullshard.runs.migrate.torchtitan_toml import read_torchtitan

Kind = Literal["deepspeed", "accelerate", "torchtitan", "fsdp"]
KINDS: tuple[str, ...] = get_args(Kind)
TITLES = {"deepspeed": "DeepSpeed", "accelerate": "Accelerate", "torchtitan": "torchtitan", "fsdp": "PyTorch"}
MOST_BYTES = 4 << 20  # of a file
DEEPSPEED_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
DEEPSPEED_KEYS |= {
    "fp16",
    "bf16",
    "optimizer",
    "scheduler",
    "steps_per_print",
    "zero_allow_untested_optimizer",
    "wall_clock_breakdown",
}
ACCELERATE_KEYS = {
    "distributed_type",
    "compute_environment",
    "fsdp_config",
    "deepspeed_config",
    "mixed_precision",
    "num_processes",
}
TORCHTITAN_KEYS = {"job", "training", "parallelism", "lr_scheduler", "activation_checkpoint", "metrics", "optimizer"}
SCRIPT_WORDS = re.compile(r"\b(fully_shard|FullyShardedDataParallel|DistributedDataParallel)\b")
TITAN_WORDS = re.compile(r"\btorchtitan\b.*\bTrainer\.Config\b|\bTrainer\.Config\b.*\btorchtitan\b", re.S)


@dataclass(frozen=True)
class Migration:
    """`recipe`: its text, which loads. `report`: what was carried over and what was not."""

    kind: str
    recipe: str
    report: str


def migrate(path: Path, kind: str | None = None, ranks: int | None = None, overrides: list[str] | None = None) -> Migration:
    """The recipe of another system's file. `kind`: by default found from its content. `ranks`: that the file is for, where it
    does not say. `overrides`: `section.key=value` for the recipe."""
    if kind is not None and kind not in KINDS:
        raise FullshardError(f"there is no kind {kind!r}; write --kind {', '.join(KINDS)}{nearest(kind, list(KINDS))}")
    if ranks is not None and ranks < 1:
        raise FullshardError(f"--ranks {ranks} must be at least 1")
    text = read_text(path, "configuration", MOST_BYTES)
    config = _parse(path, text, kind)
    kind = kind or _detect(path, config)
    draft = Draft(TITLES[kind], {} if isinstance(config, Script) else flatten(config), ranks)
    if isinstance(config, Script):
        read_script(draft, config)
    else:
        READERS[kind](draft, path.parent)
    finish(draft)
    return Migration(kind, recipe_toml(draft, path.name, overrides or []), report(draft, path.name))


READERS: dict[str, Callable[[Draft, Path], None]] = {
    "deepspeed": lambda draft, folder: read_deepspeed(draft),
    "accelerate": read_accelerate,
    "torchtitan": lambda draft, folder: read_torchtitan(draft),
}


def _parse(path: Path, text: str, kind: str | None) -> dict[str, Any] | Script:
    """The file's tables, or its syntax tree, by its kind or else by the end of its name."""
    ends = {"deepspeed": ".json", "accelerate": ".yaml", "torchtitan": ".toml", "fsdp": ".py"}
    end = ends[kind] if kind else path.suffix.lower()
    match end:
        case ".py":
            return _script(path, text)
        case ".json":
            config = parse_json(text, str(path))
        case ".toml":
            config = parse_toml(text, str(path))
        case ".yaml" | ".yml":
            config = _yaml(path, text)
        case _:
            raise FullshardError(f"{path} ends in none of .json, .yaml, .toml and .py; write --kind {', '.join(KINDS)}")
    if not isinstance(config, dict) or not config:
        raise FullshardError(f"{path} holds no table of keys; give a configuration file")
    return config


def _script(path: Path, text: str) -> Script:
    if TITAN_WORDS.search(text) and not SCRIPT_WORDS.search(text):
        raise FullshardError(
            f"{path} builds torchtitan's configuration in Python, which is not run; write its values as the TOML file of older "
            "versions ([training], [optimizer], [parallelism] …), or begin with recipes/llama3-8b.toml"
        )
    return Script(text, str(path))


def _yaml(path: Path, text: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise FullshardError("reading YAML needs PyYAML; pip install 'fullshard[migrate]'") from None
    if re.search(r"(^|[\s\[{,:-])[&*][\w-]", re.sub(r"(['\"]).*?\1|#.*", "", text)):
        raise FullshardError(f"{path} uses anchors of YAML; write their values out")  # a few of them can stand for gigabytes
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise FullshardError(f"{path} is not YAML: {first_line(error)}") from None
    except RecursionError:
        raise FullshardError(f"{path} is not YAML: it is nested deeper than {DEEPEST} levels") from None


def _detect(path: Path, config: dict[str, Any] | Script) -> str:
    """The system whose keys the file has."""
    if isinstance(config, Script):
        return "fsdp"
    keys = {str(key) for key in config}
    known = {"deepspeed": DEEPSPEED_KEYS, "accelerate": ACCELERATE_KEYS, "torchtitan": TORCHTITAN_KEYS}
    scores = {kind: len(keys & names) for kind, names in known.items()}
    if {"model", "data", "optim", "train"} <= keys:
        raise FullshardError(f"{path} is a recipe of fullshard already; `fullshard train {path}`")
    best = max(scores.values())
    winners = [kind for kind, score in scores.items() if score == best]
    if best == 0:
        raise FullshardError(f"{path} has no key of DeepSpeed, Accelerate or torchtitan; write --kind {', '.join(KINDS)}")
    if len(winners) > 1:
        raise FullshardError(f"{path} may be of {' or '.join(TITLES[w] for w in winners)}; write --kind {' or '.join(winners)}")
    return winners[0]
