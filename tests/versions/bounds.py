"""Constraints for pip: the lowest versions that pyproject.toml declares for some extras, all at once, or the newest.

    python tests/versions/bounds.py lowest torch,jax > lowest.txt
    python tests/versions/bounds.py newest torch,jax > newest.txt

torch is pinned in both as in constraints.txt: its builds without CUDA come from an index of their own. Uses the standard
library only, since it runs before anything is installed.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
BOUND = re.compile(r"(?P<name>[\w.-]+)(\[\w+\])?>=(?P<version>[\d.]+)")
OWN = re.compile(r"fullshard\[(?P<extras>[\w,]+)\]")


def declared(extras: list[str]) -> dict[str, str]:
    """The lowest version of each package that these extras need. The highest bound counts where several declare one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, str] = {}
    waiting, wanted = [*extras], [*project["dependencies"]]
    while waiting:
        for requirement in project["optional-dependencies"][waiting.pop()]:
            if own := OWN.fullmatch(requirement):
                waiting += own["extras"].split(",")
            else:
                wanted.append(requirement)
    for requirement in wanted:
        bound = BOUND.fullmatch(requirement)
        assert bound, f"{requirement} declares no lowest version"
        found[bound["name"]] = max(found.get(bound["name"], "0"), bound["version"], key=_numbers)
    return found


def constraints(end: str, extras: list[str]) -> list[str]:
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    lowest = declared(extras) if end == "lowest" else {}
    return [pinned, *(f"{name}=={version}" for name, version in sorted(lowest.items()) if name != "torch")]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


if __name__ == "__main__":
    print("\n".join(constraints(sys.argv[1], sys.argv[2].split(","))))
