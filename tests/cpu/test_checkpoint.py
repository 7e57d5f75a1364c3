"""Checkpoints of the torch engine: from any layout to any other, strict, verified, atomic."""

import os
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest

import fullshard as fs
from fullshard.checkpoint import commit
from fullshard.checkpoint.background_writer import Background
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.manifest import checksum
from fullshard.checkpoint.verify import problems
from fullshard.on_torch.saving.pending_copies import PendingCopies
from tests.cpu import checkpoint
from tests.pure.test_checkpoint import CRAFTED, DAMAGES

LAYOUTS = [
    (1, "zero3", {}),
    (2, "ddp", {}),
    (2, "zero2", {}),
    (2, "zero3", {"tensor": 2}),
    (3, "zero3", {}),  # does not divide evenly
    (4, "zero1", {"tensor": 2}),
    (4, "zero3", {}),
    (4, "ddp", {}),
    (4, "hybrid", {}),
    (4, "hybrid", {"tensor": 2}),
    (4, "hpz", {"reshard": 2}),
    (4, "mixed", {"replicate_below": 2000}),
]
full = pytest.mark.full


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("origin", "targets"),
    [
        (LAYOUTS[3], [LAYOUTS[2]]),
        (LAYOUTS[6], [LAYOUTS[2]]),
        (LAYOUTS[5], [LAYOUTS[0]]),
        *(pytest.param(origin, LAYOUTS, marks=full) for origin in LAYOUTS),
    ],
    ids=str,
)
def test_what_any_layout_saves_any_other_loads_to_the_bit(ranks, tmp_path, origin, targets):
    world, strategy, choices = origin
    saved = ranks(world).run(checkpoint.save, str(tmp_path), strategy, **choices)
    assert all(s["digests"] == saved[0]["digests"] for s in saved)
    assert problems(Local(Path(saved[0]["where"]))) == []
    for other, another, others in [*targets, origin]:
        for found in ranks(other).run(checkpoint.load, str(tmp_path), another, **others):
            assert found["digests"] == saved[0]["digests"]
            assert (found["step"], found["cursor"], found["note"]) == (2, 24, "ä")
    assert found["next"] == saved[0]["next"]  # the same layout again: training goes on to the bit


def test_a_load_that_verifies_meanwhile_reads_the_files_once(ranks, tmp_path):
    saved = ranks(2).run(checkpoint.save, str(tmp_path), "zero3")
    found = ranks(2).run(checkpoint.load_once, str(tmp_path))
    assert [digests for digests, _ in found] == [s["digests"] for s in saved]
    size = sum(file.stat().st_size for file in tmp_path.glob("*/shard-*"))
    assert size <= sum(read for _, read in found) < 1.1 * size  # both ranks read what both have


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("tied", fs.AdamW(lr=1e-2)),
        ("lora", fs.AdamW(lr=1e-2)),
        ("plain", fs.SGD(lr=1e-2, momentum=0.9)),
        ("plain", fs.SGD(lr=1e-2)),
        ("plain", fs.TorchOptimizer("NAdam", 1e-2)),
        ("plain", fs.TorchOptimizer("ASGD", 1e-2)),
    ],
)
def test_every_optimizer_and_kind_of_model(ranks, tmp_path, kind, optimizer):
    saved = ranks(2).run(checkpoint.save, str(tmp_path), "zero3", kind, optimizer=optimizer)[0]
    found = ranks(2).run(checkpoint.load, str(tmp_path), "zero3", kind, optimizer=optimizer)[0]
    assert found["digests"] == saved["digests"]
    assert found["next"] == saved["next"]
    if kind == "lora":
        assert not [n for n in found["digests"] if n.startswith("optimizer.") and ".lora_" not in n]  # frozen: none


def test_a_save_in_the_background_holds_the_values_of_its_step(ranks, tmp_path):
    for found in ranks(2).run(checkpoint.saved_then_mutated, str(tmp_path)):
        assert found["found"] == found["digests"]
    assert ranks(2).run(checkpoint.one_at_a_time, str(tmp_path / "more")) == [True, True]


def test_a_save_beside_training_holds_the_values_of_its_step(ranks, tmp_path):
    assert ranks(2).run(checkpoint.saved_under_training, str(tmp_path)) == [[True] * 3] * 2


def test_ranks_agree_by_numbers_and_by_a_sentence_when_one_fails(ranks):
    for numbers, nothing, said, after in ranks(2).run(checkpoint.tallied):
        assert numbers == [[0, -(1 << 63)], [1, -(1 << 63)]]
        assert nothing == [[], []]
        assert said == "ZeroDivisionError: integer division or modulo by zero"
        assert after == [[7], [7]]


@pytest.mark.parametrize("leaders", [[0], [0, 2]])
def test_leaders_finish_when_all_ranks_could_begin_and_all_are_told(ranks, leaders):
    rows = [[rank, -(1 << 63)] for rank in range(4)]
    said = "ZeroDivisionError: integer division or modulo by zero"
    for rank, found in enumerate(ranks(4).run(checkpoint.settled, leaders)):
        given = [rows] if rank in leaders else []
        assert found == [given, [said], [*given, said], given]


@pytest.mark.parametrize("priority", ["normal", "nice", "idle"])
def test_background_work_is_done_in_order_by_a_thread_that_gives_way(priority):
    own = os.getpriority(os.PRIO_PROCESS, 0), os.SCHED_OTHER
    background, done = Background("test", priority=priority), []
    futures = [background.submit(partial(done.append, i)) for i in range(3)]
    found = background.submit(lambda: (os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)))
    failed = background.submit(lambda: done[9])
    background.close()
    nice, policy = found.result(100)
    assert (nice > own[0]) == (priority == "nice")
    assert policy == (os.SCHED_IDLE if priority == "idle" else os.SCHED_OTHER)
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)) == own
    assert [f.result(100) for f in futures] == [None] * 3
    assert done == [0, 1, 2]
    assert isinstance(failed.exception(10), IndexError)


def test_who_is_about_to_change_the_state_makes_the_copies_that_nobody_has_begun():
    made: list[int] = []
    copies = PendingCopies(copies=[partial(made.append, i) for i in range(3)])
    copies.wait()  # `finish` has not been called yet
    assert made == [0, 1, 2]
    copies.finish()
    one = memoryview(b"first"), memoryview(b"second")
    for helped in (False, True):  # the checksum is the same whichever thread copies
        copies = PendingCopies(copies=[lambda: None] * 2, parts=one)
        if helped:
            copies.wait()
        assert copies.finish() == checksum(b"firstsecond")
    failing = PendingCopies(copies=[lambda: made.append(3), lambda: made[9]])
    failing.wait()
    with pytest.raises(IndexError):  # the writing thread gets the error
        failing.finish()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("kind", "optimizer", "options", "said"),
    [
        ("tied", None, {}, "it has model.lm_head.weight, optimizer.lm_head.weight.exp_avg"),
        ("lora", None, {}, "it lacks model.base_model.model.model.embed_tokens.weight"),
        ("plain", fs.SGD(lr=1.0, momentum=0.5), {}, "it lacks optimizer.model.embed_tokens.weight.momentum_buffer"),
        ("plain", None, {"allow_missing": ["model.extra.*"]}, "matches no tensor of the state"),
        ("plain", fs.SGD(lr=1.0), {}, "it has optimizer."),
    ],
)
def test_strict_keys(ranks, tmp_path, kind, optimizer, options, said):
    ranks(2).run(checkpoint.save, str(tmp_path), "zero3")
    for sentence in ranks(2).run(checkpoint.refusal, str(tmp_path), kind, optimizer, **options):
        assert said in sentence


@pytest.mark.full
def test_every_flipped_byte_is_refused_by_load(ranks, tmp_path):
    """All files; the first and last bytes, those around the header's end, and as many more at random."""
    ranks(2).run(checkpoint.save, str(tmp_path), "zero3")
    for found in ranks(2).run(checkpoint.load_flipped, str(tmp_path)):
        assert {name for name, _, _ in found} == {"manifest.json", *(f"shard-0000{i}-of-00002.safetensors" for i in (0, 1))}
        assert len(found) > 300
        assert [f for f in found if f[0] not in f[2] or "\n" in f[2]] == []  # the sentence names the file


def test_damage_to_whole_files_and_crafted_manifests_are_refused_by_load(ranks, tmp_path):
    ranks(2).run(checkpoint.save, str(tmp_path), "zero3")
    for found in ranks(2).run(checkpoint.load_damaged, str(tmp_path)):
        assert len(found) == len(DAMAGES) + len(CRAFTED) + len(checkpoint.FORGED) + 1
        assert found.pop("whole") == "accepted"
        assert [kind for kind, said in found.items() if said == "accepted" or "\n" in said or "Error" in said] == []


def test_copies_are_written_once_and_the_work_is_spread(ranks, tmp_path):
    """Two replicas of two shards: each of the four ranks writes about a quarter."""
    sizes = ranks(4).run(checkpoint.counted, str(tmp_path))
    whole = sizes[0][1]
    assert sum(size for size, _ in sizes) < whole + 4 * 32768  # headers
    assert max(size for size, _ in sizes) < 0.4 * whole


def test_nodes_with_disks_of_their_own(ranks, tmp_path):
    for rank, found in enumerate(ranks(4).run(checkpoint.own_disks, str(tmp_path))):
        assert found["nodes"] == ((0, 0, 1, 1), rank in (0, 2))
        assert found["same"]
        assert "on a disk of its own; copy the files of all nodes into one directory" in found["other"]
    files = [sorted(p.name for p in tmp_path.glob(f"node{n}/checkpoint_dir/step-00000002/shard*")) for n in (0, 1)]
    assert [len(f) for f in files] == [2, 2]
    assert not set(files[0]) & set(files[1])
    assert problems(Local(tmp_path / "node0/checkpoint_dir/step-00000002")) == []
    together = tmp_path / "together/step-00000002"
    together.mkdir(parents=True)
    for file in tmp_path.glob("node*/checkpoint_dir/step-00000002/*"):
        (together / file.name).write_bytes(file.read_bytes())
    assert ranks(2).run(checkpoint.refusal, str(tmp_path / "together")) == ["accepted"] * 2  # now at any layout


def test_dropout_goes_on_with_the_same_masks(ranks, tmp_path):
    for uninterrupted, resumed in ranks(2).run(checkpoint.dropout, str(tmp_path)):
        assert resumed == uninterrupted


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(ranks, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], check=False, capture_output=True).returncode:
        pytest.skip("only root may make a small disk")
    try:
        found = ranks(2).run(checkpoint.full_disk, str(disk / "checkpoint_dir"), str(disk / "fill"))
        said = found[0]["said"]
        assert said == found[1]["said"]
        assert said.startswith("the checkpoint of step 3 was not saved: ")
        assert "free, but its files take" in said or "No space left" in said
        assert len(found[0]["losses"]) == 5  # training went on
        names = [p.name for p in (disk / "checkpoint_dir").iterdir()]
        assert sorted(names) == ["step-00000002", "step-00000005"]
        assert all(problems(Local(disk / "checkpoint_dir" / n)) == [] for n in names)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_retention_in_ranks_prefers_whole_checkpoints_to_a_damaged_newer_one(ranks, tmp_path):
    first, second = ranks(2).run(checkpoint.retained, str(tmp_path))
    assert [len(first), len(second)] == [1, 0]
    assert first[0].startswith("step-00000003 stays and does not count: ")
    assert commit.committed(Local(tmp_path)) == ["step-00000002", "step-00000003", "step-00000004"]
    assert [n for n in commit.committed(Local(tmp_path)) if not problems(Local(tmp_path / n))] == [
        "step-00000002",
        "step-00000004",
    ]
