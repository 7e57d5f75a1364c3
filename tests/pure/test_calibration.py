"""The planner's fitted numbers: each has a value, a unit, a source that is in the tree or published, and a check."""

import dataclasses
import re
from pathlib import Path

import pytest

import fullshard as fs
from fullshard.cluster import calibration
from fullshard.cluster.calibration import CALIBRATIONS, CPU, HOPPER, Fitted, calibration_of
from fullshard.cluster.hardware import DEVICES
from fullshard.model import presets

TREE = Path(__file__).parents[2]
NUMBERS = [(c.name, name, number) for c in CALIBRATIONS for name, number in c.numbers().items()]


@pytest.mark.parametrize(("of", "name", "number"), NUMBERS, ids=[f"{c}-{n}" for c, n, _ in NUMBERS])
def test_every_number_has_a_source_and_a_check(of, name, number):
    assert isinstance(number, Fitted)
    assert number.source
    for path in re.findall(r"(?:benchmarks|tests|docs)/[\w./-]+\.\w+", f"{number.source} {number.check}"):
        assert (TREE / path).exists(), path
    if module := re.search(r"python -m (benchmarks\.\w+)", number.check):
        assert (TREE / f"{module[1].replace('.', '/')}.py").exists()


def test_the_table_has_a_row_a_number():
    text = HOPPER.describe()
    assert len(text.splitlines()) == 2 + len(HOPPER.numbers())
    assert re.search(r"^overlap_slowdown +0\.4  share ", text, re.M)


def test_a_device_without_its_own_calibration_uses_the_nearest():
    assert calibration_of(DEVICES["cpu"]) is CPU
    assert calibration_of(DEVICES["h200"]) is calibration_of(DEVICES["mi300x"]) is HOPPER
    assert HOPPER.covers(DEVICES["h100"])
    assert not HOPPER.covers(DEVICES["a100"])
    assert CPU.covers(dataclasses.replace(DEVICES["cpu"], name="epyc"))


@pytest.mark.parametrize(
    ("devices", "line", "own"),
    [
        ("8xh200", "calibration: Hopper GPUs", True),
        ("8xcpu", "calibration: CPUs", True),
        (
            "8xa100",
            "calibration: Hopper GPUs; this device has no calibration of its own, so step times can be further off",
            False,
        ),
    ],
)
def test_an_estimate_names_the_calibration_that_it_used(devices, line, own):
    description = presets.describe("llama-nano")
    found = fs.estimate(fs.zero3(description, 8), description, fs.Cluster.load(devices))
    assert str(found).splitlines()[-1] == line
    assert found.to_dict()["calibrated_for_device"] is own
    assert found.to_dict()["calibration"] == line.removeprefix("calibration: ").split(";")[0]


def test_another_torch_than_the_numbers_were_fitted_with_is_a_note(monkeypatch):
    description, cluster = presets.describe("llama-nano"), fs.Cluster.load("8xh200")
    said = {}
    for installed in ("2.11", "2.12", ""):  # the last: planned where there is no torch
        monkeypatch.setattr(calibration, "installed_torch", lambda installed=installed: installed)
        found = fs.estimate(fs.zero3(description, 8), description, cluster)
        said[installed] = found.notes
        assert all(f"note: {note}" in str(found) for note in found.notes)
    assert said["2.11"] == said[""] == ()
    (note,) = said["2.12"]
    assert note.startswith("fitted with torch 2.11; torch 2.12 is installed")
