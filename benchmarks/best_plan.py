"""Ask the planner random questions, freely and with one to three choices fixed: no fixed answer may be faster.

    python -m benchmarks.best_plan --seeds 1000 --jobs 16 --out best_plan.jsonl     # a second call goes on
    python -m benchmarks.best_plan --table best_plan.jsonl

A question is a model, a cluster, a sequence, a global batch and a limit of memory. What is fixed is drawn from what a search
chooses among. Of the other strategies that the free answer lists, one is asked for as it is listed: it must cost the same.
One line of JSON a question: `seconds` of the free answer, `fixed` that of the fixed one, `row` and `again` of a listed strategy.
"""

import argparse
import json
import multiprocessing
import random
import sys
import time
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.cluster.topology import Cluster
from fullshard.model import presets
from fullshard.planner.search.search import SearchResult, find_plan

MODELS = ("llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama2-13b", "llama3-70b", "gpt2-xl", "gpt-33m", "llama-1.5b")
CLUSTERS = ("1xh100", "2xh100", "8xh100", "8xa100", "64xh100", "256xh100", "2xrtx4090", "4xl40s")
CHOICES: dict[str, tuple[Any, ...]] = {
    "strategy": ("ddp", "zero1", "zero2", "zero3", "hybrid", "hpz"),
    "remat": ("none", "selective", "full"),
    "micro_batch": (1, 2, 4, 8),
    "prefetch": (1, 2),
    "sync": ("every", "last"),
    "compile": (True,),
    "home.optimizer": ("device", "host", "disk"),
    "home.params": ("device", "host"),
    "home.activations": ("device", "host"),
    "staging": (8, 16, 48),
}
ROUNDING = 1e-9


def question(seed: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What is asked in words, the arguments of `find_plan`, and what is fixed."""
    pick = random.Random(seed)
    model, where = pick.choice(MODELS), pick.choice(CLUSTERS)
    cluster = Cluster.named(where)
    share = pick.choice((None, None, None, 0.6, 0.35))
    limit = None if share is None else int(share * cluster.of("memory"))
    shape = {"sequence": pick.choice((1024, 4096, 8192)), "global_batch": cluster.devices * pick.choice((1, 2, 4, 8))}
    fix = {name: pick.choice(CHOICES[name]) for name in pick.sample(sorted(CHOICES), pick.randint(1, 3))}
    asked = {"model": model, "cluster": where, **shape, "limit": limit}
    return asked, {"description": presets.describe(model), "cluster": cluster, **shape, "limit": limit}, fix


def answer(seed: int) -> dict[str, Any]:
    asked, about, fix = question(seed)
    row = {"seed": seed, **asked, "fix": fix}
    free, took = _ask(about, {})
    fixed, _ = _ask(about, fix)
    row |= {"seconds": _seconds(free), "fixed": _seconds(fixed), "took": round(took, 2)}
    row |= {"free_plan": _words(free), "fixed_plan": _words(fixed)}
    if free is not None and seed % 4 == 0:
        row |= _listed(seed, about, free)
    return row


def _ask(about: dict[str, Any], fix: dict[str, Any]) -> tuple[SearchResult | None, float]:
    began = time.process_time()
    try:
        return find_plan(**about, fix=fix), time.process_time() - began
    except FullshardError:
        return None, time.process_time() - began


def _listed(seed: int, about: dict[str, Any], free: SearchResult) -> dict[str, Any]:
    """Ask for one of the strategies that lost, as it is listed."""
    fitting = [a for a in free.alternatives if a.step_seconds is not None]
    if not fitting:
        return {}
    other = random.Random(seed).choice(fitting)
    again, _ = _ask(about, other.fix)
    return {"listed": other.label, "row": other.step_seconds, "again": _seconds(again)}


def _seconds(found: SearchResult | None) -> float | None:
    return None if found is None else found.estimate.step_seconds


def _words(found: SearchResult | None) -> str:
    if found is None:
        return ""
    batch, homes = found.plan.batch, sorted({str(u.home) for u in found.plan.units})
    remats = sorted({u.remat for u in found.plan.units})
    return f"{found.strategy} {batch.micro_batch}x{batch.accumulate} {batch.sync} {remats} {homes} {found.plan.cpu_share}"


def wrong(row: dict[str, Any]) -> str:
    """What is wrong with a row; empty if nothing is."""
    if row["fixed"] is not None and (row["seconds"] is None or row["fixed"] < (1 - ROUNDING) * row["seconds"]):
        return "a fixed answer is faster"
    if row.get("row") is not None and (row["again"] is None or abs(row["again"] / row["row"] - 1) > ROUNDING):
        return "a listed strategy costs otherwise"
    return ""


def table(path: Path) -> str:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    bad = [(wrong(row), row) for row in rows if wrong(row)]
    answered, both = [r for r in rows if r["seconds"]], [r for r in rows if r["seconds"] and r["fixed"]]
    took = sorted(r["took"] for r in answered)
    lines = [f"{len(rows)} questions, {len(answered)} with a plan that fits, {len(both)} of them with choices fixed too"]
    lines += (
        [f"seconds of CPU of a free question: median {took[len(took) // 2]}, 95% {took[int(0.95 * len(took))]}"] if took else []
    )
    lines += [f"wrong: {len(bad)}"]
    for why, row in bad:
        fixed = row["again"] if "listed" in why else row["fixed"]
        seconds = row["row"] if "listed" in why else row["seconds"]
        lines.append(f"  {row['seed']}: {why}: {seconds} and {fixed}; {row['fix']}: {row['free_plan']} | {row['fixed_plan']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("best_plan.jsonl"))
    parser.add_argument("--table", type=Path, help="print what a file says, and ask nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.table))
        return
    done = {json.loads(line)["seed"] for line in arguments.out.read_text().splitlines()} if arguments.out.exists() else set()
    left = [seed for seed in range(arguments.seeds) if seed not in done]
    with multiprocessing.Pool(arguments.jobs) as pool, arguments.out.open("a") as out:
        for row in pool.imap_unordered(answer, left):
            out.write(json.dumps(row) + "\n")
            out.flush()
            if why := wrong(row):
                print(f"{row['seed']}: {why}", file=sys.stderr)
    print(table(arguments.out))


if __name__ == "__main__":
    main()
