"""Units that ranks skip in a later step, with collectives of equal sizes, on ranks that share a GPU over gloo. Run by hand:

python -m pytest tests/gpu/test_skips.py
"""

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from tests.cpu import skips
    from tests.cpu.test_skips import MIXED


@pytest.mark.parametrize("own", [False, True])
def test_units_of_equal_sizes_that_are_skipped_are_named_two_steps_later(own):
    found = skips.run("skip another", device="cuda", own=own)
    assert all(code == 1 and MIXED in text for code, text in found), found
    assert own or all("nothing was updated" in text for _, text in found), found
