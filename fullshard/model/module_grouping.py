"""Group the modules of a model into units. An engine makes the tree of modules from its own kind of model.

Reads only names, classes, sizes and the order of registration.
"""

import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fullshard.base.errors import FullshardError, nearest
from fullshard.base.text import spans
from fullshard.model.description import UnitKind


@dataclass(eq=False)
class ModuleNode:
    """A module of a model. One that a model has in two places is one node.

    `parameters`: elements of each parameter of its own, by attribute; `identities`: equal for a parameter that is tied.
    `is_container`: its children are a list, and may be blocks. `has_forward`: False for a plain list, which cannot be a unit.
    `outside`: the identities of parameters inside that the model uses while this module does not run, so that it cannot
    gather them. `kind`: what it is as a unit.
    """

    cls: type
    parameters: dict[str, int]
    identities: dict[str, int]
    children: list[tuple[str, "ModuleNode"]]
    is_container: bool = False
    has_forward: bool = True
    outside: frozenset[int] = frozenset()
    kind: UnitKind = "block"

    def named(self) -> Iterator[tuple[str, "ModuleNode"]]:
        """Every module inside and this one, with its path, each once."""
        seen: set[int] = set()

        def visit(node: ModuleNode, path: str) -> Iterator[tuple[str, ModuleNode]]:
            if id(node) not in seen:
                seen.add(id(node))
                yield path, node
                for name, child in node.children:
                    yield from visit(child, _join(path, name))

        return visit(self, "")

    def at(self, path: str) -> "ModuleNode":
        """The module at a path."""
        node = self
        while path:
            name, child = next((n, c) for n, c in node.children if path == n or path.startswith(f"{n}."))
            node, path = child, path[len(name) + 1 :]
        return node

    def has_parameters(self) -> bool:
        return bool(self.parameters) or any(child.has_parameters() for _, child in self.children)

    def owned(self) -> set[int]:
        """The identities of all parameters inside."""
        return {identity for _, node in self.named() for identity in node.identities.values()}

    def numel(self) -> int:
        """Elements of all parameters inside, a tied one once."""
        sizes = {node.identities[n]: size for _, node in self.named() for n, size in node.parameters.items()}
        return sum(sizes.values())


@dataclass
class UnitGroup:
    """A unit under construction."""

    name: str
    kind: UnitKind
    modules: list[str] = field(default_factory=list)

    def owns(self, parameter: str) -> int:
        """How deep the module of this unit is that contains the parameter; −1 if none does."""
        return max((len(m) for m in self.modules if m == "" or parameter.startswith(f"{m}.")), default=-1)


def group_modules(
    root: ModuleNode,
    names_of: Mapping[int, Sequence[str]],
    *,
    classes: Sequence[str] = (),
    names: Sequence[str] = (),
    min_params: int = 0,
    apart: Sequence[str] = (),
    small: int = 0,
) -> list[UnitGroup]:
    """The units of a model, in the order of its modules.

    `names_of`: all names of each parameter, by its identity. `classes`, `names`, `min_params`: the rule by which blocks are
    found; without one, repeated blocks. `apart`: modules that are units of their own besides. `small`: modules of a block whose
    tensors all have fewer elements form a unit of their own.
    """
    blocks = [b for path in _find_blocks(root, classes, names, min_params) for b in _running(root.at(path), path)]
    first = {node: path for path, node in root.named()}  # a module that the model has in two places is one block
    blocks = list(dict.fromkeys(first[root.at(path)] for path in (*blocks, *apart)))
    called = [p for b in blocks for p in _called_inside(root.at(b), b) if p not in blocks]
    groups = _merge_tied(names_of, _with_leftovers(root, blocks, called))
    return _with_small(root, groups, small) if small else groups


def owner_of(parameter: str, groups: Sequence[UnitGroup]) -> UnitGroup | None:
    """The group whose deepest module contains the parameter."""
    best = max(groups, key=lambda g: g.owns(parameter), default=None)
    return best if best is not None and best.owns(parameter) >= 0 else None


# -- finding the blocks ----------------------------------------------------------------------------


def _find_blocks(root: ModuleNode, classes: Sequence[str], names: Sequence[str], min_params: int) -> list[str]:
    """The paths of the blocks, by the one rule that is given, or else the repeated blocks."""
    if min_params < 0:
        raise FullshardError(f"min_params must be at least 1, not {min_params}")
    rules = {"classes": bool(classes), "names": bool(names), "min_params": bool(min_params)}
    if sum(rules.values()) > 1:
        raise FullshardError(f"grouping takes one rule, not {' and '.join(k for k, on in rules.items() if on)}")
    if classes:
        return _by_class(root, classes)
    if names:
        return _by_name(root, names)
    return _by_size(root, min_params) if min_params else repeated_blocks(root)


def repeated_blocks(root: ModuleNode) -> list[str]:
    """Paths of the outermost modules that repeat: the layers of a transformer, the stages of a network.

    Layers with submodules are preferred to a list of plain linear layers. Without any container, the model's own
    children are the blocks.
    """
    for composite in (True, False):
        blocks = [path for container in _outermost_repeating(root, "", composite) for path in container]
        if blocks:
            return blocks
    return _children_with_parameters(root)


def _outermost_repeating(node: ModuleNode, path: str, composite: bool) -> Iterator[list[str]]:
    """The children of each outermost container that has several modules of one class."""
    children = [(_join(path, n), c) for n, c in node.children if c.has_parameters()]
    kinds = Counter(c.cls for _, c in children if not composite or c.children)
    one = len(children) == 1 and node.children[0][0] == "0" and not node.has_forward  # a list of one block
    repeating = [t for t, count in kinds.items() if count > 1 or one]
    if node.is_container and repeating:
        yield [p for p, _ in children]
        return
    for child_path, child in children:
        yield from _outermost_repeating(child, child_path, composite)


def _children_with_parameters(root: ModuleNode) -> list[str]:
    holders = [(n, c) for n, c in root.children if c.has_parameters()]
    if len(holders) == 1 and holders[0][1].children:
        return [_join(holders[0][0], p) for p in _children_with_parameters(holders[0][1])]
    return [n for n, _ in holders] if len(holders) > 1 else []


def _by_class(root: ModuleNode, classes: Sequence[str]) -> list[str]:
    present = Counter(m.cls.__name__ for p, m in root.named() if p and m.has_parameters() and m.has_forward)
    for name in classes:
        if name not in present:
            listing = ", ".join(f"{k} ×{n}" for k, n in present.items())
            raise FullshardError(f"no module of class {name!r}{nearest(name, list(present))} (the model has {listing})")
    return _outermost([p for p, m in root.named() if p and m.cls.__name__ in classes])


def _by_name(root: ModuleNode, patterns: Sequence[str]) -> list[str]:
    """Paths of modules that match a pattern, in the model's order. A wildcard stands for one part of a path at most."""
    paths = [p for p, m in root.named() if p and m.has_parameters() and m.has_forward]
    hits: set[str] = set()
    for pattern in patterns:
        matched = [p for p in paths if fnmatch.fnmatchcase(p, pattern) and p.count(".") == pattern.count(".")]
        if not matched:
            listing = ", ".join(spans([p for p in paths if p.count(".") <= 2]))
            raise FullshardError(f"no module is called {pattern!r}{nearest(pattern, paths)} (the model has {listing})")
        hits.update(matched)
    return [p for p in paths if p in hits]


def _by_size(root: ModuleNode, min_params: int) -> list[str]:
    """Bottom up, as FSDP1's size policy: a module is a block if its parameters outside inner blocks reach the size."""
    units: list[str] = []
    seen: set[int] = set()

    def visit(node: ModuleNode, path: str) -> int:
        rest = sum(visit(child, _join(path, n)) for n, child in node.children)
        for name, size in node.parameters.items():
            if node.identities[name] not in seen:
                seen.add(node.identities[name])
                rest += size
        if path and rest >= min_params and node.has_forward:
            units.append(path)
            return 0
        return rest

    visit(root, "")
    if not units:
        sizes = [(m.numel(), n) for n, m in root.named() if n and m.has_forward]
        largest = f"the largest, {max(sizes)[1]}, has {max(sizes)[0]}" if sizes else "the model has no modules inside"
        raise FullshardError(f"no module has {min_params} parameters; {largest}")
    return units


def _running(node: ModuleNode, path: str) -> list[str]:
    """The block; or the blocks inside it, if it does not run itself, or owns a parameter that only a module around it gathers
    in time."""
    if not node.outside or (node.outside < node.owned() and _called_inside(node, path)):
        return [path]
    return [block for name, child in node.children if child.has_parameters() for block in _running(child, _join(path, name))]


def _called_inside(node: ModuleNode, path: str) -> list[str]:
    """The outermost modules inside that run whenever the `outside` parameters are used; none if a parameter has no such
    module."""
    paths: list[str] = []
    if node.outside & set(node.identities.values()):
        return []
    for name, child in node.children if node.outside else ():
        if node.outside & child.owned():
            more = _called_inside(child, _join(path, name)) if child.outside else [_join(path, name)]
            if not more:
                return []
            paths += more
    return paths


# -- modules outside the blocks ----------------------------------------------------------------------


def _with_leftovers(root: ModuleNode, blocks: list[str], called: list[str]) -> list[UnitGroup]:
    """The blocks and the groups of modules outside them: `embed` before the first block, `head` after the last, `middle`
    between (an encoder's last norm), `root` for parameters of a module around the blocks. `called`: modules inside blocks
    that the model also calls by themselves."""
    blocks = [*blocks, *called]
    order = {path: i for i, (path, _) in enumerate(root.named())}
    ordered = sorted(blocks, key=order.__getitem__)
    embed, middle, head = UnitGroup("embed", "embed"), UnitGroup("middle", "middle"), UnitGroup("head", "head")
    rest = UnitGroup("root", "root")
    for path in _leftover_modules(root, ordered):
        if path == "" or any(b.startswith(f"{path}.") for b in blocks):
            rest.modules = [""]  # a module around blocks cannot be its own unit
        elif not ordered or order[path] < order[ordered[0]]:
            embed.modules.append(path)
        else:
            (head if order[path] > order[ordered[-1]] else middle).modules.append(path)
    units = [UnitGroup(path, "middle" if path in called else root.at(path).kind, [path]) for path in ordered]
    groups = [g for g in (embed, *units, middle, head) if g.modules]
    groups.sort(key=lambda g: order[g.modules[0]])
    if rest.modules:
        groups.append(rest)
    for group in (embed, middle, head, rest):
        while group.name in blocks:  # a block may have this name already
            group.name += "_rest"
    return groups


def _leftover_modules(root: ModuleNode, blocks: list[str]) -> list[str]:
    """The outermost modules outside all blocks that own parameters directly, or gather those of modules inside; `""` for the
    model itself."""
    owners = [_gatherer(root, path) for path, node in root.named() if node.parameters and not _inside(path, blocks)]
    free = [p for p in owners if p and not any(b.startswith(f"{p}.") for b in blocks)]
    around = [p for p in owners if p not in free]
    return list(dict.fromkeys([*around, *_outermost(free)]))


def _gatherer(root: ModuleNode, path: str) -> str:
    """The module, or the innermost one around it, that runs whenever its parameters are used; else the model."""
    while path and root.at(path).outside:
        path = path.rpartition(".")[0]
    return path


def _merge_tied(names_of: Mapping[int, Sequence[str]], groups: list[UnitGroup]) -> list[UnitGroup]:
    """Merge groups that share a tied parameter: it can be gathered in one unit only."""
    for names in [tied for tied in names_of.values() if len(tied) > 1]:
        sharing = [g for g in groups if any(owner_of(n, groups) is g for n in names)]
        if sharing and sharing[-1].kind == "root":
            sharing.reverse()  # the root contains every module already
        for other in sharing[1:]:
            if sharing[0].kind != "root":
                sharing[0].modules += other.modules
            groups.remove(other)
    return groups


def _with_small(root: ModuleNode, groups: list[UnitGroup], below: int) -> list[UnitGroup]:
    """The groups, each block followed by a group of the modules inside it that own only small tensors."""
    kept, units = [], {m for g in groups for m in g.modules}
    for group in groups:
        kept.append(group)
        block = group.modules[0] if group.kind == "block" and len(group.modules) == 1 else None
        inside = root.at(block).named() if block else ()
        paths = [f"{block}.{p}" for p, m in inside if p and f"{block}.{p}" not in units and _is_small(m, below)]
        if paths:
            kept.append(UnitGroup(f"{block}.small", "small", paths))
    if not any(g.kind == "small" for g in kept):
        raise FullshardError(
            f"small = {below} has no effect: every module inside a block has a tensor of {below} elements or more"
        )
    return kept


def _is_small(node: ModuleNode, below: int) -> bool:
    inside = sum(len(m.parameters) for _, m in node.named())
    return bool(node.parameters) and inside == len(node.parameters) and all(n < below for n in node.parameters.values())


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _outermost(paths: list[str]) -> list[str]:
    return [p for p in paths if not any(p != q and p.startswith(f"{q}.") for q in paths)]


def _inside(path: str, parents: Sequence[str]) -> bool:
    return any(path == p or path.startswith(f"{p}.") for p in parents if p)
