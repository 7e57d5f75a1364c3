"""The page's addresses: its files, and what they ask for as JSON. Everything is read; nothing is written."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import plotly
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from fullshard.base.errors import FullshardError
from fullshard.cluster.hardware import DEVICES
from fullshard.model import presets
from fullshard.observe.page.plan_answer import Describe, plan_answer
from fullshard.observe.page.plan_request import PlanQuestion, controls
from fullshard.observe.page.plan_worker import PlanWorker, SupersededError
from fullshard.observe.page.run_view import RunView

STATIC = Path(__file__).parent / "static"
CHARTS = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"


class PageApp:
    """The page of some runs. `first`: the model and cluster that the Plan view begins with."""

    def __init__(self, runs: list[RunView], describe: Describe, first: dict[str, str]):
        self.runs, self.first = runs, first
        self.worker = PlanWorker(lambda question, check: plan_answer(question, describe, check))
        self.locks = [asyncio.Lock() for _ in runs]

    def routes(self) -> list[Route | Mount]:
        return [
            Route("/", lambda _: FileResponse(STATIC / "index.html")),
            Route("/charts.js", lambda _: FileResponse(CHARTS, headers={"cache-control": "private, max-age=86400"})),
            Route("/api/choices", self.choices),
            Route("/api/plan", self.plan),
            Route("/api/run/{number:int}", self.run),
            Route("/api/run/{number:int}/verify", self.verify),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]

    async def choices(self, request: Request) -> Response:
        """What the controls offer, and the runs."""
        return answered(
            {
                "models": list(presets.PRESETS),
                "devices": list(DEVICES),
                "controls": controls(),
                "first": self.first,
                "runs": [run.name for run in self.runs],
            }
        )

    async def plan(self, request: Request) -> Response:
        """What a plan costs. A question that the same tab has asked another after is answered with 409."""
        given = dict(request.query_params)
        tab = given.pop("tab", "")
        try:
            return answered(await asyncio.wrap_future(self.worker.ask(tab, PlanQuestion.parse(given))))
        except SupersededError:
            return refused("another question was asked meanwhile", 409)
        except FullshardError as error:
            return refused(str(error), 422)

    async def run(self, request: Request) -> Response:
        """A run as it is now."""
        number = request.path_params["number"]
        if number >= len(self.runs):
            return refused("there is no such run", 404)
        async with self.locks[number]:
            snapshot = await run_in_threadpool(self.runs[number].snapshot)
        return answered(snapshot)

    async def verify(self, request: Request) -> Response:
        """Read every byte of a checkpoint. Without the run's lock: this may take minutes, and the run is looked at meanwhile."""
        number = request.path_params["number"]
        if number >= len(self.runs):
            return refused("there is no such run", 404)
        try:
            return answered(await run_in_threadpool(self.runs[number].verify, request.query_params.get("checkpoint", "")))
        except FullshardError as error:
            return refused(str(error), 422)


def make_app(runs: list[RunView], describe: Describe, first: dict[str, str]) -> Starlette:
    """The application, without its guard."""
    return Starlette(routes=PageApp(runs, describe, first).routes(), exception_handlers={Exception: _failed})


async def _failed(request: Request, error: Exception) -> Response:
    return refused(f"this is a bug of fullshard: {type(error).__name__}: {error}", 500)


def answered(answer: Any) -> Response:
    return Response(json.dumps(_finite(answer), allow_nan=False), media_type="application/json")


def refused(why: str, status: int) -> Response:
    return Response(json.dumps({"error": why}), status, media_type="application/json")


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
