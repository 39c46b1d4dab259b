"""What the Triton backend refuses, each with a reason that says where and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from triton_text import printed

from k3dsl.backends.base import Reason, all_of
from k3dsl.errors import LegalityError
from k3dsl.language import (
    In,
    InOut,
    Kernel,
    Out,
    Sym,
    bf16,
    cdiv,
    dot,
    f8e4m3,
    f32,
    i8,
    i32,
    kernel,
    loop,
    program_id,
    reduce,
    span,
    unit_lower_inverse,
    zeros,
)


@kernel(grid=lambda d, c: (cdiv(d.T, 64), d.H))
def copy_heads(d, c, x=In("T H 64", bf16), o=Out("T H 64", bf16)):
    rows, head = span(program_id(0) * 64, 64, end=d.T), program_id(1)
    o[rows, head] = x[rows, head]


@pytest.mark.parametrize(
    ("dims", "names", "target", "reason"),
    [
        ({"T": 64, "H": 4}, ("y",), "sm_90a", "descriptors name 'y'"),
        ({"T": 64, "H": 4}, ("x",), "gfx942", "NVIDIA targets only"),
    ],
)
def test_descriptors_that_cannot_be_are_refused(dims, names, target, reason):
    with pytest.raises(LegalityError, match=reason):
        printed(copy_heads, dims, descriptors=names, target=target)


def test_a_descriptor_store_that_would_write_past_its_span_is_refused():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, n=In("1", i32), x=In("T 64", bf16), o=Out("T 64", bf16)):
        o[span(0, 64, end=n[0]), :] = x[span(0, 64), :]

    with pytest.raises(LegalityError, match="clips only at the tensor's end"):
        printed(k, {"T": 64}, descriptors=("o",))


@kernel(grid=lambda d, c: (1,))
def labelled(d, c, x=In("T 16", f32), o=Out("16", f32)):
    @loop(d.T, init=zeros((16,)), label="rows")
    def first(i, acc):
        return acc + x[i]

    @loop(d.T, init=first)
    def second(i, acc):
        return acc - x[i]

    o[:] = second


def test_a_label_that_the_kernel_does_not_have_is_refused_with_those_it_has():
    with pytest.raises(LegalityError, match=r"'row'; labels of labelled: rows"):
        printed(labelled, {"T": Sym("T")}, stages={"row": 2})


def test_a_parameter_may_not_have_a_name_that_generated_code_needs():
    @kernel(grid=lambda d, c: (1,))
    def bad(d, c, tl=In("16", f32), o=Out("16", f32)):
        o[:] = tl[:]

    with pytest.raises(LegalityError, match="'tl' means something else in generated Triton; rename it"):
        printed(bad)

    @kernel(grid=lambda d, c: (1,))
    def twice(d, c, n=In("n", f32), o=Out("n", f32)):
        o[span(0, 16, end=d.n)] = n[span(0, 16, end=d.n)]

    with pytest.raises(LegalityError, match="'n' is the name of two parameters or dims"):
        printed(twice, {"n": Sym("n")})


# ---- what the backend cannot do ----------------------------------------------------------------------------------------


def refused(k: Kernel, target: str = "sm_90a", tensors: Mapping[str, Any] | None = None, **schedule: Any) -> str:
    with pytest.raises(LegalityError) as caught:
        printed(k, tensors=tensors, target=target, **schedule)
    return str(caught.value)


def test_each_limit_of_the_backend_is_a_reason_with_the_users_line():
    @kernel(grid=lambda d, c: (1,))
    def odd_combine(d, c, x=In("24", f32), o=Out("1", f32)):
        o[0] = reduce((x[:],), 0, lambda a, b: a + b)[0]

    @kernel(grid=lambda d, c: (1,))
    def regrouped(d, c, x=In("6 4", f32), o=Out("24", f32)):
        o[:] = x[:, :].reshape(24)

    @kernel(grid=lambda d, c: (1,))
    def tiny_product(d, c, x=In("16 4", f32), o=Out("16 16", f32)):
        o[:, :] = dot(x[:, :], x[:, :].T)

    @kernel(grid=lambda d, c: (1,))
    def tiny_inverse(d, c, x=In("8 8", f32), o=Out("8 8", f32)):
        o[:, :] = unit_lower_inverse(x[:, :])

    @kernel(grid=lambda d, c: (1,))
    def bytes_added(d, c, x=In("16", i8), o=InOut("16", i8)):
        o.atomic_add(slice(None), value=x[:])

    @kernel(grid=lambda d, c: (1,))
    def huge(d, c, x=In("2048 1024", f32), o=Out("2048 1024", f32)):
        o[:, :] = x[:, :]

    @kernel(grid=lambda d, c: (1,))
    def thrice(d, c, x=In("16 16", f32), o=Out("16 16", f32)):
        o[:, :] = dot(x[:, :], x[:, :], precision="tf32x3")

    @kernel(grid=lambda d, c: (1,))
    def eight(d, c, x=In("16", f8e4m3), o=Out("16", f32)):
        o[:] = x[:].to(f32)

    where_it_is = "tests/unit/test_triton_legality.py:"
    for k, reason in (
        (odd_combine, "over 24 elements"),
        (regrouped, "cannot regroup"),
        (tiny_product, "inner extent of at least 16, got 4"),
        (tiny_inverse, "products of fewer than 16"),
        (bytes_added, "no atomic add of i8"),
        (huge, "over 1048576 elements"),
    ):
        message = refused(k)
        assert reason in message
        assert where_it_is in message
    assert "no tf32x3" in refused(thrice, target="gfx942")
    assert "sm_80 has no f8e4m3" in refused(eight, target="sm_80")
    assert "exceed 1024 threads" in refused(eight, target="gfx942", num_warps=32)


def test_a_refusal_says_each_reason_once_and_a_few_of_many() -> None:
    same = [Reason("tile", "is too large", f"k.py:{n}") for n in range(9)]
    assert all_of(same) == "k.py:0: is too large"
    many = [Reason("tile", f"number {n}") for n in range(7)]
    assert all_of(many) == "number 0; number 1; number 2; number 3; and 3 more"
