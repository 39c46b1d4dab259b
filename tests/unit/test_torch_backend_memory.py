"""Loads, stores and atomic additions on the torch backend: spans, gathers, masks, bounds, strides, dtypes, slabs."""

from __future__ import annotations

import pytest
import torch
from evaluation import poisoned, run

from k3dsl.backends.torch import evaluate
from k3dsl.errors import EvaluationError
from k3dsl.language import (
    In,
    InOut,
    Out,
    Sym,
    TensorSpec,
    arange,
    bf16,
    cdiv,
    dot,
    f32,
    i32,
    kernel,
    loop,
    program_id,
    span,
    where,
    zeros,
)


def numbered(*shape, dtype=torch.float32):
    """A tensor whose elements are 0, 1, 2, ..."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


@kernel(grid=lambda d, c: (cdiv(d.M, c.BM), cdiv(d.N, c.BN)))
def matmul(d, c, a=In("M K"), b=In("K N"), out=Out("M N", f32)):
    rows, cols = (
        span(program_id(0) * c.BM, c.BM, end=d.M),
        span(program_id(1) * c.BN, c.BN, end=d.N),
    )

    @loop(cdiv(d.K, c.BK), init=zeros((c.BM, c.BN)))
    def total(i, acc):
        inner = span(i * c.BK, c.BK, end=d.K)
        return dot(a[rows, inner], b[inner, cols], acc=acc)

    out[rows, cols] = total


RUNTIME = {"M": Sym("M"), "N": Sym("N"), "K": Sym("K")}


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (16, 32, 16), (17, 33, 40), (50, 7, 15), (31, 64, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matmul_is_right_at_ragged_edges(m, n, k, dtype):
    generator = torch.Generator().manual_seed(m * n * k)
    a, b = (torch.randn(*s, generator=generator).to(dtype) for s in ((m, k), (k, n)))
    out = poisoned(m, n)
    run(matmul, {"a": a, "b": b, "out": out}, RUNTIME, {"BM": 16, "BN": 32, "BK": 16})
    torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


def test_slabs_give_what_one_batch_gives():
    a, b = torch.randn(70, 40), torch.randn(40, 90)
    whole, slabs = poisoned(70, 90), poisoned(70, 90)
    run(matmul, {"a": a, "b": b, "out": whole}, RUNTIME, {"BM": 16, "BN": 16, "BK": 16})
    run(matmul, {"a": a, "b": b, "out": slabs}, RUNTIME, {"BM": 16, "BN": 16, "BK": 16}, slab_bytes=40_000)
    torch.testing.assert_close(slabs, whole, rtol=1e-6, atol=1e-6)
    assert not slabs.isnan().any()


def test_tensors_may_have_any_strides_and_offset():
    a, b = torch.randn(40, 17).T, torch.randn(40, 2, 66)[:, 1, ::2]
    frame = poisoned(3, 33, 40)
    out = frame[1].T[3:20]  # [17, 33], strides (1, 40), an offset
    run(matmul, {"a": a, "b": b, "out": out}, RUNTIME, {"BM": 16, "BN": 32, "BK": 16})
    torch.testing.assert_close(out, a @ b, rtol=1e-5, atol=1e-5)
    assert frame.isnan().sum() == frame.numel() - out.numel()  # nothing outside of the view was written


def test_an_expanded_tensor_may_be_read():
    a = torch.randn(1, 20).expand(30, 20)
    out = poisoned(30, 16)
    run(matmul, {"a": a, "b": torch.ones(20, 16), "out": out}, RUNTIME, {"BM": 16, "BN": 16, "BK": 16})
    torch.testing.assert_close(out, a.sum(1, keepdim=True).expand(30, 16), rtol=1e-5, atol=1e-5)


def test_declared_strides_may_be_symbols():
    @kernel(grid=lambda d, c: (d.T,))
    def copy(d, c, x=In("T 8"), y=Out("T 8")):
        y[program_id(0), :] = x[program_id(0), :]

    x, y = torch.randn(5, 20)[:, :8], poisoned(5, 8)
    stride = Sym("stride_x", divisible_by=4)
    ir = copy.trace({"T": Sym("T")}, {}, {"x": TensorSpec(f32, (stride, 1)), "y": f32})
    evaluate(ir, {"x": x, "y": y})
    assert torch.equal(x, y)


def test_rows_past_the_end_read_as_other_and_are_not_written():
    @kernel(grid=lambda d, c: (3,))
    def copy(d, c, x=In("12"), y=Out("12"), z=Out("3 4")):
        i = program_id(0)
        rows = span(i * 4, 4, end=7)
        z[i, :] = x.load(rows, other=-5.0)
        y[rows] = x[rows]

    x, y, z = numbered(12), poisoned(12), poisoned(3, 4)
    run(copy, {"x": x, "y": y, "z": z})
    assert z.tolist() == [[0, 1, 2, 3], [4, 5, 6, -5], [-5, -5, -5, -5]]
    assert y[:7].tolist() == list(range(7))
    assert y[7:].isnan().all()


def test_a_masked_load_reads_other_and_a_masked_store_writes_nothing():
    @kernel(grid=lambda d, c: (2,))
    def copy(d, c, x=In("2 6", i32), y=Out("2 6", i32)):
        i = program_id(0)
        tile = x.load(i, slice(None), mask=arange(6) < 4, other=9)
        y.store(i, slice(None), value=tile, mask=arange(6) >= i)

    x, y = numbered(2, 6, dtype=torch.int32), poisoned(2, 6, dtype=torch.int32)
    run(copy, {"x": x, "y": y})
    assert y.tolist() == [[0, 1, 2, 3, 9, 9], [77, 7, 8, 9, 9, 9]]


def test_a_masked_element_may_lie_out_of_bounds():
    @kernel(grid=lambda d, c: (2,))
    def copy(d, c, index=In("2 4", i32), x=In("5"), y=Out("2 4"), z=Out("9")):
        i = program_id(0)
        k = index[i, :]
        y[i, :] = x.load(k, mask=k >= 0, other=-1.0)
        z.store(k, value=k.to(f32), mask=(k >= 0) & (k < 9))

    index = torch.tensor([[4, -7, 0, -1], [2, 1, -100, 3]], dtype=torch.int32)
    y, z = poisoned(2, 4), poisoned(9)
    run(copy, {"index": index, "x": numbered(5) * 10, "y": y, "z": z})
    assert y.tolist() == [[40, -1, 0, -1], [20, 10, -1, 30]]
    assert z[:5].tolist() == [0, 1, 2, 3, 4]
    assert z[5:].isnan().all()


def test_a_span_laid_out_in_several_axes():
    @kernel(grid=lambda d, c: (2,))
    def copy(d, c, x=In("13 3"), y=Out("2 2 3 4"), z=Out("13 3")):
        i = program_id(0)
        rows = span(i * 8, 8, end=13).reshape(2, 4)
        tile = x[rows, :]  # [2, 4, 3]
        y[i, :, :, :] = tile.permute(0, 2, 1)
        z[rows, :] = tile * 2.0

    x, y, z = numbered(13, 3), poisoned(2, 2, 3, 4), poisoned(13, 3)
    run(copy, {"x": x, "y": y, "z": z})
    padded = torch.cat([x, torch.zeros(3, 3)]).reshape(2, 2, 4, 3)
    assert torch.equal(y, padded.permute(0, 1, 3, 2))
    assert torch.equal(z, x * 2)


def test_index_tiles_gather_rows_whose_axis_comes_first_in_the_middle_or_last():
    @kernel(grid=lambda d, c: (2,))
    def gather(d, c, index=In("2 4", i32), x=In("5 6 3"), a=Out("2 4 6 3"), b=Out("2 5 4 3"), e=Out("2 5 6 4")):
        i = program_id(0)
        k = index[i, :]
        a[i, :, :, :] = x[k, :, :]
        b[i, :, :, :] = x[:, k, :]
        e[i, :, :, :] = x[:, :, k % 3]

    index = torch.tensor([[4, 0, 0, 2], [1, 3, 2, 4]], dtype=torch.int32)
    x, a, b, e = numbered(5, 6, 3), poisoned(2, 4, 6, 3), poisoned(2, 5, 4, 3), poisoned(2, 5, 6, 4)
    run(gather, {"index": index, "x": x, "a": a, "b": b, "e": e})
    for i in range(2):
        k = index[i].long()
        assert torch.equal(a[i], x[k])
        assert torch.equal(b[i], x[:, k])
        assert torch.equal(e[i], x[:, :, k % 3])


def test_several_index_tiles_pick_together():
    @kernel(grid=lambda d, c: (1,))
    def gather(d, c, p=In("2 3", i32), q=In("2 3", i32), x=In("5 7 4"), y=Out("2 3 4"), z=Out("7 2 3")):
        y[:, :, :] = x[p[:, :], q[:, :], :]
        z[:, :, :] = x[p[:, :], :, q[:, :] % 4].permute(2, 0, 1)

    p = torch.tensor([[0, 1, 2], [4, 4, 3]], dtype=torch.int32)
    q = torch.tensor([[6, 5, 0], [1, 2, 3]], dtype=torch.int32)
    x, y, z = numbered(5, 7, 4), poisoned(2, 3, 4), poisoned(7, 2, 3)
    run(gather, {"p": p, "q": q, "x": x, "y": y, "z": z})
    assert torch.equal(y, x[p.long(), q.long()])
    assert torch.equal(z, x[p.long(), :, (q % 4).long()].permute(2, 0, 1))


def test_a_scatter_writes_rows_wherever_the_index_tile_says():
    @kernel(grid=lambda d, c: (2,))
    def scatter(d, c, index=In("2 3", i32), x=In("2 3 4"), y=Out("4 7"), z=Out("7 9")):
        i = program_id(0)
        k = index[i, :]
        y[:, k] = x[i, :, :].T
        z[k, span(i * 4 + 1, 4)] = x[i, :, :]

    index = torch.tensor([[6, 0, 3], [1, 5, 2]], dtype=torch.int32)
    x, y, z = numbered(2, 3, 4), poisoned(4, 7), poisoned(7, 9)
    run(scatter, {"index": index, "x": x, "y": y, "z": z})
    want = poisoned(7, 4)
    want[index.flatten().long()] = x.reshape(6, 4)
    assert torch.equal(y.T.nan_to_num(-1), want.nan_to_num(-1))
    for i in range(2):
        assert torch.equal(z[index[i].long(), i * 4 + 1 : i * 4 + 5], x[i])
    assert z.isnan().sum() == z.numel() - x.numel()


def test_atomic_additions_of_many_programs_add_up():
    @kernel(grid=lambda d, c: (4, 3))
    def histogram(d, c, index=In("4 3 5", i32), count=InOut("6", i32), rows=InOut("3 5"), all=InOut("2", f32)):
        i, j = program_id(0), program_id(1)
        count.atomic_add(index[i, j, :], value=1)
        rows.atomic_add(j, slice(None), value=index[i, j, :].to(f32))
        all.atomic_add(span(0, 2, end=1), value=1.0)

    index = torch.randint(0, 6, (4, 3, 5), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    count, rows, total = torch.ones(6, dtype=torch.int32), torch.zeros(3, 5), torch.zeros(2)
    run(histogram, {"index": index, "count": count, "rows": rows, "all": total})
    assert torch.equal(count, 1 + torch.bincount(index.flatten(), minlength=6).int())
    assert torch.equal(rows, index.sum(0).float())
    assert total.tolist() == [12.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
                                   torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])  # fmt: skip
def test_every_dtype_is_read_and_written(dtype):
    @kernel(grid=lambda d, c: (3,))
    def copy(d, c, x=In("8"), y=Out("8")):
        rows = span(program_id(0) * 3, 3, end=8)
        y[rows] = x[rows]

    x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1]).to(dtype)
    for options in ({}, {"compute_dtype": torch.float64}):
        y = torch.zeros(8).to(dtype)
        run(copy, {"x": x, "y": y}, **options)
        assert torch.equal(x.float(), y.float())


def test_in_fp64_only_the_store_rounds():
    @kernel(grid=lambda d, c: (1,))
    def scale(d, c, x=In("2", bf16), y=Out("2", f32), z=Out("2", bf16)):
        t = (x[:] + 0.00390625).to(bf16)
        y[:] = t.to(f32)
        z[:] = t

    x, y, z = torch.tensor([1.0, 3.0]).bfloat16(), poisoned(2), poisoned(2, dtype=torch.bfloat16)
    run(scale, {"x": x, "y": y, "z": z})
    assert y.tolist() == [1.0, 3.0]
    run(scale, {"x": x, "y": y, "z": z}, compute_dtype=torch.float64)
    assert y.tolist() == [1.00390625, 3.00390625]
    assert z.tolist() == [1.0, 3.0]


def test_offsets_beyond_two_to_the_31():
    @kernel(grid=lambda d, c: (2,))
    def read(d, c, x=In("T 64"), y=Out("2 64")):
        i = program_id(0)
        y[i, :] = x[i * (d.T - 1), :]

    rows = 2**25 + 2  # of 64 bytes: the last one starts past 2**31
    x = torch.empty(rows, 64, dtype=torch.int8)  # never touched as a whole, so that it takes no memory
    x[0], x[rows - 1] = torch.arange(64), torch.arange(64, 0, -1)
    y = poisoned(2, 64, dtype=torch.int8)
    run(read, {"x": x, "y": y}, {"T": Sym("T")})
    assert torch.equal(y, torch.stack([x[0], x[rows - 1]]))


def test_an_input_may_share_memory_with_what_is_written():
    """A load is a copy: the second load's tile is not changed by the store after it."""

    @kernel(grid=lambda d, c: (1,))
    def shift(d, c, x=In("4"), y=InOut("4")):
        before, mine = x[:], y[:]
        y[:] = before + 1.0
        y[:] = mine + before

    x = numbered(4)
    run(shift, {"x": x, "y": x})
    assert x.tolist() == [0, 2, 4, 6]


# Bounds.


def raises(k, tensors, dims=None, knobs=None, **options):
    with pytest.raises(EvaluationError) as error:
        run(k, tensors, dims, knobs, **options)
    return str(error.value)


def test_a_span_past_the_tensor_is_an_error_that_says_where():
    @kernel(grid=lambda d, c: (2, 3))
    def copy(d, c, x=In("2 10"), y=Out("2 12")):
        i, j = program_id(0), program_id(1)
        y[i, span(j * 4, 4)] = x[i, span(j * 4, 4)]  # the line that is named

    line = copy.fn.__code__.co_firstlineno + 3
    text = raises(copy, {"x": numbered(2, 10), "y": poisoned(2, 12)})
    assert f"test_torch_backend_memory.py:{line}: load of x is out of bounds" in text
    assert "index 10 along axis 1, whose extent is 10, in program (0, 2)" in text
    assert "fix: end the span where the tensor ends, span(start, size, end=...)" in text


@pytest.mark.parametrize("check", [True, False])
def test_bounds_are_checked_for_every_kind_of_index_and_of_access(check):
    @kernel(grid=lambda d, c: (3,))
    def scalar(d, c, x=In("4 2"), y=Out("3 2")):
        y[program_id(0), :] = x[program_id(0) - 1, :]

    assert "load of x is out of bounds: index -1 along axis 0, whose extent is 4, in program (0)" in raises(
        scalar, {"x": numbered(4, 2), "y": poisoned(3, 2)}, check=check
    )

    @kernel(grid=lambda d, c: (3,))
    def gather(d, c, x=In("4", i32), y=Out("3 4", i32)):
        y[program_id(0), :] = x[x[:] + program_id(0)]

    assert "load of x is out of bounds: index 4 along axis 0, whose extent is 4, in program (1)" in raises(
        gather, {"x": numbered(4, dtype=torch.int32), "y": poisoned(3, 4, dtype=torch.int32)}, check=check
    )

    @kernel(grid=lambda d, c: (2,))
    def store(d, c, x=In("4"), y=Out("7")):
        y[span(program_id(0) * 4, 4)] = x[:]

    assert "store of y is out of bounds: index 7 along axis 0, whose extent is 7, in program (1)" in raises(
        store, {"x": numbered(4), "y": poisoned(7)}, check=check
    )

    @kernel(grid=lambda d, c: (2,))
    def add(d, c, y=InOut("3", f32)):
        y.atomic_add(program_id(0) * 3, value=1.0)

    assert "atomic_add of y is out of bounds: index 3 along axis 0, whose extent is 3, in program (1)" in raises(
        add, {"y": torch.zeros(3)}, check=check
    )

    @kernel(grid=lambda d, c: (1,))
    def past(d, c, x=In("6"), y=Out("8")):
        y[:] = x[span(0, 8, end=7)]

    assert "index 6 along axis 0, whose extent is 6" in raises(past, {"x": numbered(6), "y": poisoned(8)}, check=check)

    @kernel(grid=lambda d, c: (1,))
    def before(d, c, x=In("6"), y=Out("4")):
        y[:] = x[span(program_id(0) - 2, 4, end=6)]

    assert "index -2 along axis 0, whose extent is 6" in raises(
        before, {"x": numbered(6), "y": poisoned(4)}, check=check
    )


def test_a_partly_masked_access_is_checked_where_it_is_not_masked():
    @kernel(grid=lambda d, c: (1,))
    def gather(d, c, x=In("4"), y=Out("8")):
        y[:] = x.load(arange(8), mask=arange(8) != 5)

    assert "index 4 along axis 0" in raises(gather, {"x": numbered(4), "y": poisoned(8)})


def test_an_empty_tensor_reads_as_other_when_all_is_masked():
    @kernel(grid=lambda d, c: (2,))
    def copy(d, c, x=In("T 4"), y=Out("2 3 4")):
        y[program_id(0), :, :] = x.load(span(0, 3, end=d.T), slice(None), other=3.0)

    y = poisoned(2, 3, 4)
    run(copy, {"x": torch.empty(0, 4), "y": y}, {"T": Sym("T")})
    assert torch.equal(y, torch.full((2, 3, 4), 3.0))


def test_a_grid_without_programs_does_nothing():
    @kernel(grid=lambda d, c: (d.T, 2))
    def fill(d, c, x=In("T"), y=Out("4", f32)):
        y[:] = where(arange(4) > 1, x[program_id(0)], 0.0)

    y = poisoned(4)
    run(fill, {"x": torch.empty(0), "y": y}, {"T": Sym("T")})
    assert y.isnan().all()


def test_a_grid_may_have_three_axes():
    @kernel(grid=lambda d, c: (2, 3, 4))
    def number(d, c, y=Out("2 3 4", i32)):
        y[program_id(0), program_id(1), program_id(2)] = program_id(0) * 100 + program_id(1) * 10 + program_id(2)

    y = poisoned(2, 3, 4, dtype=torch.int32)
    run(number, {"y": y}, slab_bytes=1)
    i, j, k = torch.meshgrid(torch.arange(2), torch.arange(3), torch.arange(4), indexing="ij")
    assert torch.equal(y, (i * 100 + j * 10 + k).int())
