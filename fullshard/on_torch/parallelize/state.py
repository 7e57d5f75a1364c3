"""What a run carries from step to step."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fullshard.base.errors import FullshardError
from fullshard.base.text import first_of
from fullshard.on_torch.communication.block_quantization import ErrorMeter
from fullshard.on_torch.model.changing_buffers import ChangingBuffers
from fullshard.on_torch.offload.activations.activation_hooks import Activations
from fullshard.on_torch.offload.shown_state import shown
from fullshard.on_torch.offload.tiered_optimizer import TieredOptimizer
from fullshard.on_torch.offload.units.offloaded_unit import refuse_unfrozen
from fullshard.on_torch.optimizers.foreign_optimizer import explain_steps
from fullshard.on_torch.optimizers.low_bit_adam import LowBitAdam
from fullshard.on_torch.optimizers.sharded_optimizer import makes_state
from fullshard.on_torch.parallelize.float8 import Float8Scales
from fullshard.on_torch.parallelize.same_work import SameWork
from fullshard.on_torch.parallelize.weight_copies import WeightCopies, clear_all_gradients
from fullshard.on_torch.private.fsdp_groups import ComputedGradients
from fullshard.on_torch.ranks.device_meshes import Meshes
from fullshard.plan.plan import Plan


@dataclass
class LossScale:
    """The factor that keeps fp16 gradients above underflow: halved on overflow, doubled after `growth_interval` good steps.

    torch's GradScaler scans each gradient for overflow. Here the global norm tells, which is computed anyway and is the same
    on all ranks.
    """

    value: float = 65536.0
    quiet: int = 0
    growth_interval: int = 2000

    def update(self, overflow: bool) -> None:
        self.quiet = 0 if overflow else self.quiet + 1
        if overflow:
            self.value = max(self.value / 2, 1.0)
        elif self.quiet >= self.growth_interval:
            self.value, self.quiet = self.value * 2, 0


@dataclass
class State:
    """A sharded model with its optimizer and the plan that shaped both. Made by `shard`."""

    engine: ClassVar[str] = "torch"  # see `fullshard.engine.engine`
    model: nn.Module
    plan: Plan
    meshes: Meshes
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    step: int = 0
    loss_scale: LossScale | None = None
    unit_modules: dict[str, list[FSDPModule]] = field(default_factory=dict)
    checks: bool = True  # whether the first step of this process, new or resumed, is still to run them
    activations: Activations | None = None  # those that are offloaded, if any are
    held: int | None = None  # bytes at rest after the first step: they do not change after it
    offload: TieredOptimizer | None = None  # units whose state or parameters are offloaded
    drawn: dict[str, int] = field(default_factory=dict)  # checksums of frozen parameters that nobody has loaded
    scalars: frozenset[str] = frozenset()  # parameters that are vectors of one element here, and scalars in the model
    files: list[dict[str, Any]] = field(default_factory=list)  # how `save_pretrained` arranges the model, as `FileRule`s
    dropout_seed: int = 0  # of `seed_dropout`, for a checkpoint of other ranks
    notes: tuple[str, ...] = ()  # what a user should know of how it was made
    wire_meter: ErrorMeter | None = None  # measures those
    wire_errors: dict[str, float] = field(default_factory=dict)  # of quantised collectives, relative, in the first step
    stepping: bool = False  # inside `train_step`, which counts its step itself
    float8: Float8Scales | None = None  # of weights that are gathered in float8
    computed_gradients: ComputedGradients = field(default_factory=ComputedGradients)
    work: SameWork | None = None  # whether ranks compute the same; None with one rank
    copies: WeightCopies = field(init=False)  # which copies of the weights are current
    held_to_train: object = None  # what `refuse_untrained` saw last
    buffers: ChangingBuffers = field(init=False)  # those that forward changes

    def __post_init__(self) -> None:
        self.copies = WeightCopies(self.model)
        self.buffers = ChangingBuffers(self.model, self.copies.modules())
        if self.optimizer is not None:
            clear_all_gradients(self.copies, self.optimizer)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attach an optimizer that is assigned, also one of the caller's own: its steps count as the state's."""
        if name == "optimizer":
            self._refuse_optimizer(value)
            for handle in self.__dict__.pop("hooks", ()):
                handle.remove()
            if value is not None and "optimizer" in self.__dict__:  # assigned by the caller
                explain_steps(value)
            if value is not None:
                own = weakref.ref(self)
                before, after = partial(_before_step, own), partial(_count, own)
                self.__dict__["hooks"] = (value.register_step_pre_hook(before), value.register_step_post_hook(after))
                if "copies" in self.__dict__:
                    clear_all_gradients(self.copies, value)
        object.__setattr__(self, name, value)

    def _refuse_optimizer(self, value: object) -> None:
        if value is not None and not isinstance(value, torch.optim.Optimizer):
            raise FullshardError(
                f"state.optimizer is one of torch's, over state.parameters(), not a {type(value).__name__}; a "
                "fullshard.AdamW goes to shard(model, plan, optimizer=...)"
            )
        if value is not None and self.plan.precision.low_bit and not isinstance(value, LowBitAdam):
            raise FullshardError(
                f"state.optimizer keeps the plan's low-bit state (precision: {self.plan.precision}), which a "
                f"{type(value).__name__} of your own does not; pass optimizer=fullshard.AdamW(...) to shard(), or leave "
                "precision.moments and precision.rounding out of the plan"
            )
        if self.__dict__.get("offload") is not None:
            raise FullshardError(
                "state.optimizer cannot be replaced while units are offloaded, since it keeps their masters; "
                "change the settings in state.optimizer.param_groups, or call shard() with another optimizer"
            )

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def resident(self) -> list[nn.Parameter]:
        """The parameters that torch's own optimizer updates."""
        return [p for p in self.model.parameters() if not (self.offload and self.offload.holds(p))]

    @contextmanager
    def values(self, *, changed: bool = False, at_rest: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """Every parameter by name; for an offloaded unit its master copy, with all updates done.

        `changed`: the caller writes to them inside. `at_rest`: what is on disk stays there and is shown on meta.
        """
        self.copies.rest()
        if not changed:  # a load writes
            self.copies.refuse_torn()
        found: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        nothing: dict[str, torch.Tensor] = {}
        elsewhere = shown(self.offload, changed=changed, at_rest=at_rest) if self.offload else nullcontext(nothing)
        try:
            with elsewhere as masters:
                yield found | masters
        finally:
            if changed:
                self.copies.changed()

    def refuse_untrained(self) -> None:
        """Raise if the optimizer lacks a parameter that is to be trained, as one that was unfrozen since `shard`."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        trained = (self.copies.trained(), sum(len(g["params"]) for g in groups))
        if trained == self.held_to_train:
            return
        if self.offload is not None:
            refuse_unfrozen(self.offload.units)
        given = {id(p) for group in groups for p in group["params"]}
        missing = [n for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in given]
        if missing:
            raise FullshardError(
                f"the optimizer does not hold {first_of(missing)}: it was built before the model was sharded, or the parameter "
                "was replaced, unfrozen or added since; build the optimizer after shard(), or call its add_param_group"
            )
        self.held_to_train = trained
        self.copies.training_changed()

    @property
    def kernels(self) -> dict[str, str]:
        """Which kernels update parameters and, on a GPU, compute the chunked loss and pack messages, and why not faster ones."""
        from fullshard.on_torch.parallelize.kernel_report import step_kernels, update_kernels

        return step_kernels(self.device, self.optimizer, self.plan) | (update_kernels(self.offload) if self.offload else {})

    @property
    def compiles(self) -> bool:
        """True if the first step compiles blocks."""
        return self.plan.compile

    @property
    def updates_overlap(self) -> bool:
        """True if updates of offloaded units may still run during the next step."""
        return self.offload is not None

    def flush(self) -> None:
        """Wait for updates that still run in the background."""
        if self.offload:
            self.offload.flush()

    def held_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds between steps, by kind, counted from the tensors."""
        optimizer = self.optimizer.state.values() if self.optimizer else ()
        tensors = [t for slot in optimizer for t in slot.values() if isinstance(t, torch.Tensor) and t.ndim > 0]
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        return {
            "params": sum(stored_bytes(p) for p in self.parameters() if there(p)),
            "gradients": sum(stored_bytes(g) for g in grads),
            "optimizer": sum(stored_bytes(t) for t in tensors),
            "buffers": sum(stored_bytes(b) for b in self.model.buffers()),
        }


def _before_step(
    found: "weakref.ref[State]", optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Of a step that the caller makes."""
    state = found()
    if state is None or state.stepping:
        return
    state.refuse_untrained()
    if state.work is not None and not makes_state(optimizer, kwargs):
        state.work.agree()


def _count(found: "weakref.ref[State]", optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count a step of the optimizer that the caller made."""
    state = found()
    if state is not None:
        state.copies.changed()
    if state is not None and not state.stepping and not makes_state(optimizer, kwargs):
        state.step += 1


def there(p: nn.Parameter) -> bool:
    """True if a shard has memory on the device now. Offloaded ones have none between gathers."""
    local = p.to_local() if isinstance(p, DTensor) else p
    return local.untyped_storage().nbytes() > 0


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of this rank's part. A view into a larger buffer counts for its own elements."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def memory(state: State) -> dict[str, int]:
    """Peak bytes of the device since the last call, by its allocator. On a CPU, the bytes that the state holds."""
    if state.device.type != "cuda":
        state.held = state.held or sum(state.held_bytes().values())
        return {"memory_allocated": state.held}
    found = {"memory_allocated": torch.cuda.max_memory_allocated(), "memory_reserved": torch.cuda.max_memory_reserved()}
    torch.cuda.reset_peak_memory_stats()
    return found
