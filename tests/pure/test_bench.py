"""The cases of a benchmark and its tables, without ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.base.errors import FullshardError
from fullshard.commands.cli import app
from fullshard.observe.bench import report
from fullshard.observe.bench.axes import Axis, full_key, parse_axes, product, split_values
from fullshard.observe.bench.base_recipe import Base, with_choices
from fullshard.observe.bench.case_process import Spec
from fullshard.observe.bench.cases import TITLES, Case, Predicted, Settings, make_cases
from fullshard.observe.bench.matrix import Matrix, Wanted, finished
from fullshard.observe.bench.pareto_plot import draw
from fullshard.observe.bench.run_cases import CaseFiles, Result, run_all, summary, typical

TREE = {
    "model": {"name": "llama-nano"},
    "data": {"path": "t", "sequence": 8},
    "optim": {"lr": 1e-3},
    "train": {"steps": 1, "global_batch": 4},
}
SETTINGS = Settings("torch", 2, 3, 1, None, {"torch": "x"})

# -- axes -----------------------------------------------------------------------------------------------------


def test_axes_are_keys_of_a_recipe_with_values():
    found = parse_axes(["strategy=ddp,zero3", "home.optimizer=device,host", "compile=false,true", "micro_batch=2"])
    assert [(a.key, a.values) for a in found] == [
        ("plan.strategy", ("ddp", "zero3")),
        ("home.optimizer", ("device", "host")),
        ("plan.compile", (False, True)),
        ("train.micro_batch", (2,)),
    ]
    assert [a.name for a in found] == ["strategy", "home.optimizer", "compile", "micro_batch"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("strateg=ddp", "did you mean 'strategy'"),
        ("plan.rematt=full", "did you mean 'plan.remat'"),
        ("strategy=ddp,zero33", "did you mean 'zero3'"),
        ("micro_batch=0", "train.micro_batch = 0: input should be greater than 0"),
        ("micro_batch=two", "train.micro_batch = 'two'"),
        ("compile=maybe", "plan.compile = 'maybe'"),
        ("path=a", "a key of several sections; write data.path or disk.path"),
        ("eval.every=3", "unknown key 'eval.every'"),
        ("strategy", "write KEY=VALUE,VALUE"),
        ("strategy=", "write KEY=VALUE,VALUE"),
    ],
)
def test_a_wrong_axis_is_a_sentence(text, words):
    with pytest.raises(FullshardError, match=words.replace("(", r"\(")):
        parse_axes([text])


def test_an_axis_given_twice_is_a_sentence():
    with pytest.raises(FullshardError, match=r"plan\.remat is given twice"):
        parse_axes(["remat=none", "plan.remat=full"])


def test_values_in_brackets_stay_together():
    assert split_values("[0.9,0.95],[0.8,0.9]") == ["[0.9,0.95]", "[0.8,0.9]"]
    assert parse_axes(["betas=[0.9,0.95],[0.8,0.9]"])[0].values == ((0.9, 0.95), (0.8, 0.9))
    assert full_key("betas") == "optim.betas"


def test_a_key_of_one_strategy_is_left_out_with_others():
    axes = parse_axes(["strategy=zero3,hybrid", "replicate=2,4"])
    assert [tuple(c.values()) for c in product(axes, {})] == [("zero3",), ("hybrid", 2), ("hybrid", 4)]


def test_the_last_axis_changes_fastest():
    axes = [Axis("plan.strategy", ("ddp", "zero3")), Axis("plan.remat", ("none", "full"))]
    assert [tuple(c.values()) for c in product(axes, {})] == [
        ("ddp", "none"), ("ddp", "full"), ("zero3", "none"), ("zero3", "full"),
    ]  # fmt: skip


# -- recipes of cases -----------------------------------------------------------------------------------------


def test_a_case_with_homes_on_disk_is_predicted_before_it_ran(tmp_path, monkeypatch):
    """The bench makes the directory. A dry run leaves none behind."""
    monkeypatch.chdir(tmp_path)
    asked = ["bench", "llama-nano", "--over", "home.optimizer=device,disk", "sequence=16", "--ranks=1", "--dry-run", "--json"]
    done = CliRunner().invoke(app, asked)
    assert [case["refused"] for case in json.loads(done.stdout)] == [None, None]
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_there_for_cases_that_use_it():
    on_disk = with_choices(TREE, {"home.optimizer": "disk"}, Path("here"))
    assert on_disk["disk"] == {"path": "here"}
    assert with_choices(TREE | {"disk": {"path": "own"}}, {"home.optimizer": "disk"}, Path("here"))["disk"] == {"path": "own"}
    assert "disk" not in with_choices(TREE | {"disk": {"path": "own"}}, {"plan.strategy": "zero3"}, Path("here"))
    assert "home" not in TREE  # the base is not changed


def test_hybrid_has_copies():
    assert with_choices(TREE, {"plan.strategy": "hybrid"}, Path())["plan"]["replicate"] == 2
    assert with_choices(TREE, {"plan.strategy": "hybrid", "plan.replicate": 4}, Path())["plan"]["replicate"] == 4


def test_a_peer_takes_over_what_is_computed_and_nothing_of_how():
    axes = parse_axes(["strategy=ddp,zero2", "remat=none,full", "home.optimizer=device,host"])
    cases = make_cases(Base("m", TREE), axes, ["ddp"], SETTINGS, Path("o"))
    own, peers = [c for c in cases if c.system == "fullshard"], [c for c in cases if c.system == "ddp"]
    assert (len(own), len(peers)) == (8, 2)
    assert [c.spec.recipe["plan"] for c in peers] == [{"remat": r, "strategy": "zero3"} for r in ("none", "full")]
    assert all("home" not in c.spec.recipe for c in peers)
    assert len({c.key for c in cases}) == 10


# -- results --------------------------------------------------------------------------------------------------


def rank(seconds, allocated, sent, hardware="NVIDIA H200", **memory):
    found = {"seconds": seconds, "first_step_seconds": 1.0, "ready_seconds": 2.0, "data_wait_seconds": 0.0, "losses": [2.0]}
    found |= {"memory": {"allocated": allocated, **memory}, "sent": {"gather": sent}, "collectives": 2, "devices_here": 1}
    return found | {"flops_per_token": 100.0, "peak_flops": 1e5, "hardware": hardware}


def test_a_case_is_its_slowest_rank_and_its_fullest():
    found = summary([rank([1.0, 2.0, 9.0], 10, 4.0), rank([3.0, 3.0, 3.0], 12, 6.0)])
    assert (found["seconds"], found["memory"]["allocated"], found["sent"]) == (3.0, 12, 5.0)


def test_on_a_cpu_disturbed_steps_do_not_count():
    assert typical([1.0, 1.0, 9.0, 9.0, 9.0, 9.0], on_cpu=True) == 1.0
    assert typical([1.0, 2.0, 9.0], on_cpu=False) == 2.0


def case(strategy="zero3", **more):
    return Case("fullshard", {"plan.strategy": strategy}, Spec("torch", 2, {"s": strategy}, None, 3, 1, None, {}), **more)


def result(strategy, seconds, gib, sent=8.0, hardware="NVIDIA H200", system="fullshard"):
    memory = {"allocated" if hardware != "CPU" else "resident": int(gib * 2**30)}
    measured = {"seconds": seconds, "memory": memory, "sent": sent, "hardware": hardware}
    measured |= {"flops_per_token": 1e3, "peak_flops": 1e6 if hardware != "CPU" else None}
    predicted = Predicted(int(gib * 2**30 * 1.1), None, seconds / 2, sent, None, True) if system == "fullshard" else None
    return Result(f"{system}{strategy}", system, {"plan.strategy": strategy}, "ok", "", measured, predicted)


def bench(*results, hardware="NVIDIA H200"):
    about = {"target": "m", "command": "fullshard bench m", "ranks": 2, "hardware": hardware, "versions": {}, "unit": "tokens"}
    axes = (Axis("plan.strategy", ("ddp", "zero2", "zero3")),)
    return report.Bench(about | {"date": "today"}, axes, results, {r.key: 1000 for r in results})


FAILED = Result("x", "fullshard", {"plan.strategy": "zero1"}, "out of memory", "tried to allocate 2 GiB")


def test_the_table_has_measured_beside_predicted():
    text = report.text(bench(result("ddp", 2.0, 4), result("zero3", 4.0, 2), FAILED))
    lines = text.splitlines()
    assert lines[0].split() == [
        "strategy", "peak", "predicted", "off", "step", "predicted", "off", "tokens/s", "MFU", "sent", "predicted", "result"
    ]  # fmt: skip
    assert lines[2].split()[:6] == ["ddp", "4.00", "GiB", "4.40", "GiB", "+10.0%"]
    assert "-50.0%" in lines[2]
    assert "500" in lines[2]  # 1000 tokens in 2 s
    assert "25.0%" in lines[2]  # 500 × 1e3 over 2 × 1e6
    assert lines[4].rstrip().endswith("out of memory")
    assert "zero1: out of memory: tried to allocate 2 GiB" in text


def test_on_a_cpu_times_are_ratios_and_there_is_no_mfu():
    text = report.text(bench(result("ddp", 2.0, 4, hardware="CPU"), result("zero3", 3.0, 2, hardware="CPU"), hardware="CPU"))
    assert "MFU" not in text
    assert "tokens/s" not in text
    assert "1.50×" in text
    assert report.ON_CPU in text


def test_a_peer_has_a_column_and_no_prediction():
    text = report.text(bench(result("zero3", 2.0, 4), result("zero3", 1.0, 4, system="fully_shard")))
    assert "bare fully_shard" in text
    assert report.PEERS in text


def test_the_front_has_what_nothing_beats_in_both():
    found = bench(result("a", 1.0, 8), result("b", 2.0, 4), result("c", 2.5, 6), result("d", 4.0, 2), FAILED)
    assert [r.key.removeprefix("fullshard") for r in found.front()] == ["d", "b", "a"]


def test_markdown_and_json_have_every_case():
    found = bench(result("ddp", 2.0, 4), FAILED)
    page = report.markdown(found, ["bench.svg"])
    assert page.count("\n| ") >= 4
    assert "![Memory against throughput](bench.svg)" in page
    data = json.loads(json.dumps(report.to_dict(found)))
    assert [c["outcome"] for c in data["cases"]] == ["ok", "out of memory"]
    assert data["cases"][0]["tokens_per_second"] == 500


def test_the_plot_is_drawn_as_png_and_svg(tmp_path):
    pytest.importorskip("matplotlib")
    peers = [result("zero3", 1.0 + i, 3, system=name) for i, name in enumerate(TITLES)]  # a mark and a colour for each
    files = draw(bench(result("ddp", 2.0, 4), result("zero3", 4.0, 2), *peers, FAILED), tmp_path)
    assert [f.name for f in files] == ["bench.png", "bench.svg"]
    svg = files[1].read_text()
    assert files[0].read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in svg
    assert draw(bench(FAILED), tmp_path) == []


# -- going on -------------------------------------------------------------------------------------------------


def test_finished_cases_do_not_run_again(tmp_path, monkeypatch):
    files, ran = CaseFiles(tmp_path), []

    def run(case, files, limit):
        ran.append(case.choices["plan.strategy"])
        found = Result(case.key, "fullshard", case.choices, "timed out" if ran[-1] == "ddp" else "ok", limit_seconds=limit)
        files.save(found)
        return found

    monkeypatch.setattr("fullshard.observe.bench.run_cases.run_case", run)
    cases, told = [case("ddp"), case("zero3"), case("zero2", refused="it cannot")], []
    first = run_all(cases, files, 10.0, again=False, tell=lambda i, c, r, kept: None)
    assert [r.outcome for r in first] == ["timed out", "ok", "refused"]
    second = run_all(cases, files, 10.0, again=False, tell=lambda i, c, r, kept: told.append(kept))
    assert (ran, told) == (["ddp", "zero3"], [True, True, False])
    assert second == first
    run_all(cases, files, 20.0, again=False, tell=lambda i, c, r, kept: None)  # more time than before
    assert ran == ["ddp", "zero3", "ddp"]
    run_all(cases, files, 20.0, again=True, tell=lambda i, c, r, kept: None)
    assert ran[3:] == ["ddp", "zero3"]


def test_a_benchmark_that_was_ended_has_tables_of_the_cases_that_ran(tmp_path):
    axis = Axis("plan.strategy", ("ddp", "zero2", "zero3"))
    ran, second, left = make_cases(Base("m", TREE), [axis], [], SETTINGS, tmp_path)
    refused = replace(second, refused="it cannot")
    CaseFiles(tmp_path).save(Result(ran.key, ran.system, ran.choices, "ok", measured={"hardware": "CPU", "seconds": 1.0}))
    wanted = Wanted("m", (), (), "torch", 2, 3, 1, 10.0, None, tmp_path, "fullshard bench")
    found = finished(Matrix(wanted, (), SETTINGS, (ran, refused, left)))
    assert [(r.key, r.outcome) for r in found.results] == [(ran.key, "ok"), (refused.key, "refused")]


def test_a_damaged_file_is_no_result(tmp_path):
    files = CaseFiles(tmp_path)
    files.directory.mkdir()
    (files.directory / f"{case().key}.json").write_text('{"key": 3')
    assert files.load(case(), 10.0) is None
