"""Conversations: from records of several customs to one text, with the characters of its answers.

Templates are rendered as transformers renders them, in a sandbox, but without it: a worker that packs text
should not import torch. Nor do templates get today's date: the same input packs to the same tokens tomorrow.
"""

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.data.sources import Record
from fullshard.data.tokenizer import Marked, Spans, tokenizer_config
from fullshard.errors import FullshardError, nearest

if TYPE_CHECKING:
    import jinja2

Message = dict[str, Any]

CUSTOMS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output")
BESIDE = ("system", "tools")  # may come with any of them
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around an answer while it is rendered; no text may hold these two
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# -- records to messages -------------------------------------------------------------------------------------


def wanted_fields(field: str | None) -> list[str]:
    return [*(CUSTOMS if field is None else [field]), *BESIDE]


def messages_of(place: str, record: Record, field: str | None = None) -> list[Message]:
    """The conversation in a record, whatever its custom; `field` names the one that holds the messages."""
    if field is not None or record.get("messages") is not None or record.get("conversations") is not None:
        found = _listed(place, record, field or ("messages" if record.get("messages") is not None else "conversations"))
    else:
        found = _asked(place, record)
    if (system := record.get("system")) and found[0]["role"] != "system":
        found = [{"role": "system", "content": system}, *found]
    if not any(message["role"] == "assistant" for message in found):
        raise FullshardError(f"{place} has no message of the assistant, so there is nothing to learn from it; leave it out")
    return found


def _listed(place: str, record: Record, name: str) -> list[Message]:
    messages = record.get(name)
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        there = [key for key, value in record.items() if value is not None]
        raise FullshardError(
            f"{place} has no list of messages in {name!r} (it has {', '.join(there) or 'no keys'}){nearest(name, there)}"
        )
    return [_message(f"{place}, message {i}", message) for i, message in enumerate(messages, 1)]


def _message(place: str, given: Message) -> Message:
    """One message as role and content; columns that a table filled with nulls are left out."""
    if "from" in given:
        given = {"role": given["from"], "content": given.get("value")}
    role = ROLES.get(given.get("role") or "", given.get("role"))
    if role not in KNOWN_ROLES:
        raise FullshardError(f"{place} has the role {role!r}; a role is one of {', '.join(KNOWN_ROLES)}, human or gpt")
    content = _content(place, given.get("content"), needed=not given.get("tool_calls"))
    return {key: value for key, value in given.items() if value is not None} | {"role": role, "content": content}


def _content(place: str, given: Any, needed: bool) -> str | None:
    """The text of a message; some write it as a list of parts."""
    if given is None and not needed:
        return None
    if isinstance(given, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in given):
        return "".join(part["text"] for part in given)
    if not isinstance(given, str):
        raise FullshardError(f"{place} has {'no content' if given is None else 'a content that is not text'}")
    return given


def _asked(place: str, record: Record) -> list[Message]:
    """A question and its answer, under one of two pairs of names."""
    for question, answer in (("prompt", "completion"), ("instruction", "output")):
        if isinstance(record.get(question), str) and isinstance(record.get(answer), str):
            more = record.get("input") if question == "instruction" else None
            asked = "\n\n".join(part for part in (record[question], more) if part)
            return [{"role": "user", "content": asked}, {"role": "assistant", "content": record[answer]}]
    there = [key for key, value in record.items() if value is not None]
    raise FullshardError(
        f"{place} has no conversation (it has {', '.join(there) or 'no keys'}); "
        "give messages, conversations, prompt and completion, or instruction and output"
    )


def _tools(place: str, record: Record) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):  # in tables, where every row must have the same keys
        try:
            tools = json.loads(tools)
        except ValueError:
            raise FullshardError(f"{place}: its tools are not JSON") from None
    return tools or None


# -- the template --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Template:
    """The Jinja text that turns messages into one text, and the special tokens it may write."""

    source: str
    origin: str
    special: dict[str, str] = field(default_factory=dict)

    def render(self, messages: list[Message], tools: list[Any] | None, prompted: bool = False) -> str:
        """The conversation as text; `prompted`: up to where the assistant speaks."""
        import jinja2

        try:
            return _compile(self.source).render(messages=messages, tools=tools, add_generation_prompt=prompted, **self.special)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise FullshardError(f"the chat template {self.origin} fails: {error}") from None


def open_template(tokenizer: str, given: str | Path | None, special: dict[str, str]) -> Template:
    """The template in the file `given`, or the one beside the tokenizer, or the plain one for bytes."""
    found = _given_template(Path(given)) if given is not None else _own_template(tokenizer)
    template = Template(*found, special)
    _refuse_broken(template)
    return template


def _given_template(path: Path) -> tuple[str, str]:
    if not path.is_file():
        raise FullshardError(f"there is no chat template {path}; write the path of a Jinja file after --template")
    return path.read_text(encoding="utf-8"), str(path)


def _own_template(tokenizer: str) -> tuple[str, str]:
    if tokenizer == "bytes":
        return PLAIN, "for bytes"
    path = Path(tokenizer)
    directory = path if path.is_dir() else path.parent
    if (directory / "chat_template.jinja").is_file():
        return _given_template(directory / "chat_template.jinja")
    found = tokenizer_config(directory).get("chat_template")
    if isinstance(found, list):  # several, each with a name
        found = next((t["template"] for t in found if t["name"] == "default"), None)
    if not isinstance(found, str):
        raise FullshardError(
            f"{directory} has no chat template (no chat_template.jinja, none in tokenizer_config.json); give one with --template"
        )
    return found, str(directory / "tokenizer_config.json")


def _refuse_broken(template: Template) -> None:
    try:
        import jinja2
    except ImportError:
        raise FullshardError("chat templates need jinja2: pip install 'fullshard[data]'") from None
    try:
        _compile(template.source)
    except jinja2.TemplateError as error:
        raise FullshardError(f"the chat template {template.origin} is not Jinja: {error}") from None


@lru_cache
def _compile(source: str) -> "jinja2.Template":
    """As transformers compiles it; `{% generation %}` puts marks around what the assistant says."""
    import jinja2
    from jinja2 import ext, nodes, parser, sandbox

    class Generation(ext.Extension):
        tags = {"generation"}

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    made = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    made.filters["tojson"] = tojson  # Jinja's own escapes for HTML
    made.globals["raise_exception"] = refuse
    return made.from_string(source)


# -- the answers in the text ---------------------------------------------------------------------------------


def conversation(template: Template, field: str | None, place: str, record: Record) -> Marked:
    """The text of a record's conversation, with where its answers are."""
    messages, tools = messages_of(place, record, field), _tools(place, record)
    try:
        if GENERATION.search(template.source):
            return _marked_by_template(template, messages, tools)
        return _marked_by_prefix(template, messages, tools)
    except FullshardError as error:
        raise FullshardError(f"{place}: {error}") from None


def _marked_by_template(template: Template, messages: list[Message], tools: list[Any] | None) -> Marked:
    """The template says itself what the assistant generates."""
    parts = re.split(f"[{OPEN}{CLOSE}]", template.render(messages, tools))
    edges = [0]
    for part in parts:
        edges.append(edges[-1] + len(part))
    spans = list(zip(edges[1:-1:2], edges[2::2], strict=False))
    if not spans:
        raise FullshardError(f"the chat template {template.origin} marks no answer with {{% generation %}}")
    return Marked("".join(parts), spans)


def _marked_by_prefix(template: Template, messages: list[Message], tools: list[Any] | None) -> Marked:
    """An answer is what its message adds to the text that asks for it, its end-of-turn mark included."""
    text = template.render(messages, tools)
    spans: Spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = template.render(messages[:i], tools, prompted=True)
            answered = template.render(messages[: i + 1], tools)
            if not (answered.startswith(asked) and text.startswith(answered)):
                raise FullshardError(
                    f"the chat template {template.origin} writes message {i + 1} differently with and without what is "
                    "around it, so its answer cannot be found; mark answers with {% generation %} in a --template"
                )
            spans.append((len(asked), len(answered)))
    return Marked(text, spans)
