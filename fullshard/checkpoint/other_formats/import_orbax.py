"""Imports directories of Orbax, JAX's checkpoints. Tensorstore reads their arrays; neither Orbax nor JAX is needed.

The file `_METADATA` lists the tree as JSON. The arrays are Zarr, in one store of all (OCDBT) or in a directory each.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.base.errors import FullshardError, first_line
from fullshard.base.reading import parse_json
from fullshard.base.untrusted_files import quoted, read_small
from fullshard.checkpoint.other_formats.external_checkpoint import (
    ExternalCheckpoint,
    as_name,
    as_shape,
    as_table,
    file_inside,
    refusing_malformed,
)
from fullshard.checkpoint.safetensors import ITEM_BYTES
from fullshard.checkpoint.writer import TensorSource

METADATA = "_METADATA"
LARGEST = 1 << 28  # bytes of the metadata
COMPRESSED = 256  # arrays may take this many times the files' bytes: Orbax compresses, and zeros shrink to nothing
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
ARRAYS = ("jax.Array", "np.ndarray")


def find_orbax(path: Path) -> Path | None:
    """The directory of a tree: `path` itself, its only item, or that of its newest step. None if it is none of Orbax's."""
    if (path / METADATA).is_file():
        return path
    if steps := [p for p in path.iterdir() if p.name.isdecimal() and p.is_dir() and not p.is_symlink()]:
        newest = max(steps, key=lambda p: int(p.name))
        return newest if (newest / METADATA).is_file() else _only_item(newest)
    return _only_item(path)


def _only_item(path: Path) -> Path | None:
    items = sorted(p.parent for p in path.glob(f"*/{METADATA}"))
    if len(items) > 1:
        names = ", ".join(quoted(p.name)[1:-1] for p in items[:5])
        raise FullshardError(f"{path} holds several trees of Orbax ({names}); give one of them")
    return items[0] if items else None


def from_orbax(path: Path) -> ExternalCheckpoint:
    """The arrays of a tree by dotted path. If it has a table `params`, the weights are there."""
    with refusing_malformed(path / METADATA, "metadata of Orbax in a known version"):
        tree = as_table(parse_json(read_small(path / METADATA, LARGEST), str(path / METADATA)))
        entries = [as_table(entry) for entry in as_table(tree["tree_metadata"]).values()]
        keys = [[as_table(key)["key"] for key in e["key_metadata"]] for e in entries if _is_array(e)]
        driver = "zarr3" if tree.get("use_zarr3") else "zarr"
        sources = [_source(path, parts, driver, ocdbt=bool(tree.get("use_ocdbt"))) for parts in keys]
    if not sources:
        raise FullshardError(f"{path} holds no arrays")
    nested = any(len(parts) > 1 and parts[0] == "params" for parts in keys)
    files = frozenset(p for p in path.rglob("*") if p.is_file() and not p.is_symlink())
    return ExternalCheckpoint(sources, files, (path.name,), "params." if nested else "", COMPRESSED)


def _is_array(entry: Mapping[Any, Any]) -> bool:
    about = as_table(entry["value_metadata"])
    return about.get("value_type") in ARRAYS and not about.get("skip_deserialize")


def _source(path: Path, keys: Sequence[Any], driver: str, *, ocdbt: bool) -> TensorSource:
    stored = as_name(".".join(map(str, keys)), path)
    store = _open(path, stored, driver, ocdbt=ocdbt)
    dtype, shape = str(store.dtype.name), as_shape(list(store.shape))
    if dtype not in DTYPES:
        raise FullshardError(f"{path}: {stored} is {quoted(dtype)}, which safetensors does not support; convert it first")
    name = ".".join(map(str, keys[:-1] if len(keys) > 1 and keys[-1] == "value" else keys))  # NNX: the value of a Variable
    return TensorSource(name, DTYPES[dtype], shape, partial(_read, path, stored, store, DTYPES[dtype]))


def _open(path: Path, name: str, driver: str, *, ocdbt: bool) -> Any:
    try:
        import tensorstore
    except ImportError:
        raise FullshardError(f"{path} is of Orbax, which needs tensorstore; pip install 'fullshard[jax]'") from None
    if ocdbt:
        kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path.resolve()}/"}, "path": f"{name}/"}
    else:
        kvstore = {"driver": "file", "path": f"{file_inside(path, name).resolve()}/"}
    try:
        return tensorstore.open({"driver": driver, "kvstore": kvstore}, open=True, read=True).result()
    except (ValueError, OSError) as error:
        raise FullshardError(f"{path}: {name} cannot be read ({first_line(error)[:200]}); fetch it again") from None


def _read(path: Path, name: str, store: Any, dtype: str) -> memoryview:
    try:
        array = np.ascontiguousarray(store.read().result())
    except (ValueError, OSError) as error:
        raise FullshardError(f"{path}: {name} cannot be read ({first_line(error)[:200]}); fetch it again") from None
    assert array.dtype.itemsize == ITEM_BYTES[dtype]
    return array.reshape(-1).view(np.uint8).data
