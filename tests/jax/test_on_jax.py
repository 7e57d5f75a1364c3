"""The JAX engine on eight simulated devices: sharded equals unsharded, and bytes are those of the plan."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fullshard as fs
from fullshard import FullshardError, on_jax
from fullshard.model.presets import GPTSize, LlamaSize
from fullshard.on_jax.model.built_in import NnxGPT, NnxLlama

LLAMA = LlamaSize(32, 2, 4, 2, 64, 64, 128)
GPT = GPTSize(16, 2, 2, 64, 64)
FP32 = fs.Precision(compute="fp32")
STEPS, ROWS, LR, CLIP = 4, 32, 1e-2, 0.5
STRATEGIES = {
    "ddp": {"devices": 8},
    "zero1": {"devices": 8},
    "zero2": {"devices": 8},
    "zero3": {"devices": 8},
    "hybrid": {"replicate": 2, "shard": 4},
    "mixed": {"devices": 8, "replicate": ["embed"]},
}


def llama(rngs: nnx.Rngs, tied: bool = False) -> nnx.Module:
    return NnxLlama(replace(LLAMA, tied=tied), rngs=rngs)


def gpt(rngs: nnx.Rngs) -> nnx.Module:
    return NnxGPT(GPT, rngs=rngs)


def batch(seed: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, 64, (rows, 13))
    labels = ids[:, 1:].copy()
    for row in range(rows):
        labels[row, : row % 5] = -100  # unequal rows
    return {"input_ids": ids[:, :-1], "labels": labels}


def unsharded(make, steps: int = STEPS) -> list[float]:
    """The same training with JAX and Optax alone, on one device: the oracle."""
    graph, params, rest = nnx.split(make(nnx.Rngs(jax.random.key(0))), nnx.Param, ...)
    transformation = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LR, weight_decay=0.01))

    @jax.jit
    def step(params, moments, batch):
        def loss(params):
            logits = nnx.merge(graph, params, rest)(batch["input_ids"])
            counted = batch["labels"] != -100
            found = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, batch["labels"], 0))
            return (found * counted).sum() / counted.sum()

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = transformation.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    moments, found = transformation.init(params), []
    for index in range(steps):
        params, moments, value = step(params, moments, batch(index))
        found.append(float(value))
    return found


@pytest.fixture(scope="module")
def wanted():
    known: dict = {}

    def get(name: str) -> list[float]:
        if name not in known:
            known[name] = unsharded(MODELS[name])
        return known[name]

    return get


MODELS = {"plain": llama, "tied": partial(llama, tied=True), "gpt": gpt}


def make_plan(make, strategy: str, accumulate: int = 1, **common) -> fs.Plan:
    common = {"precision": FP32, **common}
    described = on_jax.describe(make)
    data = 8 // common.get("tensor", 1)
    shape = fs.Batch(ROWS // data // accumulate, 12, accumulate)
    arguments = STRATEGIES[strategy]
    if strategy == "hybrid" and "tensor" in common:
        arguments = {"replicate": 2, "shard": 2}
    return fs.strategy(strategy, described, **arguments, batch=shape, **common)


def train(make, plan: fs.Plan, loss=on_jax.summed_loss, steps: int = STEPS) -> tuple[list[float], on_jax.State]:
    state = on_jax.shard(make, plan, fs.AdamW(lr=LR, weight_decay=0.01, decay_all=True))
    found, size = [], ROWS // plan.batch.accumulate
    for index in range(steps):
        whole = batch(index)
        parts = [{k: v[i * size : (i + 1) * size] for k, v in whole.items()} for i in range(plan.batch.accumulate)]
        found.append(float(on_jax.train_step(state, parts, loss=loss, clip=CLIP).loss))
    return found, state


QUICK = [("hybrid", "full", 1, "tied"), ("zero1", "selective", 4, "plain")]
GRID = [
    pytest.param(s, r, a, m, marks=() if (s, r, a, m) in QUICK else pytest.mark.full)
    for s in STRATEGIES
    for r in ("none", "selective", "full")
    for a in (1, 4)
    for m in ("plain", "tied")
    if not (s == "mixed" and m == "tied")
]


@pytest.mark.parametrize(("strategy", "remat", "accumulate", "kind"), GRID)
def test_sharded_is_unsharded(wanted, strategy, remat, accumulate, kind):
    found, state = train(MODELS[kind], make_plan(MODELS[kind], strategy, accumulate, remat=remat))
    assert found == pytest.approx(wanted(kind), rel=1e-6)
    assert on_jax.compilations(state) == 1
    assert state.notes == ()


@pytest.mark.parametrize("strategy", ["hybrid", pytest.param("zero3", marks=pytest.mark.full)])
def test_a_tensor_axis(wanted, strategy):
    found, state = train(llama, make_plan(llama, strategy, tensor=2))
    assert found == pytest.approx(wanted("plain"), abs=5e-6)
    spec = state.params["model.layers.0.mlp.gate_proj.weight"].sharding.spec
    assert tuple(spec) == ("tensor", "shard")


def test_gpt_and_the_chunked_loss(wanted, monkeypatch):
    monkeypatch.setattr("fullshard.on_jax.model.chunked_cross_entropy.BUDGET", 4000)
    found, _ = train(gpt, make_plan(gpt, "zero3", remat="full"), loss=on_jax.chunked_loss)
    assert found == pytest.approx(wanted("gpt"), abs=2e-6)


@pytest.mark.parametrize("strategy", ["hybrid", *(pytest.param(s, marks=pytest.mark.full) for s in ("ddp", "zero1", "zero3"))])
def test_norms_of_units_are_those_of_the_unsharded_model(strategy):
    """The first step's gradients by JAX alone, added up by the modules that the units are made of."""
    graph, params, rest = nnx.split(llama(nnx.Rngs(jax.random.key(0))), nnx.Param, ...)
    whole = batch(0)

    def loss(params):
        logits, counted = nnx.merge(graph, params, rest)(whole["input_ids"]), whole["labels"] != -100
        found = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, whole["labels"], 0))
        return (found * counted).sum() / counted.sum()

    squares: dict[str, float] = {}
    for path, grad in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params)):
        unit = re.search(r"layers\W+(\d)|(embed_tokens)", jax.tree_util.keystr(path))
        name = "head" if unit is None else "embed" if unit[2] else f"model.layers.{unit[1]}"
        squares[name] = squares.get(name, 0.0) + float((grad**2).sum())
    state = on_jax.shard(llama, make_plan(llama, strategy), fs.AdamW(lr=LR))
    result = on_jax.train_step(state, [whole], clip=CLIP, unit_norms=True)
    found = {unit: float(norm) for unit, norm in result.unit_norms.items()}
    assert list(found) == ["embed", "model.layers.0", "model.layers.1", "head"]
    assert found == pytest.approx({unit: square**0.5 for unit, square in squares.items()}, rel=1e-5)
    assert result.numbers()[4:] == list(found.values())
    assert on_jax.train_step(state, [batch(1)], clip=CLIP).unit_norms == {}


# -- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy", [s if s in ("hybrid", "mixed") else pytest.param(s, marks=pytest.mark.full) for s in STRATEGIES]
)
def test_bytes_of_a_device_are_those_of_the_plan(strategy):
    plan = make_plan(llama, strategy)
    state = on_jax.shard(llama, plan, fs.AdamW(lr=LR))
    described = on_jax.describe(llama)
    layouts = {u.name: u.layout for u in plan.units}
    share = lambda unit: 1 if layouts[unit] == "replicated" else plan.mesh.shard
    params = sum(4 * p.numel // share(u.name) for u in described.units for p in u.parameters)
    assert state.held_bytes() == {"params": params, "optimizer": 2 * params + 4}  # Optax counts steps in 4 bytes


def test_initial_values_depend_on_the_seed_alone():
    one = on_jax.shard(llama, fs.ddp(on_jax.describe(llama), devices=1), seed=3)
    eight = on_jax.shard(llama, make_plan(llama, "zero3"), seed=3)
    for name, value in one.params.items():
        assert np.array_equal(value, eight.params[name]), name


def test_backward_gathers_again_only_where_the_plan_frees():
    """Counted in the compiled program: a freed parameter is gathered in forward and in backward. The gradient of an embedding
    does not need it."""
    gathers, make = {}, lambda rngs: NnxLlama(replace(LLAMA, layers=1), rngs=rngs)
    for strategy in ("ddp", "zero2", "zero3"):
        state = on_jax.shard(make, make_plan(make, strategy), fs.AdamW(lr=LR))
        gathers[strategy] = len(re.findall(r"= \S+ all-gather\(", on_jax.lowered_step(state, [batch(0)]).compile().as_text()))
    count = len(state.params)
    assert gathers == {"ddp": 0, "zero2": count, "zero3": 2 * count - 1}


def test_what_stays_whole_is_listed():
    make = lambda rngs: NnxLlama(replace(LLAMA, vocab=63, dim=28, heads=4, ffn=30), rngs=rngs)
    state = on_jax.shard(make, fs.zero3(on_jax.describe(make), devices=8), fs.AdamW(lr=LR))
    assert any("stays whole on every device: no dim of 28 is divisible by mesh.shard = 8" in note for note in state.notes)


# -- other models, other losses ------------------------------------------------------------------------------------


class Classifier(nnx.Module):
    """A network with statistics of batches."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return self.out(self.norm(x))


def class_loss(model, batch):
    x, y = batch
    logits = model(x)
    total = optax.softmax_cross_entropy_with_integer_labels(logits, y).sum()
    return on_jax.Loss(total, y.size, {"accuracy": (logits.argmax(-1) == y).sum()})


def test_any_module_any_batch_any_loss():
    draw = np.random.default_rng(0)
    rows = (draw.normal(size=(16, 8)).astype(np.float32), draw.integers(0, 3, 16))
    found = {}
    for devices in (1, 8):
        plan = fs.zero3(on_jax.describe(Classifier), devices=devices, batch=fs.Batch(16 // devices, 1), precision=FP32)
        state = on_jax.shard(Classifier, plan, fs.SGD(lr=0.1, momentum=0.9))
        results = [on_jax.train_step(state, [rows], loss=class_loss) for _ in range(5)]
        statistics = nnx.state(state.model, nnx.BatchStat)
        found[devices] = [float(r.loss) for r in results], float(results[-1].metrics["accuracy"]), jax.tree.leaves(statistics)
    assert found[8][0] == pytest.approx(found[1][0], abs=1e-6)
    assert found[8][0][-1] < found[8][0][0]
    assert found[8][1] == found[1][1]
    for one, eight in zip(found[1][2], found[8][2], strict=True):
        np.testing.assert_allclose(one, eight, atol=1e-6)
        assert np.abs(np.asarray(one)).sum() > 0


def test_zero1_adds_gradients_up_in_fp32():
    """In bf16 compute, its gradients are those of zero3, which reduces each micro-batch in fp32."""
    norms, make = {}, lambda rngs: NnxLlama(replace(LLAMA, layers=1), rngs=rngs)
    for strategy in ("zero1", "zero3"):
        state = on_jax.shard(make, make_plan(make, strategy, 2, precision=fs.Precision(compute="bf16")), fs.AdamW(lr=LR))
        parts = [{k: v[i * 8 : i * 8 + 8] for k, v in batch(0).items()} for i in range(2)]
        norms[strategy] = float(on_jax.train_step(state, parts).grad_norm)
        assert {m.dtype for m in jax.tree.leaves(state.moments[0].mu)} == {jnp.dtype(jnp.float32)}
    assert norms["zero1"] == pytest.approx(norms["zero3"], rel=1e-4)


def test_a_step_that_is_not_finite_changes_nothing():
    state = on_jax.shard(llama, make_plan(llama, "zero3"), fs.AdamW(lr=LR))
    before = {n: np.asarray(p) for n, p in state.params.items()}
    scaled = lambda model, batch: on_jax.Loss(on_jax.summed_loss(model, batch[0]).sum * batch[1].mean(), 1.0)
    step = lambda factor: on_jax.train_step(state, [(batch(0), np.full(ROWS, factor, np.float32))], loss=scaled)
    assert bool(step(np.nan).skipped)
    assert all(np.array_equal(before[n], p) for n, p in state.params.items())
    assert not bool(step(1.0).skipped)


def test_bf16_compute_keeps_fp32_weights(wanted):
    seen = []

    def loss(model, batch):
        seen.append(model(batch["input_ids"]).dtype)
        return on_jax.summed_loss(model, batch)

    tied = MODELS["tied"]
    found, state = train(tied, make_plan(tied, "zero3", precision=fs.Precision(compute="bf16")), loss)
    assert found == pytest.approx(wanted("tied"), rel=0.02)
    assert {p.dtype for p in state.params.values()} == {jnp.dtype(jnp.float32)}
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}  # the tied head computes in bf16, too


# -- bad input -----------------------------------------------------------------------------------------------------


def test_bad_input_is_a_sentence():
    described = on_jax.describe(llama)
    plan = make_plan(llama, "zero3")
    state = on_jax.shard(llama, plan, fs.AdamW(lr=LR))
    reads = lambda rngs: NnxLlama(replace(LLAMA, dim=int(jax.random.key_data(rngs.params())[0])), rngs=rngs)
    deeper = lambda rngs: NnxLlama(replace(LLAMA, layers=3), rngs=rngs)
    late = fs.Batch(1, 12, 2, "last")
    cases = {
        "but JAX has 8 cpu devices; make the plan for 8": lambda: on_jax.shard(llama, fs.zero3(described, devices=16)),
        "it was made for another model": lambda: on_jax.shard(gpt, plan),
        "the model has no module model.layers.2": lambda: on_jax.shard(llama, fs.zero3(on_jax.describe(deeper), devices=8)),
        "reads values of its arrays while it is made": lambda: on_jax.describe(reads),
        "write lambda rngs: Model": lambda: on_jax.describe(NnxLlama(LLAMA, rngs=nnx.Rngs(0))),
        "return a flax.nnx.Module": lambda: on_jax.describe(lambda rngs: 3),
        "the JAX engine has no loss scaling": lambda: on_jax.shard(
            llama, make_plan(llama, "zero3", precision=fs.Precision("fp16"))
        ),
        "write True or False": lambda: on_jax.shard(llama, fs.hpz(described, devices=8, reshard=2)),
        "XLA schedules gathers itself": lambda: on_jax.shard(llama, make_plan(llama, "zero3", prefetch=fs.Prefetch(forward=2))),
        "after every micro-batch; write 'every'": lambda: on_jax.shard(llama, replace(plan, batch=late)),
        "is of torch; JAX has adamw, adam and sgd": lambda: on_jax.shard(llama, plan, fs.TorchOptimizer("RAdam", 1e-3)),
        "this state has no optimizer": lambda: on_jax.train_step(on_jax.shard(llama, plan), [batch(0)]),
        "2 micro-batches, but plan.batch.accumulate = 1": lambda: on_jax.train_step(state, [batch(0), batch(1)]),
        "a micro-batch of 3 rows cannot be spread over 8 devices": lambda: on_jax.train_step(state, [batch(0, rows=3)]),
        "return on_jax.Loss(sum, count)": lambda: on_jax.train_step(state, [batch(0)], loss=lambda m, b: 3.0),
        "clip must be a number above 0": lambda: on_jax.train_step(state, [batch(0)], clip=-1.0),
    }
    for sentence, call in cases.items():
        with pytest.raises(FullshardError) as caught:
            call()
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)
