"""Hostile files: each is refused in one sentence with exit code 2, allocates no large memory and leaves nothing behind."""

import json
import os
import struct
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.checkpoint.other_formats.import_weights import import_weights
from fullshard.checkpoint.other_formats.torch_pickles import pickled_int as number
from fullshard.checkpoint.other_formats.torch_pickles import pickled_ints as numbers
from fullshard.checkpoint.other_formats.torch_pickles import pickled_text as text
from fullshard.checkpoint.other_formats.torch_pickles import state_dict_pickle
from fullshard.checkpoint.reader import open_checkpoint
from fullshard.commands.cli import main
from tests.pure.checkpoints import make
from tests.pure.test_checkpoint import sealed, tree_of

MiB = 1 << 20


@contextmanager
def at_most(bound: int) -> Iterator[None]:
    """Assert that Python allocates less than `bound` bytes at any time."""
    tracemalloc.start(1)
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < bound
    finally:
        tracemalloc.stop()


@pytest.fixture
def refused(monkeypatch, capsys) -> Callable[..., str]:
    """Run a command line that must be refused; return the sentence."""

    def run(*line: object, code: int = 2) -> str:
        monkeypatch.setattr(sys, "argv", ["fullshard", "checkpoint", *map(str, line)])
        with at_most(32 * MiB), pytest.raises(SystemExit) as done:
            main()
        said = capsys.readouterr()
        assert done.value.code == code, said
        lines = (said.err if code == 2 else said.out).splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    return run


# -- .pt ----------------------------------------------------------------------------------------------------


def archive(path: Path, pickle: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("a/data.pkl", pickle)
        made.writestr("a/data/0", members.pop("storage", bytes(64)))
        for name, data in members.items():
            made.writestr(f"a/{name}", data)
    return path


def tensor(shape: tuple[int, ...], stride: tuple[int, ...], key: str = "0") -> bytes:
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + number(16) + b"tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(0) + numbers(shape) + numbers(stride) + b"\x89NtR"


def table(*items: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(items) + b"u."


SMALL = text("w") + tensor((4,), (1,))
DOUBLED = b"".join(b"}(" + text("a") + b"h%c" % i + text("b") + b"h%cuq%c" % (i, i + 1) for i in range(40))
PICKLES = {
    "stride 0": (table(text("w") + tensor((1 << 15, 1 << 15), (0, 0))), "claims tensors of 4.00 GiB"),
    "one tensor, many names": (
        table(text("w") + tensor((1024,), (1,)) + b"q\x01", *(text(f"v{i}") + b"h\x01" for i in range(1 << 12))),
        "claims tensors of",
    ),
    "beyond its bytes": (table(text("w") + tensor((1 << 40,), (1,))), "reaches beyond its storage"),
    "beyond 64 bits": (table(text("w") + tensor((1 << 64,), (1,))), "malformed"),
    "holds itself": (b"\x80\x02}q\x01" + text("a") + b"h\x01s.", "tables that hold themselves"),
    "doubled 40 times": (b"\x80\x02}q\x00(" + SMALL + b"u" + DOUBLED + b".", "one table many times"),
    "deep": (b"\x80\x02" + (b"}" + text("a")) * 400 + b"N" + b"s" * 400 + b".", "tables that hold themselves"),
    "marks": (b"\x80\x02" + b"(" * 100_000 + b".", "nested deeper than 1000 levels"),
    "a key that is deep": (
        table(text("x" * 300_000) + b"N)" + b"\x85" * 150_000 + b"N"),
        "keys that are neither text nor numbers",
    ),
    "a text as integer": (table(text("x") + b"cbuiltins\nint\n(" + text("9" * 10**6) + b"tR"), "malformed"),
    "an integer": (table(text("x") + b"\x8b" + struct.pack("<I", 10**6) + b"\x11" * 10**6), "an integer of 1000000 bytes"),
    "a text that is not there": (b"\x80\x02\x8d" + struct.pack("<Q", 1 << 60) + b".", "ends early"),
    "copies": (
        b"\x80\x02(" + b"N" * 10**5 + b"tq\x01cbuiltins\nlist\nq\x02" + b"h\x02h\x01\x85R" * 10**5 + b".",
        "more objects than a pickle of its size can hold",
    ),
    "sets": (b"\x80\x02" + b"\x8f" * 10**5 + b".", "more objects than a pickle of its size can hold"),
    "attributes of an integer": (table(text("x") + b"cbuiltins\nint\n)R}b"), "sets attributes of an object that has none"),
    "a name that moves the cursor": (table(text("\x1b[2J") + tensor((4,), (1,))), r"a tensor called '\x1b[2J'"),
    "a name that is long": (b"\x80\x02c" + b"o" * 10**6 + b"\nx\n.", "which no checkpoint needs"),
    "two of one name": (table(text("m"), b"}(", SMALL, b"u", text("m.w") + tensor((4,), (1,))), None),
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_that_lies_gets_a_sentence(tmp_path, refused, kind):
    pickle, sentence = PICKLES[kind]
    path = archive(tmp_path / "model.pt", pickle, storage=bytes(4096))
    if sentence is None:  # the last value of a key counts, as in any dict
        import_weights(str(path), Local(tmp_path / "out"))
        return
    said = refused("import", path, "-o", tmp_path / "out/deeper")
    assert said.startswith(f"error: {path}")
    assert sentence in said
    assert len(said) < 500
    assert not (tmp_path / "out").exists()


def test_a_memo_index_takes_no_memory(tmp_path):
    path = archive(tmp_path / "model.pt", table(SMALL + b"r\xff\xff\xff\x07"))
    with at_most(4 * MiB):
        made = import_weights(str(path), Local(tmp_path / "out"))
    assert np.array_equal(open_checkpoint(made.path).tensor("model.w"), np.zeros(4, "<f4"))


def deflated(path: Path, name: str) -> Path:
    """A compressed member: 6 GiB of zeros in 6 MB."""
    squeezer = zlib.compressobj(1, wbits=-15)
    data = squeezer.compress(bytes(1 << 26)) + squeezer.flush()
    archive(path, table(SMALL), **{name: data})
    whole = bytearray(path.read_bytes())
    at = whole.rfind(f"a/{name}".encode()) - 46
    struct.pack_into("<H", whole, at + 10, 8)
    struct.pack_into("<I", whole, at + 24, 0xFFFFFFFE)
    path.write_bytes(whole)
    return path


def test_a_deflated_member_is_not_inflated(tmp_path, refused):
    path = deflated(tmp_path / "model.pt", "byteorder")
    assert refused("import", path, "-o", tmp_path / "out") == f"error: {path} is compressed; save it with torch.save"


def test_a_flipped_bit_of_a_tensor_is_found(tmp_path, refused):
    data = np.arange(16, dtype="<f4").tobytes()
    pickle = state_dict_pickle([("w", "F32", (16,))])
    path = archive(tmp_path / "model.pt", pickle, storage=data)
    import_weights(str(path), Local(tmp_path / "whole"))
    whole = path.read_bytes()
    for offset in (0, 33, 63):
        at = whole.index(data) + offset
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        said = refused("import", path, "-o", tmp_path / "out")
        assert said == f"error: {path} is damaged: a checksum (CRC32) does not match; fetch it again"
        assert not (tmp_path / "out").exists()
    at = whole.index(pickle) + 40
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert "a checksum (CRC32) does not match" in refused("import", path, "-o", tmp_path / "out")


def test_a_storage_is_compared_once_and_piece_by_piece(tmp_path, monkeypatch):
    """Eight tensors in one storage of 64 MiB: its checksum is computed once, piece by piece."""
    views = [text(f"w{i}") + tensor((4,), (1,)) for i in range(8)]
    path = archive(tmp_path / "model.pt", table(*views), storage=bytes(64 * MiB))
    read = []

    class Counted:
        @staticmethod
        def crc32(data, *before):
            read.append(len(data))
            return zlib.crc32(data, *before)

    monkeypatch.setattr("fullshard.checkpoint.other_formats.torch_pickles.zlib", Counted)
    with at_most(40 * MiB):
        import_weights(str(path), Local(tmp_path / "out"))
    assert sum(read) == 64 * MiB + len(table(*views))
    assert max(read) == 16 * MiB


def test_two_members_of_one_name_and_a_member_that_is_not_there(tmp_path, refused):
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = archive(tmp_path / "model.pt", table(SMALL), **{"data/0": b"\1" * 64})
    assert "two members of one name" in refused("import", path, "-o", tmp_path / "out")
    path = archive(tmp_path / "model.pt", table(text("w") + tensor((4,), (1,), key="9")))
    assert "lacks the bytes of a tensor" in refused("import", path, "-o", tmp_path / "out")


# -- what the system refuses ----------------------------------------------------------------------------------


def unreadable(path: Path, kind: str) -> None:
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path.name)


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "loop"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "rank_0.pt", ".metadata", "latest"])
def test_what_is_no_plain_file_is_refused_at_once(tmp_path, refused, name, kind):
    where = tmp_path / "in"
    where.mkdir()
    save_file({"a": np.zeros(2)}, where / ("other.safetensors" if name.endswith(("json", "safetensors")) else "other"))
    unreadable(where / name, kind)
    said = refused("import", where, "-o", tmp_path / "out")
    assert any(words in said for words in ("cannot read", "cannot import", "has no checkpoint of"))
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path, refused):
    path = archive(tmp_path / "model.pt", table(SMALL))
    path.chmod(0)
    assert "Permission denied" in refused("import", path, "-o", tmp_path / "out")


def test_where_nothing_can_be_written(tmp_path, refused):
    path = archive(tmp_path / "model.pt", table(SMALL))
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refused("import", path, "-o", tmp_path / "file/out")
    assert "File name too long" in refused("import", path, "-o", tmp_path / ("x" * 300))
    assert "greater than or equal to 0" in refused("import", path, "-o", tmp_path / "out", "--step", "-1")
    make(tmp_path / "checkpoint_dir")
    assert "cannot write" in refused("export", tmp_path / "checkpoint_dir", "-o", tmp_path / "file/out", "--format", "torch")
    assert "is neither a checkpoint" in refused("show", tmp_path / "file")
    assert "File name too long" in refused("show", tmp_path / ("x" * 300))


# -- safetensors --------------------------------------------------------------------------------------------

ONE = '"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
TWO = '"b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}'
HEADERS = {
    "a key twice": (f"{{{ONE}, {TWO}, {ONE}}}", "has a key twice"),
    "an overlap": (f"{{{ONE}, {TWO.replace('[8, 16]', '[4, 12]')}}}", "overlap, or have gaps"),
    "a gap": (f"{{{TWO}}}", "overlap, or have gaps"),
    "too short": (f"{{{ONE}}}", "its header describes"),
    "a huge shape": (f"{{{ONE.replace('[2]', '[' + '1, ' * 10**5 + '2]')}, {TWO}}}", "has a malformed entry 'a'"),
    "a huge integer": (f"{{{ONE.replace('[2]', '[' + '9' * 10**5 + ']')}, {TWO}}}", "is not JSON"),
    "a shape that is none": (f"{{{ONE.replace('[2]', '2')}, {TWO}}}", "has a malformed entry 'a'"),
    "true": (f"{{{ONE.replace('[2]', '[2, true]')}, {TWO}}}", "has a malformed entry 'a'"),
    "an offset below zero": (f"{{{ONE.replace('[0, 8]', '[-8, 0]')}, {TWO}}}", "has a malformed entry 'a'"),
    "deep": ("[" * 10**6, "is not JSON"),
    "a list": ("[]", "is not a table"),
    "a name": (f"{{{ONE}, {TWO.replace('b', 'b' * 10**5)}}}", "has a malformed entry 'bbb"),
    "half a surrogate": (f"{{{ONE}, {TWO.replace('b', chr(92) + 'ud800')}}}", "has a malformed entry '\\ud800'"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_safetensors_header_that_lies(tmp_path, refused, kind):
    header, sentence = HEADERS[kind]
    where = tmp_path / "in"
    where.mkdir()
    file = where / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(16))
    said = refused("import", where, "-o", tmp_path / "out")
    assert said.startswith(f"error: {file}")
    assert sentence in said
    if kind not in ("a name", "a key twice"):  # these the safetensors library accepts
        with pytest.raises((SafetensorError, ValueError)):
            load_file(file)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ("[" * 10**5, "nested deeper"),
        ("[]", "no weight_map"),
        ('{"weight_map": {"a": 5, "b": "x"}}', "no weight_map"),
        ('{"weight_map": {"a": "\\u001b[2J"}}', r"lacks \x1b[2J"),
        ('{"x": ' + "9" * 5000 + "}", "is not JSON"),
    ],
)
def test_an_index_of_shards_that_lies(tmp_path, refused, index, sentence):
    where = tmp_path / "in"
    where.mkdir()
    save_file({"a": np.zeros(2)}, where / "model.safetensors")
    (where / "model.safetensors.index.json").write_text(index)
    assert sentence in refused("import", where, "-o", tmp_path / "out")


def test_a_tensor_in_two_files_needs_an_index_that_names_one(tmp_path, refused):
    """Without an index it is unknown which of the two counts."""
    where = tmp_path / "in"
    where.mkdir()
    for value, file in enumerate(("first.safetensors", "second.safetensors")):
        save_file({"a": np.full(2, value, np.float32), file: np.zeros(1)}, where / file)
    said = refused("import", where, "-o", tmp_path / "out")
    first = where / "first.safetensors"
    assert said == f"error: {first} and second.safetensors both hold a; remove the file that is not the model's"
    assert not (tmp_path / "out").exists()
    index = {"weight_map": {"a": "first.safetensors", "second.safetensors": "second.safetensors"}}
    (where / "model.safetensors.index.json").write_text(json.dumps(index))
    place = import_weights(str(where), Local(tmp_path / "out"))
    assert open_checkpoint(str(place)).tensor("model.a").tolist() == [0.0, 0.0]


# -- manifests ----------------------------------------------------------------------------------------------


def forged(place: Local, change: Callable[[dict], object]) -> None:
    tree = tree_of(place)
    change(tree)
    (place.path / MANIFEST).write_bytes(sealed(tree))


def claims(tree: dict, many: int) -> None:
    file = next(iter(tree["files"]))
    tree["files"][file]["bytes"] = 4 * many + 4096
    chunk = {"file": file, "offset": 4096, "start": [0], "shape": [many]}
    tree["tensors"]["model.a"] = {"shape": [many], "dtype": "F32", "chunks": [chunk]}


def aliases(tree: dict) -> None:
    """A tensor of 4 MB in 4 bytes of a file."""
    chunk = tree["tensors"]["model.a"]["chunks"][0]
    many = [chunk | {"start": [i], "shape": [1]} for i in range(1000)]
    tree["tensors"]["model.a"] = {"shape": [1000], "dtype": "F32", "chunks": many}


FORGED = {
    "a date of 400 digits": (lambda t: t.update(created=10**400), "its date is not valid"),
    "no date": (lambda t: t.update(created=float("nan")), "its date is not valid"),
    "a date before 1970": (lambda t: t.update(created=-1), "its date is not valid"),
    "a date that is text": (lambda t: t.update(created="1"), "its date is not valid"),
    "a metric of 400 digits": (lambda t: t.update(metrics={"x": 10**400}), "its metrics are not numbers"),
    "a metric that is text": (lambda t: t.update(metrics={"x": "y"}), "its metrics are not numbers"),
    "a metric that is a list": (lambda t: t.update(metrics={"x\n": 1.0}), "its metrics are not numbers"),
    "NaN inside": (lambda t: t.update(recipe={"x": [float("nan")]}), "malformed"),
    "a name that moves the cursor": (
        lambda t: t["tensors"].update({"\x1b[2J": t["tensors"]["model.a"]}),
        r"'\x1b[2J' is not a valid name",
    ),
    "bytes of two tensors": (lambda t: t["tensors"].update({"model.z": t["tensors"]["model.a"]}), "share bytes of a file"),
    "bytes of many chunks": (aliases, "share bytes of a file"),
    "a checksum that is none": (lambda t: next(iter(t["files"].values())).update(xxh3_128="none"), "has no checksum"),
    "a step of 400 digits": (lambda t: t.update(step=10**400), "its step is not a count"),
    "a version of 400 digits": (lambda t: t.update(version=10**400), "this fullshard reads up to"),
    "4 GiB that are not there": (lambda t: claims(t, 1 << 30), "bytes instead of 4294971392"),
    "4 EiB that are not there": (lambda t: claims(t, 1 << 59), "bytes instead of"),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_manifest_gets_a_sentence_from_each_command(tmp_path, refused, kind):
    change, sentence = FORGED[kind]
    place, other = make(tmp_path / "a"), make(tmp_path / "b")
    forged(place, change)
    out = tmp_path / "out/deeper"
    for line in (["show", place], ["diff", other, place], ["export", place, "-o", out], ["average", other, place, "-o", out]):
        assert sentence in refused(*line)
    assert sentence in refused("verify", place, code=1)
    assert not out.parent.exists()


def test_show_reads_a_file_of_another_size_for_nobody(tmp_path, refused):
    place = make(tmp_path)
    file = next(p for p in sorted(place.path.iterdir()) if p.suffix == ".safetensors")
    file.write_bytes(file.read_bytes() + b"x")
    assert f"{file} has {file.stat().st_size} bytes instead of {file.stat().st_size - 1}" in refused(
        "show", place, "--tensors", "*"
    )
    file.unlink()
    assert f"lacks {file.name}" in refused("show", place, "--tensors", "*")


def test_a_recipe_in_a_manifest_that_makes_no_sense(tmp_path, refused):
    shapes = {"a.base_layer.weight": (6, 4), "a.lora_A.default.weight": (2, 4), "a.lora_B.default.weight": (6, 2)}
    found = {f"model.{n}": np.ones(s, "<f4") for n, s in shapes.items()}
    out = tmp_path / "out"
    for i, lora in enumerate([{"rank": 0, "alpha": 1, "dropout": 0, "targets": []}, {"rank": 2}, [1], 5, {"rank": "x"}]):
        place = make(tmp_path / str(i), found=found, recipe={"model": [], "lora": lora})
        for form in ("torch", "peft"):
            assert "does not say how its adapters are scaled" in refused("export", place, "-o", out, "--format", form)
    found["model.a.lora_B.default.weight"] = np.ones((5, 2), "<f4")
    lora = {"rank": 2, "alpha": 1, "dropout": 0, "targets": ["a"]}
    place = make(tmp_path / "fit", found=found, recipe={"lora": lora})
    assert "the adapter of a.base_layer.weight does not fit it" in refused("export", place, "-o", out, "--format", "torch")
    assert not out.exists()


@pytest.mark.parametrize("config", ["", "[]", "[" * 10**5, '{"x": ' + "9" * 5000 + "}"])
def test_a_config_that_is_none(tmp_path, refused, config):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(config)
    place = make(tmp_path / "checkpoint_dir")
    said = refused("export", place, "-o", tmp_path / "out/x", "--config", tmp_path / "hf", "--dtype", "bf16")
    assert said.startswith(f"error: {tmp_path / 'hf/config.json'} is")
    assert not (tmp_path / "out").exists()


def test_two_tensors_that_would_share_a_name_are_not_exported(tmp_path, refused):
    found = {"model.a.base_layer.weight": np.ones((2, 2), "<f4"), "model.a.weight": np.zeros((2, 2), "<f4")}
    assert "two of one name" in refused("export", make(tmp_path / "a", found=found), "-o", tmp_path / "out")
    place = make(tmp_path / "b", found={"model.__metadata__": np.ones(2, "<f4")})
    assert "'__metadata__'" in refused("export", place, "-o", tmp_path / "out", "--config", config_in(tmp_path))
    assert not (tmp_path / "out").exists()


def config_in(directory: Path) -> Path:
    (directory / "hf").mkdir()
    (directory / "hf/config.json").write_text(json.dumps({"model_type": "x"}))
    return directory / "hf"
