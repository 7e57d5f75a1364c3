"""Restores a state from a checkpoint, as far as all engines do it alike: every rank fills its own parts, or all raise."""

from collections.abc import Callable
from pathlib import Path

from fullshard.checkpoint.directories import Place
from fullshard.checkpoint.manifest import Manifest, TensorRecord
from fullshard.checkpoint.reader import Checkpoint, refuse_bad_numbers
from fullshard.checkpoint.shared_disks import find_whole
from fullshard.ranks.agreement import RankAgreement


def restore(where: str | Path | Place, ranks: RankAgreement, fill: Callable[[Checkpoint], None], *, verified: bool) -> Manifest:
    """Call `fill` on all ranks with the checkpoint at `where`, whose bytes are right; return its manifest. `verified`: the caller
    has compared the checksums already. `ranks` is closed. Collective."""
    try:
        place = find_whole(where, ranks, verified=verified)
        opened: list[Checkpoint] = []

        def filled() -> None:
            opened.append(Checkpoint(place))
            refuse_bad_numbers(opened[0].manifest.state)
            fill(opened[0])

        ranks.gather_results(filled)
        return opened[0].manifest
    finally:
        ranks.close()


def restorable(manifest: Manifest, *, optimizer: bool) -> dict[str, TensorRecord]:
    """The tensors that a state is filled with. Without an optimizer, to evaluate or export, the weights are enough. Random
    streams are an engine's own."""
    left_out = ("rng.",) if optimizer else ("rng.", "optimizer.")
    return {name: record for name, record in manifest.tensors.items() if not name.startswith(left_out)}
