"""Loads a checkpoint of any plan into a sharded state. Every rank reads its own parts.

The state changes only after the checkpoint's tensors match the state's and, unless the caller can fill it again, after every
byte is verified.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.directories import Place
from fullshard.checkpoint.manifest import Manifest, TensorRecord
from fullshard.checkpoint.reader import Checkpoint, refuse_mismatch
from fullshard.checkpoint.restoring import restorable, restore
from fullshard.checkpoint.verified_load import Verify
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.ranks.rank_agreement import GroupAgreement
from fullshard.on_torch.saving import state_tensors
from fullshard.on_torch.step.dropout_seed import seed_dropout
from fullshard.on_torch.tensors.dtypes import SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from fullshard.on_torch.tensors.shard_ranges import local_tensor, shadow


def load_checkpoint(
    where: str | Path | Place, state: State, *, allow_missing: Sequence[str] = (), verify: Verify = "first"
) -> Manifest:
    """Fill the state in place from a checkpoint of any plan; return its manifest. Collective. `verify`: see `fill_from`."""
    return restore(where, GroupAgreement(), lambda found: _fill(found, state, allow_missing), verify)


def _fill(checkpoint: Checkpoint, state: State, allow_missing: Sequence[str]) -> None:
    manifest, saved = checkpoint.manifest, checkpoint.manifest.state
    tensors = restorable(manifest, optimizer=state.optimizer is not None)
    with state.values(changed=True) as values:
        _fill_tensors(checkpoint, state, values, tensors, allow_missing)
    state.step, state.checks, state.drawn, state.copies.torn = manifest.step, True, {}, ""
    if state.offload:
        state.offload.finished.eager = None
    if state.loss_scale and saved.get("loss_scale"):
        state.loss_scale.value, state.loss_scale.quiet = saved["loss_scale"]["value"], saved["loss_scale"]["quiet"]
    _restore_rng(checkpoint, state)


def _fill_tensors(
    checkpoint: Checkpoint,
    state: State,
    values: dict[str, Tensor],
    tensors: dict[str, TensorRecord],
    allow_missing: Sequence[str],
) -> None:
    saved = checkpoint.manifest.state
    targets = state_tensors.model_tensors(state.model, values)
    expected = state_tensors.shapes_and_dtypes(targets)
    slots = state_tensors.expected_slots(state, saved.get("without_slots", []))
    expected |= {n: (tuple(shape), _slot_dtype(dtype, tensors.get(n))) for n, (shape, dtype) in slots.items()}
    refuse_mismatch(str(checkpoint.place), tensors, expected, allow_missing)
    new_slots = state_tensors.make_slots(state, tensors, slots)
    coded = state_tensors.coded_moments(state)
    direct = {(name, key): t for name, keys in new_slots.items() for key, t in keys.items() if (name, key) not in coded}
    targets |= {f"optimizer.{name}.{key}": t for (name, key), t in direct.items()}
    with torch.no_grad():
        _read(checkpoint, {n: t for n, t in targets.items() if n in tensors})
        for name, key in coded:
            if key in new_slots.get(name, {}):
                new_slots[name][key] = _read_coded(checkpoint, state, name, key)
    state_tensors.set_slots(state, new_slots, saved.get("slots", {}))


def _slot_dtype(dtype: torch.dtype, saved: TensorRecord | None) -> str:
    """The dtype that a slot must have in a checkpoint: that of the state, or another of floats, which is converted."""
    floats = ("F32", "BF16")
    own = SAFETENSORS_NAMES[dtype]
    return saved.dtype if saved is not None and saved.dtype in floats and own in floats else own


def _read_coded(checkpoint: Checkpoint, state: State, name: str, key: str) -> Tensor:
    """A moment that is stored as bytes, from the checkpoint's values."""
    optimizer, p = state_tensors.coded_optimizer(state), state.model.get_parameter(name)
    assert optimizer is not None
    values = shadow(p, torch.zeros(local_tensor(p).shape, dtype=optimizer.moments.saved))
    _read(checkpoint, {f"optimizer.{name}.{key}": values})
    return optimizer.stored(p, key, values)


def _read(checkpoint: Checkpoint, targets: dict[str, Tensor]) -> None:
    """Fill this rank's parts of the tensors, in the files' order. DCP's planner decides which ranges they need."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    wanted = {n: t for n, t in checkpoint.manifest.tensors.items() if n in targets}
    planner.set_up_planner(targets, _dcp_metadata(wanted), False)
    chunks = {MetadataIndex(n, c.start): (t, c) for n, t in wanted.items() for c in t.chunks}
    at = lambda item: (chunks[item.storage_index][1].file, chunks[item.storage_index][1].offset)
    for item in sorted(planner.finish_plan(planner.create_local_plan()).items, key=at):
        record, chunk = chunks[item.storage_index]
        first = [s + o for s, o in zip(chunk.start, item.storage_offsets, strict=True)]
        box = [(a, a + n) for a, n in zip(first, item.lengths, strict=True)]
        part = torch.empty(tuple(item.lengths), dtype=SAFETENSORS_DTYPES[record.dtype])
        checkpoint.read_chunk(chunk, box, record.item_bytes, part.reshape(-1).view(torch.uint8).numpy().data)
        target = planner.resolve_tensor(item)
        target.detach().copy_(part)
        planner.commit_tensor(item, target)


def _dcp_metadata(tensors: Mapping[str, TensorRecord]) -> Metadata:
    """The manifest's tensors as DCP's load planner expects them."""
    found: dict[str, Any] = {}
    for name, record in tensors.items():
        if record.dtype not in SAFETENSORS_DTYPES:
            raise FullshardError(f"{name} is {record.dtype}, which torch has no dtype for")
        chunks = [ChunkStorageMetadata(torch.Size(c.start), torch.Size(c.shape)) for c in record.chunks]
        properties = TensorProperties(dtype=SAFETENSORS_DTYPES[record.dtype])
        found[name] = TensorStorageMetadata(properties, torch.Size(record.shape), chunks)
    return Metadata(found)


def _restore_rng(checkpoint: Checkpoint, state: State) -> None:
    """Restore each rank's generators. Where ranks have other batches than those that saved, or another engine has saved, seed
    them anew instead."""
    if not _same_data_ranks(checkpoint.manifest, state):
        seed_dropout(state, state.dropout_seed)
        return
    rank = dist.get_rank()
    for name, tensor in state_tensors.rng_tensors(state, rank).items():
        if name in checkpoint.manifest.tensors:
            saved = torch.frombuffer(checkpoint.raw(name), dtype=torch.uint8)
            if name.endswith(".cpu"):
                torch.set_rng_state(saved)
            elif saved.numel() == tensor.numel():
                torch.cuda.set_rng_state(saved, state.device)


def _same_data_ranks(manifest: Manifest, state: State) -> bool:
    """True if the checkpoint was saved by as many ranks of torch, in tensor groups of the same size."""
    if manifest.state.get("engine", state.engine) != state.engine:
        return False
    mesh = (manifest.plan or {}).get("mesh")
    tensor = mesh.get("tensor", 1) if isinstance(mesh, dict) else 1
    return manifest.state.get("world") == dist.get_world_size() and tensor == state.plan.mesh.tensor
