"""The arguments of an FSDP1, FSDP2 or DDP script as a recipe: what its calls say literally, or by an option's default."""

from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.runs.migrate.recipe_draft import OFF, Draft, Entry
from fullshard.runs.migrate.script_calls import NOT_HERE, Script, ScriptCall, Word
from fullshard.runs.recipe.recipe import FILL_IN

FSDP1, FSDP2, DDP = "FullyShardedDataParallel", "fully_shard", "DistributedDataParallel"
STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hybrid",
    "_HYBRID_SHARD_ZERO2": "hybrid",
}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
OPTIMIZERS = ("Adam", "AdamW", "SGD", "RAdam", "NAdam", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop", "ASGD")
SCHEDULES = {
    "CosineAnnealingLR": "cosine",
    "get_cosine_schedule_with_warmup": "cosine",
    "get_linear_schedule_with_warmup": "linear",
    "get_constant_schedule_with_warmup": "constant",
    "get_constant_schedule": "constant",
}
OTHER_SCHEDULES = (
    "StepLR",
    "LambdaLR",
    "OneCycleLR",
    "LinearLR",
    "SequentialLR",
    "ReduceLROnPlateau",
    "ExponentialLR",
    "MultiStepLR",
)
REMAT = ("checkpoint_wrapper", "apply_activation_checkpointing", "gradient_checkpointing_enable")
WRAP = "blocks are found in the model: `fullshard units MODEL`"
LATER = "its value is not in this file; write it"

IDLE = {
    "*.auto_wrap_policy": WRAP,
    "*.device_id": "each rank takes the device of its number",
    "*.device_ids": "each rank takes the device of its number",
    "*.output_device": "each rank takes the device of its number",
    "*.sync_module_states": "all ranks compute the same weights from the seed",
    "*.use_orig_params": "there are no flat parameters",
    "*.limit_all_gathers": "the plan bounds gathered parameters: plan.prefetch",
    "*.backward_prefetch": "a unit is gathered ahead in forward and backward: plan.prefetch",
    "*.forward_prefetch": "a unit is gathered ahead in forward and backward: plan.prefetch",
    "*.process_group": "the mesh is made of all ranks",
    "*.mesh": "the mesh is made of all ranks: plan.replicate, plan.tensor",
    "*.device_mesh": "the mesh is made of all ranks: plan.replicate, plan.tensor",
    "*.param_init_fn": "weights are drawn by the model's own rules, or read",
    f"{DDP}.*": "units are the buckets, and every parameter without a gradient is named in the first step",
    "*.fused": "the update has one implementation for each home",
    "*.foreach": "the update has one implementation for each home",
    "*.capturable": "the update has one implementation for each home",
    "GradScaler.*": "loss scaling is part of the step with plan.compute = 'fp16'",
    "DataLoader.*": "data.workers and data.prefetch load data in the background",
    "clip_grad_norm_.*": "one norm over all parameters: optim.clip",
    "compile.*": "plan.compile compiles each block",
    "autocast.*": "units compute in plan.compute",
}
LOST = {
    "*.ignored_modules": "for units that stay whole write plan.strategy = 'mixed' and plan.keep_whole",
    "*.ignored_states": "for units that stay whole write plan.strategy = 'mixed' and plan.keep_whole",
    "*.ignored_params": "for units that stay whole write plan.strategy = 'mixed' and plan.keep_whole",
    "*.shard_placement_fn": "parameters are sharded by their first dim; plan.tensor splits others",
    "set_*": "the plan has one prefetch for all units: plan.prefetch",
    "*.nesterov": "a recipe's sgd has no nesterov; write it in Python: fs.SGD(nesterov=True)",
    "*.[*][*]": LATER,
}


def read_script(draft: Draft, script: Script) -> None:
    """Fill the draft from the calls of a script."""
    wraps = script.named(FSDP1, FSDP2, DDP)
    if not wraps:
        raise FullshardError(f"the script calls neither {FSDP1}, {FSDP2} nor {DDP}; give the file that does")
    for call in wraps:
        _add(draft, call, skip=("0", "module"))
    _carry_strategy(draft, wraps)
    _carry_offload(draft)
    _carry_precision(draft, script)
    _carry_optimizer(draft, script)
    _carry_schedule(draft, script)
    _carry_rest(draft, script)
    for source in [k for k, v in draft.leaves.items() if v is NOT_HERE and k.partition(".")[2] not in _IDLE_NAMES]:
        draft.lose(source, LATER)
    draft.assign_rest(IDLE, LOST)


_IDLE_NAMES = {pattern.removeprefix("*.") for pattern in IDLE}


def _add(draft: Draft, call: ScriptCall, skip: tuple[str, ...] = ()) -> None:
    """The arguments of a call as keys of the file. An equal argument of a second call is the same key."""
    for name, value in call.arguments.items():
        key = f"{call.name}.{name}"
        if name in skip or draft.leaves.get(key, ...) == value:
            continue
        draft.leaves[key if key not in draft.leaves else f"{call.name}.line {call.line}.{name}"] = value
    draft.leaves.setdefault(call.name, _place(call))


def _place(call: ScriptCall) -> Word:
    return Word(f"called in line {call.line}")


def _carry_strategy(draft: Draft, wraps: list[ScriptCall]) -> None:
    kind = next((name for name in (FSDP2, FSDP1, DDP) if any(call.name == name for call in wraps)), DDP)
    for other in {call.name for call in wraps} - {kind}:
        draft.lose(other, f"one strategy is for the whole model; {kind} is taken")
    strategy, reshard = f"{kind}.sharding_strategy", f"{kind}.reshard_after_forward"
    named, kept = draft.get(strategy), draft.get(reshard)
    if isinstance(named, Word) and named.name in STRATEGIES:
        draft.carry([kind, strategy], "plan.strategy", STRATEGIES[named.name])
    elif kept is False:
        draft.carry([kind, reshard], "plan.strategy", "zero2")
    elif isinstance(kept, int) and kept not in (True, 1):
        draft.carry([kind, reshard], "plan.strategy", "hpz")
        draft.carry(reshard, "plan.reshard", kept)
    elif named in (None, NOT_HERE) and NOT_HERE in (named, kept):
        draft.carried[kind] = "plan.strategy"
        draft.assume("plan.strategy", "zero3", "the script takes it from elsewhere")
    else:
        draft.carry(kind, "plan.strategy", "ddp" if kind == DDP else "zero3")
        draft.ignore(reshard, "the strategy says it")
        draft.lose(strategy, f"the strategies are {', '.join(STRATEGIES)}")
    for key in [k for k in draft.leaves if k.startswith(f"{kind}.line ") and k.endswith("reshard_after_forward")]:
        draft.lose(key, "units differ in it; change the plan file: `fullshard plan MODEL -o plan.json`, then plan.file")
    if draft.entries["plan.strategy"].value == "hybrid":
        draft.assume("plan.replicate", 2, "copies of the model, usually the number of machines")


def _carry_offload(draft: Draft) -> None:
    for source in (f"{FSDP1}.cpu_offload", f"{FSDP2}.offload_policy"):
        policy = draft.get(source)
        word = policy.name if isinstance(policy, Word) else ""
        first = policy.get("0", False) if isinstance(policy, Word) else False
        if word == "CPUOffloadPolicy" or (word == "CPUOffload" and policy.get("offload_params", first) is True):
            draft.carry(source, "home.params", "host")
            draft.carry(source, "home.optimizer", "host")
        elif policy is not NOT_HERE:
            draft.ignore(source, OFF)


def _carry_precision(draft: Draft, script: Script) -> None:
    for source in (f"{FSDP1}.mixed_precision", f"{FSDP2}.mp_policy"):
        policy = draft.get(source)
        if policy is NOT_HERE:
            draft.assume("plan.compute", "fp32", "the script takes its precision from elsewhere")
        if not isinstance(policy, Word) or policy.name not in ("MixedPrecision", "MixedPrecisionPolicy"):
            continue
        compute, reduce = _dtype(policy.get("param_dtype", policy.get("0"))), _dtype(policy.get("reduce_dtype", policy.get("1")))
        draft.carry(source, "plan.compute", compute or "fp32")
        draft.carry(source, "plan.reduce", reduce or compute or "fp32")
    for call in script.named("autocast", "GradScaler"):
        _add(draft, call)
        draft.ignore(call.name, IDLE[f"{call.name}.*"])
        dtype = next((_dtype(v) for v in call.arguments.values() if _dtype(v)), None)
        if call.name == "autocast" and dtype and "plan.compute" not in draft.entries:
            draft.carried["autocast"] = "plan.compute"
            draft.entries["plan.compute"] = Entry(dtype, f"{call.text} in line {call.line}")


def _dtype(value: Any) -> str | None:
    return DTYPES.get(value.name) if isinstance(value, Word) else None


def _carry_optimizer(draft: Draft, script: Script) -> None:
    calls = script.named(*OPTIMIZERS)
    if not calls:
        return
    call = calls[0]
    _add(draft, call, skip=("0", "params"))
    simple = call.name in ("Adam", "AdamW", "SGD")
    draft.carry(call.name, "optim.name", call.name.lower() if simple else call.name)
    draft.default("optim.decay_all", True)
    options: dict[str, Any] = {}
    for name in [n for n in call.arguments if n not in ("0", "params")]:
        source, value = f"{call.name}.{name}", call.arguments[name]
        key = "lr" if name == "1" else name
        if value is NOT_HERE or isinstance(value, Word) or not _is_number(value, pair=key == "betas"):
            continue
        if key == "lr" or (simple and key in ("betas", "eps", "weight_decay", "momentum")):
            draft.carry(source, f"optim.{key}", [float(v) for v in value] if key == "betas" else float(value))
        elif not simple and key not in ("fused", "foreach", "capturable"):
            options[key] = value
            draft.carry(source, "optim.options", dict(options))
    _torch_defaults(draft, call.name, script)


def _is_number(value: Any, pair: bool) -> bool:
    if pair:
        return isinstance(value, tuple | list) and len(value) == 2 and all(_is_number(part, False) for part in value)
    return isinstance(value, int | float)


def _torch_defaults(draft: Draft, name: str, script: Script) -> None:
    """Where torch's defaults differ from the recipe's."""
    if f"{name}.lr" in draft.leaves or f"{name}.1" in draft.leaves:
        draft.assume("optim.lr", 1e-4, "the script takes it from elsewhere")
    if name in ("Adam", "AdamW"):
        draft.default("optim.lr", 1e-3)
        draft.default("optim.betas", [0.9, 0.999])
    if name in ("Adam", "AdamW", "SGD"):
        draft.default("optim.weight_decay", 0.01 if name == "AdamW" else 0.0)
    if not script.named("clip_grad_norm_"):
        draft.default("optim.clip", "none")


def _carry_schedule(draft: Draft, script: Script) -> None:
    for call in script.named(*SCHEDULES, *OTHER_SCHEDULES):
        _add(draft, call, skip=("0", "optimizer"))
        if call.name in OTHER_SCHEDULES:
            for key in [k for k in draft.leaves if k.partition(".")[0] == call.name]:
                draft.lose(key, "there is no such schedule here; schedule.kind is constant, linear, cosine or wsd")
            continue
        draft.carry(call.name, "schedule.kind", SCHEDULES[call.name])
        warmup = {"get_cosine_schedule_with_warmup", "get_linear_schedule_with_warmup", "get_constant_schedule_with_warmup"}
        names = (("num_warmup_steps", "1", "schedule.warmup"), ("num_training_steps", "2", "train.steps"))
        for name, position, key in names if call.name in warmup else (("T_max", "1", "train.steps"),):
            argument = next((n for n in (name, position) if isinstance(call.arguments.get(n), int)), None)
            if argument:
                draft.carry(f"{call.name}.{argument}", key, call.arguments[argument])
        if SCHEDULES[call.name] != "constant":
            draft.default("schedule.final", 0.0)
        draft.drop(f"{call.name}.eta_min", "write schedule.final, the part of the rate that is left at the end")
    draft.default("schedule.kind", "constant")


def _carry_rest(draft: Draft, script: Script) -> None:
    for call in script.named("clip_grad_norm_")[:1]:
        _add(draft, call, skip=("0", "parameters"))
        key = next((k for k in ("max_norm", "1", "0") if isinstance(call.arguments.get(k), int | float)), None)
        if key and f"{call.name}.{key}" not in draft.leaves:
            draft.leaves[f"{call.name}.{key}"] = call.arguments[key]
        if key:
            draft.carry([call.name, f"{call.name}.{key}"], "optim.clip", float(call.arguments[key]))
        draft.ignore(call.name, IDLE["clip_grad_norm_.*"])
    for call in script.named(*REMAT)[:1]:
        draft.leaves[call.name] = _place(call)
        draft.carry(call.name, "plan.remat", "full")
    for call in [c for c in script.named("compile") if c.text in ("torch.compile", "model.compile")][:1]:
        _add(draft, call, skip=("0",))
        draft.carry(call.name, "plan.compile", True)
    for call in [c for c in script.calls if c.name.startswith("set_modules_to_") and "." in c.text]:
        draft.leaves[call.name] = _place(call)
    for call in script.named("manual_seed")[:1]:
        if isinstance(call.arguments.get("0"), int):
            draft.leaves["manual_seed"] = call.arguments["0"]
            draft.carry("manual_seed", "train.seed", call.arguments["0"])
    _carry_batch(draft, script)
    _name_model(draft, script)


def _carry_batch(draft: Draft, script: Script) -> None:
    for call in script.named("DataLoader")[:1]:
        _add(draft, call, skip=("0", "dataset"))
        draft.ignore("DataLoader", IDLE["DataLoader.*"])
        rows = call.arguments.get("batch_size")
        if isinstance(rows, int):
            ranks = draft.ranks or 8
            draft.carry("DataLoader.batch_size", "train.micro_batch", rows)
            known = "" if draft.ranks else "; give --ranks if there are others"
            draft.assume("train.global_batch", rows * ranks, f"{rows} × {ranks} ranks{known}")


def _name_model(draft: Draft, script: Script) -> None:
    """A model that the script reads by name is told; it may be one of the hub, which nothing here downloads."""
    for call in script.named("from_pretrained"):
        name = call.arguments.get("0", call.arguments.get("pretrained_model_name_or_path"))
        if isinstance(name, str) and "oken" not in call.text:
            draft.leaves["from_pretrained"] = name
            draft.lose("from_pretrained", "write model.name, the directory of its files")
            draft.assume("model.name", FILL_IN, f"the directory of {name}, downloaded")
            return
