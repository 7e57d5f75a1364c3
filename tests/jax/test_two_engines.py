"""One plan, two engines: from the same weights, torch on four ranks and JAX on four devices give the same losses."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

import fullshard as fs
from fullshard import FullshardError, on_jax
from fullshard.on_jax.model.built_in import NnxLlama
from tests.cpu.ranks import Ranks
from tests.jax import torch_side
from tests.jax.test_on_jax import LLAMA, batch, llama

LR, CLIP, STEPS = 1e-2, 0.5, 20


@pytest.fixture
def weights(tmp_path):
    state = on_jax.shard(llama, fs.ddp(on_jax.describe(llama), devices=1), seed=5)
    save_file({name: np.asarray(value) for name, value in state.params.items()}, tmp_path / "model.safetensors")
    return tmp_path


def test_torch_and_jax_give_the_same_losses(weights):
    batches = [batch(i % 4) for i in range(STEPS)]
    ranks = Ranks(4)
    try:
        (wanted, names), *_ = ranks.run(torch_side.losses, LLAMA, str(weights), batches, LR, CLIP)
    finally:
        ranks.stop()
    plan = fs.zero3(on_jax.describe(llama), devices=4, batch=fs.Batch(4, 12), precision=fs.Precision(compute="fp32"))
    state = on_jax.shard(llama, plan, fs.AdamW(lr=LR), weights=weights)
    found = [float(on_jax.train_step(state, [b], clip=CLIP).loss) for b in batches]
    assert sorted(state.params) == sorted(names)
    assert found == pytest.approx(wanted, abs=1e-5)
    assert wanted[-1] < wanted[0] - 0.5


def test_files_of_another_model_are_refused(weights):
    deeper = lambda rngs: NnxLlama(replace(LLAMA, layers=3), rngs=rngs)
    wider = lambda rngs: NnxLlama(replace(LLAMA, vocab=72), rngs=rngs)
    shallow = lambda rngs: NnxLlama(replace(LLAMA, layers=1), rngs=rngs)
    for make, sentence in (
        (deeper, "has no tensor for model.layers.2"),
        (wider, "the model's is [72, 32]: it holds another model"),
        (shallow, "has model.layers.1.input_layernorm.weight, which this model lacks"),
    ):
        with pytest.raises(FullshardError) as caught:
            on_jax.shard(make, fs.zero3(on_jax.describe(make), devices=8), weights=weights)
        assert sentence in str(caught.value)
