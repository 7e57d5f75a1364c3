"""A DeepSpeed configuration as a recipe. `auto` is a value that the Hugging Face Trainer fills in from its own arguments."""

from fullshard.base.errors import FullshardError
from fullshard.runs.migrate.recipe_draft import OFF, Draft

AUTO = "auto"
TRAINER = "the Hugging Face Trainer fills it in; write what its argument says"
STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
HOMES = {"cpu": "host", "nvme": "disk", "none": "device", None: "device"}
DTYPES = {
    "fp32": "fp32",
    "bf16": "bf16",
    "bfp16": "bf16",
    "fp16": "fp16",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
}
ADAMS = ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam")
ZERO, LOCO = "zero_optimization", "zeropp_loco_param"
UNQUANTISED = "only shards travel quantised here, and not with fp16; write plan.compute = 'bf16'"
BUCKET = "a unit is the bucket here, and traffic overlaps with computing"

IDLE = {
    "steps_per_print": "every step is in metrics.jsonl",
    "wall_clock_breakdown": "step times are in metrics.jsonl",
    "dump_state": "the resolved recipe and the plan are in the run's directory",
    "memory_breakdown": "the estimate and the measured peak are in metrics.jsonl",
    "zero_allow_untested_optimizer": "optimizers that cannot be sharded are refused by themselves",
    "zero_force_ds_cpu_optimizer": "the update of offloaded state has one implementation",
    "prescale_gradients": "gradients are summed in fp32 and divided once",
    "gradient_predivide_factor": "gradients are summed in fp32 and divided once",
    "sparse_gradients": "gradients of embeddings are dense",
    "disable_allgather": BUCKET,
    "data_types.grad_accum_dtype": "gradients accumulate in fp32",
    "dataloader_drop_last": "steps are always whole",
    "use_data_before_expert_parallel_": "an expert axis is plan.expert",
    "aio.*": "file I/O is direct, and its depth is chosen by itself",
    "checkpoint.*": "checkpoints are sharded, verified and written by all ranks",
    "csv_monitor.*": "metrics.jsonl has the numbers",
    "fp16.*": "loss scaling is dynamic and part of the step",
    "bf16.*": "masters and accumulation are fp32",
    "amp.*": OFF,
    f"{ZERO}.*bucket_size": BUCKET,
    f"{ZERO}.*_partitions": BUCKET,
    f"{ZERO}.overlap_comm": BUCKET,
    f"{ZERO}.reduce_scatter": BUCKET,
    f"{ZERO}.contiguous_gradients": BUCKET,
    f"{ZERO}.round_robin_gradients": BUCKET,
    f"{ZERO}.use_multi_rank_bucket_allreduce": BUCKET,
    f"{ZERO}.sub_group_size": "offloaded state is updated in pieces: home.staging",
    f"{ZERO}.offload_*": "transfers and their buffers are the plan's: home.staging, home.cpu_share",
    f"{ZERO}.cpu_offload_use_pin_memory": "host memory is pinned by itself",
    f"{ZERO}.*max_live_parameters": "the plan bounds gathered parameters: plan.prefetch",
    f"{ZERO}.*max_reuse_distance": "the plan says until when parameters stay gathered",
    f"{ZERO}.*persistence_threshold": "small tensors stay whole by themselves; for whole units write plan.strategy = 'mixed'",
    f"{ZERO}.*weights_on_model_save": "`fullshard checkpoint export` writes whole weights",
    f"{ZERO}.load_from_fp32_weights": "masters are fp32",
    f"{ZERO}.elastic_checkpoint": "a run resumes on any number of ranks",
    f"{ZERO}.ignore_unused_parameters": "parameters without gradients are named in the first step",
    f"{ZERO}.memory_efficient_linear": "linears save what torch's do",
    f"{ZERO}.legacy_stage1": "ZeRO 1 is a layout of the plan",
    f"{ZERO}.log_trace_cache_warnings": "the order of gathers is the plan's",
    f"{ZERO}.*module_granularity_threshold": "units are found in the model: `fullshard units MODEL`",
    f"{ZERO}.mics_hierarchical_params_gather": "gathers stay inside a shard group",
    f"{ZERO}.override_module_apply": "models are built on meta",
    f"{ZERO}.pipeline_loading_checkpoint": "each rank reads only its own bytes",
    "_*": "a comment",
    "//*": "a comment",
    "comment*": "a comment",
}
LOST = {
    "activation_checkpointing.cpu_checkpointing": "write home.activations = 'host'",
    "activation_checkpointing.*": "it says how activations are recomputed, not whether; write plan.remat = 'full'",
    "amp.*": "write plan.compute = 'fp16' or 'bf16'",
    "fp16.fp16_master_weights_and_grads": "masters stay fp32",
    "flops_profiler.*": "write profile.at = N, the step to profile; mfu is in metrics.jsonl",
    "comms_logger.*": "`fullshard profile RECIPE` lists collectives by size",
    "autotuning.*": "plan.strategy = 'auto' finds the plan without trial runs",
    "elasticity.*": "a run resumes on any number of ranks by hand; the global batch stays",
    f"{ZERO}.zero_quantized_nontrainable_weights": "all parameters of a unit travel alike; write plan.wire_gather = 'int8'",
    f"{ZERO}.zero_quantized_*": UNQUANTISED,
    f"{ZERO}.{LOCO}.*": "plan.error_feedback keeps all that rounding took, and needs plan.wire_reduce = 'int8'",
    f"{ZERO}.zenflow.*": "every gradient is applied in its own step here",
    f"{ZERO}.leaf_module*": "for mixtures write plan.expert, or name modules: `fullshard units MODEL --names PATTERN`",
    f"{ZERO}.save_muon_momentum_buffer_in_memory": "there is no such optimizer here",
    "sequence_parallel_size": "there is no sequence parallelism; plan.remat and home.activations save activation memory",
    "pipeline*": "there is no pipeline parallelism; write plan.tensor, or shard over more ranks",
    "tensor_parallel.*": "plan.tensor splits attention and MLP by itself",
    "expert_parallel.*": "write plan.expert = N, the number of ranks that share the experts",
    "*curriculum*": "samples keep their length and order",
    "data_efficiency.*": "samples keep their length and order",
    "progressive_layer_drop.*": "all layers compute in every step",
    "eigenvalue.*": "there is no quantised training",
    "quantize_training.*": "there is no quantised training",
    "compression_training.*": "there is no compression; train first, compress the export",
    "sparse_attention.*": "attention is the model's own",
    "hybrid_engine.*": "there is no generation engine; `on_torch.generate` samples",
}


def read_deepspeed(draft: Draft) -> None:
    """Fill the draft from a DeepSpeed file's keys."""
    carry_stage(draft)
    _carry_homes(draft)
    _carry_precision(draft)
    _carry_wire(draft)
    _carry_optimizer(draft)
    _carry_schedule(draft)
    _carry_batch(draft)
    _carry_rest(draft)
    _ignore_switched_off(draft)
    draft.assign_rest(IDLE, LOST)


def carry_stage(draft: Draft) -> None:
    """The strategy of a ZeRO stage, which may be a number, its text, or absent (0)."""
    if ZERO in draft.leaves and isinstance(draft.get(ZERO), bool):  # an old spelling
        draft.carry(ZERO, "plan.strategy", "zero1" if draft.get(ZERO) else "ddp")
        return
    key = f"{ZERO}.stage"
    stage = draft.whole(key)
    if stage is None:
        draft.default("plan.strategy", "ddp")
        return
    if stage not in STAGES:
        raise FullshardError(f"{key} = {stage} is no ZeRO stage; write 0, 1, 2 or 3")
    draft.carry(key, "plan.strategy", STAGES[stage])
    _carry_groups(draft)


def _carry_groups(draft: Draft) -> None:
    """Secondary partitions (hpZ) and shard groups (MiCS)."""
    kept, group = f"{ZERO}.zero_hpz_partition_size", f"{ZERO}.mics_shard_size"
    size = draft.whole(kept) if (draft.number(kept) or 0) > 1 else None
    if size and draft.entries["plan.strategy"].value == "zero3":
        draft.carry(kept, "plan.strategy", "hpz")
        draft.carry(kept, "plan.reshard", size)
    draft.ignore(kept, OFF)
    if (draft.number(group) or 0) > 0:
        size = draft.whole(group) or 1
        copies = max(2, (draft.ranks or 2 * size) // size)
        draft.carry(group, "plan.strategy", "hybrid")
        draft.assume("plan.replicate", copies, f"the ranks divided by the {size} of a shard group")
    draft.ignore(group, OFF)


def _carry_homes(draft: Draft) -> None:
    for part, key, old in (("optimizer", "home.optimizer", "cpu_offload"), ("param", "home.params", "cpu_offload_param")):
        source = f"{ZERO}.offload_{part}.device"
        if source in draft.leaves:
            carry_home(draft, source, key)
        for spelling in (f"{ZERO}.{old}", f"{ZERO}.{old}s"):  # old ones
            if draft.get(spelling) is True:
                draft.carry(spelling, key, "host")
            draft.ignore(spelling, OFF)
        path = f"{ZERO}.offload_{part}.nvme_path"
        if path in draft.leaves and draft.get(source) == "nvme":
            carry_disk(draft, path)
    finish_homes(draft)


def carry_home(draft: Draft, source: str, key: str) -> None:
    device = draft.word(source)
    if device not in HOMES:
        raise FullshardError(f"{source} = {device!r} is unknown; write cpu, nvme or none")
    draft.carry(source, key, HOMES[device])


def carry_disk(draft: Draft, source: str) -> None:
    known = draft.entries.get("disk.path")
    if known is None or known.value == draft.get(source):
        draft.carry(source, "disk.path", str(draft.get(source)))
    else:
        draft.lose(source, f"one directory holds all that is on disk: disk.path = {known.value!r}")


def finish_homes(draft: Draft) -> None:
    """What homes elsewhere need besides."""
    home = {key: draft.entries[f"home.{key}"].value for key in ("params", "optimizer") if f"home.{key}" in draft.entries}
    if home.get("params") == "disk" and home.get("optimizer", "device") == "device":
        draft.entries.pop("home.optimizer", None)
        draft.assume("home.optimizer", "disk", "parameters on disk need the optimizer's copy of them off the device")
        home["optimizer"] = "disk"
    if "disk" in home.values():
        draft.assume("disk.path", "offloaded", "a directory on the disk that is to hold it")


def _carry_precision(draft: Draft) -> None:
    for key, dtype in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        source = f"{key}.enabled"
        if draft.get(source) is True:
            draft.carry(source, "plan.compute", dtype)
        elif draft.get(source) == AUTO and "plan.compute" not in draft.entries:
            draft.carry(source, "plan.compute", dtype, "assumed: the Trainer decides there")
        elif draft.get(source) == AUTO:
            draft.ignore(source, "the other half-precision dtype is chosen")
    scale = "fp16.loss_scale"
    if (draft.number(scale) or 0) > 0:
        draft.lose(scale, "loss scaling is dynamic here, and starts by itself")
    if draft.get("bf16.bf16_master_weights_and_grads") is True:
        draft.carry("bf16.bf16_master_weights_and_grads", "plan.master", "bf16")
    source = "communication_data_type"
    if draft.word(source) in DTYPES:
        draft.carry(source, "plan.reduce", DTYPES[draft.word(source)])
    elif source in draft.leaves:
        draft.ignore(source, "gradients are reduced in fp32: plan.reduce")


def _carry_wire(draft: Draft) -> None:
    """ZeRO++: quantised gathers (qwZ), quantised reductions (qgZ), and LoCo, which keeps what rounding took."""
    weights, gradients, feedback = (f"{ZERO}.{key}" for key in ("zero_quantized_weights", "zero_quantized_gradients", LOCO))
    values = {key: entry.value for key, entry in draft.entries.items() if key in ("plan.strategy", "plan.compute")}
    if values.get("plan.strategy") == "ddp" or values.get("plan.compute") == "fp16":
        return
    if draft.get(weights) is True:
        draft.carry(weights, "plan.wire_gather", "int8")
    if draft.get(gradients) is True:
        draft.carry(gradients, "plan.wire_reduce", "int8")
        if sources := [key for key in draft.leaves if key.startswith(f"{feedback}.")]:
            draft.carry(sources, "plan.error_feedback", True)


def _carry_optimizer(draft: Draft) -> None:
    """DeepSpeed's Adam decays weights as AdamW does unless adam_w_mode is false; all parameters decay."""
    source, options = "optimizer.type", "optimizer.params"
    kind = str(draft.get(source, "")).lower()
    if kind in ADAMS:
        plain = kind != "adamw" and draft.get(f"{options}.adam_w_mode") is False
        note = "there, Adam decays weights as AdamW does" if kind == "adam" and not plain else ""
        draft.carry(source, "optim.name", "adam" if plain else "adamw", note)
        _carry_adam(draft, options)
    elif kind == "sgd":
        draft.carry(source, "optim.name", "sgd")
        for name in ("momentum", "weight_decay"):
            carry_number(draft, f"{options}.{name}", f"optim.{name}")
        draft.default("optim.weight_decay", 0.0)
    elif source in draft.leaves:
        draft.lose(source, "there is no such optimizer here; adamw is written, look at its learning rate")
        draft.assume("optim.name", "adamw", f"there is no {draft.get(source)} here")
    carry_number(draft, f"{options}.lr", "optim.lr")
    carry_number(draft, f"{options}.max_grad_norm", "optim.clip")
    _assign_options(draft, options)


def _carry_adam(draft: Draft, options: str) -> None:
    draft.default("optim.decay_all", True)
    betas = draft.get(f"{options}.betas")
    if isinstance(betas, list) and len(betas) == 2:
        draft.carry(f"{options}.betas", "optim.betas", [float(b) for b in betas])
    carry_number(draft, f"{options}.eps", "optim.eps")
    carry_number(draft, f"{options}.weight_decay", "optim.weight_decay")
    draft.default("optim.betas", [0.9, 0.999])
    draft.default("optim.weight_decay", 0.0)


def _assign_options(draft: Draft, options: str) -> None:
    for key in [k for k in draft.leaves if k.startswith(f"{options}.")]:
        if draft.get(key) == AUTO:
            draft.lose(key, TRAINER)
    for name in ("torch_adam", "adam_w_mode", "fused", "foreach", "set_grad_none"):
        draft.ignore(f"{options}.{name}", "the update has one implementation for each home")
    draft.drop(f"{options}.amsgrad", "optimizers here have no such option")
    if draft.get(f"{options}.bias_correction") is True:
        draft.ignore(f"{options}.bias_correction", "it is always on")
    for key in [k for k in draft.leaves if k.startswith(f"{options}.") and not draft.is_assigned(k)]:
        draft.lose(key, "optimizers here have no such option")


def carry_number(draft: Draft, source: str, key: str) -> None:
    """Carry a number as a float, if the file has one."""
    number = draft.number(source)
    if number is not None:
        draft.carry(source, key, float(number))


def _carry_schedule(draft: Draft) -> None:
    source, options = "scheduler.type", "scheduler.params"
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    kind = draft.word(source)
    if kind not in kinds:
        draft.default("schedule.kind", "constant")
        draft.lose(source, "there is no such schedule here; schedule.kind is constant, linear, cosine or wsd")
        for key in [k for k in draft.leaves if k.startswith(f"{options}.")]:
            draft.lose(key, "it belongs to a schedule that is not here")
        return
    draft.carry(source, "schedule.kind", kinds[kind])
    warmup, total = draft.whole(f"{options}.warmup_num_steps"), draft.whole(f"{options}.total_num_steps")
    if warmup is not None:
        draft.carry(f"{options}.warmup_num_steps", "schedule.warmup", warmup)
    elif draft.get(f"{options}.warmup_num_steps") != AUTO:
        draft.default("schedule.warmup", 1000)
    if total and kind != "WarmupLR":
        draft.carry(f"{options}.total_num_steps", "train.steps", total)
    _carry_end(draft, str(kind), options)
    _carry_peak(draft, options)
    _assign_warmup(draft, options)


def _carry_end(draft: Draft, kind: str, options: str) -> None:
    """The factor that the learning rate falls to."""
    if kind == "WarmupDecayLR":
        draft.default("schedule.final", 0.0)
    if kind == "WarmupCosineLR":
        carry_number(draft, f"{options}.cos_min_ratio", "schedule.final")
        draft.default("schedule.final", 0.0001)


def _carry_peak(draft: Draft, options: str) -> None:
    """The schedule's rate replaces the optimizer's in DeepSpeed."""
    peak, lr = f"{options}.warmup_max_lr", "optimizer.params.lr"
    if draft.number(peak) is None:
        return
    if draft.number(lr) not in (None, draft.number(peak)):
        draft.carried.pop(lr, None)
        draft.ignore(lr, f"{peak} replaces it there too")
    carry_number(draft, peak, "optim.lr")


def _assign_warmup(draft: Draft, options: str) -> None:
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        if draft.get(f"{options}.{name}") != AUTO:
            draft.drop(f"{options}.{name}", "the rise begins at 0 here")
    if draft.get(f"{options}.warmup_type") == "log":
        draft.lose(f"{options}.warmup_type", "the rise is linear here")
    draft.ignore(f"{options}.warmup_type", "the rise is linear")
    for key in [k for k in draft.leaves if k.startswith(f"{options}.") and not draft.is_assigned(k)]:
        if draft.get(key) == AUTO:
            draft.lose(key, TRAINER)
        else:
            draft.lose(key, "schedules here have no such option")


def _carry_batch(draft: Draft) -> None:
    """The global batch is micro-batch × accumulation × ranks; files name two of them, or the product."""
    whole, micro, steps = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    rows, accumulate, total = draft.whole(micro), draft.whole(steps), draft.whole(whole)
    if rows:
        draft.carry(micro, "train.micro_batch", rows)
    if total:
        draft.carry(whole, "train.global_batch", total)
        if rows is None:
            share = total // ((draft.ranks or total) * (accumulate or 1))
            draft.assume("train.micro_batch", max(1, share), "the global batch divided by ranks and accumulation")
    elif rows:
        ranks = draft.ranks or 8
        said = "" if draft.ranks else "; give --ranks if there are others"
        product = f"{rows} × {accumulate or 1} accumulated × {ranks} ranks{said}"
        draft.assume("train.global_batch", rows * (accumulate or 1) * ranks, product)
    if accumulate:
        draft.carried[steps] = "train.global_batch"
    for key in (whole, micro, steps):
        draft.lose(key, TRAINER)


def _carry_rest(draft: Draft) -> None:
    clip = draft.number("gradient_clipping")
    if clip is not None:
        draft.carry("gradient_clipping", "optim.clip", float(clip) if clip else "none")
    elif draft.get("gradient_clipping") == AUTO:
        draft.carry("gradient_clipping", "optim.clip", 1.0, "assumed: the Trainer's own default")
    size = draft.whole("tensor_parallel.autotp_size")
    if size:
        draft.carry("tensor_parallel.autotp_size", "plan.tensor", size)
    if draft.get("tensorboard.enabled") is True:
        draft.carry("tensorboard.enabled", "log.tensorboard", True)
    if draft.get("wandb.enabled") is True:
        draft.carry("wandb.enabled", "log.wandb", str(draft.get("wandb.project", "fullshard")))
    for key in ("tensorboard", "wandb"):
        for leaf in [k for k in draft.leaves if k.startswith(f"{key}.")]:
            draft.ignore(leaf, "log.tensorboard and log.wandb choose their own names")
    if draft.get("compile.deepcompile") is True:
        draft.carry("compile.deepcompile", "plan.compile", True)
    for leaf in [k for k in draft.leaves if k.startswith("compile.")]:
        draft.ignore(leaf, "plan.compile compiles each block")


def _ignore_switched_off(draft: Draft) -> None:
    """Sections whose `enabled` is false."""
    off = [key.removesuffix(".enabled") for key, value in draft.leaves.items() if key.endswith(".enabled") and value is False]
    for key in draft.leaves:
        if any(key.startswith(f"{section}.") for section in off):
            draft.ignore(key, OFF)
