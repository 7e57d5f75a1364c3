"""Waiting for updates: what gathers, readers and the next step ask of those that run in the background."""

from fullshard.base.errors import FullshardError
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit
from fullshard.on_torch.offload.units.unit_update import StepDecision, UnitUpdate
from fullshard.on_torch.offload.updates.update_lane import UpdateLane
from fullshard.on_torch.tensors.streams import StreamEvent


class FinishedUpdates:
    """Waits for updates, counts them once, and raises what went wrong in them."""

    def __init__(self, *lanes: UpdateLane):
        self.lanes = lanes
        # The decision of the last eager step, and that of its gradients, which may turn out not to be finite.
        self.eager: tuple[StepDecision, StepDecision] | None = None

    def events(self, unit: OffloadedUnit) -> list[StreamEvent]:
        """When the unit's parameters are new; waits until that is queued."""
        update = unit.update
        if update is None:
            return []
        update.issued.wait()
        self.refuse_failed()
        self.count(update)
        return update.events

    def count(self, update: UnitUpdate) -> None:
        """Count an update that was not skipped, once."""
        if update.steps and not update.counted:
            update.counted = True
            if not update.decision.wait()[1]:
                pairs = zip(update.unit.steps, update.steps, update.had, strict=True)
                update.unit.steps = [new if had else old for old, new, had in pairs]

    def refuse_failed(self) -> None:
        """Raise if a lane has failed."""
        for lane in self.lanes:
            if lane.error is not None:
                raise lane.error

    def refuse_bad(self, *, wait: bool = False) -> None:
        """Raise if units were updated with gradients that turned out not to be finite."""
        if self.eager is None or not (wait or self.eager[1].event.done()):
            return
        step, gradients = self.eager
        if gradients.wait()[1] and not step.wait()[1]:  # for good, until a checkpoint is loaded
            raise FullshardError(
                "a gradient of the last step was not finite, and without clipping units are updated before that is known: "
                "go on from the last checkpoint, with optim.clip set so that such steps are skipped"
            )
        self.eager = None
