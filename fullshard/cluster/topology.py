"""The cluster: facts about hardware, nominal and measured.

Nominal numbers are the makers' (`fullshard.cluster.hardware`). Measured ones were timed on the machine itself and come
first; every answer can say which of the two it is. Knows nothing of plans. Standard library only.
"""

import dataclasses
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from fullshard.base.errors import FullshardError, nearest
from fullshard.base.reading import is_plain_file, parse_json, read_text
from fullshard.base.text import bytes_text, rate_text, seconds_text, table
from fullshard.cluster.calibration import Calibration, calibration_of
from fullshard.cluster.hardware import (
    DEVICES,
    NETWORKS,
    NODES,
    ClusterError,
    Device,
    Host,
    Link,
    Node,
    PeakFlops,
    check_one_of,
    check_positive,
)
from fullshard.cluster.measured import Measured, MeasuredAttention, MeasuredGemm

__all__ = ["Cluster", "ClusterError", "Device", "Host", "Link", "Measured", "Node", "PeakFlops"]

VERSION = 1
MOST_DEVICES = 16384
NAME = re.compile(r"([0-9]+)x([a-z][a-z0-9]*)", re.I)

Source = Literal["measured", "nominal"]
PACES = ("launch", "issued", "checkpointed", "saved", "dispatched")  # the host's seconds to issue parts of a step
Quantity = Literal[
    "memory",
    "hbm",
    "pointwise",
    "launch",
    "issued",
    "checkpointed",
    "saved",
    "dispatched",
    "quiet",
    "host_memory",
    "pcie_up",
    "pcie_down",
    "pcie_both",
    "dram",
    "adamw",
    "pcie_beside",
    "adamw_beside",
    "disk_read",
    "disk_write",
    "disk_both",
    "disk",
]


NOMINAL: dict[Quantity, tuple[str, Callable[[Device, Host], float], Callable[[float], str]]] = {
    "memory": ("device memory", lambda d, h: d.memory, bytes_text),
    "hbm": ("memory bandwidth", lambda d, h: d.hbm * d.hbm_efficiency, lambda x: rate_text(x, "B/s")),
    "pointwise": ("pointwise kernels", lambda d, h: _nominal_pointwise(d), lambda x: rate_text(x, "B/s")),
    "launch": ("kernel launch", lambda d, h: d.launch, seconds_text),
    "issued": (
        "issuing an operation",
        lambda d, h: d.launch * calibration_of(d).remat_dispatch * calibration_of(d).op_dispatches,
        seconds_text,
    ),
    "checkpointed": ("entering a remat region", lambda d, h: d.launch * calibration_of(d).remat_region, seconds_text),
    "saved": ("saving a tensor there", lambda d, h: d.launch * calibration_of(d).remat_saved_tensor, seconds_text),
    "dispatched": ("selective remat, an op", lambda d, h: d.launch * calibration_of(d).remat_dispatch, seconds_text),
    "quiet": ("these on a quiet core", lambda d, h: 1.0, lambda x: f"{x:.0%}"),
    "host_memory": ("host memory", lambda d, h: h.memory, bytes_text),
    "pcie_up": ("host to device", lambda d, h: h.pcie_up, lambda x: rate_text(x, "B/s")),
    "pcie_down": ("device to host", lambda d, h: h.pcie_down, lambda x: rate_text(x, "B/s")),
    "pcie_both": ("both at once", lambda d, h: h.pcie_both, lambda x: rate_text(x, "B/s")),
    "dram": ("host memory bandwidth", lambda d, h: h.dram, lambda x: rate_text(x, "B/s")),
    "adamw": ("CPU AdamW, a parameter", lambda d, h: h.adamw, seconds_text),
    "pcie_beside": (
        "both, beside CPU AdamW",
        lambda d, h: h.pcie_both * calibration_of(d).shared_dram,
        lambda x: rate_text(x, "B/s"),
    ),
    "adamw_beside": ("CPU AdamW beside both", lambda d, h: h.adamw / calibration_of(d).shared_dram, seconds_text),
    "disk_read": ("disk read", lambda d, h: h.disk_read, lambda x: rate_text(x, "B/s")),
    "disk_write": ("disk write", lambda d, h: h.disk_write, lambda x: rate_text(x, "B/s")),
    "disk_both": ("disk, both at once", lambda d, h: _in_turn(h.disk_read, h.disk_write), lambda x: rate_text(x, "B/s")),
    "disk": ("disk space", lambda d, h: h.disk, bytes_text),
}


# Quantities that were not measured themselves follow from others, by the calibration.
DERIVED: dict[Quantity, Callable[[Callable[[Quantity], float], Calibration], float]] = {
    "checkpointed": lambda of, fitted: fitted.remat_region * of("launch"),
    "saved": lambda of, fitted: fitted.remat_saved_tensor * of("launch"),
    "dispatched": lambda of, fitted: fitted.remat_dispatch * of("launch"),
    "issued": lambda of, fitted: fitted.op_dispatches * of("dispatched"),
    "pcie_beside": lambda of, fitted: fitted.shared_dram * of("pcie_both"),
    "adamw_beside": lambda of, fitted: of("adamw") / fitted.shared_dram,
    "disk_both": lambda of, fitted: _in_turn(of("disk_read"), of("disk_write")),
}


def _nominal_pointwise(device: Device) -> float:
    return device.hbm * device.hbm_efficiency * calibration_of(device).pointwise_bandwidth


def _in_turn(read: float, write: float) -> float:
    """Bytes a second of a disk that reads and writes as many bytes, one after the other."""
    return 2 / (1 / read + 1 / write)


@dataclass(frozen=True)
class Cluster:
    """`devices` of one kind on nodes, of which the last may be partly filled. `network`: the link between nodes; its bandwidth
    is one device's share of its node's adapters."""

    devices: int
    device: Device
    node: Node
    network: Link
    measured: Measured | None = None

    def __post_init__(self) -> None:
        check_positive(self, "cluster")
        if self.devices > MOST_DEVICES:
            raise ClusterError(f"a cluster has at most {MOST_DEVICES} devices, not {self.devices}")

    @property
    def name(self) -> str:
        return f"{self.devices}x{self.device.name}"

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.node.devices)

    @property
    def calibration(self) -> Calibration:
        """The fitted numbers that the planner uses for these devices."""
        return calibration_of(self.device)

    # -- questions ---------------------------------------------------------------------------------

    def nominal(self, quantity: Quantity) -> float:
        """The number of the datasheet, times the share of it that is reached in practice."""
        if quantity not in NOMINAL:
            raise ClusterError(f"a cluster has no quantity {quantity!r}{nearest(quantity, list(NOMINAL))}")
        return NOMINAL[quantity][1](self.device, self.node.host)

    def of(self, quantity: Quantity) -> float:
        """The measured value if there is one, else the nominal: bytes, bytes a second, seconds or a share."""
        nominal = self.nominal(quantity)
        rate = getattr(self.measured, quantity, None)
        if rate is None and quantity in DERIVED:
            return DERIVED[quantity](self.of, self.calibration)
        return nominal if rate is None else rate

    def source_of(self, quantity: Quantity | Literal["gemm", "attention"], dtype: str = "bf16") -> Source:
        """`measured` or `nominal`: where the value of a quantity comes from. `dtype` matters to `gemm` and `attention` only."""
        if quantity == "gemm":
            return "measured" if self._gemms(dtype) else "nominal"
        if quantity == "attention":
            return "measured" if self._attention(dtype) else "nominal"
        self.nominal(quantity)
        return "nominal" if getattr(self.measured, quantity, None) is None else "measured"

    def peak(self, dtype: str) -> float:
        """Dense flops a second of the datasheet. fp16 has the rate of bf16."""
        name = "bf16" if dtype == "fp16" else dtype
        known = [f.name for f in dataclasses.fields(PeakFlops)]
        check_one_of("dtype", name, tuple(known))
        value = getattr(self.device.peak, name)
        if value is None:
            raise ClusterError(
                f"device {self.device.name} has no published rate for {dtype}; write peak.{name} in a cluster file"
            )
        return value

    def gemm_rate(self, flops: float, dtype: str = "bf16") -> float:
        """Flops a second of a compute-bound matrix product of so many flops."""
        points = self._gemms(dtype)
        if not points:
            return self.peak(dtype) * self.device.efficiency
        return _interpolate([(g.flops, g.rate) for g in points], flops)

    def attention_rate(self, sequence: int, width: int = 128, dtype: str = "bf16") -> tuple[float, float]:
        """Flops a second of fused causal attention with heads of `width`, forward and backward. Only the causal half of the
        flops counts."""
        timed = self._attention(dtype)
        if not timed:
            return self._nominal_attention(sequence, width, self.peak(dtype) * self.device.efficiency)
        close = min((a.width for a in timed), key=lambda w: abs(w - width))
        points = [a for a in timed if a.width == close]
        forward = _interpolate([(a.sequence, a.forward) for a in points], sequence)
        return forward, _interpolate([(a.sequence, a.backward) for a in points], sequence)

    def _nominal_attention(self, sequence: int, width: int, gemm_rate: float) -> tuple[float, float]:
        """As `attention_rate`. On a GPU tiles of heads are 64 or 128 wide, and up to 64 exponentials take the time, whatever the
        width. Short sequences compute whole tiles of which causal attention needs half."""
        fitted = self.calibration
        if self.device.kind == "cpu":
            share = fitted.attention_narrow_heads if width < 128 else 1.0
        else:
            share = fitted.attention_narrow_heads * width / 64 if width <= 64 else min(width / 128, 1.0)
        rate = gemm_rate * share
        forward = rate * fitted.attention_forward * sequence / (sequence + fitted.attention_short_forward)
        backward = rate * fitted.attention_backward * sequence / (sequence + fitted.attention_short_backward)
        return forward, backward * (fitted.attention_wide_heads if width > 128 else 1.0)

    def _gemms(self, dtype: str) -> list[MeasuredGemm]:
        """The measured products that are compute-bound; all of them if none is."""
        if self.measured is None or not _same(self.measured.dtype, dtype):
            return []
        item, hbm = (4 if self.measured.dtype == "fp32" else 2), self.of("hbm")
        bound = [g for g in self.measured.gemms if g.bytes(item) / hbm < g.seconds / 2]
        return bound or list(self.measured.gemms)

    def _attention(self, dtype: str) -> tuple[MeasuredAttention, ...]:
        return self.measured.attention if self.measured is not None and _same(self.measured.dtype, dtype) else ()

    def with_host(self, share: float) -> Self:
        """The cluster with hosts that take `share` times as long to issue work."""
        timed = {name: seconds for name in PACES if (seconds := getattr(self.measured, name, None)) is not None}
        measured = self.measured and dataclasses.replace(
            self.measured, **{name: share * seconds for name, seconds in timed.items()}
        )
        device = dataclasses.replace(self.device, launch=share * self.device.launch)
        return dataclasses.replace(self, device=device, measured=measured)

    def with_disk(self, nbytes: int) -> Self:
        """The cluster with so many bytes of disk for each device."""
        host = dataclasses.replace(self.node.host, disk=nbytes)
        measured = self.measured and dataclasses.replace(self.measured, disk=None)
        return dataclasses.replace(self, node=dataclasses.replace(self.node, host=host), measured=measured)

    # -- the other forms of a cluster ---------------------------------------------------------------

    @classmethod
    def named(cls, name: str) -> Self:
        """The preset of a name such as `64xh100`."""
        match = NAME.fullmatch(name)
        if match is None:
            raise ClusterError(_not_a_name(name))
        count, device = int(match[1]), match[2].lower()
        if device not in DEVICES:
            raise ClusterError(f"unknown device {device!r}{nearest(device, list(DEVICES))} (known: {', '.join(DEVICES)})")
        if not 1 <= count <= MOST_DEVICES:
            raise ClusterError(f"{name}: a cluster has 1 to {MOST_DEVICES} devices; write 1x{device} or 8x{device}")
        return cls(count, DEVICES[device], NODES[device], NETWORKS[device])

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """A preset such as `64xh100`, or the JSON file of a cluster."""
        path = Path(name_or_path)
        if isinstance(name_or_path, str) and not is_plain_file(path) and not re.search(r"[/\\]|\.json$", name_or_path):
            return cls.named(name_or_path)
        try:
            text = read_text(path, "cluster")
        except FullshardError as error:
            raise ClusterError(error) from None
        try:
            return cls.from_json(text)
        except ClusterError as error:
            raise ClusterError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            data = parse_json(text)
        except FullshardError as error:
            raise ClusterError(error) from None
        return cls.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """The cluster that `to_dict` wrote. Raise one sentence for anything unknown, missing or of another version."""
        if not isinstance(data, dict):
            raise ClusterError(f"a cluster is a JSON object, not {type(data).__name__}")
        version = data.get("version")
        if type(version) is not int or version != VERSION:
            raise ClusterError(f"cluster version {version!r} is not known here; this fullshard reads version {VERSION}")
        return _build(cls, "cluster", {k: v for k, v in data.items() if k != "version"})

    # -- for people ----------------------------------------------------------------------------------

    def __str__(self) -> str:
        rows = [["matrix products, large", *self._cells(self._nominal_gemm(), self._best_gemm(), _flops_text)]]
        for quantity, (words, _, text) in NOMINAL.items():
            rows.append([words, *self._cells(self.nominal(quantity), getattr(self.measured, quantity, None), text)])
        for c in self.measured.collectives if self.measured else ():
            speed = f"{rate_text(c.bandwidth, 'B/s')} + {seconds_text(c.latency)}"
            rows.append([f"{c.kind} over {c.ranks}", "", speed])
        notes = [f"note: {n}" for n in (self.measured.notes if self.measured else ())]
        return "\n".join([*self._head(), "", table(["one device", "nominal", "measured"], rows, right=(1, 2)), *notes])

    def _head(self) -> list[str]:
        full, rest = divmod(self.devices, self.node.devices)
        last = f", the last with {rest}" if full and rest else ""
        inner, outer = self.node.link, self.network
        lines = [
            f"cluster  {self.name}, on {self.nodes} node{'s' if self.nodes > 1 else ''} of up to {self.node.devices}{last}",
            f"inside   {inner.name}, {rate_text(inner.bandwidth, 'B/s')} a device each way, {inner.efficiency:.0%} reached",
            f"between  {outer.name}, {rate_text(outer.bandwidth, 'B/s')} a device each way, {outer.efficiency:.0%} reached",
        ]
        return lines + ([f"measured on {self.measured.machine}"] if self.measured else [])

    def _nominal_gemm(self) -> float | None:
        peak = getattr(self.device.peak, self.measured.dtype if self.measured else "bf16")
        return None if peak is None else peak * self.device.efficiency

    def _best_gemm(self) -> float | None:
        return max((g.rate for g in self.measured.gemms), default=None) if self.measured else None

    @staticmethod
    def _cells(nominal: float | None, measured: float | None, text: Callable[[float], str]) -> list[str]:
        return ["–" if x is None else text(x) for x in (nominal, measured)]


def _flops_text(rate: float) -> str:
    return rate_text(rate, "FLOP/s")


def _same(measured: str, asked: str) -> bool:
    return measured == ("bf16" if asked == "fp16" else asked)


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly in log x; constant outside the points. Points at the same x count as their mean."""
    at: dict[float, list[float]] = {}
    for key, y in points:
        at.setdefault(key, []).append(y)
    line = [(k, sum(ys) / len(ys)) for k, ys in sorted(at.items())]
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)
    return line[0][1] if x < line[0][0] else line[-1][1]


def _not_a_name(name: str) -> str:
    device = name.rpartition("x")[2] if re.match(r"[\d.+-]", name) else name
    close = next((d for d in DEVICES if d == device.lower()), None) or "h100"
    return f"{name!r} is not a cluster; write a count and a device, as in 8x{close}, or the path of a cluster's JSON file"


def _build(kind: Any, where: str, value: object) -> Any:
    """`value`, read from JSON, as the type `kind`: a dataclass, a tuple, an optional or a plain value."""
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, where, value)
    options, origin = get_args(kind), typing.get_origin(kind)
    if origin is types.UnionType:
        return None if value is None else _build(next(o for o in options if o is not type(None)), where, value)
    if origin is tuple:
        if not isinstance(value, list):
            raise ClusterError(f"{where} must be a list, not {value!r}")
        return tuple(_build(options[0], f"{where}[{i}]", v) for i, v in enumerate(value))
    if kind is str and not isinstance(value, str):
        raise ClusterError(f"{where} must be a string, not {value!r}")
    return value  # numbers and words are checked by the dataclass that holds them


def _dataclass(kind: Any, where: str, data: object) -> Any:
    if not isinstance(data, dict):
        raise ClusterError(f"{where} must be an object, not {data!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in data:
        if key not in fields:
            raise ClusterError(f"{where} has an unknown key {key!r}{nearest(str(key), list(fields))}")
    for name, f in fields.items():
        if name not in data and f.default is dataclasses.MISSING:
            raise ClusterError(f"{where} lacks the key {name!r}")
    hints = typing.get_type_hints(kind)
    return kind(**{k: _build(hints[k], k if where == "cluster" else f"{where}.{k}", v) for k, v in data.items()})
