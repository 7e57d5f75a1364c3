"""A check that all ranks have the same recipe, plan, data and versions, before the first collective depends on it.

Ranks that differ would train on wrongly, wait for each other, or fail with an error of the collective.
"""

import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.reading import hash_ends
from fullshard.engine.protocols import Engine
from fullshard.runs.prepare.prepare import Prepared

# Where things lie may differ between machines; what lies there may not, and is compared by itself.
PLACES = {
    *("data.path", "data.valid", "data.source", "data.tokenizer", "data.collate", "disk.path", "model.name", "model.weights"),
    *("model.call", "sample.tokenizer", "plan.file", "plan.cluster"),
}
_count = itertools.count()  # of comparisons: each has keys of its own


def identity(prepared: Prepared, run: Path, resume: str | None) -> dict[str, Any]:
    """Everything that must be the same on every rank, by key."""
    recipe = flat(prepared.recipe.model_dump(mode="json"))
    found = {key: value for key, value in recipe.items() if key not in PLACES}
    found |= {f"the plan's {key}": value for key, value in flat(prepared.plan.to_dict()).items()}
    found |= {f"the {prepared.recipe.unit} of data.path": prepared.data.identity, "the model": _shapes(prepared)}
    found |= {f"the {prepared.recipe.unit} of data.valid": prepared.valid.identity} if prepared.valid else {}
    found |= {"the files of model.weights": weights_identity(prepared.weights)} if prepared.weights else {}
    found |= {"--run": str(run), "--resume": resume}
    return found | versions_of(prepared.engine)


def versions_of(engine: Engine[Any, Any]) -> dict[str, str]:
    """The versions of Python, fullshard and what the engine needs."""
    return {"Python": sys.version.split()[0], "fullshard": sys.modules["fullshard"].__version__, **engine.versions()}


def weights_identity(directory: Path) -> str:
    """A short digest of the names, sizes, headers and last bytes of the weights. Reading all bytes would take too long."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        hash_ends(digest, path)
    return digest.hexdigest()[:16]


def _shapes(prepared: Prepared) -> str:
    """The names, shapes and dtypes of a model's parameters, as a short text."""
    named = prepared.engine.parameter_shapes(prepared.model)
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A JSON tree by dotted keys."""
    if isinstance(tree, dict) and tree:
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{prefix}.{key}" if prefix else str(key)).items()}
    if isinstance(tree, list) and any(isinstance(v, dict) for v in tree):
        return {k: v for i, value in enumerate(tree) for k, v in flat(value, f"{prefix}.{i}").items()}
    return {prefix: tree}


def refuse_disagreement(mine: dict[str, Any], engine: Engine[Any, Any]) -> None:
    """Raise, on all ranks alike, where one was told something else than the first. Collective."""
    board, key, own = engine.messages(), f"told-{next(_count)}", json.loads(json.dumps(mine))  # as others will read it
    engine.first_decides(lambda: board.put(key, own))
    engine.all_or_none(lambda: _refuse_other(own, board.get(key)))


def _refuse_other(own: dict[str, Any], first: dict[str, Any]) -> None:
    key = next((k for k in [*first, *own] if first.get(k) != own.get(k)), None)  # one of the recipe before what follows from it
    if key is not None:
        here, there = json.dumps(own.get(key)), json.dumps(first.get(key))
        raise FullshardError(
            f"{key} is {here} here and {there} on rank 0; start all ranks with the same recipe, data and versions"
        )
