"""Decides which checkpoints of a directory may be deleted, by the retention rules and by which are undamaged.

Only undamaged checkpoints count. Before one is deleted, those that are kept in its place are verified: this process has
written them or resumed from them, or compares every byte with its checksum now. Damaged checkpoints are not deleted.
"""

from dataclasses import dataclass, field

from fullshard.base.errors import FullshardError
from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import Place
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.checkpoint.retention import CheckpointSummary, Retention, to_remove
from fullshard.checkpoint.verify import problems, share_of, size_problems


def visible_problems(place: Place) -> list[str]:
    """What is wrong with a checkpoint's manifest and the sizes of its files, a sentence each. Reads no tensor."""
    try:
        manifest, present = commit.read_manifest(place), place.files()
    except FullshardError as error:
        return [str(error)]
    except (OSError, EOFError) as error:
        return [f"{place}/{MANIFEST} cannot be read: {error}"]
    return size_problems(place, manifest, present, share_of(manifest, present))


@dataclass
class Inventory:
    """The checkpoints of a directory by name. `verified`: those whose checksums were compared; `damaged`: those that do not
    count, and why."""

    checkpoint_dir: Place
    checkpoints: dict[str, CheckpointSummary] = field(default_factory=dict)
    verified: set[str] = field(default_factory=set)
    damaged: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint_dir: Place) -> "Inventory":
        inventory = cls(checkpoint_dir)
        for name in commit.committed(checkpoint_dir):
            try:
                manifest = commit.read_manifest(checkpoint_dir.child(name))
            except (FullshardError, OSError, EOFError) as error:
                inventory.damaged[name] = str(error)
                continue
            if commit.checkpoint_name(manifest.step) == name:
                inventory.checkpoints[name] = CheckpointSummary.of(manifest)
            else:
                inventory.damaged[name] = f"{checkpoint_dir.child(name)} is of step {manifest.step}"
        return inventory

    def add(self, checkpoint: CheckpointSummary) -> None:
        """Add a checkpoint that this process has just written; it counts as verified."""
        name = commit.checkpoint_name(checkpoint.step)
        self.checkpoints[name] = checkpoint
        self.verified.add(name)
        self.damaged.pop(name, None)

    def removable(self, rules: Retention) -> list[str]:
        """The names of the checkpoints that may be deleted, oldest first. Verifies those that are kept; if one is damaged,
        decides again without it. Reads nothing if nothing is to be deleted."""
        while removable := to_remove(list(self.checkpoints.values()), rules):
            problems_of = {name: self._first_problem(name) for name in self.checkpoints if name not in removable}
            damaged = {name: why for name, why in problems_of.items() if why}
            if not damaged:
                return removable
            self.damaged |= damaged
            self.checkpoints = {n: c for n, c in self.checkpoints.items() if n not in damaged}
        return []

    def _first_problem(self, name: str) -> str:
        """What is wrong with a checkpoint, or nothing. Of a verified one only sizes are checked."""
        place = self.checkpoint_dir.child(name)
        wrong = visible_problems(place) if name in self.verified else problems(place)
        if not wrong:
            self.verified.add(name)
        return wrong[0] if wrong else ""

    def forget(self, name: str) -> None:
        """Remove a deleted checkpoint from the inventory."""
        self.checkpoints.pop(name, None)
        self.verified.discard(name)
