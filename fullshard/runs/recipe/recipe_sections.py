"""The tables of a recipe and the keys of each, with their defaults and what they exclude."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fullshard.base.callables import is_callable_name
from fullshard.base.errors import nearest
from fullshard.data.collate import Pad
from fullshard.data.images import Resize
from fullshard.data.token_batches import Boundaries, Packing
from fullshard.runs.recipe.lr_schedule import ScheduleKind


class RecipeSection(BaseModel):
    """A table of the recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def changed(section: RecipeSection) -> set[str]:
    """The keys that do not have their default: a resolved recipe names them all."""
    return {name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default}


class ModelSection(RecipeSection):
    """`name`: a preset, a Hugging Face directory, or file.py:callable. `weights`: `auto` reads those that lie in
    the Hugging Face directory and draws them otherwise, `draw` draws them, anything else is a directory of them. `init`: the
    drawn weights of a file's model are its `factory`'s own, or those of its `modules`' rules. `call`: file.py:callable, a
    function (model, batch) that returns logits or a Loss. `scan`: equal blocks are one compiled loop, on JAX."""

    name: str
    weights: str = "auto"
    init: Literal["factory", "modules"] = "factory"
    call: str | None = None
    scan: bool = False


class LoraSection(RecipeSection):
    """Low-rank adapters on the linears called `targets`; everything else is frozen."""

    rank: int = Field(gt=0)
    alpha: int = Field(16, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: tuple[str, ...] = Field(("q_proj", "k_proj", "v_proj", "o_proj"), strict=False, min_length=1)


# The columns that each objective reads, and what else its samples depend on. `custom` takes any columns.
COLUMNS: dict[str, tuple[str, ...]] = {
    "masked": ("text",),
    "seq2seq": ("source", "target"),
    "classify": ("text", "label"),
    "image": ("image", "label"),
}
TAKES: dict[str, set[str]] = {
    "causal": {"sequence", "boundaries", "packing", "columns", "collate"},
    "masked": {"sequence", "tokenizer", "columns", "mask", "pad"},
    "seq2seq": {"sequence", "target_sequence", "tokenizer", "columns", "pad"},
    "classify": {"sequence", "tokenizer", "columns", "pad"},
    "image": {"columns", "image_size", "resize", "mean", "std"},
    "custom": {"sequence", "columns", "collate"},
}
Triple = tuple[float, float, float]


class DataSection(RecipeSection):
    """`path`: a directory that `fullshard data pack` made, a table or a folder of images; or `source`: file.py:callable, which
    returns a data set. `objective`: what a sample is made into."""

    path: str | None = None
    source: str | None = None
    objective: Literal["causal", "masked", "seq2seq", "classify", "image", "custom"] = "causal"
    sequence: int | None = Field(None, gt=0)
    shuffle: bool = True
    boundaries: Boundaries = "ignored"
    packing: Packing = "stream"
    valid: str | None = None
    columns: dict[str, str] = Field({})
    tokenizer: str | None = None
    target_sequence: int | None = Field(None, gt=0)
    mask: float = Field(0.15, gt=0, lt=1)
    pad: Pad = "longest"
    image_size: int | None = Field(None, gt=0)
    resize: Resize = "crop"
    mean: Triple | None = Field(None, strict=False)
    std: Triple | None = Field(None, strict=False)
    collate: str | None = None
    workers: int | None = Field(None, ge=0)
    prefetch: int = Field(2, ge=0)

    @model_validator(mode="after")
    def _whole_rows_have_boundaries(self) -> Self:
        if self.packing == "whole" and self.boundaries == "ignored":
            raise ValueError("packing = 'whole' needs boundaries = 'labels' or 'attention': its rows are padded")
        return self

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.path is not None and self.source is not None:
            raise ValueError("path and source exclude each other; leave one out")
        if self.path is None and self.source is None:
            raise ValueError("path is missing; add it, or source = 'file.py:callable'")
        for key in ("source", "collate"):
            if (given := getattr(self, key)) is not None and not is_callable_name(given):
                raise ValueError(f"{key} = {given!r} names no callable; write {key} = 'file.py:callable'")
        return self

    @model_validator(mode="after")
    def _what_the_objective_takes(self) -> Self:
        takes = TAKES[self.objective]
        for key in sorted(set.union(*TAKES.values()) - takes):
            if key in changed(self):
                raise ValueError(f"{key} has no effect with objective = '{self.objective}'; leave it out")
        if "sequence" in takes and self.sequence is None and self.objective != "custom":
            raise ValueError(
                f"sequence is missing: objective = '{self.objective}' needs the number of tokens in a sample; add it"
            )
        for part in self.columns if self.objective in COLUMNS else ():
            if part not in (known := list(COLUMNS[self.objective])):
                raise ValueError(f"columns.{part} is unknown (known: {', '.join(known)}){nearest(part, known)}")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std = {list(self.std)} must be above 0")
        return self

    def column(self, part: str) -> str:
        """The column that holds a part of the objective's samples; by default of the same name."""
        return self.columns.get(part, part)


# What each optimizer takes besides its learning rate, and the defaults.
OWN: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "adam": {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "sgd": {"momentum": 0.0, "weight_decay": 0.1},
}


class OptimSection(RecipeSection):
    """`name`: adamw, adam, sgd, or another of torch.optim with its own `options`, in upper or lower case. What an optimizer
    does not take is None. `decay_all` also decays norms and biases; `clip` is the largest gradient norm, or `none`."""

    name: str = "adamw"
    lr: float = Field(gt=0)
    betas: tuple[float, float] | None = Field(None, strict=False)  # TOML has lists
    eps: float | None = Field(None, gt=0)
    momentum: float | None = Field(None, ge=0, lt=1)
    weight_decay: float | None = Field(None, ge=0)
    decay_all: bool = False
    clip: float | None = Field(1.0, gt=0)
    options: dict[str, Any] = Field({})

    @model_validator(mode="before")
    @classmethod
    def _defaults_are_the_optimizers(cls, value: Any) -> Any:
        name = value.get("name", "adamw") if isinstance(value, dict) else None
        if not isinstance(name, str) or name.lower() not in OWN:
            return value
        defaults = OWN[name.lower()]
        return defaults | {k: v for k, v in value.items() if v is not None or k not in defaults} | {"name": name.lower()}

    @field_validator("clip", mode="before")
    @classmethod
    def _toml_has_no_null(cls, value: object) -> object:
        if isinstance(value, str) and value != "none":
            raise PydanticCustomError("number_or_none", "Input should be a valid number, or 'none'")
        return None if value == "none" else value

    @model_validator(mode="after")
    def _each_has_its_own(self) -> Self:
        takes = set(OWN.get(self.name, {"options": {}}))
        for key in ("betas", "eps", "momentum", "weight_decay", "options"):
            if key in changed(self) and key not in takes:
                other = f"write optim.options.{key}" if takes == {"options"} else f"it takes {', '.join(sorted(takes))}"
                raise ValueError(f"{key} has no effect with name = '{self.name}'; {other}")
        return self


class ScheduleSection(RecipeSection):
    """How the learning rate moves; steps are counted in optimizer steps."""

    kind: ScheduleKind = "cosine"
    warmup: int = Field(0, ge=0)
    decay: int = Field(0, ge=0)
    final: float = Field(0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _decay_is_wsds(self) -> Self:
        if self.decay and self.kind != "wsd":
            raise ValueError(f"decay has no effect with kind = '{self.kind}'; write kind = 'wsd', or leave it out")
        if self.kind == "wsd" and not self.decay:
            raise ValueError("kind = 'wsd' needs decay, the number of steps of the last fall")
        return self


LOSSES = ("auto", "chunked", "plain")


class TrainSection(RecipeSection):
    """`steps` or `tokens`; `global_batch` counts samples over all ranks and micro-batches. `micro_batch`: by default the
    planner's choice. `loss`: `auto` is the data's objective's own."""

    steps: int | None = Field(None, gt=0)
    tokens: int | None = Field(None, gt=0)
    global_batch: int = Field(gt=0)
    micro_batch: int | None = Field(None, gt=0)
    loss: str = "auto"
    seed: int = 0
    hang_seconds: float = Field(300.0, ge=0)  # without progress until the run is called hung; 0: never
    max_skips: int = Field(10, gt=0)  # steps in a row whose loss or gradient was not finite
    on_divergence: Literal["stop", "rollback"] = "stop"
    max_rollbacks: int = Field(3, gt=0)

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str) -> str:
        if value not in LOSSES and not is_callable_name(value):
            raise ValueError(
                f"there is no loss {value!r}; write {', '.join(LOSSES)} or file.py:callable{nearest(value, list(LOSSES))}"
            )
        return value

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("give either steps or tokens")
        if "max_rollbacks" in changed(self) and self.on_divergence != "rollback":
            raise ValueError("max_rollbacks has no effect with on_divergence = 'stop'; write on_divergence = 'rollback'")
        return self


class DiskSection(RecipeSection):
    """`path`: the directory for what rests on disk."""

    path: str | None = None


class EvalSection(RecipeSection):
    """Every `every` steps the mean loss over `batches` micro-batches a rank of `data.valid`; with `patience`, the
    run ends after that many evaluations without a loss lower by `min_delta`."""

    every: int = Field(0, ge=0)
    batches: int = Field(8, gt=0)
    patience: int | None = Field(None, gt=0)
    min_delta: float = Field(0.0, ge=0)


class SampleSection(RecipeSection):
    """Every `every` steps the model continues each of `prompts`. `tokenizer`: `bytes` or a tokenizer.json; by
    default the one that the data was packed with, if it is `bytes` or lies in the model's directory."""

    every: int = Field(0, ge=0)
    prompts: tuple[str, ...] = Field((), strict=False)
    tokens: int = Field(64, gt=0)
    temperature: float = Field(0.8, ge=0)
    tokenizer: str | None = None


class CheckpointSection(RecipeSection):
    """One every `every` steps or `minutes`, and a `final` one. Of the old ones stay the last `keep` (0: all), each
    `keep_every`-th step, one each `keep_hours`, and the `best` by `metric`. `path`: a directory or URL, by default
    RUN/checkpoints. `background`: training goes on while one is written. `retry_seconds`: for how long the final one is
    tried again. `export`: at the end, a Hugging Face directory, RUN/export or another."""

    every: int = Field(0, ge=0)
    minutes: float = Field(30.0, ge=0)
    final: bool = True
    keep: int = Field(2, ge=0)
    keep_every: int = Field(0, ge=0)
    keep_hours: float = Field(0.0, ge=0)
    best: int = Field(0, ge=0)
    metric: Literal["loss", "eval_loss"] = "eval_loss"
    highest: bool = False
    path: str | None = None
    background: bool = True
    retry_seconds: float = Field(300.0, ge=0)
    export: bool | str = False

    @model_validator(mode="after")
    def _what_has_an_effect(self) -> Self:
        for key in ("keep_every", "keep_hours", "best"):
            if getattr(self, key) and not self.keep:
                raise ValueError(f"{key} has no effect with keep = 0, which keeps all; write keep = 1 or more")
        for key in ("metric", "highest"):
            if key in changed(self) and not self.best:
                raise ValueError(f"{key} has no effect without best, the number of best checkpoints to keep")
        if "retry_seconds" in changed(self) and not self.final:
            raise ValueError("retry_seconds has no effect with final = false; leave it out")
        if self.export and not self.final:
            raise ValueError("export needs final = true: it is made from the last checkpoint")
        if not (self.every or self.minutes or self.final) and changed(self) - {"every", "minutes", "final"}:
            raise ValueError("without every, minutes and final there are no checkpoints; the other keys have no effect")
        return self


class ProfileSection(RecipeSection):
    """`steps` steps are profiled, beginning with step `at`; 0: none."""

    at: int = Field(0, ge=0)
    steps: int = Field(3, gt=0)

    @model_validator(mode="after")
    def _steps_need_a_first(self) -> Self:
        if "steps" in changed(self) and not self.at:
            raise ValueError("steps has no effect without at, the first step to profile; give both, or neither")
        return self


class LogSection(RecipeSection):
    """Where numbers go besides `metrics.jsonl`; `wandb` is the name of a Weights & Biases project. `unit_norms`: the
    gradient norm of each unit is among the numbers."""

    tensorboard: bool = False
    wandb: str | None = None
    unit_norms: bool = False
