"""`fullshard compare`: the strategies side by side for one model and cluster, without a run."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.base.reading import is_directory
from fullshard.commands.common import AsJson, describe_costs, print_json
from fullshard.commands.option_groups import ChoiceOptions, grouped
from fullshard.model import presets
from fullshard.model.model_by_size import looks_like_size, model_of_size
from fullshard.plan.choice_table import NAMED
from fullshard.plan.plan import Precision

if TYPE_CHECKING:
    from fullshard.model.description import Description

COMPARED = ("micro_batch", "sync", "remat", "compute", "reduce", "master", "replicate")  # alike in all columns
OWN_DEFAULTS = {"compute": "bf16; fp32 on CPUs", "replicate": "one a node, if there are several"}


@grouped
def compare(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A preset, a size such as 7B, a Hugging Face directory, or file.py:callable.")
    ],
    choices: Annotated[dict[str, Any], ChoiceOptions(tuple(NAMED[name] for name in COMPARED), defaults=OWN_DEFAULTS)],
    cluster: Annotated[str, typer.Option("--cluster", metavar="CLUSTER", help="8xh100, or a file of `measure`.")],
    sequence: Annotated[int, typer.Option("--sequence", metavar="N", help="Tokens in a sequence.")] = 1024,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch", metavar="N", help="Sequences in a step, over all devices.", show_default="a micro-batch a device"
        ),
    ] = None,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Do not compile blocks.")] = False,
    limit: Annotated[
        str | None, typer.Option("--limit", metavar="BYTES", help="Memory of a device to use, such as 24GiB.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare DDP, ZeRO-1, ZeRO-2, ZeRO-3, hybrid and offload for MODEL on a cluster; nothing runs.

    Shows what a rank holds by term, what it sends, the time of a step, and what fits. Every column has the same batch,
    precision and remat; zero1 always reduces gradients after the last micro-batch. `plan` finds the best plan and may vary them.

    Example: fullshard compare 7B --cluster 8xh100 --sequence 4096
    """
    from fullshard.base.text import parse_bytes
    from fullshard.cluster.topology import Cluster
    from fullshard.planner.search import comparison
    from fullshard.planner.search.comparison_text import comparison_text

    where = Cluster.load(cluster)
    dtype = choices.get("compute", where.device.peak.fastest)
    shape: dict[str, Any] = {"sequence": sequence, "global_batch": global_batch}
    batch = comparison.cut_batch(where, **shape, micro_batch=choices.get("micro_batch", 1), sync=choices.get("sync", "every"))
    copies = choices.get("replicate")
    given: dict[str, Any] = {
        "precision": Precision(dtype, choices.get("reduce", "fp32"), choices.get("master", "fp32")),
        "remat": choices.get("remat", "none"),
        "compile": False if no_compile else None,
        "replicate": None if copies is None else comparison.hybrid_copies(where, copies),
        "limit": parse_bytes(limit) if limit else None,
    }
    described, words = _described(model, sequence, dtype)  # last: it may take a minute
    result = comparison.compare(described, where, batch, **given)
    if as_json:
        print_json(result.to_dict() | ({"shape": words} if words else {}))
    else:
        typer.echo(comparison_text(result, words))


def _described(model: str, sequence: int, compute: str) -> tuple["Description", str]:
    """The model with its costs, and its shape in words if that is known. A size alone is a preset near it, or part of one."""
    if model in presets.PRESETS or is_directory(model) or not looks_like_size(model):
        known = presets.PRESETS.get(model)
        return describe_costs(model, sequence, compute), known.words() if known else ""  # type: ignore[arg-type]
    sized = model_of_size(model)
    return replace(sized.description, model=f"{model}, taken as {sized.description.model}"), sized.shape
