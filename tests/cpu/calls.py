"""Calls with wrong arguments, and what they say; for `test_wrong_calls`. Inside ranks, or without any."""

from collections.abc import Callable

import torch

import fullshard as fs
from fullshard import FullshardError, on_torch
from fullshard.on_torch.model.built_in import Llama
from tests.cpu import parity


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except FullshardError as error:
        return str(error)
    return "accepted"


def model_and_plan(**choices):
    model = parity.build("plain")
    return model, fs.zero3(on_torch.describe(model), devices=1, batch=fs.Batch(2, 8), **choices)


def batch(**changes) -> dict:
    ids = torch.arange(18).view(2, 9) % parity.VOCAB
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]} | changes


def constructions() -> dict[str, str]:
    """Everything before the first step."""
    model, plan = model_and_plan()
    description = on_torch.describe(model)
    cluster = fs.Cluster.load("8xh200")
    frozen = parity.build("plain").requires_grad_(False)
    calls: dict[str, Callable[[], object]] = {
        "zero3(model)": lambda: fs.zero3(model),
        "zero3(model, 8)": lambda: fs.zero3(model, 8),
        "zero3(d)": lambda: fs.zero3(description),
        "zero3(d, '8')": lambda: fs.zero3(description, "8"),
        "zero3(remmat=)": lambda: fs.zero3(description, 8, remmat="full"),
        "describe(plan)": lambda: on_torch.describe(plan),
        "find_plan(model)": lambda: fs.find_plan(model, cluster),
        "find_plan without costs": lambda: fs.find_plan(description, cluster),
        "find_plan(d)": lambda: fs.find_plan(description),
        "estimate without costs": lambda: fs.estimate(plan, description, cluster),
        "shard(plan, model)": lambda: on_torch.shard(plan, model),
        "shard(model)": lambda: on_torch.shard(model),
        "shard(optimizer=torch's)": lambda: on_torch.shard(model, plan, torch.optim.AdamW),
        "shard(frozen)": lambda: on_torch.shard(frozen, plan, fs.AdamW()),
        "shard(device=cuda)": lambda: on_torch.shard(model, plan, device="cuda"),
        "shard(device=cuda:0)": lambda: on_torch.shard(model, plan, device="cuda:0"),
        "save(state, path)": lambda: fs.checkpoint.save(object(), "run"),
        "load(path)": lambda: fs.checkpoint.load("run"),
        "train without steps": lambda: fs.train(object(), []),
    }
    found = {name: said(call) for name, call in calls.items()}
    return found | {"untouched": str(all(p.is_meta for p in model.parameters()))}


def steps() -> dict[str, str]:
    """A state, and steps that it is given wrongly."""
    model, plan = model_and_plan()
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3))
    good, step = batch(), on_torch.train_step
    one = torch.full((2, 8), 7)
    calls: dict[str, Callable[[], object]] = {
        "a dict": lambda: step(state, good),
        "(batch, state)": lambda: step([good], state),
        "None in it": lambda: step(state, [None]),
        "a key of None": lambda: step(state, [good | {"position_ids": None}]),
        "text": lambda: step(state, [batch(input_ids="abc")]),
        "lengths": lambda: step(state, [batch(labels=torch.zeros(2, 7, dtype=torch.long))]),
        "floats": lambda: step(state, [batch(labels=torch.zeros(2, 8))]),
        "one row flat": lambda: step(state, [batch(input_ids=torch.zeros(8, dtype=torch.long))]),
        "beyond": lambda: step(state, [batch(input_ids=torch.full((2, 8), parity.VOCAB))]),
        "negative": lambda: step(state, [batch(input_ids=torch.full((2, 8), -1))]),
        "label beyond": lambda: step(state, [batch(labels=torch.full((2, 8), 10**6))]),
        "unshifted": lambda: step(state, [batch(labels=good["input_ids"])]),
        "evaluate a dict": lambda: on_torch.evaluate(state, good),
        **{f"clip={c}": lambda c=c: step(state, [good], clip=c) for c in (-1.0, 0, float("nan"), "1", True)},
        **{f"lr={r}": lambda r=r: step(state, [good], lr=r) for r in (-1.0, float("nan"), float("inf"), "1")},
        "train clip": lambda: next(fs.train(state, [[good]], steps=1, clip=-1.0)),
        "train lr": lambda: next(fs.train(state, [[good]], steps=1, lr=lambda s: -1.0)),
        "optimizer": lambda: setattr(state, "optimizer", fs.AdamW(lr=1e-3)),
    }
    found = {name: said(call) for name, call in calls.items()}
    found["step"] = str(state.step)
    found["one token"] = said(lambda: step(state, [{"input_ids": one, "labels": one}]))  # as shifted text of it would be
    found["afterwards"] = said(lambda: step(state, [good], clip=float("inf"), lr=0.0))
    return found


def unshifted_on_one_rank(custom: bool) -> str:
    """Rank 1 alone gives unshifted labels."""
    import torch.distributed as dist

    model = parity.build("plain")
    plan = fs.zero3(on_torch.describe(model), devices=2, batch=fs.Batch(2, 8))
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3))
    ids = torch.randint(0, parity.VOCAB, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    labels = ids[:, :-1] if dist.get_rank() else ids[:, 1:]
    loss = (lambda m, b: on_torch.summed_loss(m, b)) if custom else on_torch.summed_loss
    return said(lambda: on_torch.train_step(state, [{"input_ids": ids[:, :-1], "labels": labels}], loss=loss))


def adapters(base: str, checkpoint_dir: str) -> str:
    """Adapters on a base that is drawn, loaded in one way or another, or has values from the start."""
    from peft import LoraConfig, get_peft_model

    with torch.device("cpu" if base == "has values" else "meta"):
        torch.manual_seed(0)
        model = get_peft_model(Llama(parity.SIZE), LoraConfig(r=4, target_modules=["q_proj"]))
    plan = fs.zero3(on_torch.describe(model), devices=1, batch=fs.Batch(2, 8))
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3), first_step_checks=base != "unchecked")
    if base == "copied":
        with torch.no_grad():
            for p in state.parameters():
                p.mul_(0.5)
    if base == "checkpoint":
        fs.checkpoint.save(checkpoint_dir, state)
        fs.checkpoint.load(checkpoint_dir, state)
    return said(lambda: on_torch.train_step(state, [batch()]))
