"""Hugging Face Accelerate with a sharded state: its loop, schedulers, trackers and `save_state`.

Accelerate would wrap the model in DDP, which cannot hold sharded parameters. `prepare` marks the model as prepared, which
Accelerate respects, and puts the state's own checkpoint into what Accelerate saves.
"""

from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from fullshard.base.errors import FullshardError
from fullshard.on_torch.optimizers.sharded_optimizer import group_settings, set_group_settings
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.saving.restore import load_checkpoint
from fullshard.on_torch.saving.save import save_checkpoint

FOLDER = "fullshard"  # of the state's own checkpoint, inside a directory of the other library
WRAPPERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")  # distributed types that shard by themselves


class ShardedOptimizer(AcceleratedOptimizer):
    """`state.optimizer` as Accelerate wraps it. Its state dict has the settings of the groups, such as the learning rate;
    moments are in the state's own checkpoint."""

    def __init__(self, state: State):
        if state.optimizer is None:
            raise FullshardError(
                "this state has no optimizer; write shard(model, plan, optimizer=fullshard.AdamW(lr=...)), or state.optimizer = "
                "yours"
            )
        super().__init__(state.optimizer, device_placement=False)
        self._is_accelerate_prepared = True

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": group_settings(self.optimizer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_group_settings(self.optimizer, state_dict["param_groups"])


def prepare(accelerator: Accelerator, state: State) -> tuple[nn.Module, ShardedOptimizer]:
    """The state's model and optimizer for a loop of `accelerator`; `save_state` and `load_state` include them.

    Prepare data loaders and schedulers with `accelerator.prepare`, as always.
    """
    refuse_accelerator(accelerator, state)
    mark_prepared(state)
    optimizer = ShardedOptimizer(state)
    accelerator.prepare(optimizer)
    accelerator.register_save_state_pre_hook(partial(_save, state))
    accelerator.register_load_state_pre_hook(partial(_load, state))
    return state.model, optimizer


def mark_prepared(state: State) -> None:
    """Keep Accelerate from wrapping the model."""
    state.model._is_accelerate_prepared = True  # type: ignore[assignment]


def refuse_accelerator(accelerator: Accelerator, state: State) -> None:
    """Raise where the accelerator would do what the plan does already, or deal batches out otherwise."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in WRAPPERS:
        raise FullshardError(f"this accelerator shards by itself ({kind}), and the plan does too; leave that plugin out")
    if accelerator.mixed_precision != "no":
        raise FullshardError(
            f"mixed_precision = {accelerator.mixed_precision!r} has no effect on a sharded model; write "
            "fullshard.Precision(compute='bf16') in the plan, and mixed_precision='no' here"
        )
    refuse_state(state, "Accelerate")


def refuse_state(state: State, library: str) -> None:
    """Raise for plans that these libraries cannot follow."""
    if state.loss_scale is not None:
        raise FullshardError(f"fp16 needs a loss scale, which {library} would not apply here; write compute='bf16' in the plan")
    if state.plan.mesh.tensor > 1:
        raise FullshardError(
            f"{library} gives every rank its own batch, but ranks of a tensor group share one; make a plan without a tensor axis"
        )


def _save(state: State, models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
    """Before Accelerate writes its own files. `weights`: what it would write of `models`."""
    for i in reversed(range(len(weights))):
        if models[i] is state.model:
            weights.pop(i)
    save_checkpoint(Path(output_dir) / FOLDER, state, overwrite=True)


def _load(state: State, models: list[nn.Module], input_dir: str) -> None:
    models[:] = [m for m in models if m is not state.model]
    load_checkpoint(Path(input_dir) / FOLDER, state)
