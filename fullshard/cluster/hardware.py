"""Devices, links, hosts and nodes, and the known ones with their published numbers.

Nominal facts only: what was timed is in `fullshard.cluster.measured`. The source of each number, and which are assumptions,
is in docs/reference/cluster.md. Standard library only.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, get_args

from fullshard.base.errors import FullshardError, nearest

DeviceKind = Literal["cuda", "cpu", "tpu"]
Topology = Literal["switch", "mesh", "torus2", "torus3"]

GiB = 1 << 30
SMALLEST, LARGEST = 1e-30, 1e24  # bounds of every number, in its own unit
Tera = 1e12
DISK = 10**12  # bytes of a device's share of a disk, where a file does not say
ADAMW_BYTES = 28  # a parameter: fp32 AdamW reads parameter, gradient and two moments, and writes all but the gradient


class ClusterError(FullshardError):
    """A cluster, or a part of one, that makes no sense."""


@dataclass(frozen=True)
class PeakFlops:
    """Dense flops a second by dtype; None where the maker publishes none."""

    bf16: float
    fp32: float | None = None
    tf32: float | None = None
    fp8: float | None = None

    def __post_init__(self) -> None:
        check_positive(self, "peak")

    @property
    def fastest(self) -> Literal["bf16", "fp32"]:
        """The dtype that training computes in the fastest. Float8 is none of them: it is approximate, and for products alone."""
        return "bf16" if self.bf16 > (self.fp32 or 0.0) else "fp32"

    @property
    def training(self) -> float:
        """Dense flops a second in the fastest dtype of training, which utilisation counts against."""
        return max(self.bf16, self.fp32 or 0.0)


@dataclass(frozen=True)
class Device:
    """A device.

    `memory`: bytes that the driver reports, which is less than the label says. CUDA's context and the buffers of
    collectives come out of it. `hbm`: bytes a second, reads and writes together. `efficiency`, `hbm_efficiency`: shares of
    `peak` and of `hbm` that large matrix products and copies reach. `launch`: seconds from one tiny kernel to the next in
    an eager program. `price`: of one device for an hour, in any currency.
    """

    name: str
    kind: DeviceKind
    memory: int
    peak: PeakFlops
    hbm: float
    efficiency: float
    hbm_efficiency: float
    launch: float
    price: float | None = None

    def __post_init__(self) -> None:
        check_positive(self, f"device {self.name}")
        check_one_of(f"device {self.name}: kind", self.kind, get_args(DeviceKind))
        check_share(f"device {self.name}: efficiency", self.efficiency)
        check_share(f"device {self.name}: hbm_efficiency", self.hbm_efficiency)


@dataclass(frozen=True)
class Link:
    """A link between devices.

    `bandwidth`: bytes a second that a device sends while it receives as many. `efficiency`: the share of it that large
    collectives reach. `latency`: seconds a hop. `start`: seconds before the first byte of a collective moves. `topology`:
    on a `mesh` every pair of devices has its own wire, so a group uses only the wires between its members; on a torus a
    group is a compact block that uses every axis.
    """

    name: str
    bandwidth: float
    latency: float
    efficiency: float
    start: float
    topology: Topology = "switch"

    def __post_init__(self) -> None:
        check_positive(self, f"link {self.name}")
        check_share(f"link {self.name}: efficiency", self.efficiency)
        check_one_of(f"link {self.name}: topology", self.topology, get_args(Topology))


@dataclass(frozen=True)
class Host:
    """One device's share of the machine it sits in, in bytes, bytes a second and seconds.

    `pcie_up`: host to device; `pcie_down`: device to host; `pcie_both`: the sum of both ways at once. `dram`: reads and
    writes together. `adamw`: seconds of an fp32 AdamW update by these cores, for each parameter. `disk`: bytes of disk.
    """

    memory: int
    cores: int
    pcie_up: float
    pcie_down: float
    pcie_both: float
    dram: float
    adamw: float
    disk_read: float
    disk_write: float
    disk: int = DISK

    def __post_init__(self) -> None:
        check_positive(self, "host")


@dataclass(frozen=True)
class Node:
    """`devices` that reach each other over the inner `link`: a server, an NVLink rack or a TPU pod."""

    devices: int
    link: Link
    host: Host

    def __post_init__(self) -> None:
        check_positive(self, "node")


def check_positive(part: object, where: str) -> None:
    """Raise unless every number of a dataclass is finite and above zero, and whole where its type is int."""
    for f in dataclasses.fields(part):  # type: ignore[arg-type]
        value, hint = getattr(part, f.name), f.type
        if hint not in (int, float, int | None, float | None) or (value is None and hint not in (int, float)):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ClusterError(f"{where}: {f.name} must be a number above zero, not {value!r}")
        if not SMALLEST <= value <= LARGEST:
            raise ClusterError(f"{where}: {f.name} must be a number from {SMALLEST:g} to {LARGEST:g}")
        if hint in (int, int | None) and not isinstance(value, int):
            raise ClusterError(f"{where}: {f.name} must be a whole number, not {value!r}")


def check_share(name: str, value: float) -> None:
    if value > 1:
        raise ClusterError(f"{name} = {value} must be a share of the nominal rate, at most 1")


def check_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ClusterError(f"{name} must be one of {', '.join(known)}, not {value!r}{nearest(str(value), list(known))}")


# -- known hardware -----------------------------------------------------------------------------------


def _gpu(
    name: str,
    gib: float,
    peak: PeakFlops,
    hbm: float,
    efficiency: float,
    *,
    hbm_efficiency: float = 0.9,
    kind: DeviceKind = "cuda",
) -> Device:
    return Device(name, kind, int(gib * GiB), peak, hbm, efficiency, hbm_efficiency, launch=5e-6 if kind == "cuda" else 1e-6)


def _tera(bf16: float, fp32: float | None = None, tf32: float | None = None, fp8: float | None = None) -> PeakFlops:
    scaled = [None if x is None else x * Tera for x in (fp32, tf32, fp8)]
    return PeakFlops(bf16 * Tera, *scaled)


def _link(kind: str, bandwidth: float, efficiency: float, topology: Topology = "switch") -> Link:
    latency, start = LATENCY[kind]
    return Link(kind, bandwidth, latency, efficiency, start, topology)


def _host(memory: float, cores: int, pcie: tuple[float, float], dram: float, disk: tuple[float, float, float]) -> Host:
    """`pcie`: one way, and both ways together; `disk`: read, write, and its bytes."""
    read, write, nbytes = disk
    return Host(int(memory), cores, pcie[0], pcie[0], pcie[1], dram, ADAMW_BYTES / dram, read, write, int(nbytes))


# Seconds a hop and seconds before the first byte: those of NCCL's tuner for large messages, where it has them.
LATENCY = {
    "nvlink": (1.9e-6, 8.4e-6),
    "xgmi": (1.9e-6, 8.4e-6),
    "pcie": (5.7e-6, 8.4e-6),
    "infiniband": (9.6e-6, 8.4e-6),
    "ethernet": (15e-6, 8.4e-6),
    "ici": (1e-6, 1e-6),
    "loopback": (100e-6, 200e-6),
    "ethernet-tcp": (200e-6, 200e-6),
}
# Sustained bytes a second of 16 PCIe lanes, one way and both together. Grace is connected by chip-to-chip NVLink.
GEN4, GEN5, CHIP2CHIP = (25e9, 43e9), (55e9, 94e9), (200e9, 360e9)
# Disks, assumed: bytes a second read and written, and bytes of one device's share. An NVMe drive of a server is 3.84 TB.
NVME4, NVME5, CONSUMER, CLOUD = (3e9, 1.5e9, 3.84e12), (6e9, 3e9, 3.84e12), (3e9, 1.5e9, 1e12), (1e9, 0.5e9, 100e9)

DEVICES = {
    d.name: d
    for d in (
        _gpu("a100", 79.1, _tera(312, 19.5, 156), 2.039e12, 0.85),
        _gpu("h100", 79.1, _tera(989.4, 66.9, 494.7, 1978.9), 3.35e12, 0.75),
        _gpu("h100e", 94.5, _tera(989.4, 66.9, 494.7, 1978.9), 2.4e12, 0.5),
        _gpu("h200", 139.7, _tera(989.4, 66.9, 494.7, 1978.9), 4.8e12, 0.75),
        _gpu("b200", 178.3, _tera(2250, 75, 1125, 4500), 8e12, 0.75),
        _gpu("gb200", 184, _tera(2500, 80, 1250, 5000), 8e12, 0.75),
        _gpu("mi300x", 191.9, _tera(1307.4, 163.4, 653.7, 2614.9), 5.3e12, 0.5, hbm_efficiency=0.8),
        _gpu("l40s", 44.4, _tera(362.05, 91.6, 183, 733), 0.864e12, 0.65),
        _gpu("rtx4090", 23.6, _tera(165.2, 82.6, 82.6, 330.3), 1.008e12, 0.9),
        _gpu("v5p", 95, _tera(459, fp8=459), 2.765e12, 0.85, kind="tpu"),
        _gpu("v6e", 31.2, _tera(918, fp8=918), 1.64e12, 0.85, kind="tpu"),
        Device("cpu", "cpu", 8 * GiB, _tera(0.05, 0.15), 12e9, 0.7, 0.8, launch=7e-6),
    )
}
NODES = {
    "a100": Node(8, _link("nvlink", 300e9, 0.78), _host(256e9, 16, GEN4, 51.2e9, NVME4)),
    "h100": Node(8, _link("nvlink", 450e9, 0.8), _host(256e9, 14, GEN5, 76.8e9, NVME5)),
    "h100e": Node(8, _link("nvlink", 450e9, 0.8), _host(256e9, 14, GEN5, 76.8e9, NVME5)),
    "h200": Node(8, _link("nvlink", 450e9, 0.8), _host(256e9, 14, GEN5, 76.8e9, NVME5)),
    "b200": Node(8, _link("nvlink", 900e9, 0.75), _host(256e9, 14, GEN5, 89.6e9, NVME5)),
    "gb200": Node(72, _link("nvlink", 900e9, 0.75), _host(240e9, 36, CHIP2CHIP, 256e9, NVME5)),
    "mi300x": Node(8, _link("xgmi", 448e9, 0.7, "mesh"), _host(288e9, 24, GEN5, 115.2e9, NVME5)),
    "l40s": Node(8, _link("pcie", 31.5e9, 0.6), _host(128e9, 16, GEN4, 51.2e9, CONSUMER)),
    "rtx4090": Node(8, _link("pcie", 31.5e9, 0.4), _host(64e9, 8, GEN4, 51.2e9, CONSUMER)),
    "v5p": Node(8960, _link("ici", 600e9, 0.9, "torus3"), _host(112e9, 26, GEN4, 51.2e9, CLOUD)),
    "v6e": Node(256, _link("ici", 400e9, 0.9, "torus2"), _host(180e9, 22, GEN5, 76.8e9, CLOUD)),
    "cpu": Node(8, _link("loopback", 1e9, 0.8), _host(8e9, 1, (5e9, 6e9), 12e9, CLOUD)),
}
NETWORKS = {
    "a100": _link("infiniband", 25e9, 0.94),
    "h100": _link("infiniband", 50e9, 0.94),
    "h100e": _link("infiniband", 50e9, 0.94),
    "h200": _link("infiniband", 50e9, 0.94),
    "b200": _link("infiniband", 50e9, 0.94),
    "gb200": _link("infiniband", 50e9, 0.94),
    "mi300x": _link("ethernet", 50e9, 0.9),
    "l40s": _link("ethernet", 12.5e9, 0.85),
    "rtx4090": _link("ethernet", 12.5e9 / 8, 0.85),
    "v5p": _link("ethernet", 6.25e9, 0.85),
    "v6e": _link("ethernet", 12.5e9, 0.85),
    "cpu": _link("ethernet-tcp", 0.125e9 / 8, 0.85),
}
