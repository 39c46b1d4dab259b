"""unit_lower_inverse spelled out in ordinary ops is the inverse of I plus the strictly lower part, whatever lies above."""

from __future__ import annotations

import math

import pytest
import torch

from k3dsl.backends.torch import evaluate, from_torch
from k3dsl.ir.copying import copy_kernel
from k3dsl.ir.graph import walk
from k3dsl.ir.verifier import verify
from k3dsl.language import In, Out, kernel, loop, program_id, unit_lower_inverse, when
from k3dsl.passes.inverse import expand_inverses
from k3dsl.passes.simplify import simplify
from k3dsl.runtime.metrics import relative_rms

SIZES = (1, 2, 4, 8, 16, 32, 64)
METHODS = ("doubling", "substitution")


@kernel(grid=lambda d, c: (d.P,))
def inverses(d, c, a=In("P n n"), x=Out("P n n")):
    x[program_id(0)] = unit_lower_inverse(a[program_id(0)], method=c.method, precision=c.precision)


@kernel(grid=lambda d, c: (1,))
def batched(d, c, a=In("P n n"), x=Out("P n n")):
    x[:, :, :] = unit_lower_inverse(a[:, :, :], method=c.method, precision=c.precision)


def expanded(a: torch.Tensor, method: str, precision: str = "ieee", k=inverses) -> torch.Tensor:
    """Through the pass, evaluated op by op; the result starts as NaN."""
    dims = {"P": a.shape[0], "n": a.shape[-1]}
    dtype = from_torch(a.dtype)
    ir = k.trace(dims, {"method": method, "precision": precision}, {"a": dtype, "x": dtype})
    spelled = expand_inverses(copy_kernel(ir))
    verify(spelled)
    assert "unit_lower_inverse" not in {op.opcode for op in walk(spelled.body)}
    assert "unit_lower_inverse" in {op.opcode for op in walk(ir.body)}
    x = torch.full_like(a, math.nan)
    evaluate(simplify(spelled), {"a": a, "x": x})
    return x


def exact(a: torch.Tensor) -> torch.Tensor:
    """By torch.linalg in float64."""
    identity = torch.eye(a.shape[-1], dtype=torch.float64)
    return torch.linalg.inv(identity + a.double().tril(-1))


def random(*shape: int, scale: float = 0.5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", SIZES)
def test_it_is_the_inverse_for_every_size(n: int, method: str) -> None:
    a = random(3, n, n, scale=1 / math.sqrt(n))
    assert relative_rms(expanded(a, method), exact(a)) < 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [2, 16, 32])
def test_a_batch_of_matrices_is_inverted_at_once(n: int, method: str) -> None:
    a = random(4, n, n, scale=1 / math.sqrt(n))
    assert relative_rms(expanded(a, method, k=batched), exact(a)) < 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_what_lies_on_and_above_the_diagonal_is_never_looked_at(garbage: float, method: str) -> None:
    a = random(2, 32, 32, scale=0.2)
    poisoned = torch.where(torch.ones(32, 32, dtype=torch.bool).triu(), garbage, a)
    assert torch.equal(expanded(poisoned, method), expanded(a, method))


@pytest.mark.parametrize("method", METHODS)
def test_alike_keys_do_not_blow_it_up(method: str) -> None:
    # all ones below the diagonal: the inverse has 1 on it, -1 beside it and 0 elsewhere, while powers of A reach 1e17
    n = 64
    expected = torch.eye(n) - torch.diag(torch.ones(n - 1), -1)
    assert torch.equal(expanded(torch.ones(1, n, n), method)[0], expected)
    keys = torch.nn.functional.normalize(random(2, 1, n) + 0.05 * random(2, n, n), dim=-1)
    a = keys @ keys.mT
    assert relative_rms(expanded(a, method), exact(a)) < 1e-5


@pytest.mark.parametrize(("precision", "limit"), [("tf32", 1e-3), ("tf32x3", 1e-6), ("fp16", 1e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize("method", METHODS)
def test_products_inside_may_be_formed_in_less_than_fp32(method: str, precision: str, limit: float) -> None:
    a = random(3, 64, 64, scale=0.1)
    error = relative_rms(expanded(a, method, precision), exact(a))
    assert error < limit
    if precision != "tf32x3":
        assert error > limit / 100  # it did have an effect


def test_the_result_has_the_dtype_of_the_argument_and_is_rounded_once() -> None:
    a = random(2, 16, 16, scale=0.2).bfloat16()
    x = expanded(a, "doubling")
    assert x.dtype == torch.bfloat16
    assert torch.equal(x, expanded(a.float(), "doubling").bfloat16())


def test_inverses_inside_loops_and_conditions_are_spelled_out_too() -> None:
    @kernel(grid=lambda d, c: (1,))
    def nested(d, c, a=In("4 4"), x=Out("4 4")):
        first = unit_lower_inverse(a[:, :])

        @loop(3, init=first)
        def again(i, t):
            @when(i > 5)
            def never():
                x[:, :] = unit_lower_inverse(t) + first

            return unit_lower_inverse(t) + first * 0.0

        x[:, :] = again

    a = random(4, 4)
    dtype = from_torch(a.dtype)
    ir = expand_inverses(nested.trace({}, {}, {"a": dtype, "x": dtype}))
    verify(ir)
    x = torch.full_like(a, math.nan)
    evaluate(ir, {"a": a, "x": x})
    expected = a
    for _ in range(4):
        expected = exact(expected)
    assert relative_rms(x, expected) < 1e-6
