"""Files that torch pickled, read without torch and without running anything in them.

A pickle is a program. Here its names resolve to inert classes that only remember what they were called with, and a
name that no checkpoint needs ends the reading. Tensors stay in the file until their bytes are asked for.
"""

import io
import math
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fullshard.checkpoint.safetensors import ITEM_BYTES
from fullshard.errors import FullshardError

LARGEST_PICKLE = 1 << 30  # bytes

STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "UntypedStorage": "U8",
}  # fmt: skip
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
PLAIN = {
    ("collections", "OrderedDict"): OrderedDict, ("collections", "defaultdict"): dict, ("torch", "Size"): tuple,
    ("builtins", "set"): set, ("__builtin__", "set"): set, ("builtins", "list"): list, ("builtins", "dict"): dict,
    ("builtins", "int"): int, ("builtins", "float"): float, ("builtins", "tuple"): tuple,
}  # fmt: skip
INERT = re.compile(
    r"torch\.(device|strided|contiguous_format|preserve_format|channels_last|_C\..*|_tensor\..*|_utils\._rebuild_\w+)"
    r"|torch\.nn\.parameter\.\w+|torch\.serialization\._get_layout|torch\.distributed\.[\w.]+|deepspeed\.[\w.]+"
    r"|numpy\.(dtype|core\.multiarray\.scalar|_core\.multiarray\.scalar)|argparse\.Namespace|pathlib\.\w*Path"
)


@dataclass(frozen=True)
class FileStorage:
    """A stretch of a file."""

    path: Path
    start: int
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class FileTensor:
    """A tensor that is still in its file."""

    storage: FileStorage
    dtype: str
    offset: int  # elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self) -> bytes:
        """Its bytes, row-major."""
        item = ITEM_BYTES[self.dtype]
        if not self.numel:
            return b""
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        data = read_range(self.storage.path, self.storage.start + self.offset * item, span * item)
        if span == self.numel and self.stride == contiguous(self.shape):
            return data
        flat = np.frombuffer(data, dtype=f"V{item}")
        return np.lib.stride_tricks.as_strided(flat, self.shape, [s * item for s in self.stride]).tobytes()

    def part(self, first: int, count: int) -> bytes:
        """Elements `first` … `first + count` of a flat tensor."""
        item = ITEM_BYTES[self.dtype]
        if len(self.shape) != 1 or self.stride != (1,) or not 0 <= first <= first + count <= self.numel:
            raise FullshardError(f"{self.storage.path}: a flat tensor was expected, of at least {first + count} elements")
        return read_range(self.storage.path, self.storage.start + (self.offset + first) * item, count * item)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def read_range(path: Path, start: int, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(count)
    if len(data) != count:
        raise FullshardError(f"{path} is cut off; fetch it again")
    return data


class Inert:
    """Stands for an object of a class that is not imported: `args` it was made with, `state` it was given."""

    path = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    def __init__(self, *args: Any, **kwargs: Any):
        return

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        return

    def append(self, value: Any) -> None:
        return


class Unpickler(pickle.Unpickler):
    """Resolves names to plain containers, words for dtypes, and inert classes; refuses the rest."""

    def __init__(self, file: IO[bytes], where: str, storages: "Archive | None" = None):
        super().__init__(file)
        self.where, self.storages = where, storages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PLAIN:
            return PLAIN[(module, name)]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if INERT.fullmatch(f"{module}.{name}"):
            return type(name, (Inert,), {"path": f"{module}.{name}"})
        raise FullshardError(f"{self.where} names {module}.{name}, which no checkpoint needs; it is not read")

    def persistent_load(self, pid: Any) -> Any:
        if self.storages is None or not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise FullshardError(f"{self.where} refers to something outside itself; it is not read")
        return self.storages.storage(str(pid[2]), pid[1] if isinstance(pid[1], str) else "U8")

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> FileTensor:
        numbers = (offset, *shape, *stride)
        if not isinstance(storage, FileStorage) or not all(isinstance(n, int) and 0 <= n < 1 << 60 for n in numbers):
            raise FullshardError(f"{self.where} has a tensor that makes no sense")
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
        if len(shape) > 32 or (offset + span) * ITEM_BYTES[storage.dtype] > storage.nbytes:
            raise FullshardError(f"{self.where} has a tensor that reaches beyond its bytes")
        return FileTensor(storage, storage.dtype, offset, tuple(shape), tuple(stride))


def unpickle(file: IO[bytes], where: str, storages: "Archive | None" = None) -> Any:
    try:
        return Unpickler(file, where, storages).load()
    except FullshardError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise FullshardError(f"{where} cannot be read: {type(error).__name__}: {error}") from None


class Archive:
    """One file of `torch.save`, or such a file inside another one, from `start` on."""

    def __init__(self, path: Path, start: int = 0, length: int | None = None):
        self.path, self.start = path, start
        size = path.stat().st_size
        self.length = size - start if length is None else length
        if not 0 <= start <= start + self.length <= size:
            raise FullshardError(f"{path} is cut off; fetch it again")
        self.members: dict[str, tuple[int, int]] = {}

    def load(self) -> Any:
        """What was saved, its tensors still in the file."""
        with self.path.open("rb") as raw:
            window = _Window(raw, self.start, self.length)
            try:
                archive = zipfile.ZipFile(window)
            except (zipfile.BadZipFile, ValueError, OSError):
                hint = "if it is from before torch 1.6, load and save it with a newer torch"
                raise FullshardError(f"{self.path} is no file of torch.save; {hint}") from None
            root = self._index(archive, window)
            info = archive.getinfo(f"{root}data.pkl")
            if info.file_size > LARGEST_PICKLE:
                raise FullshardError(f"{self.path}: its pickle of {info.file_size} bytes is too large")
            return unpickle(io.BytesIO(archive.read(info)), str(self.path), self)

    def _index(self, archive: zipfile.ZipFile, window: "_Window") -> str:
        names = [n for n in archive.namelist() if n.endswith("data.pkl")]
        if len(names) != 1:
            raise FullshardError(f"{self.path} is no file of torch.save")
        root = names[0].removesuffix("data.pkl")
        order = f"{root}byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise FullshardError(f"{self.path} was written on a big-endian machine; save it again on another")
        for info in archive.infolist():
            if info.filename.startswith(f"{root}data/"):
                if info.compress_type != zipfile.ZIP_STORED:
                    raise FullshardError(f"{self.path} is compressed; save it with torch.save")
                window.seek(info.header_offset)
                head = window.read(30)
                at = info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
                self.members[info.filename.removeprefix(f"{root}data/")] = (self.start + at, info.file_size)
        return root

    def storage(self, key: str, dtype: str) -> FileStorage:
        if key not in self.members:
            raise FullshardError(f"{self.path} lacks the bytes of a tensor; fetch it again")
        start, nbytes = self.members[key]
        return FileStorage(self.path, start, nbytes, dtype)


class _Window(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int):
        self.file, self.start, self.length, self.at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = max(0, {0: 0, 1: self.at, 2: self.length}[whence] + offset)
        return self.at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self.length - self.at)
        self.file.seek(self.start + self.at)
        data = self.file.read(left if count is None or count < 0 else min(count, left))
        self.at += len(data)
        return data


# -- writing ------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + len(data).to_bytes(1, "little") + data


def numbers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def state_dict_pickle(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The pickle of a state dict of these (name, dtype, shape); the i-th tensor's bytes are storage i."""
    storages = {word: name for name, word in STORAGES.items() if name != "UntypedStorage"}
    parts = [b"\x80\x02ccollections\nOrderedDict\n)R("]
    for i, (name, dtype, shape) in enumerate(tensors):
        if dtype not in storages:
            raise FullshardError(f"{name} is {dtype}, which a torch file cannot hold; export it with --dtype")
        kind = f"ctorch\n{storages[dtype]}\n".encode()
        storage = b"(" + text("storage") + kind + text(str(i)) + text("cpu") + number(math.prod(shape)) + b"tQ"
        shaped = number(0) + numbers(shape) + numbers(contiguous(shape))
        hooks = b"ccollections\nOrderedDict\n)R"
        parts.append(text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + shaped + b"\x89" + hooks + b"tR")
    return b"".join(parts) + b"u."
