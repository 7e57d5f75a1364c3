"""A draft as the text of a recipe, and as a report for people. The text is loaded back before it is given out."""

import json
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.reading import parse_toml
from fullshard.base.text import counted
from fullshard.runs.migrate.recipe_draft import Draft, Entry, show
from fullshard.runs.recipe.recipe import FILL_IN, Recipe, make_recipe, override

# A key that is given replaces one that cannot stand beside it.
INSTEAD = {"train.tokens": "train.steps", "train.steps": "train.tokens", "data.source": "data.path", "data.path": "data.source"}


def recipe_toml(draft: Draft, name: str, overrides: list[str]) -> str:
    """The recipe, commented. `name`: of the file that it is made from. Raises if the result is no recipe."""
    _apply(draft, overrides)
    parts = [_head(draft, name), *_sections(draft), *_lists(draft)]
    text = "\n".join(parts)
    make_recipe(parse_toml(text, "the recipe made from " + name), f"the recipe made from {name}")
    return text


def report(draft: Draft, name: str) -> str:
    """What was carried over and what was not, in lines."""
    lines = [f"{name}: {draft.system}, {counted(len(draft.leaves), 'key')}: {len(draft.carried)} carried over, "]
    lines[0] += f"{len(draft.idle)} without effect here, {len(draft.lost)} not carried over"
    assumed = {key: entry for key, entry in draft.entries.items() if entry.assumed}
    missing = {key: entry for key, entry in assumed.items() if entry.value == FILL_IN}
    lines += _listed("to fill in", {key: entry.comment for key, entry in missing.items()})
    lines += _listed("assumed", {f"{k} = {show(e.value)}": e.comment for k, e in assumed.items() if k not in missing})
    lines += _listed("not carried over", _with_values(draft, draft.lost))
    lines += _listed("without effect here", _with_values(draft, draft.idle))
    return "\n".join(lines)


def _apply(draft: Draft, overrides: list[str]) -> None:
    """Put `section.key=value` into the draft."""
    for text in overrides:
        tree: dict[str, Any] = {}
        override(tree, text)
        for section, table in tree.items():
            for key, value in table.items():
                draft.entries.pop(INSTEAD.get(f"{section}.{key}", ""), None)
                draft.entries[f"{section}.{key}"] = Entry(value, "given to `fullshard migrate`")


def _head(draft: Draft, name: str) -> str:
    lines = [f"# Made by `fullshard migrate` from {name} ({draft.system})."]
    if _missing(draft):
        lines.append(
            f"# Write what {FILL_IN} stands for before training, here or after the recipe: `{_missing(draft)[0]}=VALUE`."
        )
    return "\n".join([*lines, "#   fullshard train RECIPE --dry-run", ""])


def _missing(draft: Draft) -> list[str]:
    return [key for key, entry in draft.entries.items() if entry.value == FILL_IN]


def _sections(draft: Draft) -> list[str]:
    """A table for each section, its keys in the order of the reference."""
    texts = []
    for section, kind in Recipe.model_fields.items():
        keys = [key for key in draft.entries if key.partition(".")[0] == section]
        order = _fields(kind.annotation)
        keys.sort(key=lambda key: order.index(key.partition(".")[2]) if key.partition(".")[2] in order else len(order))
        if keys:
            texts.append("\n".join([f"[{section}]", *(_line(key.partition(".")[2], draft.entries[key]) for key in keys), ""]))
    known = {key for key in draft.entries if key.partition(".")[0] in Recipe.model_fields}
    if unknown := sorted(draft.entries.keys() - known):
        raise FullshardError(
            f"a recipe has no section {unknown[0].partition('.')[0]!r}; its sections are {', '.join(Recipe.model_fields)}"
        )
    return texts


def _fields(kind: Any) -> list[str]:
    return list(getattr(kind, "model_fields", {}))


def _line(key: str, entry: Entry) -> str:
    mark = "FILL IN: " if entry.value == FILL_IN else "assumed: " if entry.assumed else ""
    return f"{key} = {_toml(entry.value)}  # {mark}{_one_line(entry.comment)}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):
        return json.dumps(value)  # a basic string of TOML has JSON's escapes
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _lists(draft: Draft) -> list[str]:
    """What the recipe has not, as comments at its end."""
    lines = _listed("not carried over", _with_values(draft, draft.lost))
    lines += _listed("without effect here", _with_values(draft, draft.idle))
    return ["\n".join(f"# {line}".rstrip() for line in lines), ""] if lines else []


def _with_values(draft: Draft, reasons: dict[str, str]) -> dict[str, str]:
    return {f"{key} = {show(draft.leaves[key])}": why for key, why in reasons.items()}


def _listed(title: str, items: dict[str, str]) -> list[str]:
    """A titled list; keys that share a reason stand together."""
    if not items:
        return []
    by_reason: dict[str, list[str]] = {}
    for key, why in items.items():
        by_reason.setdefault(why, []).append(key)
    return [f"{title}:", *(f"  {_one_line(', '.join(keys))}: {_one_line(why)}" for why, keys in by_reason.items())]


def _one_line(text: str) -> str:
    """Text of a file without line breaks or control characters, which would end a comment."""
    return "".join(c if c.isprintable() else " " for c in text)
