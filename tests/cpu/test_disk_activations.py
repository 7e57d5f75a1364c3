"""Activations on disk: the same training to the bit, each byte written once and read once, little host memory."""

import random
import tempfile
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.on_torch.offload.activations.disk_activations import ActivationFile
from tests.cpu import activations, disk_activations
from tests.cpu.disk_activations import LAYERS, Case

INPUT = 4 * activations.ROWS * activations.LENGTH * 24  # bytes of a block's input
TABLES = 4 * 2 * activations.LENGTH * 3  # bytes of the rotary cos and sin: given to all blocks
PAGE = 4096

CASES = [
    Case(),
    Case(remat="selective", accumulate=2, loss="chunked"),
    Case(remat="full", compute="bf16", accumulate=2),
    Case(("device", "host", "disk"), accumulate=2),
    Case(("disk", "host"), remat="full"),
    Case(("disk", "device", "device"), remat="selective", compute="bf16", loss="chunked"),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_activations_on_disk_change_no_bit(ranks, case):
    for found in ranks(2).run(disk_activations.compare, case):
        assert found["numbers"], found
        assert found["params"]
        assert found["left"] == 0
        assert found["names"] == []  # nothing that a kill could leave
        assert len(set(found["moved"])) == 1, found  # every step alike, the first included
        spilled, fetched = found["moved"][0]
        assert spilled == fetched > 0
        written, read = found["filed"]
        assert written == read > 0
        assert (written == found["spilled"]) == ("host" not in case.homes)


def test_each_byte_is_written_once_and_read_once(ranks):
    """Under full remat the inputs of all blocks but the last, and the tables that they share, in whole pages."""
    found = ranks(2).run(disk_activations.requests, Case(remat="full"))[0]
    whole = -(-INPUT // PAGE) * PAGE
    assert sorted(found["write"]) == sorted(found["read"]) == [PAGE, PAGE] + [whole] * (LAYERS - 1)
    assert found["moved"] == (INPUT * (LAYERS - 1) + TABLES,) * 2


@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_more_than_two_blocks_are_in_host_memory(ranks, remat):
    """Forward waits for what was written before; backward has the block that it is in and the one that it comes to."""
    for found in ranks(2).run(disk_activations.requests, Case(remat=remat), 2):
        block = sum(found["write"]) // 2 // (LAYERS - 1)
        assert block < found["most"] <= 2 * (block + 2 * PAGE)  # the tables are in every block's list, in one page each


def test_the_bytes_of_a_step_are_those_of_the_schedule(ranks):
    found, said, disk = ranks(2).run(disk_activations.as_planned)[0]
    assert found == said
    inputs = 3 * 2 * 8 * 192  # bytes, of all blocks but the last
    assert found[0] == 2 * inputs  # two micro-batches
    assert disk == {"activations": inputs}


def test_the_file_grows_in_the_first_step_alone(ranks):
    (sizes, same) = ranks(2).run(disk_activations.grown, Case())[0]
    assert same
    assert len(set(sizes)) == 1


def test_forwards_without_backward_leave_no_room_taken(ranks):
    for found in ranks(2).run(disk_activations.without_backward):
        assert found == {"evaluated": 0, "read": True, "file": 1, "same": True}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9000), st.booleans()), min_size=30, max_size=60))
@settings(max_examples=20, deadline=None)
def test_what_comes_back_is_what_was_sent_however_late_it_is_written(moves):
    """Writes that take their time, places that are given back before they are written, and used again."""
    with tempfile.TemporaryDirectory() as disk:
        files, kept = ActivationFile(disk, pinned=False), []
        files.limit = 1 << 16
        write, delays = files.file._write_part, random.Random(0)
        files.file._write_part = lambda *part: (time.sleep(0.005 * delays.random()), write(*part))
        for number, (kind, nbytes, late) in enumerate(moves):
            if kind > 1 or not kept:
                filed = files.take(nbytes)
                filed.bytes.fill_(number)
                files.write(filed, None)
                kept.append((filed, number))
                continue
            filed, number = kept.pop(nbytes % len(kept))
            if late:
                files.start_read(filed)
            if kind:
                files.await_read(filed)
                assert (filed.bytes == number).all()
                files.release(filed, None)
            files.forget(filed)
        files.file.close()


def test_a_disk_that_fails_ends_the_run_in_a_sentence(ranks):
    for said in ranks(2).run(disk_activations.broken, "full"):
        assert "activations: cannot write" in said
        assert said.endswith("No space left on device")
    for said in ranks(2).run(disk_activations.broken, "cut"):
        assert "activations was cut short" in said


def test_a_disk_without_room_is_said(ranks):
    for said in ranks(2).run(disk_activations.no_room):
        assert "activations" in said
        assert "make room, or use another disk" in said or "cannot reserve" in said


def test_a_missing_directory_is_refused(ranks, tmp_path):
    disks = [None, str(tmp_path / "none"), str(tmp_path)]
    homes = [("disk",), ("disk",), ("host",)]
    said = ranks(2).run(disk_activations.refusals, disks, homes)[0]
    assert said[0] == "unit model.layers.0: home.activations = 'disk' needs a directory; pass disk=, or disk.path in a recipe"
    assert said[1] == f"{tmp_path}/none is not a directory; make it first, on the disk that the plan is to use"
    assert said[2].startswith("disk has no effect: no unit of the plan has a home on disk")
