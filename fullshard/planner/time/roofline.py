"""Seconds of a section of a trace on a device: a roofline for each operation."""

from dataclasses import dataclass, replace

from fullshard.cluster.calibration import HOPPER
from fullshard.cluster.topology import Cluster, Quantity
from fullshard.model.costs import AXIS_COLLECTIVES, Calls, Op, OpKind, Section, evaluate
from fullshard.plan.plan import Float8, Kernels, Mesh
from fullshard.planner.time.collectives import collective_seconds

REMAT: tuple[Quantity, ...] = ("checkpointed", "saved", "dispatched")  # seconds of each field of `Calls`, in its order
# Where the time of each kind of operation is shown. cuDNN computes convolutions as matrix products.
LANES: dict[OpKind, str] = {"gemm": "gemm", "conv": "gemm", "depthwise": "gemm", "attention": "attention"}
LANES |= {"pointwise": "pointwise", "reduction": "pointwise"}
# GPUs multiply rows that begin at multiples of 16 bytes; others (a vocabulary of 50,257) take older, slower kernels.
LARGE = 1e12  # flops of a product that fills any device
BLOCKS_AT_ONCE = 4 * HOPPER.multiprocessors  # of a reduction
ALIGNED = 8  # elements of 2 bytes


@dataclass(frozen=True)
class SectionTime:
    """Seconds of a section on the device by kind. `kernels`: how many the host has to launch. `waits`: seconds of collectives
    of the tensor or expert axis, which the device waits for. `python`: the host's seconds for remat, beside launching."""

    gemm: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    kernels: float = 0.0
    waits: float = 0.0
    python: float = 0.0

    @property
    def seconds(self) -> float:
        return self.gemm + self.attention + self.pointwise


class Machine:
    """One device of a cluster that computes in one dtype, by a plan's choice of kernels."""

    def __init__(
        self,
        cluster: Cluster,
        dtype: str,
        *,
        mesh: Mesh | None = None,
        kernels: Kernels | None = None,
        float8: Float8 | None = None,
    ):
        self.cluster, self.dtype, self.mesh = cluster, dtype, mesh or Mesh()
        self.hbm, self.pointwise = cluster.of("hbm"), cluster.of("pointwise")
        self.region, self.saved, self.dispatched = (cluster.of(q) for q in REMAT)
        fitted, cpu, cuda = cluster.calibration, cluster.device.kind == "cpu", cluster.device.kind == "cuda"
        self.chunked_loss = self.pointwise if cpu else fitted.chunked_loss_bandwidth * self.hbm
        kernels = kernels or Kernels()
        if kernels.loss == "torch" and not cpu:  # a CPU has no other
            self.chunked_loss /= fitted.torch_loss_passes
        self.attention = fitted.flash_attention if kernels.attention == "flash" and not cpu else 1.0
        self.rowwise = fitted.rowwise_gemm if float8 == "rowwise" else 1.0
        self.adding = self.hbm if cpu else self.pointwise
        self.widening, self.listing = fitted.widening_bandwidth * self.hbm, fitted.foreach_bandwidth * self.hbm
        self.joining = self.widening if cpu else self.listing  # a CPU pads and copies
        self.updating = fitted.adamw_bandwidth * self.hbm
        self.issued = fitted.op_launches * cluster.of("launch") if cpu else cluster.of("issued")
        # Measured rates are those of kernels alone. Nominal efficiencies are those inside a step already.
        self.in_step_rate = fitted.in_step_rate if cluster.measured and cuda else 1.0
        self.least = fitted.kernel_floor if cuda else 0.0
        self.block_element = fitted.block_element if cuda else 0.0
        self.depthwise = fitted.depthwise_conv * cluster.gemm_rate(LARGE, dtype)
        self.unaligned = fitted.unaligned_gemm if cuda else 1.0
        self.known: dict[tuple[int, int, int, bool, bool], SectionTime] = {}

    def section(self, section: Section, rows: int, tokens: int, *, backward: bool, chunk: bool = False) -> SectionTime:
        """The time of a section at a batch shape. `chunk`: True for the loss of a chunk of tokens."""
        key = (id(section), rows, tokens, backward, chunk)
        if key not in self.known:
            self.known[key] = self._section(section, rows, tokens, backward, chunk)
        return self.known[key]

    def _section(self, section: Section, rows: int, tokens: int, backward: bool, chunk: bool) -> SectionTime:
        totals = dict.fromkeys(LANES.values(), 0.0)
        kernels = waited = 0.0
        for op in section.ops:
            if op.kind in AXIS_COLLECTIVES:
                kernels += op.count
                ranks = self.mesh.expert if op.kind == "all_to_all" else self.mesh.tensor
                waited += collective_seconds(op.kind, evaluate(op.moved, rows, tokens), ranks, self.cluster)  # type: ignore[arg-type]
                continue
            op = self._on_this_device(op, backward)
            totals[LANES[op.kind]] += self._seconds(op, rows, tokens, backward, chunk)
            kernels += op.count
        on_device = {kind: seconds / self.in_step_rate for kind, seconds in totals.items()}
        return SectionTime(**on_device, kernels=kernels, waits=waited, python=self._python(section.calls))

    def _python(self, calls: Calls) -> float:
        return calls.regions * self.region + calls.saved * self.saved + calls.dispatched * self.dispatched

    def _on_this_device(self, op: Op, backward: bool) -> Op:
        """The operation as this device does it. CPUs have fused attention for every dtype and head.

        A trace has CUDA's kernels. Where those are products and a softmax, they are the ops that grow with the square of the
        sequence, and a CPU has one attention in their place.
        """
        if self.cluster.device.kind == "cpu" and op.kind == "depthwise":
            return replace(op, kind="gemm", shape=())
        if self.cluster.device.kind != "cpu" or op.kind == "attention" or not (op.flops[5] or op.moved[5]):
            return op
        linear = (*op.moved[:5], 0)
        if op.kind == "pointwise":
            return replace(op, moved=linear)
        products = 5 if backward else 4  # backward of fused attention recomputes one of its four
        flops = (0, 0, 0, 0, 0, op.flops[5] * products // 4)
        width = next((s for s in op.shape if not any(s[1:])), op.shape[-1])
        return Op("attention", flops, linear, (width,), op.count)

    def _seconds(self, op: Op, rows: int, tokens: int, backward: bool, chunk: bool) -> float:
        flops, moved = evaluate(op.flops, rows, tokens), evaluate(op.moved, rows, tokens)
        least = self.least * op.count
        if op.kind == "pointwise":
            return max(moved / (self.chunked_loss if chunk else self.pointwise), least)
        shape = [evaluate(s, rows, tokens) for s in op.shape]
        if op.kind == "reduction":
            elements, blocks = shape
            walk = elements * self.block_element * max(1.0, blocks / BLOCKS_AT_ONCE)
            return max(moved / self.pointwise, walk, least)
        if op.kind == "depthwise":
            return max(shape[0] * flops / self.depthwise, moved / self.hbm, least)
        if op.kind in ("gemm", "conv"):
            rate = (self._float8_rate if op.float8 else self._gemm_rate)(flops / op.count)
            if any(n % ALIGNED for n in shape):
                rate *= self.unaligned
            return max(flops / rate, moved / self.hbm, least)
        width = shape[0] if shape else 128
        keys, halves = shape[1:] if len(shape) == 3 else (1, 1)
        # Causal attention never computes half of the products, but for the tiles of the diagonal: fewer of a longer sequence.
        length = (keys if keys > 1 else tokens) * (1 if halves == 1 else 4)
        rate = self.cluster.attention_rate(length, width, self.dtype)[backward]
        return max(halves * flops / 2 / (rate * self.attention), moved / self.hbm, least)

    def _gemm_rate(self, flops: float) -> float:
        return self.cluster.gemm_rate(flops, self.dtype)

    def _float8_rate(self, flops: float) -> float:
        """Products in float8 are taken to reach the share of their peak that those in bf16 reach. A CPU emulates them in fp32."""
        if self.cluster.device.kind == "cpu":
            return self.cluster.gemm_rate(flops, "fp32")
        return self._gemm_rate(flops) * self.cluster.peak("fp8") / self.cluster.peak("bf16") * self.rowwise

    def add(self, nbytes: float) -> float:
        """Seconds to add tensors. `nbytes`: read and written."""
        return nbytes / self.adding

    def join(self, nbytes: float) -> float:
        """Seconds to copy gradients into a buffer. `nbytes`: read and written."""
        return nbytes / self.joining

    def widen(self, nbytes: float) -> float:
        """The same into a wider dtype."""
        return nbytes / self.widening

    def foreach(self, nbytes: float) -> float:
        """Seconds of a kernel over a list of tensors of so many bytes."""
        return nbytes / self.listing

    def update(self, nbytes: float) -> float:
        """Seconds of an optimizer's update. `nbytes`: read and written."""
        return nbytes / self.updating

    def copy(self, nbytes: float) -> float:
        """Seconds of a copy on the device. `nbytes`: read and written."""
        return nbytes / self.hbm
