"""Retention on a shelf: which checkpoints go, by the rules and by what is whole.

Only whole checkpoints count, and before one goes, those that stay instead are known to be whole: every byte was compared
with its checksum, when this process wrote it, resumed from it, or looks at it now. What turns out damaged is left alone.
"""

from dataclasses import dataclass, field

from fullshard.checkpoint import commit
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.checkpoint.place import Place
from fullshard.checkpoint.retention import Candidate, Kept, to_remove
from fullshard.checkpoint.verify import absent_nodes, problems
from fullshard.errors import FullshardError


def size_problems(place: Place) -> list[str]:
    """What is wrong with a checkpoint as far as its manifest and the sizes of its files tell; reads no tensor."""
    try:
        manifest, present = commit.read_manifest(place), place.files()
    except FullshardError as error:
        return [str(error)]
    except (OSError, EOFError) as error:
        return [f"{place}/{MANIFEST} cannot be read: {error}"]
    absent = absent_nodes(manifest, present)
    wanted = {n: f.nbytes for n, f in manifest.files.items() if f.node not in absent}
    missing = [f"{place} lacks {n}" for n in wanted if n not in present]
    return missing + [
        f"{place}/{n} has {present[n]} bytes instead of {size}" for n, size in wanted.items() if present.get(n, size) != size
    ]


@dataclass
class Inventory:
    """The checkpoints of a shelf as retention knows them. `verified`: names of those whose every byte was compared;
    `damaged`: names of the others that were looked at, and why."""

    shelf: Place
    candidates: dict[str, Candidate] = field(default_factory=dict)
    verified: set[str] = field(default_factory=set)
    damaged: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, shelf: Place) -> "Inventory":
        found = cls(shelf)
        for name in commit.committed(shelf):
            try:
                manifest = commit.read_manifest(shelf.child(name))
            except (FullshardError, OSError, EOFError) as error:
                found.damaged[name] = str(error)
                continue
            if commit.checkpoint_name(manifest.step) == name:
                found.candidates[name] = Candidate.of(manifest)
            else:
                found.damaged[name] = f"{shelf.child(name)} is of step {manifest.step}"
        return found

    def add(self, candidate: Candidate) -> None:
        """One that was just written, its checksums made of what was written."""
        name = commit.checkpoint_name(candidate.step)
        self.candidates[name] = candidate
        self.verified.add(name)
        self.damaged.pop(name, None)

    def retire(self, rules: Kept) -> list[str]:
        """The names that may go, oldest first. Reads all bytes of those that stay for them and were never compared."""
        while gone := to_remove(list(self.candidates.values()), rules):
            found = {name: self._wrong(name) for name in self.candidates if name not in gone}
            wrong = {name: why for name, why in found.items() if why}
            if not wrong:
                return gone
            self.damaged |= wrong
            self.candidates = {n: c for n, c in self.candidates.items() if n not in wrong}
        return []

    def _wrong(self, name: str) -> str:
        place = self.shelf.child(name)
        wrong = size_problems(place) if name in self.verified else problems(place)
        if not wrong:
            self.verified.add(name)
        return wrong[0] if wrong else ""

    def forget(self, name: str) -> None:
        self.candidates.pop(name, None)
        self.verified.discard(name)
