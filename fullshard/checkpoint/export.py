"""From a checkpoint to what other programs read: a Hugging Face directory, one torch file, or PEFT adapters.

A tensor at a time: memory is bounded by the largest one (and, for merged adapters, its two small factors).
"""

import json
import shutil
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullshard.checkpoint.average import FLOATS, narrow
from fullshard.checkpoint.commit import find
from fullshard.checkpoint.reader import Checkpoint
from fullshard.checkpoint.safetensors import Files
from fullshard.checkpoint.torch_pickles import state_dict_pickle
from fullshard.checkpoint.untrusted_files import read_small, refusing
from fullshard.checkpoint.verify import refuse_damaged
from fullshard.checkpoint.writer import (
    FILE_BYTES,
    Source,
    in_files,
    missing_directories,
    remove_empty,
    write_safetensors,
    write_whole_directory,
)
from fullshard.errors import FullshardError
from fullshard.model.presets import PRESETS, LlamaSize
from fullshard.reading import is_directory, parse_json

WORDS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "fp64": "F64"}
COPIED = ("*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken")
NOT_COPIED = ("*.index.json", "adapter_config.json", "trainer_state.json")


def export(where: str, output: Path, form: str, config: Path | None = None, dtype: str | None = None) -> Path:
    """Write the weights of a checkpoint, verified first, to `output`."""
    if dtype is not None and dtype not in WORDS:
        raise FullshardError(f"dtype is one of {', '.join(WORDS)}, not {dtype!r}")
    with refusing(f"write {output}"):
        there = output.exists()
    if there:
        raise FullshardError(f"{output} exists already; write elsewhere, or remove it first")
    place = find(where)
    refuse_damaged(place)
    checkpoint = Checkpoint(place)
    match form:
        case "hf":
            export_hugging_face(checkpoint, output, config, dtype)
        case "peft":
            _export_peft(checkpoint, output, dtype)
        case _:
            if config is not None:
                raise FullshardError("--config has no effect with --format torch; leave it out")
            _export_torch(checkpoint, output, dtype)
    return output


# -- what is written ----------------------------------------------------------------------------------------


def weights(checkpoint: Checkpoint, like: dict[str, str], dtype: str | None) -> list[Source]:
    """The model's tensors under the names that the model without wrappers has, adapters merged. `like`: the dtype of
    each tensor where it came from, if it is known."""
    names = [n.removeprefix("model.") for n in checkpoint.manifest.tensors if n.startswith("model.")]
    if not names:
        raise FullshardError(f"{checkpoint.place} holds no weights")
    sources: list[Source] = []
    for name in names:
        if ".lora_" in name:
            continue
        record = checkpoint.manifest.tensors[f"model.{name}"]
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        other = WORDS[dtype] if dtype else like.get(plain, record.dtype)
        wanted = other if record.dtype in FLOATS and other in FLOATS else record.dtype
        sources.append(Source(plain, wanted, record.shape, partial(_read, checkpoint, name, wanted)))
    if not sources or len({s.name for s in sources}) < len(sources):
        raise FullshardError(f"{checkpoint.place} has no weights, or several of one name once wrappers are cut off; rename them")
    return sources


def _read(checkpoint: Checkpoint, name: str, dtype: str) -> bytes | bytearray:
    record = checkpoint.manifest.tensors[f"model.{name}"]
    down = name.replace(".base_layer.weight", ".lora_A.default.weight")
    adapted = down != name and f"model.{down}" in checkpoint.manifest.tensors
    if not adapted and record.dtype == dtype:
        return checkpoint.raw(f"model.{name}")
    values: NDArray[np.float64] = np.asarray(checkpoint.tensor(f"model.{name}"), dtype=np.float64)
    if adapted:
        values = _merged(checkpoint, name, values, down, down.replace("lora_A", "lora_B"))
    return narrow(values, dtype)


def _merged(checkpoint: Checkpoint, name: str, values: NDArray[np.float64], down: str, up: str) -> NDArray[np.float64]:
    """A weight and its adapter."""
    lora, found = _lora(checkpoint), checkpoint.manifest.tensors
    shapes = [found[n].shape for n in (f"model.{up}", f"model.{down}") if n in found]
    rank = shapes[-1][0] if shapes[-1] else 0
    if (
        values.ndim != 2
        or shapes != [(values.shape[0], rank), (rank, values.shape[1])]
        or found[f"model.{name}"].dtype not in FLOATS
    ):
        raise FullshardError(f"{checkpoint.place}: the adapter of {name} does not fit it; use another checkpoint")
    a = np.asarray(checkpoint.tensor(f"model.{down}"), dtype=np.float64)
    b = np.asarray(checkpoint.tensor(f"model.{up}"), dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return values + (b @ a) * (lora["alpha"] / lora["rank"])


def _lora(checkpoint: Checkpoint) -> dict[str, Any]:
    lora = _table(checkpoint.manifest.recipe, "lora")
    if not lora:
        raise FullshardError(f"{checkpoint.place} does not say how its adapters are scaled: it has no recipe")
    sound = all(_is_number(lora.get(key)) for key in ("rank", "alpha", "dropout")) and lora["rank"] > 0
    if not sound or not isinstance(lora.get("targets"), list | str):
        raise FullshardError(f"{checkpoint.place} does not say how its adapters are scaled: its recipe's lora makes no sense")
    return lora


def _table(recipe: dict[str, Any] | None, key: str) -> dict[str, Any]:
    """A table of the recipe that a manifest holds; what is no table is none."""
    found = (recipe or {}).get(key)
    return dict(found) if isinstance(found, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _model_name(checkpoint: Checkpoint) -> str:
    name = _table(checkpoint.manifest.recipe, "model").get("name")
    return name if isinstance(name, str) and name.isprintable() else ""


# -- Hugging Face -------------------------------------------------------------------------------------------


def export_hugging_face(checkpoint: Checkpoint, output: Path, config: Path | None, dtype: str | None) -> None:
    model = _model_name(checkpoint)
    origin = config or (Path(model) if is_directory(model) else None)
    like = {n: e.dtype for n, e in Files(origin).entries.items()} if origin and any(origin.glob("*.safetensors")) else {}
    sources = weights(checkpoint, like, dtype)
    made = None if origin else _config_of(model, sources, dtype)

    def fill(directory: Path) -> None:
        _write_shards(directory, sources)
        if origin:
            _copy(origin, directory, dtype)
        else:
            (directory / "config.json").write_text(json.dumps(made, indent=2) + "\n")

    write_whole_directory(output, fill)


def _write_shards(directory: Path, sources: Sequence[Source]) -> None:
    groups = in_files(sources, FILE_BYTES)
    where: dict[str, str] = {}
    for i, group in enumerate(groups):
        name = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        write_safetensors(directory / name, group, {"format": "pt"})
        where |= {s.name: name for s in group}
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(s.nbytes for s in sources)}, "weight_map": dict(sorted(where.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy(origin: Path, directory: Path, dtype: str | None) -> None:
    """Config, tokenizer and the like, as they are."""
    if not (origin / "config.json").is_file():
        raise FullshardError(f"{origin} has no config.json; give --config DIR, the directory of the original model")
    for path in sorted(p for pattern in COPIED for p in origin.glob(pattern)):
        if not any(path.match(pattern) for pattern in NOT_COPIED):
            shutil.copyfile(path, directory / path.name)
    if dtype:
        config = parse_json(read_small(directory / "config.json", 1 << 26), str(origin / "config.json"))
        if not isinstance(config, dict):
            raise FullshardError(f"{origin / 'config.json'} is no table; give --config DIR, the directory of the original model")
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = _torch_word(dtype)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _torch_word(dtype: str) -> str:
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}[dtype]


def _config_of(model: str, sources: Sequence[Source], dtype: str | None) -> dict[str, Any]:
    """Presets of the Llama family have Hugging Face's names and shapes; only their config has to be made."""
    size = PRESETS.get(model)
    if not isinstance(size, LlamaSize):
        raise FullshardError("this model has no config to copy; give --config DIR with one, or use --format torch")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.dim,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.ffn,
        "vocab_size": size.vocab,
        "max_position_embeddings": size.sequence,
        "rope_theta": size.theta,
        "rms_norm_eps": size.eps,
        "tie_word_embeddings": size.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": _torch_word(dtype or "fp32"),
    }


# -- PEFT and torch -----------------------------------------------------------------------------------------


def _export_peft(checkpoint: Checkpoint, output: Path, dtype: str | None) -> None:
    """The adapters alone, as `PeftModel.from_pretrained` reads them."""
    lora = _lora(checkpoint)
    tensors = {n.removeprefix("model."): t for n, t in checkpoint.manifest.tensors.items() if ".lora_" in n}
    adapters = {n: t for n, t in tensors.items() if not n.startswith("optimizer.")}
    if not adapters:
        raise FullshardError(f"{checkpoint.place} has no adapters; use --format hf")
    wanted = {n: WORDS[dtype] if dtype else t.dtype for n, t in adapters.items()}
    sources = [
        Source(n.replace(".default.", "."), wanted[n], t.shape, partial(_read, checkpoint, n, wanted[n]))
        for n, t in adapters.items()
    ]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _model_name(checkpoint) or None,
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": list(lora["targets"]),
        "bias": "none",
        "inference_mode": True,
    }

    def fill(directory: Path) -> None:
        write_safetensors(directory / "adapter_model.safetensors", sources, {"format": "pt"})
        (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")

    write_whole_directory(output, fill)


def _export_torch(checkpoint: Checkpoint, output: Path, dtype: str | None) -> None:
    """One file that `torch.load(…, weights_only=True)` reads as a state dict."""
    sources = weights(checkpoint, {}, dtype)
    partial_file = output.with_name(f".{output.name}.partial")
    missing = missing_directories(output.parent)
    try:
        with refusing(f"write {output}"):
            output.parent.mkdir(parents=True, exist_ok=True)
            _write_torch(partial_file, sources)
            partial_file.rename(output)
    except BaseException:
        with suppress(OSError):
            partial_file.unlink()
        remove_empty(missing)
        raise


def _write_torch(path: Path, sources: Sequence[Source]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", state_dict_pickle([(s.name, s.dtype, s.shape) for s in sources]))
        archive.writestr("archive/byteorder", "little")
        for i, source in enumerate(sources):
            with archive.open(f"archive/data/{i}", "w", force_zip64=True) as file:
                file.write(source.read())
        archive.writestr("archive/version", "3\n")
