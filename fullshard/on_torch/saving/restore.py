"""A sharded state filled from a checkpoint of any plan: every rank reads its own part, and all agree on the end.

Nothing of the state changes before the checkpoint is verified and its tensors are found to be the ones that are wanted.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner

from fullshard.checkpoint import commit, verify
from fullshard.checkpoint.manifest import Manifest, TensorRecord
from fullshard.checkpoint.place import Place, open_place
from fullshard.checkpoint.reader import Checkpoint, refuse_others
from fullshard.errors import FullshardError
from fullshard.on_torch.agree import acquire_group, attempt, gather, gather_results, release_group
from fullshard.on_torch.dtypes import SAFETENSORS_NAMES
from fullshard.on_torch.inference import free_gathered
from fullshard.on_torch.saving import state_tensors
from fullshard.on_torch.saving.dcp_storage import Reader
from fullshard.on_torch.saving.nodes import Nodes, find_nodes_read
from fullshard.on_torch.state import State


def load_checkpoint(
    where: str | Path | Place, state: State, *, allow_missing: Sequence[str] = (), verified: bool = False
) -> Manifest:
    """Fill the state, in place, from a checkpoint of any plan; what the manifest says. Collective.

    `verified`: the caller has compared the checksums already.
    """
    group = acquire_group()
    try:
        return _load(group, where, state, allow_missing, verified)
    finally:
        release_group(group)


def _load(
    group: dist.ProcessGroup, where: str | Path | Place, state: State, allow_missing: Sequence[str], verified: bool
) -> Manifest:
    place = where if isinstance(where, Place) else find_everywhere(where, group)
    if not verified:
        nodes = find_nodes_read(place, group)
        if wrong := damage(place, group, nodes):
            raise FullshardError(f"{wrong[0]}; use another checkpoint")
    return gather_results(group, lambda: _fill(Checkpoint(place), state, allow_missing))[dist.get_rank()]


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
    state_tensors.refuse_odd_numbers(saved)
    tensors = {n: t for n, t in manifest.tensors.items() if not n.startswith("rng.")}
    with state.values(changed=True) as values:
        _fill_tensors(checkpoint, state, values, tensors, allow_missing)
    state.step, state.checks, state.drawn = manifest.step, True, {}
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
    own = state_tensors.model_tensors(state.model, values)
    wanted = state_tensors.described(own)
    wanted |= {
        n: (tuple(s), SAFETENSORS_NAMES[d])
        for n, (s, d) in state_tensors.wanted_slots(state, saved.get("without_slots", [])).items()
    }
    if state.optimizer is None:  # to evaluate or export, the weights are enough
        tensors = {n: t for n, t in tensors.items() if not n.startswith("optimizer.")}
    refuse_others(str(checkpoint.place), tensors, wanted, allow_missing)
    made = state_tensors.make_slots(state, tensors)
    own |= {f"optimizer.{name}.{key}": t for name, keys in made.items() for key, t in keys.items()}
    with torch.no_grad():
        _read(checkpoint, {n: t for n, t in own.items() if n in tensors})
    state_tensors.set_slots(state, made, saved.get("slots", {}))


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
    for name, tensor in state_tensors.rng_tensors(state, rank).items():
        if name in checkpoint.manifest.tensors:
            saved = torch.frombuffer(checkpoint.raw(name), dtype=torch.uint8)
            if name.endswith(".cpu"):
                torch.set_rng_state(saved)
            elif saved.numel() == tensor.numel():
                torch.cuda.set_rng_state(saved, state.device)
