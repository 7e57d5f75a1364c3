"""First-step checks: mistakes that would otherwise train silently wrong.

Each check raises the same sentence on every rank. They run in the first step only, so they may synchronise with the
device and with the other ranks.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fullshard.base.text import first_of
from fullshard.on_torch.loss.batch_checks import first_batch_fault
from fullshard.on_torch.loss.chunked_loss import chunked_loss
from fullshard.on_torch.loss.losses import LossFunction, TensorBatch, as_loss, summed_loss
from fullshard.on_torch.loss.objective_losses import CAUSAL_LOSSES
from fullshard.on_torch.model.changing_buffers import STATISTICS
from fullshard.on_torch.model.initialize import names_with_nan
from fullshard.on_torch.offload.updates.gradient_norms import received_norms
from fullshard.on_torch.parallelize.inference import inference
from fullshard.on_torch.parallelize.start_checks import (
    CheckError,
    checksum_of,
    of_all_ranks,
    refuse_anywhere,
    refuse_unset_anywhere,
)
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.step.unit_order import same_units
from fullshard.on_torch.tensors.batch_tree import leaves, row_count, rows
from fullshard.on_torch.tensors.shard_ranges import local_tensor
from fullshard.plan.plan import Unit


def before_first_step(state: State, batches: list[Any], loss: LossFunction) -> None:
    """Run all checks that need no gradient."""
    state.copies.rest()
    refuse_anywhere(first_batch_fault(state.model, batches, loss))
    check_sharding(state)
    with state.values() as values:
        refuse_unset_anywhere(names_with_nan({**values, **dict(state.model.named_buffers())}))
        check_copies_agree(state, values)
        check_frozen_loaded(state, values)
    check_optimizer_references(state)
    check_data(state, batches)
    check_loss_is_a_sum(state, batches, loss)
    if loss is chunked_loss:
        check_chunked(state, batches[0])


def check_sharding(state: State) -> None:
    """Check that every parameter is on the mesh of its unit, sharded as the plan says."""
    for unit, name, p in _unit_parameters(state):
        want = state.meshes.data(unit.layout)
        if not isinstance(p, DTensor):
            raise CheckError(
                f"unit {unit.name}: parameter {name} is not sharded: it was replaced after shard(); load values in place instead"
            )
        cut = {i for i, placement in enumerate(p.placements) if not isinstance(placement, Replicate)}
        names = p.device_mesh.mesh_dim_names or ()
        shape = {n: p.device_mesh.size(i) for i, n in enumerate(names) if n not in ("tensor", "expert")}
        wanted = {n: want.size(i) for i, n in enumerate(want.mesh_dim_names or ())}
        if shape != wanted or (names.index("shard") not in cut):
            raise CheckError(
                f"unit {unit.name}: parameter {name} lies on {shape}, but the plan puts it on {wanted}; call shard() again"
            )


def check_copies_agree(state: State, values: dict[str, Tensor]) -> None:
    """Check that buffers and replicated parameters are equal on all ranks."""
    tensors: dict[str, Tensor] = dict(state.model.named_buffers())
    if state.copies.forwards:  # of batches of each rank's own
        tensors = {n: t for n, t in tensors.items() if n.rpartition(".")[2] not in STATISTICS}
    tensors |= {n: p for n, p in values.items() if isinstance(p, DTensor) and _is_replicated(p)}
    digests = of_all_ranks({n: checksum_of(t) for n, t in tensors.items()})
    for name in tensors:
        if any(d[name] != digests[0][name] for d in digests):
            raise CheckError(f"{name} differs between ranks; initialise it from a seed, not from each rank's own random state")


def _is_replicated(p: DTensor) -> bool:
    return all(isinstance(placement, Replicate) or p.device_mesh.size(i) == 1 for i, placement in enumerate(p.placements))


def check_frozen_loaded(state: State, values: dict[str, Tensor]) -> None:
    """Check that frozen parameters are not left at random values."""
    drawn, state.drawn = state.drawn, {}
    if drawn and not any(of_all_ranks(any(checksum_of(values[n]) != checksum for n, checksum in drawn.items()))):
        raise CheckError(
            f"{first_of(list(drawn))} is frozen at random values, and the rest is trained on top of them: load "
            "the base model (shard(..., weights=DIRECTORY), or model.weights in a recipe), or pass first_step_checks=False if "
            "that is meant"
        )


def check_labels(tokens: Tensor) -> None:
    """Check that the step has at least one label."""
    if not bool(tokens):
        raise CheckError("no token of the first step has a label (all labels are -100); mark the tokens that count in `labels`")


def check_optimizer_references(state: State) -> None:
    """Check that the optimizer has exactly the parameters that the model trains."""
    assert state.optimizer is not None
    state.refuse_untrained()
    given = {id(p) for group in state.optimizer.param_groups for p in group["params"]}
    trained = {id(p) for p in state.model.parameters() if p.requires_grad}
    if len(given) > len(trained):
        raise CheckError(
            f"the optimizer holds {len(given) - len(trained)} parameters the model does not train; build it from this model"
        )


def check_data(state: State, batches: list[Any]) -> None:
    """Check that data ranks have different batches, and the ranks of a tensor group the same."""
    digests = of_all_ranks([_digest(b) for b in batches])
    tensor = state.plan.mesh.tensor
    first_seen: dict[str, int] = {}
    for rank, found in enumerate(digests):
        group = rank // tensor
        if found != digests[group * tensor]:
            raise CheckError(
                f"ranks {group * tensor} and {rank} share a tensor group but see different data; feed both data rank {group}'s"
            )
        for digest in found if rank % tensor == 0 else []:
            other = first_seen.setdefault(digest, rank)
            if other != rank:
                raise CheckError(
                    f"ranks {other} and {rank} see the same first batch, so that one of them trains for nothing; "
                    "shard the data by rank, or pass shard(..., first_step_checks=False) if that is meant"
                )


def check_loss_is_a_sum(state: State, batches: list[Any], loss: LossFunction) -> None:
    """Check that sum and count of a batch are those of its halves together. A mean would be divided by the count twice."""
    size = row_count(batches[0])
    alone = loss in CAUSAL_LOSSES or any(s is None or s < 2 for s in of_all_ranks(size))
    if alone or size is None:
        return
    parts = [batches[0], rows(batches[0], slice(0, size // 2)), rows(batches[0], slice(size // 2, size))]
    with inference(state.model), same_units(state):
        found = [as_loss(loss(state.model, b), b, state.device) for b in parts]
    (whole, first, second), counts = [float(f.sum) for f in found], [float(f.count) for f in found]
    refuse_anywhere(None if found[0].across_rows else _not_a_sum(whole, first, second) or _not_a_count(*counts))


def _not_a_sum(whole: float, first: float, second: float) -> str | None:
    if abs(first + second - whole) <= 0.05 * abs(whole) + 1e-6:
        return None
    return (
        f"the loss of a batch ({whole:.4g}) is not the sum of the losses of its halves ({first:.4g} + {second:.4g}): "
        "return a sum over tokens or rows, not a mean; the step divides by the global count itself (if rows depend on each "
        "other, as in a contrastive loss, return Loss(..., across_rows=True))"
    )


def _not_a_count(whole: float, first: float, second: float) -> str | None:
    if abs(first + second - whole) <= 1e-6 * abs(whole):
        return None
    return (
        f"the count of a batch ({whole:g}) is not the sum of the counts of its halves ({first:g} + {second:g}): count what the "
        "loss sums over, such as its rows"
    )


def check_chunked(state: State, batch: TensorBatch) -> None:
    """Check that the model returns the head's output unchanged, without capping or scaling the logits."""
    row = {k: v[:1] for k, v in batch.items()}
    with inference(state.model), same_units(state):
        plain, chunked = float(summed_loss(state.model, row)), float(chunked_loss(state.model, row))
    if any(of_all_ranks(abs(plain - chunked) > 0.02 * abs(plain) + 1e-6)):
        raise CheckError(
            f"the chunked loss of a row ({chunked:.4g}) is not its plain loss ({plain:.4g}): "
            "the model changes the logits after its head; use summed_loss"
        )


def after_first_backward(state: State, count: Tensor, metrics: list[str]) -> None:
    """Check that something counted, that ranks have the same metrics, and that every trained unit received a gradient."""
    if not bool(count > 0):
        raise CheckError(
            f"the loss function counted {float(count):g} in the first step; return Loss(sum, count) with the number of rows or "
            "tokens that the sum is over"
        )
    if any(names != metrics for names in of_all_ranks(metrics)):
        raise CheckError("the loss function returns other metrics on other ranks; return the same names on every rank")
    totals: dict[str, float] = {}
    for unit, _, p in _unit_parameters(state):
        if p.requires_grad:
            received = 0.0 if p.grad is None else float(local_tensor(p.grad).abs().sum())
            totals[unit.name] = totals.get(unit.name, 0.0) + received
    for name, norms in received_norms(state.offload.units).items() if state.offload else ():
        totals[name] = totals.get(name, 0.0) + float(torch.stack(norms).sum())
    gathered = of_all_ranks(totals)
    for name in totals:
        if not any(t[name] for t in gathered):  # NaN counts as a gradient: the step itself skips on it
            raise CheckError(
                f"unit {name} received no gradient: its parameters are not part of the loss, or forward detaches them; "
                "freeze them (requires_grad_(False)) if that is meant"
            )


def fingerprints(state: State) -> dict[str, int]:
    """A checksum of each unit's trained parameters on this rank."""
    sums: dict[str, int] = {}
    with state.values() as values:
        for unit, name, p in _unit_parameters(state):
            if p.requires_grad:
                sums[unit.name] = sums.get(unit.name, 0) + checksum_of(values[name])
    return sums


def after_first_update(state: State, before: dict[str, int]) -> None:
    """Check that the optimizer's step changed every trained unit."""
    assert state.optimizer is not None
    if all(group["lr"] == 0 for group in state.optimizer.param_groups):
        return  # warm-up may start at 0
    after = fingerprints(state)
    changed = of_all_ranks({unit: after[unit] != before[unit] for unit in before})
    for unit in before:
        if not any(c[unit] for c in changed):
            raise CheckError(
                f"unit {unit} did not change in the first optimizer step: the optimizer updates other tensors than the "
                "model computes with (build it after shard()), or the learning rate is too small for the master dtype"
            )


def _unit_parameters(state: State) -> list[tuple[Unit, str, nn.Parameter]]:
    """(unit, name, parameter) for every parameter of the model."""
    found = []
    for name, p in state.model.named_parameters():
        unit = state.plan.unit_of(name)
        assert unit is not None, name
        found.append((unit, name, p))
    return found


def _digest(batch: Any) -> str:
    """Of the values of all tensors of a batch."""
    found = hashlib.blake2b(digest_size=12)
    for path, tensor in leaves(batch):
        found.update(f"{path} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
