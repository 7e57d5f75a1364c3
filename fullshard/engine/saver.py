"""How an engine saves states, as far as `fullshard.checkpoint` leaves it to an engine. Knows no engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from fullshard.engine.model import ModelT_contra
from fullshard.plan.plan import Plan

if TYPE_CHECKING:
    from fullshard.checkpoint.reader import ExpectedTensors
    from fullshard.checkpoint.retention import Retention
    from fullshard.checkpoint.saver import CheckpointSaver

StateT_contra = TypeVar("StateT_contra", contravariant=True)


class Saver(Protocol[ModelT_contra, StateT_contra]):
    """Makes checkpoints of states."""

    def checkpointer(
        self, checkpoint_dir: str | Path, state: StateT_contra, *, keep: "Retention | None", overlap: bool, run: str
    ) -> "CheckpointSaver":
        """Saves this state into a directory of checkpoints. `overlap`: beside training. Collective."""

    def weights_of(self, model: ModelT_contra, plan: Plan) -> "ExpectedTensors":
        """Shape and dtype of the weights that a checkpoint of this model holds, by name."""
