"""Restores a state from a checkpoint, as far as all engines do it alike: every rank fills its own parts, or all raise."""

from collections.abc import Callable
from pathlib import Path

from fullshard.checkpoint.directories import Place
from fullshard.checkpoint.manifest import Manifest, TensorRecord
from fullshard.checkpoint.reader import Checkpoint, refuse_bad_numbers
from fullshard.checkpoint.verified_load import Verify, fill_from
from fullshard.ranks.agreement import RankAgreement


def restore(where: str | Path | Place, ranks: RankAgreement, fill: Callable[[Checkpoint], None], verify: Verify) -> Manifest:
    """Call `fill` on all ranks with the checkpoint at `where`; return its manifest. `verify`: see `fill_from`. `ranks` is closed.
    Collective."""

    def checked(checkpoint: Checkpoint) -> None:
        refuse_bad_numbers(checkpoint.manifest.state)
        fill(checkpoint)

    try:
        return fill_from(where, ranks, verify, checked)
    finally:
        ranks.close()


def restorable(manifest: Manifest, *, optimizer: bool) -> dict[str, TensorRecord]:
    """The tensors that a state is filled with. Without an optimizer, to evaluate or export, the weights are enough. Random
    streams are an engine's own."""
    left_out = ("rng.",) if optimizer else ("rng.", "optimizer.")
    return {name: record for name, record in manifest.tensors.items() if not name.startswith(left_out)}
