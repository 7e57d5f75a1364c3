"""Verifies a checkpoint against its manifest: sizes, checksums and headers of its files."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import xxhash

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.commit import read_manifest
from fullshard.checkpoint.directories import Local, Place
from fullshard.checkpoint.manifest import MANIFEST, FileRecord, Manifest, chunk_name
from fullshard.checkpoint.safetensors import parse_header

PIECE = 1 << 24  # bytes read at a time
READERS = 8  # files read at a time


def problems(place: Place, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Everything that is wrong with a checkpoint, a sentence each. Reads every byte. With `share = (i, n)`, checks only
    every n-th file from the i-th on: n readers divide the work."""
    try:
        manifest = read_manifest(place)
    except FullshardError as error:
        return [str(error)]
    present = place.files()
    absent = absent_nodes(manifest, present)
    names = [n for n, f in manifest.files.items() if f.node not in absent][share[0] :: share[1]]
    with ThreadPoolExecutor(READERS) as pool:  # reading and hashing hold no lock of the interpreter
        each = pool.map(lambda n: file_problems(place, n, manifest.files[n], present), names)
        wrong = [p for of_file in each for p in of_file]
    wrong = wrong or [p for n in names for p in header_problems(place, n, manifest)]
    extra = sorted(present.keys() - manifest.files.keys() - {MANIFEST})
    others = [*place.directories(), *(place.special_files() if isinstance(place, Local) else [])]
    return wrong + [f"{place} has {name}, which its manifest does not list" for name in [*extra, *others]]


def absent_nodes(manifest: Manifest, present: Iterable[str]) -> set[int | None]:
    """The nodes whose files, kept on their own disks, are all missing here."""
    nodes = {f.node for f in manifest.files.values()} - {None}
    present_nodes = {manifest.files[n].node for n in present if n in manifest.files}
    return nodes - present_nodes if present_nodes else set()


def file_problems(place: Place, name: str, record: FileRecord, present: dict[str, int]) -> list[str]:
    """What is wrong with the size or checksum of one file."""
    if name not in present:
        return [f"{place} lacks {name}"]
    if present[name] != record.nbytes:
        return [f"{place}/{name} has {present[name]} bytes instead of {record.nbytes}"]
    try:
        same = file_checksum(place, name, record.nbytes) == record.checksum
    except FullshardError as error:
        return [str(error)]
    except (FileNotFoundError, EOFError):
        return [f"{place}/{name} was truncated while it was read"]
    return [] if same else [f"{place}/{name} is damaged: its checksum does not match"]


def file_checksum(place: Place, name: str, nbytes: int) -> str:
    checksum, memory = xxhash.xxh3_128(), memoryview(bytearray(min(PIECE, nbytes)))
    for start in range(0, nbytes, PIECE):
        piece = memory[: min(PIECE, nbytes - start)]
        place.read(name, [(start, piece)])
        checksum.update(piece)
    return checksum.hexdigest()


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
