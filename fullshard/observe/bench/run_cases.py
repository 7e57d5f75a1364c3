"""Run cases one after the other, each in fresh ranks and under a time limit. What goes wrong in a case is its result."""

import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fullshard.base.text import seconds_text
from fullshard.observe.bench.case_process import MODULE, OUT_OF_MEMORY
from fullshard.observe.bench.cases import Case, Predicted

GRACE = 5.0  # seconds that a case gets to end by itself after its time
UNDISTURBED = 3  # on a CPU, the mean of the fastest third of steps: other programs only make steps slower
FINISHED = "ok", "out of memory", "failed", "timed out", "refused"


@dataclass(frozen=True)
class Result:
    """A row of the benchmark. `outcome`: one of FINISHED. `measured`: numbers of a case that ended well."""

    key: str
    system: str
    choices: dict[str, Any]
    outcome: str
    why: str = ""
    measured: dict[str, Any] = field(default_factory=dict)
    predicted: Predicted | None = None
    wall_seconds: float = 0.0
    limit_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Result":
        predicted = data.pop("predicted")
        return cls(**data, predicted=Predicted(**predicted) if predicted else None)

    @property
    def seconds(self) -> float | None:
        """Of a typical step."""
        return self.measured.get("seconds")

    @property
    def predicted_seconds(self) -> float | None:
        return self.predicted.seconds if self.predicted else None

    @property
    def predicted_memory(self) -> int | None:
        return self.predicted.allocated if self.predicted else None

    @property
    def predicted_sent(self) -> float | None:
        return self.predicted.sent if self.predicted else None


class CaseFiles:
    """One JSON file a case, in a directory. A case that has one is finished."""

    def __init__(self, directory: Path):
        self.directory = directory / "cases"

    def load(self, case: Case, limit: float) -> Result | None:
        """An earlier result. None if there is none, or if the time was up then and is longer now."""
        try:
            result = Result.from_dict(json.loads((self.directory / f"{case.key}.json").read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return None if result.outcome == "timed out" and limit > result.limit_seconds else result

    def save(self, result: Result) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self.directory / f".{result.key}.partial"
        partial.write_text(json.dumps(result.to_dict(), indent=1) + "\n")
        partial.replace(self.directory / f"{result.key}.json")

    def log(self, case: Case) -> Path:
        """What the case's ranks print."""
        return self.directory / f"{case.key}.log"


def run_case(case: Case, files: CaseFiles, limit: float) -> Result:
    """Run one case to its end or its time limit, and write its file."""
    work = files.directory / f"{case.key}.work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    case.spec.save(work / "spec.json")
    began = time.monotonic()
    with files.log(case).open("w") as log, _started(work / "spec.json", log) as process:
        code = _wait(process, limit)
    wall = time.monotonic() - began
    outcome, why, measured = _judge(work, code, files.log(case), limit)
    result = Result(case.key, case.system, case.choices, outcome, why, measured, case.predicted, wall, limit)
    files.save(result)
    shutil.rmtree(work, ignore_errors=True)
    return result


@contextmanager
def _started(spec: Path, log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher of a case. Its ranks end with it, whatever ends this."""
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, str(spec)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for this process to answer
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _end(process)


def _wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """The exit code; None if the time was up."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        _end(process)
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks ask the kernel to end with it
        process.wait()


def _judge(work: Path, code: int | None, log: Path, limit: float) -> tuple[str, str, dict[str, Any]]:
    """(outcome, why, numbers) of a case that has ended."""
    files = [json.loads(path.read_text()) for path in sorted(work.glob("rank-*.json"))]
    failed = sorted((f for f in files if f["outcome"] != "ok"), key=lambda f: (f["outcome"] != "out of memory", f["time"]))
    good = [f for f in files if f["outcome"] == "ok"]
    if failed:
        return failed[0]["outcome"], failed[0]["why"], {}
    if code == 0 and good:
        return "ok", "", summary(good)
    if code is None:
        return "timed out", f"not finished within {seconds_text(limit)}", {}
    said = _last_error(log)
    return "out of memory" if OUT_OF_MEMORY.search(said) else "failed", said or f"its ranks ended with exit code {code}", {}


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1][:500]


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a case from those of its ranks: the slowest rank's time, the most memory, the mean of bytes sent."""
    first = ranks[0]
    on_cpu = first["hardware"].startswith("CPU")
    memory = {kind: max(r["memory"][kind] // r["devices_here"] for r in ranks) for kind in first["memory"]}
    sent = {kind: statistics.mean(r["sent"].get(kind, 0.0) for r in ranks) for kind in first["sent"]}
    return {
        "seconds": max(typical(r["seconds"], on_cpu) for r in ranks),
        "all_seconds": first["seconds"],
        "first_step_seconds": max(r["first_step_seconds"] for r in ranks),
        "ready_seconds": max(r["ready_seconds"] for r in ranks),
        "data_wait_seconds": max(r["data_wait_seconds"] for r in ranks),
        "memory": memory if on_cpu else {k: n for k, n in memory.items() if k != "resident"},
        "sent_by_kind": sent,
        "sent": sum(sent.values()),
        "collectives": first["collectives"],
        "flops_per_token": first["flops_per_token"],
        "peak_flops": first["peak_flops"],
        "last_loss": first["losses"][-1],
        "hardware": first["hardware"],
    }


def typical(seconds: list[float], on_cpu: bool) -> float:
    """The median step. On a CPU the mean of the fastest third."""
    if not on_cpu:
        return statistics.median(seconds)
    return statistics.mean(sorted(seconds)[: max(1, len(seconds) // UNDISTURBED)])


def run_all(
    cases: list[Case], files: CaseFiles, limit: float, *, again: bool, tell: Callable[[int, Case, Result | None, bool], None]
) -> list[Result]:
    """All cases in order. `tell` hears (number, case, None, False) before one runs and (number, case, result, was there already)
    after it."""
    results = []
    for i, case in enumerate(cases, 1):
        earlier = None if again and case.refused is None else known_result(case, files, limit)
        if earlier is None:
            tell(i, case, None, False)
        result = earlier or run_case(case, files, limit)
        tell(i, case, result, earlier is not None and case.refused is None)
        results.append(result)
    return results


def known_result(case: Case, files: CaseFiles, limit: float) -> Result | None:
    """The result of a case that need not run: it is refused, or ran before. None for the others."""
    if case.refused is not None:
        return Result(case.key, case.system, case.choices, "refused", case.refused)
    earlier = files.load(case, limit)
    return None if earlier is None else replace(earlier, predicted=case.predicted)
