"""Read what other people wrote: plain files of bounded size, and JSON and TOML of bounded depth.

Every fault of a file or a text becomes one `FullshardError` sentence. Standard library only.
"""

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from fullshard.errors import FullshardError

MOST_BYTES = 64 << 20  # of a document: a plan of 100,000 units has 30 MB
DEEPEST = 100  # objects, lists and tables inside each other
LARGEST_INTEGER = 2**63 - 1  # of TOML, which defines 64 bits
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


# -- files ------------------------------------------------------------------------------------------------


def read_text(path: str | Path, what: str, at_most: int = MOST_BYTES) -> str:
    """The text of a plain file; `what` names its kind in errors, as in `cannot read plan x.json: …`."""
    found = read_bytes(path, what, at_most)
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        raise FullshardError(f"{path} is not a text file: byte {error.start} is not UTF-8; write the path of a {what}") from None


def read_bytes(path: str | Path, what: str, at_most: int = MOST_BYTES) -> bytes:
    """The bytes of a plain file; never waits for a pipe, never reads on without end."""
    try:
        return _read(Path(path), what, at_most)
    except OSError as error:
        raise FullshardError(f"cannot read {what} {path}: {error.strerror}") from None
    except ValueError as error:  # a zero byte, or half of a surrogate pair
        raise FullshardError(f"cannot read {what} {str(path)!r}: {error}") from None


def _read(path: Path, what: str, at_most: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe waits for its writer otherwise
    with os.fdopen(_plain(descriptor, path, what), "rb") as file:
        found = file.read(at_most + 1)
    if len(found) > at_most:
        raise FullshardError(f"cannot read {what} {path}: it has more than the {at_most:,} bytes that a {what} may have")
    return found


def _plain(descriptor: int, path: Path, what: str) -> int:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    kind = KINDS.get(stat.S_IFMT(mode))
    said = f"it is {kind}, not a plain file" if kind else os.strerror(21)  # EISDIR
    raise FullshardError(f"cannot read {what} {path}: {said}")


def is_plain_file(path: str | Path) -> bool:
    """Whether a path is that of a plain file. No path at all, as one with a zero byte or a name too long, is none."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def is_directory(path: str | Path) -> bool:
    """The same of a directory."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


# -- documents --------------------------------------------------------------------------------------------


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of a JSON text; `where` names it in errors, as in `plan.json is not JSON: …`."""
    try:
        found = json.loads(text.decode() if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        raise FullshardError(f"{where} is not JSON: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise FullshardError(f"{where} is not JSON: {_too_deep()}") from None
    except ValueError as error:  # the syntax, or an integer of more digits than Python converts
        raise FullshardError(f"{where} is not JSON: {_cause(error)}") from None
    if not _shallow(found):
        raise FullshardError(f"{where} is not JSON: {_too_deep()}")
    return found


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The table of a TOML text; `where` names it in errors."""
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise FullshardError(f"{where} is not TOML: {_too_deep()}") from None
    except ValueError as error:
        raise FullshardError(f"{where} is not TOML: {_cause(error)}") from None
    if not _shallow(found):
        raise FullshardError(f"{where} is not TOML: {_too_deep()}")
    if not _in_64_bits(found):  # hexadecimal ones have no limit of digits
        raise FullshardError(f"{where} is not TOML: an integer does not fit in 64 bits")
    return found


def _too_deep() -> str:
    return f"it is nested deeper than {DEEPEST} levels"


def _cause(error: ValueError) -> str:
    said = str(error)
    return "an integer has too many digits" if "integer string conversion" in said else said


def _shallow(value: Any) -> bool:
    """Whether nothing lies deeper than DEEPEST containers."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [child for found in level for child in _children(found)]
        if not level:
            return True
    return False


def _children(value: Any) -> list[Any]:
    """The containers directly inside a container."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inside if isinstance(child, dict | list)]


def _in_64_bits(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(_in_64_bits(child) for child in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER
