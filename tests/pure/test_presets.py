import pytest

from fullshard import FullshardError, on_torch
from fullshard.model import presets

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_sizes(name, parameters):
    assert presets.describe(name).numel == parameters


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", presets.PRESETS)
def test_counted_as_the_module_is(name):
    """The description from sizes alone is, tensor by tensor, that of the real module."""
    assert presets.describe(name) == on_torch.describe(on_torch.load_model(name), title=name)


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", presets.PRESETS)
def test_the_module_has_that_many_parameters(name):
    model = on_torch.load_model(name)
    assert presets.describe(name).numel == sum(p.numel() for p in model.parameters())
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("call", [presets.preset, presets.describe])
def test_an_unknown_preset_is_refused(call):
    with pytest.raises(FullshardError) as caught:
        call("llama3-7b")
    assert str(caught.value).startswith("unknown model 'llama3-7b'; the presets are llama-nano, ")
    assert "; did you mean 'llama" in str(caught.value)
