"""The recipe: what to train. A TOML file, strict: an unknown key is an error that names the nearest known one."""

import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fullshard.errors import FullshardError, nearest
from fullshard.plan import DType, Remat
from fullshard.train.schedule import Kind


class Section(BaseModel):
    """A table of the recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Model(Section):
    """`name`: a preset, a Hugging Face directory (its config; weights are drawn afresh), or file.py:callable."""

    name: str


class Data(Section):
    """`path`: a directory that `fullshard data pack` made."""

    path: str
    sequence: int = Field(gt=0)
    shuffle: bool = True
    within_documents: bool = False
    valid: str | None = None


class Optim(Section):
    """`decay_all` also decays norms and biases; `clip` is the largest gradient norm."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: float = Field(gt=0)
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False)  # TOML has lists
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.1, ge=0)
    decay_all: bool = False
    clip: float | None = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _momentum_is_sgds(self) -> Self:
        if self.momentum and self.name != "sgd":
            raise ValueError(f"momentum has no effect with name = '{self.name}'; write name = 'sgd', or leave it out")
        return self


class Schedule(Section):
    """How the learning rate moves; steps are counted in optimizer steps."""

    kind: Kind = "cosine"
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


class Train(Section):
    """`steps` or `tokens`; `global_batch` counts sequences over all ranks and micro-batches."""

    steps: int | None = Field(None, gt=0)
    tokens: int | None = Field(None, gt=0)
    global_batch: int = Field(gt=0)
    micro_batch: int = Field(1, gt=0)
    loss: Literal["chunked", "plain"] = "chunked"
    seed: int = 0

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("give either steps or tokens")
        return self


class Planned(Section):
    """The plan: a `file`, or a strategy with its choices."""

    file: str | None = None
    strategy: Literal["ddp", "zero1", "zero2", "zero3", "hybrid"] = "zero3"
    replicate: int = Field(1, gt=0)
    tensor: int = Field(1, gt=0)
    compute: DType = "fp32"
    reduce: DType = "fp32"
    remat: Remat = "none"
    compile: bool = False

    @model_validator(mode="after")
    def _file_or_strategy(self) -> Self:
        if self.file is not None and (extra := self.model_fields_set - {"file"}):
            raise ValueError(f"{sorted(extra)[0]} has no effect beside file; change the plan file instead")
        if (self.strategy == "hybrid") != (self.replicate > 1):
            raise ValueError("strategy = 'hybrid' and replicate (more than 1) belong together")
        return self


class Eval(Section):
    """Every `every` steps the mean loss over `batches` micro-batches a rank of `data.valid`."""

    every: int = Field(0, ge=0)
    batches: int = Field(8, gt=0)


class Recipe(Section):
    """What to train."""

    model: Model
    data: Data
    optim: Optim
    train: Train
    schedule: Schedule = Schedule()
    plan: Planned = Planned()
    eval: Eval = Eval()

    @model_validator(mode="after")
    def _evaluation_has_data(self) -> Self:
        if bool(self.eval.every) != (self.data.valid is not None):
            raise ValueError("eval.every and data.valid belong together: give both, or neither")
        return self

    @property
    def steps(self) -> int:
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.tokens is not None
        return -(-self.train.tokens // (self.train.global_batch * self.data.sequence))


def load_recipe(path: str | Path, overrides: list[str]) -> Recipe:
    """The recipe of a file, with `section.key=value` overrides applied."""
    try:
        tree = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise FullshardError(f"cannot read recipe {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FullshardError(f"{path} is not TOML: {error}") from None
    for override in overrides:
        _override(tree, override)
    return make_recipe(tree, str(path))


def make_recipe(tree: dict[str, Any], where: str) -> Recipe:
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise FullshardError(f"{where}: {_sentence(error)}") from None


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not sections:
        raise FullshardError(f"{text!r} is no override; write section.key=value, for example optim.lr=1e-4")
    table = tree
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise FullshardError(f"{text!r}: {section} is a value, not a section")
    try:
        table[last] = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        table[last] = value  # a bare word is a string


def _sentence(error: ValidationError) -> str:
    """The first thing wrong, in one sentence that names the key."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "extra_forbidden":
            *path, last = first["loc"]
            known = list(_section(path).model_fields)
            return f"unknown key {key} (known: {', '.join(known)}){nearest(str(last), known)}"
        case "missing":
            return f"{key} is missing; add it"
        case "value_error":
            return f"{key + ': ' if key else ''}{first['ctx']['error']}"
        case _:
            return f"{key} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _section(path: list[Any]) -> type[BaseModel]:
    kind: Any = Recipe
    for part in path:
        kind = kind.model_fields[part].annotation
    return kind
