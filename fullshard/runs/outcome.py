"""What a run says of itself at its end: what was made, where it is, and the command to go on with."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from fullshard.model.presets import PRESETS, LlamaSize
from fullshard.plan.engine_traits import TRAITS
from fullshard.runs.recipe.recipe import Recipe

LABEL = 12  # columns


@dataclass(frozen=True)
class Outcome:
    """How a run ended that did not fail. `why`: what ended it before its last step, if anything. `trained`: the steps of this
    process, and `seconds` that they took. `numbers`: the last losses. `checkpoint`: the newest one. `code`: to exit with."""

    step: int
    why: str | None
    trained: int
    seconds: float
    numbers: dict[str, float]
    checkpoint: str | None
    code: int = 0


def outcome_lines(
    outcome: Outcome, recipe: Recipe, run: Path, *, engine: str, exported: Path | None = None, again: str | None = None
) -> list[str]:
    """`exported`: where the model was exported to. `again`: the command that resumes the run."""
    losses = [f"{key.replace('_', ' ')} {value:.4f}" for key, value in outcome.numbers.items()]
    made = f"{outcome.trained} steps in {outcome.seconds:.0f} s (step {outcome.step} of {recipe.steps})"
    lines = {"trained": ", ".join([made, *losses]), "run": str(run), "checkpoint": outcome.checkpoint or "none was saved"}
    if outcome.why == "stopped":
        lines["resume"] = again or "the same command with --resume auto"
    elif exported is not None:
        lines["exported"] = str(exported)
    elif outcome.checkpoint:
        lines["export"] = _export_command(outcome.checkpoint, recipe, run, engine)
    return [f"{label:<{LABEL}}{text}" for label, text in lines.items()]


def _export_command(checkpoint: str, recipe: Recipe, run: Path, engine: str) -> str:
    """For a model without a Hugging Face config: its weights for programs on the same framework."""
    form = "peft" if recipe.lora else "hf" if exportable(recipe) else TRAITS[engine].weights_format
    where = checkpoint if recipe.checkpoint.path else str(run)
    options = ["-o", "model.pt" if form == "torch" else "model", *(["--format", form] if form != "hf" else [])]
    return shlex.join(["fullshard", "checkpoint", "export", where, *options])


def exportable(recipe: Recipe) -> bool:
    """True if the end of the run can be a Hugging Face directory, or PEFT's."""
    name = recipe.model.name
    return bool(recipe.lora) or Path(name).is_dir() or isinstance(PRESETS.get(name), LlamaSize)
