"""The rate of `storage.disk.DiskFile` relative to raw disk I/O: reading, writing, and both at once.

    python benchmarks/disk_file.py --directory /disk --size 8GiB --request 384MiB

Raw I/O is a plain loop of `os.preadv` and `os.pwrite` with O_DIRECT, with as many threads, on the same file, in parts of
the same size. The two alternate. Prints the median rate of each, and their ratio.
"""

import argparse
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

from fullshard.base.direct_io import aligned
from fullshard.base.text import parse_bytes
from fullshard.storage.disk_file import IN_FLIGHT, PART, DiskFile

KINDS = ("write", "read", "both")
AHEAD = 2  # requests in flight, as in a run that reads the next piece while it works on one


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("."))
    parser.add_argument("--size", type=parse_bytes, default=1 << 30)
    parser.add_argument("--request", type=parse_bytes, default=128 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checksums", action="store_true")
    return parser.parse_args()


def raw(file: DiskFile, kind: str, memory: memoryview) -> None:
    """Read or write the file with plain threads. Each takes the next part until there is none."""
    ways = ("read", "write") if kind == "both" else (kind,)
    threads = []
    for way in ways:
        places = iter(range(0, file.nbytes, PART))
        threads += [threading.Thread(target=loop, args=(file.file, places, way, memory)) for _ in range(IN_FLIGHT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def loop(file: int, places: Iterator[int], way: str, memory: memoryview) -> None:
    for at in places:
        place = at % len(memory)
        part = memory[place : place + PART]
        moved = os.preadv(file, [part], at) if way == "read" else os.pwrite(file, part, at)
        assert moved == len(part)


def queued(file: DiskFile, kind: str, memory: memoryview) -> None:
    """Read or write the file through `DiskFile`, with `AHEAD` requests in flight per direction."""
    request = len(memory) // AHEAD
    ways: tuple[Callable, ...] = {"read": (file.read,), "write": (file.write,), "both": (file.read, file.write)}[kind]
    under_way = []
    for number, at in enumerate(range(0, file.nbytes, request)):
        if number >= AHEAD:
            for future in under_way.pop(0):
                future.result()
        place = at % len(memory)
        under_way.append([way(at, memory[place : place + request]) for way in ways])
    for futures in under_way:
        for future in futures:
            future.result()


def main() -> None:
    args = arguments()
    size = args.size // args.request * args.request
    memory = aligned(AHEAD * args.request)
    memory[:] = os.urandom(1 << 20) * (len(memory) >> 20)
    found: dict[tuple[str, str], list[float]] = {}
    with DiskFile(args.directory, "benchmark", size, args.checksums) as file:
        queued(file, "write", memory)  # the first write of a block is slower
        for _ in range(args.rounds):
            for kind in KINDS:
                for name, way in (("raw", raw), ("DiskFile", queued)):
                    start = time.perf_counter()
                    way(file, kind, memory)
                    moved = file.nbytes * (2 if kind == "both" else 1)
                    found.setdefault((kind, name), []).append(moved / (time.perf_counter() - start))
        direct = file.direct
    rates = {kind: {name: statistics.median(found[kind, name]) for name in ("raw", "DiskFile")} for kind in KINDS}
    for kind, rate in rates.items():
        rate["ratio"] = rate["DiskFile"] / rate["raw"]
        print(
            f"{kind:6} raw {rate['raw'] / 1e9:6.2f} GB/s  DiskFile {rate['DiskFile'] / 1e9:6.2f} GB/s  ratio {rate['ratio']:.3f}"
        )
    about = {"date": str(date.today()), "machine": f"{os.cpu_count()} {platform.machine()} cores", "direct": direct}
    options = {"size": size, "request": args.request, "part": PART, "in_flight": IN_FLIGHT, "checksums": args.checksums}
    print(json.dumps(about | options | {"bytes_a_second": rates}))


if __name__ == "__main__":
    main()
