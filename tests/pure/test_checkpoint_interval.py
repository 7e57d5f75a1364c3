"""How often to save: against a simulation of failures, and the command that says it."""

import json
import random

import pytest
from typer.testing import CliRunner

from fullshard.base.errors import FullshardError
from fullshard.cluster.topology import Cluster
from fullshard.commands.cli import app
from fullshard.planner.checkpoint_interval import daly, parse_mtbf

HOUR = 3600.0


def lost(interval: float, cost: float, between: float, failures: int = 20_000) -> float:
    """The share of time that did not become work, by playing failures at random."""
    dice, worked, passed = random.Random(0), 0.0, 0.0
    for _ in range(failures):
        alive = dice.expovariate(1 / between)
        worked += interval * int(alive / (interval + cost))
        passed += alive
    return 1 - worked / passed


@pytest.mark.parametrize(("cost", "between"), [(10.0, HOUR), (120.0, 3 * HOUR), (600.0, HOUR)])
def test_no_other_interval_loses_much_less(cost, between):
    best = daly(cost, between)
    found = lost(best, cost, between)
    assert all(found < lost(best * factor, cost, between) for factor in (0.3, 0.5, 2, 3))
    assert found < min(lost(best * factor, cost, between) for factor in (0.8, 1.2)) * 1.02


def test_short_saves_follow_youngs_rule():
    assert daly(1.0, 1e6) == pytest.approx((2 * 1.0 * 1e6) ** 0.5, rel=1e-2)


def test_the_command_says_how_often_to_save():
    line = "plan llama3-70b --cluster 512xh100 --sequence 8192 --fix strategy=zero3 remat=full --mtbf 50000h --json"
    found = json.loads(CliRunner().invoke(app, line.split()).stdout)["saving"]
    assert found["between_failures"] == pytest.approx(50_000 * HOUR / 512)
    host = Cluster.named("1xh100").node.host
    state = 70.6e9 * 12 / 512  # fp32 parameters and two moments
    assert found["nbytes"] == pytest.approx(state, rel=0.01)
    assert found["stall"] == pytest.approx(state / host.pcie_down, rel=0.01)
    assert found["write"] == pytest.approx(state / host.disk_write, rel=0.01)
    assert 0 < found["lost"] < 0.01


@pytest.mark.parametrize("text", ["", "often", "-3h", "0h", "50000"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(FullshardError, match="such as 50000h"):
        parse_mtbf(text)


def test_without_a_cluster_nothing_fails():
    result = CliRunner().invoke(app, ["plan", "llama3-8b", "--devices", "8", "--mtbf", "5y"])
    assert "--mtbf has no effect with --devices" in str(result.exception)
