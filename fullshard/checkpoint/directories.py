"""Directories in which checkpoints are stored: local ones, and prefixes of object stores that fsspec supports.

Both kinds have the same methods over plain files. What is written is durable when the method returns.
"""

import errno
import os
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fullshard.base.direct_io import read_exactly
from fullshard.base.errors import FullshardError
from fullshard.base.untrusted_files import open_plain, refusing_os_errors
from fullshard.checkpoint import file_writer

PUT = 1 << 26  # bytes handed to an object store at once
# Client options. By default S3's client tries an address that does not answer five times, for a minute each.
CLIENTS: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": {"connect_timeout": 5}}}
SETTLING = 3.0  # seconds after which concurrent `create` calls have written, in a store without conditional puts
ReadPiece = tuple[int, memoryview]  # offset in the file, and the memory to fill
Upload = tuple[str, str]  # an object's key, and the id of an unfinished upload


class Place(ABC):
    """A directory, local or in an object store. `str()` gives its path or URL."""

    @abstractmethod
    def child(self, name: str) -> "Place":
        """The subdirectory of that name; it need not exist."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """The plain files in this directory, with their sizes. Empty if it does not exist."""

    @abstractmethod
    def directories(self) -> list[str]:
        """The names of the subdirectories, sorted."""

    @abstractmethod
    def read(self, name: str, pieces: Sequence[ReadPiece]) -> None:
        """Fill each piece from a file. Raises FileNotFoundError, EOFError, or a FullshardError for anything else."""

    @abstractmethod
    def write(self, name: str, data: bytes | memoryview, length: int | None = None) -> None:
        """Write a file of the first `length` bytes of `data`, which may be padded for direct I/O."""

    @abstractmethod
    def write_made(self, name: str, length: int, make: file_writer.Make) -> None:
        """Write a file of `length` bytes. `make(start, memory)` fills memory with the bytes from `start` on."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Create a small file unless it exists, and say whether this call did. Of concurrent calls one succeeds."""

    @abstractmethod
    def rewrite(self, name: str, data: bytes) -> None:
        """Replace the contents of an existing small file by as many bytes."""

    @abstractmethod
    def remove_file(self, name: str) -> None:
        """Delete a file, if it exists."""

    @abstractmethod
    def remove(self) -> None:
        """Delete the directory with everything in it, if it exists."""

    @abstractmethod
    def free(self) -> int | None:
        """Free space in bytes, or None if it is unknown."""

    def uploads(self) -> list[Upload]:
        """Unfinished uploads below this directory. A store keeps their parts, and bills them."""
        return []

    def abort(self, upload: Upload) -> None:
        """Delete an unfinished upload."""
        raise FullshardError(f"{self} has no uploads")

    def read_whole(self, name: str, at_most: int) -> bytes:
        """All bytes of a small file. Its size is checked before memory is allocated."""
        size = self.files().get(name)
        if size is None:
            raise FileNotFoundError(name)
        if size > at_most:
            raise FullshardError(f"{self}/{name} has {size} bytes, more than the {at_most} that such a file may have")
        data = bytearray(size)
        self.read(name, [(0, memoryview(data))])
        return bytes(data)


class Local(Place):
    """A directory on a local or shared filesystem."""

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def child(self, name: str) -> "Local":
        return Local(self.path / name)

    def files(self) -> dict[str, int]:
        with refusing_os_errors(f"read {self}"):
            return {e.name: size for e in self._entries() if (size := _plain_size(e)) is not None}

    def directories(self) -> list[str]:
        return sorted(e.name for e in self._entries() if e.is_dir(follow_symlinks=False))

    def special_files(self) -> list[str]:
        """Names of everything that is neither a plain file nor a directory. Links count: none is followed."""
        kinds = [(e.name, e.is_file(follow_symlinks=False) or e.is_dir(follow_symlinks=False)) for e in self._entries()]
        return sorted(name for name, plain in kinds if not plain)

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with refusing_os_errors(f"read {self}", but=(FileNotFoundError, NotADirectoryError)), os.scandir(self.path) as scan:
                return list(scan)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str, pieces: Sequence[ReadPiece]) -> None:
        file = open_plain(self.path / name, os.O_NOFOLLOW, but=(FileNotFoundError,))
        try:
            with refusing_os_errors(f"read {self.path / name}"):
                for offset, into in pieces:
                    read_exactly(file, into, offset)
        finally:
            os.close(file)

    def write(self, name: str, data: bytes | memoryview, length: int | None = None) -> None:
        file_writer.write_file(self.path / name, memoryview(data), len(data) if length is None else length)

    def write_made(self, name: str, length: int, make: file_writer.Make) -> None:
        file_writer.write_made(self.path / name, length, make)

    def create(self, name: str, data: bytes) -> bool:
        fresh = self.path / f"{name}.{secrets.token_hex(4)}.partial"
        try:
            fresh.write_bytes(data)
            os.link(fresh, self.path / name)  # the file appears with all its bytes
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise FullshardError(f"cannot write to {self}: {error.strerror}") from None
            return self._create_in_place(name, data)
        finally:
            fresh.unlink(missing_ok=True)
        return True

    def _create_in_place(self, name: str, data: bytes) -> bool:
        """For filesystems without hard links. A reader may see the file before its bytes."""
        try:
            with (self.path / name).open("xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def rewrite(self, name: str, data: bytes) -> None:
        """Overwrites in place, which works on a full disk, and does not create a file that is gone."""
        file = os.open(self.path / name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(file, data, 0)
        finally:
            os.close(file)

    def remove_file(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def free(self) -> int | None:
        try:
            disk = os.statvfs(self.path)
        except FileNotFoundError:  # it will be created on its parent's filesystem
            return Local(self.path.absolute().parent).free()
        return disk.f_bavail * disk.f_frsize


def _plain_size(entry: os.DirEntry[str]) -> int | None:
    """The size of a plain file; None for anything else, or if it is gone since it was listed."""
    try:
        return entry.stat().st_size if entry.is_file(follow_symlinks=False) else None
    except FileNotFoundError:
        return None


class Remote(Place):
    """A prefix of an object store. Objects appear complete, and cannot be renamed."""

    def __init__(self, filesystem: Any, path: str, scheme: str):
        self.filesystem, self.path, self.scheme = filesystem, path.rstrip("/"), scheme

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    def child(self, name: str) -> "Remote":
        return Remote(self.filesystem, f"{self.path}/{name}", self.scheme)

    @contextmanager
    def _client_errors(self, but: type[OSError] = FileNotFoundError) -> Iterator[None]:
        """Turn every exception of the store's client, except `but`, into a FullshardError. Each client has its own."""
        try:
            yield
        except (but, FullshardError):
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise FullshardError(f"cannot reach {self}: {reason}; check the URL, the network and the credentials") from None

    def _entries(self, kind: str) -> list[tuple[str, int]]:
        self.filesystem.invalidate_cache()  # another process may have written
        try:
            with self._client_errors():
                entries = self.filesystem.ls(self.path, detail=True)
        except FileNotFoundError as error:
            if "bucket does not exist" in str(error):  # S3's own words
                raise FullshardError(f"cannot reach {self}: the bucket does not exist; make it, or write another URL") from None
            return []
        # Object stores may list the prefix itself as an entry.
        inside = [e for e in entries if e["type"] == kind and e["name"].strip("/") != self.path.strip("/")]
        return [(e["name"].rstrip("/").rpartition("/")[2], e["size"] or 0) for e in inside]

    def files(self) -> dict[str, int]:
        return dict(self._entries("file"))

    def directories(self) -> list[str]:
        return sorted(n for n, _ in self._entries("directory"))

    def read(self, name: str, pieces: Sequence[ReadPiece]) -> None:
        for offset, into in pieces:
            with self._client_errors():
                data = self.filesystem.cat_file(f"{self.path}/{name}", start=offset, end=offset + len(into)) if len(into) else b""
            if len(data) != len(into):
                raise EOFError(name)
            into[:] = data

    def write(self, name: str, data: bytes | memoryview, length: int | None = None) -> None:
        whole = memoryview(data)[: len(data) if length is None else length]
        with self._client_errors(but=OSError), self.filesystem.open(f"{self.path}/{name}", "wb") as file:
            for start in range(0, len(whole), PUT):
                file.write(whole[start : start + PUT])

    def write_made(self, name: str, length: int, make: file_writer.Make) -> None:
        memory = memoryview(bytearray(min(PUT, length)))
        with self._client_errors(but=OSError), self.filesystem.open(f"{self.path}/{name}", "wb") as file:
            for start in range(0, length, PUT):
                part = memory[: min(PUT, length - start)]
                make(start, part)
                file.write(part)

    def create(self, name: str, data: bytes) -> bool:
        path = f"{self.path}/{name}"
        try:
            self.filesystem.pipe_file(path, data, mode="create")
            self.filesystem.pipe_file(path, data, mode="create")  # raises in stores that support conditional puts
        except FileExistsError:
            return self._contains(name, data)
        except Exception:  # stores differ in how they refuse conditional puts; other errors occur again below
            with self._client_errors():
                self.filesystem.pipe_file(path, data)
        time.sleep(SETTLING)  # without conditional puts the last writer wins, and all have written after this
        return self._contains(name, data)

    def _contains(self, name: str, data: bytes) -> bool:
        try:
            with self._client_errors():
                return self.filesystem.cat_file(f"{self.path}/{name}") == data
        except FileNotFoundError:
            return False

    def rewrite(self, name: str, data: bytes) -> None:
        with self._client_errors(but=OSError):
            self.filesystem.pipe_file(f"{self.path}/{name}", data)

    def remove_file(self, name: str) -> None:
        try:
            with self._client_errors():
                self.filesystem.rm_file(f"{self.path}/{name}")
        except FileNotFoundError:
            return

    def remove(self) -> None:
        self.filesystem.invalidate_cache()
        try:
            with self._client_errors():
                self.filesystem.rm(self.path, recursive=True)
        except FileNotFoundError:
            return

    def uploads(self) -> list[Upload]:
        if not hasattr(self.filesystem, "list_multipart_uploads"):  # only S3 keeps unfinished uploads
            return []
        bucket, _, prefix = self.path.partition("/")
        with self._client_errors():
            answer = self.filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
        return [(u["Key"], u["UploadId"]) for u in answer.get("Uploads") or []]

    def abort(self, upload: Upload) -> None:
        bucket = self.path.partition("/")[0]
        with self._client_errors():
            self.filesystem.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload[0], UploadId=upload[1])

    def free(self) -> int | None:
        return None


def open_place(where: str | Path) -> Place:
    """The directory at a path, a file:// URL, or any URL for which fsspec has a package."""
    text = str(where)
    if "://" not in text:
        return Local(Path(text))
    scheme, _, rest = text.partition("://")
    if scheme == "file":
        return Local(Path("/" + rest.lstrip("/")))
    try:
        import fsspec
    except ImportError:
        raise FullshardError(f"{text} needs fsspec: pip install 'fullshard[checkpoint]'") from None
    try:
        # fsspec caches instances by default; a forked process would share its parent's connections.
        filesystem = fsspec.filesystem(scheme, skip_instance_cache=True, **CLIENTS.get(scheme, {}))
        path = str(filesystem._strip_protocol(text))
    except Exception as error:  # each client has its own exceptions
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise FullshardError(f"cannot open {text}: {reason}") from None
    return Remote(filesystem, path, scheme)
