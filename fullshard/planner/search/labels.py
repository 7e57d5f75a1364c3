"""The choices of a plan in a few words, as tables and messages show them."""

from typing import Any

from fullshard.base.text import listed
from fullshard.plan.plan import Plan, Unit
from fullshard.plan.update_pieces import STAGING


def plan_label(strategy: str, choices: dict[str, Any], plan: Plan) -> str:
    """`hybrid 2×4, 1 × 8 rows, remat full`: strategy, mesh, batch, remat and homes. `choices`: the strategy's own."""
    mesh = f" {plan.mesh.replicate}×{plan.mesh.shard}" if strategy == "hybrid" else ""
    mesh += f" {choices['reshard']}" if strategy == "hpz" else ""
    mesh += f", tensor {plan.mesh.tensor}" if plan.mesh.tensor > 1 else ""
    remat = next((u.remat for u in plan.units if u.remat != "none"), "none")
    homes = home_words(plan)
    rows = f"{plan.batch.micro_batch} × {plan.batch.accumulate} rows"
    return f"{strategy}{mesh}, {rows}, remat {remat}{f', {homes}' if homes else ''}"


def strategy_of(label: str) -> str:
    """The strategy of a plan's label."""
    return label.partition(",")[0].partition(" ")[0]


def home_words(plan: Plan) -> str:
    """What rests on host and disk, such as `optimizer of the last 12 units on host`; empty if nothing does.

    Also names `cpu_share`, `staging` and `backlog` where the plan sets them.
    """
    found: dict[tuple[str, str], list[str]] = {}  # (which units, place) to kinds of bytes
    for place in ("host", "disk"):
        for kind in ("optimizer", "params", "activations"):
            there = [u for u in plan.units if getattr(u.home, kind) == place]
            if there:
                found.setdefault((_which_units(plan, there, kind), place), []).append(kind)
    words = [f"{listed(kinds)}{which} on {place}" for (which, place), kinds in found.items()]
    words += [] if plan.cpu_share is None else [f"{plan.cpu_share:.0%} of the updates by the cores"]
    words += [] if plan.staging == STAGING else [f"{plan.staging} pieces of state on the device at a time"]
    return ", ".join(words if plan.backlog is None else [*words, f"a backlog of {plan.backlog} pieces"])


def _which_units(plan: Plan, there: list[Unit], kind: str) -> str:
    """` of the last 12 units`; empty for all units, or for all whose activations leave the device."""
    every = [u for u in plan.units if kind != "activations" or u.home.activations != "device"]
    if len(there) == len(every):
        return ""
    end = "the last " if every[-len(there) :] == there else "the first " if every[: len(there)] == there else ""
    return f" of {end}{len(there)} unit{'s' if len(there) > 1 else ''}"
