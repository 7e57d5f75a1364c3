"""What the disk means for a run whose plan puts something on it: tried and said before the first step."""

from fullshard.planner.step.offload_bytes import OffloadBytes, slots_of
from fullshard.planner.step.unit_sizes import unit_sizes
from fullshard.ranks.local_ranks import ranks_here
from fullshard.runs.prepare.describe_model import described_units
from fullshard.runs.prepare.prepare import Prepared
from fullshard.runs.prepare.recipe_plan import make_optimizer
from fullshard.storage.disk_speed import Rates, disk_rates, no_disk, slowest, verdict

TRIAL = 1 << 30  # bytes a rank, at most
SECONDS = 1.5


def judge_disk(prepared: Prepared, directory: str) -> list[str]:
    """A line or two. Collective: all ranks try the disk at the same time, as they will use it."""
    held = unit_sizes(prepared.plan, described_units(prepared.recipe, prepared.model, prepared.engine.model))
    offload = OffloadBytes(prepared.plan, held, slots_of(make_optimizer(prepared.recipe)))
    activations = _activations(prepared)
    if not (filed := sum(offload.disk(activations).values())):  # nobody has traced the model's activations
        return [line for line in (no_disk(directory),) if line]
    ranks, nbytes = prepared.engine.ranks, min(TRIAL, filed)
    rates = slowest(ranks.agreement().gather_results(lambda: disk_rates(directory, nbytes, SECONDS)))
    here = ranks_here()
    read, written = (here * (n + prepared.plan.batch.accumulate * activations) for n in offload.disk_traffic())
    whole = Rates(here * rates.read, here * rates.write, None if rates.both is None else here * rates.both)
    said = verdict((read, written), whole, prepared.rest_seconds)
    return [line for line in (no_disk(directory), said) if line]


def _activations(prepared: Prepared) -> int:
    """Bytes of a micro-batch that are written and read once, as far as the planner knows them."""
    return prepared.estimate.disk.terms.get("activations", 0) if prepared.estimate else 0
