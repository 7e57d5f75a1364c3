"""What of a plan rests away from the device, in words."""

from fullshard.plan import Plan, Unit
from fullshard.update_pieces import STAGING


def home_words(plan: Plan) -> str:
    """What rests away, in a few words: `optimizer of the last 12 units on host`; who updates it, how much of it is on the
    device for that at a time, and how many gradients wait, where the plan says it."""
    found: dict[tuple[str, str], list[str]] = {}  # kinds by which units and which place
    for place in ("host", "disk"):
        for kind in ("optimizer", "params", "activations"):
            there = [u for u in plan.units if getattr(u.home, kind) == place]
            if there:
                found.setdefault((_which(plan, there, kind), place), []).append(kind)
    words = [f"{_listed(kinds)}{which} on {place}" for (which, place), kinds in found.items()]
    words += [] if plan.cpu_share is None else [f"{plan.cpu_share:.0%} of the updates by the cores"]
    words += [] if plan.staging == STAGING else [f"{plan.staging} pieces of state on the device at a time"]
    return ", ".join(words if plan.backlog is None else [*words, f"a backlog of {plan.backlog} pieces"])


def _which(plan: Plan, there: list[Unit], kind: str) -> str:
    """Of all units; of activations, those that leave the device."""
    every = [u for u in plan.units if kind != "activations" or u.home.activations != "device"]
    if len(there) == len(every):
        return ""
    end = "the last " if every[-len(there) :] == there else "the first " if every[: len(there)] == there else ""
    return f" of {end}{len(there)} unit{'s' if len(there) > 1 else ''}"


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
