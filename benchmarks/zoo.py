"""Train tiny models of transformers, timm and diffusers sharded and unsharded, and compare.

    python -m benchmarks.zoo --library transformers --out zoo.jsonl             # every head; a second call goes on
    python -m benchmarks.zoo --only '*:swin:*' --out zoo.jsonl
    python -m benchmarks.zoo --table zoo.jsonl > zoo.md

Each head is trained for three steps by `torch.optim.AdamW` in one process, and by fullshard with zero3 on two gloo ranks. One
line of JSON a head: `equal`, `differs`, `refused` with its sentence, `traceback`, or `not built` with the reason, which lies
outside fullshard. `described`: `plain`, or `example` where the model was described with a batch. `mode`: `eval` for a head that
differed in training mode, as batch norms over two values do by rounding alone.
"""

import argparse
import copy
import faulthandler
import fnmatch
import json
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

RANKS, STEPS, LR, EPS = 2, 3, 1e-3, 1e-4
CLOSE = 5e-5  # of the largest difference of a weight; a step moves weights by up to LR
HEADS_A_POOL = 60  # then fresh processes, which have the memory back
SECONDS = 400  # a head may take, on a busy machine
PRELOADED = ["fullshard.on_torch", "torch._dynamo", "transformers", "benchmarks.zoo_models"]  # once, for all ranks
RESULTS = ("equal", "refused", "differs", "traceback", "not built")


# -- in a rank -------------------------------------------------------------------------------------------------


def compared(key: tuple[str, str, str]) -> dict[str, Any]:
    """The result of one head, on every rank."""

    from benchmarks.zoo_models import Head

    head, started = Head(*key), time.time()
    for mode in ("train", "eval"):
        given = _reference(head, mode)
        result = given if "result" in given else _sharded(head, given, mode)
        if result["result"] != "differs":
            break
    return {**result, "mode": mode, "seconds": round(time.time() - started, 1)}


def _reference(head: Any, mode: str) -> dict[str, Any]:
    """What the first rank found without shards; the others get the batches only."""
    import torch.distributed as dist

    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            found = _unsharded(head, mode)
        except Exception as error:
            found = {"result": "not built", "why": _line(error)}
    sent = [{k: v for k, v in found.items() if k in ("result", "why", "batches", "how")}]
    dist.broadcast_object_list(sent, 0)
    return found or sent[0]


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def part_loss(model: Any, values: dict[str, Any]) -> Any:
    """A sum over everything that the model returns, with fixed weights. Draws the same random numbers for the same inputs."""
    import torch

    from benchmarks.zoo_models import outputs, seed
    from fullshard import on_torch

    number = values["number"]
    seed(number)
    total: Any = 0.0
    for t in outputs(model, {k: v for k, v in values.items() if k != "number"}):
        flat = torch.where(t.isfinite(), t, 0.0).float().flatten().clamp(-1e3, 1e3)
        weights = torch.cos(torch.arange(flat.numel(), device=flat.device) * 1.7 + 0.3)
        total = total + (flat * weights).sum() / flat.numel() ** 0.5
    return on_torch.Loss(total, 1)


def _numbered(batches: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [[{**part, "number": 10 * i + j} for j, part in enumerate(step)] for i, step in enumerate(batches)]


def _unsharded(head: Any, mode: str) -> dict[str, Any]:
    import torch

    from benchmarks.zoo_models import sample

    made = sample(head, STEPS, RANKS)
    batches, model = _numbered(made.batches), made.model.train(mode == "train")
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    losses = []
    for step in batches:
        total = sum(part_loss(model, copy.deepcopy(part)).sum for part in step) / RANKS
        if not total.requires_grad:
            raise ValueError("no output depends on a trained parameter")
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    weights = {n: p.detach() for n, p in model.named_parameters()}
    moved = max((float((weights[n] - start[n]).abs().max()) for n in weights if weights[n].numel()), default=0.0)
    if not moved or any(not w.isfinite().all() for w in weights.values()):
        raise ValueError("the unsharded model does not train: its weights are not finite or do not move")
    return {"batches": batches, "losses": losses, "weights": weights, "moved": moved, "how": made.how}


def _sharded(head: Any, given: dict[str, Any], mode: str) -> dict[str, Any]:
    found = _attempt(head, given, mode, example=False)
    if found["result"] == "refused" and "example=" in found["why"]:
        again = _attempt(head, given, mode, example=True)
        return again if again["result"] != "refused" else {**again, "plain": found["why"]}
    return found


def _attempt(head: Any, given: dict[str, Any], mode: str, *, example: bool) -> dict[str, Any]:
    """Train sharded. All ranks return the same result."""
    import torch.distributed as dist

    from fullshard.errors import FullshardError

    described = "example" if example else "plain"
    try:
        mine: dict[str, Any] = _train(head, given, mode, example)
    except FullshardError as error:
        mine = {"result": "refused", "why": str(error)}
    except Exception as error:
        mine = {"result": "traceback", "why": _line(error), "where": traceback.format_exc()[-1500:]}
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, mine)
    worst = max(everyone, key=lambda r: RESULTS.index(r["result"]))
    return {**worst, "described": described}


def _train(head: Any, given: dict[str, Any], mode: str, example: bool) -> dict[str, Any]:
    import torch.distributed as dist

    import fullshard as fs
    from benchmarks.zoo_models import build
    from fullshard import on_torch

    rank, model = dist.get_rank(), build(head, given["how"]).train(mode == "train")
    more = {"example": copy.deepcopy(given["batches"][0][0]), "loss": part_loss, "costs": False} if example else {}
    description = on_torch.describe(model, **more)
    plan = fs.zero3(description, devices=RANKS, batch=fs.Batch(2, 1))
    state = on_torch.shard(model, plan, fs.AdamW(lr=LR, eps=EPS), first_step_checks=False)
    losses = []
    for step in given["batches"]:
        losses.append(float(on_torch.train_step(state, [copy.deepcopy(step[rank])], loss=part_loss).loss))
    worst, name = 0.0, ""
    for n, p in state.model.named_parameters():
        whole = p.full_tensor().detach()
        if "weights" in given and whole.numel():
            apart = float((whole - given["weights"][n]).abs().max())
            if not apart <= worst:
                worst, name = apart, n
    if "weights" not in given:
        return {"result": "equal"}
    found = {"apart": worst, "moved": given["moved"], "notes": list(state.notes), "units": len(plan.units), "how": given["how"]}
    off = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, given["losses"], strict=True))
    if worst <= CLOSE and off <= 1e-3:
        return {"result": "equal", **found}
    return {"result": "differs", "why": f"{name} by {worst:.2g} of {given['moved']:.2g}, losses by {off:.2g}", **found}


# -- the ranks -------------------------------------------------------------------------------------------------


class Pool:
    """Two live ranks."""

    def __init__(self, folder: str) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.directory = tempfile.TemporaryDirectory(dir=folder)
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.directory.name, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, key: tuple[str, str, str]) -> dict[str, Any]:
        """The result of a head. Ranks that hang or die are a traceback; the pool is stopped then."""
        for pipe in self.pipes:
            pipe.send(key)
        answers: dict[Connection, dict[str, Any]] = {}
        until = time.time() + SECONDS
        while len(answers) < RANKS:
            ready = wait([p for p in self.pipes if p not in answers], max(0.0, until - time.time()))
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()  # type: ignore[index]
                except EOFError:
                    return self._ended("a rank died")
            if not ready:
                return self._ended(f"no end after {SECONDS} s")
        return answers[self.pipes[0]]  # type: ignore[index]

    def _ended(self, why: str) -> dict[str, Any]:
        self.stop()
        return {"result": "traceback", "why": why}

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        if self.processes:
            self.directory.cleanup()
        self.processes = []


def _serve(rank: int, directory: str, pipe: Connection) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    import datetime
    import warnings

    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=SECONDS))
    import transformers

    transformers.logging.set_verbosity_error()
    faulthandler.register(signal.SIGUSR1)
    while True:
        try:
            pipe.send(compared(pipe.recv()))
        except EOFError:
            return
        except Exception as error:
            pipe.send({"result": "traceback", "why": _line(error), "where": traceback.format_exc()[-1500:]})


# -- the whole zoo ---------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> None:
    from benchmarks.zoo_models import LIBRARIES, heads

    found = [h for lib in LIBRARIES if lib == (arguments.library or lib) for h in heads(lib)]
    found = [h for h in found if any(fnmatch.fnmatchcase(h.key, pattern) for pattern in arguments.only)]
    if arguments.first:
        found = list({(h.library, h.family): h for h in reversed(found)}.values())
    random.Random(0).shuffle(found)
    found = found[arguments.shard :: arguments.of]
    out = Path(arguments.out)
    done = {json.loads(line)["key"] for line in out.read_text().splitlines()} if out.exists() else set()
    left = [h for h in found if h.key not in done]
    print(f"{len(found)} heads, {len(left)} to train", file=sys.stderr)
    pool, used = None, 0
    for i, head in enumerate(left):
        if pool is None or not pool.processes or used >= HEADS_A_POOL:
            if pool:
                pool.stop()
            pool, used = Pool(tempfile.gettempdir()), 0
        result = {"key": head.key, **pool.run((head.library, head.family, head.name))}
        used += 1
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{i + 1}/{len(left)} {head.key}: {result['result']} {result.get('why', '')[:200]}", file=sys.stderr, flush=True)
    if pool:
        pool.stop()


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: the sums by library, then a row for each family, then every head that is not equal."""
    text = []
    for library in dict.fromkeys(r["key"].split(":")[0] for r in lines):
        own = [r for r in lines if r["key"].startswith(f"{library}:")]
        text += [f"## {library}", "", _summary(own), ""]
        text += [f"| family | {' | '.join(RESULTS)} |", "|---|" + "---:|" * len(RESULTS)]
        families: dict[str, Counter[str]] = {}
        for r in own:
            families.setdefault(r["key"].split(":")[1], Counter())[r["result"]] += 1
        text += [f"| {f} | {' | '.join(str(families[f][k] or '') for k in RESULTS)} |" for f in sorted(families)]
        for result in RESULTS[1:]:
            rows = [r for r in own if r["result"] == result]
            if rows:
                text += ["", f"### {result}", ""]
                text += [f"- `{':'.join(r['key'].split(':')[1:])}`: {r.get('why', '')[:200]}" for r in rows]
        text.append("")
    return "\n".join(text)


def _summary(results: list[dict[str, Any]]) -> str:
    counts = Counter(r["result"] for r in results)
    families = len({r["key"].split(":")[1] for r in results})
    built = len({r["key"].split(":")[1] for r in results if r["result"] != "not built"})
    equal = [r for r in results if r["result"] == "equal"]
    shown, evaluated = (sum(r.get(k) == v for r in equal) for k, v in (("described", "example"), ("mode", "eval")))
    listing = ", ".join(f"{counts[k]} {k}" for k in RESULTS if counts[k])
    return (
        f"{len(results)} heads of {families} families, {built} of which could be built: {listing}. Of the equal ones {shown} "
        f"were described with a batch, and {evaluated} are equal in evaluation mode only."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=("transformers", "timm", "diffusers"), help="all without it")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of library:family:head")
    parser.add_argument("--first", action="store_true", help="one head a family")
    parser.add_argument("--shard", type=int, default=0, help="this part of --of")
    parser.add_argument("--of", type=int, default=1, help="parts")
    parser.add_argument("--out", default="zoo.jsonl", help="heads that it has are not trained again")
    parser.add_argument("--table", nargs="+", help="print the table of these files, and train nothing")
    arguments = parser.parse_args()
    if arguments.table:
        rows = [json.loads(line) for path in arguments.table for line in Path(path).read_text().splitlines()]
        print(table(list({r["key"]: r for r in rows}.values())))
    else:
        run(arguments)


if __name__ == "__main__":
    main()
