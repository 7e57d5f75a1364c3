"""Reads `torch.save` archives: zip files of a pickle and the bytes of its storages, each with a CRC32."""

import io
import os
import zipfile
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.untrusted_files import open_plain, plain_size, read_range
from fullshard.checkpoint.other_formats.torch_pickles import LARGEST_PICKLE, ArchiveMember, FileStorage, unpickle

LARGEST_DIRECTORY = 1 << 26  # bytes of a zip's directory, enough for a million tensors
ENCRYPTED = 1  # a flag bit of a zip's member


class Archive:
    """A `torch.save` archive, which is a file or `length` bytes of one from `start` on. The constructor reads the zip
    directory only.

    `has_checksums` is false if all CRC32s are zero, as torch writes them after `set_crc32_options(False)`.
    """

    def __init__(self, path: Path, start: int = 0, length: int | None = None):
        size = plain_size(path)
        self.path, self.start = path, start
        self.length = size - start if length is None else length
        if not 0 <= start <= start + self.length <= size:
            raise FullshardError(f"{path} is truncated; fetch it again")
        entries = self._directory()
        self.has_checksums = any(info.CRC for info in entries.values() if info.file_size)
        roots = [name.removesuffix("data.pkl") for name in entries if name.endswith("data.pkl")]
        if len(roots) != 1:
            raise FullshardError(f"{path} is not a torch.save file")
        self.members = {n.removeprefix(roots[0]): info for n, info in entries.items() if n.startswith(roots[0])}
        self.opened: dict[str, ArchiveMember] = {}

    def load(self) -> Any:
        """Unpickle the saved object. Its tensors are `FileTensor`s, still in the file."""
        if "byteorder" in self.members and self._small("byteorder", 16) != b"little":
            raise FullshardError(f"{self.path} was written on a big-endian machine; save it again on another")
        return unpickle(self._small("data.pkl", LARGEST_PICKLE), str(self.path), self.storage)

    def storage(self, key: str, dtype: str) -> FileStorage:
        name = f"data/{key}"
        if name not in self.members:
            raise FullshardError(f"{self.path} lacks the bytes of a tensor; fetch it again")
        return FileStorage(self._member(name), dtype)

    def _small(self, name: str, at_most: int) -> bytearray:
        member = self._member(name)
        if member.nbytes > at_most:
            raise FullshardError(f"{self.path}: its {name} of {member.nbytes} bytes is too large")
        return member.read(0, member.nbytes)

    def _member(self, name: str) -> ArchiveMember:
        """The member of that name. One object for each, so that its checksum is compared once."""
        if name not in self.opened:
            info = self.members[name]
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & ENCRYPTED or info.compress_size != info.file_size:
                raise FullshardError(f"{self.path} is compressed; save it with torch.save")
            at = info.header_offset + self._header_length(info)
            if at + info.file_size > self.length:
                raise FullshardError(f"{self.path} is truncated; fetch it again")
            self.opened[name] = ArchiveMember(
                self.path, self.start + at, info.file_size, info.CRC if self.has_checksums else None
            )
        return self.opened[name]

    def _header_length(self, info: zipfile.ZipInfo) -> int:
        if not 0 <= info.header_offset <= self.length - 30:
            raise FullshardError(f"{self.path} is truncated; fetch it again")
        head = read_range(self.path, self.start + info.header_offset, 30)
        return 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")

    def _directory(self) -> dict[str, zipfile.ZipInfo]:
        with os.fdopen(open_plain(self.path), "rb") as raw:
            try:
                listed = zipfile.ZipFile(_Window(raw, self.start, self.length)).infolist()
            except FullshardError:
                raise
            except Exception:  # zipfile may raise anything for a damaged directory
                hint = "if it is from before torch 1.6, load and save it with a newer torch"
                raise FullshardError(f"{self.path} is not a torch.save file, or damaged; {hint}") from None
        entries = {info.filename: info for info in listed}
        if len(entries) < len(listed):
            raise FullshardError(f"{self.path} is damaged: it has two members of one name; fetch it again")
        return entries


class _Window(io.RawIOBase):
    """`length` bytes of a file from `start` on, as a file object. A read of more than a zip's directory is an error."""

    def __init__(self, file: io.BufferedReader, start: int, length: int):
        self.file, self.start, self.length, self.at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = max(0, {0: 0, 1: self.at, 2: self.length}[whence] + offset)
        return self.at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self.length - self.at)
        count = left if count is None or count < 0 else min(count, left)
        if count > LARGEST_DIRECTORY:
            raise FullshardError(f"{self.file.name} has a zip directory of {count} bytes, more than a torch.save file may have")
        self.file.seek(self.start + self.at)
        data = self.file.read(count)
        self.at += len(data)
        return data
