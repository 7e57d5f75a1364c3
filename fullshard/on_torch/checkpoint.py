"""Checkpoints of a sharded state: each rank writes its own part, nothing is gathered, and all agree on the end.

A save has two halves. Staging copies this rank's items into an arena, after which training may go on. Writing, in
a background thread, has four phases that all ranks go through together: the first makes the staging directory, each
writes its file, the first (of each node, without a shared disk) commits, all learn how it went.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, Metadata

from fullshard.checkpoint import commit, verify
from fullshard.checkpoint.manifest import Manifest, TensorRecord
from fullshard.checkpoint.place import Place, open_place
from fullshard.checkpoint.reader import Checkpoint, refuse_others
from fullshard.checkpoint.retention import Candidate, Kept, to_remove
from fullshard.errors import FullshardError
from fullshard.on_torch import named
from fullshard.on_torch.agree import attempt, decide, gather, give_group, take_group, together
from fullshard.on_torch.inference import free_gathered
from fullshard.on_torch.nodes import Nodes, find_nodes, find_nodes_read, once_a_node
from fullshard.on_torch.state import State
from fullshard.on_torch.storage import (
    WORD,
    About,
    Image,
    Memory,
    Reader,
    Written,
    file_name,
    fitting,
    make_manifest,
    planned_bytes,
)
from fullshard.text import bytes_text

HEADERS = 1 << 20  # bytes: what a checkpoint takes besides its tensors, about


@dataclasses.dataclass
class Saving:
    """A save under way. `result` waits for it: where the checkpoint lies. It raises what went wrong, on all ranks alike."""

    step: int
    thread: threading.Thread | None = None
    where: str = ""
    error: str | None = None

    def done(self) -> bool:
        return self.thread is None or not self.thread.is_alive()

    def result(self) -> str:
        if self.thread is not None:
            self.thread.join()
        if self.error is not None:
            raise FullshardError(self.error)
        return self.where


class Checkpointer:
    """Saves a state to one shelf, again and again. Making one is collective, and so are all its verbs.

    At most one save is in flight: the next waits for it. With `overlap`, tensors leave a GPU while the next forward
    and backward run, and the optimizer's step waits for them; who changes weights in another way must not use it.
    """

    def __init__(self, shelf: str | Path, state: State, *, keep: Kept | None = None, overlap: bool = False):
        self.shelf, self.state, self.keep, self.overlap = open_place(shelf), state, keep, overlap
        self.history: list[Candidate] | None = None  # what retention knows, once it has looked
        self.group = take_group()
        self.nodes = find_nodes(self.shelf, self.group)
        self.memory = Memory(pinned=state.device.type == "cuda")
        self.layout: Any = None  # what the plan below was made for
        self.saving: Saving | None = None
        self.copied: torch.cuda.Event | None = None  # when the arena holds what left the GPU
        self.hook = state.optimizer.register_step_pre_hook(self._hold_update) if overlap and state.optimizer else None

    # -- staging ---------------------------------------------------------------------------------------

    def save(
        self,
        *,
        cursor: int | None = None,
        recipe: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
    ) -> Saving:
        """Stage the state as it is now and start to write it."""
        self.wait()
        state = self.state
        with torch.no_grad(), state.values() as values:
            numbers = named.numbers_of(state) | {"extra": extra or {}}
            about = About(state.step, cursor, state.plan.to_dict(), recipe, numbers, metrics or {})
            copied = self._stage(values)
        self.saving = saving = Saving(state.step)
        saving.thread = threading.Thread(target=self._write, args=(saving, about, copied), daemon=True, name="checkpoint")
        saving.thread.start()
        return saving

    def wait(self) -> None:
        """Until no save is in flight; what became of it is in its `Saving`."""
        if self.saving and self.saving.thread:
            self.saving.thread.join()

    def close(self) -> None:
        """Give back what a save holds: the arena above all, which is as large as this rank's part of the state."""
        self.wait()
        if self.hook:
            self.hook.remove()
        if self.layout is not None:
            del self.image, self.planner  # their views would keep the arena's memory
            self.layout = None
        self.memory.close()
        give_group(self.group)

    def _stage(self, values: dict[str, Tensor]) -> torch.cuda.Event | None:
        tensors = named.model_tensors(self.state.model, values) | named.optimizer_tensors(self.state)
        tensors |= named.rng_tensors(self.state, dist.get_rank())
        tensors = dict(sorted(tensors.items()))  # the same state gives the same bytes, whoever made its entries
        layout = [(n, t.shape, t.dtype) for n, t in tensors.items()]
        if layout != self.layout:
            self._plan(tensors)
            self.layout = layout
        self.planner.state_dict = tensors
        sources = [cast(Tensor, self.planner.resolve_data(item)) for item in self.image.items]
        if self.state.device.type != "cuda":
            self.image.fill(sources)
            return None
        return self._copy_from_device(sources)

    def _copy_from_device(self, sources: Sequence[Tensor]) -> torch.cuda.Event:
        """Queue the copies; the event after which the arena holds them."""
        here = torch.cuda.current_stream()
        stream = torch.cuda.Stream() if self.overlap else here
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            self.image.fill(sources)
            copied = torch.cuda.Event()
            copied.record()
        if self.overlap:
            for source in sources:
                if source.is_cuda:
                    source.record_stream(stream)
        self.copied = copied
        return copied

    def _hold_update(self, *_: Any) -> None:
        """The next update, on whatever stream it runs, comes after the copies."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None

    def _plan(self, tensors: dict[str, Tensor]) -> None:
        """Which rank writes what, by DCP's planner: copies are written once, spread over those who hold them."""
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        first = dist.get_rank() == 0
        self.planner.set_up_planner(tensors, None, first)
        plans = together(self.group, lambda: fitting(self.planner.create_local_plan()))
        made, metadata = decide(self.group, lambda: self.planner.create_global_plan(plans))
        if self.nodes.count > 1:  # each disk gets all that its ranks hold
            made = once_a_node(plans, self.nodes)
        self.metadata: Metadata = metadata
        mine = self.nodes.of_rank[dist.get_rank()]
        self.size_here = sum(planned_bytes(p) for p, node in zip(made, self.nodes.of_rank, strict=True) if node == mine)
        self.image = Image(self.planner.finish_plan(made[dist.get_rank()]).items, self.memory)

    # -- writing ---------------------------------------------------------------------------------------

    def _write(self, saving: Saving, about: About, copied: torch.cuda.Event | None) -> None:
        """In the background. Whatever goes wrong becomes the saving's error, the same sentence on all ranks."""
        try:
            if copied is not None:
                copied.synchronize()
            saving.where = self._write_and_commit(about)
            self._retire(about)
        except FullshardError as error:
            saving.error = f"the checkpoint of step {saving.step} was not saved: {error}"
        except Exception as error:  # a rank is gone: training will find out by itself
            saving.error = f"the checkpoint of step {saving.step} was not saved: {type(error).__name__}: {error}"

    def _write_and_commit(self, about: About) -> str:
        nonce, now = decide(self.group, lambda: (commit.new_nonce(), round(time.time(), 3)))
        made = commit.draft(self.shelf, about.step, nonce)
        try:
            with contextlib.ExitStack() as held:
                together(self.group, lambda: self._begin(held, made))
                written = together(self.group, lambda: self._write_file(made))
                self._commit(made, written, about, now)
        except FullshardError:
            if self.nodes.leads:
                attempt(lambda: commit.abandon(made))
            raise
        return str(made.target)

    def _begin(self, held: contextlib.ExitStack, made: commit.Draft) -> None:
        if not self.nodes.leads:
            return
        refuse_full(self.shelf, self.size_here + HEADERS, "its files")
        held.enter_context(commit.begin(made))

    def _write_file(self, made: commit.Draft) -> Written:
        """The checksum is computed while the disk works."""
        name = file_name(dist.get_rank(), dist.get_world_size())
        if not self.image.items:
            return self.image.written(name)
        with ThreadPoolExecutor(1) as disk:
            writing = disk.submit(made.staging.write, name, self.image.memory, self.image.nbytes)
            written = self.image.written(name)
            try:
                writing.result()
            except OSError as error:
                raise FullshardError(f"{made.staging}: {error.strerror or error}") from None
        return written

    def _commit(self, made: commit.Draft, written: list[Written], about: About, now: float) -> None:
        """With disks of their own, nodes have manifests of their own: each prefers the copies that it has."""
        mine = self.nodes.of_rank[dist.get_rank()]
        nodes = [None if self.nodes.count == 1 else node for node in self.nodes.of_rank]
        manifest = lambda: make_manifest(self.metadata, written, about, now, nodes, mine)
        together(self.group, lambda: _commit_file(made, manifest()) if self.nodes.leads else None)

    def _retire(self, about: About) -> None:
        """Remove the checkpoints that need not stay; each node's first rank its own."""
        if not (self.keep and self.keep.last and self.nodes.leads):
            return
        if self.history is None:
            known = [attempt(partial(commit.read_manifest, self.shelf.child(name))) for name in self.names()]
            self.history = [Candidate.of(m) for worked, m in known if worked and m.step != about.step]
        self.history.append(Candidate(about.step, time.time(), about.metrics))
        gone = to_remove(self.history, self.keep)
        for name in gone:
            attempt(partial(commit.remove, self.shelf, name))
        self.history = [c for c in self.history if commit.checkpoint_name(c.step) not in gone]

    # -- the shelf -------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Remove what killed runs left on the shelf."""
        together(self.group, lambda: commit.sweep(self.shelf) if self.nodes.leads else None)

    def names(self) -> list[str]:
        """The checkpoints that this rank sees."""
        return commit.committed(self.shelf)

    def refuse_small(self, count: int) -> None:
        """Raise where the shelf has no room for `count` checkpoints, those that are there included."""
        size = named.needed_bytes(self.state) // self.nodes.count + HEADERS
        missing = max(0, count - len(self.names())) * size
        what = f"{count} checkpoints of {bytes_text(size)}"
        together(self.group, lambda: refuse_full(self.shelf, missing, what) if self.nodes.leads else None)

    def newest(self) -> tuple[Place | None, list[str]]:
        """The newest checkpoint that is whole, and sentences about those that are not."""
        everywhere = gather(self.group, commit.committed(self.shelf) if self.nodes.leads else None)
        names = [n for n in everywhere[0] if all(n in found for found in everywhere if found is not None)]
        said: list[str] = []
        for name in reversed(names):
            wrong = damage(self.shelf.child(name), self.group, self.nodes)
            if not wrong:
                return self.shelf.child(name), said
            said.append(wrong[0])
        return None, said


def _commit_file(made: commit.Draft, manifest: Manifest) -> None:
    try:
        commit.commit(made, manifest)
    except OSError as error:
        raise FullshardError(f"{made.target}: {error.strerror or error}") from None


def refuse_full(shelf: Place, needed: int, what: str) -> None:
    free = shelf.free()
    if free is not None and free < needed:
        raise FullshardError(
            f"{shelf} has {bytes_text(free)} free, but {what} take {bytes_text(needed)}; make room, or keep fewer"
        )


# -- loading ------------------------------------------------------------------------------------------------


def load_checkpoint(
    where: str | Path | Place, state: State, *, allow_missing: Sequence[str] = (), verified: bool = False
) -> Manifest:
    """Fill the state, in place, from a checkpoint of any plan; what the manifest says. Collective.

    `verified`: the caller has compared the checksums already.
    """
    group = take_group()
    try:
        return _load(group, where, state, allow_missing, verified)
    finally:
        give_group(group)


def _load(
    group: dist.ProcessGroup, where: str | Path | Place, state: State, allow_missing: Sequence[str], verified: bool
) -> Manifest:
    place = where if isinstance(where, Place) else find_everywhere(where, group)
    if not verified:
        nodes = find_nodes_read(place, group)
        if wrong := damage(place, group, nodes):
            raise FullshardError(f"{wrong[0]}; use another checkpoint")
    return together(group, lambda: _fill(Checkpoint(place), state, allow_missing))[dist.get_rank()]


def find_everywhere(where: str | Path, group: dist.ProcessGroup) -> Place:
    """The checkpoint that is meant, which every rank must see: nodes with disks of their own may differ in the newest."""
    place = open_place(where)
    if all(gather(group, commit.is_checkpoint(place))):
        return place
    shelf = commit.find_shelf(where)
    seen = gather(group, commit.committed(shelf))
    common = [n for n in seen[0] if all(n in names for names in seen)]
    if not common:
        raise FullshardError(f"{where} is no checkpoint, and no directory of checkpoints")
    return shelf.child(common[-1])


def damage(place: Place, group: dist.ProcessGroup, nodes: Nodes) -> list[str]:
    """What is wrong with a checkpoint, found by all ranks together: each reads its share of the files it sees."""
    rank = dist.get_rank()
    beside = [r for r, node in enumerate(nodes.of_rank) if node == nodes.of_rank[rank]]
    worked, found = attempt(lambda: verify.problems(place, share=(beside.index(rank), len(beside))))
    return [p for wrong in gather(group, found if worked else [found]) for p in wrong]


def _fill(checkpoint: Checkpoint, state: State, allow_missing: Sequence[str]) -> Manifest:
    manifest, saved = checkpoint.manifest, checkpoint.manifest.state
    named.refuse_odd_numbers(saved)
    tensors = {n: t for n, t in manifest.tensors.items() if not n.startswith("rng.")}
    with state.values(changed=True) as values:
        _fill_tensors(checkpoint, state, values, tensors, allow_missing)
    state.step, state.checks = manifest.step, True
    if state.loss_scale and saved.get("loss_scale"):
        state.loss_scale.value, state.loss_scale.quiet = saved["loss_scale"]["value"], saved["loss_scale"]["quiet"]
    _restore_rng(checkpoint, state)
    free_gathered(state.model)  # units that a forward left whole would keep the old values
    return manifest


def _fill_tensors(
    checkpoint: Checkpoint,
    state: State,
    values: dict[str, Tensor],
    tensors: dict[str, TensorRecord],
    allow_missing: Sequence[str],
) -> None:
    saved = checkpoint.manifest.state
    own = named.model_tensors(state.model, values)
    wanted = named.described(own)
    wanted |= {n: (tuple(s), WORD[d]) for n, (s, d) in named.wanted_slots(state, saved.get("without_slots", [])).items()}
    if state.optimizer is None:  # to evaluate or export, the weights are enough
        tensors = {n: t for n, t in tensors.items() if not n.startswith("optimizer.")}
    refuse_others(str(checkpoint.place), tensors, wanted, allow_missing)
    made = named.make_slots(state, tensors)
    own |= {f"optimizer.{name}.{key}": t for name, keys in made.items() for key, t in keys.items()}
    with torch.no_grad():
        _read(checkpoint, {n: t for n, t in own.items() if n in tensors})
    named.set_slots(state, made, saved.get("slots", {}))


def _read(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = Reader(checkpoint)
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, False)
    reader.set_up_storage_reader(metadata, False)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def _restore_rng(checkpoint: Checkpoint, state: State) -> None:
    """Each rank's generators as they were. At another number of ranks there are no such; then they are seeded anew
    from the step and the rank, the same way at every resume."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if checkpoint.manifest.state.get("world") != world:
        torch.manual_seed(checkpoint.manifest.step * 1_000_003 + rank)
        return
    for name, tensor in named.rng_tensors(state, rank).items():
        if name in checkpoint.manifest.tensors:
            saved = torch.frombuffer(checkpoint.raw(name), dtype=torch.uint8)
            if name.endswith(".cpu"):
                torch.set_rng_state(saved)
            elif saved.numel() == tensor.numel():
                torch.cuda.set_rng_state(saved, state.device)


def save_checkpoint(shelf: str | Path, state: State, **about: Any) -> str:
    """One checkpoint, whole and durable when this returns; where it lies. Collective."""
    checkpointer = Checkpointer(shelf, state)
    try:
        return checkpointer.save(**about).result()
    finally:
        checkpointer.close()
