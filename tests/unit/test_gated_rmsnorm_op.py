"""k3dsl.ops.gated_rmsnorm on the CPU backend: right on every family, rounded once, and well behaved as a torch function."""

from __future__ import annotations

import pytest
import torch
from op_examples import BF16, numbers

from k3dsl import ops
from k3dsl.errors import ArgumentError, LegalityError
from k3dsl.ops.gated_rmsnorm.reference import gated_rmsnorm as reference
from k3dsl.ops.gated_rmsnorm.space import GATED_RMSNORM
from k3dsl.runtime.judge import cases_of, judge
from k3dsl.runtime.metrics import assert_close_rms
from k3dsl.runtime.op import Case, forced

CASES = cases_of(GATED_RMSNORM)


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_every_case_meets_its_limit_and_repeats_bitwise(case: Case) -> None:
    (verdict,) = judge(GATED_RMSNORM, [case])
    assert verdict.problem is None


@pytest.mark.parametrize("knobs", [{"tokens": 1, "heads": 1}, {"tokens": 4, "heads": 1}, {"tokens": 2, "heads": 4}])
def test_every_split_of_tokens_and_heads_gives_right_numbers(knobs, poisoned_memory: None) -> None:
    x, gate, w = numbers(5, 6, 48), numbers(5, 6, 48, seed=1), numbers(48, seed=2)
    with forced(GATED_RMSNORM, knobs, {}):
        assert_close_rms("y", ops.gated_rmsnorm(x, gate, w), reference(x, gate, w), 2e-6)


def test_numbers_worked_out_by_hand() -> None:
    x, w = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 1.0])
    gate = torch.tensor([[0.0, 1.0986123]])  # sigmoids 1/2 and 3/4
    rms = (12.5) ** 0.5
    y = ops.gated_rmsnorm(x, gate, w, eps=0.0)
    torch.testing.assert_close(y, torch.tensor([[3 / rms, 4 / rms * 0.75]]))
    y = ops.gated_rmsnorm(x, gate, w, eps=0.0, activation="silu")
    torch.testing.assert_close(y, torch.tensor([[0.0, 4 / rms * 0.75 * 1.0986123]]))
    assert (ops.gated_rmsnorm(torch.zeros(2, 3, 8), torch.ones(2, 3, 8), torch.ones(8)) == 0).all()


def test_the_result_is_rounded_once() -> None:
    x, gate, w = numbers(40, 4, 128, dtype=BF16), numbers(40, 4, 128, dtype=BF16, seed=1), numbers(128, seed=2)
    y = ops.gated_rmsnorm(x, gate, w)
    assert (y == reference(x, gate, w).to(BF16)).float().mean() > 0.999  # fp32 may round a tie the other way


def test_a_poisoned_head_stays_alone() -> None:
    x, gate, w = numbers(3, 4, 64), numbers(3, 4, 64, seed=1), numbers(64, seed=2)
    clean = ops.gated_rmsnorm(x, gate, w)
    x[1, 2] = torch.nan
    y = ops.gated_rmsnorm(x, gate, w)
    assert y[1, 2].isnan().all()
    y[1, 2] = clean[1, 2]
    assert torch.equal(y, clean)


def test_leading_dims_slices_and_empty_tensors() -> None:
    wide, gate, w = numbers(2, 7, 2 * 4 * 64), numbers(2, 7, 4, 64, seed=1), numbers(64, seed=2)
    x = wide[..., 4 * 64 :].unflatten(-1, (4, 64))
    y = ops.gated_rmsnorm(x, gate, w)
    assert y.shape == x.shape
    assert torch.equal(y, ops.gated_rmsnorm(x.contiguous(), gate, w))
    assert torch.equal(y[1, 3], ops.gated_rmsnorm(x[1, 3], gate[1, 3], w))
    turned = gate.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(y, ops.gated_rmsnorm(x, turned, w))
    assert ops.gated_rmsnorm(x[:0], gate[:0], w).shape == (0, 7, 4, 64)


def test_rules_are_points_of_the_space_and_large_tiles_are_refused() -> None:
    for width in (1, 64, 96, 128, 4096, 16384):
        for heads in (1, 3, 12, 96):
            assert GATED_RMSNORM.point({"N": 5, "H": heads, "D": width}, {}).reasons() == []
    with pytest.raises(LegalityError, match="registers of 1 warps"):
        GATED_RMSNORM.point({}, {"tokens": 16, "heads": 32, "num_warps": 1}).plan("torch")


X, W = torch.zeros(2, 3, 8), torch.ones(8)
WRONG = [
    (lambda: ops.gated_rmsnorm(W, W, W), "x", "needs [..., H, D]", "unflatten"),
    (lambda: ops.gated_rmsnorm(X, X[:1], W), "gate", "needs x's [2, 3, 8]", "expand_as"),
    (lambda: ops.gated_rmsnorm(X, X.half(), W), "gate", "float16, x is float32", "x.dtype"),
    (lambda: ops.gated_rmsnorm(X, X, W[:3]), "weight", "needs [D] = [8]", "a channel"),
    (lambda: ops.gated_rmsnorm(X, X, W.half()), "weight", "float16", "fp32"),
    (lambda: ops.gated_rmsnorm(X, X, W, eps=-1.0), "eps", "-1.0", "at least 0"),
    (lambda: ops.gated_rmsnorm(X, X, W, activation="tanh"), "activation", "'tanh'", "sigmoid"),
    (lambda: ops.gated_rmsnorm(X.long(), X, W), "x", "int64", "bfloat16"),
]


@pytest.mark.parametrize(("call", "argument", "reason", "remedy"), WRONG)
def test_a_wrong_argument_is_named_with_the_reason_and_the_remedy(call, argument, reason, remedy) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.message.startswith(f"{argument}: ")
    assert reason in caught.value.message
    assert remedy in (caught.value.fix or "")


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_gradients_are_those_of_plain_torch(activation: str) -> None:
    inputs = [numbers(3, 2, 8), numbers(3, 2, 8, seed=1), numbers(8, seed=2)]
    ours = [t.clone().requires_grad_() for t in inputs]
    theirs = [t.double().requires_grad_() for t in inputs]
    y = ops.gated_rmsnorm(*ours, 1e-3, activation)
    x, gate, w = theirs
    act = torch.sigmoid if activation == "sigmoid" else torch.nn.functional.silu
    expected = torch.nn.functional.rms_norm(x, (8,), w, 1e-3) * act(gate)
    a = numbers(*y.shape, seed=3)
    got = torch.autograd.grad((y * a).sum(), ours)
    wanted = torch.autograd.grad((expected * a).sum(), theirs)
    for name, g, e in zip(("x", "gate", "weight"), got, wanted, strict=True):
        assert_close_rms(f"gradient of {name}", g, e, 1e-5)


def test_the_registration_holds_under_opcheck_and_torch_compile() -> None:
    x, gate, w = numbers(3, 2, 64), numbers(3, 2, 64, seed=1), numbers(64, seed=2)
    overload = torch.ops.k3dsl.gated_rmsnorm.default
    torch.library.opcheck(overload, (x, gate, w, 1e-5, "silu"), test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda *t: ops.gated_rmsnorm(*t) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, gate, w), ops.gated_rmsnorm(x, gate, w) + 1)
