"""An Accelerate configuration as a recipe. It says how to shard and launch; model, data and optimizer are the script's."""

from pathlib import Path

from fullshard.base.errors import FullshardError
from fullshard.base.reading import parse_json, read_text
from fullshard.runs.migrate.deepspeed_json import carry_disk, carry_home, carry_number, finish_homes, read_deepspeed
from fullshard.runs.migrate.recipe_draft import OFF, Draft, flatten

STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hybrid",
    "HYBRID_SHARD_ZERO2": "hybrid",
}
NUMBERED = dict(enumerate(STRATEGIES, start=1))
REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "MULTI_SDAA", "MULTI_MUSA")
INLINE = "deepspeed_config.deepspeed_config_file"
LAUNCH = "ranks are started by `fullshard train`, torchrun or srun"
FLOAT8 = "bf16 is written; for float8 write plan.float8 = 'tensorwise' or 'rowwise'"
WRAP = "blocks are found in the model: `fullshard units MODEL`"

IDLE = {
    "compute_environment": LAUNCH,
    "num_machines": LAUNCH,
    "num_processes": LAUNCH,
    "machine_rank": LAUNCH,
    "main_process_ip": LAUNCH,
    "main_process_port": LAUNCH,
    "main_training_function": LAUNCH,
    "rdzv_*": LAUNCH,
    "same_network": LAUNCH,
    "gpu_ids": LAUNCH + ", on the GPUs of CUDA_VISIBLE_DEVICES",
    "use_cpu": LAUNCH + ", on GPUs where there are some",
    "enable_cpu_affinity": LAUNCH,
    "mpirun_config.*": LAUNCH,
    "deepspeed_config.deepspeed_multinode_launcher": LAUNCH,
    "deepspeed_config.deepspeed_*filter": LAUNCH,
    "deepspeed_config.deepspeed_hostfile": LAUNCH,
    "debug": "the first step is always checked across ranks",
    "downcast_bf16": "it is for TPUs",
    "tpu_*": "it is for TPUs",
    "command*": "it is for TPUs",
    "deepspeed_config.zero3_init_flag": "models are built on meta",
    "deepspeed_config.zero3_save_16bit_model": "`fullshard checkpoint export` writes whole weights",
    "deepspeed_config": OFF,
    "fsdp_config": OFF,
    "megatron_lm_config": OFF,
    "fsdp_config.fsdp_version": "there is one FSDP here",
    "fsdp_config.fsdp_auto_wrap_policy": WRAP,
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": WRAP,
    "fsdp_config.fsdp_backward_prefetch": "a unit is gathered ahead in forward and backward: plan.prefetch",
    "fsdp_config.fsdp_forward_prefetch": "a unit is gathered ahead in forward and backward: plan.prefetch",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "each rank reads only its own bytes",
    "fsdp_config.fsdp_sync_module_states": "all ranks compute the same weights from the seed",
    "fsdp_config.fsdp_use_orig_params": "there are no flat parameters",
    "fsdp_config.fsdp_state_dict_type": "checkpoints are sharded; `fullshard checkpoint export` writes whole weights",
    "fsdp_config.fsdp_offload_params": OFF,
    "fsdp_config.fsdp_activation_checkpointing": OFF,
    "parallelism_config.*": "this axis has one rank",
}
LOST = {
    "fsdp_config.fsdp_min_num_params": "write a plan file: `fullshard plan MODEL --min-params N -o plan.json`, then plan.file",
    "fsdp_config.fsdp_ignored_modules": "for units that stay whole write plan.strategy = 'mixed' and plan.keep_whole",
    "fp8_config.*": FLOAT8,
    "dynamo_config.*": "plan.compile = true compiles each block",
    "deepspeed_config.deepspeed_moe_layer_cls_names": "for mixtures write plan.expert, the ranks that share the experts",
    "tpu_name": "it is for TPUs",
    "parallelism_config.*cp*": "there is no context parallelism; plan.remat and home.activations save memory",
    "parallelism_config.*sp*": "there is no sequence parallelism; plan.remat and home.activations save memory",
}


def read_accelerate(draft: Draft, folder: Path) -> None:
    """Fill the draft from an Accelerate file's keys. `folder`: its own, for the DeepSpeed file that it may name."""
    _carry_ranks(draft)
    kind = str(draft.get("distributed_type") or "NO").upper()  # YAML reads a bare NO as false
    if kind == "FSDP":
        _carry_fsdp(draft)
    elif kind == "DEEPSPEED":
        _carry_deepspeed(draft, folder)
    elif kind in REPLICATED:
        draft.carry_or_default("distributed_type", "plan.strategy", "ddp", "ddp")
    else:
        raise FullshardError(
            f"distributed_type = {kind!r} has no strategy here; write FSDP, DEEPSPEED or MULTI_GPU, or begin with recipes/"
        )
    _carry_precision(draft)
    _carry_compile(draft)
    _carry_axes(draft)
    _carry_shared(draft)
    lost = LOST | _outside_the_kind(kind)
    if draft.get("fsdp_config.fsdp_auto_wrap_policy") in ("SIZE_BASED_WRAP", "NO_WRAP"):
        lost["fsdp_config.fsdp_auto_wrap_policy"] = f"{WRAP}; for others write a plan file with --class, --names or --min-params"
    for key in [k for k in draft.leaves if k.startswith("parallelism_config.")]:
        if draft.get(key) in (1, "1"):
            draft.ignore(key, IDLE["parallelism_config.*"])
    draft.assign_rest(IDLE, lost)


def _carry_ranks(draft: Draft) -> None:
    """The number of ranks is no key of a recipe; the global batch follows from it."""
    draft.ranks = draft.ranks or draft.whole("num_processes")


def _carry_fsdp(draft: Draft) -> None:
    version, strategy = "fsdp_config.fsdp_reshard_after_forward", "fsdp_config.fsdp_sharding_strategy"
    source = strategy if strategy in draft.leaves else version
    stage = draft.word(source, True)
    name = NUMBERED.get(stage, "") if isinstance(stage, int) and not isinstance(stage, bool) else str(stage).upper()
    name = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(name, name)
    if name not in STRATEGIES:
        raise FullshardError(f"{source} = {stage!r} is no sharding strategy; write {', '.join(STRATEGIES)}, true or false")
    sources = [key for key in ("distributed_type", source) if key in draft.leaves]
    draft.carry(sources, "plan.strategy", STRATEGIES[name])
    draft.ignore(version, f"{strategy} says it")
    if STRATEGIES[name] == "hybrid":
        nodes = draft.whole("num_machines") or 1
        draft.assume("plan.replicate", max(2, nodes), "copies of the model, one in each machine")
    if name == "HYBRID_SHARD_ZERO2":
        draft.carried.pop(source)
        draft.lose(source, 'parameters are gathered again for backward; a plan file can keep them: `"reshard": false`')
    if draft.get("fsdp_config.fsdp_offload_params") is True:
        draft.carry("fsdp_config.fsdp_offload_params", "home.params", "host")
        draft.carry("fsdp_config.fsdp_offload_params", "home.optimizer", "host")
    if draft.get("fsdp_config.fsdp_activation_checkpointing") is True:
        draft.carry("fsdp_config.fsdp_activation_checkpointing", "plan.remat", "full")


def _carry_deepspeed(draft: Draft, folder: Path) -> None:
    """From the keys of this file, or from the DeepSpeed file that it names."""
    if draft.get(INLINE):
        path = folder / str(draft.get(INLINE))
        tree = parse_json(read_text(path, "DeepSpeed configuration"), str(path))
        if not isinstance(tree, dict):
            raise FullshardError(f"{path} is no DeepSpeed configuration: it is not a JSON object")
        draft.carried[INLINE] = "the keys below"
        draft.carried["distributed_type"] = "plan.strategy"
        inner = Draft("DeepSpeed", flatten(tree), draft.ranks)
        read_deepspeed(inner)
        _take_over(draft, inner)
        return
    stage = "deepspeed_config.zero_stage"
    sources = [key for key in ("distributed_type", stage) if key in draft.leaves]
    number = draft.whole(stage) if stage in draft.leaves else 2
    names = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
    if number not in names:
        raise FullshardError(f"{stage} = {number!r} is no ZeRO stage; write 0, 1, 2 or 3")
    draft.carry(sources, "plan.strategy", names[number])
    for part, key in (("optimizer", "home.optimizer"), ("param", "home.params")):
        source, path_key = f"deepspeed_config.offload_{part}_device", f"deepspeed_config.offload_{part}_nvme_path"
        if source in draft.leaves:
            carry_home(draft, source, key)
        if draft.get(source) == "nvme" and path_key in draft.leaves:
            carry_disk(draft, path_key)
        draft.ignore(path_key, OFF)
    finish_homes(draft)
    clip = draft.number("deepspeed_config.gradient_clipping")
    if clip is not None:
        draft.carry("deepspeed_config.gradient_clipping", "optim.clip", float(clip) if clip else "none")


def _take_over(draft: Draft, inner: Draft) -> None:
    """What the DeepSpeed file says, under the name of its file."""
    draft.leaves |= inner.leaves
    draft.entries |= inner.entries
    draft.carried |= inner.carried
    draft.idle |= inner.idle
    draft.lost |= inner.lost


def _carry_precision(draft: Draft) -> None:
    dtype = draft.word("mixed_precision")
    if dtype in ("bf16", "fp16"):
        draft.carry("mixed_precision", "plan.compute", dtype)
    elif dtype == "fp8":
        draft.lose("mixed_precision", FLOAT8)
        draft.assume("plan.compute", "bf16", "float8 is a choice of its own")
    elif dtype in ("no", False) and "plan.compute" not in draft.entries:  # YAML reads a bare no as false
        draft.carry("mixed_precision", "plan.compute", "fp32")
    draft.ignore("mixed_precision", "the DeepSpeed file says it")


def _carry_compile(draft: Draft) -> None:
    backend = "dynamo_config.dynamo_backend"
    if str(draft.get(backend, "no")).lower() not in ("no", "false", "eager"):
        draft.carry(backend, "plan.compile", True, "each block")
    draft.ignore(backend, OFF)


def _carry_axes(draft: Draft) -> None:
    copies, tensor = "parallelism_config.parallelism_config_dp_replicate_size", "parallelism_config.parallelism_config_tp_size"
    if (draft.whole(copies) or 1) > 1:
        draft.carry(copies, "plan.strategy", "hybrid")
        draft.carry(copies, "plan.replicate", draft.whole(copies))
    if (draft.whole(tensor) or 1) > 1:
        draft.carry(tensor, "plan.tensor", draft.whole(tensor))
    draft.ignore("parallelism_config.parallelism_config_dp_shard_size", "the shard axis is what the ranks leave")


def _carry_shared(draft: Draft) -> None:
    """Accumulation and clipping. The micro-batch is the script's."""
    ranks, tensor = draft.ranks or 8, draft.entries.get("plan.tensor")
    data_ranks = max(1, ranks // (tensor.value if tensor else 1))
    for source in ("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps"):
        steps = draft.whole(source)
        if steps:
            draft.carried[source] = "train.global_batch"
            why = f"1 × {steps} accumulated × {data_ranks} ranks; the script has the micro-batch"
            draft.assume("train.global_batch", steps * data_ranks, why)
        draft.ignore(source, "the script says it")
    carry_number(draft, "gradient_clipping", "optim.clip")
    draft.assume("train.global_batch", data_ranks, f"1 × {data_ranks} ranks; the script has the micro-batch")


def _outside_the_kind(kind: str) -> dict[str, str]:
    """Sections of another kind than the file's own have no effect there either."""
    others = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}
    return {
        f"{section}.*": f"it has no effect there with distributed_type = {kind}"
        for name, section in others.items()
        if name != kind
    }
