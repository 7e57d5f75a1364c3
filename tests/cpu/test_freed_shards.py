"""Reading a parameter that rests on the host or on disk: a sentence, where torch would read from address zero."""

import pytest

from fullshard.plan.plan import Home
from tests.cpu import freed_shards
from tests.cpu.homes import Case


@pytest.mark.quick(1)
@pytest.mark.parametrize("home", [Home("host", "host"), Home("disk", "host"), Home("host", "device")], ids=str)
def test_reading_a_freed_parameter_says_where_its_values_are(ranks, home):
    """A fault would end a rank, which fails the call. Training, `state_dict`, shapes and new tensors like it are as ever."""
    where = {"host": "in host memory", "disk": "on disk"}[home.params]
    for found in ranks(2).run(freed_shards.read, Case((home,), steps=2)):
        for way, said in zip((*freed_shards.READS, *freed_shards.READS), found["said"], strict=True):
            assert f"{freed_shards.NAME} between gathers, as its home is {where}" in said, way
            assert f"`with state.values() as values:`, as values['{freed_shards.NAME}']" in said, way
        assert max(found["apart"]) < 1e-6
        assert found["losses"][0] == pytest.approx(found["losses"][1], abs=1e-6)
        assert found["described"][0] == found["described"][1]
        assert found["held"] == 0


def test_parameters_of_resident_units_can_be_read(ranks):
    said = ranks(2).run(freed_shards.mixed, Case((Home("host", "host"), Home(), Home("device", "host"))))[0]
    assert set(said) == {"host: the model has no values", "device: read DTensor"}
