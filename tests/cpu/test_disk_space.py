"""A plan whose files have no room on the disk is refused before there are ranks, by what is really free there."""

import os

import pytest

from fullshard import FullshardError
from fullshard.base.text import bytes_text
from fullshard.data.pack_tokens import pack
from fullshard.runs.prepare.disk_space import free_disk, refuse_full_disk
from fullshard.runs.prepare.prepare import prepare
from fullshard.runs.recipe.recipe import make_recipe

STATE = 12 * 70_553_706_496  # bytes of llama3-70b's masters and moments in fp32
CHOSEN = {"compute": "bf16", "remat": "full"}  # less to search


def recipe(path: str, **plan):
    tree = {
        "model": {"name": "llama3-70b"},
        "data": {"path": f"{path}/tokens", "sequence": 1024},
        "optim": {"lr": 1e-3},
        "train": {"steps": 1, "global_batch": 2},
        "disk": {"path": path},
        "plan": {"strategy": "zero3"},
        **plan,
    }
    return make_recipe(tree, "recipe.toml")


def really_free(path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


@pytest.fixture
def small(tmp_path):
    """A directory on a disk with less than the model's state."""
    if really_free(tmp_path) >= STATE:
        pytest.skip("this disk has room for 847 GB")
    (tmp_path / "text.txt").write_text("a" * 2048)
    pack([tmp_path / "text.txt"], tmp_path / "tokens", workers=1)
    return str(tmp_path)


def test_a_plan_with_more_on_disk_than_is_free_is_refused(small):
    with pytest.raises(FullshardError) as caught:
        prepare(recipe(small, plan={"strategy": "zero3"} | CHOSEN, home={"optimizer": "disk"}), 2)
    assert f"the plan puts {bytes_text(STATE / 2)} on disk for each of 2 ranks, but {small} has " in str(caught.value)


@pytest.mark.full  # a search of seconds
def test_what_is_searched_for_has_room_on_the_real_disk(small):
    with pytest.raises(FullshardError, match=r"nothing fits: .* of the disk's"):
        prepare(recipe(small, plan={"strategy": "auto"} | CHOSEN, home={"optimizer": "disk"}), 2)


def test_ranks_of_one_machine_share_its_disk(tmp_path, monkeypatch):
    free = really_free(tmp_path)
    assert free_disk(str(tmp_path), 2) == pytest.approx(free / 2, rel=0.05)  # others write meanwhile
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # of 16, on four machines
    assert free_disk(str(tmp_path), 16) == pytest.approx(free / 4, rel=0.05)
    refuse_full_disk(str(tmp_path), free // 8, 16)
    with pytest.raises(FullshardError, match="for each of 4 ranks, but"):
        refuse_full_disk(str(tmp_path), free // 2, 16)


@pytest.mark.parametrize("path", ["nowhere", "a\0b", "a" * 5000])
def test_a_disk_path_that_is_none(path):
    with pytest.raises(FullshardError, match=r"^disk\.path = .* cannot be used: .*; write a directory that exists$"):
        free_disk(path, 1)
