"""The calls of a Python script with their literal arguments, read from its syntax tree. The script never runs."""

import ast
from dataclasses import dataclass
from typing import Any

from fullshard.base.errors import FullshardError, first_line


class _NotHere:
    """The value is not in the file."""

    def __repr__(self) -> str:
        return "(not in the file)"


NOT_HERE = _NotHere()


@dataclass(frozen=True)
class Word:
    """A name or a call that is no literal, such as `torch.bfloat16` or `CPUOffload(offload_params=True)`."""

    name: str  # its last part
    arguments: tuple[tuple[str, Any], ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        return dict(self.arguments).get(key, default)

    def __str__(self) -> str:
        inside = ", ".join(str(v) if k.isdigit() else f"{k}={v}" for k, v in self.arguments)
        return f"{self.name}({inside})" if self.arguments else self.name


@dataclass(frozen=True)
class ScriptCall:
    """A call: the last part of the function's own name, its arguments by name (positional ones as `0`, `1` …), its line."""

    name: str
    arguments: dict[str, Any]
    line: int
    text: str


class Script:
    """A parsed script: its calls in order, and what names in it stand for."""

    def __init__(self, text: str, where: str):
        try:
            nodes = list(ast.walk(ast.parse(text)))
            self.aliases, self.options = _aliases(nodes), _options(nodes)
            self.assigned, self.items = _assigned(nodes), _items(nodes)
            self.calls = sorted((self._call(node) for node in nodes if isinstance(node, ast.Call)), key=lambda call: call.line)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise FullshardError(f"{where} is no Python script that can be read: {first_line(error)}") from None

    def named(self, *names: str) -> list[ScriptCall]:
        return [call for call in self.calls if call.name in names]

    def value(self, node: ast.AST, depth: int = 0) -> Any:
        """A literal; a Word for names of torch and calls; NOT_HERE for what another file or an argument decides."""
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
        if isinstance(node, ast.Name):
            return self._name(node.id, depth)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            call = self._call(node, depth)
            return Word(call.name, tuple(call.arguments.items()))
        if isinstance(node, ast.Dict | ast.Set | ast.List | ast.Tuple):
            inside = node.keys if isinstance(node, ast.Dict) else node.elts
            return [self.value(part, depth + 1) for part in inside if part is not None]
        return NOT_HERE

    def _name(self, name: str, depth: int) -> Any:
        values = self.assigned.get(name, [])
        if len(values) != 1 or depth > 8:  # never, or more than once: only a run could tell
            return Word(self.aliases[name]) if name in self.aliases else NOT_HERE
        return self.value(values[0], depth + 1)

    def _attribute(self, node: ast.Attribute) -> Any:
        """The last word of a name of torch, the default of an option, or NOT_HERE for what only running the script tells."""
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in {"torch", *self.aliases}:
            known = self.aliases.get(root.id, root.id)
            lower = known[:1].islower() and known not in ("torch", "optim", "nn", "fsdp", "dist")
            return NOT_HERE if lower else Word(node.attr)
        if node.attr in self.options:  # args.lr: the default of --lr
            return self.options[node.attr]
        return NOT_HERE

    def _call(self, node: ast.Call, depth: int = 0) -> ScriptCall:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        arguments: dict[str, Any] = {}
        if depth <= 8:
            for i, part in enumerate(node.args):
                arguments[str(i)] = self.value(part, depth + 1)
            for keyword in node.keywords:
                if keyword.arg is not None:
                    arguments[keyword.arg] = self.value(keyword.value, depth + 1)
                else:
                    arguments |= self._unpacked(keyword.value, depth)
        called = self.aliases.get(name, name) if isinstance(node.func, ast.Name) else name
        return ScriptCall(called, arguments, node.lineno, ast.unparse(node.func))

    def _unpacked(self, node: ast.expr, depth: int) -> dict[str, Any]:
        """The items of `**name`: of the dict that it was made as, and of later `name["key"] = value`."""
        if not isinstance(node, ast.Name):
            return {"**": NOT_HERE}
        arguments: dict[str, Any] = {}
        for value in self.assigned.get(node.id, []):
            if isinstance(value, ast.Dict):
                pairs = zip(value.keys, value.values, strict=True)
                arguments |= {
                    k.value: self.value(v, depth + 1)
                    for k, v in pairs
                    if isinstance(k, ast.Constant) and isinstance(k.value, str)
                }
            elif isinstance(value, ast.Call) and getattr(value.func, "id", "") == "dict":
                arguments |= {k.arg: self.value(k.value, depth + 1) for k in value.keywords if k.arg}
        arguments |= {key: self.value(value, depth + 1) for key, value in self.items.get(node.id, {}).items()}
        return arguments if node.id in self.assigned else {"**": NOT_HERE}


def _aliases(nodes: list[ast.AST]) -> dict[str, str]:
    """Imported names, each with the last part of what it stands for."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0]: alias.name.rpartition(".")[2] for alias in node.names}
    return names


def _assigned(nodes: list[ast.AST]) -> dict[str, list[ast.expr]]:
    """The expressions that are assigned to each plain name."""
    values: dict[str, list[ast.expr]] = {}
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Name) and node.value is not None:  # type: ignore[attr-defined]
                values.setdefault(target.id, []).append(node.value)  # type: ignore[attr-defined]
    return values


def _items(nodes: list[ast.AST]) -> dict[str, dict[str, ast.expr]]:
    """The expressions that are assigned to items of plain names: `name["key"] = value`."""
    items: dict[str, dict[str, ast.expr]] = {}
    for node in nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and isinstance(target.slice, ast.Constant):
            items.setdefault(target.value.id, {})[str(target.slice.value)] = node.value  # type: ignore[attr-defined]
    return items


def _options(nodes: list[ast.AST]) -> dict[str, Any]:
    """The defaults of argparse options, by attribute."""
    defaults = {}
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"):
            continue
        names = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        default = next((k.value for k in node.keywords if k.arg == "default"), None)
        long = next((n for n in names if n.startswith("--")), names[0] if names else "")
        if isinstance(default, ast.Constant | ast.UnaryOp) and long:
            try:
                defaults[long.lstrip("-").replace("-", "_")] = ast.literal_eval(default)
            except ValueError:
                continue
    return defaults
