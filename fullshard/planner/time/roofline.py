"""Seconds that a section of a trace keeps a device busy: a roofline for each operation."""

from dataclasses import dataclass, replace

from fullshard.cluster.cluster import Cluster, Quantity
from fullshard.model.costs import TENSOR_AXIS, Calls, Op, Section, evaluate
from fullshard.planner.time.collectives import collective_seconds

REMAT: tuple[Quantity, ...] = ("checkpointed", "saved", "dispatched")  # the paces of `Calls`, in its order
# Of a GPU's copy rate: kernels over a vocabulary's worth of logits go through memory in one sweep; those of a block, which
# broadcast, transpose and cast, do not.
SWEEP = 0.89
# What kernels reach, as a profiler saw them on an H200 (benchmarks/results/2026-11-16-kernels-h200.json): those that widen what
# they read, as bf16 gradients on their way into a buffer of fp32; those over a list of tensors (the norm, scaling by it, a buffer
# as wide as what goes into it); and AdamW, which has five lists.
WIDENING, LISTED, UPDATING = 0.45, 0.84, 0.66
ISSUED_BY_CPU = 3.0  # launches of an operation: a CPU launches by doing it
SMALLEST = 2e-6  # seconds: a kernel that does next to nothing
# Of the rates that kernels reach when each is timed alone, what is left of them inside a step, where caches are cold and
# clocks follow all of them: from 30 steps on an H200. Nominal efficiencies are those of steps already.
TOGETHER = 0.93
# GPUs multiply rows that begin at multiples of 16 bytes; others (a vocabulary of 50,257) take older, slower kernels.
ALIGNED, UNALIGNED = 8, 0.16


@dataclass(frozen=True)
class Work:
    """`seconds` on the device by kind, and how many kernels the host has to launch for them; those of collectives of the
    tensor axis, for which the device waits, apart. `python`: seconds of the host's for remat, beside launching."""

    gemm: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    kernels: float = 0.0
    tensor: float = 0.0
    python: float = 0.0

    @property
    def seconds(self) -> float:
        return self.gemm + self.attention + self.pointwise


class Machine:
    """One device of a cluster at work in one dtype."""

    def __init__(self, cluster: Cluster, dtype: str, *, tensor: int = 1):
        self.cluster, self.dtype, self.tensor = cluster, dtype, tensor
        self.hbm, self.pointwise = cluster.of("hbm"), cluster.of("pointwise")
        self.region, self.saved, self.dispatched = (cluster.of(q) for q in REMAT)
        cpu = cluster.device.kind == "cpu"
        self.sweep = self.pointwise if cpu else SWEEP * self.hbm
        self.adding = self.hbm if cpu else self.pointwise
        self.joining = (WIDENING if cpu else LISTED) * self.hbm  # a CPU pads and copies
        self.listing, self.updating = (self.hbm, self.hbm) if cpu else (LISTED * self.hbm, UPDATING * self.hbm)
        self.issued = ISSUED_BY_CPU * cluster.of("launch") if cpu else cluster.of("issued")
        self.together = TOGETHER if cluster.measured and cluster.device.kind == "cuda" else 1.0
        self.least = SMALLEST if cluster.device.kind == "cuda" else 0.0
        self.known: dict[tuple[int, int, int, bool, bool], Work] = {}

    def section(self, section: Section, rows: int, tokens: int, *, backward: bool, chunk: bool = False) -> Work:
        """What a section of a trace takes at a batch shape; `chunk` if it is the loss of a chunk of tokens."""
        key = (id(section), rows, tokens, backward, chunk)
        if key not in self.known:
            self.known[key] = self._section(section, rows, tokens, backward, chunk)
        return self.known[key]

    def _section(self, section: Section, rows: int, tokens: int, backward: bool, chunk: bool) -> Work:
        totals = {"gemm": 0.0, "attention": 0.0, "pointwise": 0.0}
        kernels = waited = 0.0
        for op in section.ops:
            if op.kind in TENSOR_AXIS:
                kernels += op.count
                waited += collective_seconds(op.kind, evaluate(op.moved, rows, tokens), self.tensor, self.cluster)  # type: ignore[arg-type]
                continue
            op = self._here(op, backward)
            totals[op.kind] += self._seconds(op, rows, tokens, backward, chunk)
            kernels += op.count
        on_device = {kind: seconds / self.together for kind, seconds in totals.items()}
        return Work(**on_device, kernels=kernels, tensor=waited, python=self._python(section.calls))

    def _python(self, calls: Calls) -> float:
        return calls.regions * self.region + calls.saved * self.saved + calls.dispatched * self.dispatched

    def _here(self, op: Op, backward: bool) -> Op:
        """CPUs have fused attention for every dtype and head. Where the trace, which is of CUDA's kernels, has products
        and a softmax instead, they are what grows with the square of the sequence."""
        if self.cluster.device.kind != "cpu" or op.kind == "attention" or not (op.flops[5] or op.moved[5]):
            return op
        linear = (*op.moved[:5], 0)
        if op.kind == "pointwise":
            return replace(op, moved=linear)
        products = 5 if backward else 4  # fused, backward computes one of its four again
        flops = (0, 0, 0, 0, 0, op.flops[5] * products // 4)
        width = next((s for s in op.shape if not any(s[1:])), op.shape[-1])
        return Op("attention", flops, linear, (width, *op.shape[1:]), op.count)

    def _seconds(self, op: Op, rows: int, tokens: int, backward: bool, chunk: bool) -> float:
        flops, moved = evaluate(op.flops, rows, tokens), evaluate(op.moved, rows, tokens)
        least = self.least * op.count
        if op.kind == "pointwise":
            return max(moved / (self.sweep if chunk else self.pointwise), least)
        shape = [evaluate(s, rows, tokens) for s in op.shape]
        if op.kind == "gemm":
            rate = self.cluster.gemm_rate(flops / op.count, self.dtype)
            if self.least and any(n % ALIGNED for n in shape):
                rate *= UNALIGNED
            return max(flops / rate, moved / self.hbm, least)
        rate = self.cluster.attention_rate(tokens, shape[0] if shape else 128, self.dtype)[backward]
        return max(flops / 2 / rate, moved / self.hbm, least)  # causal: half of the products are never computed

    def add(self, nbytes: float) -> float:
        """Seconds to add tensors that have, with their sum, so many bytes."""
        return nbytes / self.adding

    def join(self, elements: float, read: int, written: int) -> float:
        """Seconds to bring gradients into a buffer, of so many bytes an element here and there."""
        return elements * (read + written) / (self.joining if read == written else WIDENING * self.hbm)

    def sweep_list(self, nbytes: float) -> float:
        """Seconds of a kernel that goes through lists of tensors of so many bytes."""
        return nbytes / self.listing

    def update(self, nbytes: float) -> float:
        """Seconds of an update that reads and writes so many bytes."""
        return nbytes / self.updating

    def copy(self, nbytes: float) -> float:
        """Seconds to read and write so many bytes on the device."""
        return nbytes / self.hbm
