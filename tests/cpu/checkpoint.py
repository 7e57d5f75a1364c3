"""What the checkpoint tests run inside the ranks."""

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
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.checkpoint.retention import Retention
from fullshard.model.presets import GPTSize
from fullshard.on_torch.model.built_in import GPT
from fullshard.on_torch.ranks.rank_agreement import GroupAgreement
from fullshard.on_torch.saving.save import Checkpointer
from fullshard.on_torch.saving.state_tensors import checkpoint_bytes, model_tensors, optimizer_tensors
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


def load_once(checkpoint_dir: str) -> tuple[dict[str, str], int]:
    """The state after a load that verifies meanwhile, and how many bytes of tensors this rank read for it."""
    state, read, plain = make_state(), list[int](), Local.read

    def counted(place, name, pieces):
        read.append(sum(len(into) for _, into in pieces) if name.startswith("shard") else 0)
        plain(place, name, pieces)

    Local.read = counted
    try:
        fs.checkpoint.load(checkpoint_dir, state, verify="meanwhile")
    finally:
        Local.read = plain
    return digests(state), sum(read)


def batch(state, step: int) -> dict[str, torch.Tensor]:
    """A random batch, different at every step and on every data rank."""
    rank = on_torch.data_rank(state.plan.mesh)
    ids = torch.randint(0, parity.VOCAB, (2, parity.LENGTH + 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def train(state, steps: int) -> list[float]:
    return [on_torch.train_step(state, [batch(state, state.step)], clip=1.0).loss.item() for _ in range(steps)]


def digests(state) -> dict[str, str]:
    """The bytes of every whole tensor."""
    found = {}
    for name, tensor in (model_tensors(state.model) | optimizer_tensors(state)).items():
        whole = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
        found[name] = hashlib.sha256(whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def save(checkpoint_dir: str, strategy: str, kind: str = "plain", steps: int = 2, optimizer=None, **choices) -> dict:
    state = make_state(strategy, kind, optimizer=optimizer, **choices)
    train(state, steps)
    where = fs.checkpoint.save(checkpoint_dir, state, cursor=24, extra={"note": "ä"})
    return {"where": where, "digests": digests(state), "next": train(state, 2)}


def load(checkpoint_dir: str, strategy: str, kind: str = "plain", optimizer=None, **choices) -> dict:
    state = make_state(strategy, kind, seed=99, optimizer=optimizer, **choices)
    manifest = fs.checkpoint.load(checkpoint_dir, state)
    return {
        "step": state.step,
        "cursor": manifest.cursor,
        "note": manifest.state["extra"]["note"],
        "digests": digests(state),
        "next": train(state, 2),
    }


def refusal(checkpoint_dir: str, kind: str = "plain", optimizer=None, **options) -> str:
    return said_to_load(checkpoint_dir, make_state("zero3", kind, optimizer=optimizer), **options)


def load_flipped(checkpoint_dir: str) -> list[tuple[str, int, str]]:
    """The errors of loads with one flipped byte each. The state must not change."""
    state = make_state("zero3", seed=5)
    before, found = digests(state), []
    where = Path(str(commit.find(checkpoint_dir)))
    draw = random.Random(0)
    for file in sorted(where.iterdir()):
        whole = file.read_bytes()
        dist.barrier()
        end = len(whole) - 1
        edges = {0, 1, 7, 8, 9, 4095, 4096, 4097, end // 2, end - 4096, end - 1, end}
        for offset in sorted(o for o in edges | {draw.randrange(end) for _ in range(100)} if 0 <= o <= end):
            flipped = bytes([whole[offset] ^ (1 << draw.randrange(8))])
            _alone(partial(file.write_bytes, whole[:offset] + flipped + whole[offset + 1 :]))
            found.append((file.name, offset, said_to_load(checkpoint_dir, state)))
        _alone(partial(file.write_bytes, whole))
    assert digests(state) == before
    assert said_to_load(checkpoint_dir, state) == "accepted"
    assert digests(state) != before
    return found


FORGED: dict[str, dict] = {
    "slots": {"slots": 5},
    "slot": {"slots": {"model.norm.weight": {"step": [1]}}},
    "without": {"without_slots": [1]},
    "scale": {"loss_scale": {"value": "x"}},
}  # changes of a manifest's `state`, under a valid checksum


def load_damaged(checkpoint_dir: str) -> dict[str, str]:
    """The errors of loads of damaged files and crafted manifests."""
    state, found = make_state("zero3", seed=5), {}
    before = digests(state)
    whole, place = Path(str(commit.find(checkpoint_dir))), Local(Path(checkpoint_dir, "other/step-00000002"))

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
    """Run on the first rank, while no other rank reads."""
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def said_to_load(checkpoint_dir: str, state, **options) -> str:
    try:
        fs.checkpoint.load(checkpoint_dir, state, **options)
    except fs.FullshardError as error:
        return str(error)
    return "accepted"


def from_hugging_face(directory: str, checkpoint_dir: str, lora: bool = False, steps: int = 0) -> None:
    """Load published weights and save them as a checkpoint, as a run would."""
    model = on_torch.load_model(directory)
    recipe: dict = {"model": {"name": directory}}
    if lora:
        recipe["lora"] = {"rank": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}
        model = on_torch.add_adapters(model, **recipe["lora"])
    plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), batch=fs.Batch(2, parity.LENGTH))
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-2), weights=directory)
    train(state, steps)
    fs.checkpoint.save(checkpoint_dir, state, recipe=recipe)


def save_others(directory: str) -> dict:
    """The same weights as torch's own tools write them: DCP, and one `.pt` file per rank."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

    state = make_state("zero3")
    train(state, 1)
    model, optimizer = get_state_dict(state.model, state.optimizer)
    dcp.save({"model": model, "optimizer": optimizer, "step": 1}, checkpoint_id=f"{directory}/dcp")
    dcp.save(model, checkpoint_id=f"{directory}/bare")
    torch.save(get_model_state_dict(state.model), f"{directory}/model_rank_{dist.get_rank()}.pt")
    return {n: p.detach().full_tensor() for n, p in state.model.named_parameters()}


def load_imported(checkpoint_dir: str) -> dict:
    state = make_state("zero3", seed=99)
    fs.checkpoint.load(checkpoint_dir, state)
    train_after = {n: p.detach().full_tensor().clone() for n, p in state.model.named_parameters()}
    train(state, 1)
    return train_after


def one_at_a_time(checkpoint_dir: str) -> bool:
    """Whether a second save waits for the first."""
    state = make_state()
    train(state, 1)
    writer = Checkpointer(checkpoint_dir, state)
    first = writer.save()
    second = writer.save()
    done = first.done()
    second.result()
    writer.close()
    return done


def saved_under_training(checkpoint_dir: str) -> list[bool]:
    """Whether saves beside training hold the values at the time of the call, which the next step overwrites. Before the
    second save the optimizer has other tensors, before the third one tensor has moved in memory."""
    state = make_state()
    train(state, 2)
    writer = Checkpointer(checkpoint_dir, state, overlap=True)
    found = []
    for change in (lambda: None, lambda: fs.checkpoint.load(checkpoint_dir, state), lambda: _move(state)):
        change()
        before = digests(state)
        saving = writer.save()
        train(state, 1)
        assert writer.staging.copies is None  # the update has waited for the copies
        saving.result()
        again = make_state(seed=99)
        fs.checkpoint.load(saving.where, again)
        found.append(digests(again) == before != digests(state))
    writer.close()
    return found


def _move(state) -> None:
    """Give a tensor other memory and other values."""
    with torch.no_grad():
        local = next(t for n, t in optimizer_tensors(state).items() if n.endswith(".exp_avg")).to_local()
        local.set_(local + 1.0)


def tallied() -> list:
    """The numbers of all ranks from `gather_integers`, and the error on all ranks when one fails."""
    ranks = GroupAgreement()
    big = -(1 << 63)
    found: list = [ranks.gather_integers(lambda: [dist.get_rank(), big], 2), ranks.gather_integers(lambda: [], 0)]
    try:
        ranks.gather_integers(lambda: [1 // (1 - dist.get_rank())], 1)
    except fs.FullshardError as error:
        found.append(str(error))
    found.append(ranks.gather_integers(lambda: [7], 1))
    ranks.close()
    return found


def settled(leaders: list[int]) -> list:
    """What `gather_then_finish` passes to leaders, and the error on all ranks when a leader, or any rank before, fails."""
    ranks, rank = GroupAgreement(), dist.get_rank()
    last, found = dist.get_world_size() - 1, []

    def settle_one(make, finish) -> None:
        given: list = []
        try:
            ranks.gather_then_finish(leaders, make, 2, lambda rows: given.append(rows) or finish())
        except fs.FullshardError as error:
            given.append(str(error))
        found.append(given)

    numbers = lambda: [rank, -(1 << 63)]
    settle_one(numbers, lambda: None)
    settle_one(lambda: numbers() if rank != last else [1 // 0], lambda: None)
    settle_one(numbers, lambda: 1 // (leaders[-1] - rank))
    settle_one(numbers, lambda: None)
    ranks.close()
    return found


def full_disk(checkpoint_dir: str, fill: str) -> dict:
    """A save that works and one onto a full disk, with training before, between and after."""
    state = make_state()
    writer = Checkpointer(checkpoint_dir, state)
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
    """Two simulated nodes of two ranks with separate disks."""
    checkpoint_dir = f"{directory}/node{dist.get_rank() // 2}/checkpoint_dir"
    state = make_state(strategy)
    train(state, 2)
    writer = Checkpointer(checkpoint_dir, state)
    nodes = (writer.nodes.of_rank, writer.nodes.is_leader)
    writer.save().result()
    writer.close()
    again = make_state(strategy, seed=99)
    fs.checkpoint.load(checkpoint_dir, again)
    try:
        fs.checkpoint.load(checkpoint_dir, make_state("ddp", seed=99))
        other = "accepted"
    except fs.FullshardError as error:
        other = str(error)
    return {"nodes": nodes, "same": digests(again) == digests(state), "other": other}


def dropout(checkpoint_dir: str) -> list[list[float]]:
    """Losses of a model with dropout: after a save, and after loading it."""
    after = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        with torch.device("meta"):
            model = GPT(GPTSize(dim=16, layers=2, heads=2, vocab=parity.VOCAB, sequence=32, dropout=0.3))
        plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), batch=fs.Batch(2, parity.LENGTH))
        state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3), seed=0)
        if seed == 5:
            train(state, 2)
            fs.checkpoint.save(checkpoint_dir, state)
        else:
            fs.checkpoint.load(checkpoint_dir, state)
        after.append(train(state, 3))
    return after


def counted(checkpoint_dir: str) -> tuple[int, int]:
    """The bytes that this rank writes under hybrid sharding, and those of a whole checkpoint."""
    state = make_state("hybrid")
    train(state, 1)
    writer = Checkpointer(checkpoint_dir, state)
    writer.save().result()
    size = writer.staging.layout.nbytes
    writer.close()
    return size, checkpoint_bytes(state)


def saved_then_mutated(checkpoint_dir: str) -> dict:
    state = make_state()
    train(state, 2)
    before = digests(state)
    writer = Checkpointer(checkpoint_dir, state)
    saving = writer.save()
    with torch.no_grad():
        for tensor in [*state.model.parameters(), *optimizer_tensors(state).values()]:
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(7.0)
    saving.result()
    writer.close()
    again = make_state(seed=99)
    fs.checkpoint.load(checkpoint_dir, again)
    return {"digests": before, "found": digests(again)}


def three(checkpoint_dir: str) -> None:
    """Three checkpoints, of steps 1 to 3."""
    state = make_state()
    writer = Checkpointer(checkpoint_dir, state)
    for _ in range(3):
        train(state, 1)
        writer.save().result()
    writer.close()


def taken_over(checkpoint_dir: str) -> dict:
    """Two saves, and a third after another process has taken the directory; retention would delete the first."""
    state = make_state()
    writer = Checkpointer(checkpoint_dir, state, keep=Retention(last=2))
    for _ in range(2):
        train(state, 1)
        writer.save().result()
    if dist.get_rank() == 0:
        other = dataclasses.replace(writer.lease.holder, id="other", pid=1)
        writer.checkpoint_dir.create(lease.lease_name(writer.lease.number + 1), other.to_bytes())
    dist.barrier()
    train(state, 1)
    saving = writer.save()
    try:
        saving.result()
        error = "saved"
    except fs.FullshardError as found:
        error = str(found)
    writer.close()
    return {"error": error, "lost": saving.lease_lost}


def retained(checkpoint_dir: str) -> list[str]:
    """Three checkpoints, the newest damaged, then a save that keeps two. Returns its messages."""
    state = make_state()
    writer = Checkpointer(checkpoint_dir, state)
    for _ in range(3):
        train(state, 1)
        writer.save().result()
    writer.close()
    if dist.get_rank() == 0:
        file = next(Path(checkpoint_dir, "step-00000003").glob("shard-*"))
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    dist.barrier()
    train(state, 1)
    writer = Checkpointer(checkpoint_dir, state, keep=Retention(last=2))
    saving = writer.save()
    saving.result()
    writer.close()
    return saving.messages
