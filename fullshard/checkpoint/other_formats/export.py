"""Exports a checkpoint's weights: to a Hugging Face directory, one torch file, a directory of Orbax, or PEFT adapters.

Works a tensor at a time. Memory is bounded by the largest tensor and, if it has an adapter, the adapter's two factors.
"""

import json
import math
import shutil
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullshard.base.errors import FullshardError
from fullshard.base.reading import is_directory, parse_json
from fullshard.base.untrusted_files import read_small, refusing_os_errors
from fullshard.checkpoint.average import FLOATS, cast_floats
from fullshard.checkpoint.commit import find
from fullshard.checkpoint.file_rules import FilePiece, FileRule, bare_name, pieces_by_file, rules_from_json
from fullshard.checkpoint.other_formats.export_orbax import export_orbax
from fullshard.checkpoint.other_formats.torch_pickles import state_dict_pickle
from fullshard.checkpoint.reader import Checkpoint, as_numpy
from fullshard.checkpoint.safetensors import Box, SafetensorsDirectory
from fullshard.checkpoint.verify import refuse_damaged
from fullshard.checkpoint.writer import (
    FILE_BYTES,
    TensorSource,
    missing_directories,
    remove_empty,
    split_into_files,
    write_directory,
    write_safetensors,
)
from fullshard.model.presets import PRESETS, LlamaSize

SAFETENSORS_DTYPE = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "fp64": "F64"}
TORCH_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
COPIED = ("*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken")
NOT_COPIED = ("*.index.json", "adapter_config.json", "trainer_state.json")


def export(where: str, output: Path, form: str, config: Path | None = None, dtype: str | None = None) -> Path:
    """Verify a checkpoint and write its weights to `output`. `form`: `hf`, `peft`, `torch` or `orbax`. `config`: the
    directory to copy a Hugging Face config and tokenizer from. Returns `output`."""
    if dtype is not None and dtype not in SAFETENSORS_DTYPE:
        raise FullshardError(f"dtype is one of {', '.join(SAFETENSORS_DTYPE)}, not {dtype!r}")
    with refusing_os_errors(f"write {output}"):
        exists = output.exists()
    if exists:
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
                raise FullshardError(f"--config has no effect with --format {form}; leave it out")
            if form == "orbax":
                export_orbax(weights(checkpoint, {}, dtype), output)
            else:
                _export_torch(checkpoint, output, dtype)
    return output


# -- weights ------------------------------------------------------------------------------------------------


def weights(checkpoint: Checkpoint, original: dict[str, str], dtype: str | None, *, as_files: bool = False) -> list[TensorSource]:
    """The model's tensors, adapters merged, under the names of the model without wrappers. Their dtype is `dtype`, or that
    in `original`, the dtypes of the original model's files, or that in the checkpoint. `as_files`: arranged as in the files
    that `save_pretrained` would write, if the checkpoint says how."""
    names = [n.removeprefix("model.") for n in checkpoint.manifest.tensors if n.startswith("model.")]
    if not names:
        raise FullshardError(f"{checkpoint.place} holds no weights")
    plain = {bare_name(n): n for n in names if ".lora_" not in n}
    rules = _file_rules(checkpoint, plain) if as_files else []
    stored = {t for rule in rules for t in rule.tensors}
    sources: list[TensorSource] = []
    for bare, name in plain.items():
        if bare not in stored:
            wanted = _dtype(checkpoint, name, original.get(bare), dtype)
            shape = checkpoint.manifest.tensors[f"model.{name}"].shape
            sources.append(TensorSource(bare, wanted, shape, partial(_read, checkpoint, name, wanted)))
    for rule in rules:
        sources += _arranged(checkpoint, rule, plain, original, dtype)
    if not sources or len({s.name for s in sources}) < len(sources) or len(plain) < sum(".lora_" not in n for n in names):
        raise FullshardError(f"{checkpoint.place} has no weights, or two of one name once wrappers are cut off; rename them")
    return sources


def _dtype(checkpoint: Checkpoint, name: str, original: str | None, dtype: str | None) -> str:
    """The dtype that a tensor is written in. Only floats are converted."""
    saved = checkpoint.manifest.tensors[f"model.{name}"].dtype
    other = SAFETENSORS_DTYPE[dtype] if dtype else original or saved
    return other if saved in FLOATS and other in FLOATS else saved


# -- tensors that files hold in another arrangement ---------------------------------------------------------


def _file_rules(checkpoint: Checkpoint, plain: dict[str, str]) -> list[FileRule]:
    """The rules in the checkpoint's manifest. `plain`: the checkpoint's name of each tensor of the model."""
    shapes = {bare: checkpoint.manifest.tensors[f"model.{name}"].shape for bare, name in plain.items()}
    try:
        return rules_from_json(checkpoint.manifest.state.get("files", []), shapes)
    except ValueError:
        raise FullshardError(f"{checkpoint.place}: `files` of its manifest is malformed; use another checkpoint") from None


def _arranged(
    checkpoint: Checkpoint, rule: FileRule, plain: dict[str, str], original: dict[str, str], dtype: str | None
) -> list[TensorSource]:
    """The tensors that files have in place of a rule's."""
    shapes, sources = rule.file_shapes(), []
    for file, pieces in pieces_by_file([rule]).items():
        wanted = _dtype(checkpoint, plain[pieces[0].tensor], original.get(file), dtype)
        parts = [(plain[p.tensor], p) for p in pieces]
        sources.append(TensorSource(file, wanted, shapes[file], partial(_read_pieces, checkpoint, parts, shapes[file], wanted)))
    return sources


def _read_pieces(
    checkpoint: Checkpoint, parts: list[tuple[str, FilePiece]], shape: tuple[int, ...], dtype: str
) -> bytes | bytearray:
    """One tensor of a file, from parts of the checkpoint's tensors."""
    values: NDArray[Any] | None = None
    for name, piece in parts:
        part = _part(checkpoint, name, piece.box, dtype)
        part = part.reshape([part.shape[d] for d in sorted(piece.dims)])
        part = part.transpose([sorted(piece.dims).index(d) for d in piece.dims])
        if values is None:
            values = np.empty(shape, part.dtype)
        values[tuple(slice(a, a + n) for a, n in zip(piece.start, part.shape, strict=True))] = part
    assert values is not None
    return values.tobytes() if values.dtype.kind == "V" else cast_floats(values, dtype)


def _part(checkpoint: Checkpoint, name: str, box: Box, dtype: str) -> NDArray[Any]:
    """A box of a tensor: as it is stored if it has this dtype, in fp64 otherwise."""
    record = checkpoint.manifest.tensors[f"model.{name}"]
    shape = tuple(b - a for a, b in box)
    if _adapter(checkpoint, name):
        merged = np.frombuffer(_read(checkpoint, name, "F64"), np.float64).reshape(record.shape)
        return merged[tuple(slice(a, b) for a, b in box)]
    checkpoint.refuse_wrong_sizes({chunk.file for chunk in record.chunks})
    data = bytearray(math.prod(shape) * record.item_bytes)
    if data:
        checkpoint.read(f"model.{name}", box, memoryview(data))
    if record.dtype == dtype:
        return np.frombuffer(data, f"V{record.item_bytes}").reshape(shape)
    return np.asarray(as_numpy(data, replace(record, shape=shape, chunks=())), dtype=np.float64)


def _adapter(checkpoint: Checkpoint, name: str) -> str | None:
    """The name of a weight's first adapter factor, if it has an adapter."""
    lora_a = name.replace(".base_layer.weight", ".lora_A.default.weight")
    return lora_a if lora_a != name and f"model.{lora_a}" in checkpoint.manifest.tensors else None


def _read(checkpoint: Checkpoint, name: str, dtype: str) -> bytes | bytearray:
    """A tensor's bytes in `dtype`, with its adapter merged in."""
    record = checkpoint.manifest.tensors[f"model.{name}"]
    lora_a = _adapter(checkpoint, name)
    if lora_a is None and record.dtype == dtype:
        return checkpoint.raw(f"model.{name}")
    values: NDArray[np.float64] = np.asarray(checkpoint.tensor(f"model.{name}"), dtype=np.float64)
    if lora_a is not None:
        values = _merged(checkpoint, name, values, lora_a, lora_a.replace("lora_A", "lora_B"))
    return cast_floats(values, dtype)


def _merged(checkpoint: Checkpoint, name: str, values: NDArray[np.float64], lora_a: str, lora_b: str) -> NDArray[np.float64]:
    """The weight `values` with its adapter added."""
    lora, tensors = _lora(checkpoint), checkpoint.manifest.tensors
    shapes = [tensors[n].shape for n in (f"model.{lora_b}", f"model.{lora_a}") if n in tensors]
    rank = shapes[-1][0] if shapes[-1] else 0
    if (
        values.ndim != 2
        or shapes != [(values.shape[0], rank), (rank, values.shape[1])]
        or tensors[f"model.{name}"].dtype not in FLOATS
    ):
        raise FullshardError(f"{checkpoint.place}: the adapter of {name} does not fit it; use another checkpoint")
    a = np.asarray(checkpoint.tensor(f"model.{lora_a}"), dtype=np.float64)
    b = np.asarray(checkpoint.tensor(f"model.{lora_b}"), dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return values + (b @ a) * (lora["alpha"] / lora["rank"])


def _lora(checkpoint: Checkpoint) -> dict[str, Any]:
    lora = _table(checkpoint.manifest.recipe, "lora")
    if not lora:
        raise FullshardError(f"{checkpoint.place} does not say how its adapters are scaled: it has no recipe")
    valid = all(_is_number(lora.get(key)) for key in ("rank", "alpha", "dropout")) and lora["rank"] > 0
    if not valid or not isinstance(lora.get("targets"), list | str):
        raise FullshardError(f"{checkpoint.place} does not say how its adapters are scaled: its recipe's lora is malformed")
    return lora


def _table(recipe: dict[str, Any] | None, key: str) -> dict[str, Any]:
    """A table of the manifest's recipe; empty if it is missing or not a table."""
    value = (recipe or {}).get(key)
    return dict(value) if isinstance(value, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _model_name(checkpoint: Checkpoint) -> str:
    name = _table(checkpoint.manifest.recipe, "model").get("name")
    return name if isinstance(name, str) and name.isprintable() else ""


# -- Hugging Face -------------------------------------------------------------------------------------------


def export_hugging_face(checkpoint: Checkpoint, output: Path, config: Path | None, dtype: str | None) -> None:
    model = _model_name(checkpoint)
    origin = config or (Path(model) if is_directory(model) else None)
    original: dict[str, str] = {}
    if origin and any(origin.glob("*.safetensors")):
        original = {n: e.dtype for n, e in SafetensorsDirectory(origin).entries.items()}
    sources = weights(checkpoint, original, dtype, as_files=True)
    preset_config = None if origin else _config_of(model, dtype)

    def fill(directory: Path) -> None:
        _write_shards(directory, sources)
        if origin:
            _copy(origin, directory, dtype)
        else:
            (directory / "config.json").write_text(json.dumps(preset_config, indent=2) + "\n")

    write_directory(output, fill)


def _write_shards(directory: Path, sources: Sequence[TensorSource]) -> None:
    groups = split_into_files(sources, FILE_BYTES)
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups):
        name = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        write_safetensors(directory / name, group, {"format": "pt"})
        weight_map |= {s.name: name for s in group}
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(s.nbytes for s in sources)}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy(origin: Path, directory: Path, dtype: str | None) -> None:
    """Copy config, tokenizer and the like, and note `dtype` in the config."""
    if not (origin / "config.json").is_file():
        raise FullshardError(f"{origin} has no config.json; give --config DIR, the directory of the original model")
    for path in sorted(p for pattern in COPIED for p in origin.glob(pattern)):
        if not any(path.match(pattern) for pattern in NOT_COPIED):
            shutil.copyfile(path, directory / path.name)
    if dtype:
        config = parse_json(read_small(directory / "config.json", 1 << 26), str(origin / "config.json"))
        if not isinstance(config, dict):
            raise FullshardError(f"{origin / 'config.json'} is not a table; give --config DIR, the original model's directory")
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = TORCH_DTYPE[dtype]
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _config_of(model: str, dtype: str | None) -> dict[str, Any]:
    """The Hugging Face config of a preset. Those of the Llama family have Hugging Face's names and shapes already."""
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
        "dtype": TORCH_DTYPE[dtype or "fp32"],
    }


# -- PEFT and torch -----------------------------------------------------------------------------------------


def _export_peft(checkpoint: Checkpoint, output: Path, dtype: str | None) -> None:
    """Write the adapters alone, as `PeftModel.from_pretrained` reads them."""
    lora = _lora(checkpoint)
    tensors = {n.removeprefix("model."): t for n, t in checkpoint.manifest.tensors.items() if ".lora_" in n}
    adapters = {n: t for n, t in tensors.items() if not n.startswith("optimizer.")}
    if not adapters:
        raise FullshardError(f"{checkpoint.place} has no adapters; use --format hf")
    wanted = {n: SAFETENSORS_DTYPE[dtype] if dtype else t.dtype for n, t in adapters.items()}
    sources = [
        TensorSource(n.replace(".default.", "."), wanted[n], t.shape, partial(_read, checkpoint, n, wanted[n]))
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

    write_directory(output, fill)


def _export_torch(checkpoint: Checkpoint, output: Path, dtype: str | None) -> None:
    """Write one file that `torch.load(…, weights_only=True)` reads as a state dict."""
    sources = weights(checkpoint, {}, dtype)
    partial_file = output.with_name(f".{output.name}.partial")
    missing = missing_directories(output.parent)
    try:
        with refusing_os_errors(f"write {output}"):
            output.parent.mkdir(parents=True, exist_ok=True)
            _write_torch(partial_file, sources)
            partial_file.rename(output)
    except BaseException:
        with suppress(OSError):
            partial_file.unlink()
        remove_empty(missing)
        raise


def _write_torch(path: Path, sources: Sequence[TensorSource]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", state_dict_pickle([(s.name, s.dtype, s.shape) for s in sources]))
        archive.writestr("archive/byteorder", "little")
        for i, source in enumerate(sources):
            with archive.open(f"archive/data/{i}", "w", force_zip64=True) as file:
                file.write(source.read())
        archive.writestr("archive/version", "3\n")
