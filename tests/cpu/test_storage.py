"""Arenas and spools on real memory and real files: what goes in comes out, and what goes wrong is a sentence."""

import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from fullshard.base.direct_io import aligned
from fullshard.base.errors import FullshardError, HostMemoryError
from fullshard.storage import pinned_arena
from fullshard.storage.disk_file import PART, DiskFile
from fullshard.storage.disk_speed import Rates, disk_rates, no_disk, verdict
from fullshard.storage.memory_limits import own_groups
from fullshard.storage.pinned_arena import Arena, bytes_of, room

MiB, PAGE = 1 << 20, 4096
SHM = Path("/dev/shm")


@pytest.fixture(params=["disk", "tmpfs"])
def directory(request, tmp_path):
    if request.param == "disk":
        yield tmp_path
        return
    if not SHM.is_dir():
        pytest.skip("no tmpfs here")
    with tempfile.TemporaryDirectory(dir=SHM) as made:
        yield Path(made)


def noise(nbytes: int, seed: int = 0) -> memoryview:
    memory = aligned(nbytes)
    memory[:] = np.random.default_rng(seed).bytes(len(memory))
    return memory


# -- arenas -------------------------------------------------------------------------------------------


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_an_arena_has_all_its_pages_from_the_start_and_gives_them_back():
    before = resident()
    arena = Arena(64 * MiB, pinned=False, why="a test")
    assert resident() - before >= 63 * MiB
    arena.close()
    assert resident() - before < 32 * MiB


def test_pieces_are_zeroed_aligned_and_do_not_overlap():
    sizes = [1, PAGE, 5000, 3 * MiB, 0, 7]
    arena = Arena(room(sizes), pinned=False, why="a test")
    pieces = [arena.take(n) for n in sizes]
    assert arena.used == arena.nbytes == room(sizes)
    assert [p.numel() for p in pieces] == sizes
    assert all(p.data_ptr() % PAGE == 0 and not p.any() for p in pieces)
    for i, piece in enumerate(pieces):
        piece.fill_(i + 1)
    assert all((p == i + 1).all() for i, p in enumerate(pieces))
    bytes_of(pieces[3])[0] = 99
    assert pieces[3][0] == 99


def test_more_than_was_planned_is_refused_and_says_what_for():
    arena = Arena(2 * MiB, pinned=False, why="optimizer state")
    arena.take(MiB, align=MiB)
    with pytest.raises(FullshardError) as caught:
        arena.take(MiB + 1)
    assert str(caught.value) == (
        "optimizer state: 1.00 MiB more of host memory are wanted when 1.00 MiB of the 2.00 MiB that were planned are taken"
    )
    assert arena.take(MiB).numel() == MiB


def test_more_than_the_machine_has_is_refused_before_it_is_touched():
    before = resident()
    with pytest.raises(FullshardError, match=r"optimizer state takes 1024\.00 TiB of host memory, but .* are free"):
        Arena(1 << 50, pinned=False, why="optimizer state")
    assert resident() - before < MiB


def test_memory_that_a_limit_of_the_process_refuses_may_be_there_at_the_next_start(monkeypatch):
    monkeypatch.setattr(pinned_arena, "refuse_more_than", lambda *_: None)  # which reads other limits
    with pytest.raises(HostMemoryError, match="of host memory for optimizer state cannot be had") as caught:
        Arena(1 << 50, pinned=False, why="optimizer state")  # more than an address space has
    assert caught.value.exit_code == 1


def mapped(address: int) -> bool:
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def test_a_fork_does_not_copy_an_arena():
    """As one that is pinned would be, page by page."""
    arena = Arena(MiB, pinned=False, why="a test")
    start = arena.take(MiB).data_ptr()
    child = os.fork()
    if not child:
        gc.disable()  # what other tests have left may belong to threads, which a fork does not have
        os._exit(mapped(start))
    assert os.waitpid(child, 0)[1] == 0
    assert mapped(start)


# -- spools -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksums", [False, True])
def test_what_is_written_in_any_order_lies_in_the_file_and_comes_back(directory, checksums):
    sizes = [PAGE, PART, 2 * PART + PAGE, 3 * PAGE, 0]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    whole = noise(sum(sizes))
    pieces = [(at, whole[at : at + n]) for at, n in zip(starts, sizes, strict=True)]
    random.Random(0).shuffle(pieces)
    with DiskFile(directory, "state", len(whole), checksums) as file:
        for write in [file.write(at, piece) for at, piece in pieces]:
            write.result()
        assert Path(f"/proc/self/fd/{file.file}").read_bytes() == whole  # by way of the page cache
        back = aligned(len(whole))
        for read in [file.read(at, back[at : at + len(piece)]) for at, piece in pieces]:
            read.result()
        assert back == whole
        assert list(directory.iterdir()) == []  # it has no name while it is in use


def test_the_disk_is_written_past_the_page_cache_and_memory_is_not_called_a_disk(directory):
    with DiskFile(directory, "state", MiB) as file:
        assert file.direct == (directory.parts[:3] != SHM.parts)
        assert os.fstat(file.file).st_blocks * 512 >= MiB  # reserved


def test_a_tensors_memory_goes_to_disk_and_back(tmp_path):
    arena = Arena(2 * MiB, pinned=False, why="a test")
    values, back = (arena.take(MiB).view(torch.float32) for _ in range(2))
    values.normal_()
    with DiskFile(tmp_path, "state", MiB) as file:
        file.write(0, bytes_of(values)).result()
        file.read(0, bytes_of(back)).result()
    assert torch.equal(values, back)


def test_a_file_that_was_cut_short_is_found(directory):
    with DiskFile(directory, "moments", 3 * PART) as file:
        file.write(0, noise(3 * PART)).result()
        os.ftruncate(file.file, PART + 5000)
        file.read(0, aligned(PART)).result()
        with pytest.raises(FullshardError, match=f"moments was cut short: {PART} bytes at {PART} cannot be read"):
            file.read(0, aligned(2 * PART)).result()


def test_an_error_of_the_disk_names_file_place_and_reason(directory):
    with DiskFile(directory, "moments", MiB) as file:
        broken = os.open("/proc/self/mem", os.O_RDWR)  # nothing is mapped at its start: the kernel answers EIO
        os.dup2(broken, file.file)
        os.close(broken)
        with pytest.raises(FullshardError) as caught:
            file.read(PAGE, aligned(PAGE)).result()
        assert str(caught.value) == f"{directory}/moments: cannot read 4096 bytes at 4096: Input/output error"
        with pytest.raises(FullshardError, match="moments: cannot write 4096 bytes at 0: Input/output error"):
            file.write(0, aligned(PAGE)).result()


def test_a_disk_that_fills_up_later_is_an_error_of_the_write(directory):
    with DiskFile(directory, "moments", MiB) as file:
        full = os.open("/dev/full", os.O_RDWR)
        os.dup2(full, file.file)
        os.close(full)
        with pytest.raises(FullshardError, match="moments: cannot write 4096 bytes at 8192: No space left on device"):
            file.write(2 * PAGE, aligned(PAGE)).result()


@contextmanager
def small_disk(directory: Path, size: str):
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(directory)], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip("only root may make a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_disk_that_is_too_small_is_refused_at_once_and_left_empty(tmp_path):
    with small_disk(tmp_path, "2m"):
        with pytest.raises(FullshardError) as caught:
            DiskFile(tmp_path, "moments", 3 * MiB)
        said = f"{tmp_path} has 2.00 MiB free, but moments takes 3.00 MiB; make room, or use another disk"
        assert str(caught.value) == said
        DiskFile(tmp_path, "moments", 2 * MiB).close()


def test_a_file_grows_and_keeps_what_is_in_it(directory):
    out, into = noise(MiB), aligned(MiB)
    with DiskFile(directory, "moments", MiB) as file:
        file.write(0, out).result()
        with pytest.raises(ValueError, match="lie outside"):
            file.write(MiB, out)
        file.grow(MiB)
        file.write(MiB, out).result()
        for at in (0, MiB):
            into[:] = bytes(MiB)
            file.read(at, into).result()
            assert into == out


def test_a_file_that_cannot_grow_says_how_much_it_would_take(tmp_path):
    with small_disk(tmp_path, "2m"), DiskFile(tmp_path, "activations", MiB) as file:
        with pytest.raises(FullshardError) as caught:
            file.grow(2 * MiB)
        said = f"{tmp_path} has 2.00 MiB free, but activations takes 3.00 MiB; make room, or use another disk"
        assert str(caught.value) == said


def test_a_directory_that_is_missing_or_takes_no_files_is_a_sentence(tmp_path):
    for where in (tmp_path / "missing", "/proc"):
        with pytest.raises(FullshardError, match=f"no file can be made in {where}: No such file or directory"):
            DiskFile(where, "moments", MiB)


def test_a_flipped_bit_is_found_where_checksums_are_kept(directory):
    with DiskFile(directory, "moments", 2 * PART, checksums=True) as file:
        data = noise(2 * PART)
        file.write(0, data).result()
        data[PART + 17] ^= 1
        os.pwrite(file.file, data[PART:], PART)
        file.read(0, aligned(PART)).result()
        with pytest.raises(FullshardError, match=f"the {PART} bytes at {PART} are not those that were written there"):
            file.read(0, aligned(2 * PART)).result()


@pytest.mark.parametrize(
    ("offset", "memory", "why"),
    [
        (512, aligned(PAGE), "not multiples of 4096"),
        (0, aligned(PAGE)[:512], "not multiples of 4096"),
        (0, aligned(2 * PAGE)[8 : PAGE + 8], "not multiples of 4096"),
        (MiB, aligned(PAGE), "lie outside"),
        (-PAGE, aligned(PAGE), "lie outside"),
    ],
)
def test_a_request_that_no_disk_takes_is_refused_on_every_file_system(directory, offset, memory, why):
    with DiskFile(directory, "moments", MiB) as file:
        for request in (file.read, file.write):
            with pytest.raises(ValueError, match=why):
                request(offset, memory)
    with pytest.raises(ValueError, match="is closed"):
        file.read(0, aligned(PAGE))


KILLED = """
import sys, time
from fullshard.base.direct_io import aligned
from fullshard.storage.disk_file import DiskFile
file = DiskFile(sys.argv[1], "moments", 64 << 20)
file.write(0, aligned(64 << 20)).result()
print("written", flush=True)
while True:
    file.write(0, aligned(64 << 20))
    time.sleep(0.01)
"""


def used(directory: Path) -> int:
    return int(subprocess.run(["df", "--output=used", "-B1", directory], check=True, capture_output=True).stdout.split()[1])


def test_a_killed_process_leaves_nothing(tmp_path):
    with small_disk(tmp_path, "80m"):
        process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"written\n"
        assert used(tmp_path) >= 64 * MiB
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert list(tmp_path.iterdir()) == []
        assert used(tmp_path) == 0


# -- killed for memory --------------------------------------------------------------------------------

LAUNCHER = "import sys\nfrom fullshard.launch.local import start_ranks\nstart_ranks(1, sys.argv[1:])"


def new_group() -> tuple[Path, Path] | None:
    """A cgroup below our own, and the file of its limit; version 2 may have memory elsewhere."""
    for own, _ in own_groups():
        group = own / f"fullshard-test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            found = [group / f for f in ("memory.max", "memory.limit_in_bytes") if (group / f).exists()]
            if found:
                return group, found[0]
            group.rmdir()
    return None


@contextmanager
def small_group(nbytes: int):
    """How a process gets into a cgroup in which it may use so much."""
    made = new_group()
    if made is None:
        pytest.skip("only root may make a cgroup")
    group, limit = made
    try:
        limit.write_text(str(nbytes))
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        group.rmdir()


def test_a_rank_that_the_kernel_killed_for_memory_is_explained(tmp_path):
    (tmp_path / "rank.py").write_text("x = bytearray(4 << 30)")
    with small_group(1 << 30) as enter:
        command = [sys.executable, "-c", LAUNCHER, tmp_path / "rank.py"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, preexec_fn=enter)
    assert done.returncode == 128 + signal.SIGKILL
    said = "error: rank 0 was ended by SIGKILL: the kernel killed it for want of host memory: 1.00 GiB is the limit of the cgroup"
    assert said in done.stderr


# -- the verdict --------------------------------------------------------------------------------------


def test_rates_are_measured_and_leave_nothing(directory):
    rates = disk_rates(directory, 40 * MiB)
    assert all(1e6 < r < 1e12 for r in rates)
    assert list(directory.iterdir()) == []


def test_a_trial_of_a_disk_ends_in_time_and_leaves_nothing(directory):
    start = time.perf_counter()
    rates = disk_rates(directory, 256 * MiB, seconds=0.02)
    assert time.perf_counter() - start < 30.0
    assert all(1e6 < r < 1e12 for r in rates)
    assert list(directory.iterdir()) == []


def test_memory_that_passes_for_a_disk_is_told():
    if not SHM.is_dir():
        pytest.skip("no tmpfs here")
    assert "is tmpfs, which is host memory and no disk" in no_disk(SHM)


def test_the_verdict_adds_up_reading_and_writing():
    gib, rates = 1 << 30, Rates(4 * (1 << 30), 2 * (1 << 30))
    said = verdict((8 * gib, 8 * gib), rates, 10.0)  # 2 s and 4 s
    assert said == (
        "the disk needs 6.00 s of each step (8.00 GiB read at 4.29 GB/s, 8.00 GiB written at 2.15 GB/s),"
        " under the 10.00 s that the rest takes"
    )
    assert "3.0 times the 2.00 s that the rest takes: the disk sets the pace" in verdict((8 * gib, 8 * gib), rates, 2.0)
    by_far = verdict((8 * gib, 8 * gib), rates, 0.2)
    assert by_far.startswith("warning: the disk needs 6.00 s of each step")
    assert "30.0 times the 200.00 ms that the rest takes: the run will do little but wait for it; keep more in host" in by_far
    assert verdict((8 * gib, 8 * gib), rates, None).endswith("written at 2.15 GB/s)")


def test_the_verdict_takes_the_rate_of_both_at_once_where_there_is_one():
    gib = 1 << 30
    said = verdict((12 * gib, 8 * gib), Rates(4 * gib, 2 * gib, 4 * gib), None)  # 16 GiB at once, 4 read alone
    assert said.startswith("the disk needs 5.00 s of each step")
    assert said.endswith("8.00 GiB written at 2.15 GB/s, 4.29 GB/s both at once)")
