"""The checkpoints of a run and what is known of each: whole by its sizes, verified by its checksums, damaged, or partial."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.pruning import visible_problems
from fullshard.checkpoint.verify import problems

STAGED = re.compile(r"\.(step-\d+)\.[0-9a-f]+\.(partial|removed)")


@dataclass
class RunCheckpoints:
    """The directory of a run's checkpoints. `verified`: what reading every byte showed, by name and time of writing."""

    directory: Path
    verified: dict[tuple[str, float], list[str]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """A row each, the newest first."""
        place = Local(self.directory)
        rows = [self._row(place, name) for name in reversed(commit.committed(place))]
        dead, held = commit.garbage(place)
        left = [(name, "partial", "a killed process left it; `fullshard checkpoint gc` removes it") for name in dead]
        left += [(name, "partial", "it is being written") for name in held]
        named = [(match[1], verdict, why) for name, verdict, why in left if (match := STAGED.fullmatch(name))]
        return [_unread(name, verdict, why) for name, verdict, why in sorted(named)] + rows

    def _row(self, place: Local, name: str) -> dict[str, Any]:
        try:
            if wrong := visible_problems(place.child(name)):
                return _unread(name, "damaged", wrong[0])
            manifest = commit.read_manifest(place.child(name))
        except FullshardError as error:
            return _unread(name, "damaged", str(error))
        about = {
            "name": name,
            "step": manifest.step,
            "created": manifest.created,
            "bytes": manifest.nbytes,
            "metrics": dict(manifest.metrics),
        }
        if (read := self.verified.get((name, manifest.created))) is None:
            return about | {"verdict": "whole", "why": "every file is there and has its size"}
        return about | {
            "verdict": "damaged" if read else "verified",
            "why": read[0] if read else "every byte agrees with its checksum",
        }

    def verify(self, name: str) -> dict[str, Any]:
        """Read every byte of a checkpoint; its row."""
        place = Local(self.directory)
        if name not in commit.committed(place):
            raise FullshardError(f"{self.directory} has no checkpoint {name[:40]!r}; it may have been removed meanwhile")
        wrong = problems(place.child(name))
        try:
            self.verified[name, commit.read_manifest(place.child(name)).created] = wrong
        except FullshardError as error:
            return _unread(name, "damaged", str(error))
        return self._row(place, name)


def _unread(name: str, verdict: str, why: str) -> dict[str, Any]:
    return {
        "name": name,
        "step": commit.step_of(name),
        "created": None,
        "bytes": None,
        "metrics": {},
        "verdict": verdict,
        "why": why,
    }
