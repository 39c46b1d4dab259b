"""k3dsl.compile and the kernel that it returns: what a call checks, each time, and how it says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import k3dsl
from k3dsl.errors import ArgumentError, LaunchError, LegalityError, UnknownNameError
from k3dsl.language import In, Out, Scalar, Sym, TensorSpec, bf16, cdiv, dot, f32, i32, kernel, program_id, span, zeros
from k3dsl.runtime.executable import BoundLaunch
from k3dsl.targets import get_target


@kernel(grid=lambda d, c: (cdiv(d.T, 16),))
def scale(d, c, x=In("T D", f32), factor=Scalar(f32), o=Out("T D", f32)):
    rows = span(program_id(0) * 16, 16, end=d.T)
    o[rows] = x[rows] * factor


def compiled(target: str = "cpu", **dims):
    return k3dsl.compile(scale, dims={"T": Sym("T", divisible_by=2, min=2, max=64), "D": 8, **dims}, target=target)


def tensors(t: int = 4, d: int = 8):
    return {"x": torch.ones(t, d), "o": torch.empty(t, d), "factor": 3.0}


def test_a_call_reads_dims_off_the_shapes_and_takes_scalars():
    run = compiled()
    for t in (4, 6):
        given = tensors(t)
        run(**given)
        assert torch.equal(given["o"], torch.full((t, 8), 3.0))


WRONG = [
    ({"x": None}, "tensor 'x' is missing", "pass x=..."),
    ({"x": torch.ones(4, 8).double()}, "x is torch.float64, compiled for torch.float32", r"x.to\(torch.float32\)"),
    ({"x": torch.ones(4)}, "x has 1 axes, compiled for 2", "reshape it"),
    ({"x": torch.ones(8, 4).T}, "x has strides", r"x.contiguous\(\)"),
    ({"o": torch.empty(6, 8)}, r"o has shape \[6, 8\], needs \[4, 8\]", r"declared as \[T, 8\]"),
    ({"x": torch.ones(4, 9), "o": torch.empty(4, 9)}, r"x has shape \[4, 9\], needs \[4, 8\]", "declared as"),
    ({"factor": "3"}, "scalar factor is '3', needs a float", "pass a float"),
    ({"factor": torch.tensor(3.0)}, "scalar factor is a tensor, needs a float", r"factor.item\(\)"),
    ({"factor": None}, "needs factor", "it takes x, o, factor"),
    ({"y": 1}, "does not take y", "it takes x, o, factor"),
    ({"x": torch.ones(5, 8), "o": torch.empty(5, 8)}, "T = 5 breaks a fact", "a multiple of 2 from 2 to 64"),
    ({"x": torch.ones(66, 8), "o": torch.empty(66, 8)}, "T = 66 breaks a fact", "a multiple of 2 from 2 to 64"),
    ({"x": torch.ones(4, 8, device="meta")}, "is on cpu, x is on meta", "one device"),
]


@pytest.mark.parametrize(("change", "reason", "fix"), WRONG)
def test_a_wrong_call_names_the_argument_the_reason_and_the_remedy(change, reason, fix):
    run = compiled()
    run(**tensors())  # what an earlier call passed does not excuse a later one
    given = {n: v for n, v in {**tensors(), **change}.items() if v is not None}
    with pytest.raises(ArgumentError, match=reason) as error:
        run(**given)
    assert error.match(fix)


def test_strides_that_were_compiled_in_are_checked_at_each_call():
    spec = TensorSpec(f32, (16, 1))
    run = k3dsl.compile(scale, dims={"T": 4, "D": 8}, tensors={"x": spec}, target="cpu")
    wide = torch.arange(64.0).reshape(4, 16)
    o = torch.empty(4, 8)
    run(x=wide[:, :8], o=o, factor=1.0)
    assert torch.equal(o, wide[:, :8])
    with pytest.raises(ArgumentError, match=r"x has strides \[8, 1\], needs \[16, 1\]"):
        run(x=torch.ones(4, 8), o=o, factor=1.0)


def test_generated_code_refuses_cpu_tensors():
    with pytest.raises(ArgumentError, match="compiled for sm_90a, its tensors are on the CPU"):
        compiled("sm_90a")(**tensors())


@pytest.mark.gpu
def test_generated_code_refuses_tensors_that_are_not_aligned():
    given = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in tensors().items()}
    shifted = torch.ones(4 * 8 + 1, device="cuda")[1:].view(4, 8)
    with pytest.raises(ArgumentError, match="x does not start at a multiple of 16 bytes"):
        k3dsl.compile(scale, dims={"T": 4, "D": 8})(**{**given, "x": shifted})


def test_unknown_names_have_near_misses():
    with pytest.raises(UnknownNameError, match="did you mean x"):
        k3dsl.compile(scale, dims={"T": 4, "D": 8}, tensors={"xx": f32}, target="cpu")
    with pytest.raises(ArgumentError, match="is no dtype"):
        k3dsl.compile(scale, dims={"T": 4, "D": 8}, tensors={"x": "float"}, target="cpu")
    with pytest.raises(UnknownNameError, match="sm_90a"):
        k3dsl.compile(scale, dims={"T": 4, "D": 8}, target="sm_9")


@kernel(grid=lambda d, c: (1, d.T))
def one_program_a_row(d, c, x=In("T D", f32), o=Out("T D", f32)):
    o[program_id(1)] = x[program_id(1)]


def test_a_grid_that_no_gpu_takes_is_refused_before_the_launch(monkeypatch):
    """Offsets are computed in 32 bits on the strength of this limit."""
    plan = k3dsl.compile(one_program_a_row, dims={"T": Sym("T"), "D": 8}, target="sm_90a").launch
    monkeypatch.setattr("k3dsl.runtime.backends.load", lambda artifact, device: None)
    bound = BoundLaunch(plan, get_target("sm_90a"), torch.device("cpu"))
    tall = torch.empty(65536, 8)
    with pytest.raises(LaunchError, match="1 x 65536 x 1 programs"):
        bound.run({"x": tall, "o": tall}, {"T": 65536})


@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_a_grid_that_no_gpu_takes_is_refused_when_its_size_is_compiled_in(backend):
    with pytest.raises(LegalityError, match="grid axis 1 has 65536 programs, a GPU takes 65535") as error:
        k3dsl.compile(one_program_a_row, dims={"T": 65536, "D": 8}, target="sm_90a", backend=backend)
    assert error.match(r"test_compile.py:\d+")
    k3dsl.compile(one_program_a_row, dims={"T": 65536, "D": 8}, target="cpu")


@kernel(grid=lambda d, c: (1,))
def product(d, c, a=In("M 16", bf16), b=In("16 N", bf16), o=Out("M N", f32)):
    o[:] = dot(a[:], b[:])


@pytest.mark.parametrize(("m", "n", "threads"), [(128, 64, 128), (32, 16, 128), (16, 16, 64), (16, 8, 32)])
def test_threads_that_nobody_gave_let_products_become_matrix_instructions(m, n, threads):
    dims = {"M": m, "N": n}
    found = k3dsl.compile(product, dims=dims, target="sm_80", backend="tilelang")
    assert found.launch.schedule.threads == threads
    given = k3dsl.compile(product, dims=dims, target="sm_80", backend="tilelang", schedule={"threads": 256})
    assert given.launch.schedule.threads == 256


@kernel(grid=lambda d, c: (1,))
def add_number(d, c, n=Scalar(i32), o=Out("4", i32)):
    o[:] = zeros((4,), i32) + n


def test_an_integer_scalar_takes_integers_that_its_dtype_holds():
    run, out = k3dsl.compile(add_number, dims={}, target="cpu"), torch.empty(4, dtype=torch.int32)
    for good in (7, -(2**31), np.int64(5)):
        run(n=good, o=out)
        assert out.tolist() == [good] * 4
    run, out = compiled(), tensors()
    for bad in (10**400, 1e300, -1e39):
        with pytest.raises(ArgumentError, match=r"scalar factor is .*, needs a float of up to 3.4e"):
            run(**{**out, "factor": bad})
    run(**{**out, "factor": float("inf")})
    assert out["o"].isinf().all()
    run, out = k3dsl.compile(add_number, dims={}, target="cpu"), torch.empty(4, dtype=torch.int32)
    for bad in (2.7, 2**31, True):
        with pytest.raises(ArgumentError, match=f"scalar n is {bad}, needs an int from -2147483648 to 2147483647"):
            run(n=bad, o=out)


@pytest.mark.parametrize("value", [7.0, "7", True, -1, None])
def test_a_dim_that_is_no_number_is_named(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"dims\['D'\] is"):
        compiled(D=value)


def test_a_function_that_is_no_kernel_and_an_array_that_is_no_tensor_are_named() -> None:
    with pytest.raises(ArgumentError, match="is no kernel"):
        k3dsl.compile(lambda d, c: None, dims={}, target="cpu")  # type: ignore[arg-type]
    run = compiled()
    for x in ([1.0, 2.0], np.zeros((4, 8), dtype=np.float32)):
        with pytest.raises(ArgumentError, match=r"x is a .*, no tensor"):
            run(**{**tensors(), "x": x})
