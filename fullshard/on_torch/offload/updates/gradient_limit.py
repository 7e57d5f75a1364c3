"""Gradients that wait on the device for their update while backward makes more: not more than a plan allows.

Lanes are slower than backward as a rule, so that without a limit nearly all gradients of a model wait at once.
"""

from fullshard.on_torch.offload.updates.unit_update import Job


class Backlog:
    """The jobs of a step whose gradients are on the device, the oldest first. `limit`: pieces that may wait there beside
    the unit at hand; None: any number."""

    def __init__(self, limit: int | None):
        self.limit, self.jobs = limit, list[Job]()

    def begin(self) -> None:
        self.jobs = []

    def add(self, job: Job) -> None:
        """The lanes have it; go on when there is room for the next. A unit that is larger than the limit waits alone. Lanes
        need nothing that comes later in backward, so that this ends; an error of theirs lets go of everything."""
        if self.limit is None or not job.away.pieces:
            return
        self.jobs.append(job)
        self.jobs = [j for j in self.jobs if not j.let_go()]
        while len(self.jobs) > 1 and self.pieces() > self.limit:
            self.jobs.pop(0).wait_let_go()
            self.jobs = [j for j in self.jobs if not j.let_go()]

    def pieces(self) -> int:
        """How many of them wait."""
        return sum(len(job.away.pieces) for job in self.jobs)
