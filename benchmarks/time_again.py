"""Predict the stored step times again with today's planner. Needs no GPU.

python -m benchmarks.time_again benchmarks/results/2026-11-16-turns-time-h200.json --part first --only 'hf-*'

Parts third and fourth of 2026-11-16-cores-time-h200.json can be predicted too. Older tables cannot: their host was timed
in another way.
"""

import argparse
import fnmatch
import json
from pathlib import Path

from benchmarks.time_error import predict_all, summarise
from fullshard.cluster.topology import Cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="*", help="names of rows, with wildcards")
    parser.add_argument("--part", help="one of several runs in the file")
    args = parser.parse_args()
    stored = json.loads(args.results.read_text())
    parts = [name for name, value in stored.items() if isinstance(value, dict) and "rows" in value]
    if parts and args.part not in parts:
        raise SystemExit(f"{args.results.name} has several runs; give --part {' or '.join(parts)}")
    stored = stored[args.part] if parts else stored
    rows = [r for r in stored["rows"] if fnmatch.fnmatch(r["name"], args.only)]
    if not all("felt" in r and "beside" in r for r in rows):
        raise SystemExit("the host of these rows was timed in another way; take a part of 2026-11-16-turns-time-h200.json")
    card = Cluster.load("1xh200").to_dict()
    files = {name: Cluster.from_dict(card | {"measured": stored[name]}) for name in ("cluster", "before") if name in stored}
    if "before" not in files:  # older results have one cluster file, made before the steps
        files = {"before": files["cluster"]}
    summarise(predict_all(rows, files.get("cluster"), files.get("before")))


if __name__ == "__main__":
    main()
