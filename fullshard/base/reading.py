"""Reads untrusted files and documents: plain files of limited size, and JSON and TOML of limited depth.

Every error becomes one `FullshardError` sentence. Standard library only.
"""

import hashlib
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError

MOST_BYTES = 64 << 20  # of a document: a plan of 100,000 units has 30 MB
END_BYTES = 1 << 16  # of each end of a file that `hash_ends` reads
CHUNK = 1 << 20  # bytes of one read; this much is allocated for a small file too
DEEPEST = 100  # levels of nested objects, lists and tables
TOO_DEEP = f"it is nested deeper than {DEEPEST} levels"
LARGEST_INTEGER = 2**63 - 1  # TOML's integers have 64 bits
KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


# -- files ------------------------------------------------------------------------------------------------


def read_text(path: str | Path, what: str, at_most: int = MOST_BYTES) -> str:
    """The text of a plain file. `what` names its kind in errors, as in `cannot read plan x.json: …`."""
    data = read_bytes(path, what, at_most)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FullshardError(f"{path} is not a text file: byte {error.start} is not UTF-8; write the path of a {what}") from None


def read_bytes(path: str | Path, what: str, at_most: int = MOST_BYTES) -> bytes:
    """The bytes of a plain file. Never waits for a pipe, and never reads more than `at_most` bytes and one."""
    try:
        return _read(Path(path), what, at_most)
    except OSError as error:
        raise FullshardError(f"cannot read {what} {path}: {error.strerror}") from None
    except ValueError as error:  # a zero byte in the path, or half of a surrogate pair
        raise FullshardError(f"cannot read {what} {str(path)!r}: {error}") from None


def _read(path: Path, what: str, at_most: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without it, opening a pipe waits for its writer
    with os.fdopen(_checked_plain(descriptor, path, what), "rb") as file:
        data = b"".join(iter(lambda: file.read(min(CHUNK, at_most + 1 - file.tell())), b""))
    if len(data) > at_most:
        raise FullshardError(f"cannot read {what} {path}: it has more than the {at_most:,} bytes that a {what} may have")
    return data


def _checked_plain(descriptor: int, path: Path, what: str) -> int:
    """The descriptor if it is of a plain file; otherwise close it and raise."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    kind = KINDS.get(stat.S_IFMT(mode))
    reason = f"it is {kind}, not a plain file" if kind else os.strerror(21)  # EISDIR
    raise FullshardError(f"cannot read {what} {path}: {reason}")


def is_plain_file(path: str | Path) -> bool:
    """Whether a path is that of a plain file. False for an invalid path, such as one with a zero byte."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def is_directory(path: str | Path) -> bool:
    """Whether a path is that of a directory. False for an invalid path."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


# -- documents --------------------------------------------------------------------------------------------


def hash_ends(digest: "hashlib._Hash", path: Path) -> None:
    """Add a file's name, its size and both its ends to a digest: reading all bytes of large files would take too long."""
    size = path.stat().st_size
    digest.update(f" {path.name} {size} ".encode())
    with path.open("rb") as file:
        digest.update(file.read(END_BYTES))
        file.seek(max(0, size - END_BYTES))
        digest.update(file.read(END_BYTES))


def parse_json(text: str | bytes, where: str = "") -> Any:
    """The value of a JSON text. `where` names the text in errors, as in `plan.json is not JSON: …`."""
    try:
        value = json.loads(text.decode() if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        raise _not("JSON", where, f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise _not("JSON", where, TOO_DEEP) from None
    except ValueError as error:  # bad syntax, or an integer with too many digits for Python
        raise _not("JSON", where, _cause(error)) from None
    if not _is_shallow(value):
        raise _not("JSON", where, TOO_DEEP)
    return value


def parse_toml(text: str, where: str = "") -> dict[str, Any]:
    """The table of a TOML text. `where` names the text in errors."""
    try:
        root = tomllib.loads(text)
    except RecursionError:
        raise _not("TOML", where, TOO_DEEP) from None
    except ValueError as error:
        raise _not("TOML", where, _cause(error)) from None
    if not _is_shallow(root):
        raise _not("TOML", where, TOO_DEEP)
    if not _fits_64_bits(root):  # Python does not limit the digits of hexadecimal integers
        raise _not("TOML", where, "an integer does not fit in 64 bits")
    return root


def _not(kind: str, where: str, why: str) -> FullshardError:
    return FullshardError(f"{f'{where} is ' if where else ''}not {kind}: {why}")


def _cause(error: ValueError) -> str:
    reason = str(error)
    return "an integer has too many digits" if "integer string conversion" in reason else reason


def _is_shallow(value: Any) -> bool:
    """Whether containers are nested at most DEEPEST levels deep."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return True
    return False


def _children(value: Any) -> list[Any]:
    """The containers directly inside a container."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inside if isinstance(child, dict | list)]


def _fits_64_bits(value: Any) -> bool:
    """Whether all integers of a document fit in 64 bits."""
    if isinstance(value, dict | list):
        return all(_fits_64_bits(child) for child in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER
