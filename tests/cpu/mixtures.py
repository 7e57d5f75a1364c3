"""Mixtures of experts from a directory and back; runs inside ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fullshard as fs
from fullshard import on_torch
from fullshard.on_torch.model.weights import Weights

VOCAB, LENGTH = 40, 12
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss")


def config(family: str) -> Any:
    import transformers as t

    common = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 24, "vocab_size": VOCAB, "max_position_embeddings": 32, "num_experts_per_tok": 2,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    deepseek = {
        "n_routed_experts": 4, "moe_intermediate_size": 12, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    }  # fmt: skip
    return {
        "mixtral": lambda: t.MixtralConfig(**common, num_local_experts=4),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(**common, num_experts=4, moe_intermediate_size=12),
        "deepseek_v3": lambda: t.DeepseekV3Config(**(common | deepseek | {"head_dim": 4})),
        "olmoe": lambda: t.OlmoeConfig(**{k: v for k, v in common.items() if k != "head_dim"}, num_experts=4),
        "gpt_oss": lambda: t.GptOssConfig(**common, num_local_experts=4, sliding_window=8),
    }[family]()


def save(family: str, directory: Path) -> torch.nn.Module:
    """Write a small model of a family as transformers does, and return it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config(family), dtype=torch.float32).eval()
    model.save_pretrained(directory)
    return model


def ids() -> torch.Tensor:
    return torch.randint(3, VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(9))


def train(directory: str, checkpoints: str, lora: bool = False) -> dict[str, Any]:
    """Shard the model of a directory, train it for two steps and save it. Returns its logits before and after."""
    model = on_torch.load_model(directory)
    if lora:
        model = on_torch.add_adapters(model, rank=2, alpha=4, dropout=0.0, targets=["q_proj"])
    description = on_torch.describe(model)
    plan = fs.zero3(description, devices=dist.get_world_size(), batch=fs.Batch(2, LENGTH), precision=fs.Precision(compute="fp32"))
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-2), weights=directory)
    before = logits(state)
    rank, rows = dist.get_rank(), ids()
    rows = rows[2 * rank : 2 * rank + 2]
    for _ in range(2):
        on_torch.train_step(state, [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]}])
    recipe = {"model": {"name": directory}} | ({"lora": LORA} if lora else {})
    checkpointer = on_torch.Checkpointer(checkpoints, state)
    checkpointer.save(recipe=recipe).result()
    checkpointer.close()
    return {"before": before, "after": logits(state)}


LORA = {"rank": 2, "alpha": 4, "dropout": 0.0, "targets": ["q_proj"]}


def logits(state: on_torch.State) -> torch.Tensor:
    state.model.eval()
    with torch.no_grad():
        found = state.model(ids()[:, :-1], use_cache=False).logits
    state.model.train()
    return found


def counted(directory: str, dim: int) -> dict[str, int]:
    """Bytes read by this rank and bytes in its shards, with every tensor cut along its dim `dim` where it has one."""
    with torch.device("meta"):
        model = on_torch.load_model(directory)
    weights = Weights(model, directory)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            cut = Shard(min(dim, p.ndim - 1))
            setattr(module, name, torch.nn.Parameter(distribute_tensor(torch.zeros(p.shape), mesh, [cut])))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.zeros(buffer.shape))
    weights.read(model)
    whole = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    mine = sum(p.to_local().numel() * 4 for p in model.parameters())
    return {"read": weights.files.bytes_read, "mine": mine, "whole": whole}


def refusal(directory: str) -> str:
    try:
        Weights(on_torch.load_model(directory), directory)
    except fs.FullshardError as error:
        return str(error)
    return "accepted"
