"""Predict the stored memory measurements again with today's planner. Needs no GPU.

    python -m benchmarks.memory_again benchmarks/results/2026-11-20-memory-h200.json --only 'hf-*'

A trace depends on the installed versions of torch and transformers. Rows of Hugging Face models can only be compared
under the version that they were measured with.
"""

import argparse
import fnmatch
import json
from pathlib import Path
from typing import Any

from benchmarks.memory_error import CASES, predict, summarise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="*", help="names of rows, with wildcards")
    args = parser.parse_args()
    cases = {c.name: c for c in CASES}
    rows = []
    for row in json.loads(args.results.read_text())["rows"]:
        if fnmatch.fnmatch(row["name"], args.only):
            rows.append(row | again(row, predict(cases[row["name"]])))
            print(line(rows[-1]), flush=True)
    summarise(rows)


def again(row: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Today's prediction of a row, with its errors."""
    return found | {f"error_{kind}": found[f"predicted_{kind}"] / row[kind] - 1 for kind in ("allocated", "reserved")}


def line(row: dict[str, Any]) -> str:
    return f"{row['name']:32s} allocated {row['error_allocated']:+.3%}  reserved {row['error_reserved']:+.2%}"


if __name__ == "__main__":
    main()
