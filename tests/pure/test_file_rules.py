"""Rules between files and models: held against numpy's own stack, concatenate, split and swapaxes."""

import json

import numpy as np
import pytest

from fullshard.checkpoint.file_rules import FileRule, pieces_by_file, rules_from_json


def made(rule: FileRule, files: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's tensors, put together from pieces, each read in two parts."""
    found = {n: np.full(shape, -1.0) for n, shape in rule.shapes().items()}
    for piece in rule.pieces():
        middle = (piece.box[-1][0] + piece.box[-1][1]) // 2
        for last in ((piece.box[-1][0], middle), (middle, piece.box[-1][1])):
            box = [*piece.box[:-1], last]
            part = files[piece.file][tuple(slice(a, b) for a, b in piece.file_box(box))]
            target = found[piece.tensor][tuple(slice(a, b) for a, b in box)]
            target[...] = part.transpose(piece.order()).reshape(target.shape)
    return found


def numbers(names: list[str], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    return {n: draw.standard_normal(shape) for n in names}


def test_experts_are_stacked_and_joined():
    rule = FileRule(("fused",), (("e.*.gate", (3, 4)), ("e.*.up", (3, 4))), (("stack", (0,)), ("concat", (1,))), 5)
    files = numbers(rule.file_names(), (3, 4))
    gate, up = (np.stack([files[f"e.{i}.{part}"] for i in range(5)]) for part in ("gate", "up"))
    assert np.array_equal(made(rule, files)["fused"], np.concatenate([gate, up], 1))


def test_one_tensor_is_split_by_sizes():
    rule = FileRule(("q", "k", "v"), (("qkv", (8, 3)),), (("split", (0, 4, 2, 2)),))
    files = numbers(["qkv"], (8, 3))
    for name, want in zip("qkv", np.split(files["qkv"], [4, 6]), strict=True):
        assert np.array_equal(made(rule, files)[name], want)
    assert [p.tensor for p in pieces_by_file([rule])["qkv"]] == ["q", "k", "v"]


def test_dims_are_swapped_after_stacking_elsewhere():
    rule = FileRule(("w",), (("e.*", (3, 4, 2)),), (("stack", (1,)), ("transpose", (0, 3))), 2)
    files = numbers(["e.0", "e.1"], (3, 4, 2))
    assert np.array_equal(made(rule, files)["w"], np.stack(list(files.values()), 1).swapaxes(0, 3))


GOOD = {"tensors": ["a"], "files": [["x.*.g", [3, 3]], ["x.*.u", [3, 3]]], "count": 2, "steps": [["stack", 0], ["concat", 1]]}
BAD = [
    {}, [3], {"tensors": []}, GOOD | {"count": 1 << 40}, GOOD | {"count": 0}, GOOD | {"count": 3}, GOOD | {"tensors": ["b"]},
    GOOD | {"tensors": ["a", "a"]}, GOOD | {"steps": []}, GOOD | {"steps": [["stack", 7]]}, GOOD | {"steps": [["run", 0]]},
    GOOD | {"steps": [["concat", 1]]}, GOOD | {"steps": [["stack", 0], ["concat", 9]]}, GOOD | {"files": [["x", [2, 3, 6]]]},
    GOOD | {"files": [["x.*.g", [3, -3]]]}, GOOD | {"files": "x"}, GOOD | {"extra": 1}, GOOD | {"steps": [["transpose", 0, 5]]},
    GOOD | {"steps": [["stack", 0], ["concat", 1], ["split", 1, 3, 3]]}, GOOD | {"tensors": ["a\n"]},
]  # fmt: skip


@pytest.mark.parametrize("value", [*([b] for b in BAD), {}, 3, "files", [GOOD, GOOD]], ids=str)
def test_rules_of_a_manifest_are_checked(value):
    assert rules_from_json([GOOD], {"a": (2, 6, 3)})[0].to_json() == GOOD
    with pytest.raises(ValueError, match="malformed"):
        rules_from_json(json.loads(json.dumps(value)), {"a": (2, 6, 3)})
