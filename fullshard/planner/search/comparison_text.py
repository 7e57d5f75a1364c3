"""A comparison of strategies as a table for people: a column for each strategy, a row for each number."""

from collections.abc import Callable

from fullshard.base.text import bytes_text, count_text, seconds_text, table
from fullshard.plan.engine_traits import TRAITS
from fullshard.planner.search.comparison import ComparedPlan, Comparison
from fullshard.planner.search.search import ON_JAX

GiB = 1 << 30
MiB = 1 << 20
Cell = Callable[[ComparedPlan], str]


def comparison_text(found: Comparison, shape: str = "") -> str:
    """The table, with what is compared above it and what the columns mean below. `shape`: of the model, in words."""
    return "\n\n".join([_head(found, shape), _table(found), _notes(found)])


def _head(found: Comparison, shape: str) -> str:
    batch, first = found.batch, found.plans[0].estimate
    tokens = found.cluster.devices * batch.accumulate * batch.micro_batch * batch.sequence
    blocks = [f"remat {found.remat}", *(["blocks compiled"] if found.compile else [])]
    rows = [
        ["model", f"{found.description.model}, {count_text(found.description.numel)} parameters ({found.description.numel:,})"],
        *([["shape", shape]] if shape else []),
        ["cluster", f"{found.cluster.name}, {bytes_text(first.available)} of a device may be used"],
        ["precision", f"{found.precision}, AdamW"],
        ["batch", f"{batch}"],
        ["step", f"{tokens:,} tokens on {found.cluster.devices} devices"],
        ["blocks", ", ".join(blocks)],
    ]
    return "\n".join(f"{name:<9}  {text}" for name, text in rows)


def _table(found: Comparison) -> str:
    plans, unit, word = found.plans, *_unit(found)
    groups: list[list[tuple[str, Cell]]] = [
        _memory_rows(found, unit),
        _wire_rows(found, unit),
        [
            ("step time", lambda p: seconds_text(p.estimate.step_seconds)),
            (f"{plans[0].estimate.counted}/s", lambda p: count_text(p.estimate.tokens_per_second)),
            ("MFU", lambda p: f"{p.estimate.mfu:.1%}"),
        ],
    ]
    rows: list[list[str]] = []
    for group in groups:
        rows += [[""] * (len(plans) + 1)] if rows else []
        rows += [[name, *map(cell, plans)] for name, cell in group]
    header = [f"a rank, in {word}", *[p.name for p in plans]]
    return table(header, rows, right=range(1, len(header)))


def _unit(found: Comparison) -> tuple[int, str]:
    """The unit of bytes that shows the smallest peak with digits before the point."""
    return (GiB, "GiB") if min(p.estimate.device.allocated_bytes for p in found.plans) >= GiB else (MiB, "MiB")


def _memory_rows(found: Comparison, unit: int) -> list[tuple[str, Cell]]:
    def of(term: str) -> Cell:
        return lambda p: _amount(p.most[term], unit)

    rows = [(term, of(term)) for term in found.plans[0].most]
    rows.append(("peak, allocated", lambda p: _amount(p.estimate.device.allocated_bytes, unit)))
    if found.plans[0].estimate.device.reserved_bytes is not None:
        rows.append(("peak, reserved", lambda p: _amount(p.estimate.needed, unit)))
    rows.append(("saving against ddp", lambda p: "–" if p is found.plans[0] else f"{found.saving(p):.0%}"))
    if any(p.estimate.host.allocated_bytes for p in found.plans):
        rows.append(("host memory", lambda p: _amount(p.estimate.host.allocated_bytes, unit)))
    rows.append(("fits", _fits))
    return rows


def _amount(nbytes: float, unit: int) -> str:
    return f"{nbytes / unit:.2f}" if nbytes else "–"


def _fits(plan: ComparedPlan) -> str:
    e = plan.estimate
    if e.fits:
        return "yes"
    return "no" if e.needed > e.available else "no (host)"


def _wire_rows(found: Comparison, unit: int) -> list[tuple[str, Cell]]:
    words = {"gather": "sent by gathers", "reduce": "sent by reductions", "copies": "sent by all-reduces"}

    def of(purpose: str) -> Cell:
        return lambda p: _amount(getattr(p.wire, purpose), unit)

    rows = [(words[purpose], of(purpose)) for purpose in words if any(getattr(p.wire, purpose) for p in found.plans)]
    return [*rows, ("sent in a step", lambda p: _amount(p.wire.total, unit))]


def _notes(found: Comparison) -> str:
    lines = [f"{p.name}: {p.words}" for p in found.plans if p.words != p.name]
    lines.append("Each term is shown at its most. Terms peak at different times, so the peak is below their sum.")
    if (best := found.fastest) is None:
        lines.append("None of them fits. Recompute activations (--remat full), or take more devices.")
    else:
        alike = [p.name for p in found.plans if p.estimate.fits and p.estimate.step_seconds == best.estimate.step_seconds]
        lines.append(f"The fastest that fits: {', '.join(alike)}. Bottleneck: {best.estimate.bottleneck}.")
    if not found.plans[0].estimate.calibrated_for_device:
        lines.append("This device has no calibration of its own, so step times can be further off.")
    if not TRAITS[found.engine].predicted:
        lines.append(f"These plans are {ON_JAX}.")
    return "\n".join([*lines, *[f"note: {note}" for note in found.plans[0].estimate.notes]])
