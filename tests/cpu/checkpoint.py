"""Runs inside the ranks: states saved and loaded."""

import contextlib
import dataclasses
import hashlib
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch
from fullshard.checkpoint import commit, lease
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.checkpoint.place import Local
from fullshard.checkpoint.retention import Kept
from fullshard.model.presets import GPTSize
from fullshard.on_torch.agree import acquire_group, gather_integers, gather_then_finish, release_group
from fullshard.on_torch.models import GPT
from fullshard.on_torch.saving.save import Checkpointer
from fullshard.on_torch.saving.state_tensors import model_tensors, needed_bytes, optimizer_tensors
from tests.cpu import parity
from tests.pure import test_checkpoint as pure


def make_state(strategy: str = "zero3", kind: str = "plain", seed: int = 3, optimizer=None, **choices):
    model = parity.build(kind)
    description = on_torch.describe(model)
    world = dist.get_world_size()
    if strategy == "hybrid":
        choices |= {"replicate": 2, "shard": world // 2 // choices.get("tensor", 1)}
    else:
        choices |= {"devices": world}
    plan = fs.strategy(strategy, description, batch=fs.Batch(2, parity.LENGTH), **choices)
    return on_torch.shard(model, plan, optimizer or fs.AdamW(lr=1e-2), seed=seed, first_step_checks=parity.checked(model))


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
    return said_to_load(shelf, make_state("zero3", kind, optimizer=optimizer), **options)


def load_flipped(shelf: str) -> list[tuple[str, int, str]]:
    """What a load says to each flipped byte; the state stays as it was."""
    state = make_state("zero3", seed=5)
    before, found = digests(state), []
    where = Path(str(commit.find(shelf)))
    draw = random.Random(0)
    for file in sorted(where.iterdir()):
        whole = file.read_bytes()
        dist.barrier()
        end = len(whole) - 1
        edges = {0, 1, 7, 8, 9, 4095, 4096, 4097, end // 2, end - 4096, end - 1, end}
        for offset in sorted(o for o in edges | {draw.randrange(end) for _ in range(100)} if 0 <= o <= end):
            flipped = bytes([whole[offset] ^ (1 << draw.randrange(8))])
            _alone(partial(file.write_bytes, whole[:offset] + flipped + whole[offset + 1 :]))
            found.append((file.name, offset, said_to_load(shelf, state)))
        _alone(partial(file.write_bytes, whole))
    assert digests(state) == before
    assert said_to_load(shelf, state) == "accepted"
    assert digests(state) != before
    return found


FORGED: dict[str, dict] = {
    "slots": {"slots": 5},
    "slot": {"slots": {"model.norm.weight": {"step": [1]}}},
    "without": {"without_slots": [1]},
    "scale": {"loss_scale": {"value": "x"}},
}  # of a manifest's `state`, sealed with a right checksum


def load_damaged(shelf: str) -> dict[str, str]:
    """What a load says to files that are cut, swapped, missing …, and to manifests that somebody crafted."""
    state, found = make_state("zero3", seed=5), {}
    before = digests(state)
    whole, place = Path(str(commit.find(shelf))), Local(Path(shelf, "other/step-00000002"))

    def forge(change: Callable[[dict], dict]) -> None:
        (place.path / MANIFEST).write_bytes(pure.sealed(change(pure.tree_of(place))))

    def state_of(values: dict) -> Callable[[dict], dict]:
        return lambda tree: tree | {"state": tree["state"] | values}

    cases: dict[str, Callable] = {f"damage {kind}": partial(pure.damage, place, kind) for kind in pure.DAMAGES}
    cases |= {f"crafted {kind}": partial(forge, partial(pure.crafted, kind=kind)) for kind in pure.CRAFTED}
    cases |= {f"forged {kind}": partial(forge, state_of(values)) for kind, values in FORGED.items()}
    for kind, change in cases.items():
        _alone(lambda change=change: (shutil.rmtree(place.path.parent, True), shutil.copytree(whole, place.path), change()))
        found[kind] = said_to_load(str(place), state)
        assert digests(state) == before, kind
    return found | {"whole": said_to_load(str(whole), state)}


def _alone(act: Callable[[], object]) -> None:
    """The first rank does it, while no other reads."""
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def said_to_load(shelf: str, state, **options) -> str:
    try:
        fs.checkpoint.load(shelf, state, **options)
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

    from fullshard.on_torch.saving.dcp_storage import About, Reader, Writer

    saved = {n: p.detach() for n, p in make_state("zero3", seed=1).model.named_parameters()}
    dcp.save(saved, storage_writer=Writer(shelf, About(step=5)))
    other = {n: p.detach() for n, p in make_state("ddp", seed=2).model.named_parameters()}
    dcp.load(other, storage_reader=Reader(shelf))
    return all(torch.equal(saved[n].full_tensor(), other[n].full_tensor()) for n in saved)


def one_at_a_time(shelf: str) -> bool:
    """Whether a second save waits for the first."""
    state = make_state()
    train(state, 1)
    writer = Checkpointer(shelf, state)
    first = writer.save()
    second = writer.save()
    done = first.done()
    second.result()
    writer.close()
    return done


def saved_under_training(shelf: str) -> list[bool]:
    """Saves beside training, of values that the next step overwrites: whether each holds those of its moment. Before the
    second the optimizer's tensors are others, before the third one of them lies elsewhere."""
    state = make_state()
    train(state, 2)
    writer = Checkpointer(shelf, state, overlap=True)
    found = []
    for change in (lambda: None, lambda: fs.checkpoint.load(shelf, state), lambda: _move(state)):
        change()
        before = digests(state)
        saving = writer.save()
        train(state, 1)
        assert writer.staging.copying is None  # the update has asked for the copies
        saving.result()
        again = make_state(seed=99)
        fs.checkpoint.load(saving.where, again)
        found.append(digests(again) == before != digests(state))
    writer.close()
    return found


def _move(state) -> None:
    """Other memory and other values behind the same tensor."""
    with torch.no_grad():
        local = next(t for n, t in optimizer_tensors(state).items() if n.endswith(".exp_avg")).to_local()
        local.set_(local + 1.0)


def tallied() -> list:
    """Numbers of all ranks, and what all are told when one fails."""
    group = acquire_group()
    big = -(1 << 63)
    found: list = [gather_integers(group, lambda: [dist.get_rank(), big], 2), gather_integers(group, lambda: [], 0)]
    try:
        gather_integers(group, lambda: [1 // (1 - dist.get_rank())], 1)
    except fs.FullshardError as error:
        found.append(str(error))
    found.append(gather_integers(group, lambda: [7], 1))
    release_group(group)
    return found


def settled(leaders: list[int]) -> list:
    """What leaders are given to finish with, and what all are told when one of them, or anybody before, fails."""
    group, rank = acquire_group(), dist.get_rank()
    last, found = dist.get_world_size() - 1, []

    def settle_one(make, finish) -> None:
        given: list = []
        try:
            gather_then_finish(group, leaders, make, 2, lambda rows: given.append(rows) or finish())
        except fs.FullshardError as error:
            given.append(str(error))
        found.append(given)

    numbers = lambda: [rank, -(1 << 63)]
    settle_one(numbers, lambda: None)
    settle_one(lambda: numbers() if rank != last else [1 // 0], lambda: None)
    settle_one(numbers, lambda: 1 // (leaders[-1] - rank))
    settle_one(numbers, lambda: None)
    release_group(group)
    return found


def full_disk(shelf: str, fill: str) -> dict:
    """A good save, one onto a full disk, and training before, between and after."""
    state = make_state()
    writer = Checkpointer(shelf, state)
    losses = train(state, 2)
    writer.save().result()
    before = digests(state)
    if dist.get_rank() == 0:
        file = os.open(fill, os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while os.write(file, b"x" * 4096):
                pass
        os.close(file)
    dist.barrier()
    losses += train(state, 1)
    try:
        writer.save().result()
        said = "saved"
    except fs.FullshardError as error:
        said = str(error)
    losses += train(state, 1)
    if dist.get_rank() == 0:
        os.unlink(fill)
    dist.barrier()
    losses += train(state, 1)
    writer.save().result()
    writer.close()
    return {"said": said, "before": before, "losses": losses}


def own_disks(directory: str, strategy: str = "zero3") -> dict:
    """Two nodes of two ranks, each with a disk of its own: the same path on both, as ranks see it."""
    shelf = f"{directory}/node{dist.get_rank() // 2}/shelf"
    state = make_state(strategy)
    train(state, 2)
    writer = Checkpointer(shelf, state)
    nodes = (writer.nodes.of_rank, writer.nodes.leads)
    writer.save().result()
    writer.close()
    again = make_state(strategy, seed=99)
    fs.checkpoint.load(shelf, again)
    try:
        fs.checkpoint.load(shelf, make_state("ddp", seed=99))
        other = "accepted"
    except fs.FullshardError as error:
        other = str(error)
    return {"nodes": nodes, "same": digests(again) == digests(state), "other": other}


def dropout(shelf: str) -> list[list[float]]:
    """A model with dropout: what follows a save, and what follows a load of it."""
    after = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        with torch.device("meta"):
            model = GPT(GPTSize(dim=16, layers=2, heads=2, vocab=parity.VOCAB, sequence=32, dropout=0.3))
        plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), batch=fs.Batch(2, parity.LENGTH))
        state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3), seed=0)
        if seed == 5:
            train(state, 2)
            fs.checkpoint.save(shelf, state)
        else:
            fs.checkpoint.load(shelf, state)
        after.append(train(state, 3))
    return after


def counted(shelf: str) -> tuple[int, int]:
    """The bytes that this rank writes under hybrid sharding, and those of a whole checkpoint."""
    state = make_state("hybrid")
    train(state, 1)
    writer = Checkpointer(shelf, state)
    writer.save().result()
    size = writer.staging.layout.nbytes
    writer.close()
    return size, needed_bytes(state)


def saved_then_mutated(shelf: str) -> dict:
    state = make_state()
    train(state, 2)
    before = digests(state)
    writer = Checkpointer(shelf, state)
    saving = writer.save()
    with torch.no_grad():
        for tensor in [*state.model.parameters(), *optimizer_tensors(state).values()]:
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(7.0)
    saving.result()
    writer.close()
    again = make_state(seed=99)
    fs.checkpoint.load(shelf, again)
    return {"digests": before, "found": digests(again)}


def three(shelf: str) -> None:
    """Three checkpoints, of steps 1 to 3."""
    state = make_state()
    writer = Checkpointer(shelf, state)
    for _ in range(3):
        train(state, 1)
        writer.save().result()
    writer.close()


def taken_over(shelf: str) -> dict:
    """Two saves, and a third after another process has taken the shelf; the rules would let only one stay."""
    state = make_state()
    writer = Checkpointer(shelf, state, keep=Kept(last=2))
    for _ in range(2):
        train(state, 1)
        writer.save().result()
    if dist.get_rank() == 0:
        other = dataclasses.replace(writer.lease.me, id="other", pid=1)
        writer.shelf.create(lease.lease_name(writer.lease.number + 1), other.to_bytes())
    dist.barrier()
    train(state, 1)
    saving = writer.save()
    try:
        saving.result()
        error = "saved"
    except fs.FullshardError as found:
        error = str(found)
    writer.close()
    return {"error": error, "lost": saving.lost}


def retained(shelf: str) -> list[str]:
    """Three checkpoints, the newest damaged; then another writer's save, under rules that let two stay. What it says."""
    state = make_state()
    writer = Checkpointer(shelf, state)
    for _ in range(3):
        train(state, 1)
        writer.save().result()
    writer.close()
    if dist.get_rank() == 0:
        file = next(Path(shelf, "step-00000003").glob("shard-*"))
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    dist.barrier()
    train(state, 1)
    writer = Checkpointer(shelf, state, keep=Kept(last=2))
    saving = writer.save()
    saving.result()
    writer.close()
    return saving.passed
