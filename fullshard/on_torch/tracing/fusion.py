"""Turn the trace of an eager block into that of a compiled one.

Compared to eager mode, inductor does not store tensors that only pass from one pointwise kernel to the next. It does not
save for backward what pointwise kernels can recompute from saved tensors, nor what backward never reads. Between two
matrix products, fused kernels read and write each stored tensor once.
"""

from collections import Counter
from dataclasses import replace

from fullshard.model.costs import OpKind
from fullshard.on_torch.tracing.cuda_kernels import KernelWork
from fullshard.on_torch.tracing.recorder import KernelUse, RawEvent, RawSection, Recorder

INSIDE = ("forward", "backward")  # phases after which a block's own code runs
FUSED_SHARE = 0.3  # pointwise kernels after fusion, as a share of those before


def compiled(recorder: Recorder, blocks: set[str]) -> list[RawSection]:
    """The sections of a trace as they would be if the units `blocks` were compiled."""
    uses = [u for u in recorder.uses if _inside(recorder, u.section, blocks)]
    fused = _fused_tensors(recorder, uses)
    early = {t: at for t, at in _early_frees(recorder, uses).items() if t not in fused}
    moved = _moved_bytes(recorder, uses, fused)
    found = []
    for i, section in enumerate(recorder.sections):
        events: list[RawEvent] = []
        for j, event in enumerate([*section.events, None]):
            events += [("free", t, "", ()) for t, at in early.items() if at == (i, j)]
            if event is not None and event[1] not in fused and not (event[0] == "free" and event[1] in early):
                events.append(event)
        calls = Counter() if section.unit in blocks else section.calls  # compiled code runs no Python for remat
        ops = _fuse(section.ops, moved.get(i, 0)) if _inside(recorder, i, blocks) else section.ops
        found.append(replace(section, events=events, calls=calls, ops=ops))
    return found


def _moved_bytes(recorder: Recorder, uses: list[KernelUse], fused: set[int]) -> dict[int, int]:
    """The bytes that the fused kernels of each section read and write. A tensor that is not stored is recomputed from its
    stored sources, so reading it means reading these."""
    sizes = {t: sum(n) for s in recorder.sections for action, t, _, n in s.events if action == "allocate"}
    sources: dict[int, frozenset[int]] = {}  # stored tensors that each fused tensor is computed from
    found: Counter[int] = Counter()
    interval, seen = 0, set[tuple[int, int, int]]()
    for use in uses:
        if use.kind != "pointwise":
            interval += 1
            continue
        read = frozenset[int]().union(*(sources.get(t, frozenset((t,))) for t in use.read))
        sources |= dict.fromkeys(use.made & fused, read)
        if use.made and use.made <= fused:  # part of the kernels that read the result
            continue
        for tensor in read | (use.made - fused):
            if (here := (use.section, interval, tensor)) not in seen:
                seen.add(here)
                found[use.section] += sizes.get(tensor, 0)
    return dict(found)


def _fuse(ops: list[KernelWork], moved: int) -> list[KernelWork]:
    """Replace the pointwise kernels of a section by fewer that move `moved` bytes in total."""
    others, pointwise = [o for o in ops if o[0] != "pointwise"], [o for o in ops if o[0] == "pointwise"]
    if not pointwise:
        return others
    fused: KernelWork = ("pointwise", sum(o[1] for o in pointwise), moved, ())
    launch: KernelWork = ("pointwise", 0, 0, ())
    return [*others, fused, *[launch] * (max(1, round(FUSED_SHARE * len(pointwise))) - 1)]


def _inside(recorder: Recorder, section: int, blocks: set[str]) -> bool:
    return recorder.sections[section].unit in blocks and recorder.sections[section].phase in INSIDE


def _fused_tensors(recorder: Recorder, uses: list[KernelUse]) -> set[int]:
    """The tensors that compiled code never stores."""
    made: dict[int, KernelUse] = {}
    readers: dict[int, set[OpKind]] = {}
    for use in uses:
        made |= dict.fromkeys(use.made, use)
        for tensor in use.read:
            readers.setdefault(tensor, set()).add(use.kind)
    freed = _last_sections(recorder)
    found: set[int] = set()
    for tensor, use in made.items():  # in the order they are made, so inputs are decided before results
        if use.kind != "pointwise" or tensor in recorder.roles or readers.get(tensor, set()) - {"pointwise"}:
            continue
        saved = _saved(recorder, use.section, freed.get(tensor, use.section))
        recomputable = all(i < 0 or i in found or _saved(recorder, use.section, freed.get(i, use.section)) for i in use.read)
        if not saved or recomputable:
            found.add(tensor)
    return found


def _early_frees(recorder: Recorder, uses: list[KernelUse]) -> dict[int, tuple[int, int]]:
    """Matrix products that remat keeps but backward never reads, such as the last one of a block. Compiled code frees each
    after its last use in forward: at (section, event)."""
    made = {t: u.section for u in uses if u.kind == "gemm" and recorder.sections[u.section].phase == "forward" for t in u.made}
    freed = _last_sections(recorder)
    last = {t: u for u in uses for t in (*u.made, *u.read)}
    return {
        t: (last[t].section, last[t].events)
        for t, section in made.items()
        if last[t].section == section and t not in recorder.roles and _saved(recorder, section, freed.get(t, section))
    }


def _last_sections(recorder: Recorder) -> dict[int, int]:
    """The section in which each tensor is freed."""
    return {t: i for i, section in enumerate(recorder.sections) for action, t, *_ in section.events if action == "free"}


def _saved(recorder: Recorder, made: int, freed: int) -> bool:
    """True if a tensor is made in forward and freed in backward."""
    return recorder.sections[made].phase == "forward" and recorder.sections[freed].phase in ("backward", "done", "end")
