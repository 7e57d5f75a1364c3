"""Descriptions of Hugging Face directories, kept on disk: with one, planning needs neither torch nor transformers.

An entry is a JSON file, gzipped, in `$XDG_CACHE_HOME/fullshard`. Its name is a hash of all that the description depends on:
the config, the dtype, the tensor axis, the code of this package and the versions of the libraries. Entries are written
atomically, so processes may share the directory. What cannot be read is ignored with a note. Standard library only.
"""

import gzip
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fullshard.base.reading import is_directory, is_plain_file
from fullshard.model.costs import Costs, from_json, to_json
from fullshard.model.description import Description, Tensor, UnitDescription

MAX_ENTRIES = 64
MAX_CONFIG = 16 << 20  # bytes
# Libraries that decide which kernels a model calls.
LIBRARIES = ("torch", "transformers", "kernels", "mamba_ssm", "causal_conv1d", "flash_attn", "mambapy", "flash-linear-attention")


def cached_description(
    model: str, *, sequence: int, compute: str, make: Callable[[], Description], tensor: tuple[int, ...] = (), fresh: bool = False
) -> Description:
    """The description that `make` returns, from the cache if `model` is a Hugging Face directory that was described before.
    `fresh`: make it again, and keep that."""
    config = _config(model)
    if config is None:
        return make()
    about = [hashlib.sha256(config).hexdigest(), compute, list(tensor), _code()]
    for key in () if fresh else (_key(about), _key([*about, sequence])):  # most entries hold for every sequence length
        if (cached := _read(directory() / key)) is not None:
            return Description(model, cached.units, cached.buffers, cached.costs)
    made = make()
    if made.costs is not None:
        holds_for_all = made.costs.shape is None and all(c.shape is None for c in made.costs.split.values())
        _write(directory() / _key(about if holds_for_all else [*about, sequence]), made)
    return made


def directory() -> Path:
    """Where entries are kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fullshard"


def _config(model: str) -> bytes | None:
    """The bytes of the model's config.json; None if it is no Hugging Face directory."""
    if ":" in model or model.endswith(".py"):
        return None
    path = Path(model) / "config.json" if is_directory(model) else Path(model)
    if not is_plain_file(path) or path.stat().st_size > MAX_CONFIG:
        return None
    with suppress(OSError):
        return path.read_bytes()
    return None


def _key(parts: list[Any]) -> str:
    return f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.json.gz"


@cache
def _code() -> str:
    """A hash of this package's code and of the versions of libraries."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            digest.update(f"{name} {version(name)}".encode())
    return digest.hexdigest()


def _read(path: Path) -> Description | None:
    if not path.is_file():
        return None
    try:
        description = _from_json(json.loads(gzip.decompress(path.read_bytes())))
        with suppress(OSError):
            os.utime(path)  # recently used entries are kept
        return description
    except Exception as error:
        print(f"note: {path} cannot be read ({type(error).__name__}), so the model is traced again", file=sys.stderr)
        return None


def _write(path: Path, description: Description) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            file.write(gzip.compress(json.dumps(_to_json(description)).encode(), 3, mtime=0))
        os.replace(file.name, path)
        _prune(path.parent)
    except OSError as error:
        print(f"note: the traced costs are not kept: {path.parent}: {error.strerror}", file=sys.stderr)


def _prune(folder: Path) -> None:
    """Delete the entries that were not used for longest."""
    entries = sorted(folder.glob("*.json.gz"), key=lambda p: p.stat().st_mtime)
    for path in entries[:-MAX_ENTRIES]:
        with suppress(OSError):
            path.unlink()


# -- JSON --------------------------------------------------------------------------------------------------


def _to_json(description: Description) -> dict[str, Any]:
    assert description.costs is not None
    units = [
        [u.name, u.kind, list(u.modules), [_tensor_json(t) for t in u.parameters], [_tensor_json(t) for t in u.buffers]]
        for u in description.units
    ]
    return {"units": units, "buffers": [_tensor_json(t) for t in description.buffers], "costs": _costs_json(description.costs)}


def _from_json(data: dict[str, Any]) -> Description:
    units = tuple(
        UnitDescription(name, kind, tuple(modules), tuple(map(_tensor, parameters)), tuple(map(_tensor, buffers)))
        for name, kind, modules, parameters, buffers in data["units"]
    )
    return Description("", units, tuple(map(_tensor, data["buffers"])), _costs(data["costs"]))


def _tensor_json(t: Tensor) -> list[Any]:
    return [t.name, list(t.shape), t.dtype, t.trainable, list(t.ties), t.linear, t.outside]


def _tensor(row: list[Any]) -> Tensor:
    name, shape, dtype, trainable, ties, linear, outside = row
    return Tensor(name, tuple(shape), dtype, trainable, tuple(ties), linear, outside)


def _costs_json(costs: Costs) -> dict[str, Any]:
    return {
        "traces": to_json(costs.traces),
        "shape": costs.shape,
        "vocabulary": costs.vocabulary,
        "split": {ranks: _costs_json(part) for ranks, part in costs.split.items()},
        "shapes": {name: list(shape) for name, shape in costs.shapes.items()},
    }


def _costs(data: dict[str, Any]) -> Costs:
    return Costs(
        from_json(data["traces"]),
        None if data["shape"] is None else (data["shape"][0], data["shape"][1]),
        data["vocabulary"],
        {int(ranks): _costs(part) for ranks, part in data["split"].items()},
        {name: tuple(shape) for name, shape in data["shapes"].items()},
    )
