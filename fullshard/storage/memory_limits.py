"""The host memory that this process may use, and processes that the kernel killed for lack of it.

A container sees the machine's memory but may use only that of its cgroup, so both are read. `root` is `/` except in tests.
Imports no torch: the launcher needs it, too.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from fullshard.base.errors import HostMemoryError
from fullshard.base.text import bytes_text

MACHINE = "this machine"
ROOT = Path("/")
# Files of a cgroup, versions 1 and 2: limits, memory in use, counts of kills.
LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
USED = ("memory.current", "memory.usage_in_bytes")
KILLS = ("memory.events", "memory.oom_control")
# Lines of memory.stat that the kernel can reclaim, such as the page cache. Version 1 comes first.
CACHES = (("total_active_file", "total_inactive_file"), ("active_file", "inactive_file", "slab_reclaimable"))


@dataclass(frozen=True)
class Limit:
    """Bytes of memory, total and free, and whose limit it is."""

    total: int
    free: int
    whose: str


def host_limit(root: Path = ROOT) -> int:
    """Bytes of host memory that this process may still use: the least of the machine's and its cgroups' free memory."""
    return min(limit.free for limit in limits(root))


def refuse_more_than(nbytes: int, ranks_here: int, why: str, root: Path = ROOT) -> None:
    """Raise if `nbytes` cannot be allocated on each of `ranks_here` ranks of this machine."""
    tightest = min(limits(root), key=lambda limit: limit.free)
    if nbytes * ranks_here <= tightest.free:
        return
    each = f" for each of {ranks_here} ranks" if ranks_here > 1 else ""
    raise HostMemoryError(
        f"{why} takes {bytes_text(nbytes)} of host memory{each}, but {bytes_text(max(0, tightest.free))} of the"
        f" {bytes_text(tightest.total)} of {tightest.whose} are free; keep less in host memory, or use a machine with more"
    )


def limits(root: Path = ROOT) -> list[Limit]:
    """The machine's memory, then that of every cgroup around this process that has a limit."""
    machine = _numbers(root / "proc/meminfo")
    all_limits = [Limit(machine["MemTotal:"] << 10, machine["MemAvailable:"] << 10, MACHINE)]
    around = [group for own, mount in own_groups(root) for group in (own, *own.parents) if group.is_relative_to(mount)]
    return all_limits + [limit for group in around if (limit := _limit_of(group))]


def _limit_of(group: Path) -> Limit | None:
    allowed = [number for name in LIMITS if (number := _number(group / name)) is not None and number < 1 << 60]
    used = next((number for name in USED if (number := _number(group / name)) is not None), None)
    if not allowed or used is None:
        return None
    stat = _numbers(group / "memory.stat")
    cached = next((names for names in CACHES if names[0] in stat), ())
    total = min(allowed)
    return Limit(total, total - used + sum(stat.get(name, 0) for name in cached), f"the cgroup {group}")


def resident_bytes(root: Path = ROOT) -> dict[str, int]:
    """`host_rss`: the bytes of host memory that this process has. Empty where the kernel does not tell."""
    pages = "".join(_lines(root / "proc/self/statm")).split()
    return {"host_rss": int(pages[1]) * os.sysconf("SC_PAGE_SIZE")} if len(pages) > 1 else {}


def kills(root: Path = ROOT) -> dict[str, int]:
    """Counts of processes that the kernel killed for lack of memory: in this process's cgroup and on the machine."""
    files = [(str(own), own / name) for own, _ in own_groups(root) for name in KILLS]
    counts = [(where, _numbers(file).get("oom_kill")) for where, file in [*files, (MACHINE, root / "proc/vmstat")]]
    return {where: count for where, count in counts if count is not None}


def explain_kill(before: dict[str, int], root: Path = ROOT) -> str:
    """Why a process was ended by SIGKILL since `before`, an earlier result of `kills()`: the rest of a sentence."""
    after = kills(root)
    risen = [where for where, count in after.items() if count > before.get(where, count)]
    if not after:
        return "the machine may be out of memory"
    if not risen:
        return "not by the kernel for want of memory, but by somebody: a scheduler, a daemon or a person"
    if risen == [MACHINE]:
        return "the kernel was killing for want of host memory on this machine; keep less in host memory"
    tightest = min(limits(root), key=lambda limit: limit.total)
    return (
        f"the kernel killed it for want of host memory: {bytes_text(tightest.total)} is the limit of {tightest.whose};"
        " keep less in host memory, or raise the limit"
    )


# -- the kernel's files -------------------------------------------------------------------------------


def own_groups(root: Path = ROOT) -> list[tuple[Path, Path]]:
    """The directory of this process's memory cgroup and the mount it is in; two, where both versions are mounted."""
    groups = []
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        (_, _, _, shown, mount), (kind, _, options) = left.split()[:5], right.split()[:3]
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            top = root / mount.lstrip("/")
            groups.append((top / _inside(root, kind, shown), top))
    return groups


def _inside(root: Path, kind: str, shown: str) -> Path:
    """This process's cgroup below a mount that shows the tree from `shown` on."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if (number == "0") if kind == "cgroup2" else ("memory" in controllers.split(",")):
            return Path(path).relative_to(shown) if Path(path).is_relative_to(shown) else Path()
    return Path()


def _lines(path: Path) -> list[str]:
    """A file's lines; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None if it has none, as `max`."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in a file of lines `name number …`."""
    pairs = [line.split() for line in _lines(path)]
    return {p[0]: int(p[1]) for p in pairs if len(p) > 1 and p[1].isdigit()}
