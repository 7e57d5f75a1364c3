"""Trace files of a profile: reads one, whichever engine wrote it."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.observe.profile.jax_trace import read_jax
from fullshard.observe.profile.rank_trace import RankTrace
from fullshard.observe.profile.torch_trace import STEP, read_torch
from fullshard.plan.engine_traits import DEFAULT_ENGINE

NAME = "rank-{:05d}.trace.json.gz"
READERS = {"torch": lambda document: [read_torch(document)], "jax": read_jax}  # by engine
AGAIN = "profile again with `fullshard profile RECIPE`"


def read_traces(paths: Iterable[Path]) -> list[RankTrace]:
    """The traces of all ranks: one of a file of torch, one for each device in a file of JAX."""
    return [trace for path in paths for trace in read_trace(path)]


def read_trace(path: Path) -> list[RankTrace]:
    """The ranks in a file."""
    document = _document(path)
    events = document.get("traceEvents")
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise FullshardError(f"{path} is no trace: it has no list of traceEvents; {AGAIN}")
    if not any(STEP.fullmatch(str(e.get("name"))) for e in events):
        raise FullshardError(f"{path} is a trace without a step of fullshard; {AGAIN}")
    try:
        return READERS[document.get("fullshard", {}).get("engine", DEFAULT_ENGINE)](document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FullshardError(f"{path} is damaged: {type(error).__name__} in its events ({error}); {AGAIN}") from None


def _document(path: Path) -> dict[str, Any]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            document = json.load(file)
    except (EOFError, gzip.BadGzipFile, ValueError) as error:
        raise FullshardError(f"the trace {path} is damaged ({error}); {AGAIN}") from None
    except OSError as error:
        raise FullshardError(f"the trace {path} cannot be read: {error.strerror or error}") from None
    if not isinstance(document, dict):
        raise FullshardError(f"{path} is no trace: it is not a JSON object; {AGAIN}")
    return document


def trace_files(directory: Path) -> list[Path]:
    """The traces of a profile, in the order of ranks."""
    files = sorted(directory.glob("rank-*.trace.json.gz"))
    if not files:
        raise FullshardError(f"{directory} holds no traces; {AGAIN}")
    return files
