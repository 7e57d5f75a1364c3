"""Models of one's own compute as the plan says: the dtypes of products, remat and gathers, whatever layers and methods they have.
What cannot be made so is refused in a sentence."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fullshard as fs
from fullshard import FullshardError, on_jax

VOCABULARY, DIM, LR = 64, 16, 1e-2
BATCH = {"input_ids": np.arange(64).reshape(8, 8) * 7 % 64, "labels": np.arange(64).reshape(8, 8) * 5 % 64}


class Stock(nnx.Module):
    """The example of docs/guides/jax.md, with layers whose settings are given."""

    def __init__(self, rngs, **settings):
        self.table = nnx.Embed(VOCABULARY, DIM, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(DIM, DIM, rngs=rngs, **settings) for _ in range(4)])
        self.head = nnx.Linear(DIM, VOCABULARY, rngs=rngs)

    def __call__(self, input_ids):
        x = self.table(input_ids)
        for block in self.blocks:
            x = x + nnx.gelu(block(x))
        return self.head(x)


class Mixed(nnx.Module):
    """Attention, norms, a convolution and a recurrent cell."""

    def __init__(self, rngs):
        self.table = nnx.Embed(VOCABULARY, DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, DIM, decode=False, rngs=rngs)
        self.norm, self.statistics = nnx.LayerNorm(DIM, rngs=rngs), nnx.BatchNorm(DIM, rngs=rngs)
        self.convolution = nnx.Conv(DIM, DIM, (3,), rngs=rngs)
        self.cell = nnx.RNN(nnx.LSTMCell(DIM, DIM, rngs=rngs))
        self.head = nnx.Linear(DIM, VOCABULARY, rngs=rngs)

    def __call__(self, input_ids):
        x = self.table(input_ids)
        x = x + self.attention(self.norm(x))
        return self.head(self.cell(self.convolution(self.statistics(x))))


class Block(nnx.Module):
    """A layer with weights and a product of its own."""

    def __init__(self, rngs):
        self.up = nnx.Param(0.3 * jax.random.normal(rngs.params(), (DIM, DIM)))
        self.scale = 1.0

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up[...]) * self.scale

    def apply(self, x):
        return {"x": self(x), "name": "block"}

    def rescale(self, scale):
        self.scale = scale


class Own(nnx.Module):
    """Blocks called by a method. `how`: what it does otherwise."""

    def __init__(self, rngs, how="methods"):
        self.how, self.table = how, nnx.Embed(VOCABULARY, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        self.head = None if how in ("tied", "outside") else nnx.Linear(DIM, VOCABULARY, rngs=rngs)

    def __call__(self, input_ids):
        x = self.table(input_ids)
        if self.how == "wide":
            x = x * np.ones(DIM, np.float32)
        for block in self.blocks:
            block.rescale(0.5)
            x = block(x) if self.how == "calls" else block.apply(x)["x"]
        if self.how == "outside":
            return x @ self.table.embedding[...].T
        return self.table.attend(x) if self.head is None else self.head(x)


def sharded(make, compute="fp32", **common) -> on_jax.State:
    precision = fs.Precision(compute=compute)
    plan = fs.zero3(on_jax.describe(make), devices=8, batch=fs.Batch(1, 8), precision=precision, **common)
    return on_jax.shard(make, plan, fs.AdamW(lr=LR, weight_decay=0.01, decay_all=True))


def products(state) -> list[set[str]]:
    """The dtypes of what each product of the traced step multiplies, forward and backward."""
    found: list[set[str]] = []

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
                found.append({str(v.aval.dtype) for v in eqn.invars})
            for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    look(inner)

    arguments = {}
    original = jax.stages.Traced.lower

    def kept(self, *args, **kwargs):
        arguments["jaxpr"] = self.jaxpr
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Traced, "lower", kept)
        on_jax.lowered_step(state, [BATCH])
    look(arguments["jaxpr"].jaxpr)
    return found


def unsharded(make, steps: int) -> list[float]:
    """The same training by Flax and Optax alone, on one device."""
    graph, params, rest = nnx.split(make(nnx.Rngs(jax.random.key(0))), nnx.Param, ...)
    transformation = optax.adamw(LR, weight_decay=0.01)

    @jax.jit
    def step(params, moments):
        def loss(params):
            logits = nnx.merge(graph, params, rest)(BATCH["input_ids"]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, BATCH["labels"]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = transformation.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    moments, found = transformation.init(params), []
    for _ in range(steps):
        params, moments, value = step(params, moments)
        found.append(float(value))
    return found


def losses(state, steps: int) -> list[float]:
    return [float(on_jax.train_step(state, [BATCH]).loss) for _ in range(steps)]


@pytest.mark.parametrize(("compute", "name"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_stock_layers_compute_in_the_dtype_of_the_plan(compute, name):
    state = sharded(Stock, compute)
    assert products(state) == [{name}] * 15
    assert {p.dtype.name for p in state.params.values()} == {"float32"}


def test_losses_are_those_of_layers_with_the_dtype():
    def told(rngs):
        model = Stock(rngs, dtype=jnp.bfloat16)
        model.table.dtype = model.head.dtype = jnp.bfloat16
        return model

    assert losses(sharded(Stock, "bf16"), 3) == pytest.approx(unsharded(told, 3), rel=2e-3)


def test_all_kinds_of_stock_layers():
    state = sharded(Mixed, "bf16")
    assert np.isfinite(losses(state, 1)).all()
    found = products(state)
    assert {"float32"} not in found  # attention's softmax is in fp32, so some gradients multiply it with what is not
    assert found.count({"bfloat16"}) > len(found) * 3 / 4


def test_blocks_may_be_called_by_any_method():
    """They are gathered, freed and computed again as if they were called: the compiled step moves what the schedule says."""
    state = sharded(Own, remat="full")
    assert losses(state, 2) == pytest.approx(unsharded(Own, 2), rel=1e-6)
    assert on_jax.check_collectives(state, [BATCH]).differences == ()
    lowered = {how: sharded(lambda rngs, how=how: Own(rngs, how), remat="full") for how in ("methods", "calls")}
    texts = {how: on_jax.lowered_step(state, [BATCH]).as_text() for how, state in lowered.items()}
    assert texts["methods"].count("stablehlo.tanh") == texts["calls"].count("stablehlo.tanh") == 2 * 3
    tied = lambda rngs: Own(rngs, "tied")
    assert losses(sharded(tied), 2) == pytest.approx(unsharded(tied, 2), rel=1e-6)


def test_what_cannot_be_made_so_is_refused():
    cases = {
        "blocks.0 was made with dtype=bfloat16, but the plan computes in float32: leave its dtype out, or write": lambda: sharded(
            lambda rngs: Stock(rngs, dtype=jnp.bfloat16)
        ),
        "blocks.0 was made with dtype=float32, but the plan computes in bfloat16": lambda: sharded(
            lambda rngs: Stock(rngs, dtype=jnp.float32), "bf16"
        ),
        "but 3 of 4 products are not so, first that of blocks.0.up (test_computed_as_planned.py": lambda: losses(
            sharded(lambda rngs: Own(rngs, "wide"), "bf16"), 1
        ),
        "the weight is read outside the calls of its module, where it is not cast": lambda: losses(
            sharded(lambda rngs: Own(rngs, "outside"), "bf16"), 1
        ),
    }
    for sentence, call in cases.items():
        with pytest.raises(FullshardError) as caught:
            call()
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_is_meant_otherwise_is_noted():
    exact = lambda rngs: Stock(rngs, dtype=jnp.float32, precision="highest")
    state = sharded(exact, "bf16")
    assert losses(state, 1)
    assert state.notes == ("4 of 5 products are computed in float32, as their precision='highest' says",)
    outside = sharded(lambda rngs: Own(rngs, "outside"))
    assert losses(outside, 2) == pytest.approx(unsharded(lambda rngs: Own(rngs, "tied"), 2), rel=1e-6)
    assert outside.notes[:2] == (
        "table.embedding is read outside the calls of its module: XLA decides when it is gathered and freed",
        "the compiled step keeps 4.00 KiB of gathered parameters from forward to backward, which the plan frees: those read "
        "outside the calls of their modules",
    )


class Layer(nnx.Module):
    def __init__(self, rngs, names):
        self.names = names
        setattr(self, names[0], nnx.Linear(DIM, 4 * DIM, rngs=rngs))
        setattr(self, names[1], nnx.Linear(4 * DIM, DIM, rngs=rngs))

    def __call__(self, x):
        up, down = (getattr(self, name) for name in self.names)
        return x + down(nnx.gelu(up(x)))


class Layers(nnx.Module):
    """Linear layers of NNX, whose kernels are (in, out), with names of a Llama's or others."""

    def __init__(self, rngs, names=("up_proj", "down_proj")):
        self.embed_tokens = nnx.Embed(VOCABULARY, DIM, rngs=rngs)
        self.layers = nnx.List([Layer(rngs, names) for _ in range(2)])
        self.lm_head = nnx.Linear(DIM, VOCABULARY, rngs=rngs)

    def __call__(self, input_ids):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def test_a_tensor_axis_splits_what_kernels_count():
    described = on_jax.describe(Layers)
    plan = fs.zero3(described, devices=8, tensor=2, batch=fs.Batch(2, 8), precision=fs.Precision(compute="fp32"))
    state = on_jax.shard(Layers, plan, fs.AdamW(lr=LR, weight_decay=0.01, decay_all=True))
    split = {n: p.gathered.shard_shape(state.params[n].shape) for n, p in state.shardings.parameters.items()}
    assert split["layers.0.up_proj.kernel"] == (DIM, 2 * DIM)
    assert split["layers.0.up_proj.bias"] == (2 * DIM,)
    assert split["layers.0.down_proj.kernel"] == (2 * DIM, DIM)
    assert split["layers.0.down_proj.bias"] == (DIM,)
    assert split["lm_head.kernel"] == (DIM, VOCABULARY // 2)
    assert losses(state, 2) == pytest.approx(unsharded(Layers, 2), rel=1e-5)
    other = lambda rngs: Layers(rngs, ("grow", "shrink"))
    with pytest.raises(FullshardError, match=r"unit layers.0: mesh.tensor = 2 splits none of its weights, as layers.0.grow"):
        on_jax.shard(other, replace(plan, units=fs.zero3(on_jax.describe(other), devices=8, tensor=2).units))


class Averaged(nnx.Module):
    """A layer with an average of its weights beside them."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(DIM, DIM, rngs=rngs)
        self.average, self.dropout = nnx.Variable(jnp.zeros((DIM, DIM))), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.layer(x))


def test_variables_that_are_no_parameters_are_counted_and_noted():
    state = on_jax.shard(Averaged, fs.zero3(on_jax.describe(Averaged), devices=8))
    assert state.held_bytes() == {"params": (DIM + 1) * DIM * 4 // 8, "optimizer": 0, "variables": 4 * DIM * DIM + 2 * 4 + 4}
    assert state.notes == ("average is no parameter: 1.00 KiB stay whole on every device",)


def test_bytes_of_variables_are_those_of_the_compiled_step():
    """By XLA's count of the step's arguments: weights, variables that lie whole on every device, rows and two numbers."""
    plan = fs.zero3(on_jax.describe(Averaged), devices=8, batch=fs.Batch(1, 1), precision=fs.Precision(compute="fp32"))
    state = on_jax.shard(Averaged, plan, fs.SGD(lr=LR))
    squares = lambda model, x: on_jax.Loss((model(x) ** 2).sum(), 8)
    found = on_jax.memory_analysis(state, [np.ones((8, DIM), np.float32)], loss=squares)
    assert state.held_bytes()["variables"] == 4 * DIM * DIM + 2 * 4 + 4
    assert sum(found.held.values()) == sum(found.arguments) == sum(state.held_bytes().values()) + 4 * DIM + 8


class Attending(nnx.Module):
    """Attention whose keys have a bias: it changes no score, so its gradient is zero but for rounding."""

    def __init__(self, rngs):
        self.table, self.head = nnx.Embed(VOCABULARY, DIM, rngs=rngs), nnx.Linear(DIM, VOCABULARY, rngs=rngs)
        self.blocks = nnx.List([nnx.MultiHeadAttention(2, DIM, decode=False, rngs=rngs) for _ in range(2)])

    def __call__(self, input_ids):
        x = self.table(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def counted_loss(model, batch):
    """The mean over some tokens: how many, only the loss tells."""
    counts = batch["labels"] % 3 > 0
    each = optax.softmax_cross_entropy_with_integer_labels(model(batch["input_ids"]), batch["labels"])
    return on_jax.Loss((each * counts).sum(), counts.sum())


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.full)])
def test_a_loss_that_tells_its_count_may_be_accumulated(optimizer):
    """One step of SGD shows that all gradients are those of the unsharded model. Under Adam some elements differ all the same,
    all of them where the gradient is zero but for rounding, as of biases of keys: Adam divides what rounding leaves by itself and
    eps. With an eps above that, none differs."""
    draw = np.random.default_rng(0)
    rows = {"input_ids": draw.integers(0, VOCABULARY, (24, 8)), "labels": draw.integers(0, VOCABULARY, (24, 8))}
    gradients, params = whole_gradients(rows)
    slopes = flat_arrays(gradients)
    differing = partial(differing_gradients, rows, gradients, params)
    if optimizer == "sgd":
        keys = {".".join(map(str, path)) for path, g in slopes.items() if np.abs(g).max() < 1e-8}
        assert keys == {f"blocks.{i}.key.bias" for i in range(2)}
        assert differing(fs.SGD(lr=1.0), optax.sgd(1.0)).size == 0
        return
    adam = lambda eps: differing(fs.AdamW(lr=LR, eps=eps, weight_decay=0.0), optax.adam(LR, eps=eps))
    small = adam(1e-8)
    assert small.size >= DIM
    assert small.max() < 1e-6
    assert adam(1e-5).size == 0


def whole_gradients(rows) -> tuple[Any, Any]:
    """Of the unsharded model, and its parameters."""
    graph, params, rest = nnx.split(Attending(nnx.Rngs(jax.random.key(0))), nnx.Param, ...)

    def mean(params):
        found = counted_loss(nnx.merge(graph, params, rest), rows)
        return found.sum / found.count

    return jax.jit(jax.grad(mean))(params), params


def flat_arrays(tree) -> dict:
    return {path: np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(tree)}


def differing_gradients(rows, gradients, params, optimizer, transformation) -> np.ndarray:
    """The gradients of all elements that one step of the optimizer on shards, of three micro-batches, leaves elsewhere than Optax
    does on the whole model."""
    parts = [{k: v[i : i + 8] for k, v in rows.items()} for i in (0, 8, 16)]
    shape = fs.Batch(1, 8, 3)
    plan = fs.zero3(on_jax.describe(Attending), devices=8, batch=shape, precision=fs.Precision(compute="fp32"))
    state = on_jax.shard(Attending, plan, optimizer)
    on_jax.train_step(state, parts, loss=counted_loss)
    updates, _ = transformation.update(gradients, transformation.init(params), params)
    wanted, slopes = flat_arrays(optax.apply_updates(params, updates)), flat_arrays(gradients)
    found = [slopes[path][np.abs(state.params[n] - wanted[path]) > 1e-6] for n, path in state.paths.items()]
    return np.abs(np.concatenate(found))
