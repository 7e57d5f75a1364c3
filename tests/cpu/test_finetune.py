"""Fine-tuning a Hugging Face checkpoint: every rank reads its own bytes, and the losses are transformers' own."""

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fullshard.data import Batches, TokenFile
from fullshard.data.pack_tokens import pack
from fullshard.runs.recipe.lr_schedule import factor
from tests.cpu import finetune
from tests.cpu.test_train import metrics, train

SIZE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
RECIPE = """
plan = "zero3"
[model]
name = "model"
[data]
path = "tokens"
sequence = 64
packing = "whole"
boundaries = "attention"
[optim]
lr = 1e-3
clip = 0.5
[schedule]
warmup = 3
[train]
steps = 20
global_batch = 8
micro_batch = 2
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A model as somebody else published it, its tokenizer, and conversations packed with it."""
    path = tmp_path_factory.mktemp("finetune")
    texts = [p.read_text() for p in sorted(Path(json.__file__).parent.glob("*.py"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<s>", "</s>"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False))
    save_model(path / "model", vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(path / "model/tokenizer.json"))
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    (path / "model/chat_template.jinja").write_text(template)
    lines = [line for text in texts for line in text.splitlines() if len(line) > 20]
    with (path / "chat.jsonl").open("w") as file:
        for question, answer in zip(lines[::2], lines[1::2], strict=False):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    pack([path / "chat.jsonl"], path / "tokens", tokenizer=str(path / "model"), chat=True, workers=1)
    (path / "recipe.toml").write_text(RECIPE)
    return path


def save_model(path: Path, dtype: torch.dtype = torch.float32, **size) -> LlamaForCausalLM:
    torch.manual_seed(11)
    wanted = SIZE | {"vocab_size": 131, "max_position_embeddings": 128, "tie_word_embeddings": False} | size
    model = LlamaForCausalLM(LlamaConfig(**wanted)).to(dtype)
    model.save_pretrained(path, max_shard_size="100KB")
    return model


def by_transformers(here: Path) -> list[float]:
    """The same fine-tuning with plain transformers and AdamW on one process: the oracle."""
    model = AutoModelForCausalLM.from_pretrained(here / "model", dtype=torch.float32)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1
    )
    source = iter(Batches(TokenFile(here / "tokens"), 64, 8, packing="whole", boundaries="attention"))
    losses = []
    for step in range(20):
        batch = {k: torch.as_tensor(v) for k, v in next(source)[0].items()}
        logits = torch.cat([one_row(model, batch, row) for row in range(8)])
        loss = F.cross_entropy(logits, batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * factor(step, 20, "cosine", warmup=3, final=0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def one_row(model, batch, row: int) -> torch.Tensor:
    """Every document of a row computed alone: what attention kept inside documents must equal."""
    starts = [*(batch["position_ids"][row] == 0).nonzero().flatten().tolist(), 64]
    return torch.cat([model(batch["input_ids"][row : row + 1, a:b]).logits[0] for a, b in pairwise(starts)])


@pytest.mark.full
def test_the_loss_curve_is_that_of_plain_transformers(here):
    done = train(here, "--ranks", "2", "--run", "runs/two")
    assert done.returncode == 0, done.stderr
    assert "weights from model" in done.stderr
    found, want = [m["loss"] for m in metrics(here / "runs/two")], by_transformers(here)
    assert len(found) == 20
    assert found == pytest.approx(want, abs=1e-5)
    assert found[-1] < found[0] - 0.3


@pytest.mark.parametrize(("strategy", "tensor"), [("zero3", 1), ("ddp", 1), ("zero3", 2)])
def test_weights_arrive_whole_under_every_layout(here, ranks, strategy, tensor):
    want = AutoModelForCausalLM.from_pretrained(here / "model").state_dict()
    for found in ranks(2).run(finetune.load, str(here / "model"), strategy, tensor=tensor):
        for name, p in found["params"].items():
            assert torch.equal(p, want[name]), name


def test_each_rank_reads_its_own_byte_ranges_and_nothing_else(here, ranks):
    files = list((here / "model").glob("*.safetensors"))
    assert len(files) > 3
    whole = sum(v.numel() * 4 for f in files for v in load_file(f).values())
    counts = ranks(2).run(finetune.counted, str(here / "model"))
    assert sum(counts) == whole  # every byte once, over all ranks
    headers = sum(8 + int.from_bytes(f.read_bytes()[:8], "little") for f in files)
    for found in ranks(2).run(finetune.load, str(here / "model"), "zero3"):
        # The kernel's own count: this rank's shards, and the headers twice (buffered), with little else.
        assert found["shard"] <= found["read"] < found["shard"] + 3 * headers + 64 * 1024


def test_a_rank_holds_its_shard_and_one_unit_at_most(tmp_path, ranks):
    save_model(tmp_path / "small")
    save_model(tmp_path / "model", hidden_size=512, intermediate_size=1536, num_hidden_layers=12, vocab_size=2048)
    for found in ranks(4).run(finetune.host_peak, str(tmp_path / "model"), str(tmp_path / "small")):
        assert found["shard"] > 30e6
        assert found["peak"] < 1.3 * found["shard"] + found["unit"]


def test_bf16_files_become_fp32_masters(tmp_path, ranks):
    want = save_model(tmp_path, torch.bfloat16).state_dict()
    for name, p in ranks(2).run(finetune.load, str(tmp_path), "zero3")[0]["params"].items():
        assert torch.equal(p, want[name].float()), name


def test_tied_weights_and_adapters(tmp_path, ranks):
    want = save_model(tmp_path, tie_word_embeddings=True).state_dict()
    found = ranks(2).run(finetune.load, str(tmp_path), "zero3", lora=True)[0]["params"]
    for name, p in found.items():
        if ".lora_" not in name:
            assert torch.equal(p, want[name.removeprefix("base_model.model.").replace(".base_layer", "")]), name
    assert all(not p.any() for n, p in found.items() if "lora_B" in n)
    assert all(p.std() > 0 for n, p in found.items() if "lora_A" in n)


def damage(source: Path, target: Path, kind: str) -> None:
    shutil.copytree(source, target)
    file = sorted(target.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = next(iter(tensors))
    match kind:
        case "cut":
            file.write_bytes(file.read_bytes()[:-100])
        case "header":
            file.write_bytes(file.read_bytes()[:8] + b"?" + file.read_bytes()[9:])
        case "gone":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
        case "missing":
            (target / "model.safetensors.index.json").unlink()
            save_file({n: t for n, t in tensors.items() if n != name}, file)
        case "extra":
            save_file({**tensors, "model.layers.9.self_attn.q_proj.weight": torch.zeros(3)}, file)
        case "shape":
            save_file({**tensors, name: torch.zeros(3, 3)}, file)
        case "fp8":
            save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, file)


DAMAGED = {
    "cut": "is damaged or truncated",
    "header": "is damaged: its header is not JSON",
    "gone": "lacks model-00001-of-",
    "empty": "is not a safetensors file, or truncated",
    "missing": "has no tensor for",
    "extra": "has model.layers.9.self_attn.q_proj.weight, which this model lacks",
    "shape": "is [3, 3], the model's is",
    "fp8": "is F8_E4M3; save it in bf16 or fp32 first",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_or_other_weights_are_refused(here, tmp_path, ranks, kind):
    damage(here / "model", tmp_path / "damaged", kind)
    for sentence in ranks(2).run(finetune.refusal, str(here / "model"), str(tmp_path / "damaged")):
        assert DAMAGED[kind] in sentence


def test_flops_are_the_fields_own_count(here):
    from fullshard.on_torch import load_model
    from fullshard.on_torch.measuring.flops import flops_per_token

    model = load_model("llama3-8b")
    table = 128_256 * 4096
    matrices = sum(math.prod(p.shape) for p in model.parameters() if p.ndim > 1) - table
    assert flops_per_token(model, 8192) == 6 * matrices + 12 * 32 * 4096 * 8192
