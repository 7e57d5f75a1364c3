"""Recipes at a small size, run inside ranks; and what they need: a model's directory, token files."""

import contextlib
import json
import os
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from fullshard.data.pack_tokens import pack
from fullshard.engine.engine import load_engine
from fullshard.runs.prepare.prepare import Prepared, prepare_together
from fullshard.runs.recipe.recipe import load_recipe
from fullshard.runs.run import execute

MODELS = """
from fullshard.on_torch.model.built_in import GPT, Llama
from fullshard.model.presets import GPTSize, LlamaSize

def llama():
    return Llama(LlamaSize(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=384, sequence=64))

def gpt():
    return GPT(GPTSize(dim=32, layers=2, heads=4, vocab=256, sequence=64, dropout=0.1, bias=False, tied=False))
"""
OTHER_MODELS = """
import transformers as t

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

def bert():
    return t.BertForMaskedLM(t.BertConfig(**SMALL, **DRY, vocab_size=256, max_position_embeddings=64))

def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return t.T5ForConditionalGeneration(t.T5Config(**sizes, vocab_size=256, dropout_rate=0.0, decoder_start_token_id=0))

def vit():
    return t.ViTForImageClassification(t.ViTConfig(**SMALL, **DRY, image_size=8, patch_size=4, num_labels=3))
"""
COLOURS = {"blue": (20, 30, 220), "green": (30, 220, 30), "red": (220, 20, 30)}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_inputs(here: Path) -> None:
    """What the recipes call `tokens`, `valid`, `chat`, `chat-valid` and `path/to/model`, in small."""
    (here / "models.py").write_text(MODELS)
    texts = sorted(Path(json.__file__).parent.glob("*.py"))
    make_model(here / "path/to/model", [t.read_text() for t in texts])
    for name, inputs in (("tokens", texts), ("valid", texts[:1])):
        pack(inputs, here / name, tokenizer=str(here / "path/to/model"), workers=1)
    pack(texts, here / "bytes", workers=1)
    for name, count in (("chat", 60), ("chat-valid", 10)):
        lines = [json.dumps({"prompt": f"What is {i} + {i}?", "completion": f"It is {2 * i}."}) for i in range(count)]
        (here / f"{name}.jsonl").write_text("\n".join(lines))
        pack([here / f"{name}.jsonl"], here / name, tokenizer=str(here / "path/to/model"), chat=True, workers=1)


def make_other_inputs(here: Path) -> None:
    """What the recipes of other objectives call `texts.parquet`, `pairs.jsonl` and `images`, in small."""
    import pyarrow
    from pyarrow import parquet

    (here / "other.py").write_text(OTHER_MODELS)
    lines = [line for t in sorted(Path(json.__file__).parent.glob("*.py")) for line in t.read_text().splitlines() if line.strip()]
    for name, texts in (("texts", lines[:200]), ("texts-valid", lines[200:240])):
        parquet.write_table(pyarrow.table({"text": texts}), here / f"{name}.parquet")
    for name, numbers in (("pairs", range(100)), ("pairs-valid", range(100, 120))):
        pairs = [json.dumps({"source": f"double {i}", "target": f"{2 * i}"}) for i in numbers]
        (here / f"{name}.jsonl").write_text("\n".join(pairs))
    make_images(here / "images/train", 12)
    make_images(here / "images/valid", 4)


def make_images(where: Path, count: int) -> None:
    """Noisy pictures of three colours, in unequal sizes."""
    from PIL import Image

    draw = np.random.default_rng(count)
    for name, colour in COLOURS.items():
        (where / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.clip(np.array(colour) + draw.integers(-20, 20, (9 + i % 3, 10, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(where / name / f"{i}.png")


def make_model(path: Path, texts: list[str]) -> None:
    """A Hugging Face Llama with weights and a tokenizer of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": CHATML}))


def train(here: Path, recipe: Path, overrides: list[str], directory: Path) -> Prepared:
    """What `fullshard train` does on every rank that a launcher started."""
    with contextlib.chdir(here), mock.patch.dict(os.environ, WORLD_SIZE="2"):
        prepared = prepare_together(load_recipe(recipe, overrides), load_engine("torch"), dict, {})
        execute(prepared, directory)
    return prepared


def run_only(here: Path, recipe: Path, directory: Path) -> None:
    """As `train`, for plans whose parameters do not rest on the device: nothing is read after the run."""
    train(here, recipe, [], directory)


def run(here: Path, recipe: Path, overrides: list[str], directory: Path) -> dict[str, torch.Tensor]:
    """As `train`; the weights after it, whole, by the name they have in a checkpoint."""
    prepared = train(here, recipe, overrides, directory)
    weights = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in prepared.model.named_parameters()}
    return {n.removeprefix("base_model.model.").replace(".base_layer", ""): w.detach() for n, w in weights.items()}
