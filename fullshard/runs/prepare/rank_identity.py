"""A check that all ranks have the same recipe, data and versions, before the first collective depends on it; and what the first
rank makes for all.

Ranks that differ would train on wrongly, wait for each other, or fail with an error of the collective.
"""

import hashlib
import itertools
import json
import pickle
import site
import socket
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from fullshard.base.callables import FROM_FILE
from fullshard.base.errors import FullshardError
from fullshard.base.reading import hash_ends
from fullshard.engine.engine import Engine
from fullshard.engine.model import Models
from fullshard.engine.ranks import Ranks
from fullshard.runs.prepare.open_inputs import Inputs
from fullshard.runs.recipe.recipe import Recipe

# Where things lie may differ between machines; what lies there may not, and is compared by itself.
PLACES = {
    *("data.path", "data.valid", "data.source", "data.tokenizer", "data.collate", "disk.path", "model.name", "model.weights"),
    *("model.call", "sample.tokenizer", "plan.file", "plan.cluster"),
}
CODE = "the code of "
_SITES = [*site.getsitepackages(), site.getusersitepackages()]
T = TypeVar("T")
_count = itertools.count()  # of messages: each has a key of its own


def identity(recipe: Recipe, inputs: Inputs, engine: Engine[Any, Any]) -> dict[str, Any]:
    """Everything that must be the same on every rank, by key."""
    found = {key: value for key, value in flat(recipe.model_dump(mode="json")).items() if key not in PLACES}
    found |= {f"the {recipe.unit} of data.path": inputs.data.identity, "the model": _shapes(inputs.model, engine.model)}
    found |= {f"the {recipe.unit} of data.valid": inputs.valid.identity} if inputs.valid else {}
    found |= {"the files of model.weights": weights_identity(inputs.weights)} if inputs.weights else {}
    return found | versions_of(engine.ranks) | codes()


def versions_of(ranks: Ranks) -> dict[str, str]:
    """The versions of Python, fullshard and what the engine needs."""
    return {"Python": sys.version.split()[0], "fullshard": sys.modules["fullshard"].__version__, **ranks.versions()}


def codes() -> dict[str, str]:
    """Short digests of fullshard's files, and of each file of the user's that is imported so far. Where they lie may differ."""
    package = Path(sys.modules["fullshard"].__file__ or "").parent
    own = sorted(p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    found = {f"{CODE}fullshard": _digest(own)}
    libraries = {Path(p).resolve() for p in (sys.prefix, sys.base_prefix, *_SITES)}
    for name, module in sorted(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix == ".py" and not {package, *libraries} & set(path.absolute().parents) and path.is_file():
            found[f"{CODE}{name.removeprefix(FROM_FILE)}"] = _digest([path])
    return found


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def weights_identity(directory: Path) -> str:
    """A short digest of the names, sizes, headers and last bytes of the weights. Reading all bytes would take too long."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        hash_ends(digest, path)
    return digest.hexdigest()[:16]


def _shapes(model: Any, models: Models[Any]) -> str:
    """The names, shapes and dtypes of a model's parameters, as a short text."""
    return hashlib.sha256(json.dumps(models.parameters(model)).encode()).hexdigest()[:16]


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A JSON tree by dotted keys."""
    if isinstance(tree, dict) and tree:
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{prefix}.{key}" if prefix else str(key)).items()}
    if isinstance(tree, list) and any(isinstance(v, dict) for v in tree):
        return {k: v for i, value in enumerate(tree) for k, v in flat(value, f"{prefix}.{i}").items()}
    return {prefix: tree}


def refuse_disagreement(mine: dict[str, Any], ranks: Ranks) -> None:
    """Raise, on all ranks alike, where one was told something else than the first. Collective."""
    own = json.loads(json.dumps(mine))  # as others read it
    first = from_first(lambda: own, ranks)
    ranks.agreement().all_or_none(lambda: _refuse_other(own, first))


def from_first(make: Callable[[], T], ranks: Ranks) -> T:
    """What `make` returns on the first rank, on all. If it raises there, all raise its sentence. Collective."""
    board, key = ranks.messages(), f"first-{next(_count)}"
    ranks.agreement().first_decides(lambda: board.put(key, b64encode(pickle.dumps(make())).decode()))
    found: T = pickle.loads(b64decode(board.get(key)))  # by this program, on the first of its own ranks
    return found


def _refuse_other(own: dict[str, Any], first: dict[str, Any]) -> None:
    keys = [k for k in [*first, *own] if not k.startswith(CODE) or (k in first and k in own)]  # an import may be one rank's own
    key = next((k for k in keys if first.get(k) != own.get(k)), None)  # one of the recipe before what follows from it
    if key is not None:
        here, there = json.dumps(own.get(key)), json.dumps(first.get(key))
        raise FullshardError(
            f"{key} is {here} here and {there} on rank 0; start all ranks, also on {socket.gethostname()}, with the same recipe, "
            "data, code and versions"
        )
