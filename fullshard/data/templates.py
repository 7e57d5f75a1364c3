"""Chat templates: finds them, and renders them in a process of their own (see `template_process`).

They are rendered as transformers does it, but without importing it: a worker that packs text must not import torch.
Templates cannot read today's date, so that the same input always packs to the same tokens.
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

from fullshard.base.errors import FullshardError
from fullshard.base.reading import is_directory, is_plain_file, read_text
from fullshard.data import template_process
from fullshard.data.template_process import Message as Message
from fullshard.data.tokenizer import MarkedText, tokenizer_config

MOST_CHARACTERS = 4 << 20  # of a conversation: about a million tokens
SECONDS = 5  # of CPU time for a conversation
MEMORY = 512 << 20  # bytes of address space of the rendering process
MOST_TEMPLATE_BYTES = 1 << 20  # bytes of a template
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Template:
    """A Jinja template that renders messages to text. `origin` names it in errors; `special` are the tokenizer's special
    tokens, which it may use."""

    source: str
    origin: str
    special: dict[str, str] = field(default_factory=dict)

    def render(self, messages: list[Message], tools: list[Any] | None) -> MarkedText:
        """The text of a conversation, with the spans of its answers."""
        reply = self._request(messages, tools, "fails")
        return MarkedText(reply["text"], [(start, end) for start, end in reply["answers"]])

    def refuse_broken(self) -> None:
        """Raise if the template cannot be compiled."""
        self._request(None, None, "is not Jinja")

    def _request(self, messages: list[Message] | None, tools: list[Any] | None, failure: str) -> dict[str, Any]:
        """Render the messages, or only compile the template if there are none."""
        reply = renderer().request(pickle.dumps((self.source, self.special, messages, tools)))
        if "failed" in reply:
            raise FullshardError(f"the chat template {self.origin} {failure}: {reply['failed']}")
        if "refused" in reply:
            raise FullshardError(f"the chat template {self.origin} {reply['refused']}")
        return reply


# -- finding a template --------------------------------------------------------------------------------------


def open_template(tokenizer: str, given: str | Path | None, special: dict[str, str]) -> Template:
    """The template in the file `given`, or the tokenizer's own. The tokenizer `bytes` uses ChatML."""
    if importlib.util.find_spec("jinja2") is None:
        raise FullshardError("chat templates need jinja2: pip install 'fullshard[data]'")
    source = _template_file(Path(given)) if given is not None else _tokenizer_template(tokenizer)
    template = Template(*source, special)
    template.refuse_broken()
    return template


def _template_file(path: Path) -> tuple[str, str]:
    """The source of a template and its origin."""
    if not is_plain_file(path):
        raise FullshardError(f"there is no chat template {path}; write the path of a Jinja file after --template")
    return read_text(path, "chat template", MOST_TEMPLATE_BYTES), str(path)


def _tokenizer_template(tokenizer: str) -> tuple[str, str]:
    """The source and origin of the template that comes with a tokenizer."""
    if tokenizer == "bytes":
        return CHATML, "for bytes"
    path = Path(tokenizer)
    directory = path if is_directory(path) else path.parent
    if is_plain_file(directory / "chat_template.jinja"):
        return _template_file(directory / "chat_template.jinja")
    template = tokenizer_config(directory).get("chat_template")
    if isinstance(template, list):  # several templates, each with a name
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    if not isinstance(template, str):
        raise FullshardError(
            f"{directory} has no chat template (no chat_template.jinja, none in tokenizer_config.json); give one with --template"
        )
    return template, str(directory / "tokenizer_config.json")


# -- the rendering process -----------------------------------------------------------------------------------


class Renderer:
    """Runs a `template_process`: starts it at the first request, and again after a template has ended it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def request(self, request: bytes) -> dict[str, Any]:
        """Send a request and return the answer. An answer of the process that ended is `refused`, with the reason."""
        with self.lock:
            if self.process is None:
                self.process = _start()
            try:
                reply = _exchange(self.process, request)
            except (OSError, EOFError):
                return {"refused": self._why_ended()}
            except BaseException:  # after Ctrl-C the answer is still to come, and would be read at the next request
                self.close()
                raise
        return {"refused": _too_slow()} if "slow" in reply else reply

    def _why_ended(self) -> str:
        code = self.close()
        if -code in (signal.SIGXCPU, signal.SIGPROF):
            return _too_slow()
        if code == 0:  # it ends itself if it has no memory for the request or the answer
            return "takes more memory than a template may have"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return f"ended the process that renders it {how}; use another template"

    def close(self) -> int:
        """End the process and return its exit code."""
        process, self.process = self.process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                continue  # closing flushes, and the process may be gone
        try:
            return process.wait(timeout=2)  # it ends when its stdin is closed
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


@lru_cache
def renderer() -> Renderer:
    """The renderer of this process."""
    made = Renderer()
    atexit.register(made.close)
    return made


def _too_slow() -> str:
    return f"takes longer than {SECONDS} s for one conversation"


def _start() -> subprocess.Popen[bytes]:
    limits = [str(n) for n in (MOST_CHARACTERS, SECONDS, MEMORY)]
    # -P keeps the program's own directory off sys.path: its modules must not shadow Python's.
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
    head, _, text = _exactly(process.stdout, int.from_bytes(_exactly(process.stdout, 8), "big")).partition(b"\n")
    return {**json.loads(head), "text": text.decode()}


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
        raise EOFError
    return data
