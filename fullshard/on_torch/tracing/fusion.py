"""What a compiler leaves out: tensors between kernels that it fuses.

A block that inductor compiles neither stores what one pointwise kernel hands to the next, nor saves for
backward what pointwise kernels can make again from what is saved anyway, nor what backward never reads.
Its pointwise kernels read what is stored, and write what will be, once between one matrix product and the next.
"""

from collections import Counter
from dataclasses import replace

from fullshard.model.costs import OpKind
from fullshard.on_torch.tracing.trace import RawEvent, RawOp, RawSection, Recorder, Use

INSIDE = ("forward", "backward")  # the moments of a block after which its own code runs
KERNELS = 0.3  # of the pointwise ones are left: they are fused into few


def compiled(recorder: Recorder, blocks: set[str]) -> list[RawSection]:
    """The sections of a trace as they would be if `blocks` were compiled."""
    uses = [u for u in recorder.uses if _inside(recorder, u.section, blocks)]
    without = _fused(recorder, uses)
    early = {t: at for t, at in _unread(recorder, uses).items() if t not in without}
    moved = _moved(recorder, uses, without)
    found = []
    for i, section in enumerate(recorder.sections):
        events: list[RawEvent] = []
        for j, event in enumerate([*section.events, None]):
            events += [("free", t, "", ()) for t, at in early.items() if at == (i, j)]
            if event is not None and event[1] not in without and not (event[0] == "free" and event[1] in early):
                events.append(event)
        calls = Counter() if section.unit in blocks else section.calls  # a graph knows of remat when it is compiled
        ops = _few(section.ops, moved.get(i, 0)) if _inside(recorder, i, blocks) else section.ops
        found.append(replace(section, events=events, calls=calls, ops=ops))
    return found


def _moved(recorder: Recorder, uses: list[Use], without: set[int]) -> dict[int, int]:
    """Bytes that the fused kernels of each section read and write. What is never stored is made again from what is."""
    sizes = {t: sum(n) for s in recorder.sections for action, t, _, n in s.events if action == "allocate"}
    sources: dict[int, frozenset[int]] = {}  # of what is never stored
    found: Counter[int] = Counter()
    phase, seen = 0, set[tuple[int, int, int]]()
    for use in uses:
        if use.kind != "pointwise":
            phase += 1
            continue
        read = frozenset[int]().union(*(sources.get(t, frozenset((t,))) for t in use.read))
        sources |= dict.fromkeys(use.made & without, read)
        if use.made and use.made <= without:  # done by those that read it
            continue
        for tensor in read | (use.made - without):
            if (here := (use.section, phase, tensor)) not in seen:
                seen.add(here)
                found[use.section] += sizes.get(tensor, 0)
    return dict(found)


def _few(ops: list[RawOp], moved: int) -> list[RawOp]:
    """The pointwise kernels of a section as few, which move so many bytes together."""
    others, pointwise = [o for o in ops if o[0] != "pointwise"], [o for o in ops if o[0] == "pointwise"]
    if not pointwise:
        return others
    fused: RawOp = ("pointwise", sum(o[1] for o in pointwise), moved, ())
    return [*others, fused, *[("pointwise", 0, 0, ())] * (max(1, round(KERNELS * len(pointwise))) - 1)]  # type: ignore[list-item]


def _inside(recorder: Recorder, section: int, blocks: set[str]) -> bool:
    return recorder.sections[section].unit in blocks and recorder.sections[section].moment in INSIDE


def _fused(recorder: Recorder, uses: list[Use]) -> set[int]:
    """Tensors that are never stored."""
    made: dict[int, Use] = {}
    readers: dict[int, set[OpKind]] = {}
    for use in uses:
        made |= dict.fromkeys(use.made, use)
        for tensor in use.read:
            readers.setdefault(tensor, set()).add(use.kind)
    freed = _last_sections(recorder)
    found: set[int] = set()
    for tensor, use in made.items():  # in order, so that what it is made from is known
        if use.kind != "pointwise" or tensor in recorder.roles or readers.get(tensor, set()) - {"pointwise"}:
            continue
        saved = _saved(recorder, use.section, freed.get(tensor, use.section))
        again = all(i < 0 or i in found or _saved(recorder, use.section, freed.get(i, use.section)) for i in use.read)
        if not saved or again:
            found.add(tensor)
    return found


def _unread(recorder: Recorder, uses: list[Use]) -> dict[int, tuple[int, int]]:
    """Matrix products that remat keeps for backward, which never reads them: that at the end of a block, say. Where the
    last kernel of forward has read them, as (section, event)."""
    made = {t: u.section for u in uses if u.kind == "gemm" and recorder.sections[u.section].moment == "forward" for t in u.made}
    freed = _last_sections(recorder)
    last = {t: u for u in uses for t in (*u.made, *u.read)}
    return {
        t: (last[t].section, last[t].events)
        for t, section in made.items()
        if last[t].section == section and t not in recorder.roles and _saved(recorder, section, freed.get(t, section))
    }


def _last_sections(recorder: Recorder) -> dict[int, int]:
    """In which section each tensor is freed."""
    return {t: i for i, section in enumerate(recorder.sections) for action, t, *_ in section.events if action == "free"}


def _saved(recorder: Recorder, made: int, freed: int) -> bool:
    """Whether a tensor of forward is still there in backward."""
    return recorder.sections[made].moment == "forward" and recorder.sections[freed].moment in ("backward", "done", "end")
