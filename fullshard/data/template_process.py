"""The program that renders chat templates: `fullshard.data.templates` starts it, with limits on time and memory.

A template is untrusted code. Jinja's sandbox keeps it from files and Python's internals; limits of the operating system
bound its CPU time and memory. Requests come on stdin, answers go to stdout. Imports nothing of fullshard, so that it starts
quickly and uses little memory itself.
"""

import json
import pickle
import re
import resource
import secrets
import signal
import sys
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import jinja2

Message = dict[str, Any]
Spans = list[tuple[int, int]]
Rendered = tuple[str, Spans]

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
ALPHABET = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # characters that no filter of Jinja changes


class TooSlow(BaseException):
    """The time limit is reached. A BaseException, so that no `except Exception` in Jinja catches it."""


class TemplateRefusedError(Exception):
    """A template that cannot be used. The message completes a sentence that begins with the template's name."""


# -- templates -----------------------------------------------------------------------------------------------


class Marks:
    """Random texts that are written before and after each answer, so that answers can be found in the rendered text. They
    are new for each conversation: no message can contain them. Between conversations they are empty."""

    def __init__(self) -> None:
        self.open = self.close = ""

    def draw(self) -> None:
        secret = "".join(secrets.choice(ALPHABET) for _ in range(26))  # 130 bits
        self.open, self.close = f"{secret}\ufdd0", f"{secret}\ufdd1"

    def clear(self) -> None:
        self.open = self.close = ""


MARKS = Marks()


@lru_cache(4)
def compile_template(source: str) -> "jinja2.Template":
    """Compile a template as transformers does. `{% generation %}` blocks are rendered between the marks."""
    import jinja2
    from jinja2 import ext, nodes, parser, sandbox

    class Generation(ext.Extension):
        tags = {"generation"}

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{MARKS.open}{caller()}{MARKS.close}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    made = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    made.filters["tojson"] = tojson  # Jinja's own escapes HTML
    made.globals["raise_exception"] = refuse
    return made.from_string(source)


# -- rendering -----------------------------------------------------------------------------------------------


def render(source: str, special: dict[str, str], messages: list[Message], tools: list[Any] | None) -> Rendered:
    """The text of a conversation, and the spans of its answers."""

    def text(upto: int, prompted: bool = False) -> str:
        """The first `upto` messages. `prompted`: with the prompt for the assistant's next message."""
        given = {"messages": messages[:upto], "tools": tools, "add_generation_prompt": prompted}
        return compile_template(source).render(**special, **given)

    find = marked_by_template if GENERATION.search(source) else marked_by_prefix
    return find(text, [m["role"] for m in messages])


def marked_by_template(text: Any, roles: list[str]) -> Rendered:
    """Find the answers by the template's `{% generation %}` blocks."""
    plain = text(len(roles))
    MARKS.draw()
    try:
        marked, (opening, closing) = text(len(roles)), (MARKS.open, MARKS.close)
    finally:
        MARKS.clear()
    spans, at, opened = Spans(), 0, list[int]()
    for part in re.split(f"({opening}|{closing})", marked):
        if part == opening:
            opened.append(at)
        elif part == closing:
            if not opened:
                raise TemplateRefusedError("closes an answer that it has not opened")
            start = opened.pop()
            spans += [] if opened else [(start, at)]
        elif plain.startswith(part, at):
            at += len(part)
        else:
            raise TemplateRefusedError("changes an answer after {% endgeneration %}; put what changes it inside the block")
    if opened or at != len(plain):
        raise TemplateRefusedError("changes an answer after {% endgeneration %}; put what changes it inside the block")
    if not spans:
        raise TemplateRefusedError("marks no answer with {% generation %}")
    return plain, spans


def marked_by_prefix(text: Any, roles: list[str]) -> Rendered:
    """Find the answers by rendering prefixes: an answer is what its message adds to the prompt for it, including the
    end-of-turn token."""
    whole, spans = text(len(roles)), Spans()
    for i in (i for i, role in enumerate(roles) if role == "assistant"):
        prompt, answered = text(i, prompted=True), text(i + 1)
        after = spans[-1][1] if spans else 0
        if not (after <= len(prompt) and answered.startswith(prompt) and whole.startswith(answered)):
            raise TemplateRefusedError(
                f"renders message {i + 1} differently depending on the messages "
                "around it, so its answer cannot be found; mark answers with {% generation %} in a --template"
            )
        spans.append((len(prompt), len(answered)))
    return whole, spans


# -- the process ---------------------------------------------------------------------------------------------


def answer(request: bytes, most_characters: int) -> dict[str, Any]:
    """The answer to a request: `text` and `answers`, `refused` or `failed` with a reason, or nothing if the request was only
    to compile."""
    try:
        source, special, messages, tools = pickle.loads(request)  # written by the process that started this one
        if messages is None:
            compile_template(source)
            return {}
        text, spans = render(source, special, messages, tools)
    except TemplateRefusedError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": "takes more memory than a template may have"}
    except RecursionError:
        return {"refused": "calls itself without end"}
    except Exception as error:
        return {"failed": f"{error}".strip()[:500] or type(error).__name__}
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in set(text)):
        return {"refused": "writes half of a surrogate pair, which is not text"}
    if len(text) > most_characters:
        return {"refused": f"writes {len(text):,} characters, more than the {most_characters:,} that a conversation may have"}
    return {"text": text, "answers": spans}


def answer_in_time(request: bytes, most_characters: int, seconds: int) -> bytes:
    """The answer as a line of JSON followed by the text, or `slow` after so many seconds of CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    # Python handles signals between bytecode instructions. If one instruction takes too long, the kernel ends the process.
    limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 2 * seconds + 1)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)
            reply = answer(request, most_characters)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except TooSlow:
        reply = {"slow": True}
    text = reply.pop("text", "").encode()
    return json.dumps(reply).encode() + b"\n" + text


def limit(what: int, value: int) -> None:
    """Set a soft limit. The hard limit stays, because the time limit is raised again for the next request."""
    with suppress(ValueError, OSError):  # a lower hard limit exists already
        resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def raise_too_slow(number: int, frame: object) -> None:
    raise TooSlow


def serve(requests: BinaryIO, answers: BinaryIO, most_characters: int, seconds: int) -> None:
    """Answer requests until stdin is closed. Both are preceded by their length, in 8 bytes."""
    while len(head := requests.read(8)) == 8:
        try:
            reply = answer_in_time(requests.read(int.from_bytes(head, "big")), most_characters, seconds)
        except MemoryError:  # for the request or the answer itself
            return
        answers.write(len(reply).to_bytes(8, "big") + reply)
        answers.flush()


def main() -> None:
    most_characters, seconds, memory = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    signal.signal(signal.SIGPROF, raise_too_slow)
    limit(resource.RLIMIT_AS, memory)
    limit(resource.RLIMIT_CORE, 0)
    serve(sys.stdin.buffer, sys.stdout.buffer, most_characters, seconds)


if __name__ == "__main__":
    main()
