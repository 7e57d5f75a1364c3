"""Runs inside the ranks: states saved and loaded."""

import hashlib

import torch
import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch
from fullshard.on_torch.named import model_tensors, optimizer_tensors
from tests.cpu import parity


def make_state(strategy: str = "zero3", kind: str = "plain", seed: int = 3, optimizer=None, **choices):
    model = parity.build(kind)
    description = on_torch.describe(model)
    world = dist.get_world_size()
    if strategy == "hybrid":
        choices |= {"replicate": 2, "shard": world // 2 // choices.get("tensor", 1)}
    else:
        choices |= {"devices": world}
    plan = fs.strategy(strategy, description, batch=fs.Batch(2, parity.LENGTH), **choices)
    return on_torch.shard(model, plan, optimizer or fs.AdamW(lr=1e-2), seed=seed)


def batch(state, step: int) -> dict[str, torch.Tensor]:
    """The same rows of each step at every world size are not needed here: only values that move."""
    rank = on_torch.data_rank(state.plan.mesh)
    ids = torch.randint(0, parity.VOCAB, (2, parity.LENGTH + 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def train(state, steps: int) -> list[float]:
    return [on_torch.train_step(state, [batch(state, state.step)], clip=1.0).loss.item() for _ in range(steps)]


def digests(state) -> dict[str, str]:
    """Every tensor whole, as bytes."""
    found = {}
    for name, tensor in (model_tensors(state.model) | optimizer_tensors(state)).items():
        whole = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
        found[name] = hashlib.sha256(whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def save(shelf: str, strategy: str, kind: str = "plain", steps: int = 2, optimizer=None, **choices) -> dict:
    state = make_state(strategy, kind, optimizer=optimizer, **choices)
    train(state, steps)
    where = fs.checkpoint.save(shelf, state, cursor=24, extra={"note": "ä"})
    return {"where": where, "digests": digests(state), "next": train(state, 2)}


def load(shelf: str, strategy: str, kind: str = "plain", optimizer=None, **choices) -> dict:
    state = make_state(strategy, kind, seed=99, optimizer=optimizer, **choices)
    manifest = fs.checkpoint.load(shelf, state)
    return {
        "step": state.step,
        "cursor": manifest.cursor,
        "note": manifest.state["extra"]["note"],
        "digests": digests(state),
        "next": train(state, 2),
    }


def refusal(shelf: str, kind: str = "plain", optimizer=None, **options) -> str:
    try:
        fs.checkpoint.load(shelf, make_state("zero3", kind, optimizer=optimizer), **options)
    except fs.FullshardError as error:
        return str(error)
    return "accepted"


def from_hugging_face(directory: str, shelf: str, lora: bool = False, steps: int = 0) -> None:
    """Load published weights and save them as a checkpoint, as a run would."""
    model = on_torch.load_model(directory)
    recipe: dict = {"model": {"name": directory}}
    if lora:
        recipe["lora"] = {"rank": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}
        model = on_torch.add_adapters(model, **recipe["lora"])
    plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), batch=fs.Batch(2, parity.LENGTH))
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-2), weights=directory)
    train(state, steps)
    fs.checkpoint.save(shelf, state, recipe=recipe)


def save_others(directory: str) -> dict:
    """The same weights as torch's own tools write them: DCP, and one `.pt` file a rank."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

    state = make_state("zero3")
    train(state, 1)
    model, optimizer = get_state_dict(state.model, state.optimizer)
    dcp.save({"model": model, "optimizer": optimizer, "step": 1}, checkpoint_id=f"{directory}/dcp")
    dcp.save(model, checkpoint_id=f"{directory}/bare")
    torch.save(get_model_state_dict(state.model), f"{directory}/model_rank_{dist.get_rank()}.pt")
    return {n: p.detach().full_tensor() for n, p in state.model.named_parameters()}


def load_imported(shelf: str) -> dict:
    state = make_state("zero3", seed=99)
    fs.checkpoint.load(shelf, state)
    train_after = {n: p.detach().full_tensor().clone() for n, p in state.model.named_parameters()}
    train(state, 1)
    return train_after


def through_dcp(shelf: str) -> bool:
    """DCP's own save and load, with our storage below."""
    import torch.distributed.checkpoint as dcp

    from fullshard.on_torch.storage import About, Reader, Writer

    saved = {n: p.detach() for n, p in make_state("zero3", seed=1).model.named_parameters()}
    dcp.save(saved, storage_writer=Writer(shelf, About(step=5)))
    other = {n: p.detach() for n, p in make_state("ddp", seed=2).model.named_parameters()}
    dcp.load(other, storage_reader=Reader(shelf))
    return all(torch.equal(saved[n].full_tensor(), other[n].full_tensor()) for n in saved)
