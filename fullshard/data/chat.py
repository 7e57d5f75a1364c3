"""Conversations: from records of several customs to one text, with the characters of its answers."""

from typing import Any

from fullshard.data.sources import Record
from fullshard.data.templates import Message, Template
from fullshard.data.tokenizer import Marked
from fullshard.errors import FullshardError, nearest
from fullshard.reading import parse_json

CUSTOMS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output")
BESIDE = ("system", "tools")  # may come with any of them
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")


# -- records to messages -------------------------------------------------------------------------------------


def wanted_fields(field: str | None) -> list[str]:
    return [*(CUSTOMS if field is None else [field]), *BESIDE]


def messages_of(place: str, record: Record, field: str | None = None) -> list[Message]:
    """The conversation in a record, whatever its custom; `field` names the one that holds the messages."""
    if field is not None or record.get("messages") is not None or record.get("conversations") is not None:
        found = _listed(place, record, field or ("messages" if record.get("messages") is not None else "conversations"))
    else:
        found = _asked(place, record)
    if (system := _said(place, record, "system")) and found[0]["role"] != "system":
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
    role = given.get("role")
    role = ROLES.get(role, role) if isinstance(role, str) else role
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
            more = _said(place, record, "input") if question == "instruction" else None
            asked = "\n\n".join(part for part in (record[question], more) if part)
            return [{"role": "user", "content": asked}, {"role": "assistant", "content": record[answer]}]
    there = [key for key, value in record.items() if value is not None]
    raise FullshardError(
        f"{place} has no conversation (it has {', '.join(there) or 'no keys'}); "
        "give messages, conversations, prompt and completion, or instruction and output"
    )


def _said(place: str, record: Record, name: str) -> str | None:
    """A field that may be missing, and is text if it is not."""
    if not isinstance(found := record.get(name), str | None):
        raise FullshardError(f"{place} has a {name!r} that is not text, but of type {type(found).__name__}")
    return found


def _tools(place: str, record: Record) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):  # in tables, where every row must have the same keys
        try:
            tools = parse_json(tools, place)
        except FullshardError:
            raise FullshardError(f"{place}: its tools are not JSON") from None
    return tools or None


# -- messages to text ----------------------------------------------------------------------------------------


def conversation(template: Template, field: str | None, place: str, record: Record) -> Marked:
    """The text of a record's conversation, with where its answers are."""
    messages, tools = messages_of(place, record, field), _tools(place, record)
    try:
        return template.render(messages, tools)
    except FullshardError as error:
        raise FullshardError(f"{place}: {error}") from None
