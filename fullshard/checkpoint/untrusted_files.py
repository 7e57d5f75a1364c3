"""Opening files that others wrote: plain ones only, and what the system refuses as one sentence."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fullshard.errors import FullshardError

LONGEST_NAME = 1000  # characters of a tensor's name


@contextmanager
def refusing(doing: str, but: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Turn the system's errors, all but some, into a sentence; `doing` is what was tried, as in `read model.pt`."""
    try:
        yield
    except but:
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename and str(error.filename) not in doing else ""
        raise FullshardError(f"cannot {doing}: {error.strerror or error}{where}") from None
    except MemoryError:
        raise FullshardError(f"cannot {doing}: this machine has not enough memory for its largest tensor") from None


def open_plain(path: Path, flags: int = 0, but: tuple[type[OSError], ...] = ()) -> int:
    """A descriptor for reading. Never waits for a pipe; a device or a directory is refused."""
    with refusing(f"read {path}", but):
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FullshardError(f"cannot read {path}: it is no plain file")
    return file


def plain_size(path: Path) -> int:
    """Bytes of a plain file."""
    file = open_plain(path)
    try:
        return os.fstat(file).st_size
    finally:
        os.close(file)


def read_range(path: Path, start: int, count: int) -> bytearray:
    """`count` bytes of a file, which the caller has held against its size."""
    file = open_plain(path)
    try:
        with refusing(f"read {path}"):
            return _read(file, path, start, count)
    finally:
        os.close(file)


def read_small(path: Path, at_most: int) -> bytes:
    """A whole file; its size is looked at before memory is taken."""
    size = plain_size(path)
    if size > at_most:
        raise FullshardError(f"cannot read {path}: it has {size} bytes, more than the {at_most} that such a file may have")
    return bytes(read_range(path, 0, size))


def _read(file: int, path: Path, start: int, count: int) -> bytearray:
    data, done = bytearray(count), 0
    while done < count:
        got = os.preadv(file, [memoryview(data)[done:]], start + done)
        if got == 0:
            raise FullshardError(f"{path} is cut off; fetch it again")
        done += got
    return data


def is_name(text: object) -> bool:
    """Whether a text can name a tensor: short, and without characters that move a terminal's cursor or break a line."""
    return isinstance(text, str) and 0 < len(text) <= LONGEST_NAME and text.isprintable()


def quoted(text: object, most: int = 80) -> str:
    """What a file says, for a sentence: escaped, and cut where it is long."""
    said = repr(text[: most + 1]) if isinstance(text, str | bytes) else f"a {type(text).__name__}"
    return said if len(said) <= most else f"{said[:most]}…"
