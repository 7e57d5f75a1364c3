"""Verifies a checkpoint against its manifest: sizes, checksums and headers of its files."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import xxhash

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.commit import read_manifest
from fullshard.checkpoint.directories import Local, Place
from fullshard.checkpoint.manifest import MANIFEST, Manifest, chunk_name
from fullshard.checkpoint.safetensors import parse_header

PIECE = 1 << 24  # bytes read at a time
READERS = 8  # files read at a time


def problems(place: Place, share: tuple[int, int] = (0, 1), *, contents: bool = True) -> list[str]:
    """Everything that is wrong with a checkpoint, a sentence each. With `share = (i, n)`, checks only every n-th file from the
    i-th on: n readers divide the work. Reads every byte, or, without `contents`, no more than the files' headers."""
    try:
        manifest = read_manifest(place)
    except FullshardError as error:
        return [str(error)]
    present = place.files()
    names = share_of(manifest, present, share)
    wrong = size_problems(place, manifest, present, names)
    if contents:
        right = [n for n in names if present.get(n) == manifest.files[n].nbytes]
        wrong += checksum_problems(manifest, [FileChecksum(place, n, manifest.files[n].nbytes) for n in right])
    wrong = wrong or [p for n in names for p in header_problems(place, n, manifest)]
    extra = sorted(present.keys() - manifest.files.keys() - {MANIFEST})
    others = [*place.directories(), *(place.special_files() if isinstance(place, Local) else [])]
    return wrong + [f"{place} has {name}, which its manifest does not list" for name in [*extra, *others]]


def share_of(manifest: Manifest, present: Iterable[str], share: tuple[int, int] = (0, 1)) -> list[str]:
    """The files of a checkpoint that one of several readers checks: see `problems`."""
    absent = absent_nodes(manifest, present)
    return [n for n, f in manifest.files.items() if f.node not in absent][share[0] :: share[1]]


def absent_nodes(manifest: Manifest, present: Iterable[str]) -> set[int | None]:
    """The nodes whose files, kept on their own disks, are all missing here."""
    nodes = {f.node for f in manifest.files.values()} - {None}
    present_nodes = {manifest.files[n].node for n in present if n in manifest.files}
    return nodes - present_nodes if present_nodes else set()


def size_problems(place: Place, manifest: Manifest, present: Mapping[str, int], names: Iterable[str]) -> list[str]:
    """What is wrong with the sizes of files."""
    sizes = {n: (present.get(n), manifest.files[n].nbytes) for n in names}
    missing = [f"{place} lacks {n}" for n, (size, _) in sizes.items() if size is None]
    wrong = {n: found for n, found in sizes.items() if found[0] not in (None, found[1])}
    return missing + [f"{place}/{n} has {size} bytes instead of {wanted}" for n, (size, wanted) in wrong.items()]


class FileChecksum:
    """The checksum of a file, read piece by piece."""

    def __init__(self, place: Place, name: str, nbytes: int):
        self.place, self.name, self.nbytes = place, name, nbytes
        self.digest, self.done = xxhash.xxh3_128(), 0  # of the bytes before `done`

    def add(self, start: int, data: memoryview) -> None:
        """Take what a caller has read of the file, from byte `start` on. What lies before it and was not taken is read."""
        self._read_to(start)
        if start <= self.done < start + len(data):
            self.digest.update(data[self.done - start :])
            self.done = start + len(data)

    def result(self) -> str:
        """Read what is left. Returns the checksum."""
        self._read_to(self.nbytes)
        return self.digest.hexdigest()

    def _read_to(self, end: int) -> None:
        memory = memoryview(bytearray(min(PIECE, max(0, end - self.done))))
        while self.done < end:
            piece = memory[: min(PIECE, end - self.done)]
            self.place.read(self.name, [(self.done, piece)])
            self.digest.update(piece)
            self.done += len(piece)


def checksum_problems(manifest: Manifest, files: Iterable[FileChecksum]) -> list[str]:
    """What is wrong with the contents of files."""

    def problem(found: FileChecksum) -> str | None:
        try:
            same = found.result() == manifest.files[found.name].checksum
        except FullshardError as error:
            return str(error)
        except (FileNotFoundError, EOFError):
            return f"{found.place}/{found.name} was truncated while it was read"
        return None if same else f"{found.place}/{found.name} is damaged: its checksum does not match"

    with ThreadPoolExecutor(READERS) as pool:  # reading and hashing hold no lock of the interpreter
        return [p for p in pool.map(problem, files) if p]


def header_problems(place: Place, name: str, manifest: Manifest) -> list[str]:
    """Whether a file's own header, which other programs read, lists the same tensors as the manifest."""
    size = manifest.files[name].nbytes
    try:
        header = parse_header(f"{place}/{name}", size, lambda start, into: place.read(name, [(start, into)]))
    except FullshardError as error:
        return [str(error)]
    except (FileNotFoundError, EOFError):
        return [f"{place}/{name} was truncated while it was read"]
    in_header = {(name_in_file, e.start, e.dtype, e.shape) for name_in_file, e in header.items() if 0 not in e.shape}
    chunks = [(n, t, c) for n, t in manifest.tensors.items() for c in t.chunks if c.file == name]
    in_manifest = {(chunk_name(n, t.shape, c.start, c.shape), c.offset, t.dtype, c.shape) for n, t, c in chunks}
    # Without a shared disk, a node's file may also hold copies of chunks that the manifest names elsewhere.
    agree = in_header == in_manifest if manifest.files[name].node is None else in_manifest <= in_header
    return [] if agree else [f"{place}/{name}: its header and the manifest disagree about what it holds"]


def refuse_damaged(place: Place) -> None:
    """Raise if anything is wrong with a checkpoint."""
    if wrong := problems(place):
        more = f" (and {len(wrong) - 1} more problems)" if len(wrong) > 1 else ""
        raise FullshardError(f"{wrong[0]}{more}; use another checkpoint")
