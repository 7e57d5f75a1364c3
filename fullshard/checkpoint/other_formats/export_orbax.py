"""Exports weights as a directory that Orbax restores: a tree of tables by the parts of the names, the arrays as plain Zarr."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.file_writer import sync_directory, write_file
from fullshard.checkpoint.other_formats.external_checkpoint import file_inside
from fullshard.checkpoint.other_formats.import_orbax import METADATA
from fullshard.checkpoint.safetensors import ITEM_BYTES
from fullshard.checkpoint.writer import BytesLike, TensorSource, write_directory

CHUNK = 1 << 26  # bytes: a reader fetches whole chunks
ZARR = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "bfloat16", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
TABLE = 2  # the type of a key: of a table, not of a list


def export_orbax(sources: Sequence[TensorSource], output: Path) -> None:
    """Write the directory, a tensor at a time."""
    names = {s.name for s in sources}
    for name in names:
        inner = next((n for n in names if n.startswith(f"{name}.")), None)
        if inner is not None:
            raise FullshardError(f"{name} and {inner} cannot both be in one tree; rename one of them")

    def fill(directory: Path) -> None:
        for source in sources:
            _write_array(file_inside(directory, source.name), source)
        began = time.time_ns()
        _write(directory / METADATA, json.dumps(_metadata(sources)).encode())
        about: dict[str, Any] = {"item_handlers": HANDLER, "metrics": {}, "performance_metrics": {}, "custom_metadata": {}}
        about |= {"init_timestamp_nsecs": began, "commit_timestamp_nsecs": began}
        _write(directory / "_CHECKPOINT_METADATA", json.dumps(about).encode())
        _write(directory / "commit_success.txt", f"Checkpoint commit was successful to {output}".encode())

    write_directory(output, fill)


def _metadata(sources: Sequence[TensorSource]) -> dict[str, Any]:
    def entry(source: TensorSource) -> dict[str, Any]:
        keys = [{"key": key, "key_type": TABLE} for key in source.name.split(".")]
        value = {"value_type": "np.ndarray", "skip_deserialize": False}  # a `jax.Array` would need a sharding to be restored
        return {"key_metadata": keys, "value_metadata": value}

    tree = {str(tuple(s.name.split("."))): entry(s) for s in sources}
    flags = {"use_ocdbt": False, "use_zarr3": False, "store_array_data_equal_to_fill_value": True, "custom_metadata": None}
    return {"tree_metadata": tree, **flags}


def _write_array(directory: Path, source: TensorSource) -> None:
    """One array as Zarr 2, cut along dim 0. The last chunk is padded to the size of the others."""
    directory.mkdir()
    row = math.prod(source.shape[1:]) * ITEM_BYTES[source.dtype]
    rows = min(max(1, CHUNK // max(1, row)), max(1, source.shape[0])) if source.shape else 1
    chunks = [rows, *(max(1, n) for n in source.shape[1:])] if source.shape else []
    about = {"zarr_format": 2, "shape": list(source.shape), "chunks": chunks, "dtype": ZARR[source.dtype], "compressor": None}
    about |= {"fill_value": None, "filters": None, "order": "C", "dimension_separator": "."}
    _write(directory / ".zarray", json.dumps(about).encode())
    data: BytesLike = memoryview(source.read())
    for i in range(-(-source.shape[0] // rows) if source.shape else 1):
        piece = bytes(data[i * rows * row : (i + 1) * rows * row])
        name = ".".join([str(i), *("0" for _ in source.shape[1:])])
        _write(directory / name, piece.ljust(rows * row, b"\0"))
    sync_directory(directory)


def _write(path: Path, data: bytes) -> None:
    write_file(path, memoryview(data), len(data))
