"""What the page asks about a plan: the controls as text, checked, and the command line that asks the same."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError, nearest
from fullshard.base.reading import is_directory, is_plain_file
from fullshard.model import presets
from fullshard.plan.choice import Choice, checked_share
from fullshard.plan.choice_table import NAMED

CONTROLS = {name: row for name, row in NAMED.items() if row.fixable}  # a control of the page for each
UNSEARCHED = ("mixed",)  # strategies
AUTO = "auto"  # of any choice: the search decides
LONGEST = 4096  # characters of a value
LARGEST = 1 << 24  # of a number: a step of more tokens or rows takes too long to lay out


@dataclass(frozen=True)
class PlanQuestion:
    """The question of the Plan view. `fix`: choices that are not left to the search, by name."""

    model: str
    cluster: str
    sequence: int = 1024
    global_batch: int | None = None
    price: float | None = None
    fix: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> "PlanQuestion":
        """The question in a query string. Raises a sentence for what is none."""
        known = {"model", "cluster", "sequence", "global_batch", "price", *CONTROLS}
        for name, value in given.items():
            if name not in known:
                raise FullshardError(f"unknown question {name!r}{nearest(name, sorted(known))}")
            if len(value) > LONGEST or "\0" in value:
                raise FullshardError(f"{name} is no name: it has {len(value)} characters; write a shorter one")
        text = {name: value.strip() for name, value in given.items() if value.strip() not in ("", AUTO)}
        for name in ("model", "cluster"):
            if name not in text:
                raise FullshardError(f"give a {name}")
        fix = tuple((name, _value(row, text[name])) for name, row in CONTROLS.items() if name in text)
        return cls(
            text["model"],
            text["cluster"],
            _integer("sequence", text.get("sequence", "1024")),
            _integer("global batch", text["global_batch"]) if "global_batch" in text else None,
            _price(text["price"]) if "price" in text else None,
            fix,
        )

    @property
    def command(self) -> str:
        """The command that gives the same plan."""
        words = ["fullshard", "plan", self.model, "--cluster", self.cluster, "--sequence", str(self.sequence)]
        words += [] if self.global_batch is None else ["--global-batch", str(self.global_batch)]
        words += [] if self.price is None else ["--price", f"{self.price:g}"]
        fixed = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in self.fix]
        return shlex.join(words + (["--fix", *fixed] if fixed else []))


def controls() -> list[dict[str, Any]]:
    """What the page shows of each choice that a search can keep: its name, label and help, and the values to offer, if they are
    few. Strategies that no search considers are left out."""
    return [
        {"name": name, "label": row.label, "help": row.help.replace("`", ""), "values": _offered(row)}
        for name, row in CONTROLS.items()
    ]


def _offered(row: Choice) -> list[str]:
    if row.kind is bool:
        return ["true", "false"]
    return [word for word in row.words if word not in UNSEARCHED]


def _value(row: Choice, text: str) -> Any:
    """What a control says; a search checks words itself."""
    if row.kind is int:
        return _integer(row.name, text)
    if row.kind is float:
        return _share(row.name, text)
    if row.kind is bool and text not in ("true", "false"):
        raise FullshardError(f"{row.name} must be true or false, not {text[:40]!r}")
    return text == "true" if row.kind is bool else text


def _share(name: str, text: str) -> float:
    try:
        return checked_share(name, float(text))
    except ValueError:
        raise FullshardError(f"{name} must be a number from 0 to 1, not {text[:40]!r}") from None


def _integer(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 0 < int(text) <= LARGEST):
        raise FullshardError(f"{name} must be a whole number from 1 to {LARGEST}, not {text[:40]!r}")
    return int(text)


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = 0.0
    if not 0 < price < 1e9:
        raise FullshardError(f"the price is what a device costs an hour, a number above 0, not {text[:40]!r}")
    return price


def refuse_model(model: str) -> None:
    """Raise unless a model is a preset or a Hugging Face config. The page runs no code and reads no other kind of file."""
    if model in presets.PRESETS:
        return
    if ":" in model or model.endswith(".py"):
        raise FullshardError(f"the page runs no code, so it cannot build {model}; write fullshard plan {model} --cluster …")
    path = Path(model)
    if is_directory(path):
        path = path / "config.json"
        if not is_plain_file(path):
            raise FullshardError(f"{model} has no config.json; write the directory of a Hugging Face model")
    elif "/" not in model and not model.endswith(".json"):
        presets.preset(model)  # raises, and names the nearest
    if path.name != "config.json" or not is_plain_file(path):
        raise FullshardError(f"{model} is no preset and no config.json; write a preset, or the directory of a Hugging Face model")


def refuse_cluster(cluster: str) -> None:
    """Raise for a path that is no JSON file: cluster files are read, and nothing else."""
    if ("/" in cluster or is_plain_file(cluster)) and not cluster.endswith(".json"):
        raise FullshardError(f"{cluster} is no cluster; write a name such as 8xh100, or a file.json of `fullshard measure`")
