"""One way through the package, traced: the files it visits and its calls from a file into another, as a line of JSON.

Started by `house.py --ways` with the traced tree on `PYTHONPATH`. Uses only names that the package has had for long, so that
older trees run as well. Each way runs a small thing twice, and traces the second.
"""

import json
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import fullshard as fs

PACKAGE = str(Path(fs.__file__).parent) + "/"
COLLECTIVES = {"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast", "all_to_all_single", "all_gather"}
RECIPE = {
    "model": {"name": "llama-nano"},
    "data": {"path": "tokens", "sequence": 32},
    "optim": {"lr": 1e-3},
    "train": {"steps": 2, "global_batch": 2, "micro_batch": 1},
    "plan": {"strategy": "zero3"},
}
DIM, LAYERS = 8, 2


class Trace:
    """Calls between files of the package. Callbacks that other libraries make visit a file, but are nobody's call."""

    def __init__(self, to_collective: bool) -> None:
        self.to_collective = to_collective  # end at the first one
        self.files: dict[str, None] = {}  # in the order of their first visit
        self.calls: dict[tuple[str, str, str], None] = {}  # caller, callee, name of the function
        self.depth = 0  # frames of the package that stood on the stack at the first collective
        self.running = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if not self.running or event != "call":
            return
        to, name = frame.f_code.co_filename, frame.f_code.co_name
        if name in COLLECTIVES and to.endswith("distributed_c10d.py") and not self.depth:
            self.depth = sum(f.f_code.co_filename.startswith(PACKAGE) for f in stack(frame))
            self.running = not self.to_collective
        elif to.startswith(PACKAGE) and frame.f_code.co_flags & CO_OPTIMIZED and name != "<genexpr>":  # no bodies of classes
            self.files.setdefault(to.removeprefix(PACKAGE))
            come_from = caller(frame)
            if come_from.startswith(PACKAGE) and come_from != to:
                self.calls.setdefault((come_from.removeprefix(PACKAGE), to.removeprefix(PACKAGE), name))

    @contextmanager
    def on(self) -> Any:
        self.running = True
        yield
        self.running = False


def stack(frame: FrameType | None) -> Any:
    while frame is not None:
        yield frame
        frame = frame.f_back


def caller(frame: FrameType) -> str:
    """The file that calls. A decorator that checks arguments is not asked: whoever calls it calls what it decorates."""
    frames = (f for f in stack(frame.f_back) if not f.f_code.co_filename.endswith("errors.py"))
    return next((f.f_code.co_filename for f in frames), "")


# -- the six ways -------------------------------------------------------------------------------------


def prepare(trace: Trace) -> None:
    from fullshard.data import TokenWriter

    with TokenWriter("tokens", vocab=64, tokenizer="made up") as writer:
        writer.add(list(range(64)) * 20)
    make = named("make_recipe", "fullshard.runs.recipe.recipe", "fullshard.runs.recipe")
    run = named("prepare", "fullshard.runs.prepare.prepare", "fullshard.runs.prepare")
    run(make(RECIPE, "recipe"), 2)
    with trace.on():
        run(make(RECIPE, "recipe"), 2)


def named(name: str, *modules: str) -> Callable[..., Any]:
    """A function of the package, from the first of the files in which it has stood."""
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise SystemExit(f"{name} is in none of {', '.join(modules)}")


def find_plan(trace: Trace) -> None:
    nano, cluster = fs.presets.describe("llama-nano"), fs.Cluster.load("8xh100")
    fs.find_plan(nano, cluster, sequence=256)
    with trace.on():
        fs.find_plan(nano, cluster, sequence=128)


def train(trace: Trace) -> None:
    steps = fs.train(torch_state(), torch_batches(), steps=3)
    next(steps)
    with trace.on():
        next(steps)


def offload(trace: Trace) -> None:
    steps = fs.train(torch_state(home=fs.Home("device", "host")), torch_batches(), steps=3)
    next(steps)
    with trace.on():
        next(steps)


def save(trace: Trace) -> None:
    state = torch_state()
    next(fs.train(state, torch_batches(), steps=1))
    fs.checkpoint.save("before", state)
    with trace.on():
        fs.checkpoint.save("saved", state)


def jax(trace: Trace) -> None:
    import numpy as np
    from flax import nnx

    from fullshard import on_jax

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(DIM, DIM, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(LAYERS)])

        def __call__(self, ids: Any) -> Any:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return x

    plan = fs.zero3(on_jax.describe(Net), devices=1, batch=fs.Batch(1, DIM))
    ids = np.arange(DIM + 1)[None] % DIM
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    first, second = (on_jax.shard(Net, plan, fs.AdamW(lr=1e-3)) for _ in range(2))
    next(fs.train(first, iter([[batch]]), steps=1))
    with trace.on():  # the step of another state, which is compiled again
        next(fs.train(second, iter([[batch]]), steps=1))


def torch_state(**choices: Any) -> Any:
    import torch
    from torch import nn

    from fullshard import on_torch

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(DIM, DIM), nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return x

    on_torch.start()
    with torch.device("meta"):
        model = Net()
    plan = fs.zero3(on_torch.describe(model), devices=1, batch=fs.Batch(1, DIM), **choices)
    return on_torch.shard(model, plan, optimizer=fs.AdamW(lr=1e-3))


def torch_batches() -> Any:
    import torch

    ids = torch.arange(DIM + 1)[None] % DIM
    return ([{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}] for _ in range(9))


if __name__ == "__main__":
    traced = Trace(to_collective=sys.argv[1] == "train")
    threading.setprofile(traced)  # of threads that begin later
    sys.setprofile(traced)
    {way.__name__: way for way in (prepare, train, find_plan, offload, save, jax)}[sys.argv[1]](traced)
    print(json.dumps({"files": list(traced.files), "calls": list(traced.calls), "depth": traced.depth}))
