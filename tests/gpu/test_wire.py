"""Messages of quantised collectives on a GPU. Run by hand: python -m pytest -s tests/gpu/test_wire.py"""

import math
import time
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda")
CODES, BLOCKS = ("int8", "fp8"), (16, 64, 256, 1000)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def format_of(code, block, kind=""):
    import fullshard as fs
    from fullshard.on_torch.communication.block_quantization import BlockFormat

    return BlockFormat(code, fs.Wire("int8", "int8", block), kind)


def kernel():
    from fullshard.on_torch.communication import triton_messages

    return triton_messages


def values(rows, elements, dtype, seed=0):
    """Normal numbers whose size differs a lot between blocks, subnormal ones, ties, and zeros in the last row."""
    low, high = (-44, 30) if dtype is not torch.float16 else (-8, 4)
    draw = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, elements, generator=draw) * torch.logspace(low, high, elements).flip(0)
    found[:, ::3] = torch.randint(-127, 128, found[:, ::3].shape, generator=draw) / 2  # halves: ties where the largest is 127
    found[-1, : elements // 2] = 0.0
    return found.to(dtype).to(DEVICE)


def used(how, message, elements):
    """A message without the bytes that fill its rows up."""
    return message[:, : 4 * -(-elements // how.wire.block) + elements]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("code", CODES)
def test_the_bits_are_torchs(code, block, dtype):
    how, by = format_of(code, block), kernel()
    for rows, elements in ((1, 1), (1, 15), (2, block), (3, 3 * block + 7), (4, 16 * block), (2, 100_003), (1, 65_536)):
        given = values(rows, elements, dtype)
        message, wanted = by.pack(how, given), how.pack(given)
        assert torch.equal(used(how, message, elements), used(how, wanted, elements)), (rows, elements)
        for written in (dtype, torch.float32):
            ours, torchs = (torch.empty(rows, elements, dtype=written, device=DEVICE) for _ in range(2))
            by.unpack(how, wanted, ours)
            how.unpack(wanted, torchs)
            assert torch.equal(bits(ours), bits(torchs)), (rows, elements, written)
            by.unpack_sum(how, wanted, ours[0])
            how.unpack_sum(wanted, torchs[0])
            assert torch.equal(bits(ours[0]), bits(torchs[0])), (rows, elements, written)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("code", CODES)
def test_residuals_have_torchs_bits(code, block):
    how, by, (rows, elements) = format_of(code, block), kernel(), (3, 10 * block + 5)
    for dtype in DTYPES:
        ours, torchs = (torch.zeros_like(how.message(rows, elements, DEVICE)) for _ in range(2))
        for step in range(4):
            given = values(rows, elements, dtype, step)
            if step == 2:
                given[0, 0], given[1, block + 1], given[2, -1] = math.nan, math.inf, -math.inf
            message, wanted = by.pack(how, given, ours), how.pack(given, torchs)
            if step != 2:
                assert torch.equal(used(how, message, elements), used(how, wanted, elements)), step
            assert torch.equal(used(how, ours, elements), used(how, torchs, elements)), step


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("code", CODES)
def test_what_is_not_finite_is_as_torchs(code, block, dtype):
    how, by, elements = format_of(code, block), kernel(), 4 * block
    for bad in (math.nan, math.inf, -math.inf):
        given = values(2, elements, dtype).clamp(-1e4, 1e4)
        given[0, block + 3] = bad
        ours, torchs = torch.empty_like(given), torch.empty_like(given)
        by.unpack(how, by.pack(how, given), ours)
        how.unpack(how.pack(given), torchs)
        assert ours[0, block : 2 * block].isnan().all()
        assert torch.equal(ours.isnan(), torchs.isnan())
        assert torch.equal(bits(ours.nan_to_num(7.0)), bits(torchs.nan_to_num(7.0)))
        by.unpack_sum(how, by.pack(how, given), ours[0])
        assert torch.equal(ours[0].isnan(), torchs.isnan().any(0))


@pytest.mark.parametrize("code", CODES)
def test_messages_are_those_of_a_cpu(code):
    how, by, elements = format_of(code, 256), kernel(), 50_001
    for dtype in DTYPES:
        given = values(2, elements, dtype)
        assert torch.equal(used(how, by.pack(how, given).cpu(), elements), used(how, how.pack(given.cpu()), elements))


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("code", CODES)
def test_parameters_of_a_message_lie_side_by_side(code, feedback):
    from fullshard.on_torch.communication.block_quantization import ErrorMeter
    from fullshard.on_torch.communication.message_kernel import unpack
    from fullshard.on_torch.communication.quantized_collectives import _pack, _parameters

    how, sizes, found = format_of(code, 256), [7, 256, 1000, 33, 4096], []
    for where in (DEVICE, torch.device("cpu")):
        kept = torch.zeros(3, how.wire.message_bytes(*sizes), dtype=torch.uint8, device=where) if feedback else None
        for step in range(2):
            given, out = (f(3, sum(sizes), device=where) for f in (torch.zeros, torch.empty))
            given.copy_(values(3, sum(sizes), torch.float32, step))
            message = _pack(how, given, sizes, ErrorMeter(), kept)
        for part, part_of_out in _parameters(how, message, out, sizes):
            unpack(how, part, part_of_out)
        found.append(out.cpu())
    assert torch.equal(bits(found[0]), bits(found[1]))


@pytest.mark.parametrize("code", CODES)
def test_the_meter_measures_as_torchs_does(code):
    from fullshard.on_torch.communication.block_quantization import ErrorMeter

    how, by, given = format_of(code, 256, "reduce"), kernel(), values(3, 100_001, torch.float32).clamp(-1e10, 1e10)
    found = []
    for pack in (by.pack, type(how).pack):
        meter, kept = ErrorMeter(on=True), torch.zeros_like(how.message(3, 100_001, DEVICE))
        for _ in range(2):
            pack(how, given, kept, meter)
        found.append(meter.squares["reduce"].tolist())
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_the_log_names_it_and_says_why_not():
    import fullshard as fs
    from fullshard.on_torch.parallelize.kernel_report import step_kernels

    def kernels(wire):
        return step_kernels(DEVICE, None, fs.zero3(fs.presets.describe("llama-nano"), devices=2, wire=wire))

    assert kernels(fs.Wire("int8", "fp8"))["wire"] == "triton"
    assert kernels(fs.Wire("int8", block=20_000))["wire"].startswith("torch (Triton's kernel is for blocks of")
    assert "wire" not in kernels(fs.Wire())


def test_rows_of_more_than_two_gibibytes():
    """Offsets of elements and bytes that 32 bits do not hold."""
    how, by, elements = format_of("int8", 256), kernel(), (1 << 30) + 3 * 256 + 1
    given = torch.zeros(3, elements, dtype=torch.bfloat16, device=DEVICE)
    given[:, ::1001], given[:, -1] = 3.0, -2.0
    message, found = by.pack(how, given), torch.empty_like(given)
    by.unpack(how, message, found)
    assert (found - given).abs().max() <= 3 / 127
    total = torch.empty(elements, dtype=torch.float32, device=DEVICE)
    by.unpack_sum(how, message, total)
    assert total[-1].item() == pytest.approx(-6.0, rel=0.01)
    assert total[1001 * 1_000_000].item() == pytest.approx(9.0, rel=0.01)


def milliseconds(work, repeats=10):
    """On the device, and on the host to launch it."""
    work()
    torch.cuda.synchronize()
    start, began, ended = time.perf_counter(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(repeats):
        work()
    ended.record()
    host = (time.perf_counter() - start) / repeats * 1e3
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / repeats, host


@pytest.mark.parametrize("code", CODES)
def test_speed(code):
    """Printed, not asserted: milliseconds to pack and unpack 400 MB by Triton and by torch, beside a plain copy, and beside what
    the planner says."""
    copied = torch.empty(200_000_000, dtype=torch.bfloat16, device=DEVICE)
    copy, _ = milliseconds(lambda: torch.empty_like(copied).copy_(copied))
    print(f"\n{code}: copy of 400 MB {copy:.3f} ms, {2 * copied.nbytes / copy / 1e9:.2f} TB/s")
    for dtype, feedback in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
        print_times(code, dtype, feedback, 2 * copied.nbytes / copy)


def print_times(code, dtype, feedback, rate):
    """`rate`: bytes of a copy in a millisecond."""
    from fullshard.planner.step.quantized_wire import Quantization

    how, by, (rows, elements) = format_of(code, 256), kernel(), (8, 400_000_000 // dtype.itemsize // 8)
    given = torch.randn(rows, elements, device=DEVICE).to(dtype)
    message, total, out, n = how.pack(given), torch.empty_like(given[0]), torch.empty_like(given), given.numel()
    kept = torch.zeros_like(message) if feedback else None
    moved = Quantization(how.wire, code, dtype.itemsize, feedback, fused=True).moved
    works = {
        "pack": (lambda f: f.pack(how, given, kept), moved(n, 0, 0)),
        "unpack": (lambda f: f.unpack(how, message, out), moved(0, n, n)),
        "sum": (lambda f: f.unpack_sum(how, message, total), moved(0, n, elements)),
    }
    for name, (work, nbytes) in works.items():
        (ours, host), (torchs, _) = milliseconds(partial(work, by)), milliseconds(partial(work, type(how)), 3)
        said = f"triton {ours:.3f} ms (launch {host:.3f}), torch {torchs:.3f} ms, planned {nbytes / rate:.3f} ms"
        print(f"  {dtype} {name}{' with feedback' if feedback else ''}: {said}")
