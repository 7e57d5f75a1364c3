import json
import sys

import pytest
import torch
from torch import nn

from fullshard import FullshardError
from fullshard.model.presets import GPTSize, LlamaSize
from fullshard.on_torch import load_model
from fullshard.on_torch.model.built_in import GPT, Llama, build

IDS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))

# -- against Hugging Face -----------------------------------------------------------------------------


def scramble(model: nn.Module) -> nn.Module:
    """Weights large enough for a wrong rotation or norm to show."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.3, generator=generator)
    return model.eval()


def hugging_face_llama(size: LlamaSize) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=size.dim,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.ffn,
        vocab_size=size.vocab,
        max_position_embeddings=size.sequence,
        rms_norm_eps=size.eps,
        rope_parameters={"rope_type": "default", "rope_theta": size.theta},
        tie_word_embeddings=size.tied,
    )
    return scramble(LlamaForCausalLM(config))


LLAMAS = {
    "grouped": LlamaSize(32, 2, 4, 2, 40, 50, 64),
    "one kv head each": LlamaSize(32, 2, 4, 4, 40, 50, 64),
    "one kv head": LlamaSize(32, 2, 4, 1, 40, 50, 64, theta=10_000.0, eps=1e-3),
    "tied": LlamaSize(32, 2, 4, 2, 40, 50, 64, tied=True),
}


@pytest.mark.parametrize("size", LLAMAS.values(), ids=LLAMAS)
def test_llama_is_hugging_faces(size):
    theirs, ours = hugging_face_llama(size), Llama(size)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), theirs(IDS).logits, rtol=1e-5, atol=1e-5)


def test_tied_llama_has_one_table():
    model = Llama(LLAMAS["tied"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert Llama(LLAMAS["grouped"]).lm_head.weight is not model.model.embed_tokens.weight


def gpt2_state(model: GPT) -> dict[str, torch.Tensor]:
    """Our GPT's weights under GPT-2's names: its projections are transposed, and q, k, v one matrix."""
    state = {
        "transformer.wte.weight": model.tok_embeddings.weight,
        "transformer.wpe.weight": model.pos_embeddings.weight,
        "transformer.ln_f.weight": model.norm.weight,
        "transformer.ln_f.bias": model.norm.bias,
        "lm_head.weight": model.output.weight,
    }
    for i, layer in enumerate(model.layers):
        qkv = (layer.attention.wq, layer.attention.wk, layer.attention.wv)
        parts = {
            "attn.c_attn": (torch.cat([p.weight for p in qkv]).T, torch.cat([p.bias for p in qkv])),
            "attn.c_proj": (layer.attention.wo.weight.T, layer.attention.wo.bias),
            "mlp.c_fc": (layer.feed_forward.w1.weight.T, layer.feed_forward.w1.bias),
            "mlp.c_proj": (layer.feed_forward.w2.weight.T, layer.feed_forward.w2.bias),
            "ln_1": (layer.attention_norm.weight, layer.attention_norm.bias),
            "ln_2": (layer.ffn_norm.weight, layer.ffn_norm.bias),
        }
        for name, (weight, bias) in parts.items():
            state |= {f"transformer.h.{i}.{name}.weight": weight, f"transformer.h.{i}.{name}.bias": bias}
    return {name: tensor.detach() for name, tensor in state.items()}


def test_gpt_is_gpt2_with_the_exact_gelu():
    from transformers import GPT2Config, GPT2LMHeadModel

    size = GPTSize(32, 2, 4, 50, 16)
    ours = scramble(GPT(size))
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=50, activation_function="gelu", bos_token_id=1, eos_token_id=2
    )
    theirs = GPT2LMHeadModel(config).eval()
    theirs.load_state_dict(gpt2_state(ours), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), theirs(IDS).logits, rtol=1e-5, atol=1e-4)


# -- what a causal model must do ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt-nano", "llama-nano"])
def test_the_future_does_not_show(name):
    model = scramble(build(name))
    later = IDS.clone()
    later[:, 7] += 1
    with torch.no_grad():
        before, after = model(IDS), model(later)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=0, atol=0)
    assert not torch.allclose(after[:, 7:], before[:, 7:])
    assert not torch.allclose(after[:, 8:], before[:, 8:])  # and the past does


def test_gpt_without_bias_has_one_in_the_feed_forward_only():
    biases = [n for n, _ in GPT(GPTSize(8, 1, 2, 10, 4, bias=False, tied=False)).named_parameters() if n.endswith("bias")]
    wanted = ["attention_norm.bias", "ffn_norm.bias", "feed_forward.w1.bias", "feed_forward.w2.bias"]
    assert biases == [*(f"layers.0.{w}" for w in wanted), "norm.bias"]


@pytest.mark.parametrize(("training", "same"), [(True, False), (False, True)])
def test_dropout_only_while_training(training, same):
    model = scramble(GPT(GPTSize(32, 1, 2, 50, 16, dropout=0.5))).train(training)
    with torch.no_grad():
        assert torch.equal(model(IDS), model(IDS)) == same


# -- from the word MODEL to a module ------------------------------------------------------------------

SOURCE = """
import dataclasses
from torch import nn

@dataclasses.dataclass
class Settings:  # a dataclass looks its own module up
    width: "int" = 3

WIDTH = 3

def make():
    return nn.Linear(Settings().width, 4)

def number():
    return 7

def needs(width):
    return nn.Linear(width, width)
"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 10,
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with everything a MODEL can be, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_model.py").write_text(SOURCE)
    (tmp_path / "pack_age").mkdir()
    (tmp_path / "pack_age" / "inner.py").write_text(SOURCE)
    configs = {
        "llama": json.dumps(LLAMA),
        "t5": json.dumps({"model_type": "t5", "d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 8, "vocab_size": 10}),
        "broken": "{not json",
        "unheard": '{"model_type": "zzz"}',
        "typeless": "{}",
        "odd": json.dumps({**LLAMA, "hidden_size": 9}),
    }
    for name, text in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "empty").mkdir()
    yield tmp_path
    for name in ("own_model", "inner", "pack_age", "pack_age.inner"):
        sys.modules.pop(name, None)
    sys.modules["json"] = json


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("gpt-nano", "GPT"),
        ("llama-nano", "Llama"),
        ("llama", "LlamaForCausalLM"),
        ("llama/config.json", "LlamaForCausalLM"),
        ("t5", "T5Model"),
        ("own_model.py:make", "Linear"),
        ("./own_model.py:make", "Linear"),
        ("own_model:make", "Linear"),
        ("pack_age.inner:make", "Linear"),
        ("pack_age/inner.py:make", "Linear"),
    ],
)
def test_load(word, kind):
    model = load_model(word)
    assert type(model).__name__ == kind
    assert all(t.is_meta for t in model.parameters())


def test_loaded_by_absolute_path(here):
    assert load_model(str(here / "own_model.py") + ":make").weight.shape == (4, 3)
    assert load_model(str(here / "llama")).config.hidden_size == 8


NOT_LOADED = [
    ("llama3-9b", "unknown model 'llama3-9b'; write a preset (llama-nano, "),
    ("no/where", "unknown model 'no/where'; write a preset ("),
    ("gone.py:make", "there is no file gone.py; write path/to/file.py:callable"),
    ("own_model.py:mak", "own_model.py has no 'mak'; did you mean 'make'? (it has Settings, make, number, needs)"),
    ("own_model.py:", "own_model.py has no ''"),
    ("own_model.py:WIDTH", "own_model.py:WIDTH is of type int; write the name of a callable that returns a module"),
    ("own_model.py:number", "own_model.py:number returned int, not a torch.nn.Module"),
    ("no_such.module:make", "cannot import no_such.module:make: No module named 'no_such'; write package.module:callable or"),
    ("pack_age.inner:mak", "pack_age.inner has no 'mak'; did you mean 'make'?"),
    ("empty", "empty has no config.json; write the directory of a Hugging Face model"),
    ("broken", "broken/config.json is not a Hugging Face config: "),
    ("broken/config.json", "broken/config.json is not a Hugging Face config: "),
    ("unheard", "unheard/config.json is not a Hugging Face config: "),
    ("typeless", "typeless/config.json is not a Hugging Face config: "),
]


def refusal(word: str) -> str:
    with pytest.raises(FullshardError) as caught:
        load_model(word)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("word", "sentence"), NOT_LOADED)
def test_refused(word, sentence):
    assert refusal(word).startswith(sentence)


@pytest.mark.usefixtures("here")
def test_a_misspelt_preset_is_named():
    assert refusal("llama3-8bb").endswith("; did you mean 'llama3-8b'?")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("word", ["own_model.py:needs", ":make", ".own_model:make", "odd"])
def test_bad_input_gets_a_sentence(word):
    assert word in refusal(word)


def test_a_file_that_does_not_compile(here):
    (here / "torn.py").write_text("def make(:")
    assert "torn.py" in refusal("torn.py:make")


@pytest.mark.usefixtures("here")
def test_a_file_without_a_callable():
    assert "own_model.py:" in refusal("own_model.py")


def test_a_file_called_as_a_known_module_does_not_replace_it(here):
    (here / "json.py").write_text(SOURCE)
    load_model("json.py:make")
    assert sys.modules["json"] is json
