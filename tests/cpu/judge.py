"""What must hold after a run was killed: whole checkpoints, the losses and the rows of the uninterrupted run, no garbage."""

import contextlib
import io
import json
import shutil
from collections import Counter
from pathlib import Path

from fullshard.checkpoint import commit
from fullshard.checkpoint.verify import problems
from fullshard.commands import checkpoint as commands
from fullshard.data import TokenFile
from fullshard.runs.prepare.prepare import checkpoint_dir_of
from fullshard.runs.recipe.recipe import load_recipe
from tests.cpu.chaos import Attempt, row_digest, run_once

ROWS = 4  # of a step
KNOWN = {"recipe.json", "plan.json", "run.json", "metrics.jsonl", "ranks", "checkpoints"}


class Judge:
    """Follows one run from kill to kill.

    `lineage[s]` are the rows that step s + 1 of the state in the newest checkpoint was trained on, as its ranks noted
    them: each attempt goes on where the newest checkpoint stood, and what was trained beyond it is forgotten.
    """

    def __init__(self, here: str, world: int, options: list[str], *, diverges: bool = False):
        """`diverges`: the run rolls back now and then; then what lies behind the newest checkpoint may have to go again."""
        self.here, self.world, self.options, self.diverges = Path(here), world, options, diverges
        self.run = self.here / "runs/chaos"
        self.checkpoint_dir = checkpoint_dir_of(load_recipe(str(self.here / "recipe.toml"), options), self.run)
        self.lineage: list[list[str]] = []
        self.newest = 0
        self.wanted: list[tuple[float, list[str]]] = []  # of the uninterrupted run: the loss and the rows of each step
        self.samples = samples(self.here / "tokens")
        self.epoch = len(self.samples)
        self.damaged: str | None = None  # the checkpoint that was planted
        self.whole = 0  # how many are whole, at least

    def plant(self) -> None:
        """Put a damaged checkpoint among the checkpoints, newer than all others, of a step that no save comes to."""
        self._unplant()
        names = commit.committed(self.checkpoint_dir)
        if names:
            self.damaged = commit.checkpoint_name((commit.step_of(names[-1]) or 0) + 1)
            place = self.checkpoint_dir.child(self.damaged)
            shutil.copytree(self.checkpoint_dir.child(names[-1]).path, place.path)
            file = next(place.path.glob("shard-*"))
            file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))

    def _unplant(self) -> None:
        if self.damaged:
            shutil.rmtree(self.checkpoint_dir.child(self.damaged).path)  # nobody else has removed it
        self.damaged = None

    def after(self, attempt: Attempt, in_place: bool) -> None:
        """`in_place`: collect the garbage of the run itself; else of a copy, so that the next start meets it."""
        self._unplant()
        names = commit.committed(self.checkpoint_dir)
        for name in names:
            assert problems(self.checkpoint_dir.child(name)) == []
        assert len(names) >= self.whole, "retention removed a whole checkpoint for a damaged one"
        self.whole = min(2, len(names))  # keep = 2
        self._follow(attempt, commit.step_of(names[-1]) or 0 if names else 0)
        if self.run.exists():  # the first kill may come before it does
            self._compare_losses()
            self._collect(names, in_place)

    def _follow(self, attempt: Attempt, newest: int) -> None:
        assert newest >= self.newest, "a committed checkpoint was lost"
        self.lineage = noted(attempt, self.lineage[: self.newest], rolls=self.diverges)
        assert len(self.lineage) >= newest, "a checkpoint of steps that nobody trained"
        self.newest = newest
        if len(self.lineage) > len(self.wanted):
            self.wanted = self._uninterrupted(2 * len(self.lineage) + 40)
        wanted = [rows for _, rows in self.wanted]
        judged = newest if self.diverges else len(self.lineage)
        assert self.lineage[:judged] == wanted[:judged], "other rows than the uninterrupted run's"
        if not self.diverges:
            self._refuse_lost_rows()

    def _refuse_lost_rows(self) -> None:
        """Against the token file itself: in each epoch every sample once."""
        taken = [row for rows in self.lineage[: self.newest] for row in rows]
        for start in range(0, len(taken), self.epoch):
            epoch = taken[start : start + self.epoch]
            surplus = Counter(epoch) - Counter(self.samples)
            assert not surplus, f"samples were repeated: {surplus}"
            assert len(epoch) < self.epoch or Counter(epoch) == Counter(self.samples), "samples were lost"

    def _compare_losses(self) -> None:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last one may be cut off
        found = [(m["step"], m["loss"]) for m in map(json.loads, lines) if "loss" in m]
        found = [f for f in found if f[0] <= self.newest] if self.diverges else found
        assert [step for step, _ in found] == list(range(1, len(found) + 1)), "a step is missing or logged twice"
        assert [loss for _, loss in found] == [loss for loss, _ in self.wanted[: len(found)]], "another loss"

    def _collect(self, names: list[str], in_place: bool) -> None:
        """What `fullshard checkpoint gc` leaves of the run."""
        remote = "://" in str(self.checkpoint_dir)
        run = self.run
        if not in_place and not remote:
            run = self.here / "copy"
            shutil.copytree(self.run, run)
        if in_place or not remote:
            with contextlib.redirect_stdout(io.StringIO()):
                for where in [str(run), str(self.checkpoint_dir)] if remote else [str(run)]:
                    commands.gc(where)
            checkpoint_dir = self.checkpoint_dir if remote else commit.find_checkpoint_dir(run)
            assert commit.committed(checkpoint_dir) == names
            if remote or (run / "checkpoints").exists():  # the kill may come before, and then the run itself was looked at
                assert sorted(checkpoint_dir.directories()) == names
                assert not checkpoint_dir.files()
                assert not checkpoint_dir.uploads()
            assert {p.name for p in run.iterdir()} <= KNOWN
        if run != self.run:
            shutil.rmtree(run)

    def end(self) -> None:
        """Let the run come to its end, after an epoch at least: the bytes of its last checkpoint and the rows it was
        trained on are those of a run that was never killed."""
        steps = max(self.newest + 3, self.epoch // ROWS + 2)
        found = []
        for name, resumed in (("chaos", self.newest), ("fresh", 0)):
            options = [*(o.replace("/chaos/", f"/{name}/") for o in self.options), f"train.steps={steps}"]
            attempt = Attempt(str(self.here), name, self.world, options, f"{self.here}/{name}-end")
            self._succeed(attempt)
            checkpoint_dir = checkpoint_dir_of(load_recipe(str(self.here / "recipe.toml"), options), self.here / "runs" / name)
            assert commit.garbage(checkpoint_dir) == ([], [])
            rows = noted(attempt, self.lineage[:resumed], rolls=self.diverges)
            found.append((rows, commit.read_manifest(checkpoint_dir.child(commit.checkpoint_name(steps)))))
        (self.lineage, killed), (rows, fresh) = found
        self.newest = steps
        assert self.lineage == rows
        assert killed.files == fresh.files  # checksums: model, optimizer, generators
        assert killed.cursor == fresh.cursor
        assert (fresh.cursor or 0) > steps * ROWS if self.diverges else fresh.cursor == steps * ROWS
        if not self.diverges:
            self._refuse_lost_rows()

    def _uninterrupted(self, steps: int) -> list[tuple[float, list[str]]]:
        """From the beginning. The schedule is constant, so the length of the run changes nothing."""
        name = f"whole{steps}"
        unsaved = [] if self.diverges else ["checkpoint.every=0"]  # a run that rolls back has to save
        options = [*self.options, f"train.steps={steps}", *unsaved, "checkpoint.final=false"]
        options = [o for o in options if "://" not in o]
        attempt = Attempt(str(self.here), name, self.world, options, f"{self.here}/{name}")
        self._succeed(attempt)
        lines = (self.here / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses = [m["loss"] for m in map(json.loads, lines) if "loss" in m]
        return list(zip(losses, noted(attempt, [], rolls=self.diverges), strict=True))

    def _succeed(self, attempt: Attempt) -> None:
        assert run_once(attempt, 300.0) == [0] * self.world, (self.here / "rank0.log").read_text()[-3000:]


def noted(attempt: Attempt, before: list[list[str]], *, rolls: bool = False) -> list[list[str]]:
    """The rows of each step of the run so far: those of `before`, and those of each step that all ranks began since. `rolls`:
    it may go back, and what it forgets then is no part of it."""
    ranks = []
    for rank in range(attempt.world):
        path = Path(f"{attempt.notes}-{rank}")
        ranks.append([json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [])
    found = list(before)
    for parts in zip(*ranks, strict=False):
        (step,) = {step for step, _ in parts}
        assert step == len(found) + 1 or (rolls and step <= len(found)), "a step was left out or redone"
        found = [*found[: step - 1], [row for _, rows in parts for row in rows]]
    return found


def samples(path: Path) -> list[str]:
    """The digest of every sample of a token file, cut by hand."""
    source, length = TokenFile(path), 32
    tokens = source.read(0, len(source))
    return [row_digest(tokens[i : i + length], tokens[i + 1 : i + 1 + length]) for i in range(0, len(tokens) - length, length)]
