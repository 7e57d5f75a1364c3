"""A check that all ranks have the same recipe, plan, data and versions, before the first collective depends on it.

Ranks that differ would train on wrongly, wait for each other, or fail with an error of the collective.
"""

import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from fullshard.engine import Engine, Messages
from fullshard.errors import FullshardError
from fullshard.reading import hash_ends
from fullshard.runs.prepare import Prepared

# Where things lie may differ between machines; what lies there may not, and is compared by itself.
PLACES = {
    *("data.path", "data.valid", "data.source", "data.tokenizer", "data.collate", "disk.path", "model.name", "model.weights"),
    *("model.call", "sample.tokenizer", "plan.file", "plan.cluster"),
}
_count = itertools.count()  # of comparisons: each has keys of its own
PATIENCE = 300.0  # seconds: reading a model's description or data may take one rank longer than another


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
    """Raise, on all ranks alike, where one was told something else than the first. Collective, but no collective: ranks
    that disagree would not get through one."""
    (rank, world), board, key = engine.rank_and_world(), engine.messages(), f"told-{next(_count)}"
    mine = json.loads(json.dumps(mine))  # as others will read it
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    board.put(f"{key}/{rank}", digest)
    if rank == 0:
        board.put(f"{key}/first", mine)
        board.put(f"{key}/verdict", {"wrong": _compare(board, key, digest, world)})
    elif (first := board.wait(lambda: board.get(f"{key}/first"), PATIENCE)) not in (None, mine):
        board.put(f"{key}/difference/{rank}", first_difference(first, mine))
    verdict = board.wait(lambda: board.get(f"{key}/verdict"), 2 * PATIENCE)
    if verdict is None:
        raise FullshardError("the first rank did not come to the start of the run; look at its output")
    if verdict["wrong"]:
        raise FullshardError(verdict["wrong"])


def _compare(board: Messages, key: str, digest: str, world: int) -> str | None:
    """By the first rank: the sentence about the first rank that differs, if one does."""
    told = board.collect(key, range(world), PATIENCE)
    missing = [r for r in range(world) if r not in told]
    if missing:
        return f"rank {missing[0]} did not come to the start of the run within {PATIENCE:.0f} s; look at its output"
    other = next((r for r in range(world) if told[r] != digest), None)
    if other is None:
        return None
    found = board.collect(f"{key}/difference", [other], PATIENCE)[other]
    return (
        f"rank {other} differs from rank 0: {found['key']} is {found['mine']} there and {found['first']} on rank 0; "
        "start all ranks with the same recipe, data and versions"
    )


def first_difference(first: dict[str, Any], mine: dict[str, Any]) -> dict[str, str]:
    """The key in which two differ; one of the recipe before what follows from it."""
    key = next(k for k in [*first, *mine] if first.get(k) != mine.get(k))
    return {"key": key, "first": json.dumps(first.get(key)), "mine": json.dumps(mine.get(key))}
