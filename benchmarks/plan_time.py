"""Time `fullshard plan DIRECTORY --cluster 8xh200` of Hugging Face directories, the first time and the second.

    python -m benchmarks.plan_time                      # all directories
    python -m benchmarks.plan_time llama qwen3_moe      # some of them

Each directory holds a config.json alone. The first plan imports torch and transformers, builds the model on meta and traces
it. The second reads the traced costs from the cache. Other programs lengthen wall time, so CPU seconds count.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.step_overhead import about

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 163840, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "rope_theta": 10000,
}  # fmt: skip
QWEN3_MOE_235B = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "max_position_embeddings": 40960, "rope_theta": 1000000,
}  # fmt: skip
MIXTRAL_8X7B = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768, "rope_theta": 1000000,
}  # fmt: skip
LLAMA_32_3B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 3072,
    "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rope_theta": 500000, "tie_word_embeddings": True,
}  # fmt: skip
QWEN2_7B = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064, "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 131072, "rope_theta": 1000000,
}  # fmt: skip
GEMMA2_9B = {
    "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "vocab_size": 256000, "hidden_size": 3584,
    "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "max_position_embeddings": 8192, "sliding_window": 4096, "query_pre_attn_scalar": 256,
}  # fmt: skip
GPT2_XL = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_embd": 1600, "n_layer": 48, "n_head": 25,
    "n_positions": 1024,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA_32_3B,
    "qwen2": QWEN2_7B,
    "gpt2": GPT2_XL,
    "gemma2": GEMMA2_9B,
    "mixtral": MIXTRAL_8X7B,
    "qwen3_moe": QWEN3_MOE_235B,
    "deepseek_v3": DEEPSEEK_V3,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CONFIGS)}; default: all")
    found = parser.parse_args()
    if unknown := [name for name in found.names if name not in CONFIGS]:
        parser.error(f"unknown: {unknown[0]}")
    return found


def timed(command: list[str], cache: Path) -> dict[str, Any]:
    """Wall and CPU seconds of a command, and what it says if it refuses: the largest models do not fit on 8 H200."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=os.environ | {"XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    found: dict[str, Any] = {"wall_seconds": wall, "cpu_seconds": after.ru_utime - before.ru_utime}
    return found | ({} if done.returncode == 0 else {"refused": done.stderr.strip().splitlines()[-1]})


def measure(name: str, here: Path) -> dict[str, Any]:
    directory = here / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIGS[name]))
    command = [sys.executable, "-m", "fullshard", "plan", str(directory), "--cluster", "8xh200", "--json"]
    return {turn: timed(command, here / "cache") for turn in ("first", "second")}


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as own:
        imports = timed([sys.executable, "-c", "import torch; from transformers import PreTrainedModel"], Path(own))
        found = {name: measure(name, Path(own)) for name in args.names or CONFIGS}
    print(json.dumps({**about(), "imports": imports, "plans": found}, indent=1), flush=True)


if __name__ == "__main__":
    main()
