"""Pinned arenas on a GPU. Run by hand: python -m pytest tests/gpu"""

import pytest

from fullshard.storage.pinned_arena import Arena, room

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_every_piece_is_pinned_copies_both_ways_and_none_comes_from_torchs_cache():
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    sizes = [64 << 20, 5000, 32 << 20]
    arena = Arena(room(sizes), pinned=True, why="a test")
    pieces = [arena.take(n) for n in sizes]
    assert all(p.is_pinned() for p in pieces)
    for piece in pieces:
        values = torch.randint(0, 256, piece.shape, dtype=torch.uint8, device="cuda")
        piece.copy_(values, non_blocking=True)
        assert torch.equal(piece.to("cuda", non_blocking=True), values)
    torch.cuda.synchronize()
    taken = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) - before
    assert taken < 4096  # torch's own comparisons bring their answers through it
    arena.close()
    assert not any(p.is_pinned() for p in pieces)
