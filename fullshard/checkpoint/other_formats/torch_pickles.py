"""Reads torch's pickles without torch and without executing anything in them; writes the pickle of a state dict.

A pickle is a program that calls functions by name. Here the names of tensors and containers resolve to functions of this
module, and other names of torch to placeholders that only store their arguments. Any other name is an error. Tensors stay
in the file until they are read.
"""

import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.base.errors import FullshardError
from fullshard.base.untrusted_files import quoted, read_range
from fullshard.checkpoint.other_formats.unpickler import DamagedError, GlobalName, Placeholder, Unpickler, key
from fullshard.checkpoint.safetensors import ITEM_BYTES, is_shape

LARGEST_PICKLE = 1 << 28  # bytes, enough for the metadata of a million chunks
PIECE = 1 << 24  # bytes read at a time to compute a checksum

STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "UntypedStorage": "U8",
}  # fmt: skip
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
PLACEHOLDERS = re.compile(
    r"torch\.(device|strided|contiguous_format|preserve_format|channels_last|_C\..*|_tensor\..*|_utils\._rebuild_\w+)"
    r"|torch\.nn\.parameter\.\w+|torch\.serialization\._get_layout|torch\.distributed\.[\w.]+|deepspeed\.[\w.]+"
    r"|numpy\.(dtype|core\.multiarray\.scalar|_core\.multiarray\.scalar)|argparse\.Namespace|pathlib\.\w*Path"
)


# -- tensors ------------------------------------------------------------------------------------------------


class ArchiveMember:
    """The bytes of a storage in an archive, and their CRC32, or None if the archive has no checksums."""

    def __init__(self, path: Path, start: int, nbytes: int, crc: int | None):
        self.path, self.start, self.nbytes, self.crc = path, start, nbytes, crc
        self.checked = crc is None

    def read(self, first: int, count: int) -> bytearray:
        """`count` bytes from `first` on. The first call compares all bytes with the checksum."""
        if count == self.nbytes:
            data = read_range(self.path, self.start, count)
            self._compare(zlib.crc32(data))
            return data
        self.check()
        return read_range(self.path, self.start + first, count)

    def check(self) -> None:
        """Compare the bytes with their checksum. Does nothing from the second call on."""
        crc = 0
        for start in range(0, 0 if self.checked else self.nbytes, PIECE):
            crc = zlib.crc32(read_range(self.path, self.start + start, min(PIECE, self.nbytes - start)), crc)
        self._compare(crc)

    def _compare(self, crc: int) -> None:
        if not self.checked and crc != self.crc:
            raise FullshardError(f"{self.path} is damaged: a checksum (CRC32) does not match; fetch it again")
        self.checked = True


@dataclass(frozen=True, slots=True)
class FileStorage:
    """A tensor's storage in a file, and the dtype of its elements."""

    member: ArchiveMember
    dtype: str


@dataclass(frozen=True, slots=True)
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

    @property
    def path(self) -> Path:
        return self.storage.member.path

    def read(self) -> bytes | bytearray:
        """The tensor's bytes, row-major."""
        item = ITEM_BYTES[self.dtype]
        if not self.numel:
            return b""
        count = span(self.shape, self.stride)
        data = self.storage.member.read(self.offset * item, count * item)
        if count == self.numel and self.stride == contiguous_stride(self.shape):
            return data
        flat = np.frombuffer(data, dtype=f"V{item}")
        # A dim of one element may have any stride, even one that does not fit into 64 bits.
        steps = [s * item if n > 1 else 0 for n, s in zip(self.shape, self.stride, strict=True)]
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps).tobytes()

    def part(self, first: int, count: int) -> bytes | bytearray:
        """Elements `first` … `first + count` of a flat tensor."""
        item = ITEM_BYTES[self.dtype]
        if len(self.shape) != 1 or self.stride != (1,) or not 0 <= first <= first + count <= self.numel:
            raise FullshardError(f"{self.path}: expected a flat tensor of at least {first + count} elements")
        return self.storage.member.read((self.offset + first) * item, count * item)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of the storage from a tensor's first to its last."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


# -- names --------------------------------------------------------------------------------------------------


def unpickle(data: bytes | bytearray, where: str, storage: Callable[[str, str], FileStorage] | None = None) -> Any:
    """The object that a pickle holds. `storage(key, dtype)` returns a tensor's storage; without it, tensors are an error."""
    try:
        return Unpickler(data, partial(_resolve, where), partial(_persistent, where, storage)).load()
    except DamagedError as error:
        raise FullshardError(f"{where} cannot be read: its pickle is damaged, or not one that torch wrote: {error}") from None


def _resolve(where: str, module: str, name: str) -> Any:
    path = f"{module}.{name}"
    if path in CONTAINERS:
        return GlobalName(path, CONTAINERS[path])
    if module in ("torch", "torch.storage") and name in STORAGES:
        return STORAGES[name]
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    if path in TENSOR_FUNCTIONS:
        return GlobalName(path, partial(TENSOR_FUNCTIONS[path], where))
    if len(path) < 200 and PLACEHOLDERS.fullmatch(path):
        return GlobalName(path, lambda *args: Placeholder(path, args))
    raise FullshardError(f"{where} refers to {quoted(path)[1:-1]}, which no checkpoint needs; it is not read")


def _persistent(where: str, storage: Callable[[str, str], FileStorage] | None, pid: Any) -> FileStorage:
    known = isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[2], str)
    if storage is None or not known:
        raise FullshardError(f"{where} refers to something outside itself; it is not read")
    return storage(pid[2], pid[1] if isinstance(pid[1], str) and pid[1] in ITEM_BYTES else "U8")


def _tensor(where: str, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any, dtype: str | None = None) -> FileTensor:
    valid = isinstance(storage, FileStorage) and is_shape(shape) and is_shape(stride) and is_shape((offset,))
    if not valid or len(shape) != len(stride):
        raise FullshardError(f"{where} has a malformed tensor")
    dtype = dtype or storage.dtype
    if (offset + span(shape, stride)) * ITEM_BYTES[dtype] > storage.member.nbytes:
        raise FullshardError(f"{where} has a tensor that reaches beyond its storage")
    return FileTensor(storage, dtype, offset, tuple(shape), tuple(stride))


def _tensor_of_dtype(where: str, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any,
                     *_: Any) -> FileTensor:  # fmt: skip
    """A tensor whose dtype has no storage class, such as fp8."""
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise FullshardError(f"{where} has a tensor of an unknown dtype")
    return _tensor(where, storage, offset, shape, stride, dtype=dtype)


def _subclass(where: str, make: Any, kind: Any, args: Any, state: Any) -> Any:
    """A plain tensor with attributes becomes the tensor; a DTensor or an unknown class becomes a placeholder."""
    plain = isinstance(make, GlobalName) and make.path in TENSOR_FUNCTIONS and isinstance(args, tuple)
    if plain and isinstance(kind, GlobalName) and not kind.path.endswith(".DTensor"):
        return make.make(*args)
    return Placeholder("torch._tensor._rebuild_from_type_v2", (make, kind, args, state))


TENSOR_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": lambda where, data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda where, data, *_: data,
    "torch._tensor._rebuild_from_type_v2": _subclass,
}


def _pairs(pairs: Any = (), *_: Any) -> dict[Any, Any]:
    """The dict for an OrderedDict's arguments."""
    return dict(pairs) if isinstance(pairs, dict) else {key(k): v for k, v in _items(pairs)}


def _items(items: Any = ()) -> list[Any]:
    if not isinstance(items, list | tuple | set | frozenset):
        raise TypeError("not a collection")
    return list(items)


def _number(value: Any = 0) -> int | float:
    if not isinstance(value, int | float):
        raise TypeError("not a number")
    return value


CONTAINERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _pairs,
    "collections.defaultdict": lambda kind=None, pairs=(): _pairs(pairs),
    "torch.Size": lambda items=(): tuple(_items(items)),
    "builtins.set": lambda items=(): set(map(key, _items(items))),
    "__builtin__.set": lambda items=(): set(map(key, _items(items))),
    "builtins.list": _items,
    "builtins.tuple": lambda items=(): tuple(_items(items)),
    "builtins.dict": _pairs,
    "builtins.int": _number,
    "builtins.float": _number,
}


# -- writing ------------------------------------------------------------------------------------------------


def pickled_text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def pickled_int(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + len(data).to_bytes(1, "little") + data


def pickled_ints(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(pickled_int, values)) + b"t"


def state_dict_pickle(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The pickle of a state dict with these tensors (name, dtype, shape). Storage i holds the bytes of the i-th tensor."""
    storages = {word: name for name, word in STORAGES.items() if name != "UntypedStorage"}
    parts = [b"\x80\x02ccollections\nOrderedDict\n)R("]
    for i, (name, dtype, shape) in enumerate(tensors):
        if dtype not in storages:
            raise FullshardError(f"{name} is {dtype}, which cannot be written to a torch file; export it with --dtype")
        kind = f"ctorch\n{storages[dtype]}\n".encode()
        storage = (
            b"("
            + pickled_text("storage")
            + kind
            + pickled_text(str(i))
            + pickled_text("cpu")
            + pickled_int(math.prod(shape))
            + b"tQ"
        )
        shaped = pickled_int(0) + pickled_ints(shape) + pickled_ints(contiguous_stride(shape))
        hooks = b"ccollections\nOrderedDict\n)R"
        parts.append(pickled_text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + shaped + b"\x89" + hooks + b"tR")
    return b"".join(parts) + b"u."
