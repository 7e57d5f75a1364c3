"""Train tiny models of transformers, timm and diffusers sharded and unsharded, and compare.

    python -m benchmarks.zoo --library transformers --out zoo.jsonl             # every head; a second call goes on
    python -m benchmarks.zoo --only '*:swin:*' --out zoo.jsonl
    python -m benchmarks.zoo --again differs traceback --out zoo.jsonl          # these heads again, in place of their rows
    python -m benchmarks.zoo --table zoo.jsonl > zoo.md

Each head is trained for three steps by `torch.optim.AdamW` in one process, and by fullshard with zero3 on two gloo ranks. One
line of JSON a head: `equal`, `differs`, `refused` with its sentence, `traceback`, or `not built` with the reason, which lies
outside fullshard. `described`: `plain`, or `example` where the model was described with a batch. `rounding`: of a head whose
difference is above 5e-5, how far the unsharded model's weights differ if each begins with another last bit; such a head is equal
up to four times that. `mode` and `precision`: how the head is equal; one that differs in training mode and fp32 is trained in
fp64 and in evaluation mode as well. A call that is cut goes on where it was.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.zoo_pool import RESULTS, Pool

SLOW = ("timm", "diffusers")  # their models have no tiny configurations: before those of transformers


def run(arguments: argparse.Namespace) -> None:
    from benchmarks.zoo_models import LIBRARIES, heads

    found = [h for lib in LIBRARIES if lib == (arguments.library or lib) for h in heads(lib)]
    found = [h for h in found if any(fnmatch.fnmatchcase(h.key, pattern) for pattern in arguments.only)]
    if arguments.first:
        found = list({(h.library, h.family): h for h in reversed(found)}.values())
    random.Random(0).shuffle(found)
    found = found[arguments.shard :: arguments.of]
    seconds = _recorded_seconds()
    found.sort(key=lambda h: (-max(seconds.get(h.key, 0.0), seconds.get(h.family, 0.0)), h.library not in SLOW))
    out = Path(arguments.out)
    if arguments.again:
        _forget(out, {h.key for h in found}, arguments.again)
    done = {row["key"] for row in _rows(out)}
    left = [h for h in found if h.key not in done]
    print(f"{len(found)} heads, {len(left)} to train, {arguments.jobs} at a time", file=sys.stderr)
    _train_all(left, out, arguments)


def _train_all(left: list[Any], out: Path, arguments: argparse.Namespace) -> None:
    """Several pools, each with a thread that gives it the next head."""
    waiting, lock, started, counts = iter(list(left)), threading.Lock(), time.time(), Counter[str]()

    def work() -> None:
        pool = Pool(arguments.limit)
        try:
            while True:
                with lock:
                    head = next(waiting, None)
                if head is None or (arguments.seconds and time.time() - started > arguments.seconds):
                    return
                result = {"key": head.key, **pool.compared(head.library, head.family, head.name)}
                with lock:
                    note(result)
        finally:
            pool.stop()

    def note(result: dict[str, Any]) -> None:
        counts[result["result"]] += 1
        where = result.pop("where", "")  # paths of this machine: to be read, not kept
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        passed, place = time.time() - started, f"{sum(counts.values())}/{len(left)}"
        why = f" {result['why'][:200]}" if "why" in result else ""
        print(f"{passed:5.0f} s  {place} {result['key']}: {result['result']}{why}\n{where}".rstrip(), file=sys.stderr, flush=True)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(arguments.jobs, len(left)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(", ".join(f"{counts[k]} {k}" for k in RESULTS if counts[k]) or "nothing to train", file=sys.stderr)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The results in a file. The last line may be cut."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def _forget(path: Path, keys: set[str], results: list[str]) -> None:
    """Remove the rows of heads that are to be trained again."""
    kept = [row for row in _rows(path) if row["key"] not in keys or row["result"] not in results]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def _recorded_seconds() -> dict[str, float]:
    """What heads took in the newest recorded run, and the longest of each family."""
    files = sorted((Path(__file__).parent / "results").glob("*-zoo-cpu.jsonl"))
    found: dict[str, float] = {}
    for row in _rows(files[-1]) if files else ():
        for name in (row["key"], row["key"].split(":")[1]):
            found[name] = max(found.get(name, 0.0), row["seconds"])
    return found


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
    shown = sum(r["described"] == "example" for r in equal)
    by_rounding = sum("rounding" in r for r in equal)
    others = Counter(f"{r['mode']} mode and {r.get('precision', 'fp32')}" for r in equal)
    others.pop("train mode and fp32", None)
    listing = ", ".join(f"{counts[k]} {k}" for k in RESULTS if counts[k])
    only = "".join(f", {n} are equal in {how} only" for how, n in sorted(others.items()))
    return (
        f"{len(results)} heads of {families} families, {built} of which could be built: {listing}. Of the equal ones {shown} "
        f"were described with a batch, {by_rounding} differ by no more than rounding makes them differ{only}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=("transformers", "timm", "diffusers"), help="all without it")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of library:family:head")
    parser.add_argument("--first", action="store_true", help="one head a family")
    parser.add_argument("--shard", type=int, default=0, help="this part of --of")
    parser.add_argument("--of", type=int, default=1, help="parts")
    parser.add_argument("--out", default="zoo.jsonl", help="heads that it has are not trained again")
    parser.add_argument("--again", nargs="+", choices=RESULTS, default=[], help="but for those with these results")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="heads at a time; by default one a core")
    parser.add_argument("--limit", type=float, default=90, help="seconds that one attempt at a head may take")
    parser.add_argument("--seconds", type=float, default=0, help="begin no further head after so many; without it, all")
    parser.add_argument("--table", nargs="+", help="print the table of these files, and train nothing")
    arguments = parser.parse_args()
    if arguments.table:
        rows = [row for path in arguments.table for row in _rows(Path(path))]
        print(table(list({r["key"]: r for r in rows}.values())))
    else:
        run(arguments)


if __name__ == "__main__":
    main()
