"""Hugging Face directories by somebody else: no code of theirs runs, nothing is fetched, nobody is asked."""

import builtins
import json
import socket

import pytest

from fullshard import FullshardError
from fullshard.on_torch import load_model
from fullshard.on_torch.model import hf_config

pytest.importorskip("transformers")

SMALL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def sealed(monkeypatch):
    """A prompt or a connection is a failure of the test, whoever catches its exception."""
    tried = []
    monkeypatch.setattr(builtins, "input", lambda *words: tried.append(f"input{words}") or "n")
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(f"connect {address}") or 1 / 0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **more: tried.append(f"resolve {where}") or 1 / 0)
    yield
    assert tried == []


def write(tmp_path, **keys) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | keys))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    return str(tmp_path)


def refused(spec: str) -> str:
    with pytest.raises(FullshardError) as caught:
        load_model(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_plain_config_is_built(tmp_path):
    assert len(load_model(write(tmp_path)).model.layers) == 2


HOSTILE = {
    "code": {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}, "model_type": "mine"},
    "code of a known type": {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}},
    "code elsewhere": {"auto_map": {"AutoConfig": "someone/repo--code.Config"}},
    "kernel": {"_attn_implementation": "someone/kernel"},
    "kernel, as written": {"attn_implementation": "kernels-community/flash-attn2"},
    "kernel of a part": {"text_config": {"_attn_implementation": {"": "someone/kernel@main:fn"}}},
    "paged kernel": {"_attn_implementation_internal": "paged|someone/kernel"},
    "flash, not installed": {"_attn_implementation": "flash_attention_2"},
    "experts": {"_experts_implementation": "someone/kernel"},
    "kernels": {"use_kernels": True},
    "quantised": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "backbone": {"use_pretrained_backbone": True},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_a_config_may_not_ask_for_is_named(case, tmp_path):
    if case.startswith("flash") and hf_config.find_spec("flash_attn"):
        pytest.skip("it is installed")
    key = next(iter(HOSTILE[case]))
    said = refused(write(tmp_path, **HOSTILE[case]))
    assert said.startswith(f"{tmp_path}/config.json: ")
    assert (key if key != "text_config" else "_attn_implementation") in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("attention", [None, "eager", "sdpa"])
def test_attention_of_transformers_own_is_no_kernel(attention, tmp_path):
    load_model(write(tmp_path, _attn_implementation=attention, quantization_config=None))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers = 1000000000000 is more than a model can have; write at most 1048576"),
        ({"num_hidden_layers": 10**6}, "describes a model of more than 200,000 modules"),
        ({"vocab_size": 10**15}, "vocab_size = 1000000000000000 is more than a model can have"),
        ({"num_attention_heads": -(10**12)}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "division"),
        ({"hidden_size": "a"}, "config.json"),
        ({"model_type": "nothing"}, "model type `nothing`"),
        ({"model_type": None}, "config.json"),
        ({"model_type": ["llama"]}, "config.json"),
        ({"dtype": "nn"}, "config.json"),
        ({"hidden_act": "import os"}, "could not be built"),
        ({"rope_parameters": {"rope_type": "nothing"}}, "could not be built"),
    ],
)
def test_sizes_and_types_that_are_none(keys, says, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_config, "MAX_MODULES", 2000)
    assert says.replace("200,000", "2,000") in refused(write(tmp_path, **keys))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, f'{{"model_type": {"9" * 5000}}}', "\xff"])
def test_a_damaged_config(text, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refused(str(tmp_path))


def test_the_hub_is_reached_again_afterwards(tmp_path):
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    load_model(write(tmp_path))
    refused(write(tmp_path, model_type="nothing"))
    assert before == constants.HF_HUB_OFFLINE
