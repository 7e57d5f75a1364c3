"""The table of measured peaks once more: what the planner of today says of the stored rows. Needs no GPU.

    python -m benchmarks.memory_again benchmarks/results/2026-11-15-memory-h200.json --only 'hf-*'

A trace is that of the torch and the transformers which are installed: rows of Hugging Face models are the measured
programs only under the version that they were measured with.
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
    """Errors as of today."""
    return found | {f"error_{kind}": found[f"predicted_{kind}"] / row[kind] - 1 for kind in ("allocated", "reserved")}


def line(row: dict[str, Any]) -> str:
    return f"{row['name']:32s} allocated {row['error_allocated']:+.3%}  reserved {row['error_reserved']:+.2%}"


if __name__ == "__main__":
    main()
