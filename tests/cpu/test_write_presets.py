"""The costs that ship with the presets are those of their models."""

import pytest

from benchmarks.write_presets import traces
from fullshard.model import presets


@pytest.mark.parametrize("name", ["llama-nano", pytest.param("gpt-nano", marks=pytest.mark.full)])
def test_shipped_costs_are_those_of_a_fresh_trace(name):
    shipped = presets.describe(name).costs
    assert shipped is not None
    assert {k: list(t) for k, t in shipped.traces.items()} == {k: list(t) for k, t in traces(name).items()}


def test_every_preset_has_its_costs():
    for name in presets.PRESETS:
        found = presets.describe(name)
        assert found.costs is not None, name
        units = {unit for _, unit, _ in found.costs.trace("bf16", "chunked", "none")} - {""}
        assert units == {u.name for u in found.units}
