"""Hugging Face models of every objective, from a directory, trained by fullshard and by transformers alone. Runs in ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard import on_torch

ROWS, STEPS, LR, CLASSES, VOCAB, LENGTH = 4, 3, 0.05, 5, 40, 10
MASK = 39
KINDS = {
    "BertForMaskedLM": "masked",
    "T5ForConditionalGeneration": "seq2seq",
    "BartForConditionalGeneration": "seq2seq",
    "BertForSequenceClassification": "classify",
    "BertForTokenClassification": "classify",
    "ViTForImageClassification": "image",
    "LlamaForCausalLM": "causal",
}


def config(kind: str) -> Any:
    import transformers as t

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    dry = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bart = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16, "dropout": 0.0, "max_position_embeddings": 32}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": VOCAB, "dropout_rate": 0.0}
    text = {"vocab_size": VOCAB, "max_position_embeddings": 32}
    return {
        "Bert": lambda: t.BertConfig(**small, **dry, **text, num_labels=CLASSES),
        "T5Fo": lambda: t.T5Config(**t5, decoder_start_token_id=0),
        "Bart": lambda: t.BartConfig(**bart, vocab_size=VOCAB),
        "ViTF": lambda: t.ViTConfig(**small, **dry, image_size=8, patch_size=4, num_labels=CLASSES),
        "Llam": lambda: t.LlamaConfig(**small, **text),
    }[kind[:4]]()


def build(kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(3)
    return getattr(transformers, kind)(config(kind))


def batch(kind: str, step: int) -> dict[str, torch.Tensor]:
    """The rows of one step, with unequal numbers of labels."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(3, MASK, (ROWS, LENGTH), generator=draw)
    classes = torch.randint(0, CLASSES, (ROWS,), generator=draw)
    hidden = torch.rand(ROWS, LENGTH, generator=draw) < torch.tensor([[0.2], [0.5], [0.7], [0.9]])
    if kind.startswith("ViT"):
        return {"pixel_values": torch.randn(ROWS, 3, 8, 8, generator=draw), "labels": classes}
    if kind.endswith("SequenceClassification"):
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": classes}
    if kind.endswith("TokenClassification"):
        return {"input_ids": ids, "labels": torch.where(hidden, ids % CLASSES, -100)}
    if kind.endswith("MaskedLM"):
        return {"input_ids": torch.where(hidden, MASK, ids), "labels": torch.where(hidden, ids, -100)}
    if kind.endswith("CausalLM"):
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    labels = torch.where(torch.arange(LENGTH) < torch.tensor([[3], [5], [8], [10]]), ids.flip(1), -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def by_transformers(kind: str, directory: str) -> dict[str, Any]:
    """Losses that transformers computes itself on whole batches, and the weights after training on them."""
    import transformers

    model = getattr(transformers, kind).from_pretrained(directory, dtype=torch.float32).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(kind, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "params": {n: p.detach() for n, p in model.named_parameters()}}


def state_of(directory: str) -> on_torch.State:
    model = on_torch.load_model(directory)
    plan = fs.zero3(
        on_torch.describe(model),
        devices=dist.get_world_size(),
        batch=fs.Batch(ROWS // dist.get_world_size(), LENGTH),
        precision=fs.Precision(compute="fp32"),
    )
    return on_torch.shard(model, plan, fs.SGD(lr=LR), weights=directory)


def by_fullshard(kind: str, directory: str, checkpoints: str | None = None) -> dict[str, Any]:
    state = state_of(directory)
    loss = on_torch.loss_of(state.model)
    rank, size = dist.get_rank(), ROWS // dist.get_world_size()
    losses, metrics = [], {}
    for step in range(STEPS):
        mine = {k: v[rank * size : (rank + 1) * size] for k, v in batch(kind, step).items()}
        result = on_torch.train_step(state, [mine], loss=loss)
        losses.append(float(result.loss))
        metrics = {n: float(v) for n, v in result.metrics.items()}
    if checkpoints:
        fs.checkpoint.save(checkpoints, state)
    params = {n: p.full_tensor().detach() for n, p in state.model.named_parameters()}
    return {"losses": losses, "params": params, "metrics": metrics, "objective": on_torch.objective_of(state.model)}


def refusals(kind: str, directory: str, cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """What the first step says of each (name of a loss, change of the batch)."""
    state, said = state_of(directory), []
    rank, size = dist.get_rank(), ROWS // dist.get_world_size()
    for name, change in cases:
        mine = {k: v[rank * size : (rank + 1) * size] for k, v in batch(kind, 0).items()}
        for key, value in change.items():
            if value is None:
                del mine[key]
            else:
                mine[key] = value(mine)
        try:
            on_torch.train_step(state, [mine], loss=getattr(on_torch, name))
            said.append("accepted")
        except fs.FullshardError as error:
            said.append(str(error))
    return said


def save(kind: str, directory: Path) -> nn.Module:
    model = build(kind)
    model.save_pretrained(directory)
    return model
