"""What each operation of the language means, on the torch backend, against numpy and hand-worked values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from evaluation import apply

from k3dsl import language as tl

F64 = {"compute_dtype": torch.float64}


def tensor(values, dtype=torch.float32):
    """One program's tile."""
    return torch.tensor(values, dtype=dtype)[None]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Elementwise.

UNARY = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": lambda x: np.log(np.abs(x) + 0.1),
    "log2": lambda x: np.log2(np.abs(x) + 0.1),
    "log1p": lambda x: np.log1p(np.abs(x)),
    "sqrt": lambda x: np.sqrt(np.abs(x)),
    "rsqrt": lambda x: 1 / np.sqrt(np.abs(x) + 0.1),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.log1p(np.exp(x)),
    "reciprocal": lambda x: 1 / (np.abs(x) + 0.1),
    "sin": np.sin,
    "cos": np.cos,
    "erf": lambda x: np.vectorize(math.erf)(x),
    "floor": np.floor,
    "ceil": np.ceil,
}
ARGUMENT = {
    "log": lambda x: abs(x) + 0.1,
    "log2": lambda x: abs(x) + 0.1,
    "log1p": abs,
    "sqrt": abs,
    "rsqrt": lambda x: abs(x) + 0.1,
    "reciprocal": lambda x: abs(x) + 0.1,
}


@pytest.mark.parametrize("name", UNARY)
def test_a_unary_function_is_the_mathematical_one(name):
    x = randn(3, 4, 5).double()
    f = getattr(tl, name)
    got = apply(lambda a: f(ARGUMENT.get(name, lambda v: v)(a)), x)
    np.testing.assert_allclose(got.numpy(), UNARY[name](x.numpy()), rtol=1e-12, atol=1e-14)
    got = apply(lambda a: f(ARGUMENT.get(name, lambda v: v)(a)), x.float())
    np.testing.assert_allclose(got.numpy(), UNARY[name](x.float().double().numpy()), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "softplus", "cos"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_function_is_rounded_once(name, dtype):
    x = randn(1, 500, dtype=dtype)
    exact = torch.from_numpy(UNARY[name](x.double().numpy()))
    assert torch.equal(apply(getattr(tl, name), x), exact.float().to(dtype))


def test_softplus_and_sigmoid_neither_overflow_nor_cancel():
    x = tensor([-800.0, -100.0, 0.0, 100.0, 800.0], torch.float64)
    assert apply(tl.softplus, x)[0].tolist() == pytest.approx(
        [0.0, math.exp(-100), math.log(2), 100.0, 800.0], rel=1e-12
    )
    assert apply(tl.sigmoid, x)[0].tolist() == pytest.approx([0.0, math.exp(-100), 0.5, 1.0, 1.0], rel=1e-12)
    # 20 < x: still log(1 + e**x), not x
    assert apply(tl.softplus, tensor([21.0], torch.float64)).item() == math.log1p(math.exp(-21.0)) + 21.0


def test_log1p_is_exact_near_zero():
    assert apply(tl.log1p, tensor([1e-12])).item() == pytest.approx(1e-12, rel=1e-6)


def test_arithmetic_rounds_to_the_dtype_after_every_operation():
    one, tiny = tensor([1.0], torch.bfloat16), tensor([2**-9], torch.bfloat16)
    assert apply(lambda a, b: (a + b) + b - a, one, tiny).item() == 0.0
    assert apply(lambda a, b: (a + b) + b - a, one, tiny, **F64).item() == 2**-8


def test_minimum_and_maximum_hand_a_nan_on():
    a, b = tensor([1.0, math.nan, 3.0]), tensor([2.0, 2.0, math.nan])
    assert apply(tl.maximum, a, b)[0].isnan().tolist() == [False, True, True]
    assert apply(tl.minimum, a, b)[0].isnan().tolist() == [False, True, True]
    assert apply(tl.minimum, a, b)[0, 0].item() == 1.0


def test_where_does_not_leak_the_other_branch():
    x = tensor([-1.0, 0.0, 4.0])
    assert apply(lambda a: tl.where(a > 0, tl.log(a), 7.0), x)[0].tolist() == pytest.approx([7.0, 7.0, math.log(4)])


def test_comparisons_and_logic():
    x, y = tensor([1, 2, 3], torch.int32), tensor([3, 2, 1], torch.int32)
    for f, want in (
        (lambda a, b: a < b, [1, 0, 0]),
        (lambda a, b: a <= b, [1, 1, 0]),
        (lambda a, b: a == b, [0, 1, 0]),
        (lambda a, b: a != b, [1, 0, 1]),
        (lambda a, b: a >= b, [0, 1, 1]),
        (lambda a, b: a > b, [0, 0, 1]),
        (lambda a, b: (a < b) | (a == 3), [1, 0, 1]),
        (lambda a, b: (a <= b) & ~(a == 1), [0, 1, 0]),
        (lambda a, b: (a > 1) ^ (b > 1), [1, 0, 1]),
    ):
        assert apply(lambda a, b, f=f: f(a, b).to(tl.i32), x, y)[0].tolist() == want


def test_integer_arithmetic_wraps_and_divides():
    x = tensor([7, 8, 2**31 - 1], torch.int32)
    assert apply(lambda a: a // 4, x)[0].tolist() == [1, 2, 2**29 - 1]
    assert apply(lambda a: a % 4, x)[0].tolist() == [3, 0, 3]
    assert apply(lambda a: a + 1, x)[0].tolist() == [8, 9, -(2**31)]
    assert apply(lambda a: (a << 2) >> 1, x[:, :2])[0].tolist() == [14, 16]
    assert apply(lambda a: a & 3 | 8, x)[0].tolist() == [11, 8, 11]


def test_a_zero_divisor_is_minus_one_so_that_an_index_made_of_it_is_caught():
    x, y = tensor([5, 6], torch.int32), tensor([0, 4], torch.int32)
    assert apply(lambda a, b: a // b, x, y)[0].tolist() == [-1, 1]
    assert apply(lambda a, b: a % b, x, y)[0].tolist() == [-1, 2]


# Casts.


def test_a_cast_to_bf16_rounds_to_nearest_even():
    ulp = 2**-7  # of bf16 at 1
    x = tensor([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 2**-20, -(1 + ulp / 2)])
    assert apply(lambda a: a.to(tl.bf16), x)[0].tolist() == [1.0, 1 + 2 * ulp, 1 + ulp, -1.0]


def test_a_cast_from_float_to_integer_truncates_and_saturates():
    x = tensor([1.9, -1.9, math.nan, 1e20, -1e20, math.inf])
    assert apply(lambda a: a.to(tl.i32), x)[0].tolist() == [1, -1, 0, 2**31 - 1, -(2**31), 2**31 - 1]
    assert apply(lambda a: a.to(tl.i64), x)[0].tolist() == [1, -1, 0, 2**63 - 1, -(2**63), 2**63 - 1]
    assert apply(lambda a: a.to(tl.u8), tensor([3.5, -2.0, 300.0]))[0].tolist() == [3, 0, 255]


def test_integer_casts_keep_the_low_bits_and_bools_are_zero_or_one():
    assert apply(lambda a: a.to(tl.i8), tensor([300, -129], torch.int32))[0].tolist() == [44, 127]
    assert apply(lambda a: a.to(tl.i1).to(tl.f32), tensor([0.0, 0.5, -2.0]))[0].tolist() == [0.0, 1.0, 1.0]


def test_eight_bit_floats_round_to_their_grid_and_saturate():
    x = tensor([1.0, 1.06, 1.07, 500.0, -1e9, math.nan])
    got = apply(lambda a: a.to(tl.f8e4m3).to(tl.f32), x)[0]
    assert got[:5].tolist() == [1.0, 1.0, 1.125, 448.0, -448.0]
    assert got[5].isnan()
    assert apply(lambda a: a.to(tl.f8e5m2).to(tl.f32), tensor([1.1, 1e6]))[0].tolist() == [1.0, 57344.0]
    # arithmetic in them is rounded too: 16 + 1 = 17 lies between 16 and 18
    assert apply(lambda a: (a.to(tl.f8e4m3) + 1.0).to(tl.f32), tensor([16.0, 18.0]))[0].tolist() == [16.0, 20.0]


def test_eight_bit_floats_are_read_and_written():
    x = torch.tensor([[0.5, -3.25, 448.0]]).to(torch.float8_e4m3fn)
    y = apply(lambda a: a * 2.0, x)
    assert y.dtype == torch.float8_e4m3fn
    assert y.float()[0].tolist() == [1.0, -6.5, 448.0]


def test_in_fp64_casts_between_floats_do_nothing():
    x = tensor([0.1, 1 / 3], torch.float64)
    assert torch.equal(apply(lambda a: a.to(tl.bf16).to(tl.f32) * 1.0, x, **F64), x)
    assert apply(lambda a: a.to(tl.f8e4m3).to(tl.i32), tensor([300.5]), **F64).item() == 300


# Shapes.


def test_reshape_is_row_major_and_permute_broadcast_and_select_are_numpys():
    x = randn(2, 3, 4)
    assert torch.equal(apply(lambda a: a.reshape(2, 6), x), x.reshape(2, 2, 6))
    assert torch.equal(apply(lambda a: a.T, x), x.transpose(1, 2))
    assert torch.equal(apply(lambda a: a.T.reshape(2, 6), x), x.transpose(1, 2).reshape(2, 2, 6))
    assert torch.equal(
        apply(lambda a: a.reshape(3, 2, 2).permute(2, 0, 1), x), x.reshape(2, 3, 2, 2).permute(0, 3, 1, 2)
    )
    assert torch.equal(apply(lambda a: a[:, 1], x), x[:, :, 1])
    assert torch.equal(apply(lambda a: a[-1, :], x), x[:, 2])
    assert torch.equal(apply(lambda a: a[:, 1][:, None].broadcast(3, 5), x), x[:, :, 1:2].expand(2, 3, 5))
    assert torch.equal(apply(lambda a: tl.full((2, 2), 1.5, tl.f32) * a[0, 0], x), x[:, :1, :1].expand(2, 2, 2) * 1.5)


def test_arange_counts_from_its_start():
    x = tensor([[1, 2]], torch.int32)
    assert apply(lambda a: tl.arange(4, 3), x)[0].tolist() == [3, 4, 5, 6]


# Reductions and scans.


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("keepdim", [False, True])
def test_reductions_are_numpys(axis, keepdim):
    x = randn(2, 3, 4, 5).double()
    for kind in ("sum", "max", "min", "prod"):
        got = apply(lambda a, kind=kind: getattr(a, kind)(axis, keepdim), x)
        want = getattr(np, kind)(x.numpy(), axis=axis + 1, keepdims=keepdim)
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)
    for kind in ("any", "all"):
        got = apply(lambda a, kind=kind: getattr(a > 0.3, kind)(axis, keepdim), x)
        assert np.array_equal(got.numpy(), getattr(np, kind)(x.numpy() > 0.3, axis=axis + 1, keepdims=keepdim))


def test_a_16_bit_sum_is_rounded_once():
    x = torch.ones(1, 1000, dtype=torch.bfloat16)  # adding one by one in bf16 would stop at 256
    assert apply(lambda a: a.sum(0), x).item() == 1000.0
    assert apply(lambda a: tl.cumsum(a, 0), x)[0, [255, 256, 999]].tolist() == [256.0, 256.0, 1000.0]


def test_max_and_min_hand_a_nan_on():
    x = tensor([[1.0, math.nan], [2.0, 3.0]])
    assert apply(lambda a: a.max(1), x)[0].isnan().tolist() == [True, False]
    assert apply(lambda a: a.min(1), x)[0].isnan().tolist() == [True, False]
    assert apply(lambda a: tl.cummax(a, 1), x)[0].isnan().tolist() == [[False, True], [False, False]]


def test_argmax_and_argmin_take_the_lowest_position_on_ties_and_a_nan_is_the_extreme():
    x = tensor([[1, 3, 3, 0, 0], [2, 2, 2, 2, 2]], torch.float32)
    assert apply(lambda a: tl.argmax(a, 1), x)[0].tolist() == [1, 0]
    assert apply(lambda a: tl.argmin(a, 1), x)[0].tolist() == [3, 0]
    assert apply(lambda a: tl.argmax(a, 0, keepdim=True), x)[0].tolist() == [[1, 0, 0, 1, 1]]
    nan = tensor([5.0, math.nan, 1.0, math.nan])
    assert apply(lambda a: tl.argmax(a, 0), nan).item() == 1
    assert apply(lambda a: tl.argmin(a, 0), nan).item() == 1
    assert apply(lambda a: tl.argmin(a, 0), tensor([3, 1, 1], torch.int32)).item() == 1


@pytest.mark.parametrize("axis", [0, 1])
def test_named_scans_are_numpys_forward_and_reverse(axis):
    x = randn(2, 5, 3).double()
    pairs = {
        "cumsum": np.cumsum,
        "cumprod": np.cumprod,
        "cummax": np.maximum.accumulate,
        "cummin": np.minimum.accumulate,
    }
    for name, f in pairs.items():
        got = apply(lambda a, name=name: getattr(tl, name)(a, axis), x)
        np.testing.assert_allclose(got.numpy(), f(x.numpy(), axis=axis + 1), rtol=1e-12)
        got = apply(lambda a, name=name: getattr(tl, name)(a, axis, reverse=True), x)
        want = np.flip(f(np.flip(x.numpy(), axis + 1), axis=axis + 1), axis + 1)
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)


def test_an_integer_scan_keeps_its_dtype():
    assert apply(lambda a: tl.cumsum(a, 0), tensor([1, 2, 3], torch.int32)).dtype == torch.int32


@pytest.mark.parametrize("n", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_with_a_combine_runs_a_linear_recurrence(n, reverse):
    """h[t] = a[t] h[t-1] + b[t]; the combine is associative but not commutative."""
    a, b = randn(3, n, 2, seed=1).double(), randn(3, n, 2, seed=2).double()

    def combine(a1, b1, a2, b2):
        return a1 * a2, b1 * a2 + b2

    got = apply(lambda x, y: tl.scan((x, y), 0, combine, reverse=reverse)[1], a, b)
    h, want = np.zeros((3, 2)), np.zeros((3, n, 2))
    for t in reversed(range(n)) if reverse else range(n):
        h = a[:, t].numpy() * h + b[:, t].numpy()
        want[:, t] = h
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("n", [1, 3, 8, 11])
def test_a_reduction_with_a_combine_keeps_the_order_of_its_operands(n):
    a, b = randn(2, 3, n, seed=1).double(), randn(2, 3, n, seed=2).double()
    outs = apply(lambda x, y: tl.reduce((x, y), 1, lambda a1, b1, a2, b2: (a1 * a2, b1 * a2 + b2)), a, b)
    h = np.zeros((2, 3))
    for t in range(n):
        h = a[..., t].numpy() * h + b[..., t].numpy()
    np.testing.assert_allclose(outs[0].numpy(), np.prod(a.numpy(), axis=2), rtol=1e-12)
    np.testing.assert_allclose(outs[1].numpy(), h, rtol=1e-12, atol=1e-13)


def test_a_combine_may_use_values_of_the_program_around_it():
    x, limit = tensor([1.0, 5.0, 9.0]).repeat(2, 1), torch.tensor([[4.0], [8.0]])

    def f(a, b):
        cap = b[0]
        (out,) = tl.reduce((a,), 0, lambda u, v: (tl.minimum(u + v, cap),))
        return out

    assert apply(f, x, limit).tolist() == [4.0, 8.0]


def test_a_combine_may_select_positions():
    """An arg-max that prefers the highest position on ties."""
    x = tensor([[3.0, 7.0, 7.0, 1.0]])

    def combine(v1, i1, v2, i2):
        right = v2 >= v1
        return tl.where(right, v2, v1), tl.where(right, i2, i1)

    assert apply(lambda a: tl.reduce((a, tl.arange(4)[None, :]), 1, combine)[1], x).tolist() == [[2]]


# Products and inverses.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_multiplies_exactly_and_accumulates_in_fp32(dtype):
    a, b = randn(2, 6, 96, dtype=dtype, seed=1), randn(2, 96, 5, dtype=dtype, seed=2)
    got = apply(tl.dot, a, b)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), a.double().numpy() @ b.double().numpy(), rtol=1e-5, atol=1e-4)
    acc = randn(2, 6, 5, seed=3)
    got = apply(lambda x, y, z: tl.dot(x, y, acc=z), a, b, acc)
    np.testing.assert_allclose(got.numpy(), a.double().numpy() @ b.double().numpy() + acc.numpy(), rtol=1e-5, atol=1e-4)


def test_dot_of_bf16_does_not_round_its_result():
    a = tensor([[1.0, 2**-8]], torch.bfloat16)
    assert apply(lambda x: tl.dot(x, x.T), a).item() == 1 + 2**-16


def test_dot_precisions_round_the_operands():
    third = 1 + 2**-9 + 2**-11  # 10 mantissa bits end at 2**-10: the tie goes away from zero
    x, one = tensor([[third]]), tensor([[1.0]])
    results = {p: apply(lambda a, b, p=p: tl.dot(a, b, precision=p), x, one).item() for p in ("ieee", "tf32x3", "tf32")}
    assert results == {"ieee": third, "tf32x3": third, "tf32": 1 + 2**-9 + 2**-10}
    assert apply(lambda a, b: tl.dot(a, b, precision="bf16"), x, one).item() == 1.0
    assert apply(lambda a, b: tl.dot(a, b, precision="fp16"), x, one).item() == 1 + 2**-9
    for p in ("tf32", "bf16"):
        assert apply(lambda a, b, p=p: tl.dot(a, b, precision=p), x, one, **F64).item() == third


def test_tf32_keeps_infinities_and_nans():
    x = tensor([[math.inf], [-math.inf], [math.nan]])
    got = apply(lambda a, b: tl.dot(a, b, precision="tf32"), x, tensor([[1.0]]))[0, :, 0]
    assert got[:2].tolist() == [math.inf, -math.inf]
    assert got[2].isnan()


def test_dot_takes_a_batch_axis_and_what_is_the_same_for_all_programs():
    a, b = randn(2, 3, 4, 5, seed=1), randn(2, 3, 5, 6, seed=2)
    np.testing.assert_allclose(apply(tl.dot, a, b).numpy(), a.numpy() @ b.numpy(), rtol=1e-5, atol=1e-5)
    want = a.sum(-1, keepdim=True).expand(2, 3, 4, 2)
    got = apply(lambda x: tl.dot(x, tl.ones((3, 5, 2))), a)
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-5)
    got = apply(lambda x: tl.dot(tl.ones((2, 5)), x.reshape(12, 5).T), a)
    np.testing.assert_allclose(got.numpy(), a.reshape(2, 1, 12, 5).sum(-1).expand(2, 2, 12), rtol=1e-5, atol=1e-5)
    got = apply(lambda x: tl.dot(tl.ones((2, 5)), tl.ones((5, 2)), acc=tl.ones((2, 2))), a)
    assert torch.equal(got, torch.full((2, 2, 2), 6.0))


@pytest.mark.parametrize("shape", [(16, 16), (3, 8, 8)])
def test_unit_lower_inverse_inverts_and_ignores_the_upper_part(shape):
    x = randn(2, *shape).double()
    n = shape[-1]
    upper = torch.ones(n, n, dtype=torch.bool).triu()
    want = np.linalg.inv(np.eye(n) + np.tril(x.numpy(), -1))
    dirty = x.clone()
    dirty[..., upper] = torch.tensor([math.nan, math.inf]).double().repeat(n * n)[: int(upper.sum())]
    got = apply(tl.unit_lower_inverse, dirty)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-8, atol=1e-8)
    got = apply(tl.unit_lower_inverse, dirty.float() * 0.3)
    want = np.linalg.inv(np.eye(n) + np.tril(x.numpy() * 0.3, -1))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-4)


def test_unit_lower_inverse_is_stable_for_identical_rows():
    """All ones below the diagonal: the inverse is bidiagonal, while powers of the matrix reach 1e17."""
    got = apply(tl.unit_lower_inverse, torch.ones(1, 64, 64))[0]
    assert torch.equal(got, torch.eye(64) - torch.diag(torch.ones(63), -1))
