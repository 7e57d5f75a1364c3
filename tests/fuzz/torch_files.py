"""Files of `torch.save`, DCP and DeepSpeed as the libraries write them, and hostile versions of them."""

import io
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections import OrderedDict
from functools import cache
from pathlib import Path
from random import Random

from tests.fuzz import hostile

Members = dict[str, bytes]

# -- seeds, made once ---------------------------------------------------------------------------------------


@cache
def state_dicts() -> list[Members]:
    """The members of archives that torch.save wrote."""
    import torch

    torch.manual_seed(0)
    weight, shared = torch.randn(6, 4), torch.randn(32)
    named = OrderedDict(a=weight, b=weight.t(), c=shared[3:9], d=shared[:8].view(2, 4).bfloat16(), e=torch.tensor(3))
    named["f"] = torch.zeros(4).to(torch.float8_e4m3fn)
    named["g"] = torch.nn.Parameter(torch.randn(3))
    nested = {"model": {"module.x": weight, "y": {"z": shared}}, "optimizer": {"state": {0: {"step": 1.0}}}, "epoch": 3, "s": {1}}
    return [_members(_saved(tree)) for tree in (named, nested, {"w": torch.zeros(1).expand(64, 64)}, shared)]


def _saved(tree: object) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


def _members(data: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@cache
def dcp() -> tuple[bytes, bytes]:
    """The metadata of a DCP directory of one file, and that file: a tensor in two chunks, one in one, and a number."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    whole = torch.arange(24.0).view(6, 4)
    parts = [("w", (0, 0), whole[:4].clone()), ("w", (4, 0), whole[4:].clone()), ("b", (0,), torch.ones(5))]
    data, where, chunks = b"", {}, {"w": [], "b": []}
    for name, at, part in parts:
        saved = _saved(part)
        where[MetadataIndex(name, torch.Size(at))] = _StorageInfo("__0_0.distcp", len(data), len(saved))
        chunks[name].append(ChunkStorageMetadata(torch.Size(at), part.shape))
        data += saved
    sizes = {"w": whole.shape, "b": torch.Size([5])}
    found = {n: TensorStorageMetadata(TensorProperties(dtype=torch.float32), sizes[n], chunks[n]) for n in chunks}
    return pickle.dumps(Metadata(found | {"step": BytesStorageMetadata()}, None, where)), data


@cache
def deepspeed(stage: int) -> dict[str, Members]:
    """The archives of a ZeRO checkpoint of two ranks, by file name."""
    import tempfile

    import torch

    from tests.cpu.test_convert import deepspeed as write

    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory) / "x", stage, 2, {"a.weight": torch.randn(5, 3), "b": torch.randn(7)})
        return {p.name: _members(p.read_bytes()) for p in sorted((Path(directory) / "x").iterdir())}


# -- archives -----------------------------------------------------------------------------------------------


@cache
def bomb() -> bytes:
    """64 MiB of zeros, deflated."""
    compressor = zlib.compressobj(9, wbits=-15)
    return compressor.compress(bytes(1 << 26)) + compressor.flush()


def packed(members: list[tuple[str, bytes]]) -> bytes:
    """A zip as torch would write it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def hostile_zip(random: Random, members: Members) -> bytes:
    """A zip archive with false statements about its members."""
    listed = list(members.items())
    name, data = random.choice(listed)
    match random.randrange(7):
        case 0:  # a compressed member that expands
            return _claiming(packed([(n, bomb() if n == name else d) for n, d in listed]), name, method=8, size=0xFFFFFFFE)
        case 1:
            return packed([*listed, (name, hostile.flipped(random, data or b"x"))])  # twice
        case 2:
            return packed([(n, d) for n, d in listed if n != name])
        case 3:
            size = random.choice([0, 1, len(data) + 1, 1 << 20, 0xFFFFFFFE, 0xFFFFFFFF])
            return _claiming(packed(listed), name, size=size, compressed=size)
        case 4:  # one member's header for all
            return _claiming(packed(listed), name, offset=random.choice([0, 1, 64, 1 << 20, 0xFFFFFFFE]))
        case 5:
            return _claiming(packed(listed), name, crc=random.getrandbits(32))
        case _:
            whole = packed(listed)
            tail = random.randrange(1, min(400, len(whole)))  # the directory is at the end
            return whole[:-tail] + hostile.flipped(random, whole[-tail:], 2)


def _claiming(data: bytes, name: str, method=None, size=None, compressed=None, offset=None, crc=None) -> bytes:
    """Overwrite fields of a member in the zip directory."""
    found, at = bytearray(data), data.rfind(name.encode()) - 46
    for where, code, value in ((10, "<H", method), (16, "<I", crc), (20, "<I", compressed), (24, "<I", size), (42, "<I", offset)):
        if value is not None:
            struct.pack_into(code, found, at + where, value)
    return bytes(found)


# -- pickles ------------------------------------------------------------------------------------------------


def _word(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


SNIPPETS = [
    b"N0r\xff\xff\xff\x07", b"Nr\xff\xff\xff\x07", b"Nr\xff\xff\xff\xff", b"j\xff\xff\xff\x07",  # memo
    b"\x8b\xff\xff\xff\x7f", b"\x8b\x00\x00\x01\x00" + b"9" * 65536, b"\x8a\xff" + b"\x01" * 255,  # integers
    b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 7 + b"\x0f", b"\x95" + b"\xff" * 8, b"\x8e" + b"\xff" * 7 + b"\x7f",  # lengths
    b"\x96" + b"\xff" * 7 + b"\x7f", b"B\xff\xff\xff\xff", b"T\xff\xff\xff\xff",
    b"(" * 5000, b"]" * 20000, b"\x8f" * 20000, b"}" * 20000, b")" + b"\x85" * 20_000,  # many, and deep
    b"})" + b"\x85" * 200_000 + b"Ns", b"\x8f()" + b"\x85" * 100_000 + b"\x90", b"(" + b")\x85" * 50 + b"\x91",
    b"}q\xc8" + _word("a") + b"h\xc8s", b"]q\xc9h\xc9a", b"}q\xcaQ",  # contain themselves
    b"}q\x00" + b"".join(b"}(" + _word("a") + b"h%c" % i + _word("b") + b"h%cuq%c" % (i, i + 1) for i in range(60)),
    b"cbuiltins\nint\n(" + _word("9" * 20000) + b"tR", b"cbuiltins\nfloat\n(" + _word("x" * 20000) + b"tR",
    b"cbuiltins\nlist\n(J\xff\xff\xff\x7ftR", b"cbuiltins\nset\n(](K\x01]etR", b"ctorch\nSize\n(" + _word("ab") + b"tR",
    b"(" + b"N" * 30000 + b"tq\xd0" + b"cbuiltins\nlist\nq\xd1" + b"0h\xd1h\xd0\x85R" * 3000,  # copies of copies
    b"cbuiltins\ndict\n(K\x01tRNb", b"cbuiltins\nint\n)R}b", b"ccollections\ndefaultdict\ncbuiltins\nlist\n\x85R",
    b"ccollections\nOrderedDict\n(](K\x01K\x02etR", b"cos\nsystem\n(" + _word("true") + b"tR", b"c" + b"a" * 50000 + b"\nb\n",
    b"cbuiltins\neval\n(" + _word("1") + b"tR", b"ctorch._utils\n_rebuild_tensor_v2\n)R", b"NQ", b")Q", b"K\x01K\x02R",
    b"ctorch.distributed.x\nY\n)\x81N}b", b"ctorch\ndevice\n(NNNtR(NNe", b"\x82\x01", b"Pabc\n", b"I1\n", b"(i\n", b"\x97",
    b"(" + _word("storage") + b"ctorch\nFloatStorage\n" + _word("0") + _word("cpu") + b"K\x01tQ",
]  # fmt: skip


def tensor(random: Random) -> bytes:
    """The pickle of a tensor whose shape does not match its bytes."""
    number = lambda: random.choice([0, 1, 2, 4, 63, 2**20, 2**31, 2**40, 2**59, 2**63, -1])
    many = lambda: b"(" + b"".join(_number(number()) for _ in range(random.choice([0, 1, 2, 2, 3, 40]))) + b"t"
    kind = random.choice([b"FloatStorage", b"DoubleStorage", b"UntypedStorage", b"ByteStorage"])
    storage = b"(" + _word("storage") + b"ctorch\n" + kind + b"\n" + _word(random.choice("0129")) + _word("cpu") + b"K\x09tQ"
    shape = random.choice([many(), b"(" + _number(2**20) + _number(2**20) + b"t"])
    stride = random.choice([many(), b"(K\x00K\x00t"])
    if random.random() < 0.3:
        args = storage + _number(number()) + shape + stride + b"\x89Nctorch\nfloat64\nN"
        return b"ctorch._utils\n_rebuild_tensor_v3\n(" + args + b"tR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + _number(number()) + shape + stride + b"\x89NtR"


def _number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


@cache
def operations(data: bytes) -> list[bytes]:
    """The opcodes of a pickle, each with its argument."""
    at = [position for _, _, position in pickletools.genops(data)]
    return [data[a:b] for a, b in zip(at, [*at[1:], len(data)], strict=True)]


def hostile_pickle(random: Random, data: bytes) -> bytes:
    """A pickle with other opcodes, other bytes, or other tensors."""
    match random.randrange(6):
        case 0:
            return hostile.flipped(random, data, random.randrange(1, 5))
        case 1:  # a dict of tensors, many of them the same
            items = b"".join(_word(random.choice("abcd") + str(i)) + tensor(random) for i in range(random.randrange(1, 4)))
            again = b"".join(_word(f"z{i}") + b"h\xf0" for i in range(random.choice([0, 3, 2000])))
            return b"\x80\x02}(" + _word("m") + tensor(random) + b"q\xf0" + items + again + b"u."
        case 2:
            return b"\x80\x02}(" + _word("m") + random.choice(SNIPPETS) + _word("w") + tensor(random) + b"u."
    ops = list(operations(data))
    for _ in range(random.randrange(1, 4)):
        at, other = random.randrange(len(ops)), random.randrange(len(ops))
        match random.randrange(5):
            case 0:
                del ops[at]
            case 1:
                ops[at:at] = ops[other : other + random.randrange(1, 6)]
            case 2:
                ops[at], ops[other] = ops[other], ops[at]
            case 3:
                ops.insert(at, random.choice(SNIPPETS))
            case _:
                ops[at] = random.choice(
                    [_number(random.choice(hostile.NUMBERS[:12])), _word("x"), b"N", b"}", b"]", b")", b"K\x07"]
                )
        ops = ops or [b"N"]
    return b"".join(ops)


def hostile_archive(random: Random, members: Members) -> bytes:
    """An archive with a hostile pickle, damaged bytes, or a hostile directory."""
    name = next(n for n in members if n.endswith("data.pkl"))
    match random.randrange(4):
        case 0:
            return hostile_zip(random, members)
        case 1:
            return hostile.flipped(random, packed(list(members.items())), random.randrange(1, 4))
        case _:
            return packed(list((members | {name: hostile_pickle(random, members[name])}).items()))
