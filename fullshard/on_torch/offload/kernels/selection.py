"""Which kernels update the units that rest away from the device, and why those: said once, so that nobody wonders."""

from fullshard.on_torch.offload.kernels import cpu_adam
from fullshard.on_torch.offload.tiered_optimizer import Tiered
from fullshard.on_torch.offload.units import Piece
from fullshard.on_torch.offload.updates.gpu import find_kernel

FALLBACK = "torch: "  # how a text begins that tells of something missing


def update_kernels(tiers: Tiered) -> dict[str, str]:
    """By lane, `compiled (cc)`, `triton` or `torch`: in brackets where torch's kernels are meant, after a colon where
    something that would be quicker is missing."""
    pieces = [p for a in tiers.units for p in a.pieces]
    lanes = {name: [p for p in pieces if p.lane == name] for name in ("cpu", "gpu")}
    found = {"cpu_update": _cores(tiers, lanes["cpu"]), "gpu_update": _streamed(tiers, lanes["gpu"])}
    return {lane: text for lane, text in found.items() if text}


def _cores(tiers: Tiered, pieces: list[Piece]) -> str:
    if not pieces:
        return ""
    compute = tiers.resting.compute if tiers.resting.sends else None
    unfit = cpu_adam.unfit(tiers.rule, [tiers.master], tiers.dtype, compute)
    if unfit:
        return f"torch (cpu_adam.c is not for {unfit})"
    found = cpu_adam.built()
    return f"{FALLBACK}{found.why}" if found.library is None else "compiled (cpu_adam.c)"


def _streamed(tiers: Tiered, pieces: list[Piece]) -> str:
    if not pieces:
        return ""
    if tiers.device.type != "cuda" or not any(p.packed for p in pieces):
        return "torch (Triton's kernel is for packed state on a GPU)"
    found, why = find_kernel(tiers.device, tiers.rule)
    return f"{FALLBACK}{why}" if found is None else "triton"
