"""Arguments of the wrong kind, in the wrong order or of no sense: one sentence each, with what to write, and nothing done."""

import math

import pytest

import fullshard as fs
from fullshard import FullshardError
from tests.cpu import calls

CONSTRUCTIONS = {
    "zero3(model)": "write zero3(on_torch.describe(model), devices=8)",
    "zero3(model, 8)": "description cannot be a Llama; write zero3(on_torch.describe(model), devices=8)",
    "zero3(d)": "missing a required argument: 'devices'",
    "zero3(d, '8')": "devices must be a positive integer, not '8'",
    "zero3(remmat=)": "has no argument 'remmat'",
    "describe(plan)": "model cannot be a Plan; write describe(model)",
    "find_plan(model)": "description cannot be a Llama; write find_plan(on_torch.describe(model, micro_batch=1",
    "find_plan without costs": "no costs, which a plan is chosen by; write on_torch.describe(model, micro_batch=1",
    "find_plan(d)": "missing a required argument: 'cluster'",
    "estimate without costs": "no costs",
    "shard(plan, model)": "model cannot be a Plan; write shard(model, plan, optimizer=",
    "shard(model)": "missing a required argument: 'plan'",
    "shard(optimizer=torch's)": "write state.optimizer = yours after shard()",
    "shard(frozen)": "unfreeze what is to be trained, or call shard() without an optimizer",
    "shard(device=cuda)": "this process sees no GPU",
    "shard(device=cuda:0)": "write 'cuda' or 'cpu'",
    "save(state, path)": "write checkpoint.save('run/checkpoints', state)",
    "load(path)": "missing a required argument: 'state'",
    "train without steps": "missing a required argument: 'steps'",
}
STEPS = {
    "a dict": "write train_step(state, [batch])",
    "(batch, state)": "state cannot be a list; write train_step(state, [batch])",
    "None in it": "a batch is a dict of tensors",
    "a key of None": "position_ids of a batch is None; leave the key out",
    "text": "input_ids of a batch cannot be made a tensor",
    "lengths": "labels is 2 × 7 and input_ids 2 × 8",
    "floats": "labels of a batch is float32, but tokens are whole numbers; write labels.long()",
    "one row flat": "write input_ids.view(rows, length)",
    "beyond": "input_ids holds token 50, but the model has 50 (0 to 49)",
    "negative": "input_ids holds token -1",
    "label beyond": "labels holds token 1000000",
    "unshifted": "labels equal input_ids",
    "evaluate a dict": "a batch is a dict of tensors",
    "clip=-1.0": "clip must be a number above 0, not -1.0",
    "clip=0": "clip must be a number above 0, not 0",
    "clip=nan": "clip must be a number above 0, not nan",
    "clip=1": "clip cannot be a str",
    "clip=True": "clip must be a number above 0, not True",
    "lr=-1.0": "lr must be a number of at least 0, not -1.0",
    "lr=nan": "lr must be a number of at least 0, not nan",
    "lr=inf": "lr must be a number of at least 0, not inf",
    "lr=1": "lr cannot be a str",
    "train clip": "clip must be a number above 0",
    "train lr": "lr must be a number of at least 0",
    "optimizer": "a fullshard.AdamW goes to shard(model, plan, optimizer=...)",
}


def check(found: dict[str, str], wanted: dict[str, str]) -> None:
    for name, sentence in wanted.items():
        assert sentence in found[name], name
        assert "\n" not in found[name]


def test_what_comes_before_the_first_step(ranks):
    found = ranks(1).run(calls.constructions)[0]
    check(found, CONSTRUCTIONS)
    assert found["untouched"] == "True"


def test_steps(ranks):
    found = ranks(1).run(calls.steps)[0]
    check(found, STEPS)
    assert found["step"] == "0"
    assert found["one token"] == found["afterwards"] == "accepted"


def test_unshifted_labels_of_one_rank_are_said_by_all(ranks):
    assert all("labels equal input_ids" in said for said in ranks(2).run(calls.unshifted_on_one_rank, False))
    assert ranks(2).run(calls.unshifted_on_one_rank, True) == ["accepted"] * 2  # a loss of one's own may shift them


@pytest.mark.parametrize(
    ("base", "trains"), [("drawn", False), ("unchecked", True), ("copied", True), ("checkpoint", True), ("has values", True)]
)
def test_adapters_on_a_base_that_nobody_loaded(ranks, tmp_path, base, trains):
    said = ranks(1).run(calls.adapters, base, str(tmp_path))[0]
    assert said == "accepted" if trains else "is frozen at random values" in said


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        *(
            (lambda lr=lr: fs.AdamW(lr=lr), "optimizer.lr must be a number of at least 0")
            for lr in (-1, NAN, INF, "1", None, True)
        ),
        (lambda: fs.SGD(lr=NAN), "optimizer.lr must be a number of at least 0"),
        (lambda: fs.TorchOptimizer("RAdam", NAN), "optimizer.lr must be a number of at least 0"),
        (lambda: fs.TorchOptimizer("RAdam", 1e-3, (("weight_decay", NAN),)), "optimizer.options.weight_decay must be finite"),
        (lambda: fs.TorchOptimizer(5, 1e-3), "optimizer.name must be the name"),
        (lambda: fs.AdamW(weight_decay=INF), "optimizer.weight_decay must be a number of at least 0"),
        (lambda: fs.AdamW(betas=0.9), "optimizer.betas must be two numbers"),
        (lambda: fs.AdamW(betas=(0.9, NAN)), "optimizer.betas must be two numbers"),
        (lambda: fs.AdamW(betas=("a", "b")), "optimizer.betas must be two numbers"),
        (lambda: fs.AdamW(eps=0), "optimizer.eps must be a number above 0"),
        (lambda: fs.AdamW(eps=INF), "optimizer.eps must be a number above 0"),
        (lambda: fs.SGD(lr=1.0, momentum="a"), "optimizer.momentum must be"),
    ],
)
def test_optimizers_of_no_sense(make, sentence):
    with pytest.raises(FullshardError) as caught:
        make()
    assert sentence in str(caught.value)
