"""Chat templates: where they come from, and the process that renders them.

Templates are rendered as transformers renders them, but without it: a worker that packs text should not import torch. Nor
do templates get today's date: the same input packs to the same tokens tomorrow.
"""

import atexit
import importlib.util
import json
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from fullshard.data import template_process
from fullshard.data.tokenizer import Marked, tokenizer_config
from fullshard.errors import FullshardError
from fullshard.reading import is_directory, is_plain_file, read_text

Message = dict[str, Any]

MOST_CHARACTERS = 4 << 20  # of a conversation: about a million tokens
SECONDS = 5  # of the processor, for a conversation
MEMORY = 512 << 20  # bytes of address space of the process that renders
MOST_SOURCE = 1 << 20  # bytes of a template
PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Template:
    """The Jinja text that turns messages into one text, and the special tokens it may write."""

    source: str
    origin: str
    special: dict[str, str] = field(default_factory=dict)

    def render(self, messages: list[Message], tools: list[Any] | None) -> Marked:
        """The text of a conversation, with the characters of its answers."""
        found = self._ask(messages, tools, "fails")
        return Marked(found["text"], [(start, end) for start, end in found["answers"]])

    def refuse_broken(self) -> None:
        self._ask(None, None, "is not Jinja")

    def _ask(self, messages: list[Message] | None, tools: list[Any] | None, failing: str) -> dict[str, Any]:
        found = renderer().ask(pickle.dumps((self.source, self.special, messages, tools)))
        if "failed" in found:
            raise FullshardError(f"the chat template {self.origin} {failing}: {found['failed']}")
        if "refused" in found:
            raise FullshardError(f"the chat template {self.origin} {found['refused']}")
        return found


# -- where a template comes from -----------------------------------------------------------------------------


def open_template(tokenizer: str, given: str | Path | None, special: dict[str, str]) -> Template:
    """The template in the file `given`, or the one beside the tokenizer, or the plain one for bytes."""
    if importlib.util.find_spec("jinja2") is None:
        raise FullshardError("chat templates need jinja2: pip install 'fullshard[data]'")
    found = _given_template(Path(given)) if given is not None else _own_template(tokenizer)
    template = Template(*found, special)
    template.refuse_broken()
    return template


def _given_template(path: Path) -> tuple[str, str]:
    if not is_plain_file(path):
        raise FullshardError(f"there is no chat template {path}; write the path of a Jinja file after --template")
    return read_text(path, "chat template", MOST_SOURCE), str(path)


def _own_template(tokenizer: str) -> tuple[str, str]:
    if tokenizer == "bytes":
        return PLAIN, "for bytes"
    path = Path(tokenizer)
    directory = path if is_directory(path) else path.parent
    if is_plain_file(directory / "chat_template.jinja"):
        return _given_template(directory / "chat_template.jinja")
    found = tokenizer_config(directory).get("chat_template")
    if isinstance(found, list):  # several, each with a name
        named = [t for t in found if isinstance(t, dict) and t.get("name") == "default"]
        found = named[0].get("template") if named else None
    if not isinstance(found, str):
        raise FullshardError(
            f"{directory} has no chat template (no chat_template.jinja, none in tokenizer_config.json); give one with --template"
        )
    return found, str(directory / "tokenizer_config.json")


# -- the process that renders --------------------------------------------------------------------------------


class Renderer:
    """A `template_process`, started when it is first asked and again when a template has ended it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def ask(self, request: bytes) -> dict[str, Any]:
        with self.lock:
            if self.process is None:
                self.process = _start()
            try:
                found = _exchange(self.process, request)
            except (OSError, EOFError):
                return {"refused": self._why_ended()}
            except BaseException:  # a Ctrl-C in between: its answer would be taken for that to the next request
                self.close()
                raise
        return {"refused": _too_slow()} if "slow" in found else found

    def _why_ended(self) -> str:
        code = self.close()
        if -code in (signal.SIGXCPU, signal.SIGPROF):
            return _too_slow()
        if code == 0:  # it has given up a request or an answer
            return "takes more memory than a template may have"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return f"ended the process that renders it {how}; use another template"

    def close(self) -> int:
        """End the process; its exit code."""
        process, self.process = self.process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                continue  # what was not yet written has nobody to read it
        try:
            return process.wait(timeout=2)  # it ends when its input does
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


@lru_cache
def renderer() -> Renderer:
    """This process's own."""
    made = Renderer()
    atexit.register(made.close)
    return made


def _too_slow() -> str:
    return f"takes longer than {SECONDS} s for one conversation"


def _start() -> subprocess.Popen[bytes]:
    limits = [str(n) for n in (MOST_CHARACTERS, SECONDS, MEMORY)]
    # -P: no module of the directory that the program lies in is taken for one of Python's.
    return subprocess.Popen(
        [sys.executable, "-P", template_process.__file__, *limits],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(request).to_bytes(8, "big") + request)
    process.stdin.flush()
    found, _, text = _exactly(process.stdout, int.from_bytes(_exactly(process.stdout, 8), "big")).partition(b"\n")
    return {**json.loads(found), "text": text.decode()}


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    found = pipe.read(count)
    if len(found) < count:
        raise EOFError
    return found
