"""A torchtitan TOML configuration as a recipe. Keys that the file leaves out have torchtitan's defaults, not the recipe's."""

from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.runs.migrate.deepspeed_json import carry_number
from fullshard.runs.migrate.recipe_draft import OFF, Draft
from fullshard.runs.recipe.recipe import FILL_IN

PRESETS = {("llama3", "8B"): "llama3-8b", ("llama3", "70B"): "llama3-70b", ("llama3", "405B"): "llama3-405b"}
DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
DATASETS = {"c4": "--dataset allenai/c4 --subset en"}
OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam"}

IDLE = {
    "job.*": "the run's directory is --run DIR",
    "metrics.*": "every step is in metrics.jsonl",
    "comm.*": "train.hang_seconds says when a run is called hung",
    "memory_estimation.*": "`fullshard plan MODEL --cluster 8xh100` predicts memory",
    "profiling.*": OFF,
    "model.tokenizer_path": "data is packed with its tokenizer before: `fullshard data pack --tokenizer PATH`",
    "model.hf_assets_path": "data is packed with its tokenizer before: `fullshard data pack --tokenizer PATH`",
    "model.print_after_conversion": OFF,
    "model.converters": OFF,
    "optimizer.implementation": "the update has one implementation for each home",
    "optimizer.early_step_in_backward": OFF,
    "training.gc_*": "Python's collector runs between steps by itself",
    "training.dataloader.*": "data.workers and data.prefetch load data in the background",
    "training.enable_cpu_offload": OFF,
    "parallelism.*": "this axis has one rank",
    "compile.*": "plan.compile compiles each block; the loss is chunked",
    "checkpoint.*": "checkpoints are sharded, verified and go to the run's directory",
    "activation_checkpoint.*": "recomputation has plan.remat and plan.remat_every alone",
    "quant*": "model.converters does not switch it on",
    "float8.*": "model.converters does not switch it on",
    "mx.*": "model.converters does not switch it on",
    "validation.*": OFF,
    "fault_tolerance.*": OFF,
    "experimental.*": OFF,
    "debug.*": OFF,
}
LOST = {
    "profiling.enable_*": "write profile.at = N, the step to profile, or run `fullshard profile RECIPE`",
    "optimizer.early_step_in_backward": "offloaded updates run under backward with optim.clip = 'none'",
    "model.converters": "bf16 is written; for float8 write plan.float8 = 'tensorwise' or 'rowwise'; there is no mx",
    "parallelism.pipeline_parallel_degree": "there is no pipeline parallelism; shard over those ranks, or write plan.tensor",
    "parallelism.context_parallel_degree": "there is no context parallelism; plan.remat and home.activations save memory",
    "parallelism.expert_tensor_parallel_degree": "experts are not split by a tensor axis",
    "parallelism.enable_async_tensor_parallel": "the traffic of a tensor axis is not overlapped",
    "experimental.*": "no code of the configuration is run; write model.name = 'file.py:callable'",
    "fault_tolerance.*": "`fullshard train --max-restarts N` starts failed ranks again",
    "debug.deterministic*": "not part of a recipe; seeds and the order of data are fixed anyway",
    "debug.moe_force_load_balance": "tokens go where the router sends them",
    "checkpoint.exclude_from_loading": "a checkpoint is loaded whole",
    "checkpoint.load_step": "write `--resume PATH` with the checkpoint's directory",
    "checkpoint.initial_load_path": "write model.weights = 'path', a directory of safetensors",
    "activation_checkpoint.memory_budget": "plan.strategy = 'auto' with plan.limit chooses recomputation for a limit",
}


def read_torchtitan(draft: Draft) -> None:
    """Fill the draft from a torchtitan file's keys."""
    _carry_model(draft)
    _carry_optimizer(draft)
    _carry_length(draft)
    _carry_axes(draft)
    _carry_batch(draft)
    _carry_precision(draft)
    _carry_remat(draft)
    _carry_checkpoints(draft)
    _carry_validation(draft)
    _carry_logs(draft)
    for key in [k for k in draft.leaves if k.startswith("parallelism.") and draft.get(k) in (1, -1)]:
        draft.ignore(key, IDLE["parallelism.*"])
    if draft.get("parallelism.pipeline_parallel_degree", 1) == 1:
        for key in [k for k in draft.leaves if k.startswith("parallelism.pipeline_parallel_")]:
            draft.ignore(key, "there is one pipeline stage")
    if draft.get("checkpoint.load_step") == -1:
        draft.ignore("checkpoint.load_step", "`--resume auto` takes the newest")
    draft.assign_rest(IDLE, LOST)


def _carry_model(draft: Draft) -> None:
    name, flavor = draft.word("model.name", "llama3"), draft.word("model.flavor", "debugmodel")
    sources = [key for key in ("model.name", "model.flavor") if key in draft.leaves]
    preset = PRESETS.get((name, flavor))
    if preset and sources:
        draft.carry(sources, "model.name", preset)
    for source in sources:
        draft.lose(
            source, f"there is no preset of {name} {flavor}; write model.name, a Hugging Face directory or file.py:callable"
        )
    if preset is None:
        draft.assume("model.name", FILL_IN, f"{name} {flavor}: a preset, a Hugging Face directory, or file.py:callable")
    dataset = draft.get("training.dataset", "c4_test")
    path = draft.get("training.dataset_path") or DATASETS.get(str(dataset), "FILES")
    tokenizer = draft.get("model.hf_assets_path") or draft.get("model.tokenizer_path") or "PATH"
    command = f"fullshard data pack {path} -o tokens --tokenizer {tokenizer}"
    draft.assume("data.path", FILL_IN, f"the directory that `{command}` makes")
    for key in ("training.dataset", "training.dataset_path"):
        draft.drop(key, f"data is packed before: `{command}`, then data.path = 'tokens'")


def _carry_optimizer(draft: Draft) -> None:
    source, name = "optimizer.name", draft.word("optimizer.name", "AdamW")
    if name not in OPTIMIZERS:
        raise FullshardError(f"optimizer.name = {name!r} is no optimizer of torchtitan's; write AdamW or Adam")
    draft.carry_or_default(source, "optim.name", OPTIMIZERS[name], "adamw")
    for key in ("lr", "eps", "weight_decay"):
        carry_number(draft, f"optimizer.{key}", f"optim.{key}")
    betas = [key for key in ("optimizer.beta1", "optimizer.beta2") if key in draft.leaves]
    if betas:
        draft.carry(betas, "optim.betas", [float(draft.get("optimizer.beta1", 0.9)), float(draft.get("optimizer.beta2", 0.95))])
    draft.default("optim.lr", 8e-4)
    draft.default("optim.decay_all", True)
    if draft.number("training.max_norm") is not None:
        clip = draft.number("training.max_norm")
        draft.carry("training.max_norm", "optim.clip", float(clip) if clip else "none")


def _carry_length(draft: Draft) -> None:
    """Steps, sequence, and the schedule: a rise, a plateau if `decay_ratio` is given, and a fall to the last step."""
    for source, key, default in (("training.steps", "train.steps", 10_000), ("training.seq_len", "data.sequence", 2048)):
        _carry_count(draft, source, key, default)
    _carry_count(draft, "lr_scheduler.warmup_steps", "schedule.warmup", 200)
    steps, warmup = draft.entries["train.steps"].value, draft.entries["schedule.warmup"].value
    if warmup > steps:
        raise FullshardError(f"lr_scheduler.warmup_steps = {warmup} is more than training.steps = {steps}; mend it in the file")
    ratio, shape = draft.number("lr_scheduler.decay_ratio"), draft.word("lr_scheduler.decay_type", "linear")
    if ratio == 0:
        kind = "constant"
    elif ratio is None or round(steps * ratio) >= steps - warmup:
        kind = shape if shape in ("linear", "cosine") else "linear"
    else:
        kind = "wsd"
        draft.carry("lr_scheduler.decay_ratio", "schedule.decay", round(steps * ratio))
    if "lr_scheduler.decay_type" in draft.leaves and (kind == shape or (kind == "wsd" and shape == "linear")):
        draft.carry("lr_scheduler.decay_type", "schedule.kind", kind)
    draft.default("schedule.kind", kind)
    draft.ignore("lr_scheduler.decay_ratio", "schedule.kind says it")
    if kind == "constant":
        draft.ignore("lr_scheduler.decay_type", "the rate does not fall")
    draft.lose("lr_scheduler.decay_type", f"schedule.kind = '{kind}' falls linearly")
    carry_number(draft, "lr_scheduler.min_lr_factor", "schedule.final")
    draft.default("schedule.final", 0.0)
    draft.drop("lr_scheduler.total_steps", "the schedule ends with the run: train.steps")


def _carry_count(draft: Draft, source: str, key: str, default: int) -> None:
    draft.carry_or_default(source, key, draft.whole(source), default)


def _carry_axes(draft: Draft) -> None:
    copies, shard = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
    reshard = "parallelism.fsdp_reshard_after_forward"
    replicate, sharded = draft.degree(copies, 1), draft.degree(shard, -1)
    if replicate > 1 and sharded == 1:
        draft.carry([copies, *([shard] if shard in draft.leaves else [])], "plan.strategy", "ddp")
    elif replicate > 1:
        draft.carry(copies, "plan.strategy", "hybrid")
        draft.carry(copies, "plan.replicate", replicate)
    elif draft.get(reshard) == "never":
        draft.carry(reshard, "plan.strategy", "zero2")
    elif reshard in draft.leaves:
        draft.carry(reshard, "plan.strategy", "zero3")
    else:
        draft.default("plan.strategy", "zero3")
    draft.ignore(reshard, "the strategy says it")
    draft.ignore(shard, "the shard axis is what the ranks leave")
    for source, key in (("tensor", "plan.tensor"), ("expert", "plan.expert")):
        size = draft.whole(f"parallelism.{source}_parallel_degree")
        if (size or 1) > 1:
            draft.carry(f"parallelism.{source}_parallel_degree", key, size)


def _carry_batch(draft: Draft) -> None:
    rows, total = draft.whole("training.local_batch_size"), draft.number("training.global_batch_size") or -1
    old = draft.whole("training.batch_size")
    source = "training.local_batch_size" if rows else "training.batch_size"
    micro = rows or old or 8
    draft.carry_or_default(source, "train.micro_batch", micro, micro)
    if total > 0:
        draft.carry("training.global_batch_size", "train.global_batch", int(total))
        return
    draft.ignore("training.global_batch_size", "it is the local batch times the data ranks")
    ranks, known = _data_ranks(draft)
    draft.assume("train.global_batch", micro * ranks, f"{micro} × {ranks} data ranks{known}")


def _data_ranks(draft: Draft) -> tuple[int, str]:
    """The ranks that read different data, and a word if they are assumed."""
    replicate, shard = (
        draft.degree(f"parallelism.data_parallel_{key}_degree", d) for key, d in (("replicate", 1), ("shard", -1))
    )
    tensor = draft.degree("parallelism.tensor_parallel_degree", 1)
    if draft.ranks:
        return max(1, draft.ranks // tensor), ""
    if shard > 0:
        return replicate * shard, ""
    return max(replicate, 8), "; give --ranks if there are others"


def _carry_precision(draft: Draft) -> None:
    for source, key, default in (
        ("training.mixed_precision_param", "plan.compute", "bf16"),
        ("training.mixed_precision_reduce", "plan.reduce", "fp32"),
    ):
        if draft.word(source) in DTYPES:
            draft.carry(source, key, DTYPES[draft.word(source)])
        else:
            draft.default(key, default)
    if draft.get("training.dtype") == "bfloat16":
        draft.carry("training.dtype", "plan.master", "bf16")
    draft.ignore("training.dtype", "masters are fp32")
    if draft.get("training.enable_cpu_offload") is True:
        draft.carry("training.enable_cpu_offload", "home.params", "host")
        draft.carry("training.enable_cpu_offload", "home.optimizer", "host")


def _carry_remat(draft: Draft) -> None:
    source, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    mode, every = draft.word(source, "selective"), str(draft.get(option, "2"))
    remat: Any = {"none": "none", "full": "full", "selective": "selective", "memory_budget": "selective"}.get(mode)
    if remat is None:
        raise FullshardError(f"{source} = {mode!r} is unknown; write none, selective or full")
    if mode == "selective" and every.isdigit():  # every n-th layer is recomputed whole
        remat = "full"
        if int(every) > 1 and option in draft.leaves:
            draft.carry(option, "plan.remat_every", int(every))
        elif int(every) > 1:
            draft.default("plan.remat_every", int(every))
    if mode == "memory_budget":
        draft.lose(source, LOST["activation_checkpoint.memory_budget"])
        draft.assume("plan.remat", remat, "there is no memory budget here")
    elif source in draft.leaves:
        draft.carry(source, "plan.remat", remat)
    else:
        draft.default("plan.remat", remat)
    if mode == "selective" and option in draft.leaves and every == "op":
        draft.carried[option] = "plan.remat"
    if draft.get("compile.enable") is True and "model" in draft.get("compile.components", ["model"]):
        draft.carry("compile.enable", "plan.compile", True)


def _carry_checkpoints(draft: Draft) -> None:
    if draft.get("checkpoint.enable", draft.get("checkpoint.enable_checkpoint")) is not True:
        off = "they are written every 30 minutes and at the end; for none write checkpoint.minutes = 0, checkpoint.final = false"
        draft.lose("checkpoint.enable", off)
        draft.lose("checkpoint.enable_checkpoint", off)
        return
    for source in ("checkpoint.enable", "checkpoint.enable_checkpoint"):
        draft.ignore(source, "checkpoints are always on")
    every = draft.whole("checkpoint.interval")
    if every is not None:
        draft.carry("checkpoint.interval", "checkpoint.every", every)
        draft.carry("checkpoint.interval", "checkpoint.minutes", 0.0)
    keep = draft.whole("checkpoint.keep_latest_k")
    if keep is not None:
        draft.carry("checkpoint.keep_latest_k", "checkpoint.keep", keep)
    if "checkpoint.async_mode" in draft.leaves:
        draft.carry("checkpoint.async_mode", "checkpoint.background", draft.get("checkpoint.async_mode") != "disabled")
    if draft.get("checkpoint.last_save_in_hf") is True:
        draft.carry("checkpoint.last_save_in_hf", "checkpoint.export", True)
    if draft.get("checkpoint.initial_load_in_hf") is True and draft.get("checkpoint.initial_load_path"):
        draft.carry("checkpoint.initial_load_path", "model.weights", str(draft.get("checkpoint.initial_load_path")))


def _carry_validation(draft: Draft) -> None:
    if draft.get("validation.enable") is not True:
        return
    draft.assume("data.valid", FILL_IN, "a directory that `fullshard data pack` made of held-out text")
    draft.carried["validation.enable"] = "data.valid"
    _carry_count(draft, "validation.freq", "eval.every", 10)
    batches = draft.number("validation.steps")
    if batches and batches > 0:
        draft.carry("validation.steps", "eval.batches", int(batches))
    for key in [k for k in draft.leaves if k.startswith("validation.")]:
        draft.ignore(key, "evaluation has the sequence and micro-batch of training: eval, data.valid")


def _carry_logs(draft: Draft) -> None:
    if draft.get("metrics.enable_tensorboard") is True:
        draft.carry("metrics.enable_tensorboard", "log.tensorboard", True)
    if draft.get("metrics.enable_wandb") is True:
        draft.carry("metrics.enable_wandb", "log.wandb", "torchtitan")
    for source in ("debug.seed", "training.seed"):
        if draft.whole(source) is not None:
            draft.carry(source, "train.seed", draft.whole(source))
