"""Small checkpoints for tests, without an engine."""

from pathlib import Path

import numpy as np

from fullshard.checkpoint.directories import Local, Place
from fullshard.checkpoint.writer import TensorSource, write_checkpoint


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "model.a": draw.normal(size=(5, 3)).astype("<f4"),
        "model.b": draw.integers(0, 9, size=(4,)).astype("<i8"),
        "optimizer.a.step": np.array(7.0, dtype="<f4"),
    }


WORDS = {"<f4": "F32", "<i8": "I64", "<f2": "F16"}


def make(checkpoint_dir: Path, step: int = 3, seed: int = 0, found: dict[str, np.ndarray] | None = None, **about) -> Place:
    named = found if found is not None else arrays(seed)
    sources = [TensorSource(n, WORDS[a.dtype.str], a.shape, a.tobytes) for n, a in named.items()]
    return write_checkpoint(Local(checkpoint_dir), sources, step=step, limit=40, **about)
