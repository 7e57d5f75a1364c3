"""What a compiler leaves out: tensors between kernels that it fuses.

A block that inductor compiles neither stores what one pointwise kernel hands to the next, nor saves for
backward what pointwise kernels can make again from what is saved anyway, nor what backward never reads.
"""

from collections import Counter
from dataclasses import replace

from fullshard.costs import OpKind
from fullshard.on_torch.tracing.trace import RawEvent, RawSection, Recorder, Use

INSIDE = ("forward", "backward")  # the moments of a block after which its own code runs


def compiled(recorder: Recorder, blocks: set[str]) -> list[RawSection]:
    """The sections of a trace as they would be if `blocks` were compiled."""
    uses = [u for u in recorder.uses if _inside(recorder, u.section, blocks)]
    without = _fused(recorder, uses)
    early = {t: at for t, at in _unread(recorder, uses).items() if t not in without}
    found = []
    for i, section in enumerate(recorder.sections):
        events: list[RawEvent] = []
        for j, event in enumerate([*section.events, None]):
            events += [("free", t, "", ()) for t, at in early.items() if at == (i, j)]
            if event is not None and event[1] not in without and not (event[0] == "free" and event[1] in early):
                events.append(event)
        calls = Counter() if section.unit in blocks else section.calls  # a graph knows of remat when it is compiled
        found.append(replace(section, events=events, calls=calls))
    return found


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
