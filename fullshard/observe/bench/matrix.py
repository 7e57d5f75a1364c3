"""A benchmark from its command line to its files: the cases, their runs, the tables and the plot."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.status import say
from fullshard.base.text import bytes_text, seconds_text, table
from fullshard.engine.bench_protocols import BenchEngine, load_bench_engine, refuse_peer
from fullshard.engine.engine import load_engine
from fullshard.observe.bench import pareto_plot
from fullshard.observe.bench.axes import Axis, parse_axes, product
from fullshard.observe.bench.base_recipe import Base, load_base, with_choices, write_tokens
from fullshard.observe.bench.cases import Case, Settings, checked, make_cases
from fullshard.observe.bench.report import Bench, markdown, to_dict
from fullshard.observe.bench.run_cases import CaseFiles, Result, known_result, run_all
from fullshard.plan.engine_traits import refuse_unoffered
from fullshard.runs.recipe.recipe import load_recipe, make_recipe


@dataclass(frozen=True)
class Wanted:
    """What a user asks for. `peers`: names, or `auto` for those that are installed. `limit`: bytes of a device. `seconds`: of a
    case, from its start to its end."""

    target: str
    axes: tuple[str, ...]
    peers: tuple[str, ...]
    engine: str
    ranks: int | None
    steps: int
    warmup: int
    seconds: float
    limit: int | None
    output: Path
    command: str


@dataclass(frozen=True)
class Matrix:
    """Cases that were checked and predicted."""

    wanted: Wanted
    axes: tuple[Axis, ...]  # with more than one value
    settings: Settings
    cases: tuple[Case, ...]


def make_matrix(wanted: Wanted, version: str, directory: Path) -> Matrix:
    """Check everything that can be checked before ranks start. `directory`: for the tokens of a MODEL, and for homes on disk."""
    axes = parse_axes(wanted.axes)
    if wanted.target.endswith(".toml"):
        load_recipe(wanted.target, [])  # a wrong one is told before the seconds that imports take
    say(f"importing {wanted.engine}")
    engine, bench = load_engine(wanted.engine), load_bench_engine(wanted.engine)
    here = engine.machine.local_devices()  # asked in any case: from then on this process takes none of them
    ranks = here if wanted.ranks is None else wanted.ranks
    if wanted.limit is not None and bench.limit_memory is None:
        refuse_unoffered(wanted.engine, "--limit")
    peers = _peers(wanted, bench)
    base = load_base(wanted.target, axes, ranks, engine)
    if base.vocab is not None:
        base.tree["data"]["path"] = str(_tokens(base, axes, directory))
    versions = {"fullshard": version, **engine.ranks.versions()}
    settings = Settings(wanted.engine, ranks, wanted.steps, wanted.warmup, wanted.limit, versions)
    disk = directory / "disk"
    made = make_cases(base, axes, peers, settings, disk)
    if any(case.spec.recipe.get("disk", {}).get("path") == str(disk) for case in made):
        disk.mkdir(parents=True, exist_ok=True)
    cases = checked(made, engine, bench)
    if refused := [case.refused for case in cases if case.refused] if all(c.refused for c in cases) else []:
        several = f"no case can run, the first because: {refused[0]}"
        raise FullshardError(refused[0] if len(cases) == 1 else several)
    return Matrix(wanted, tuple(axis for axis in axes if len(axis.values) > 1), settings, tuple(cases))


def _peers(wanted: Wanted, bench: BenchEngine) -> list[str]:
    if wanted.peers == ("auto",):
        return [name for name in bench.PEERS if bench.peer_fault(name) is None]
    for name in wanted.peers:
        refuse_peer(name, wanted.engine, (*bench.PEERS, "auto"))
    return list(wanted.peers)


def _tokens(base: Base, axes: list[Axis], directory: Path) -> Path:
    trees = [with_choices(base.tree, choices, directory / "disk") for choices in product(axes, base.choices())]
    directory.mkdir(parents=True, exist_ok=True)
    return write_tokens(base, trees, directory)


Tell = Callable[[int, Case, Result | None, bool], None]


def run_matrix(matrix: Matrix, *, again: bool, tell: Tell) -> Bench:
    """Run what has no result yet."""
    wanted = matrix.wanted
    wanted.output.mkdir(parents=True, exist_ok=True)
    return _bench(matrix, run_all(list(matrix.cases), CaseFiles(wanted.output), wanted.seconds, again=again, tell=tell))


def finished(matrix: Matrix) -> Bench:
    """The cases that have a result, of a benchmark that was ended."""
    files, seconds = CaseFiles(matrix.wanted.output), matrix.wanted.seconds
    return _bench(matrix, [r for case in matrix.cases if (r := known_result(case, files, seconds)) is not None])


def _bench(matrix: Matrix, results: list[Result]) -> Bench:
    wanted = matrix.wanted
    seen = [r.measured["hardware"] for r in results if r.outcome == "ok"]
    units = {make_recipe(c.spec.recipe, "a case").unit for c in matrix.cases if not c.refused}
    about = {
        "target": wanted.target,
        "command": wanted.command,
        "engine": wanted.engine,
        "ranks": matrix.settings.ranks,
        "steps": wanted.steps,
        "warmup": wanted.warmup,
        "limit": wanted.limit,
        "hardware": seen[0] if seen else "an unknown device: nothing was measured",
        "versions": matrix.settings.versions,
        "date": str(date.today()),
        "unit": units.pop() if len(units) == 1 else "rows",
    }
    counts = {case.key: _count(case) for case in matrix.cases}
    return Bench(about, matrix.axes, tuple(results), counts)


def _count(case: Case) -> int:
    """Tokens of a step, or samples where a recipe counts those."""
    if case.refused:
        return 0
    recipe = make_recipe(case.spec.recipe, "a case")
    return recipe.train.global_batch * (recipe.sequence if recipe.unit == "tokens" else 1)


def write_files(bench: Bench, directory: Path) -> tuple[list[Path], str]:
    """bench.json, bench.md and, with matplotlib, the plot. Returns the paths, and a sentence if there is no plot."""
    (directory / "bench.json").write_text(json.dumps(to_dict(bench), indent=1) + "\n")
    drawn = pareto_plot.draw(bench, directory) if pareto_plot.can_draw() else []
    missing = "" if pareto_plot.can_draw() else pareto_plot.MISSING
    (directory / "bench.md").write_text(markdown(bench, [path.name for path in drawn if path.suffix == ".svg"]))
    return [directory / "bench.json", directory / "bench.md", *drawn], missing


def predictions(matrix: Matrix) -> str:
    """The cases and what the planner says of each, as a table."""
    rows, refused = [], []
    for i, case in enumerate(matrix.cases, 1):
        p = case.predicted
        cells = [bytes_text(p.allocated), seconds_text(p.seconds), _sent(p.sent), "yes" if p.fits else "no"] if p else ["–"] * 4
        rows.append([str(i), case.label(matrix.axes), *cells])
        if case.refused:
            rows[-1][-1] = "refused"
            refused.append(f"{i}: {case.refused}")
    header = ["", "case", "peak", "step", "sent", "fits"]
    return "\n".join([table(header, rows, right=(0, 2, 3, 4)), *(["", *refused] if refused else [])])


def predictions_dict(matrix: Matrix) -> list[dict[str, Any]]:
    """The same for a program."""
    rows = []
    for case in matrix.cases:
        predicted = vars(case.predicted) if case.predicted else None
        row = {"label": case.label(matrix.axes), "system": case.system, "choices": case.choices}
        rows.append(row | {"predicted": predicted, "refused": case.refused})
    return rows


def _sent(nbytes: float | None) -> str:
    return "–" if nbytes is None else bytes_text(nbytes)


def unfinished(cases: Sequence[Case], files: CaseFiles, seconds: float) -> int:
    """How many cases have no result yet."""
    return sum(case.refused is None and files.load(case, seconds) is None for case in cases)
