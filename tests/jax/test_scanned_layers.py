"""Equal blocks as one compiled loop: the same losses, bytes, collectives and checkpoints as block by block."""

from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

import fullshard as fs
from fullshard import FullshardError, on_jax
from fullshard.checkpoint.directories import open_place
from fullshard.checkpoint.reader import Checkpoint
from fullshard.on_jax.measuring.flops import flops_per_token
from fullshard.on_jax.model.built_in import NnxGPT, NnxGPT2, NnxGPT2Size, NnxLlama
from tests.jax.test_on_jax import CLIP, FP32, GPT, LLAMA, batch

DEEP = replace(LLAMA, layers=3)
OPTIMIZER = fs.AdamW(lr=1e-2)  # decays matrices alone: a stack of norms is none
QUICK = [("zero3", "full")]
GRID = [
    pytest.param(s, r, marks=() if (s, r) in QUICK else pytest.mark.full)
    for s in ("ddp", "zero1", "zero2", "zero3", "hybrid", "tensor")
    for r in ("none", "selective", "full")
]


def llama(rngs: nnx.Rngs) -> nnx.Module:
    return NnxLlama(DEEP, rngs=rngs)


def dropping(rngs: nnx.Rngs) -> nnx.Module:
    return NnxGPT(replace(GPT, dropout=0.1), rngs=rngs)


def make_plan(make, strategy: str, remat: str) -> fs.Plan:
    data = 4 if strategy == "tensor" else 8
    arguments = {"replicate": 2, "shard": 4} if strategy == "hybrid" else {"devices": 8}
    arguments |= {"tensor": 2} if strategy == "tensor" else {}
    shape = fs.Batch(32 // data, 12)
    name = "zero3" if strategy == "tensor" else strategy
    return fs.strategy(name, on_jax.describe(make), **arguments, batch=shape, precision=FP32, remat=remat)


def losses(state: on_jax.State, first: int = 0, steps: int = 4) -> list[float]:
    return [float(on_jax.train_step(state, [batch(i)], clip=CLIP).loss) for i in range(first, first + steps)]


def arrays(where: str) -> dict[str, np.ndarray]:
    found = Checkpoint(open_place(where))
    return {name: found.tensor(name) for name in found.manifest.tensors}


@pytest.mark.parametrize(("strategy", "remat"), GRID)
def test_a_loop_is_block_by_block(strategy, remat, tmp_path):
    plan = make_plan(llama, strategy, remat)
    one, loop = (on_jax.shard(llama, plan, OPTIMIZER, scan=scan) for scan in (False, True))
    name = "mlp.up_proj.weight"
    assert loop.params[f"model.layers.*.{name}"].shape == (3, *one.params[f"model.layers.0.{name}"].shape)
    assert loop.held_bytes() == one.held_bytes()
    for i in range(3):
        assert np.array_equal(loop.params[f"model.layers.*.{name}"][i], one.params[f"model.layers.{i}.{name}"])
    assert losses(loop) == pytest.approx(losses(one), rel=1e-6)
    assert on_jax.compilations(loop) == 1
    found = on_jax.check_collectives(loop, [batch(0)])
    assert found.differences == (), str(found)
    if plan.mesh.shard > 1:
        blocks = next(u for u in found.units if u.unit == "model.layers.*")
        assert blocks.gathered[0] > 0
    analysed = on_jax.memory_analysis(loop, [batch(0)])
    assert analysed.arguments[0] == sum(analysed.held.values()), str(analysed)


def test_checkpoints_are_the_same_and_runs_go_on_either_way(tmp_path):
    """Dropout's keys and counters too: all is equal to the bit where values were saved."""
    plan = make_plan(dropping, "zero3", "none")
    one, loop = (on_jax.shard(dropping, plan, OPTIMIZER, scan=scan) for scan in (False, True))
    first = losses(one, steps=2)
    assert losses(loop, steps=2) == pytest.approx(first, rel=1e-6)
    saved = {kind: fs.checkpoint.save(tmp_path / kind, state) for kind, state in (("one", one), ("loop", loop))}
    kept = {kind: arrays(where) for kind, where in saved.items()}
    assert list(kept["one"]) == list(kept["loop"])
    for name, value in kept["one"].items():
        assert (value.shape, value.dtype) == (kept["loop"][name].shape, kept["loop"][name].dtype), name
        np.testing.assert_allclose(kept["loop"][name], value, atol=1e-5, err_msg=name)
        assert not name.startswith("rng.") or np.array_equal(value, kept["loop"][name]), name
    wanted = losses(one, 2, 2)
    for source, state in (("one", loop), ("loop", one)):  # both have gone on since, or drawn other numbers
        fs.checkpoint.load(saved[source], state)
        again = fs.checkpoint.save(tmp_path / f"again-{source}", state)
        assert all(np.array_equal(kept[source][name], value) for name, value in arrays(again).items())
        assert losses(state, 2, 2) == pytest.approx(wanted, rel=1e-6)


class Loops(nnx.Module):
    """A model whose call has a loop of its own; or blocks that return another dtype."""

    def __init__(self, rngs: nnx.Rngs, kind: str):
        self.kind = kind
        self.table = nnx.Embed(64, 8, rngs=rngs)
        sizes = (8, 16) if kind == "shapes" else (8, 8)
        self.blocks = nnx.List([nnx.LoRA(8, size, 8, rngs=rngs) for size in sizes])
        if kind == "tied":
            self.blocks[1].lora_a = self.blocks[0].lora_a
        if kind == "none":
            self.blocks = nnx.List([self.blocks[0]])

    def __call__(self, ids):
        x = self.table(ids)
        if self.kind == "dtype":
            return self.table.attend(on_jax.scan_layers(self.blocks, x.astype(np.int32)))
        for block in self.blocks:
            x = block(x)
        return self.table.attend(x)


def test_what_cannot_be_scanned_is_a_sentence():
    plan_of = lambda make, **more: fs.zero3(on_jax.describe(make), devices=8, batch=fs.Batch(4, 12), precision=FP32, **more)
    made = lambda kind: lambda rngs: Loops(rngs, kind)
    uneven = lambda rngs: NnxGPT2(NnxGPT2Size(16, 2, 2, 64, 64, scale_by_layer=True), rngs=rngs)
    plan = make_plan(llama, "zero3", "full")
    home = plan.change("model.layers.*", home=fs.Home(optimizer="host"))
    coarse = fs.zero3(on_jax.describe(llama, small=1000), devices=8)

    def stepped(kind: str) -> None:
        state = on_jax.shard(made(kind), plan_of(made(kind)), OPTIMIZER, scan=True)
        on_jax.train_step(state, [batch(0)])

    cases = {
        "blocks.1 is not made as blocks.0 is (lora_a": lambda: on_jax.shard(made("shapes"), plan_of(made("shapes")), scan=True),
        "transformer.h.1 is not made as transformer.h.0 is (their settings differ)": lambda: on_jax.shard(
            uneven, plan_of(uneven), scan=True
        ),
        "is a parameter of another module, too": lambda: on_jax.shard(made("tied"), plan_of(made("tied")), scan=True),
        "the model has no nnx.List of several blocks": lambda: on_jax.shard(made("none"), plan_of(made("none")), scan=True),
        "write x = on_jax.scan_layers(self.blocks, x, …) in place of its loop": lambda: stepped("loop"),
        "return the shape and dtype that it was given": lambda: stepped("dtype"),
        "the plan treats unit model.layers.1 otherwise than model.layers.0": lambda: on_jax.shard(
            llama, plan.change("model.layers.1", remat="none"), scan=True
        ),
        "scanned blocks rest on the device": lambda: on_jax.shard(llama, home, scan=True),
        "is not a unit of its own in the plan": lambda: on_jax.shard(llama, coarse, scan=True),
    }
    for sentence, call in cases.items():
        with pytest.raises(FullshardError) as caught:
            call()
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_loaded_model_is_scanned_and_sampled_from():
    make = on_jax.load_model("llama-nano", scan=True)
    plan = fs.zero3(on_jax.describe(make), devices=8, precision=FP32)
    loop, one = on_jax.shard(make, plan), on_jax.shard(make, plan, scan=False)
    assert [any("*" in name for name in state.params) for state in (loop, one)] == [True, False]
    drawn = [on_jax.generate(state.model, [1, 2, 3], max_new_tokens=4, temperature=0) for state in (loop, one)]
    assert drawn[0] == drawn[1]
    assert flops_per_token(loop.model, 16) == flops_per_token(one.model, 16)
