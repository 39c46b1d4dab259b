"""What the torch backend refuses before it runs a kernel, and the dtype names."""

from __future__ import annotations

import pytest
import torch
from evaluation import poisoned

from k3dsl.backends.torch import Evaluator, evaluate, from_torch, to_torch
from k3dsl.errors import ArgumentError, UnknownNameError
from k3dsl.ir.types import DTYPES
from k3dsl.language import In, Out, Scalar, Sym, TensorSpec, bf16, cdiv, f32, kernel, program_id, span


@kernel(grid=lambda d, c: (cdiv(d.T, 16),))
def scale(d, c, x=In("T H"), y=Out("T H"), alpha=Scalar(f32), extra=In("2*T", optional=True)):
    rows = span(program_id(0) * 16, 16, end=d.T)
    y[rows, :] = x[rows, :] * alpha


DIMS = {"T": Sym("T", divisible_by=4, min=4, max=64), "H": 8}
IR = scale.trace(DIMS, {}, {"x": f32, "y": f32})
SCALARS = {"alpha": 2.0}


def good(t=20):
    return {"x": torch.randn(t, 8), "y": poisoned(t, 8)}


def test_dims_follow_from_the_shapes():
    tensors = good()
    evaluate(IR, tensors, None, SCALARS)
    assert torch.equal(tensors["y"], tensors["x"] * 2)
    evaluate(IR, tensors, {"T": 20}, SCALARS)


def test_a_dim_follows_from_a_multiple():
    ir = scale.trace({"T": Sym("T"), "H": 8}, {}, {"x": f32, "y": f32, "extra": f32})
    evaluate(ir, {**good(), "extra": torch.zeros(40)}, None, SCALARS)
    with pytest.raises(
        ArgumentError, match=r"extra has shape \[41\], declared is \[2 \* T\] = \[40\] with T=20|T \* 2"
    ):
        evaluate(ir, {**good(), "extra": torch.zeros(41)}, None, SCALARS)


@pytest.mark.parametrize(
    ("change", "dims", "text"),
    [
        ({"x": torch.zeros(24, 8)}, None, r"y has shape \[20, 8\], declared is \[T, 8\] = \[24, 8\] with T=24"),
        ({"x": torch.zeros(20, 9)}, None, r"x has shape \[20, 9\], declared is \[T, 8\] = \[20, 8\] with T=20"),
        ({}, {"T": 16}, r"x has shape \[20, 8\], declared is \[T, 8\] = \[16, 8\] with T=16"),
        ({"x": torch.zeros(20, 8, 1)}, None, r"x has 3 axes \(20, 8, 1\), declared are 2: \[T, 8\]"),
        ({"x": torch.zeros(20, 8).half()}, None, r"x is torch.float16, the kernel was traced for f32"),
        (
            {"x": torch.zeros(22, 8), "y": torch.zeros(22, 8)},
            None,
            "dim T is 22, the kernel was traced for multiples of 4",
        ),
        ({"x": torch.zeros(68, 8), "y": torch.zeros(68, 8)}, None, "dim T is 68, the kernel was traced for 4 to 64"),
        ({"x": torch.zeros(0, 8), "y": torch.zeros(0, 8)}, None, "dim T is 0, the kernel was traced for 4 to 64"),
        ({"y": None}, None, "tensor y missing"),
        ({"y": torch.zeros(1, 8).expand(20, 8)}, None, "y is written but its elements share memory"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_what_does_not_fit(change, dims, text):
    with pytest.raises(ArgumentError, match=text):
        evaluate(IR, {**good(), **change}, dims, SCALARS)


def test_unknown_names_are_refused_with_the_near_ones():
    with pytest.raises(UnknownNameError, match="has no tensor 'yy'; did you mean y"):
        evaluate(IR, {**good(), "yy": torch.zeros(1)}, None, SCALARS)
    with pytest.raises(UnknownNameError, match="has no scalar 'alpa'; did you mean alpha"):
        evaluate(IR, good(), None, {"alpa": 1.0})
    with pytest.raises(UnknownNameError, match="has no dim 'Q'; known: T"):
        evaluate(IR, good(), {"Q": 1}, SCALARS)
    with pytest.raises(ArgumentError, match="scalar alpha missing"):
        evaluate(IR, good())


def test_a_dim_that_no_tensor_tells_must_be_passed():
    @kernel(grid=lambda d, c: (d.N,))
    def fill(d, c, y=Out("8", f32)):
        y[program_id(0)] = 1.0

    ir = fill.trace({"N": Sym("N")})
    with pytest.raises(ArgumentError, match="the value of dim N follows from no tensor's shape"):
        evaluate(ir, {"y": poisoned(8)})
    y = poisoned(8)
    evaluate(ir, {"y": y}, {"N": 3})
    assert y.nan_to_num(0).tolist() == [1.0] * 3 + [0.0] * 5


def test_declared_strides_are_checked():
    ir = scale.trace(DIMS, {}, {"x": TensorSpec(f32, (Sym("s", divisible_by=8), 1)), "y": f32})
    x = torch.randn(20, 16)[:, :8]
    evaluate(ir, {**good(), "x": x}, None, SCALARS)
    with pytest.raises(ArgumentError, match="x has stride 2 along axis 1, declared is 1"):
        evaluate(ir, {**good(), "x": torch.randn(20, 16)[:, ::2]}, None, SCALARS)
    with pytest.raises(ArgumentError, match="dim s is 12, the kernel was traced for multiples of 8"):
        evaluate(ir, {**good(), "x": torch.randn(20, 12)[:, :8]}, None, SCALARS)
    with pytest.raises(ArgumentError, match="x has stride 16 along axis 0, declared is s = 24"):
        evaluate(ir, {**good(), "x": x}, {"s": 24}, SCALARS)


def test_compute_dtype_is_none_or_a_wide_float():
    with pytest.raises(ArgumentError, match=r"compute_dtype is torch\.int32"):
        Evaluator(IR, compute_dtype=torch.int32)


def test_an_evaluator_may_be_called_again_with_other_sizes():
    evaluator = Evaluator(IR)
    for t in (4, 64, 20):
        tensors = good(t)
        evaluator(tensors, None, SCALARS)
        assert torch.equal(tensors["y"], tensors["x"] * 2)


def test_inputs_may_require_gradients_and_the_process_keeps_its_own_precision():
    tensors = good()
    tensors["x"].requires_grad_()
    torch.set_float32_matmul_precision("high")
    try:
        evaluate(IR, tensors, None, SCALARS)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not tensors["y"].requires_grad


def test_dtype_names_translate_both_ways():
    for dtype in DTYPES.values():
        assert from_torch(to_torch(dtype)) == dtype
        assert to_torch(dtype).itemsize == dtype.bytes
    assert to_torch(bf16) is torch.bfloat16
    with pytest.raises(ArgumentError, match=r"no dtype for torch\.complex64"):
        from_torch(torch.complex64)
