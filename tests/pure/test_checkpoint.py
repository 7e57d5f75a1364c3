"""The checkpoint format: damage is found, crafted manifests are refused, unfinished checkpoints are invisible."""

import contextlib
import dataclasses
import json
import os
import random
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from fullshard.base.errors import FullshardError
from fullshard.checkpoint import commit, file_writer
from fullshard.checkpoint.average import average, cast_to_bf16
from fullshard.checkpoint.compare import differences, statistics
from fullshard.checkpoint.directories import Local, open_place
from fullshard.checkpoint.manifest import MANIFEST, Chunk, FileRecord, Manifest, ManifestError, TensorRecord, checksum
from fullshard.checkpoint.reader import Checkpoint, open_checkpoint, refuse_mismatch
from fullshard.checkpoint.retention import CheckpointSummary, Retention, to_remove
from fullshard.checkpoint.verify import problems
from tests.pure.checkpoints import arrays, make

FILE = FileRecord(8, "0" * 32)


@pytest.fixture
def place(tmp_path) -> Local:
    return make(tmp_path, cursor=12, state={"extra": {"x": 1}})


def test_a_checkpoint_reads_back_and_any_safetensors_reader_opens_its_files(place):
    found = Checkpoint(place)
    assert (found.manifest.step, found.manifest.cursor, found.manifest.state) == (3, 12, {"extra": {"x": 1}})
    seen = {}
    for file in place.path.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            seen |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for name, array in arrays().items():
        np.testing.assert_array_equal(found.tensor(name), array)
        np.testing.assert_array_equal(seen[name], array)
    assert problems(place) == []
    assert json.loads((place.path / MANIFEST).read_text())["format"] == "fullshard-checkpoint"


# -- damage -------------------------------------------------------------------------------------------------


def test_every_flipped_byte_of_every_file_is_found(place):
    """Every byte of every file: the checkpoint is small."""
    for file in sorted(place.path.iterdir()):
        whole = file.read_bytes()
        for offset in range(len(whole)):
            file.write_bytes(whole[:offset] + bytes([whole[offset] ^ (1 << offset % 8)]) + whole[offset + 1 :])
            assert problems(place), f"{file.name} at {offset}"
        file.write_bytes(whole)
    assert problems(place) == []


def damage(place: Local, kind: str) -> None:
    files = sorted(place.path.glob("*.safetensors"))
    match kind:
        case "cut":
            files[0].write_bytes(files[0].read_bytes()[:-1])
        case "longer":
            files[0].write_bytes(files[0].read_bytes() + b"\0")
        case "missing":
            files[1].unlink()
        case "extra":
            (place.path / "shard-9.safetensors").write_bytes(b"")
        case "extra directory":
            (place.path / "more").mkdir()
        case "swapped":
            one, two = files[0].read_bytes(), files[1].read_bytes()
            files[0].write_bytes(two)
            files[1].write_bytes(one)
        case "no manifest":
            (place.path / MANIFEST).unlink()
        case "empty manifest":
            (place.path / MANIFEST).write_bytes(b"")
        case "link":
            target = place.path.parent / "elsewhere"
            files[0].rename(target)
            files[0].symlink_to(target)


DAMAGES = ["cut", "longer", "missing", "extra", "extra directory", "swapped", "no manifest", "empty manifest", "link"]


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_to_whole_files_is_found(place, kind):
    damage(place, kind)
    assert problems(place)


# -- crafted ------------------------------------------------------------------------------------------------


def sealed(tree: dict) -> bytes:
    """A manifest of any contents, with a valid checksum."""
    body = json.dumps(tree)[1:].encode()
    return f'{{"checksum": "{checksum(body)}",\n'.encode() + body


def tree_of(place: Local) -> dict:
    tree = json.loads((place.path / MANIFEST).read_text())
    del tree["checksum"]
    return tree


def crafted(tree: dict, kind: str) -> dict:
    name, file = next(iter(tree["tensors"])), next(iter(tree["files"]))
    tensor, chunk = tree["tensors"][name], tree["tensors"][name]["chunks"][0]
    match kind:
        case "escape":
            tree["files"]["../../secret"] = tree["files"].pop(file)
            chunk["file"] = "../../secret"
        case "absolute":
            tree["files"]["/etc/passwd"] = tree["files"].pop(file)
        case "dot":
            tree["files"][".hidden"] = tree["files"].pop(file)
        case "manifest":
            tree["files"][MANIFEST] = tree["files"].pop(file)
        case "huge":
            tensor["shape"] = [1 << 50, 3]
        case "negative":
            chunk["offset"] = -8
        case "outside":
            chunk["offset"] = tree["files"][chunk["file"]]["bytes"]
        case "overlap":
            tensor["shape"] = [10, *tensor["shape"][1:]]
            tensor["chunks"] = [chunk, chunk]
        case "hole":
            tensor["chunks"] = []
        case "unlisted":
            chunk["file"] = "other.safetensors"
        case "dtype":
            tensor["dtype"] = "O8"
        case "float":
            tensor["shape"] = [5.0, 3.0]
        case "newer":
            tree["version"] = 99
        case "deep":
            tree["state"] = {"x": 1}
            for _ in range(50):
                tree["state"] = {"x": tree["state"]}
        case "null":
            tree["tensors"] = None
        case "extra":
            tree["state"]["extra"] = 5
    return tree


CRAFTED = {
    "escape": "is not a valid name for a file of a checkpoint",
    "absolute": "is not a valid name for a file of a checkpoint",
    "dot": "is not a valid name for a file of a checkpoint",
    "manifest": "is not a valid name for a file of a checkpoint",
    "huge": "do not add up to it",
    "negative": "is outside",
    "outside": "is outside",
    "overlap": "overlap",
    "hole": "do not add up to it",
    "unlisted": "which is not listed",
    "dtype": "has the unknown dtype",
    "float": "has an invalid shape",
    "newer": "this fullshard reads up to",
    "null": "malformed",
    "extra": "its extra is not a table",
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_crafted_manifest_does_nothing_but_fail_with_a_sentence(place, kind):
    (place.path / MANIFEST).write_bytes(sealed(crafted(tree_of(place), kind)))
    with pytest.raises(ManifestError) as caught:
        Checkpoint(place)
    assert CRAFTED[kind] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sealed_manifest_that_changes_two_names_disagrees_with_the_files(tmp_path):
    place = make(tmp_path, found={"model.a": np.zeros((2, 2), "<f4"), "model.b": np.ones((2, 2), "<f4")})
    tree = tree_of(place)
    tree["tensors"] = dict(zip(tree["tensors"], reversed(tree["tensors"].values()), strict=True))
    (place.path / MANIFEST).write_bytes(sealed(tree))
    assert "its header and the manifest disagree" in problems(place)[0]


@given(st.data())
def test_no_manifest_whatever_raises_anything_else(data):
    """Random values in random fields of a manifest with a valid checksum."""
    record = TensorRecord((2,), "F32", (Chunk("f", 0, (0,), (2,)),))
    tree = json.loads(Manifest(1, {"a": record}, {"f": FILE}).to_bytes())
    del tree["checksum"]
    node, junk = tree, st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)
    for _ in range(data.draw(st.integers(0, 4))):
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key]:
            break
        node = node[key]
    node[data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))] = data.draw(junk)
    with contextlib.suppress(ManifestError):
        Manifest.from_bytes(sealed(tree), "here")


# -- reading parts ------------------------------------------------------------------------------------------


@given(st.data())
def test_any_box_of_a_tensor_in_any_chunks_is_numpys_own_slice(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("box")
    shape = data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    whole = np.arange(int(np.prod(shape)), dtype="<f4").reshape(shape)
    cuts = [sorted(data.draw(st.sets(st.integers(1, n), max_size=2)) | {0, n}) for n in shape]
    boxes = [[]]
    for points in cuts:
        boxes = [[*box, span] for box in boxes for span in pairwise(points)]
    chunks, at = [], 0
    with (directory / "f").open("wb") as file:
        for box in boxes:
            part = np.array(whole[tuple(slice(*s) for s in box)], order="C")
            chunks.append(Chunk("f", at, tuple(a for a, _ in box), part.shape))
            at += file.write(part.tobytes())
    record = TensorRecord(tuple(shape), "F32", tuple(chunks))
    manifest = Manifest(1, {"t": record}, {"f": dataclasses.replace(FILE, nbytes=at)})
    assert Manifest.from_bytes(manifest.to_bytes(), "x").tensors["t"] == record
    box = [sorted(data.draw(st.sets(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
    want = whole[tuple(slice(*s) for s in box)]
    into = bytearray(want.nbytes)
    Checkpoint(Local(directory), manifest).read("t", [tuple(s) for s in box], memoryview(into))
    np.testing.assert_array_equal(np.frombuffer(into, "<f4").reshape(want.shape), want)


def test_strict_keys_list_what_differs(place):
    found = Checkpoint(place).manifest.tensors
    wanted = {n: (t.shape, t.dtype) for n, t in found.items()}
    refuse_mismatch("here", found, wanted)
    with pytest.raises(FullshardError, match=r"it lacks model\.c; it has model\.a besides"):
        refuse_mismatch("here", found, {("model.c" if n == "model.a" else n): k for n, k in wanted.items()})
    with pytest.raises(FullshardError, match=r"model\.a \(F32 \[5, 3\] instead of F16 \[5, 3\]\)"):
        refuse_mismatch("here", found, wanted | {"model.a": ((5, 3), "F16")})
    refuse_mismatch("here", found, wanted | {"model.new.x": ((1,), "F32")}, ["model.new.*"])
    with pytest.raises(FullshardError, match="matches no tensor"):
        refuse_mismatch("here", found, wanted, ["model.new.*"])


# -- commit, garbage ----------------------------------------------------------------------------------------


def test_a_partial_checkpoint_is_invisible_and_swept_unless_somebody_writes_it(tmp_path):
    checkpoint_dir = Local(tmp_path)
    make(tmp_path, 1)
    made = commit.pending_checkpoint(checkpoint_dir, 2, commit.new_nonce())
    with commit.begin(made):
        made.partial.write("shard.safetensors", b"half")
        assert commit.committed(checkpoint_dir) == ["step-00000001"]
        assert commit.sweep(checkpoint_dir) == []  # this process has locked it
        assert commit.garbage(checkpoint_dir)[1] == [made.partial.path.name]
    (tmp_path / "step-00000009").mkdir()  # a prefix without a manifest
    assert len(commit.sweep(checkpoint_dir)) == 2
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_replacing_a_checkpoint_leaves_one_whole_and_nothing_else(tmp_path):
    make(tmp_path, 1, seed=0)
    other = make(tmp_path / "other", 1, seed=1)
    made = commit.pending_checkpoint(Local(tmp_path), 1, "ab")
    shutil.copytree(other.path, made.partial.path)
    commit.commit(made, commit.read_manifest(other).to_bytes())
    assert sorted(os.listdir(tmp_path)) == ["other", "step-00000001"]
    np.testing.assert_array_equal(open_checkpoint(tmp_path).tensor("model.a"), arrays(1)["model.a"])


def test_find_takes_a_checkpoint_a_directory_or_a_run(tmp_path):
    make(tmp_path / "checkpoints", 5)
    newest = make(tmp_path / "checkpoints", 40)
    for where in (tmp_path, tmp_path / "checkpoints", newest.path, f"file://{newest.path}"):
        assert str(commit.find(where)) == str(newest)
    with pytest.raises(FullshardError, match="is neither a checkpoint"):
        commit.find(tmp_path / "nowhere")


def test_memory_of_fsspec_is_a_place_like_any(tmp_path):
    checkpoint_dir = open_place("memory://checkpoint_dir")
    source = make(tmp_path)
    target = checkpoint_dir.child("step-00000003")
    for name in source.files():
        target.write(name, source.read_whole(name, 1 << 20))
    assert commit.committed(checkpoint_dir) == ["step-00000003"]
    assert problems(target) == []
    np.testing.assert_array_equal(Checkpoint(target).tensor("model.a"), arrays()["model.a"])
    commit.remove(checkpoint_dir, "step-00000003")
    assert commit.committed(checkpoint_dir) == []
    with pytest.raises(FullshardError, match="cannot open gopher://x"):
        open_place("gopher://x")


# -- retention ----------------------------------------------------------------------------------------------

HISTORY = [CheckpointSummary(step, step * 360.0, {"eval_loss": abs(step - 50)}) for step in range(10, 101, 10)]


@pytest.mark.parametrize(
    ("rules", "stay"),
    [
        (Retention(), range(10, 101, 10)),
        (Retention(last=2), [90, 100]),
        (Retention(last=1, every=40), [40, 80, 100]),
        (Retention(last=1, best=2, metric="eval_loss"), [40, 50, 100]),
        (Retention(last=1, best=1, metric="eval_loss", highest=True), [100]),
        (Retention(last=1, hours=4), [10, 50, 90, 100]),
    ],
)
def test_retention(rules, stay):
    gone = {commit.step_of(n) for n in to_remove(HISTORY, rules)}
    assert [c.step for c in HISTORY if c.step not in gone] == list(stay)


# -- looking in ---------------------------------------------------------------------------------------------


def test_differences_and_statistics(tmp_path):
    changed = arrays() | {"model.new": np.zeros(2, "<f4")}
    changed["model.a"] = changed["model.a"].copy()
    changed["model.a"][0, 0] += 0.5
    changed["model.a"][1, 1] = np.nan
    a, b = Checkpoint(make(tmp_path / "a")), Checkpoint(make(tmp_path / "b", found=changed))
    found = {d.name: d for d in differences(a, b)}
    assert set(found) == {"model.a", "model.new"}
    assert found["model.new"].kind == "only second"
    assert (found["model.a"].kind, found["model.a"].changed) == ("values", 2)
    assert found["model.a"].largest == pytest.approx(0.5)
    assert list(differences(a, a)) == []
    values = statistics(b, "model.a")
    rest = changed["model.a"][~np.isnan(changed["model.a"])].astype(np.float64)
    assert (values.nans, values.infinities) == (1, 0)
    assert (values.mean, values.std, values.high) == pytest.approx((rest.mean(), rest.std(), rest.max()))


def test_an_average_is_the_mean_and_refuses_strangers(tmp_path):
    places = [make(tmp_path / str(i), step=i, found={"model.a": arrays(i)["model.a"]}) for i in range(3)]
    average([str(p) for p in places], Local(tmp_path / "out"))
    made = open_checkpoint(tmp_path / "out")
    want = np.mean([arrays(i)["model.a"].astype(np.float64) for i in range(3)], axis=0).astype(np.float32)
    np.testing.assert_array_equal(made.tensor("model.a"), want)
    assert problems(made.place) == []
    other = make(tmp_path / "x", found={"model.z": arrays()["model.a"]})
    with pytest.raises(FullshardError, match="another model"):
        average([str(places[0]), str(other)], Local(tmp_path / "out2"))
    assert not (tmp_path / "out2").exists()


def test_bf16_rounds_as_torch_does():
    import torch

    values = np.random.default_rng(0).normal(size=1000).astype(np.float32) * np.float32(1e3)
    values[:3] = [np.inf, -np.inf, np.nan]
    want = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(np.frombuffer(cast_to_bf16(values), "<i2")[:2], want[:2])
    np.testing.assert_array_equal(np.frombuffer(cast_to_bf16(values), "<i2")[3:], want[3:])


def test_files_of_others_are_not_touched(tmp_path):
    """A directory of checkpoints may hold other things."""
    save_file({"a": np.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "step-abc").mkdir()
    (tmp_path / "notes").mkdir()
    make(tmp_path, 1)
    assert commit.sweep(Local(tmp_path)) == []
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("length", [0, 1, 4096, 65536 * 3, 65536 * 9 + 5])
def test_a_file_made_piece_by_piece_is_the_file(tmp_path, monkeypatch, length):
    monkeypatch.setattr(file_writer, "PIECE", 65536)  # so that buffers are reused
    monkeypatch.setattr("fullshard.checkpoint.directories.PUT", 65536)
    whole = random.Random(length).randbytes(length)
    for place in (Local(tmp_path), open_place("memory://made")):
        asked: list[tuple[int, int]] = []

        def fill(at: int, memory: memoryview, asked=asked) -> None:
            asked.append((at, len(memory)))
            memory[:] = whole[at : at + len(memory)]

        place.write_made("file", length, fill)
        assert place.read_whole("file", length) == whole
        assert asked == [(at, min(65536, length - at)) for at in range(0, length, 65536)]  # in order, each byte once


def test_a_file_that_cannot_be_made_raises_and_leaves_no_write_under_way(tmp_path, monkeypatch):
    monkeypatch.setattr(file_writer, "PIECE", 4096)
    with pytest.raises(OSError, match="No space left"):
        file_writer.write_made(Path("/dev/full"), 65536, lambda at, memory: None)
    with pytest.raises(ZeroDivisionError):
        file_writer.write_made(tmp_path / "file", 65536, lambda at, memory: 1 // (8192 - at))
