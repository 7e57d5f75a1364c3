"""Fuzz targets for checkpoint files: manifests, safetensors headers, pickles of `.pt`, DCP and DeepSpeed."""

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from random import Random

import numpy as np
import typer

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.manifest import MANIFEST, Manifest, checksum
from fullshard.checkpoint.other_formats.import_weights import import_weights
from fullshard.checkpoint.safetensors import SafetensorsDirectory
from fullshard.checkpoint.writer import TensorSource, write_checkpoint
from fullshard.commands import checkpoint as commands
from tests.fuzz import hostile, torch_files
from tests.fuzz.harness import Target

MiB = 1 << 20
Call = Callable[[], object]

# -- manifests and checkpoints ------------------------------------------------------------------------------


@cache
def seed() -> dict[str, bytes]:
    """The files of a small checkpoint with an adapter."""
    draw = np.random.default_rng(0)
    shapes = {"base_model.model.a.base_layer.weight": (6, 4), "base_model.model.a.lora_A.default.weight": (2, 4)}
    shapes |= {"base_model.model.a.lora_B.default.weight": (6, 2), "b": (5,), "s": ()}
    sources = [TensorSource(f"model.{n}", "F32", s, draw.normal(size=s).astype("<f4").tobytes) for n, s in shapes.items()]
    recipe = {"model": {"name": "llama-nano"}, "lora": {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": ["a"]}}
    with tempfile.TemporaryDirectory() as directory:
        about = {"recipe": recipe, "plan": {"mesh": {}}, "cursor": 8, "metrics": {"loss": 0.5}, "state": {"extra": {}}}
        place = write_checkpoint(Local(Path(directory)), sources, step=3, limit=150, **about)
        return {p.name: p.read_bytes() for p in place.path.iterdir()}


def sealed(text: str) -> bytes:
    """A manifest of any content, with a valid checksum."""
    body = text[1:].encode("utf-8", "surrogatepass")
    return f'{{"checksum": "{checksum(body)}",\n'.encode() + body


def hostile_manifest(random: Random) -> bytes:
    data = seed()[MANIFEST]
    if random.random() < 0.15:
        return hostile.flipped(random, data, random.randrange(1, 4))
    tree = {k: v for k, v in json.loads(data).items() if k != "checksum"}
    if random.random() < 0.2:
        _inflate(random, tree)
    text = hostile.text(hostile.mutated(random, tree, random.randrange(1, 4)))
    if random.random() < 0.1:
        return sealed(hostile.flipped(random, text.encode(), 2).decode("latin-1"))
    return sealed(text)


def _inflate(random: Random, tree: dict) -> None:
    """Claim sizes that no file has."""
    many = 1 << random.choice([20, 28, 30, 40, 60])
    file, name = random.choice(list(tree["files"])), random.choice(list(tree["tensors"]))
    tree["files"][file]["bytes"] = 4 * many + 4096
    chunk = {"file": file, "offset": 64, "start": [0], "shape": [many]}
    tree["tensors"][name] = {"shape": [many], "dtype": "F32", "chunks": [chunk]}
    if random.random() < 0.3:  # many chunks, all in the same bytes
        count = random.choice([2, 300])
        chunks = [{"file": file, "offset": 64, "start": [i], "shape": [1]} for i in range(count)]
        tree["tensors"][name] = {"shape": [count], "dtype": "F32", "chunks": chunks}


def read_manifest(data: bytes) -> None:
    found = Manifest.from_bytes(data, "manifest.json")
    datetime.fromtimestamp(found.created, UTC)
    "  ".join(f"{k} {v:.4f}" for k, v in found.metrics.items()).encode()
    assert Manifest.from_bytes(found.to_bytes(), "again") == found


def hostile_checkpoint(random: Random, directory: Path) -> tuple[Call, Path]:
    """A checkpoint with one damaged part, and a command that reads it."""
    one, two = directory / "one/step-00000003", directory / "two/step-00000003"
    for place in (one, two):
        place.mkdir(parents=True)
        for name, data in seed().items():
            (place / name).write_bytes(data)
    _damage(random, one)
    config = directory / "config"
    config.mkdir()
    (config / "config.json").write_text(random.choice(["{}", "[]", "", "[" * 5000, '{"dtype": 5}', '{"a": ' + "9" * 5000 + "}"]))
    first, second, out = str(one), str(two), directory / "out/deeper"
    calls: list[Call] = [
        *[partial(commands.verify, first), partial(commands.verify, str(one.parent), every=True)],
        *[partial(commands.show, first), partial(commands.show, first, as_json=True)],
        *[partial(commands.diff, first, second), partial(commands.diff, second, first, as_json=True)],
        *[partial(commands.export, first, out, form) for form in commands.Format],
        partial(commands.export, first, out, commands.Format.hf, config, "bf16"),
        partial(commands.average, [first, second], out),
    ]
    return random.choice(calls), out


def _damage(random: Random, place: Path) -> None:
    file = random.choice(sorted(place.iterdir()))
    match random.randrange(8):
        case 0:
            file.write_bytes(hostile.flipped(random, file.read_bytes(), 2))
        case 1:
            file.unlink()
            random.choice([file.mkdir, lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero"), lambda: None])()
        case 2:
            os.truncate(file, random.choice([0, 7, 8, 100, 1 << 33]))  # the last is a hole
        case 3:
            (place / "extra\n\x1b[2J").write_bytes(b"x")
        case _:
            (place / MANIFEST).write_bytes(hostile_manifest(random))


def command(made: tuple[Call, Path]) -> None:
    """Run a command with its output to a terminal-like stream. If it refuses, it must leave nothing behind."""
    call, out = made
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with redirect_stdout(terminal), redirect_stderr(terminal):
            call()
    except typer.Exit as done:
        if done.exit_code != 1:
            raise RuntimeError(f"exit code {done.exit_code}") from None
    except FullshardError:
        assert not out.parent.exists(), "a refused command left a directory"
        raise


# -- foreign weights ----------------------------------------------------------------------------------------


def hostile_safetensors(random: Random, directory: Path) -> Path:
    """A safetensors file, sometimes with an index."""
    names = ["a", "b", "c.d"]
    header = {n: {"dtype": "F32", "shape": [4, 2], "data_offsets": [32 * i, 32 * i + 32]} for i, n in enumerate(names)}
    text = _hostile_header(random, header)
    length = random.choice([len(text)] * 8 + [len(text) + 1, 2**20, 99_999_999, 2**63])
    data = length.to_bytes(8, "little") + text + bytes(96)
    if random.random() < 0.2:
        data = hostile.flipped(random, data, 2)
    (directory / "model-1.safetensors").write_bytes(data)
    if random.random() < 0.3:
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}
        text = hostile.text(hostile.mutated(random, index, 2))
        (directory / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    if random.random() < 0.05:
        other = directory / random.choice(["x.safetensors", "model.safetensors.index.json"])
        other.unlink(missing_ok=True)
        random.choice([other.mkdir, lambda: os.mkfifo(other), lambda: other.symlink_to("/dev/zero")])()
    return directory


def _hostile_header(random: Random, header: dict) -> bytes:
    if random.random() < 0.1:  # a key twice
        twice = json.dumps({"a": {"dtype": "I32", "shape": [8], "data_offsets": [0, 32]}})
        return (json.dumps(header)[:-1] + ", " + twice[1:]).encode()
    if random.random() < 0.1:
        header["a"] |= {"shape": [2**31, 2**31, *[1] * random.choice([0, 60])], "data_offsets": [0, 2**64]}
    return hostile.text(hostile.mutated(random, header, random.randrange(1, 3))).encode("utf-8", "surrogatepass")


def read_safetensors(directory: Path) -> None:
    files = SafetensorsDirectory(directory)
    for name, entry in files.entries.items():
        files.read(name, [(0, n) for n in entry.shape], memoryview(bytearray(entry.nbytes)))
    imported(directory)


def imported(where: Path) -> None:
    """Import the weights. If that is refused, it must leave no directory behind."""
    out = (where if where.is_dir() else where.parent) / "out/deeper"
    try:
        import_weights(str(where), Local(out))
    except FullshardError:
        assert not out.parent.exists(), "a refused import left a directory"
        raise


def hostile_pt(random: Random, directory: Path) -> Path:
    """One file, or one for each of two ranks."""
    members = random.choice(torch_files.state_dicts())
    data = torch_files.hostile_archive(random, members)
    if random.random() < 0.1:
        (directory / "rank_0.pt").write_bytes(torch_files.packed(list(members.items())))
        (directory / "rank_1.pt").write_bytes(data)
        return directory
    (directory / "model.pt").write_bytes(data)
    return random.choice([directory, directory / "model.pt"])


def hostile_dcp(random: Random, directory: Path) -> Path:
    metadata, data = torch_files.dcp()
    if random.random() < 0.75:
        metadata = torch_files.hostile_pickle(random, metadata)
    else:
        data = hostile.flipped(random, data, random.randrange(1, 4))
    (directory / ".metadata").write_bytes(metadata)
    (directory / "__0_0.distcp").write_bytes(data)
    if random.random() < 0.03:
        path = directory / random.choice([".metadata", "__0_0.distcp"])
        path.unlink()
        random.choice([path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), lambda: None])()
    return directory


def hostile_deepspeed(random: Random, directory: Path) -> Path:
    archives = torch_files.deepspeed(random.choice([2, 3]))
    inner, struck = directory / "global_step1", random.choice(sorted(archives))
    inner.mkdir()
    for name, members in archives.items():
        pick = torch_files.hostile_archive(random, members) if name == struck else torch_files.packed(list(members.items()))
        (inner / name).write_bytes(pick)
    latest: Callable[[Path], object] = random.choice(
        [
            *[lambda p: p.write_text("global_step1")] * 8,
            Path.mkdir,
            os.mkfifo,
            lambda p: p.write_text("x" * 10**6),
            lambda p: p.write_bytes(b"\xff\xfe"),
            lambda p: p.write_text("../x"),
        ]
    )
    latest(directory / "latest")
    if random.random() < 0.05:
        shutil.move(inner / struck, inner / "other.pt")
    return directory


# Bounds are 1.5 times what the largest valid case needs.
TARGETS: list[Target] = [
    Target("manifest", lambda random, _: hostile_manifest(random), read_manifest, 16 * MiB),
    Target("checkpoint", hostile_checkpoint, command, 48 * MiB),
    Target("safetensors", hostile_safetensors, read_safetensors, 16 * MiB),
    Target("pt", hostile_pt, imported, 24 * MiB),
    Target("dcp", hostile_dcp, imported, 24 * MiB),
    Target("deepspeed", hostile_deepspeed, imported, 24 * MiB),
]
