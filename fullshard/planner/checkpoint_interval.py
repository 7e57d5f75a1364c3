"""How often to save: the cost of a checkpoint against what a failure loses, by the rule of Young and Daly.

A save stalls training while shards are copied to the host, and is written in the background. Until it is written it is of
no use. Devices fail independently, so a cluster of n devices fails n times as often as one.
"""

import math
import re
from dataclasses import dataclass

from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text, seconds_text
from fullshard.cluster.topology import Cluster
from fullshard.model.description import Description
from fullshard.plan.plan import Plan
from fullshard.planner.memory.peak_memory import at_rest

SECONDS = {"h": 3600.0, "d": 86_400.0, "y": 365.25 * 86_400}


@dataclass(frozen=True)
class SaveCost:
    """What saving costs. `nbytes`: of one rank's save. `stall`, `write`, `between_failures` of the cluster, `interval` between
    saves: seconds. `lost`: the share of time that goes into stalls and into work that failures undo."""

    nbytes: int
    stall: float
    write: float
    between_failures: float
    interval: float
    steps: int
    lost: float

    def __str__(self) -> str:
        return (
            f"save every {self.steps} steps ({seconds_text(self.interval)}): something fails every "
            f"{self.between_failures / 3600:.1f} h, a save of {bytes_text(self.nbytes)} a rank stalls for "
            f"{seconds_text(self.stall)} and is written in {seconds_text(self.write)}; {self.lost:.1%} of the time is lost"
        )


def save_cost(
    plan: Plan, description: Description, cluster: Cluster, *, step_seconds: float, mtbf: float, slots: int = 2
) -> SaveCost:
    """The interval between saves that loses the least time, if a device fails every `mtbf` seconds."""
    nbytes = sum(sum(tier.values()) for tier in at_rest(plan, description, slots).values())
    copied = cluster.of("pcie_down") if cluster.device.kind != "cpu" else cluster.of("dram") / 2
    stall, write = nbytes / copied, nbytes / cluster.of("disk_write")
    between = mtbf / cluster.devices
    wanted = max(daly(stall, between), stall + write)  # one save at a time
    steps = max(1, round(wanted / step_seconds))
    interval = steps * step_seconds
    lost = min(1.0, stall / interval + (interval / 2 + write) / between)
    return SaveCost(nbytes, stall, write, between, interval, steps, lost)


def daly(cost: float, between: float) -> float:
    """The best seconds between saves that cost `cost` seconds each, with a failure every `between` seconds.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval, 2006.
    """
    if cost >= 2 * between:
        return between
    ratio = cost / (2 * between)
    return math.sqrt(2 * cost * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def parse_mtbf(text: str) -> float:
    """`50000h`, `400d` or `5y` in seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([hdy])", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise FullshardError(f"--mtbf {text!r}: write how long a device runs until it fails, such as 50000h, 400d or 5y")
    return float(match[1]) * SECONDS[match[2]]
