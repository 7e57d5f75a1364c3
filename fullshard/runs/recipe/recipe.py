"""The recipe: what to train. A TOML file, strict: an unknown key is an error that names the nearest known one."""

import json
import tomllib
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import BaseModel, ValidationError, model_validator

from fullshard.base.errors import FullshardError, nearest
from fullshard.base.reading import parse_toml, read_text
from fullshard.plan.choices import idle_loss_kernel
from fullshard.runs.recipe.plan_section import HomeSection, PlanSection, short_plan
from fullshard.runs.recipe.recipe_sections import (
    CheckpointSection,
    DataSection,
    DiskSection,
    EvalSection,
    LogSection,
    LoraSection,
    ModelSection,
    OptimSection,
    ProfileSection,
    RecipeSection,
    SampleSection,
    ScheduleSection,
    TrainSection,
    changed,
)

MOST_BYTES = 1 << 20  # of a recipe
FILL_IN = "FILL-IN"  # a value that `fullshard migrate` could not know


class Recipe(RecipeSection):
    """What to train."""

    model: ModelSection
    data: DataSection
    optim: OptimSection
    train: TrainSection
    schedule: ScheduleSection = ScheduleSection()
    plan: PlanSection = PlanSection()
    home: HomeSection = HomeSection()
    disk: DiskSection = DiskSection()
    lora: LoraSection | None = None
    eval: EvalSection = EvalSection()
    sample: SampleSection = SampleSection()
    checkpoint: CheckpointSection = CheckpointSection()
    profile: ProfileSection = ProfileSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _a_call_is_not_chunked(self) -> Self:
        if self.model.call is not None and self.train.loss == "chunked":
            raise ValueError("train.loss = 'chunked' has no effect with model.call; leave it out")
        if why := idle_loss_kernel("plan.loss_kernel", self.plan.loss_kernel, self.loss):
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _what_belongs_together(self) -> Self:
        if bool(self.eval.every) != (self.data.valid is not None):
            raise ValueError("eval.every and data.valid belong together: give both, or neither")
        if self.eval.patience and not self.eval.every:
            raise ValueError("eval.patience has no effect without eval.every; give both, or neither")
        if bool(self.sample.every) != bool(self.sample.prompts):
            raise ValueError("sample.every and sample.prompts belong together: give both, or neither")
        if self.checkpoint.best and self.checkpoint.metric == "eval_loss" and not self.eval.every:
            raise ValueError("checkpoint.best ranks by the evaluation loss; give eval.every, or checkpoint.metric = 'loss'")
        return self

    @model_validator(mode="after")
    def _the_objective_has_its_loss(self) -> Self:
        objective = self.data.objective
        if objective == "causal":
            return self
        if self.train.loss in ("chunked", "plain"):
            raise ValueError(f"train.loss = '{self.train.loss}' is of data.objective = 'causal', not '{objective}'; leave it out")
        if objective == "custom" and self.train.loss == "auto":
            raise ValueError("data.objective = 'custom' needs train.loss = 'file.py:callable', which returns on_torch.Loss")
        if self.train.tokens is not None:
            raise ValueError(f"train.tokens is of data.objective = 'causal', not '{objective}'; write train.steps")
        if self.sample.every:
            raise ValueError(f"sample.every lets a causal model continue texts, not one of data.objective = '{objective}'")
        return self

    @model_validator(mode="after")
    def _the_schedule_fits_the_run(self) -> Self:
        rise, fall = self.schedule.warmup, self.schedule.decay
        if rise > self.steps:
            raise ValueError(f"schedule.warmup = {rise} is longer than the run of {self.steps} steps; shorten it")
        if rise + fall > self.steps:
            raise ValueError(
                f"schedule.warmup = {rise} and schedule.decay = {fall} are more than the {self.steps} steps; shorten them"
            )
        return self

    @model_validator(mode="after")
    def _the_profile_is_in_the_run(self) -> Self:
        at, last = self.profile.at, self.profile.at + self.profile.steps - 1
        if at and last > self.steps:
            raise ValueError(
                f"profile.at = {at} with profile.steps = {self.profile.steps} ends at step {last}, after the last of the run, "
                f"{self.steps}; write a smaller profile.at"
            )
        return self

    @model_validator(mode="after")
    def _a_backlog_is_of_updates_under_backward(self) -> Self:
        if self.home.backlog is not None and (self.optim.clip is not None or self.plan.compute == "fp16"):
            clips = self.optim.clip is not None
            which, other = ("optim.clip", "optim.clip = 'none'") if clips else ("plan.compute = 'fp16'", "plan.compute = 'bf16'")
            raise ValueError(f"home.backlog has no effect with {which}: all gradients wait for their norm; write {other}")
        return self

    @model_validator(mode="after")
    def _homes_are_the_plans(self) -> Self:
        if self.plan.file is not None:
            if given := changed(self.home):
                raise ValueError(f"home.{min(given)} has no effect beside plan.file; change the plan file instead")
            return self
        on_disk = [kind for kind in ("params", "optimizer", "activations") if getattr(self.home, kind) == "disk"]
        if on_disk and self.disk.path is None:
            raise ValueError(f"home.{on_disk[0]} = 'disk' needs disk.path, a directory on the disk that is to hold it")
        if self.home.params == "disk" and self.home.optimizer in (None, "device") and self.plan.wanted != "auto":
            raise ValueError(
                "home.params = 'disk' saves nothing while the optimizer's own copy of them is on the device; "
                "write home.optimizer = 'disk' or 'host'"
            )
        if self.disk.path is not None and not on_disk and self.plan.wanted != "auto":
            raise ValueError("disk.path has no effect: nothing rests on disk; write home.optimizer = 'disk', or leave it out")
        return self

    @property
    def steps(self) -> int:
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.tokens is not None
        return -(-self.train.tokens // (self.train.global_batch * self.sequence))

    @property
    def sequence(self) -> int:
        """Tokens in a sample; 1 if samples have none."""
        return self.data.sequence or 1

    @property
    def loss(self) -> str:
        """The loss by its name for the engine: `auto` is the objective's own."""
        causal = "plain" if self.model.call else "chunked"  # a call's logits may differ from the head's
        default = causal if self.data.objective == "causal" else self.data.objective
        return default if self.train.loss == "auto" else self.train.loss

    @property
    def unit(self) -> str:
        """What a run counts: `tokens` with a label, or `samples`."""
        return "tokens" if self.data.objective == "causal" else "samples"


def load_recipe(path: str | Path, overrides: list[str]) -> Recipe:
    """The recipe of a file, with `section.key=value` overrides applied."""
    tree = parse_toml(read_text(path, "recipe", MOST_BYTES), str(path))
    for text in overrides:
        override(tree, text)
    _refuse_gaps(tree, str(path))
    return make_recipe(tree, str(path))


def _refuse_gaps(tree: dict[str, Any], where: str) -> None:
    for section, table in tree.items():
        for key, value in table.items() if isinstance(table, dict) else ():
            if value == FILL_IN:
                key = f"{section}.{key}"
                raise FullshardError(f"{where}: {key} is still {FILL_IN}; write its value there, or {key}=VALUE after the recipe")


def make_recipe(tree: dict[str, Any], where: str) -> Recipe:
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise FullshardError(f"{where}: {_sentence(error)}") from None


def override(tree: dict[str, Any], text: str) -> None:
    """Put `section.key=value` into the tables of a recipe."""
    key, equals, value = text.partition("=")
    *sections, last = key.strip().split(".")
    if equals and not sections and last == "plan":
        table = tree.get("plan")  # of a file's short form nothing is left, of a table what is beside strategy and file
        kept = {k: v for k, v in table.items() if k not in ("strategy", "file")} if isinstance(table, dict) else {}
        tree["plan"] = kept | short_plan(str(parse_value(text, value)))
        return
    if not equals or not sections:
        raise FullshardError(f"{text!r} is no override; write section.key=value, for example optim.lr=1e-4")
    if sections[0] == "plan" and isinstance(tree.get("plan"), str):
        tree["plan"] = short_plan(tree["plan"])
    table = tree
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise FullshardError(f"{text!r}: {section} is a value, not a section")
    table[last] = parse_value(text, value)


def parse_value(override: str, text: str) -> Any:
    """A value as TOML writes it, or a bare word, which is a string."""
    try:
        tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (RecursionError, ValueError):
        pass  # refused below
    table = parse_toml(f"x = {text}", repr(override))
    return table["x"] if table.keys() == {"x"} else text  # a line break may have begun another key


def _sentence(error: ValidationError) -> str:
    """The first thing wrong, in one sentence that names the key."""
    errors = error.errors()
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])  # a misspelt key is also a missing one
    key = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "extra_forbidden":
            *path, last = first["loc"]
            known = list(_section(path).model_fields)
            elsewhere = [f"{name}.{last}" for name in Recipe.model_fields if path and last in _section([name]).model_fields]
            hint = f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else nearest(str(last), known)
            return f"unknown key {key} (known: {', '.join(known)}){hint}"
        case "missing":
            return f"{key} is missing; add it"
        case "value_error":
            return f"{key + ': ' if key else ''}{first['ctx']['error']}"
        case "tuple_type":
            *path, last = first["loc"]
            texts = str in get_args(_section(path).model_fields[str(last)].annotation)
            wanted = f"strings, as in {key}='{json.dumps([str(first['input'])])}'" if texts else "numbers, in brackets"
            return f"{key} = {first['input']!r}: input should be a list of {wanted}"
        case _:
            return f"{key} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _section(path: list[Any]) -> type[BaseModel]:
    kind: Any = Recipe
    for part in path:
        kind = kind.model_fields[part].annotation
        kind = next((a for a in get_args(kind) if a is not type(None)), kind)  # LoraSection | None
    return kind
