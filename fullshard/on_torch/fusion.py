"""What a compiler leaves out: tensors between kernels that it fuses.

A block that inductor compiles neither stores what one pointwise kernel hands to the next, nor saves for
backward what pointwise kernels can make again from what is saved anyway.
"""

from fullshard.costs import OpKind
from fullshard.on_torch.trace import Recorder


def fused(recorder: Recorder) -> set[int]:
    """The tensors of a trace that a compiled block would never store."""
    made: dict[int, tuple[int, OpKind, frozenset[int]]] = {}
    readers: dict[int, set[OpKind]] = {}
    for section, kind, read, fresh in recorder.uses:
        for tensor in fresh:
            made[tensor] = (section, kind, read - fresh)
        for tensor in read - fresh:
            readers.setdefault(tensor, set()).add(kind)
    backward = _last_sections(recorder)
    found: set[int] = set()
    for tensor, (section, kind, inputs) in made.items():  # in order, so that what it is made from is known
        if kind != "pointwise" or tensor in recorder.roles or readers.get(tensor, set()) - {"pointwise"}:
            continue
        saved = _saved(recorder, section, backward.get(tensor, section))
        again = all(i < 0 or i in found or _saved(recorder, section, backward.get(i, section)) for i in inputs)
        if not saved or again:
            found.add(tensor)
    return found


def _last_sections(recorder: Recorder) -> dict[int, int]:
    """In which section each tensor is freed."""
    return {t: i for i, section in enumerate(recorder.sections) for action, t, *_ in section.events if action == "free"}


def _saved(recorder: Recorder, made: int, freed: int) -> bool:
    """Whether a tensor of forward is still there in backward."""
    return recorder.sections[made].moment == "forward" and recorder.sections[freed].moment in ("backward", "done", "end")
