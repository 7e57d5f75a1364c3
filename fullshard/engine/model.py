"""What an engine knows of models before they take memory: loading, describing and refusing them. Knows no engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from fullshard.engine.loss_value import LossFunction
from fullshard.model.description import Description
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import DType, Plan

ModelT = TypeVar("ModelT")  # a model as the engine has it: torch's nn.Module, a function that makes an NNX module
ModelT_contra = TypeVar("ModelT_contra", contravariant=True)


@dataclass(frozen=True)
class ModelFacts:
    """What a model says of the data that it takes. None: it does not say."""

    vocabulary: int | None = None
    longest: int | None = None  # sequence
    classes: int | None = None
    image_size: int | None = None  # pixels of an image's side
    takes_positions: bool = False  # `position_ids`, which keep attention inside documents


class ParameterFacts(NamedTuple):
    """A parameter of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool


class AddAdapters(Protocol[ModelT]):
    """Gives a model LoRA adapters, and freezes everything else."""

    def __call__(self, model: ModelT, *, rank: int, alpha: int, dropout: float, targets: Sequence[str]) -> ModelT: ...


class ScanLayers(Protocol[ModelT]):
    """The same model, of which `shard` compiles equal blocks once, as a loop."""

    def __call__(self, model: ModelT, /) -> ModelT: ...


class TraceCosts(Protocol[ModelT_contra]):
    """Describes a model with what computing it costs. `example`: a batch in place of the shape, of a model that does not take
    rows of tokens, with its `loss`."""

    def __call__(
        self,
        model: ModelT_contra,
        *,
        classes: Sequence[str] = (),
        names: Sequence[str] = (),
        min_params: int = 0,
        title: str = "",
        micro_batch: int = 0,
        sequence: int = 0,
        example: Any = None,
        loss: LossFunction | None = None,
        compute: DType = "bf16",
        tensor: Sequence[int] = (),
    ) -> Description: ...


class Models(Protocol[ModelT]):
    """Models without memory for their weights. What not every engine offers is None where it does not."""

    @property
    def add_adapters(self) -> AddAdapters[ModelT] | None: ...

    @property
    def scan(self) -> ScanLayers[ModelT] | None: ...

    @property
    def trace_costs(self) -> TraceCosts[ModelT] | None: ...

    def load(self, name: str, *, init: str = "factory", call: str | None = None) -> ModelT:
        """A preset, a Hugging Face directory or `file.py:callable`. `init`: whose initial values a file's model gets. `call`: a
        function (model, batch) -> logits."""

    def check_weights(self, model: ModelT, directory: str | Path) -> None:
        """Raise where a directory of safetensors files lacks a tensor of the model, or has it in another shape."""

    def describe(
        self,
        model: ModelT,
        *,
        classes: Sequence[str] = (),
        names: Sequence[str] = (),
        min_params: int = 0,
        experts: bool = False,
        title: str = "",
    ) -> Description:
        """The model's units, without what computing them costs."""

    def facts(self, model: ModelT) -> ModelFacts: ...

    def parameters(self, model: ModelT) -> list[ParameterFacts]: ...

    def refuse(self, model: ModelT, plan: Plan, optimizer: Optimizer | None = None, disk: str | Path | None = None) -> None:
        """Raise where the engine cannot carry the plan out. Allocates nothing."""
