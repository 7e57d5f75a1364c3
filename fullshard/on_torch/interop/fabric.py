"""Lightning Fabric with a plan: a strategy that shards in `fabric.setup_module` and saves in `fabric.save`."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptim

from fullshard.base.errors import FullshardError
from fullshard.on_torch.optimizers.sharded_optimizer import clip_grad_norm_, group_settings, set_group_settings
from fullshard.on_torch.parallelize.shard import shard
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.ranks.device_meshes import data_rank, start
from fullshard.on_torch.saving.restore import load_checkpoint
from fullshard.on_torch.saving.save import save_checkpoint
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan

try:
    from lightning_fabric.strategies import ModelParallelStrategy
except ImportError:  # the package that has everything of Lightning
    from lightning.fabric.strategies import ModelParallelStrategy

JOINTLY = "call fabric.setup_module(model), then fabric.setup_optimizers(strategy.sharded.optimizer)"


class ShardedStrategy(ModelParallelStrategy):
    """`Fabric(strategy=ShardedStrategy(plan, fs.AdamW(lr=1e-3)))`. `options`: as of `shard`.

    `fabric.setup_module(model)` carries the plan out; `sharded` is then the state.
    """

    def __init__(self, plan: Plan, optimizer: Optimizer | None = None, **options: Any):
        super().__init__(self._shard, data_parallel_size=plan.mesh.data, tensor_parallel_size=plan.mesh.tensor)
        self.plan, self.wanted, self.options = plan, optimizer, options
        self.made: State | None = None

    @property
    def sharded(self) -> State:
        if self.made is None:
            raise FullshardError("nothing is sharded yet; call fabric.setup_module(model) first")
        return self.made

    def setup_environment(self) -> None:
        start(self.root_device.type)  # before Fabric, whose process group would have one backend
        super().setup_environment()

    def setup_module(self, module: nn.Module) -> nn.Module:
        if self.precision.precision != "32-true":
            raise FullshardError(
                f"precision = {self.precision.precision!r} has no effect on a sharded model; write "
                "fullshard.Precision(compute='bf16') in the plan, and leave it out here"
            )
        if self.made is not None:
            raise FullshardError("a ShardedStrategy has one plan and one model; make another Fabric for the second model")
        return self._shard(module, None)

    def _shard(self, module: nn.Module, mesh: object) -> nn.Module:
        self.made = shard(module, self.plan, self.wanted, device=self.root_device.type, **self.options)
        if self.made.loss_scale is not None:
            raise FullshardError("fp16 needs a loss scale, which Fabric would not apply here; write compute='bf16' in the plan")
        return module

    def setup_module_and_optimizers(self, *args: Any, **kwargs: Any) -> Any:
        raise FullshardError(f"an optimizer is made after sharding; {JOINTLY}")

    def setup_optimizer(self, optimizer: TorchOptim) -> TorchOptim:
        """Make it the state's, if it is another: its moments are saved, and its steps count."""
        if optimizer is not self.sharded.optimizer:
            self.sharded.optimizer = optimizer
        return optimizer

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.plan.mesh.data, "rank": data_rank(self.plan.mesh)}

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: TorchOptim, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> Tensor:
        return clip_grad_norm_(self.sharded.parameters(), max_norm, norm_type, error_if_nonfinite)

    # -- saving ------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: str | Path, state: dict[str, Any], storage_options: Any = None, filter: Any = None) -> None:
        """The sharded state, and beside it whatever JSON `state` has. Collective."""
        if storage_options is not None or filter is not None:
            raise FullshardError("fabric.save writes the whole sharded state; leave filter and storage_options out")
        optimizer = self.sharded.optimizer
        extra = {"objects": _plain(self._others(state)), "groups": group_settings(optimizer) if optimizer else []}
        save_checkpoint(Path(self.broadcast(str(path))), self.sharded, extra=extra, overwrite=True)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill the sharded state, and in `state` whatever JSON was saved. Returns what `state` has no place for. Collective."""
        if state is not None and not isinstance(state, dict):
            raise FullshardError("fabric.load fills the whole sharded state; write fabric.load(path, {'model': model, ...})")
        others = self._others(state or {})
        extra = load_checkpoint(Path(self.broadcast(str(path))), self.sharded).state.get("extra", {})
        saved = dict(extra.get("objects", {}))
        if strict and (missing := [name for name in others if name not in saved]):
            raise FullshardError(f"{path} has no {', '.join(missing)}; it has {', '.join(saved) or 'nothing beside the state'}")
        if self.sharded.optimizer is not None and extra.get("groups"):
            set_group_settings(self.sharded.optimizer, extra["groups"])
        for name, value in others.items():
            if name in saved and hasattr(value, "load_state_dict"):
                value.load_state_dict(saved.pop(name))
            elif name in saved and state is not None:
                state[name] = saved.pop(name)
        return saved

    def _others(self, state: dict[str, Any]) -> dict[str, Any]:
        """What is neither the model nor its optimizer. Raises for another model."""
        for name, value in state.items():
            strange = isinstance(value, nn.Module) and value is not self.sharded.model
            if strange or (isinstance(value, TorchOptim) and value is not self.sharded.optimizer):
                raise FullshardError(f"{name} is not what this strategy sharded; save it apart")
        return {n: v for n, v in state.items() if not isinstance(v, nn.Module | TorchOptim)}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON; a scheduler by its state dict."""
    found = {n: v.state_dict() if hasattr(v, "state_dict") else v for n, v in values.items()}
    for name, value in found.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise FullshardError(f"{name} is no JSON, and a checkpoint holds no other objects; save it apart") from None
    return found
