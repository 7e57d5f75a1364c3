"""What the page answers, without a browser: plans, runs, and who is refused."""

import asyncio
import json
import re
import shlex
import socket
import threading
import time

import pytest
from typer.testing import CliRunner

from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text
from fullshard.commands.cli import app
from fullshard.commands.common import describe_costs
from tests.pure.checkpoints import make

pytest.importorskip("starlette", reason="the page needs fullshard[page]")

from fullshard.observe.page import run_metrics
from fullshard.observe.page.guard import HEADER, Guard
from fullshard.observe.page.plan_answer import plan_answer
from fullshard.observe.page.plan_request import PlanQuestion
from fullshard.observe.page.plan_worker import PlanWorker, SupersededError
from fullshard.observe.page.run_checkpoints import RunCheckpoints
from fullshard.observe.page.run_metrics import MetricsReader, thinned
from fullshard.observe.page.run_view import RunView, health, last_profile
from fullshard.observe.page.server import listen

SMALL = {"model": "llama-125m", "cluster": "8xh100", "sequence": "1024"}


def answer(**given: str) -> dict:
    return plan_answer(PlanQuestion.parse(SMALL | given), describe_costs, lambda: None)


# -- plans --------------------------------------------------------------------------------------------


def test_the_command_gives_the_plan_that_the_page_shows():
    found = answer(remat="full", price="2.5", **{"home.optimizer": "host"})
    words = shlex.split(found["command"])
    assert words[:2] == ["fullshard", "plan"]
    told = json.loads(CliRunner().invoke(app, [*words[1:], "--json"]).stdout)
    assert told["plan"] == json.loads(found["plan"])
    assert told["estimate"]["tokens_per_second"] == found["rate"]
    assert told["estimate"]["price"] == found["price"] > 0


def test_bars_end_at_the_bytes_of_the_sentence():
    found = answer()
    (device,) = found["bars"]
    assert sum(device["terms"].values()) == device["needed"] <= device["available"]
    assert found["sentence"] == f"fits: needs {bytes_text(device['needed'])} of {bytes_text(device['available'])} a device"
    assert {span[0] for span in found["spans"]} == {"compute", "copies"}  # of ddp


def test_what_does_not_fit_is_drawn_with_the_figures_of_its_sentence():
    device = {f"home.{kind}": "device" for kind in ("params", "optimizer", "activations")}
    found = answer(model="llama3-8b", cluster="1xrtx4090", **device)
    assert not found["fits"]
    for bar in found["bars"]:
        assert sum(bar["terms"].values()) == bar["needed"] > bar["available"]
        assert f"needs {bytes_text(bar['needed'])} of the device's {bytes_text(bar['available'])}" in found["sentence"]


WRONG = [
    ({"model": "llama3-9b"}, "did you mean"),
    ({"model": "model.py:build"}, "the page runs no code"),
    ({"model": "/etc/passwd"}, "is no preset and no config.json"),
    ({"model": "/"}, "has no config.json"),
    ({"cluster": "8xh1000"}, "unknown device 'h1000'"),
    ({"cluster": "/etc/passwd"}, "is no cluster"),
    ({"sequence": "-1"}, "sequence must be a whole number"),
    ({"sequence": "9" * 30}, "sequence must be a whole number"),
    ({"sequence": str(1 << 25)}, "sequence must be a whole number from 1 to 16777216"),
    ({"price": "nan"}, "a number above 0"),
    ({"strategy": "zero4"}, "unknown strategy 'zero4'"),
    ({"compute": "int8"}, "compute must be one of"),
    ({"stategy": "ddp"}, "did you mean 'strategy'"),
    ({"model": " "}, "give a model"),
]


@pytest.mark.parametrize(("given", "why"), WRONG, ids=[why for _, why in WRONG])
def test_a_wrong_question_is_answered_with_a_sentence(given, why):
    with pytest.raises(FullshardError, match=re.escape(why)):
        answer(**given)


def test_a_newer_question_of_the_same_tab_ends_the_older():
    began = threading.Event()

    def slow(question, check):
        began.set()
        for _ in range(2000 if question.sequence == 1 else 1):
            check()
            time.sleep(0.005)
        return {"sequence": question.sequence}

    worker = PlanWorker(slow)
    older = worker.ask("a", PlanQuestion("gpt2", "8xh100", 1))
    assert began.wait(60)
    waiting = worker.ask("a", PlanQuestion("gpt2", "8xh100", 2))
    newest = worker.ask("a", PlanQuestion("gpt2", "8xh100", 3))
    other = worker.ask("b", PlanQuestion("gpt2", "8xh100", 4))
    assert newest.result(60) == {"sequence": 3}
    assert other.result(60) == {"sequence": 4}
    for future in (older, waiting):
        with pytest.raises(SupersededError):
            future.result(60)
    assert worker.ask("c", PlanQuestion("gpt2", "8xh100", 3)).done()  # remembered


# -- who is answered ----------------------------------------------------------------------------------


def status(headers: dict[str, str], path: str = "/api/choices", method: str = "GET", query: str = "") -> tuple[int, dict]:
    """What the guard answers, and with which headers."""
    sent: list[dict] = []

    async def inner(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in ({"host": "127.0.0.1:80"} | headers).items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": raw}
    guard = Guard(inner, "secret", frozenset({"127.0.0.1:80", "localhost:80"}), 80)
    asyncio.run(guard(scope, None, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


@pytest.mark.parametrize(
    ("headers", "more", "code"),
    [
        ({HEADER: "secret"}, {}, 200),
        ({"cookie": "fullshard-80=secret"}, {}, 200),
        ({}, {"path": "/", "query": "token=secret"}, 200),
        ({}, {}, 403),
        ({HEADER: "secreT"}, {}, 403),
        ({HEADER: "sécret"}, {}, 403),
        ({"cookie": "fullshard-81=secret"}, {}, 403),
        ({}, {"query": "token=secret"}, 403),  # of the page's own address alone
        ({HEADER: "secret", "host": "evil.example:80"}, {}, 403),
        ({HEADER: "secret", "host": "127.0.0.1"}, {}, 403),
        ({"cookie": "fullshard-80=secret", "sec-fetch-site": "cross-site"}, {}, 403),
        ({HEADER: "secret"}, {"method": "POST"}, 405),
        ({HEADER: "secret"}, {"method": "DELETE"}, 405),
    ],
)
def test_only_who_has_the_token_is_answered(headers, more, code):
    found, sent = status(headers, **more)
    assert found == code
    assert "script-src 'self';" in sent["content-security-policy"]
    assert ("set-cookie" in sent) == (more.get("path") == "/")


def test_the_cookie_is_not_for_other_sites_or_scripts():
    _, sent = status({}, path="/", query="token=secret")
    assert sent["set-cookie"] == "fullshard-80=secret; HttpOnly; SameSite=Strict; Path=/"


def test_the_page_is_for_this_machine_alone():
    for host in ("0.0.0.0", "example.org", "192.168.0.1", "::"):
        with pytest.raises(FullshardError, match="can be reached from other machines"):
            listen(host)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FullshardError, match=f"port {port} of 127.0.0.1 is in use by another program"):
            listen(port=port)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere"], "nowhere is no directory"),
        (["."], ". is no run: it has neither metrics.jsonl nor recipe.json"),
        (["--host", "0.0.0.0"], "can be reached from other machines"),
        (["--model", "llama3-9b"], "did you mean"),
        (["--cluster", "8xh1000"], "unknown device"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_is_served(arguments, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["page", "--no-open", *arguments])
    assert isinstance(result.exception, FullshardError)
    assert why in str(result.exception)


# -- runs ---------------------------------------------------------------------------------------------


def line(step: int, **more) -> str:
    return json.dumps({"step": step, "loss": 5.0 - step / 100, "seconds": 0.5, "tokens_per_second": 1000.0} | more) + "\n"


def test_metrics_are_followed_as_they_grow_and_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    reader.look()  # not there yet
    path.write_text(line(1) + line(2)[:20])  # the second is being written
    reader.look()
    assert reader.series()["step"] == [1]
    more = json.dumps({"event": "predicted", "step": 2}) + "\n" + json.dumps({"step": 2, "eval_loss": 3.0}) + "\n"
    path.write_text(line(1) + line(2, loss=None) + more + "no JSON\n")
    reader.look()
    assert reader.series()["loss"] == [4.99, None]
    assert (reader.events[0]["event"], reader.evaluations) == ("predicted", [{"step": 2, "loss": 3.0}])
    fresh = tmp_path / "fresh"
    fresh.write_text(line(1) + line(2, loss=1.5) + line(3))
    fresh.replace(path)  # as a resumed run does
    reader.look()
    assert reader.series()["loss"] == [4.99, 1.5, 4.97]


def test_a_spike_of_the_loss_is_drawn_in_a_long_run():
    rows = [{"step": n, "loss": 2.0 + n % 7} for n in range(100_000)]
    rows[54_321]["loss"] = 1e6
    found = thinned(rows, 500)
    assert len(found) <= 500
    assert rows[54_321] in found
    assert (found[0], found[-1]) == (rows[0], rows[-1])


def test_of_a_long_run_few_rows_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(run_metrics, "MOST_KEPT", 100)
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    for begin in range(1, 1001, 60):
        with path.open("a") as file:
            file.write("".join(line(n, loss=99.0 if n == 77 else 1.0) for n in range(begin, begin + 60)))
        reader.look()
    assert len(reader.rows) <= 100
    assert reader.recorded == 1020
    assert max(reader.series()["loss"]) == 99.0
    assert reader.series()["step"][-1] == 1020


def test_checkpoints_are_looked_for_where_the_recipe_saves_them(tmp_path):
    run, saves = tmp_path / "run", tmp_path / "saves"
    make(saves, step=7)
    for number, (path, url) in enumerate([(str(saves), None), (f"file://{saves}", None), ("s3://bucket/saves",) * 2]):
        own = run / str(number)
        own.mkdir(parents=True)
        (own / "recipe.json").write_text(json.dumps({"checkpoint": {"path": path}}))
        found = RunView(own).snapshot()
        assert [r["step"] for r in found["checkpoints"]] == ([] if url else [7])
        assert found["about"]["checkpoint_url"] == url


def test_checkpoints_have_verdicts(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step=step)
    (tmp_path / ".step-00000004.abcd.partial").mkdir()
    (cut,) = sorted((tmp_path / "step-00000002").glob("*.safetensors"))[:1]
    cut.write_bytes(cut.read_bytes()[:-1])
    (flipped,) = sorted((tmp_path / "step-00000001").glob("*.safetensors"))[:1]
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xff")
    found = RunCheckpoints(tmp_path)
    assert [(r["step"], r["verdict"]) for r in found.rows()] == [(4, "partial"), (3, "whole"), (2, "damaged"), (1, "whole")]
    assert found.verify("step-00000003")["verdict"] == "verified"
    assert "checksum does not match" in found.verify("step-00000001")["why"]
    assert [r["verdict"] for r in found.rows()] == ["partial", "verified", "damaged", "damaged"]
    with pytest.raises(FullshardError, match="has no checkpoint"):
        found.verify("../step-00000003")


def test_a_run_is_read_whatever_is_missing_or_damaged(tmp_path):
    (tmp_path / "recipe.json").write_text('{"train": {"steps": 3}, "model": {"name": "gpt2"}}')
    view = RunView(tmp_path)
    assert view.snapshot()["state"] == "not running"
    (tmp_path / "metrics.jsonl").write_text(line(1) + line(2))
    (tmp_path / "ranks").mkdir()
    told = {"rank": 0, "world": 1, "time": time.time(), "every": 5.0, "ended": False}
    (tmp_path / "ranks/00000.json").write_text(json.dumps(told))
    (tmp_path / "ranks/00001.json").write_text(json.dumps(told | {"rank": 1, "world": 2, "time": 1.0}))  # an earlier start
    (tmp_path / "ranks/00002.json").write_text("{")
    found = view.snapshot()
    assert (found["state"], found["done"], [r["health"] for r in found["ranks"]]) == ("running", 2, ["alive"])
    (tmp_path / "metrics.jsonl").write_text(line(1) + line(2) + line(3))
    assert view.snapshot()["state"] == "complete"


def test_a_rank_that_stops_telling_is_silent():
    told = {"time": 100.0, "every": 5.0, "ended": False}
    assert health(told, 110.0) == "alive"
    assert health(told, 160.0) == "silent for 60 s"
    assert health(told | {"ended": True}, 160.0) == "ended"


def test_the_last_profile_that_can_be_read_is_shown(tmp_path):
    assert last_profile(tmp_path) is None
    for step, text in ((9, '{"lanes": {}}'), (10, '{"step": 10}'), (11, "{")):
        (tmp_path / f"profile/step-{step}").mkdir(parents=True)
        (tmp_path / f"profile/step-{step}/breakdown.json").write_text(text)
    assert last_profile(tmp_path) == {"step": 10, "breakdown": {"step": 10}}
