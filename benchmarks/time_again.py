"""The table of measured step times once more: what the planner of today says of the stored rows. Needs no GPU.

python -m benchmarks.time_again benchmarks/results/2026-11-15-time-h200.json --only 'hf-*'
"""

import argparse
import fnmatch
import json
import statistics
from pathlib import Path

from benchmarks.memory_error import CASES
from benchmarks.time_error import predict
from fullshard.cluster import Cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="*", help="names of rows, with wildcards")
    args = parser.parse_args()
    stored = json.loads(args.results.read_text())
    cluster = Cluster.from_dict(Cluster.load("1xh200").to_dict() | {"measured": stored["cluster"]})
    cases = {c.name: c for c in CASES}
    errors = []
    for row in stored["rows"]:
        if fnmatch.fnmatch(row["name"], args.only):
            found = predict(cases[row["name"]], cluster, row["seconds"], row.get("paces", {}))  # beside this case, if timed
            errors.append(abs(found["error"]))
            print(
                f"{row['name']:32s} {row['seconds']:.4f} s, predicted {found['predicted']:.4f}  {found['error']:+.1%}", flush=True
            )
    print(f"mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}, {len(errors)} rows")


if __name__ == "__main__":
    main()
