"""Which tensors a compiled block saves for backward: a minimum cut, as AOT autograd makes it.

Backward needs some tensors that pointwise kernels compute in forward. Compiled code keeps any set of tensors from which such
kernels compute all of them again, and takes the set of fewest bytes: the result of a matrix product in bf16 rather than its
copy in fp32. What no pointwise kernel computes, such as a product, the block's input or drawn random numbers, must be kept if
the set has it.
"""

from collections import deque
from collections.abc import Mapping, Set
from math import inf

Node = tuple[int, bool] | None  # a tensor before or after its own bytes; None: where all that is kept comes from
Flows = dict[Node | str, dict[Node | str, float]]
WANTED = "wanted"


def fewest_bytes(sources: Mapping[int, Set[int]], sizes: Mapping[int, float], wanted: Set[int], kept: Set[int]) -> set[int]:
    """The tensors to keep besides those `kept` anyway, so that all `wanted` can be computed again. `sources`: what each tensor
    that can be computed again is computed from. Of equal sets, the one nearest to `wanted`."""
    flows: Flows = {None: {}, WANTED: {}}
    left, seen = list(wanted), set(wanted)
    for tensor in wanted:
        _join(flows, (tensor, True), WANTED, inf)
    while left:
        tensor = left.pop()
        _join(flows, (tensor, False), (tensor, True), sizes.get(tensor, 0))
        if tensor not in sources:
            _join(flows, None, (tensor, False), inf)
            continue
        for source in sources[tensor] - kept:
            _join(flows, (source, True), (tensor, False), inf)
            if source not in seen:
                seen.add(source)
                left.append(source)
    while path := _path(flows):
        amount = min(flows[a][b] for a, b in path)
        for a, b in path:
            flows[a][b] -= amount
            flows[b][a] += amount
    behind = _reaching(flows)
    return {t for t in seen if (t, True) in behind and (t, False) not in behind and sizes.get(t, 0)}


def _join(flows: Flows, a: Node | str, b: Node | str, amount: float) -> None:
    flows.setdefault(a, {})[b] = amount
    flows.setdefault(b, {}).setdefault(a, 0)


def _path(flows: Flows) -> list[tuple[Node | str, Node | str]]:
    """The shortest way on which more can flow."""
    came: dict[Node | str, Node | str] = {None: None}
    left: deque[Node | str] = deque([None])
    while left and WANTED not in came:
        a = left.popleft()
        for b, amount in flows[a].items():
            if amount > 0 and b not in came:
                came[b] = a
                left.append(b)
    if WANTED not in came:
        return []
    path: list[tuple[Node | str, Node | str]] = []
    at: Node | str = WANTED
    while at is not None:
        path.append((came[at], at))
        at = came[at]
    return path


def _reaching(flows: Flows) -> set[Node | str]:
    """What more can flow from to the wanted."""
    found: set[Node | str] = {WANTED}
    left: list[Node | str] = [WANTED]
    while left:
        b = left.pop()
        for a in flows[b]:
            if flows[a][b] > 0 and a not in found:
                found.add(a)
                left.append(a)
    return found
