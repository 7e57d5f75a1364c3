"""Renders chat records to text, and returns the spans of the assistant's answers. Knows several record formats."""

from typing import Any

from fullshard.base.errors import FullshardError, nearest
from fullshard.base.reading import parse_json
from fullshard.data.sources import Record
from fullshard.data.templates import Message, Template
from fullshard.data.tokenizer import MarkedText

RECORD_FIELDS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output")
OPTIONAL_FIELDS = ("system", "tools")  # any format may have them
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")


# -- records to messages -------------------------------------------------------------------------------------


def wanted_fields(field: str | None) -> list[str]:
    return [*(RECORD_FIELDS if field is None else [field]), *OPTIONAL_FIELDS]


def messages_of(place: str, record: Record, field: str | None = None) -> list[Message]:
    """The messages of a record in any known format. `field`: the name of the field that holds them. `place` names the
    record in errors."""
    if field is not None or record.get("messages") is not None or record.get("conversations") is not None:
        messages = _message_list(place, record, field or ("messages" if record.get("messages") is not None else "conversations"))
    else:
        messages = _question_and_answer(place, record)
    if (system := _optional_text(place, record, "system")) and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    if not any(message["role"] == "assistant" for message in messages):
        raise FullshardError(f"{place} has no message of the assistant, so there is nothing to learn from it; leave it out")
    return messages


def _message_list(place: str, record: Record, name: str) -> list[Message]:
    messages = record.get(name)
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        keys = [key for key, value in record.items() if value is not None]
        raise FullshardError(
            f"{place} has no list of messages in {name!r} (it has {', '.join(keys) or 'no keys'}){nearest(name, keys)}"
        )
    return [_message(f"{place}, message {i}", message) for i, message in enumerate(messages, 1)]


def _message(place: str, given: Message) -> Message:
    """A message with `role` and `content`. Keys whose value is null, as in tables, are left out."""
    if "from" in given:
        given = {"role": given["from"], "content": given.get("value")}
    role = given.get("role")
    role = ROLES.get(role, role) if isinstance(role, str) else role
    if role not in KNOWN_ROLES:
        raise FullshardError(f"{place} has the role {role!r}; a role is one of {', '.join(KNOWN_ROLES)}, human or gpt")
    content = _content(place, given.get("content"), required=not given.get("tool_calls"))
    return {key: value for key, value in given.items() if value is not None} | {"role": role, "content": content}


def _content(place: str, given: Any, required: bool) -> str | None:
    """The text of a message, which may be given as a list of parts."""
    if given is None and not required:
        return None
    if isinstance(given, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in given):
        return "".join(part["text"] for part in given)
    if not isinstance(given, str):
        raise FullshardError(f"{place} has {'no content' if given is None else 'a content that is not text'}")
    return given


def _question_and_answer(place: str, record: Record) -> list[Message]:
    """The messages of a record with `prompt` and `completion`, or `instruction`, `input` and `output`."""
    for question, answer in (("prompt", "completion"), ("instruction", "output")):
        if isinstance(record.get(question), str) and isinstance(record.get(answer), str):
            more = _optional_text(place, record, "input") if question == "instruction" else None
            asked = "\n\n".join(part for part in (record[question], more) if part)
            return [{"role": "user", "content": asked}, {"role": "assistant", "content": record[answer]}]
    keys = [key for key, value in record.items() if value is not None]
    raise FullshardError(
        f"{place} has no conversation (it has {', '.join(keys) or 'no keys'}); "
        "give messages, conversations, prompt and completion, or instruction and output"
    )


def _optional_text(place: str, record: Record, name: str) -> str | None:
    """A field that is text or missing."""
    if not isinstance(text := record.get(name), str | None):
        raise FullshardError(f"{place} has a {name!r} that is not text, but of type {type(text).__name__}")
    return text


def _tools(place: str, record: Record) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):  # tables hold JSON text, because all their rows must have the same keys
        try:
            tools = parse_json(tools, place)
        except FullshardError:
            raise FullshardError(f"{place}: its tools are not JSON") from None
    return tools or None


# -- messages to text ----------------------------------------------------------------------------------------


def conversation(template: Template, field: str | None, place: str, record: Record) -> MarkedText:
    """The text of a record's conversation, with the spans of its answers."""
    messages, tools = messages_of(place, record, field), _tools(place, record)
    try:
        return template.render(messages, tools)
    except FullshardError as error:
        raise FullshardError(f"{place}: {error}") from None
