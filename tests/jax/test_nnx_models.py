"""The models that the JAX engine loads compute what transformers computes."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
import transformers.modeling_rope_utils
from flax import nnx
from safetensors.numpy import load_file, save_file

import fullshard as fs
from fullshard import FullshardError, on_jax
from fullshard.engine.model import ModelFacts
from fullshard.model.presets import PRESETS
from fullshard.on_jax.model.built_in.nnx_attention import attend, document_numbers
from fullshard.on_jax.model.built_in.rope import frequencies
from fullshard.on_jax.model.loading import model_loading
from fullshard.on_jax.model.loading.hf_config import FAMILIES, read_size
from fullshard.on_jax.model.module_tree import parameter_names
from fullshard.on_jax.model.read_weights import WeightFiles

GENERATE, SHARD = sys.modules["fullshard.on_jax.step.generate"], sys.modules["fullshard.on_jax.parallelize.shard"]
FP32 = fs.Precision(compute="fp32")
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
SMALL = {
    **NO_TOKENS,
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SCALED = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL, pad_token_id=3),
    "llama3": transformers.LlamaConfig(
        **SMALL,
        attention_bias=True,
        mlp_bias=True,
        head_dim=16,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED},
    ),
    "linear": transformers.LlamaConfig(**SMALL, hidden_act="gelu", rope_parameters={"rope_type": "linear", **SCALED}),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=None, rope_parameters={"rope_type": "yarn", **SCALED}),
    "qwen2": transformers.Qwen2Config(**SMALL, rms_norm_eps=1e-3),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=24, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(
        **NO_TOKENS,
        vocab_size=96,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        scale_attn_by_inverse_layer_idx=True,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}
IDS = np.random.default_rng(0).integers(0, 96, (8, 12))
LABELS = np.where(np.random.default_rng(1).random((8, 12)) < 0.2, -100, np.random.default_rng(2).integers(0, 96, (8, 12)))
POSITIONS = np.stack([np.concatenate([np.arange(5 - i % 3), np.arange(1), np.arange(6 + i % 3)]) for i in range(8)])


def torch_model(config) -> transformers.PreTrainedModel:
    """A transformers model in which no parameter has its initial value: norms are not 1, biases not 0."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The transformers model of a name, and the directory that it was saved in."""
    known: dict = {}

    def get(name: str) -> tuple[transformers.PreTrainedModel, Path]:
        if name not in known:
            model, where = torch_model(CONFIGS[name]), tmp_path_factory.mktemp(name)
            model.save_pretrained(where)
            known[name] = model, where
        return known[name]

    return get


def whole_logits(model, ids=IDS) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.float().numpy()


def logits_of_documents(model) -> np.ndarray:
    """Each document by itself."""
    found = np.zeros((*IDS.shape, 96), np.float32)
    for row, positions in enumerate(POSITIONS):
        starts = [*np.flatnonzero(positions == 0), positions.size]
        for a, b in pairwise(starts):
            found[row, a:b] = whole_logits(model, IDS[row : row + 1, a:b])
    return found


def loaded(where: Path, strategy=fs.zero3, precision=FP32, **mesh) -> on_jax.State:
    make = on_jax.load_model(str(where))
    plan = strategy(on_jax.describe(make), **(mesh or {"devices": 8}), batch=fs.Batch(1, 12), precision=precision)
    return on_jax.shard(make, plan, weights=where)


def compute(state: on_jax.State) -> list[np.ndarray]:
    """Logits, logits with documents, and the summed loss of those, in one compilation."""

    @jax.jit
    def run(params, rest):
        model = state.merge(params, rest)
        batch = {"input_ids": jnp.array(IDS), "labels": jnp.array(LABELS), "position_ids": jnp.array(POSITIONS)}
        apart = model(jnp.array(IDS), position_ids=jnp.array(POSITIONS))
        return model(jnp.array(IDS)), apart, on_jax.chunked_loss(model, batch).sum

    return [np.asarray(x) for x in run(state.params, state.rest)]


# -- the computation -----------------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_loss_are_those_of_transformers(saved, name):
    model, where = saved(name)
    state = loaded(where)
    logits, apart, found = compute(state)
    np.testing.assert_allclose(logits, whole_logits(model), atol=1e-5)
    wanted = logits_of_documents(model)
    np.testing.assert_allclose(apart, wanted, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(
        torch.from_numpy(wanted).flatten(0, 1), torch.from_numpy(LABELS).flatten(), reduction="sum"
    )
    assert float(found) == pytest.approx(float(loss), rel=1e-5)
    assert np.abs(apart - logits).max() > 1e-2  # documents matter


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_those_of_transformers(saved, name):
    model, where = saved(name)
    factory = on_jax.load_model(str(where))
    names = {n: tuple(p.shape) for n, p in model.state_dict().items()}
    assert {n for found in parameter_names(factory.model).values() for n in found} == set(names)
    assert {n: shape for n, shape, *_ in model_loading.parameters(factory)} == {n: names[n] for n, _ in model.named_parameters()}
    facts = model_loading.model_facts(factory)
    assert (facts.vocabulary, facts.longest) == (factory.vocabulary, factory.longest) == (96, 64)
    assert facts.takes_positions
    layers = "transformer.h" if name == "gpt2" else "model.layers"
    blocks = [u.name for u in on_jax.describe(factory).units if u.kind == "block"]
    assert blocks == [f"{layers}.0", f"{layers}.1"]


def test_gradients_are_those_of_torch(saved):
    """The padding token, 3, gets no gradient where it is looked up."""
    model, where = saved("llama")
    ids = np.where(IDS < 20, 3, IDS)
    state = loaded(where)
    loss = lambda params, batch: on_jax.summed_loss(state.merge(params, state.rest), batch).sum
    found = jax.jit(jax.grad(loss))(state.params, {"input_ids": jnp.array(ids), "labels": jnp.array(LABELS)})
    logits = model(torch.from_numpy(ids)).logits.flatten(0, 1)
    model.zero_grad()
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(LABELS).flatten(), reduction="sum").backward()
    for name, p in model.named_parameters():
        np.testing.assert_allclose(found[name], p.grad.numpy(), atol=2e-4, err_msg=name)
    assert not np.any(np.asarray(found["model.embed_tokens.weight"])[3])


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gpt2", marks=pytest.mark.full)])
def test_training_on_documents_is_that_of_torch(saved, name):
    """The oracle: transformers' own handling of position_ids, and torch's AdamW."""
    _, where = saved(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    stock = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    ids, labels, positions = (torch.from_numpy(x) for x in (IDS, LABELS, POSITIONS))
    wanted = []
    for _ in range(3):
        logits = model(ids, position_ids=positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        stock.zero_grad()
        loss.backward()
        stock.step()
        wanted.append(loss.item())
    make = on_jax.load_model(str(where))
    plan = fs.zero3(on_jax.describe(make), devices=8, batch=fs.Batch(1, 12), precision=FP32, remat="full")
    state = on_jax.shard(make, plan, fs.AdamW(lr=1e-2), weights=where)
    batch = {"input_ids": IDS, "labels": LABELS, "position_ids": POSITIONS}
    found = [float(on_jax.train_step(state, [batch], loss=on_jax.chunked_loss).loss) for _ in range(3)]
    assert found == pytest.approx(wanted, abs=1e-5)
    assert wanted[2] < wanted[0] - 0.5


ROPES = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0, "original_max_position_embeddings": 8192},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32_768},
    "yarn, mscale": {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3, "original_max_position_embeddings": 4096},
    "yarn, betas": {"factor": 16.0, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.25},
    "linear": {"factor": 3.0},
}


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_are_those_of_transformers(tmp_path, kind):
    rope = {"rope_type": kind.split(",")[0], "rope_theta": 500_000.0} | ROPES[kind]
    config = transformers.LlamaConfig(hidden_size=4096, max_position_embeddings=131_072, rope_parameters=rope)
    config.save_pretrained(tmp_path)
    size = read_size(tmp_path / "config.json")
    wanted, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    np.testing.assert_allclose(frequencies(size.head_dim, size.theta, size.rope), wanted.numpy(), rtol=2e-6)
    assert size.rope.cos_sin_factor == pytest.approx(factor)


def test_bf16_compute_and_bf16_files(tmp_path):
    torch_model(CONFIGS["qwen3"]).bfloat16().save_pretrained(tmp_path)
    state = loaded(tmp_path)
    assert {p.dtype for p in state.params.values()} == {jnp.dtype(jnp.float32)}
    exact = whole_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    np.testing.assert_allclose(compute(state)[0], exact, atol=1e-5)
    found = compute(loaded(tmp_path, precision=fs.Precision(compute="bf16")))[0].astype(np.float32)
    np.testing.assert_allclose(found, exact, atol=0.05 * np.abs(exact).max())


def test_a_tensor_axis_splits_biases_and_head_norms(saved):
    for name in ("qwen2", "qwen3"):
        model, where = saved(name)
        state = loaded(where, fs.hybrid, replicate=2, shard=2, tensor=2)
        np.testing.assert_allclose(compute(state)[0], whole_logits(model), atol=1e-5)
    make = on_jax.load_model(str(saved("gpt2")[1]))
    plan = fs.hybrid(on_jax.describe(make), replicate=2, shard=2, tensor=2)
    with pytest.raises(FullshardError, match=r"fused.*write mesh\.tensor = 1"):
        on_jax.shard(make, plan)


class KeepAll:
    """A dropout that drops nothing, so that attention with dropout can be compared."""

    rate, deterministic = 0.5, False

    def __call__(self, x):
        return x


def test_attention_with_dropout(tmp_path):
    draw = np.random.default_rng(0)
    q, k, v = (jnp.array(draw.normal(size=(2, 12, h, 8)), jnp.float32) for h in (4, 2, 2))
    documents = document_numbers(jnp.array(POSITIONS[:2]))
    plain, dropped = (attend(q, k, v, documents, scale=0.3, dropout=d) for d in (None, KeepAll()))
    np.testing.assert_allclose(plain, dropped, atol=1e-6)
    config = transformers.GPT2Config.from_dict(CONFIGS["gpt2"].to_dict() | {"attn_pdrop": 0.5})
    config.save_pretrained(tmp_path)
    model = on_jax.load_model(str(tmp_path))(nnx.Rngs(0))
    run = jax.jit(lambda m: m(jnp.array(IDS)))
    first = run(model)
    model.eval()
    assert np.abs(first - run(model)).max() > 1e-3
    assert np.array_equal(run(model), run(model))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["llama-nano", "gpt-nano"])
def test_presets_keep_documents_apart(name):
    model = on_jax.load_model(name)(nnx.Rngs(0))
    ids = jnp.array(IDS % 64)
    starts = [*np.flatnonzero(POSITIONS[0] == 0), 12]

    @jax.jit
    def run(model):
        alone = [model(ids[:1, a:b]) for a, b in pairwise(starts)]
        return model(ids[:1], position_ids=jnp.array(POSITIONS[:1])), jnp.concatenate(alone, 1)

    together, alone = run(model)
    np.testing.assert_allclose(together, alone, atol=1e-5)


# -- weights -------------------------------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch):
    """The weight files that `shard` reads."""
    found: list[WeightFiles] = []

    class Recorded(WeightFiles):
        def __init__(self, *args):
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(SHARD, "WeightFiles", Recorded)
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize(("strategy", "mesh"), [(fs.zero3, {"devices": 8}), (fs.hybrid, {"replicate": 2, "shard": 4})])
def test_several_files_are_read_once(saved, tmp_path, read, strategy, mesh):
    model, _ = saved("qwen2")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    state = loaded(tmp_path, strategy, **mesh)
    for name, p in model.named_parameters():
        assert np.array_equal(state.params[name], p.detach().numpy()), name
    assert read[0].files.bytes_read == 4 * sum(p.numel() for p in model.parameters())


def test_old_files_of_gpt2(saved, tmp_path):
    """As the hub has them: no prefix, no head, and buffers that today's models compute."""
    model, where = saved("gpt2")
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(where / "model.safetensors").items()}
    assert "lm_head.weight" not in tensors
    for i in range(2):
        tensors[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
        tensors[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    state = loaded(tmp_path)
    assert all(np.array_equal(state.params[n], p.detach().numpy()) for n, p in model.named_parameters())


def test_a_tied_head_in_the_files(saved, tmp_path):
    model, where = saved("qwen3")
    tensors = load_file(where / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    table = tensors.pop("model.embed_tokens.weight")
    for stored in (("lm_head.weight",), ("lm_head.weight", "model.embed_tokens.weight")):
        save_file(tensors | dict.fromkeys(stored, table), tmp_path / "model.safetensors")
        state = loaded(tmp_path)
        assert np.array_equal(state.params["model.embed_tokens.weight"], table)
        assert "lm_head.weight" not in state.params


PROCESS = """
import sys, jax
sys.modules["torch"] = sys.modules["transformers"] = None  # neither is needed
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import fullshard as fs
from fullshard import on_jax
from fullshard.on_jax.model import read_weights
kept = []
class Recorded(read_weights.WeightFiles):
    def __init__(self, *args):
        super().__init__(*args)
        kept.append(self)
sys.modules["fullshard.on_jax.parallelize.shard"].WeightFiles = Recorded
make = on_jax.load_model(sys.argv[3])
plan = fs.zero3(on_jax.describe(make), devices=4, precision=fs.Precision(compute="fp32"))
state = on_jax.shard(make, plan, weights=sys.argv[3])
tokens = on_jax.generate(state.model, [1, 2, 3], max_new_tokens=4, temperature=0)
print(kept[0].files.bytes_read, sum(s.data.nbytes for p in state.params.values() for s in p.addressable_shards), tokens)
"""


@pytest.mark.full
def test_each_process_reads_its_own_bytes(saved):
    model, where = saved("qwen2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(i), str(where)],
            env=os.environ | flags,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    half = 2 * sum(p.numel() for p in model.parameters())  # 4 bytes, half of them
    wanted = greedy(model, [1, 2, 3], 4)
    assert [p.communicate(timeout=240)[0].split("\n")[-2] for p in started] == [f"{half} {half} {wanted}"] * 2


# -- generation ----------------------------------------------------------------------------------------------------


def greedy(model, prompt: list[int], count: int) -> list[int]:
    found = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, use_cache=False)
    return found[0].tolist()


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_generation_is_that_of_transformers(saved, name):
    model, where = saved(name)
    state = loaded(where)
    before = GENERATE._next_token._cache_size()
    for prompt in ([5, 1, 7], [2], list(range(9))):
        found = on_jax.generate(state.model, prompt, max_new_tokens=7, temperature=0, window=64)
        assert found == greedy(model, prompt, 7)
    state.params = {n: p * 1.0 for n, p in state.params.items()}  # as after a step
    again = on_jax.generate(state.model, [5, 1, 7], max_new_tokens=7, temperature=0, window=64)
    assert again == greedy(model, [5, 1, 7], 7)
    assert GENERATE._next_token._cache_size() == before + 1
    ended = on_jax.generate(state.model, [5, 1, 7], max_new_tokens=7, temperature=0, stop=again[4])
    assert ended == again[: again.index(again[4], 3) + 1]


DRAWS = 400


def test_sampling_by_temperature(saved):
    model, where = saved("llama3")
    state = loaded(where, fs.ddp, devices=1)
    draw = lambda seed, temperature: on_jax.generate(
        state.model, [5, 1, 7], max_new_tokens=8, temperature=temperature, seed=seed, window=16
    )
    assert draw(1, 1.0) == draw(1, 1.0)
    assert draw(1, 1.0) != draw(2, 1.0)
    assert draw(1, 1e-4) == greedy(model, [5, 1, 7], 8)
    first = [on_jax.generate(state.model, [5, 1, 7], max_new_tokens=1, seed=s, window=16)[-1] for s in range(DRAWS)]
    with torch.no_grad():
        chances = torch.softmax(model(torch.tensor([[5, 1, 7]])).logits[0, -1], -1).numpy()
    seen = np.bincount(first, minlength=96) / DRAWS
    assert np.all(np.abs(seen - chances) < 5 * np.sqrt(chances / DRAWS) + 1 / DRAWS)  # five standard deviations


def test_a_window_of_context(saved):
    """The fourth token is chosen from the last three alone."""
    model, where = saved("gpt2")
    state = loaded(where, fs.ddp, devices=1)
    tokens = on_jax.generate(state.model, [5, 1, 7, 30, 8], max_new_tokens=4, temperature=0, window=3)
    for i in range(5, 9):
        assert tokens[i] == greedy(model, tokens[i - 3 : i], 1)[-1]


# -- configs and names ---------------------------------------------------------------------------------------------


def test_defaults_are_those_of_transformers():
    for kind, family in FAMILIES.items():
        config = transformers.AutoConfig.for_model(kind)
        own = {f.name: f.default for f in fields(config)}
        for key, value in family.defaults.items():
            assert own[key] == value, f"{kind}: {key}"
        assert transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__ == family.architecture


def test_old_and_new_spellings_of_a_config(tmp_path):
    path = tmp_path / "config.json"
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0, "original_max_position_embeddings": 16}
    new = SMALL | {"model_type": "llama", "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    old = SMALL | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    sizes = []
    for config in (new, old):
        path.write_text(json.dumps(config))
        sizes.append(read_size(path))
    assert sizes[0] == sizes[1]
    assert sizes[0].theta == 5e5
    path.write_text(json.dumps({"model_type": "gpt2", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}))
    assert (read_size(path).dim, read_size(path).layers, read_size(path).ffn) == (32, 1, 128)


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_the_names_of_its_description(name):
    described = fs.presets.describe(name)
    found = {n: shape for n, shape, *_ in model_loading.parameters(on_jax.load_model(name))}
    assert found == {t.name: t.shape for u in described.units for t in u.parameters}


MODEL_FILE = """
import jax.numpy as jnp
from flax import nnx
from fullshard.model.presets import PRESETS
from fullshard.on_jax import Loss
from fullshard.on_jax.model.built_in import NnxLlama

def make(rngs):
    print("made")
    return NnxLlama(PRESETS["llama-nano"], rngs=rngs)

def halved(model, batch):
    return model(batch["input_ids"]) / 2

def own_loss(model, batch):
    return Loss(halved(model, batch).sum(), 1.0)

def few(model, batch):
    return model(batch["input_ids"])[:, -1]

def no_rngs():
    return make(nnx.Rngs(0))

def number(rngs):
    return 3

def broken(rngs):
    raise KeyError("lost")

size = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(MODEL_FILE)
    return path


def initial_logits(make) -> np.ndarray:
    """The logits of a model with its initial values, on one device."""
    return np.array(jax.jit(lambda: make(nnx.Rngs(jax.random.key(0)))(jnp.array(IDS % 64)))())


def test_a_model_and_a_call_of_a_file(file, capsys):
    batch = {"input_ids": IDS % 64, "labels": LABELS % 64}
    make = on_jax.load_model(f"{file}:make", call=f"{file}:halved")
    plan = fs.zero3(on_jax.describe(make), devices=8, batch=fs.Batch(1, 12), precision=FP32)
    state = on_jax.shard(make, plan, fs.SGD(lr=0.0))
    found = on_jax.train_step(state, [batch])
    halved = torch.from_numpy(initial_logits(on_jax.load_model(f"{file}:make")) / 2)
    wanted = torch.nn.functional.cross_entropy(halved.flatten(0, 1), torch.from_numpy(batch["labels"]).flatten())
    assert float(found.loss) == pytest.approx(float(wanted), abs=1e-5)
    assert capsys.readouterr().out == ""
    tokens = on_jax.generate(state.model, [int(IDS[0, 0]) % 64], max_new_tokens=1, temperature=0)
    assert tokens[-1] == int(halved[0, 0].argmax())
    with pytest.raises(FullshardError, match="the model has a call of its own"):
        on_jax.train_step(state, [batch], loss=on_jax.chunked_loss)


def test_a_call_that_returns_a_loss(file):
    batch = {"input_ids": jnp.array(IDS % 64), "labels": jnp.array(LABELS % 64)}
    make = on_jax.load_model(f"{file}:make", call=f"{file}:own_loss")
    run = lambda loss: jax.jit(lambda: loss(make(nnx.Rngs(jax.random.key(0))), batch).sum)()
    assert float(run(on_jax.called_loss)) == pytest.approx(initial_logits(make).sum() / 2, rel=1e-4)
    with pytest.raises(FullshardError, match=r"give train_step loss=on_jax\.called_loss"):
        run(on_jax.summed_loss)
    few = on_jax.load_model(f"{file}:make", call=f"{file}:few")
    with pytest.raises(FullshardError, match="return logits of shape"):
        on_jax.called_loss(few(nnx.Rngs(0)), batch)


def test_plain_functions_are_models():
    make = lambda rngs: nnx.Linear(3, 4, rngs=rngs)
    assert model_loading.model_facts(make) == ModelFacts(None, None, None, None, takes_positions=False)
    assert [n for n, *_ in model_loading.parameters(make)] == ["kernel", "bias"]


# -- bad input -----------------------------------------------------------------------------------------------------

LLAMA = SMALL | {"model_type": "llama"}
BAD_CONFIGS = {
    "model_type = 'gemma2': the JAX engine builds llama, mistral": {"model_type": "gemma2"},
    "has no model_type": {"vocab_size": 3},
    "rope_type = 'dynamic' is not among default, linear, llama3, yarn": LLAMA
    | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "a table for each kind of layer is not among": LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    "factor = None (the default): write a number": LLAMA | {"rope_scaling": {"rope_type": "linear"}},
    "high_freq_factor = 1.0: write a number above low_freq_factor = 4.0": LLAMA
    | {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
    "sliding_window = 4096 (the default): the JAX engine does not build it; use the torch engine": {"model_type": "mistral"},
    "use_sliding_window = True: the JAX engine does not build it": SMALL | {"model_type": "qwen2", "use_sliding_window": True},
    "layer_types: only full_attention is built": SMALL
    | {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
    "hidden_act = 'xielu': the JAX engine does not build it": LLAMA | {"hidden_act": "xielu"},
    "the JAX engine builds LlamaForCausalLM, not LlamaForSequenceClassification": LLAMA
    | {"architectures": ["LlamaForSequenceClassification"]},
    "quantization_config: asks for quantised weights": LLAMA | {"quantization_config": {"bits": 4}},
    "auto_map: names code in the model's directory": LLAMA | {"auto_map": {"AutoModel": "x.Y"}},
    "partial_rotary_factor = 0.5: the JAX engine does not build it": LLAMA | {"partial_rotary_factor": 0.5},
    "is_causal = False: the JAX engine does not build it": LLAMA | {"is_causal": False},
    "add_cross_attention = True: the JAX engine does not build it": {"model_type": "gpt2", "add_cross_attention": True},
    "num_hidden_layers = 1000000000: write a whole number from 1 to 10000": LLAMA | {"num_hidden_layers": 10**9},
    "hidden_size = 'wide': write a whole number": LLAMA | {"hidden_size": "wide"},
    "num_key_value_heads = 3: write a divisor": LLAMA | {"num_key_value_heads": 3},
    "head_dim = 7: rotary positions need an even head_dim": LLAMA | {"head_dim": 7},
    "n_embd = 30: write a multiple of n_head = 4": {"model_type": "gpt2", "n_embd": 30, "n_head": 4},
    "pad_token_id = 96: write null or a token below vocab_size = 96": LLAMA | {"pad_token_id": 96},
    "is not a Hugging Face config: it is a JSON list": [],
}


@pytest.mark.parametrize("sentence", BAD_CONFIGS)
def test_configs_that_are_refused(tmp_path, sentence):
    (tmp_path / "config.json").write_text(json.dumps(BAD_CONFIGS[sentence]))
    with pytest.raises(FullshardError) as caught:
        on_jax.load_model(str(tmp_path))
    assert sentence in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_bad_input_is_a_sentence(saved, file, tmp_path):
    _, where = saved("qwen2")
    state = loaded(where, fs.ddp, devices=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    narrow = json.loads((where / "config.json").read_text()) | {"intermediate_size": 40}
    (tmp_path / "config.json").write_text(json.dumps(narrow))
    load = lambda name, **more: lambda: on_jax.load_model(name, **more)
    sample = lambda *prompt, **more: lambda: on_jax.generate(state.model, prompt, **({"max_new_tokens": 3} | more))
    long = on_jax.load_model("gpt-nano")(nnx.Rngs(0))
    cases = {
        "has no config.json": load(str(tmp_path / "empty")),
        "is not a Hugging Face config": load(str(tmp_path / "broken.json")),
        "unknown model 'lama3-8b'": load("lama3-8b"),
        "did you mean 'llama3-8b'": load("lama3-8b"),
        "write " + str(file) + ":callable": load(str(file)),
        "has no 'mke'; did you mean 'make'?": load(f"{file}:mke"),
        "there is no file": load("absent.py:make"),
        "write the name of a callable that returns a flax.nnx.Module": load(f"{file}:size"),
        "could not be built: TypeError: no_rngs() takes 0 positional arguments": load(f"{file}:no_rngs"),
        "returned an int; return a flax.nnx.Module": load(f"{file}:number"),
        "broken could not be built: KeyError: 'lost'": load(f"{file}:broken"),
        "on JAX the model's own code sets its initial values": load("llama-nano", init="modules"),
        "is [48, 32], the model's is [40, 32]: it holds another model": lambda: model_loading.check_weights(
            on_jax.load_model(str(tmp_path)), where
        ),
        "has no tensor for model.embed_tokens.weight": lambda: model_loading.check_weights(
            on_jax.load_model("llama-nano"), saved("gpt2")[1]
        ),
        "has no .safetensors files": lambda: model_loading.check_weights(on_jax.load_model("llama-nano"), tmp_path),
        "needs a prompt of at least one token": sample(),
        "has token 96; the model's tokens are 0 to 95": sample(96),
        "max_new_tokens must be a whole number of at least 0, not -1": sample(1, max_new_tokens=-1),
        "window must be a whole number of at least 1, not 0": sample(1, window=0),
        "temperature must be a number of at least 0": sample(1, temperature=-1.0),
        "128 tokens in a row, but the model has 64 positions": lambda: on_jax.generate(long, [1], max_new_tokens=100),
        "no logits to sample from": lambda: on_jax.generate(
            on_jax.load_model(f"{file}:make", call=f"{file}:few")(nnx.Rngs(0)), [1], max_new_tokens=1
        ),
    }
    for sentence, call in cases.items():
        with pytest.raises(FullshardError) as caught:
            call()
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)
