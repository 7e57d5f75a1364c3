"""Compare how long a step waits for its data: fullshard's loading beside a plain torch DataLoader, in one process.

    python -m benchmarks.data_wait                      # 2 workers each, 16 images of 64 x 64 pixels a step

Both decode the same images with the same function, in as many workers with as much prefetch. A step is a matrix product of
about `--step` seconds. A second plain DataLoader runs too: the difference between the two is the machine's noise. All take
turns, some steps each; the workers of a loader fill its queue while the others have their turn. Token files are read with
and without the thread.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.step_overhead import about
from fullshard.data import Batches, SampleBatches, SampleRules, TokenFile, TokenWriter
from fullshard.data.images import Decode, ImageFolder, open_image_folder
from fullshard.on_torch.step.batch_loader import AheadLoader, collate

Next = Callable[[], object]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--step", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turn", type=int, default=5, help="steps of one loader in a row")
    return parser.parse_args()


class Decoded:
    """The images as samples, for both loaders."""

    def __init__(self, files: ImageFolder, pixels: int):
        self.files, self.decode = files, Decode(pixels)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = self.files[i]
        return {"pixel_values": self.decode(row["image"], ""), "labels": row["label"]}


def make_images(here: Path, count: int) -> ImageFolder:
    from PIL import Image

    draw = np.random.default_rng(0)
    for i in range(count):
        folder = here / f"class{i % 4}"
        folder.mkdir(exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (160, 160, 3), np.uint8)).save(folder / f"{i}.jpg")
    return open_image_folder(str(here))


def plain(data: Decoded, args: argparse.Namespace) -> Next:
    """A DataLoader as its documentation writes it, without end."""
    sampler = RandomSampler(data, num_samples=10**9, replacement=True)  # type: ignore[arg-type]
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=args.workers, prefetch_factor=args.prefetch)  # type: ignore[arg-type]
    found: Iterator[Any] = iter(loader)
    return lambda: next(found)


def fullshard(data: Decoded, args: argparse.Namespace) -> Next:
    loader = AheadLoader(args.workers, args.prefetch)
    steps = iter(SampleBatches(data, args.batch, rules=SampleRules(collate=collate), loader=loader))
    return lambda: next(steps)


def tokens(here: Path, prefetch: int) -> Next:
    steps = iter(Batches(TokenFile(here), 2048, 8, boundaries="attention", loader=AheadLoader(0, prefetch)))
    return lambda: next(steps)


def make_tokens(here: Path) -> None:
    draw = np.random.default_rng(0)
    with TokenWriter(here, vocab=32000, tokenizer="none") as writer:
        for _ in range(400):
            writer.add(draw.integers(0, 32000, 5000).tolist())


def compute(seconds: float) -> Next:
    """A matrix product of about so many seconds, on one thread."""
    torch.set_num_threads(1)
    size = 128
    while True:
        a = torch.randn(size, size)
        began = time.perf_counter()
        a @ a
        if (took := time.perf_counter() - began) > seconds / 8:
            break
        size *= 2
    times = max(1, round(seconds / took))
    return lambda: [a @ a for _ in range(times)]


def measure(sides: dict[str, Next], step: Next, args: argparse.Namespace) -> dict[str, Any]:
    waits: dict[str, list[float]] = {name: [] for name in sides}
    wholes: dict[str, list[float]] = {name: [] for name in sides}
    for name in sides:
        sides[name]()  # starts its workers
    generator = random.Random(0)
    for _ in range(args.rounds):
        for name in generator.sample(list(sides), len(sides)):
            for _ in range(args.turn):
                began = time.perf_counter()
                sides[name]()
                waits[name].append(time.perf_counter() - began)
                step()
                wholes[name].append(time.perf_counter() - began)
    return {
        "wait_seconds": {name: statistics.median(found) for name, found in waits.items()},
        "step_seconds": {name: statistics.median(found) for name, found in wholes.items()},
    }


def main() -> None:
    args = arguments()
    step = compute(args.step)
    with tempfile.TemporaryDirectory() as own:
        (images := Path(own, "images")).mkdir()
        data = Decoded(make_images(images, args.images), args.pixels)
        make_tokens(Path(own, "tokens"))
        sides = {"plain": plain(data, args), "fullshard": fullshard(data, args), "plain_again": plain(data, args)}
        found = measure(sides, step, args)
        del sides
        read = {"without": tokens(Path(own, "tokens"), 0), "thread": tokens(Path(own, "tokens"), 2)}
        texts = measure(read, step, args)
        waits, wholes = found["wait_seconds"], found["step_seconds"]
        result = {
            "images": {
                **found,
                "ratio_of_steps": wholes["fullshard"] / statistics.mean([wholes["plain"], wholes["plain_again"]]),
                "control": wholes["plain_again"] / wholes["plain"],
                "wait_share": waits["fullshard"] / wholes["fullshard"],
            },
            "token_files": {**texts, "ratio_of_steps": texts["step_seconds"]["thread"] / texts["step_seconds"]["without"]},
        }
        print(json.dumps({"case": vars(args), **about(), **result}, indent=1), flush=True)


if __name__ == "__main__":
    main()
