"""The page in a real browser, served by the real command."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.pure.checkpoints import make

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with Playwright")

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PATIENCE = 300_000  # milliseconds: on two cores that run other tests, Chromium took 80 s to load its first page


def lines(first: int, last: int) -> str:
    steps = [{"step": n, "loss": 5 - n / 10, "tokens_per_second": 1e4, "memory_allocated": 1 << 30} for n in range(first, last)]
    return "".join(json.dumps(step) + "\n" for step in steps)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run as files."""
    directory = tmp_path_factory.mktemp("runs") / "first"
    directory.mkdir()
    (directory / "recipe.json").write_text(json.dumps({"train": {"steps": 40}, "model": {"name": "gpt2"}}))
    predicted = {"event": "predicted", "step": 8, "predicted_seconds": 0.9, "measured_seconds": 1.0}
    (directory / "metrics.jsonl").write_text(lines(1, 11) + json.dumps(predicted) + "\n")
    make(directory / "checkpoints", step=10)
    (directory / "ranks").mkdir()
    told = {
        "world": 2,
        "host": "node",
        "pid": 7,
        "step": 11,
        "doing": "step 11",
        "step_seconds": 1.0,
        "rss": 1 << 30,
        "every": 5.0,
    }
    for rank, when in ((0, time.time() + 3600), (1, time.time() - 60)):
        (directory / f"ranks/{rank:05d}.json").write_text(json.dumps(told | {"rank": rank, "time": when}))
    profile = directory / "profile/step-9"
    profile.mkdir(parents=True)
    lanes = {"compute": 0.7, "communication": 0.2, "idle": 0.1}
    ranks = [{"rank": r, "step_seconds": 1.0, "lanes": lanes} for r in (0, 1)]
    (profile / "breakdown.json").write_text(json.dumps({"ranks": ranks, "overlap": 0.75}))
    return directory


@pytest.fixture(scope="module")
def server(run):
    """The command itself; its address. In the end it is interrupted, and must end in order."""
    command = [sys.executable, "-m", "fullshard", "page", str(run), "--no-open", "--model", "llama-125m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.stderr.read()
        yield url
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=200)
        assert (process.returncode, said) == (0, "Ctrl-C ends it\n")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def tab(browser, server):
    """The page, open; with what its console said."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.said = []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.goto(f"{server}#plan")
    answered(page)
    yield page
    assert page.said == []  # nothing went wrong in any of the tests
    context.close()


def answered(page) -> str:
    """Wait for the answer to the question on the page; its verdict."""
    page.wait_for_timeout(300)  # the page waits for the end of typing, too
    page.wait_for_selector('#answer[aria-busy="false"]')
    return page.inner_text("#verdict")


def card(page) -> str:
    return page.inner_text("#headline")


def test_who_has_no_token_is_refused(server):
    for url in (server.split("?")[0], server.split("?")[0] + "api/choices", server[:-1]):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url)
        assert caught.value.code == 403


def test_the_page_loads_and_keeps_the_token_out_of_the_address(tab):
    assert tab.inner_text("#verdict").startswith("fits: needs ")
    assert "token" not in tab.url
    assert "tokens/s" in card(tab)
    assert tab.locator("#memory .bars path").count() > 0
    assert tab.locator("#timeline .bars path").count() > 0


def test_controls_change_the_estimate(tab):
    before = card(tab)
    tab.select_option("[name=remat]", "full")
    answered(tab)
    assert card(tab) != before
    assert tab.inner_text("#command").endswith("--fix remat=full")
    with tab.expect_download() as download:
        tab.click("#download")
    assert {u["remat"] for u in json.loads(download.value.path().read_text())["units"]} == {"none", "full"}
    tab.reload()  # the address keeps the question
    answered(tab)
    assert tab.input_value("[name=remat]") == "full"
    tab.click("text=All auto")
    answered(tab)
    assert card(tab) == before


def test_what_does_not_fit_has_one_figure_in_sentence_and_chart(tab):
    tab.fill("[name=model]", "llama3-8b")
    tab.fill("[name=cluster]", "1xrtx4090")
    for kind in ("params", "optimizer", "activations"):
        tab.select_option(f"[name='home.{kind}']", "device")
    sentence = answered(tab)
    figure = re.search(r"needs ([\d.]+ \w+) of the device's ([\d.]+ \w+)", sentence)
    drawn = " ".join(tab.locator("#memory .annotation-text").all_text_contents())
    assert figure[1] in drawn
    assert f"{figure[2]} may be used" in drawn
    tab.click("#memory summary")
    assert figure[1] in tab.inner_text("#memory table")


def test_a_wrong_model_is_a_sentence_on_the_page(tab):
    tab.fill("[name=model]", "llama3-9b")
    assert "did you mean" in answered(tab)
    assert not tab.is_visible("#memory")
    tab.said[:] = [line for line in tab.said if "422" not in line]  # Chromium itself tells of the status
    tab.fill("[name=model]", "llama-125m")
    tab.fill("[name=cluster]", "8xh100")
    tab.click("text=All auto")
    assert answered(tab).startswith("fits")


def test_the_keyboard_reaches_the_views(tab):
    tab.focus("#tab-plan")
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("document.activeElement.id") == "tab-run"
    tab.wait_for_selector("#runs-summary table")
    assert not tab.is_visible("#plan")
    tab.keyboard.press("ArrowLeft")
    assert tab.is_visible("#plan")


def test_live_values_move(tab, run):
    tab.click("#tab-run")
    tab.wait_for_selector("#runs-summary >> text=10 of 40")
    assert tab.inner_text("#runs-summary >> text=running")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines(11, 13))
    tab.wait_for_selector("#runs-summary >> text=12 of 40")
    assert tab.locator("#loss .scatterlayer path").count() > 0


def test_a_run_shows_ranks_checkpoints_and_its_profile(tab):
    assert "alive" in tab.inner_text(".ranks")
    assert "silent for" in tab.inner_text(".ranks")
    tab.click("text=Verify")
    tab.wait_for_selector(".checkpoints >> text=every byte agrees with its checksum")
    assert tab.inner_text(".profile .note") == "75.0% of communication is overlapped."
    assert tab.inner_text("#predicted figcaption") == "Predicted against measured"


def test_dark_colours_follow_the_system_and_the_button(tab):
    background = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(background)
    tab.emulate_media(color_scheme="dark")
    assert tab.evaluate(background) != light
    tab.click("#theme")
    assert tab.evaluate(background) == light
    tab.emulate_media(color_scheme="light")


def test_a_narrow_window_does_not_scroll_sideways(tab):
    tab.set_viewport_size({"width": 375, "height": 800})
    for view in ("run", "plan"):
        tab.click(f"#tab-{view}")
        tab.wait_for_timeout(300)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 375
