"""Turn the trace of an eager block into that of a compiled one.

Compared to eager mode, inductor does not store tensors that only pass from one pointwise kernel to the next. It does not
save for backward what pointwise kernels can recompute from saved tensors, nor what backward never reads. Between two
matrix products, fused kernels read and write each stored tensor once. A softmax and its gradient are fused kernels too: they
have no workspace, and write over the product that they read.
"""

from collections import Counter
from dataclasses import replace

from fullshard.model.costs import OpKind, Polynomial, evaluate
from fullshard.on_torch.tracing.polynomials import ZERO, FittedEvent, FittedSection, FittedTrace, FittedWork, total
from fullshard.on_torch.tracing.recorder import KernelUse
from fullshard.on_torch.tracing.saved_cut import fewest_bytes

INSIDE = ("forward", "backward")  # phases after which a block's own code runs
FUSED_SHARE = 0.3  # pointwise kernels after fusion, as a share of those before
NOMINAL = (4, 1024)  # the batch shape at which sizes are compared
SOFTMAXES = ("safe_softmax", "softmax_backward")  # rules of workspaces that only eager kernels have


def compiled(fitted: FittedTrace, blocks: set[str]) -> list[FittedSection]:
    """The sections of a trace as they would be if the units `blocks` were compiled."""
    uses = [u for u in fitted.uses if _inside(fitted, u.section, blocks)]
    fused, kept = _fused_tensors(fitted, uses)
    softmaxes = [u for u in uses if _is_softmax(fitted, u)]
    unused = {fitted.sections[u.section].events[u.events - 1][1] for u in softmaxes}  # workspaces
    moved_frees = {t: at for t, at in _early_frees(fitted, uses).items() if t not in fused} | _late_frees(fitted, uses, fused)
    moved_frees |= _overwritten(fitted, uses, softmaxes, fused) | kept
    freed_at: dict[tuple[int, int], list[int]] = {}
    for tensor, at in moved_frees.items():
        freed_at.setdefault(at, []).append(tensor)
    moved = _moved_bytes(fitted, uses, fused)
    found = []
    for i, section in enumerate(fitted.sections):
        events: list[FittedEvent] = []
        for j, event in enumerate([*section.events, None]):
            events += [("free", t, "", ()) for t in freed_at.get((i, j), ())]
            if event is None or event[1] in fused or event[1] in unused:
                continue
            if event[0] != "free" or event[1] not in moved_frees:
                events.append(event)
        calls = Counter[str]() if section.unit in blocks else section.calls  # compiled code runs no Python for remat
        ops = _fuse(section.ops, moved.get(i, ZERO)) if _inside(fitted, i, blocks) else section.ops
        found.append(replace(section, events=events, calls=calls, ops=ops))
    return found


def _moved_bytes(fitted: FittedTrace, uses: list[KernelUse], fused: set[int]) -> dict[int, Polynomial]:
    """The bytes that the fused kernels of each section read and write. A tensor that is not stored is recomputed from its
    stored sources, so reading it means reading these."""
    sizes = {t: total(n) for s in fitted.sections for action, t, _, n in s.events if action == "allocate"}
    sources: dict[int, frozenset[int]] = {}  # stored tensors that each fused tensor is computed from
    found: dict[int, list[Polynomial]] = {}
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
                found.setdefault(use.section, []).append(sizes.get(tensor, ZERO))
    return {section: total(parts) for section, parts in found.items()}


def _fuse(ops: list[FittedWork], moved: Polynomial) -> list[FittedWork]:
    """Replace the pointwise kernels of a section by fewer that move `moved` bytes in total."""
    pointwise = [o for o in ops if o[0] in ("pointwise", "reduction")]
    others = [o for o in ops if o not in pointwise]
    if not pointwise:
        return others
    fused: FittedWork = ("pointwise", total(o[1] for o in pointwise), moved, ())
    launch: FittedWork = ("pointwise", ZERO, ZERO, ())
    return [*others, fused, *[launch] * (max(1, round(FUSED_SHARE * len(pointwise))) - 1)]


def _inside(fitted: FittedTrace, section: int, blocks: set[str]) -> bool:
    return fitted.sections[section].unit in blocks and fitted.sections[section].phase in INSIDE


def _fused_tensors(fitted: FittedTrace, uses: list[KernelUse]) -> tuple[set[int], dict[int, tuple[int, int]]]:
    """The tensors that compiled code never stores, and those that it saves for backward in place of such, with the
    (section, event) where it frees each."""
    made: dict[int, KernelUse] = {}
    readers: dict[int, set[OpKind]] = {}
    for use in uses:
        made |= dict.fromkeys(use.made, use)
        for tensor in use.read:
            readers.setdefault(tensor, set()).add(use.kind)
    passing = {
        t
        for t, use in made.items()
        if use.kind == "pointwise" and t not in fitted.roles and readers.get(t, set()) <= {"pointwise"}
    }
    freed = {t: (i, j) for i, s in enumerate(fitted.sections) for j, (action, t, *_) in enumerate(s.events) if action == "free"}
    saved = {t for use in uses for t in use.made | use.read if t < 0 or (t in freed and _saved(fitted, use.section, freed[t][0]))}
    sizes = _nominal_sizes(fitted)
    sources = _sources(made, sizes)
    wanted = {t for t in passing & saved if t in sources}
    stored = fewest_bytes(sources, sizes, wanted, saved - wanted)
    fused = {t for t in passing if t not in stored and (t in sources or t not in saved)}
    late: dict[int, tuple[int, int]] = {}
    for tensor in wanted & fused:
        for source in _stored_sources(tensor, sources, fused) & stored - saved:
            late[source] = max(late.get(source, (0, 0)), freed[tensor])
    return fused, late


def _nominal_sizes(fitted: FittedTrace) -> dict[int, float]:
    """The bytes of each tensor, to compare them by."""
    return {
        t: evaluate(total(sizes), *NOMINAL)
        for section in fitted.sections
        for action, t, rule, sizes in section.events
        if action == "allocate" and not rule
    }


def _sources(made: dict[int, KernelUse], sizes: dict[int, float]) -> dict[int, frozenset[int]]:
    """What pointwise kernels compute each of their results from. Drawn numbers are no result: of a dropout, the mask."""
    found: dict[int, frozenset[int]] = {}
    for tensor, use in made.items():
        drawn = {min(use.made, key=lambda t: sizes.get(t, 0))} if use.random else set[int]()
        if use.kind == "pointwise" and tensor not in drawn:
            found[tensor] = use.read | drawn
    return found


def _stored_sources(tensor: int, sources: dict[int, frozenset[int]], fused: set[int]) -> set[int]:
    """The stored tensors that a fused one is computed again from."""
    found, left = set[int](), [tensor]
    seen = {tensor}
    while left:
        for source in sources[left.pop()] - seen:
            seen.add(source)
            if source in fused:
                left.append(source)
            else:
                found.add(source)
    return found


def _is_softmax(fitted: FittedTrace, use: KernelUse) -> bool:
    """True if the kernel is a softmax or its gradient: its workspace is the last that came and went before its end."""
    events = fitted.sections[use.section].events[: use.events]
    return len(events) > 1 and events[-2][2] in SOFTMAXES


def _overwritten(
    fitted: FittedTrace, uses: list[KernelUse], softmaxes: list[KernelUse], fused: set[int]
) -> dict[int, tuple[int, int]]:
    """Tensors that a softmax writes its result over: of the result's size, read by nothing else after it. Each is freed where
    the result is allocated: at (section, event)."""
    last = {t: use for use in uses for t in use.read}
    found: dict[int, tuple[int, int]] = {}
    for use in softmaxes:
        events = fitted.sections[use.section].events
        sizes = {t: (at, size) for at, (action, t, _, size) in enumerate(events) if action == "allocate"}
        gone = {t for action, t, *_ in events if action == "free"}
        at, size = sizes[min(use.made)]
        for t in sorted(use.read - fused - set(fitted.roles)):
            if t in sizes and t in gone and sizes[t][1] == size and last[t] is use and not use.made & fused:
                found[t] = (use.section, at)
                break
    return found


def _early_frees(fitted: FittedTrace, uses: list[KernelUse]) -> dict[int, tuple[int, int]]:
    """Matrix products that remat keeps but backward never reads, such as the last one of a block. Compiled code frees each
    after its last use in forward: at (section, event)."""
    made = {t: u.section for u in uses if u.kind == "gemm" and fitted.sections[u.section].phase == "forward" for t in u.made}
    freed = _last_sections(fitted)
    last = {t: u for u in uses for t in (*u.made, *u.read)}
    return {
        t: (last[t].section, last[t].events)
        for t, section in made.items()
        if last[t].section == section and t not in fitted.roles and _saved(fitted, section, freed.get(t, section))
    }


def _late_frees(fitted: FittedTrace, uses: list[KernelUse], fused: set[int]) -> dict[int, tuple[int, int]]:
    """Tensors that a fused kernel of backward keeps until all its results are allocated: those that several results are computed
    from, whose memory it does not reuse, and what remat computes again from them, which it writes with the others. Such as the
    gate of an MLP, and its product with the other half. Each is freed after the kernel: at (section, event)."""
    freed = {t: (i, j) for i, s in enumerate(fitted.sections) for j, (action, t, *_) in enumerate(s.events) if action == "free"}
    found: dict[int, tuple[int, int]] = {}
    again: dict[int, frozenset[int]] = {}  # stored tensors that backward made, and what they were computed from
    sources: dict[int, frozenset[int]] = {}
    own = {t for u in uses if fitted.sections[u.section].phase == "backward" for t in u.made}
    for run in _pointwise_runs(fitted, uses):
        results: dict[int, frozenset[int]] = {}
        for use in run:
            read = frozenset[int]().union(*(sources.get(t, frozenset((t,))) for t in use.read))
            sources |= dict.fromkeys(use.made & fused, read)
            results |= dict.fromkeys(use.made - fused, read)
        end = (run[-1].section, run[-1].events)
        inputs = frozenset[int]().union(*results.values())
        rewritten = {t: read for t, read in again.items() if read & inputs & own}
        readers = Counter(t for read in (*results.values(), *rewritten.values()) for t in read)
        shared = {t for t, count in readers.items() if count > 1} | set(rewritten)
        found |= {t: end for t in shared if t in freed and freed[t][0] == end[0] and freed[t][1] < end[1]}
        again |= results
    return found


def _pointwise_runs(fitted: FittedTrace, uses: list[KernelUse]) -> list[list[KernelUse]]:
    """The pointwise kernels of backward that follow each other, which become one."""
    runs: list[list[KernelUse]] = [[]]
    for use in uses:
        apart = runs[-1] and runs[-1][-1].section != use.section
        if use.kind != "pointwise" or fitted.sections[use.section].phase != "backward":
            runs.append([])
        elif apart:
            runs.append([use])
        else:
            runs[-1].append(use)
    return [run for run in runs if run]


def _last_sections(fitted: FittedTrace) -> dict[int, int]:
    """The section in which each tensor is freed."""
    return {t: i for i, section in enumerate(fitted.sections) for action, t, *_ in section.events if action == "free"}


def _saved(fitted: FittedTrace, made: int, freed: int) -> bool:
    """True if a tensor is made in forward and freed in backward."""
    return fitted.sections[made].phase == "forward" and fitted.sections[freed].phase in ("backward", "done", "end")
