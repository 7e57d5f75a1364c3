"""Damage to other programs' checkpoints is found in every format, and wrong DCP metadata is refused."""

import pickle
import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.other_formats.import_weights import import_weights
from fullshard.checkpoint.reader import open_checkpoint
from tests.cpu.test_convert import deepspeed
from tests.fuzz import torch_files

PARAMS = {"a.weight": torch.arange(24.0).view(6, 4), "b": torch.arange(100.0, 107.0)}


def saved(directory: Path, kind: str) -> tuple[Path, Path, bytes]:
    """A checkpoint in this format, a file of it that holds a tensor, and the tensor's bytes."""
    data = PARAMS["b"].numpy().tobytes()
    match kind:
        case "pt":
            torch.save(PARAMS, directory / "model.pt")
            return directory / "model.pt", directory / "model.pt", data
        case "dcp":
            dcp.save({n: t.clone() for n, t in PARAMS.items()}, checkpoint_id=directory / "dcp", no_dist=True)
            return directory / "dcp", next((directory / "dcp").glob("*.distcp")), data
        case "zero 2" | "zero 3":
            deepspeed(directory / "zero", int(kind[-1]), 1, PARAMS)
            return directory / "zero", next((directory / "zero").glob("*optim_states.pt")), data


@pytest.mark.parametrize("kind", ["pt", "dcp", "zero 2", "zero 3"])
def test_a_flipped_bit_of_a_tensor_is_found(tmp_path, kind):
    where, file, data = saved(tmp_path, kind)
    found = open_checkpoint(import_weights(str(where), Local(tmp_path / "whole")).path)
    assert found.tensor("model.b").tobytes() == data
    whole = file.read_bytes()
    assert whole.count(data) == 1
    for offset in (0, len(data) - 1):
        at = whole.index(data) + offset
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(FullshardError, match=r"is damaged: a checksum \(CRC32\) does not match"):
            import_weights(str(where), Local(tmp_path / "out"))
        assert not (tmp_path / "out").exists()


def test_a_file_without_checksums_is_imported_and_said(tmp_path, capsys, monkeypatch):
    from fullshard.commands.cli import main

    torch.serialization.set_crc32_options(False)
    try:
        torch.save(PARAMS, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    monkeypatch.setattr(
        "sys.argv", ["fullshard", "checkpoint", "import", str(tmp_path / "model.pt"), "-o", str(tmp_path / "out")]
    )
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    assert "model.pt carries no checksums" in capsys.readouterr().err
    found = open_checkpoint(tmp_path / "out")
    assert found.manifest.state["unchecked"] == ["model.pt"]
    assert found.tensor("model.b").tobytes() == PARAMS["b"].numpy().tobytes()


def test_tensors_of_every_kind_are_read_or_refused_by_name(tmp_path):
    """No tensor is left out silently."""
    weight = torch.nn.Parameter(torch.randn(3))
    weight.tensor_model_parallel = True  # an attribute, as Megatron sets
    named = {"fp8": torch.ones(4).to(torch.float8_e4m3fn), "attribute": weight, "u16": torch.ones(2, dtype=torch.uint16)}
    torch.save(named, tmp_path / "model.pt")
    found = open_checkpoint(import_weights(str(tmp_path / "model.pt"), Local(tmp_path / "out")).path).manifest.tensors
    kinds = {n: t.dtype for n, t in found.items()}
    assert kinds == {"model.fp8": "F8_E4M3", "model.attribute": "F32", "model.u16": "U16"}
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(FullshardError, match=r"sparse.pt: w is .* of an unknown class; convert it to a plain tensor"):
        import_weights(str(tmp_path / "sparse.pt"), Local(tmp_path / "out2"))


# -- DCP ----------------------------------------------------------------------------------------------------


def lying(directory: Path, kind: str) -> None:
    metadata, data = torch_files.dcp()
    tree = pickle.loads(metadata)
    w = tree.state_dict_metadata["w"]
    match kind:
        case "claims":
            w.size = torch.Size([1 << 30, 1 << 10])
        case "claims in its chunks":
            w.size, w.chunks = torch.Size([1 << 40]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([1 << 40]))]
        case "overlap":  # the sizes add up, with a gap
            w.chunks = [*w.chunks[:1], ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 4]))]
        case "missing":
            tree.storage_data.popitem()
        case "length":
            next(iter(tree.storage_data.values())).length = 1 << 50
        case "empty":
            tree.storage_data = None
        case "text":
            w.size = "ab"
    (directory / ".metadata").write_bytes(pickle.dumps(tree))
    (directory / "__0_0.distcp").write_bytes(data)


LIES = {
    "claims": "the chunks of w do not add up to it",
    "claims in its chunks": "does not say where a chunk of w is|another shape or dtype than in the metadata",
    "overlap": "chunks of w overlap",
    "missing": "does not say where a chunk of b is",
    "length": "is truncated",
    "empty": "is not the metadata of a known version of DCP",
    "text": "is not the metadata of a known version of DCP",
}


@pytest.mark.parametrize("kind", LIES)
def test_metadata_that_lies_takes_no_memory(tmp_path, kind):
    (tmp_path / "in").mkdir()
    lying(tmp_path / "in", kind)
    tracemalloc.start(1)
    try:
        with pytest.raises(FullshardError, match=LIES[kind]):
            import_weights(str(tmp_path / "in"), Local(tmp_path / "out"))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "out").exists()


# -- DeepSpeed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["optimizer_state_dict", "zero_stage", "param_shapes", "module", "everything"])
def test_a_zero_checkpoint_without_a_key(tmp_path, missing):
    deepspeed(tmp_path / "zero", 2, 1, PARAMS)
    for file in (tmp_path / "zero").iterdir():
        tree = torch.load(file)
        for table in (tree, tree.get("optimizer_state_dict", {})):
            table.pop(missing, None)
        torch.save([] if missing == "everything" else tree, file)
    with pytest.raises(FullshardError, match="is not a ZeRO checkpoint of a known version"):
        import_weights(str(tmp_path / "zero"), Local(tmp_path / "out"))


def test_latest_that_is_a_directory(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(FullshardError, match="latest: it is not a plain file"):
        import_weights(str(tmp_path), Local(tmp_path / "out"))
