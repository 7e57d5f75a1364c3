"""Activations in host memory: the same training to the bit, and no more bytes moved than must be."""

import shutil
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.on_torch.offload.activations.host_pool import ALIGNMENT, HostPool
from tests.cpu import activations, parity
from tests.cpu.activations import Case

TOKENS = activations.ROWS * activations.LENGTH
INPUT = TOKENS * 24  # elements of a block's input
TABLES = 2 * activations.LENGTH * 3  # elements of the rotary cos and sin: given to all blocks

CASES = [
    Case(),
    Case(remat="selective", accumulate=2, loss="chunked"),
    Case(remat="full", compute="bf16", accumulate=2, loss="chunked"),
    Case(remat="none", arguments={"tensor": 2}),
    Case("tied", remat="selective", compute="bf16", strategy="ddp"),
    Case("lora", remat="none", accumulate=2, strategy="zero1"),
    Case("lora", remat="full"),
    Case("llama", remat="none", compute="bf16", loss="chunked"),
    Case("qwen3", remat="selective", accumulate=2),
    Case("gpt2", remat="full", strategy="zero2"),
    Case("mixtral", remat="none"),
    Case(remat="selective", arguments={"tensor": 2}),
    Case(remat="full", arguments={"tensor": 2}, compute="bf16"),
]


def check(ranks, case: Case) -> None:
    for found in ranks(2).run(activations.compare, case):
        assert found["numbers"], found
        assert found["params"]
        assert found["left"] == 0
        assert len(set(found["moved"])) == 1, found  # every step alike, the first included
        spilled, fetched = found["moved"][0]
        assert spilled == fetched > 0


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_spilled_activations_change_no_bit(ranks, case):
    check(ranks, case)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPU")
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_compiled_blocks_spill_too(ranks, remat):
    check(ranks, Case(remat=remat, compile=True))


@pytest.mark.full
def test_full_remat_moves_the_blocks_inputs(ranks):
    """Three blocks, of which the last stays; the tables once, not once a block."""
    found = ranks(2).run(activations.compare, Case(remat="full"))[0]
    assert found["moved"][0] == (4 * (2 * INPUT + TABLES),) * 2
    # FSDP casts what a block is given: in bf16 each block has tables of its own.
    found = ranks(2).run(activations.compare, Case(remat="full", compute="bf16", accumulate=2))[0]
    assert found["moved"][0] == (2 * 2 * 2 * (INPUT + TABLES),) * 2
    # Hugging Face blocks are given the tables by name, which a recomputation holds itself.
    found = ranks(2).run(activations.compare, Case("llama", remat="full"))[0]
    assert found["moved"][0] == (4 * 2 * INPUT,) * 2


def test_selective_remat_moves_products_and_inputs(ranks):
    found = ranks(2).run(activations.compare, Case(remat="selective"))[0]
    products = TOKENS * (24 + 12 + 12 + 24 + 42 + 42 + 24)  # q k v o gate up down
    attention = TOKENS * (24 + 4)  # its output, and a number for each head
    assert found["moved"][0] == (4 * (2 * (INPUT + products + attention) + TABLES),) * 2


def test_without_remat_each_storage_is_moved_once(ranks):
    found = ranks(2).run(activations.compare, Case())[0]
    assert found["moved"][0] == (ranks(2).run(activations.saved, Case(), [0, 1])[0],) * 2


def test_what_is_spilled_is_freed_and_the_last_block_stays(ranks):
    assert ranks(2).run(activations.freed)[0] == [True, True, False]


@pytest.mark.parametrize(
    ("blocks", "layers", "fetched"),
    [
        ("*.layers.*", 5, [1, 2, 3, 4, 4]),  # one block ahead of where backward is
        ("*.layers.[036]", 8, [1, 2, 2, 2, 3, 3, 3, 3]),  # spread out: as far ahead as the next one lies
        ("*.layers.[01]", 5, [0, 0, 1, 2, 2]),  # the last of them is not the last block: it comes back like the others
    ],
)
def test_blocks_come_back_before_backward_needs_them(ranks, blocks, layers, fetched):
    assert ranks(2).run(activations.ahead, "full", blocks, layers)[0] == fetched


def test_forwards_without_backward_leave_nothing_behind(ranks):
    for found in ranks(2).run(activations.without_backward):
        assert found == {"evaluated": 0, "free": True, "open": None, "same": True}


def test_the_garbage_collector_may_free_memory_while_memory_is_freed():
    assert activations.collected_while_freeing()


def test_a_longer_batch_than_the_first_needs_more_memory_and_says_so(ranks):
    heard, same, held = ranks(2).run(activations.longer)[0]
    assert same
    assert "activations need" in heard[0]
    assert "a longer batch than the first" in heard[0]
    assert held[0] == held[1] < held[2] == held[3] == held[4]


def test_a_kept_graph_may_be_gone_through_again(ranks):
    assert all(ranks(2).run(activations.twice))


REFUSALS = {
    "last": "unit model.layers.2: home.activations = 'host' has no effect: what the last unit saves is wanted back at once",
    "embedding": "unit embed: home.activations = 'host' has no effect: an embedding saves nothing but token ids",
    "frozen": "unit model.layers.1: home.activations = 'host' has no effect: nothing in this unit or before it is trained",
    "around": "unit root: home.activations = 'host' cannot be carried out around another unit (embed)",
    "recomputed": "unit model.layers.1: home.activations = 'host' has no effect: unit decoder around it recomputes it",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_homes_that_cannot_be_or_change_nothing_are_refused(ranks, kind):
    for sentence in ranks(2).run(activations.refusal, kind):
        assert sentence.startswith(REFUSALS[kind])


def test_a_unit_that_saves_only_small_tensors_is_refused_in_the_first_step(ranks):
    sentence = ranks(2).run(activations.nothing_large)[0]
    assert sentence.startswith("unit model.layers.0: home.activations = 'host' has no effect: its forward saved no tensor")


# -- slots of host memory -----------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=60))
def test_slots_never_overlap_and_all_come_back(requests):
    slots, taken = HostPool(pinned=False), []
    for keep, number in requests:
        if keep or not taken:
            taken.append(slots.take(number))
            assert taken[-1].bytes.numel() == number
        else:
            slots.give(taken.pop(number % len(taken)))
        spans = sorted((id(s.chunk), s.start, s.end) for s in taken)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(spans))
        assert all(s.start % ALIGNMENT == 0 for s in taken)
    for slot in taken:
        slots.give(slot)
    assert all(c.ranges.free == [(0, c.nbytes)] for c in slots.chunks)


def test_the_same_requests_again_need_no_more_memory():
    slots = HostPool(pinned=False)
    held = []
    for _ in range(3):
        taken = [slots.take(n << 20) for n in (100, 30, 7, 200, 30, 1)]
        held.append(slots.nbytes)
        for slot in taken:
            slots.give(slot)
    assert held[0] == held[1] == held[2] < 1.25 * (368 << 20)


def test_sizes_written_above_are_the_models():
    assert (parity.SIZE.dim, parity.SIZE.layers, parity.SIZE.heads, parity.SIZE.ffn) == (24, 3, 4, 42)
