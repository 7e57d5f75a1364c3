"""What host memory a process may use, from the kernel's own words as they stand in containers, jobs and on plain machines."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fullshard.base.errors import FullshardError
from fullshard.storage.memory_limits import MACHINE, explain_kill, host_limit, kills, limits, refuse_more_than

GiB = 1 << 30

MEMINFO = """\
MemTotal:       527942772 kB
MemFree:        18790444 kB
MemAvailable:   469762048 kB
Buffers:         2104016 kB
Cached:        442198216 kB
HugePages_Total:       0
"""  # 448 GiB available
VMSTAT = "nr_free_pages 4697611\nnr_zone_inactive_anon 1322\noom_kill 3\n"
PLAIN = """\
22 28 0:20 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
25 28 0:23 / /run rw,nosuid,nodev shared:12 - tmpfs tmpfs rw,size=52794280k,mode=755,inode64
28 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
"""
V2_MOUNT = "33 22 0:28 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = """\
742 739 0:30 {shown} /sys/fs/cgroup/cpu,cpuacct ro,nosuid,nodev,noexec,relatime master:15 - cgroup cgroup rw,cpu,cpuacct
748 739 0:36 {shown} /sys/fs/cgroup/memory ro,nosuid,nodev,noexec,relatime master:21 - cgroup cgroup rw,memory
749 739 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2_STAT = """\
anon 12884901888
file 5368709120
kernel_stack 1622016
shmem 1073741824
inactive_anon 9663676416
active_anon 4294967296
inactive_file 3221225472
active_file 1073741824
slab_reclaimable 536870912
slab_unreclaimable 67108864
"""  # 4.5 GiB can be reclaimed
V1_STAT = """\
cache 5368709120
rss 12884901888
inactive_file 1
active_file 1
hierarchical_memory_limit 34359738368
total_cache 5368709120
total_rss 12884901888
total_inactive_file 3221225472
total_active_file 1073741824
"""  # 4 GiB can be reclaimed
V1_UNLIMITED = "9223372036854771712\n"
V2_EVENTS = "low 0\nhigh 0\nmax 7812\noom {n}\noom_kill {n}\noom_group_kill 0\n"
V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {n}\n"


@dataclass(frozen=True)
class Machine:
    """The files of /proc and /sys that are read."""

    root: Path
    mounts: str
    cgroup: str
    files: dict[str, str] = field(default_factory=dict)

    def make(self) -> Path:
        texts = {"proc/meminfo": MEMINFO, "proc/vmstat": VMSTAT, "proc/self/mountinfo": PLAIN + self.mounts}
        for name, text in (texts | {"proc/self/cgroup": self.cgroup} | self.files).items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return self.root


def v2(where: str, limit: str, used: int, stat: str = V2_STAT, kills: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/{where}"
    found = {"memory.max": f"{limit}\n", "memory.high": "max\n", "memory.current": f"{used}\n", "memory.stat": stat}
    return {f"{base}/{name}": text for name, text in (found | {"memory.events": V2_EVENTS.format(n=kills)}).items()}


def v1(where: str, limit: str, used: int, kills: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/memory/{where}"
    found = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": f"{used}\n", "memory.stat": V1_STAT}
    return {f"{base}/{name}": text for name, text in (found | {"memory.oom_control": V1_CONTROL.format(n=kills)}).items()}


def container_v2(root: Path, kills: int = 0) -> Machine:
    """A container with a namespace of its own: its cgroup looks like the root."""
    return Machine(root, V2_MOUNT, "0::/\n", v2(".", str(32 * GiB), 18 * GiB, kills=kills))


def job_v2(root: Path) -> Machine:
    """A batch job: the limit is two levels up, that of the task is unset."""
    task = "system.slice/slurmstepd.scope/job_1201/step_0/user/task_0"
    files = v2(task, "max", 10 * GiB) | v2("system.slice/slurmstepd.scope/job_1201", str(100 * GiB), 20 * GiB)
    return Machine(root, V2_MOUNT, f"0::/{task}\n", files | v2("system.slice", str(400 * GiB), 30 * GiB))


def container_v1(root: Path, kills: int = 0) -> Machine:
    """A container without a namespace: the path is the host's, and the mount shows the tree from there on."""
    shown = "/docker/3f1c"
    cgroup = f"12:cpu,cpuacct:{shown}\n9:memory:{shown}\n1:name=systemd:{shown}\n0::/system.slice/containerd.service\n"
    return Machine(root, V1_MOUNTS.format(shown=shown), cgroup, v1(".", f"{32 * GiB}\n", 18 * GiB, kills))


def nested_v1(root: Path) -> Machine:
    files = v1("user/me", f"{64 * GiB}\n", 18 * GiB) | v1("user", f"{32 * GiB}\n", 30 * GiB) | v1(".", V1_UNLIMITED, 300 * GiB)
    return Machine(root, V1_MOUNTS.format(shown="/"), "9:memory:/user/me\n0::/\n", files)


def bare(root: Path) -> Machine:
    """A machine where nothing is limited."""
    files = v1(".", V1_UNLIMITED, 300 * GiB)
    return Machine(root, V1_MOUNTS.format(shown="/"), "9:memory:/\n0::/\n", files)


@pytest.mark.parametrize(
    ("machine", "gib"),
    [
        (container_v2, 32 - 18 + 4.5),
        (job_v2, 100 - 20 + 4.5),
        (container_v1, 32 - 18 + 4),
        (nested_v1, 32 - 30 + 4),
        (bare, 448),
        (lambda root: Machine(root, "", ""), 448),
    ],
    ids=["container v2", "job v2", "container v1", "nested v1", "bare", "no cgroups"],
)
def test_the_tightest_limit_counts_and_the_page_cache_does_not(tmp_path, machine, gib):
    assert host_limit(machine(tmp_path).make()) == gib * GiB


def test_a_soft_limit_counts_because_the_kernel_stalls_whoever_passes_it(tmp_path):
    root = container_v2(tmp_path).make()
    (root / "sys/fs/cgroup/memory.high").write_text(f"{24 * GiB}\n")
    assert host_limit(root) == (24 - 18 + 4.5) * GiB


def test_this_machine_has_memory():
    here = limits()
    assert here[0].whose == MACHINE
    assert 0 < host_limit() <= here[0].free + (1 << 30)  # others allocate meanwhile


def test_too_much_is_refused_with_all_ranks_counted(tmp_path):
    root = container_v1(tmp_path).make()
    refuse_more_than(9 * GiB, 2, "optimizer state", root)
    with pytest.raises(FullshardError) as caught:
        refuse_more_than(10 * GiB, 2, "optimizer state", root)
    assert str(caught.value) == (
        "optimizer state takes 10.00 GiB of host memory for each of 2 ranks, but 18.00 GiB of the 32.00 GiB of the cgroup"
        f" {root}/sys/fs/cgroup/memory are free; keep less in host memory, or use a machine with more"
    )


@pytest.mark.parametrize("machine", [container_v1, container_v2])
def test_a_kill_for_memory_is_told_from_any_other(tmp_path, machine):
    before = kills(machine(tmp_path, kills=2).make())
    assert before[MACHINE] == 3
    assert 2 in before.values()
    assert "by somebody" in explain_kill(before, tmp_path)
    machine(tmp_path, kills=3).make()
    said = explain_kill(before, tmp_path)
    assert said.startswith("the kernel killed it for want of host memory: 32.00 GiB is the limit of the cgroup")


def test_a_kill_elsewhere_on_the_machine_is_only_a_hint(tmp_path):
    before = kills(container_v2(tmp_path).make())
    (tmp_path / "proc/vmstat").write_text(VMSTAT.replace("oom_kill 3", "oom_kill 4"))
    assert explain_kill(before, tmp_path).startswith("the kernel was killing for want of host memory on this machine")


def test_without_counts_nothing_is_claimed(tmp_path):
    root = Machine(tmp_path, "", "").make()
    (root / "proc/vmstat").unlink()
    assert explain_kill(kills(root), root) == "the machine may be out of memory"
