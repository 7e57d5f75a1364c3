"""Hugging Face's Trainer with a sharded state: its data, loss, schedules, callbacks, evaluation and resuming.

Trainer would wrap the model in DDP, move it, and let one rank save. Here the plan decides on sharding, precision and remat.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedModel, Trainer

from fullshard.base.errors import FullshardError
from fullshard.on_torch.interop.hf_accelerate import FOLDER, ShardedOptimizer, mark_prepared, refuse_accelerator
from fullshard.on_torch.optimizers.sharded_optimizer import clip_grad_norm_, global_norm
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.saving.restore import load_checkpoint
from fullshard.on_torch.saving.save import save_checkpoint

# TrainingArguments that would be ignored or do a part of the plan's work, and what to write instead.
UNFIT = {
    "gradient_checkpointing": "write remat='full' in the plan",
    "torch_compile": "write compile=True in the plan",
    "auto_find_batch_size": "the plan says which batch fits; set per_device_train_batch_size",
    "fp16_full_eval": "write the precision in the plan",
    "bf16_full_eval": "write the precision in the plan",
    "push_to_hub": "call trainer.save_model(), and upload that directory",
}


class ShardedTrainerMixin:
    """Makes a `Trainer` subclass train a sharded state: `class Mine(ShardedTrainerMixin, SFTTrainer)`."""

    args: Any
    accelerator: Any
    optimizer: Any
    state: Any  # Trainer's own, not a sharded one

    def __init__(self, sharded: State, args: Any = None, **options: Any):
        for name in ("model", "model_init"):
            if options.get(name) is not None:
                raise FullshardError(f"the model is the state's; leave {name} out")
        refuse_missing_reference(type(self).__name__, super().__init__, options)
        self.sharded = sharded
        super().__init__(model=sharded.model, args=args, **options)  # type: ignore[call-arg]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        refuse_arguments(self.args, self.sharded)
        refuse_accelerator(self.accelerator, self.sharded)
        mark_prepared(self.sharded)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> ShardedOptimizer:
        """The state's optimizer. A state without one gets that of the TrainingArguments."""
        if isinstance(self.optimizer, ShardedOptimizer):
            return self.optimizer
        if self.sharded.optimizer is None:
            self.sharded.optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        elif self.optimizer is None:
            refuse_rate(self.args.learning_rate, self.sharded.optimizer.param_groups[0]["lr"])
        elif self.optimizer is not self.sharded.optimizer:
            raise FullshardError("this state has an optimizer already; leave `optimizers` out, or call shard() without one")
        self.optimizer = ShardedOptimizer(self.sharded)
        return self.optimizer

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Nothing: shard() has put every part where the plan says."""

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return model

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return clip_grad_norm_(self.sharded.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return global_norm(self.sharded.parameters()) if grad_norm is None else grad_norm

    # -- saving ------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a Hugging Face directory that `from_pretrained` reads. Trainer's own checkpoints hold the state's shards
        instead. Collective."""
        where = output_dir or self.args.output_dir
        if _internal_call:
            save_checkpoint(Path(where) / FOLDER, self.sharded, overwrite=True)
            return
        model = self.sharded.model
        if not isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config"):
            weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if self.args.should_save:
                self._save(where, state_dict=weights)  # type: ignore[attr-defined]
        elif self.args.should_save:
            self._save(where)  # type: ignore[attr-defined]  # which calls `save_pretrained`
        else:
            model.save_pretrained(where)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.create_optimizer()  # Trainer would make it later, and its moments are in the checkpoint
        load_checkpoint(Path(resume_from_checkpoint) / FOLDER, self.sharded)

    def _load_best_model(self) -> None:
        load_checkpoint(Path(self.state.best_model_checkpoint) / FOLDER, self.sharded)


class ShardedTrainer(ShardedTrainerMixin, Trainer):
    """Hugging Face's Trainer for a sharded state: `ShardedTrainer(state, args, train_dataset=…)`."""


def refuse_arguments(args: Any, state: State) -> None:
    """Raise where TrainingArguments contradict the plan, or would be ignored."""
    for name, instead in UNFIT.items():
        if getattr(args, name, False):
            raise FullshardError(f"TrainingArguments({name}=…) has no effect on a sharded model; {instead}")
    batch = state.plan.batch
    wanted = {"per_device_train_batch_size": batch.micro_batch, "gradient_accumulation_steps": batch.accumulate}
    for name, value in wanted.items():
        if getattr(args, name) != value:
            raise FullshardError(
                f"TrainingArguments has {name} = {getattr(args, name)}, but the plan has {value}; write the same"
            )
    if args.n_gpu > 1:
        raise FullshardError(f"one process sees {args.n_gpu} GPUs; start with torchrun, or set CUDA_VISIBLE_DEVICES")


def refuse_missing_reference(name: str, trainer: Callable[..., Any], options: dict[str, Any]) -> None:
    """Raise if a trainer such as TRL's DPOTrainer would copy the model, or add adapters to it, for a reference."""
    if "ref_model" in inspect.signature(trainer).parameters and options.get("ref_model") is None:
        raise FullshardError(
            f"{name} makes its reference model from the model, which cannot be copied once it is sharded; shard a second one, "
            "without an optimizer, and pass ref_model=on_torch.shard(second, plan).model"
        )


def refuse_rate(asked: float, own: float) -> None:
    if asked != float(own):
        raise FullshardError(
            f"TrainingArguments has learning_rate = {asked:g}, but the state's optimizer has {float(own):g}; write the same, or "
            "call shard() without an optimizer"
        )
