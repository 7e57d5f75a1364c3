"""Saving without an engine: ranks are threads, and their state is a list of numbers."""

import errno
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from fullshard import FullshardError
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.file_layout import FileItem, SaveLayout, write_once
from fullshard.checkpoint.manifest_records import ManifestFields
from fullshard.checkpoint.reader import Checkpoint, open_checkpoint
from fullshard.checkpoint.retention import Retention
from fullshard.checkpoint.saver import CheckpointSaver, NotFiniteError, Saving
from fullshard.checkpoint.shared_disks import Nodes, find_nodes, find_whole
from fullshard.checkpoint.verified_load import DamagedCheckpointError, fill_from
from fullshard.checkpoint.verify import FileChecksum, problems
from fullshard.ranks.agreement import RankAgreement

WORLD, ROWS = 3, 4


class ThreadAgreement(RankAgreement):
    """One rank of several threads."""

    def __init__(self, rank: int, board: list, barrier: threading.Barrier):
        self.rank, self.world, self.board, self.barrier = rank, len(board), board, barrier

    def gather(self, value):
        self.board[self.rank] = value
        self.barrier.wait(60)
        found = list(self.board)
        self.barrier.wait(60)
        return found


class RowStaging:
    """Every rank has some rows of one tensor."""

    def __init__(self, ranks: RankAgreement, nodes: Nodes, fault: Exception | None):
        self.rank, self.fault, whole = ranks.rank, fault, (ranks.world * ROWS, 2)
        item = FileItem("model.w", "F32", whole, (ranks.rank * ROWS, 0), (ROWS, 2))
        self.shards = SaveLayout.agree(ranks, nodes, [item], {"model.w": (whole, "F32"), "model.none": ((0,), "F32")}, {})

    def write(self, directory, checksum):
        if self.fault:
            raise self.fault
        data = self.shards.layout.header + np.full((ROWS, 2), self.rank, np.float32).tobytes()
        directory.write(self.shards.file, data)
        return FileChecksum(directory, self.shards.file, len(data)).result()

    def close(self):
        pass


class RowSaver(CheckpointSaver):
    """Saves as the engines do. `fault`: what this rank's write raises."""

    def __init__(self, checkpoint_dir, ranks: RankAgreement, keep=None, fault: Exception | None = None):
        super().__init__(checkpoint_dir, ranks, keep=keep, run="a test")
        self.staging = RowStaging(ranks, self.nodes, fault)

    def state_bytes(self) -> int:
        return WORLD * ROWS * 2 * 4

    def save(self, step: int = 1) -> Saving:
        self.wait()
        copied: Future = Future()
        copied.set_result(None)
        self.saving = Saving(step, SimpleNamespace(done=threading.Event()), overwrites=False)
        self.write_in_background(self.saving, ManifestFields(step, state={"extra": {}}), copied)
        return self.saving


def on_all_ranks(function) -> list:
    """The results of `function(ranks)` on every rank."""
    board, barrier = [None] * WORLD, threading.Barrier(WORLD)
    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(lambda rank: function(ThreadAgreement(rank, board, barrier)), range(WORLD)))


def test_three_ranks_save_one_checkpoint(tmp_path):
    def run(ranks):
        saver = RowSaver(tmp_path, ranks, keep=Retention(last=2))
        saver.sweep()
        saver.refuse_no_space(2)
        where = [saver.save(step).result() for step in (1, 2, 3)]
        newest, below = saver.newest(), saver.newest(below=3)
        saver.discard(2)
        flags = saver.agree(ranks.rank == 1), saver.agree(False)
        saver.close()
        return where, str(newest[0]), str(below[0]), flags

    steps = [str(tmp_path / f"step-0000000{i}") for i in (1, 2, 3)]
    assert on_all_ranks(run) == [(steps, steps[2], steps[1], (True, False))] * WORLD
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]
    found = open_checkpoint(tmp_path)
    assert problems(found.place) == []
    assert found.tensor("model.w")[:, 0].tolist() == [rank for rank in range(WORLD) for _ in range(ROWS)]
    assert found.tensor("model.none").shape == (0,)
    assert len(found.manifest.files) == WORLD
    assert on_all_ranks(lambda ranks: str(find_whole(tmp_path, ranks, verified=False))) == [str(found.place)] * WORLD


@pytest.mark.parametrize(
    ("fault", "sentence", "not_finite"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device", False),
        (NotFiniteError("the weights in w are not finite"), "the weights in w are not finite", True),
        (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug", False),
    ],
)
def test_a_failure_of_one_rank_is_that_of_all(tmp_path, fault, sentence, not_finite):
    def run(ranks):
        saver = RowSaver(tmp_path, ranks, fault=fault if ranks.rank == 2 else None)
        saving = saver.save()
        with pytest.raises(FullshardError, match="the checkpoint of step 1 was not saved") as caught:
            saving.result()
        saver.close()
        return str(caught.value), saving.not_finite, saving.lease_lost

    found = on_all_ranks(run)
    assert len(set(found)) == 1
    assert sentence in found[0][0]
    assert found[0][1:] == (not_finite, False)
    assert list(tmp_path.iterdir()) == []


def test_damage_that_one_rank_finds_is_told_to_all(tmp_path):
    def run(ranks):
        saver = RowSaver(tmp_path, ranks)
        saver.save().result()
        saver.close()

    on_all_ranks(run)
    file = tmp_path / "step-00000001/shard-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")

    def load(ranks):
        with pytest.raises(FullshardError) as caught:
            find_whole(tmp_path, ranks, verified=False)
        return str(caught.value)

    assert on_all_ranks(load) == [f"{file} is damaged: its checksum does not match; use another checkpoint"] * WORLD
    assert Checkpoint(find_whole(tmp_path, ThreadAgreement(0, [None], threading.Barrier(1)), verified=True)).manifest.step == 1


def test_what_fills_a_state_is_verified_without_reading_it_twice(tmp_path, monkeypatch):
    def save(ranks):
        saver = RowSaver(tmp_path, ranks)
        saver.save().result()
        saver.close()

    def load(ranks):
        filled = bytearray(ROWS * 2 * 4)

        def fill(checkpoint):
            checkpoint.read("model.w", [(ranks.rank * ROWS, (ranks.rank + 1) * ROWS), (0, 2)], memoryview(filled))
            if ranks.rank == 1 and np.frombuffer(filled, np.float32)[-1] != 1:
                raise FullshardError("a value makes no sense")

        try:
            return fill_from(tmp_path, ranks, "meanwhile", fill).step
        except FullshardError as error:
            return type(error), str(error)

    def counted(place, name, pieces):
        read.append((name, sum(len(into) for _, into in pieces)))
        return plain(place, name, pieces)

    on_all_ranks(save)
    files, read, plain = sorted((tmp_path / "step-00000001").glob("shard-*")), [], Local.read
    monkeypatch.setattr(Local, "read", counted)
    assert on_all_ranks(load) == [1] * WORLD
    of_file = {file.name: sum(n for name, n in read if name == file.name) for file in files}
    assert of_file == {file.name: file.stat().st_size for file in files}
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"\x01")
    assert on_all_ranks(load) == [(DamagedCheckpointError, f"{files[1]} is damaged: its checksum does not match")] * WORLD


@pytest.mark.parametrize("disks", [(0, 0, 0), (0, 1, 2), (0, 1, 1), (0, 1, 0)])
def test_ranks_of_one_disk_are_a_node(tmp_path, disks):
    """And what a rank tells the others does not grow with their number."""

    def run(ranks):
        told, gather = [], ranks.gather
        ranks.gather = lambda value: told.append(len(str(value))) or gather(value)
        found = find_nodes(Local(tmp_path / str(disks[ranks.rank])), ranks)
        return found, max(told)

    found = on_all_ranks(run)
    assert [nodes for nodes, _ in found] == [Nodes(disks, rank == disks.index(disks[rank])) for rank in range(WORLD)]
    assert max(told for _, told in found) < 100
    assert [p for folder in tmp_path.iterdir() for p in folder.iterdir()] == []


def test_a_disk_that_only_some_of_a_group_see_is_refused(tmp_path, monkeypatch):
    """Rank 1's listing lacks a file, as on a filesystem that is slow to show it."""
    listed = Local.files

    def run(ranks):
        place = Local(tmp_path)
        if ranks.rank == 1:
            place.files = lambda: {n: size for n, size in listed(place).items() if not n.endswith("-2")}
        with pytest.raises(FullshardError, match="neither one disk that all ranks see nor one for each node"):
            find_nodes(place, ranks)

    on_all_ranks(run)


def test_each_node_writes_each_item_once():
    held = [[("a", 8), ("b", 4)], [("a", 8), ("b", 4), ("c", 1)], [("a", 8)]]
    assert write_once(held, Nodes((0, 0, 0), True)) == [{"a"}, {"b", "c"}, set()]
    assert write_once(held, Nodes((0, 0, 1), True)) == [{"a"}, {"b", "c"}, {"a"}]
