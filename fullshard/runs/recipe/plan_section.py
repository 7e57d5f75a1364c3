"""The recipe's table of the plan: its keys, and the parts of a plan that they make."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fullshard.plan.choices import BLOCK, AttentionKernel, Kernel, MomentKind, Rounding
from fullshard.plan.plan import DType, Float8, Kernels, Precision, Prefetch, Remat, Sync, Wire, WireFormat, WireMemory
from fullshard.runs.recipe.recipe_sections import RecipeSection, changed

# Choices that only named strategies have.
NAMED_ONLY = ("expert", "reshard", "replicate_below", "keep_whole", "remat_every", "classes", "names", "min_params", "output")


class PlanSection(RecipeSection):
    """The plan: a `file`, or a strategy with its choices. The planner makes the choices that are None; with the strategy
    `auto`, all that are not given, within `limit`. `classes`, `names` and `min_params` say which modules are units. `cluster`
    (by default the devices that are there) is what the plan is found and predicted for. `plan = "zero3"`, `plan = "auto"` and
    `plan = "plan.json"` are short for a table with that one key."""

    file: str | None = None
    strategy: Literal["auto", "ddp", "zero1", "zero2", "zero3", "hybrid", "hpz", "mixed"] | None = None
    cluster: str | None = None
    limit: str | None = None
    replicate: int = Field(1, gt=0)
    tensor: int = Field(1, gt=0)
    expert: int = Field(1, gt=0)
    reshard: int | None = Field(None, gt=1)
    replicate_below: int = Field(0, ge=0)
    keep_whole: tuple[str, ...] = Field((), strict=False)
    classes: tuple[str, ...] = Field((), strict=False)
    names: tuple[str, ...] = Field((), strict=False)
    min_params: int = Field(0, ge=0)
    compute: DType | None = None
    reduce: DType = "fp32"
    master: Literal["fp32", "bf16"] = "fp32"
    output: DType | None = None
    buffers: DType | None = None
    float8: Float8 | None = None
    moments: MomentKind | None = None
    rounding: Rounding = "nearest"
    remat: Remat | None = None
    remat_every: int = Field(1, gt=0)
    prefetch: int | None = Field(None, gt=0)
    prefetch_forward: int | None = Field(None, gt=0)
    prefetch_backward: int | None = Field(None, gt=0)
    sync: Sync | None = None
    compile: bool | None = None
    wire_gather: WireFormat = "plain"
    wire_reduce: WireFormat = "plain"
    wire_block: int = Field(BLOCK, ge=16)
    error_feedback: bool = False
    wire_memory: WireMemory = "torch"
    attention_kernel: AttentionKernel = "auto"
    loss_kernel: Kernel = "auto"
    update_kernel: Kernel = "auto"

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return short_plan(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _file_or_strategy(self) -> Self:
        if self.file is not None and (extra := changed(self) - {"file", "cluster"}):
            raise ValueError(f"{sorted(extra)[0]} has no effect beside file; change the plan file instead")
        if self.limit is not None and self.wanted != "auto":
            raise ValueError(f"limit has no effect with strategy = '{self.wanted}'; write strategy = 'auto', or leave it out")
        for key in NAMED_ONLY:
            if self.wanted == "auto" and key in changed(self):
                raise ValueError(f"{key} has no effect with strategy = 'auto'; name the strategy, or leave it out")
        return self

    @model_validator(mode="after")
    def _what_has_an_effect(self) -> Self:
        if self.prefetch is not None and self.prefetch_forward is not None and self.prefetch_backward is not None:
            raise ValueError("prefetch has no effect beside prefetch_forward and prefetch_backward; leave it out")
        if self.error_feedback and self.wire_reduce == "plain":
            raise ValueError(
                "error_feedback has no effect with wire_reduce = 'plain'; write wire_reduce = 'int8', or leave it out"
            )
        if self.wire_block != BLOCK and self.wire_gather == self.wire_reduce == "plain":
            raise ValueError("wire_block has no effect without wire_gather or wire_reduce; write wire_gather = 'int8'")
        if self.wire_memory != "torch" and not self.wire_gather == self.wire_reduce == "plain":
            raise ValueError("wire_memory has no effect on quantised messages; leave it out, or wire_gather and wire_reduce")
        return self

    @property
    def wanted(self) -> str:
        """The strategy that the keys ask for: where none is named `auto`, or zero3 beside keys that only named ones have."""
        return self.strategy or ("zero3" if changed(self) & set(NAMED_ONLY) else "auto")

    @property
    def precision(self) -> Precision:
        kinds = ("reduce", "master", "output", "buffers", "float8", "moments", "rounding")
        return Precision(self.compute or "fp32", **{kind: getattr(self, kind) for kind in kinds})

    @property
    def depths(self) -> Prefetch:
        """How far ahead units are gathered: each direction's own depth, or that of both."""
        both = self.prefetch or 1
        return Prefetch(self.prefetch_forward or both, self.prefetch_backward or both)

    @property
    def wire(self) -> Wire:
        return Wire(self.wire_gather, self.wire_reduce, self.wire_block, self.error_feedback, self.wire_memory)

    @property
    def kernels(self) -> Kernels:
        return Kernels(self.attention_kernel, self.loss_kernel, self.update_kernel)

    @property
    def unit_rules(self) -> dict[str, Any]:
        """Which modules are units, as `describe` takes it."""
        return {"classes": self.classes, "names": self.names, "min_params": self.min_params}


def short_plan(text: str) -> dict[str, Any]:
    """The table that `plan = "zero3"` or `plan = "plan.json"` is short for."""
    return {"file" if text.endswith(".json") else "strategy": text}
