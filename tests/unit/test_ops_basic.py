"""The small ops on the CPU backend: right on edge shapes, clear about wrong arguments, and well behaved in torch."""

from __future__ import annotations

import math

import pytest
import torch
from op_examples import F16, F32, SMALL, Example, numbers

from k3dsl import ops
from k3dsl.errors import ArgumentError, LegalityError, UnknownNameError
from k3dsl.ops.matmul.space import MATMUL
from k3dsl.ops.registry import get_op, op_names
from k3dsl.ops.softmax.space import SOFTMAX
from k3dsl.runtime.dispatch import strides_of
from k3dsl.runtime.metrics import assert_close_rms
from k3dsl.runtime.op import forced

NAMES = ("matmul", "softmax", "rmsnorm", "attention", "segment_sum")


@pytest.mark.parametrize("example", SMALL, ids=[e.name for e in SMALL])
def test_an_op_agrees_with_float64_and_repeats_bitwise(example: Example, poisoned_memory: None) -> None:
    got, expected, limit = example.run("cpu", 0)
    for n, (actual, wanted) in enumerate(zip(got, expected, strict=True)):
        assert actual.is_contiguous()
        assert_close_rms(f"output {n}", actual, wanted, limit)
    again, _, _ = example.run("cpu", 0)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_registry_has_what_the_command_line_asks_of_an_op(name: str) -> None:
    assert name in op_names()
    op = get_op(name)
    options = op.resolve_options({})
    dims = op.resolve_dims(op.cpu_dims)
    small = {n: min(x, 200) if n in ("M", "R", "T") else x for n, x in dims.items() if isinstance(x, int)}
    assert None not in (op.inputs, op.call, op.reference, op.limits, op.peers)
    drawn = op.inputs(small, options, "cpu", 0)
    outputs, expected, limits = op.call(**drawn), op.reference(**drawn), op.limits(options)
    assert set(outputs) == set(expected) == set(limits)
    for key, limit in limits.items():
        assert_close_rms(key, outputs[key], expected[key], limit)
    for peer in op.peers().values():
        for key, actual in peer(**drawn).items():
            assert_close_rms(f"peer's {key}", actual, expected[key], 2e-2)


@pytest.mark.parametrize("name", NAMES)
def test_the_rules_and_seeds_of_an_op_are_points_of_its_space(name: str) -> None:
    op = get_op(name)
    for dtype in ("bf16", "f16", "f32"):
        for size in (1, 16, 100, 5000, 70000):
            dims = {d.name: size for d in op.dims if not d.static and d.name not in ("B", "S")}
            point = op.point(dims, {"dtype": dtype})
            assert point.reasons() == []
    for seed in op.seeds:
        assert op.point({}, seed).reasons() == []


def test_knobs_that_do_not_fit_are_refused_with_the_reason() -> None:
    with pytest.raises(LegalityError, match="one pass needs a block of at least N = 5000"):
        SOFTMAX.point({"N": 5000}, {"passes": 1, "block": 1024}).plan("torch")
    with pytest.raises(LegalityError, match="accumulators a thread"):
        MATMUL.point({}, {"block_m": 256, "block_n": 256, "num_warps": 4}).plan("torch")
    with pytest.raises(UnknownNameError, match="block_m"):
        MATMUL.point({}, {"block_x": 1})


# ---- one op at a time --------------------------------------------------------------------------------------------------


def test_matmul_takes_any_number_of_leading_dims_and_empty_ones() -> None:
    a, b = numbers(2, 3, 4, 5), numbers(5, 6)
    torch.testing.assert_close(ops.matmul(a, b), a @ b)
    torch.testing.assert_close(ops.matmul(a[0, 0, 0], b), a[0, 0, 0] @ b)
    assert ops.matmul(a[:0], b).shape == (0, 3, 4, 6)
    assert torch.equal(ops.matmul(numbers(2, 0), numbers(0, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("rows", [128, 129, 1024, 1025])
def test_matmul_writes_every_row_block_of_a_group_that_is_not_full(rows: int, poisoned_memory: None) -> None:
    a, b = numbers(rows, 8), numbers(8, 16)
    with forced(MATMUL, {"block_m": 16, "block_n": 16, "block_k": 16, "group": 16}, {}):
        torch.testing.assert_close(ops.matmul(a, b), a @ b)


def test_a_stride_of_one_is_compiled_in_on_whichever_axis_it_is() -> None:
    facts, values = strides_of({"b": numbers(6, 10).T, "c": numbers(4, 6)[:, ::2]})
    assert facts["b"][0] == 1
    assert str(facts["b"][1]) == "b_stride1"
    assert [str(s) for s in facts["c"]] == ["c_stride0", "c_stride1"]
    assert values == {"b_stride1": 10, "c_stride0": 6, "c_stride1": 2}


def test_an_axis_of_one_gets_a_stride_that_a_descriptor_takes_and_the_code_of_any_other() -> None:
    """A view of one sequence, cut out of a joint projection: TMA refuses a stride of 0, or one of 4 bytes."""
    alike = [strides_of({"v": numbers(1, 5, 48)[..., 32:].as_strided((1, 5, 16), (n, 48, 1))}) for n in (0, 2, 240)]
    assert alike[0] == alike[1] == alike[2]
    assert alike[0][1] == {"v_stride0": 16, "v_stride1": 48}


@pytest.mark.parametrize("passes", [1, 2])
def test_softmax_ignores_what_is_minus_infinity_and_keeps_nan_to_its_row(passes: int) -> None:
    x = torch.full((5, 64), -math.inf)
    x[0, 60] = 3.0  # every block before it is -inf
    x[1, ::2] = 1.0
    x[3] = numbers(64)
    x[3, 5] = math.nan
    x[4] = numbers(64)
    x[4, 7] = math.inf
    with forced(SOFTMAX, {"passes": passes, "block": 64 if passes == 1 else 16}, {}):
        torch.testing.assert_close(ops.softmax(x), torch.softmax(x, -1), equal_nan=True)


@pytest.mark.parametrize("passes", [1, 2])
def test_softmax_of_huge_numbers_stays_finite(passes: int) -> None:
    x = torch.tensor([[3e38, 3e38, -3e38, 0.0], [-3e38, -3e38, -3e38, -3.1e38]])
    with forced(SOFTMAX, {"passes": passes, "block": 16}, {}):
        torch.testing.assert_close(ops.softmax(x), torch.softmax(x.double(), -1).float())


@pytest.mark.parametrize("rows", [1, 4])
def test_softmax_in_two_passes_equals_softmax_in_one(rows: int, poisoned_memory: None) -> None:
    x = numbers(7, 500)
    with forced(SOFTMAX, {"passes": 2, "block": 32, "rows": rows}, {}):
        torch.testing.assert_close(ops.softmax(x), torch.softmax(x, -1))


def test_softmax_of_more_dims_and_another_result_dtype() -> None:
    x = numbers(2, 3, 10)
    torch.testing.assert_close(ops.softmax(x, dim=2), torch.softmax(x, 2))
    assert ops.softmax(x.bfloat16(), dtype=F32).dtype == F32
    assert ops.softmax(x[:, :0]).shape == (2, 0, 10)


def test_no_columns_in_three_dims_are_fine() -> None:
    x = numbers(2, 3, 0)
    assert ops.softmax(x).shape == (2, 3, 0)
    assert (ops.matmul(x, numbers(0, 4)) == torch.zeros(2, 3, 4)).all()


def test_rmsnorm_rounds_before_the_weight_as_llama_does() -> None:
    x, w = numbers(4, 100, dtype=torch.bfloat16), numbers(100, dtype=torch.bfloat16, seed=1)
    xf = x.float()
    rounded = (xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    got = ops.rmsnorm(x, w)
    same = (got == rounded * w).float().mean()
    assert same > 0.99  # rsqrt may differ in the last bit
    assert (ops.rmsnorm(torch.zeros(2, 8), torch.ones(8)) == 0).all()
    assert ops.rmsnorm(x.view(2, 2, 100), w).shape == (2, 2, 100)
    assert ops.rmsnorm(x[:0], w).shape == (0, 100)


def test_attention_never_looks_at_later_keys_to_the_last_bit() -> None:
    q, k, v = (numbers(1, 150, 2, 64, dtype=torch.bfloat16, seed=n) for n in range(3))
    before = ops.attention(q, k, v)
    for t in (1, 63, 64, 100, 149):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, t:] = 100 * x[:, t:].flip(1)
        assert torch.equal(ops.attention(*changed)[:, :t], before[:, :t])


def test_attention_of_scores_far_apart_picks_the_largest_and_lse_says_how_large() -> None:
    q, k = torch.zeros(1, 3, 1, 16), torch.zeros(1, 3, 1, 16)
    q[..., 0] = 1.0
    k[0, :, 0, 0] = torch.tensor([-1e4, 2e4, 1e4])
    v = numbers(1, 3, 1, 16)
    o, lse = ops.attention(q, k, v, scale=1.0, return_lse=True)
    torch.testing.assert_close(o, v[:, [0, 1, 1]])
    torch.testing.assert_close(lse, torch.tensor([[[-1e4, 2e4, 2e4]]]))


def test_attention_without_keys_or_queries() -> None:
    q, k = numbers(1, 2, 2, 16), numbers(1, 0, 1, 16)
    o, lse = ops.attention(q, k, k, causal=False, return_lse=True)
    assert (o == 0).all()
    assert (lse == -math.inf).all()
    assert ops.attention(q[:, :0], k, k).shape == (1, 0, 2, 16)


def test_segment_sum_of_empty_segments_is_zero_and_rows_outside_are_left_out(poisoned_memory: None) -> None:
    values = numbers(10, 5)
    got = ops.segment_sum(values, torch.tensor([0, 0, 4, 4, 10, 10]))
    expected = torch.stack([torch.zeros(5), values[:4].sum(0), torch.zeros(5), values[4:].sum(0), torch.zeros(5)])
    torch.testing.assert_close(got, expected)
    assert (ops.segment_sum(values[:0], torch.tensor([0, 0, 0])) == 0).all()
    assert ops.segment_sum(values.half(), torch.tensor([0, 10]), out_dtype=F32).dtype == F32


# ---- wrong arguments ---------------------------------------------------------------------------------------------------

X, W = torch.zeros(4, 8), torch.ones(8)
Q, K1 = torch.zeros(2, 5, 4, 32), torch.zeros(2, 5, 1, 32)
CU = torch.tensor([0, 2, 4])
WRONG = [
    (lambda: ops.matmul(X, X), "b", "K = 4 rows, a has 8 columns", "b.T"),
    (lambda: ops.matmul(X, X.T.half()), "b", "float16, a is float32", "b.to(a.dtype)"),
    (lambda: ops.matmul(X, torch.zeros(2, 8, 3)), "b", "needs 2 dims [K, N]", "one matrix"),
    (lambda: ops.matmul(X.long(), X.T), "a", "int64, needs bfloat16, float16 or float32", "bfloat16"),
    (lambda: ops.matmul([1.0], X.T), "a", "list, needs a tensor", "torch.Tensor"),
    (lambda: ops.matmul(X, X.T, precision="tf23"), "precision", "'tf23'", "tf32"),
    (lambda: ops.matmul(X, X.T, out_dtype=torch.int8), "out_dtype", "int8", "bfloat16"),
    (lambda: ops.softmax(X, dim=0), "dim", "rows along dim 1", "movedim"),
    (lambda: ops.softmax(X.double()), "x", "float64", "bfloat16"),
    (lambda: ops.softmax(torch.zeros(())), "x", "scalar", "vector"),
    (lambda: ops.rmsnorm(X, W[:3]), "weight", "needs [D] = [8]", "a channel"),
    (lambda: ops.rmsnorm(X, W.half()), "weight", "float16, x is float32", "x.dtype"),
    (lambda: ops.rmsnorm(X, W, eps=-1.0), "eps", "-1.0", "at least 0"),
    (lambda: ops.rmsnorm(torch.zeros(1, 70000), torch.ones(70000)), "x", "D from 1 to 65536", "reshape"),
    (lambda: ops.attention(Q[0], K1, K1), "q", "needs 4 dims", "[B, T, H, D]"),
    (lambda: ops.attention(Q, K1[..., :16], K1), "k", "D = 32", "as wide as q"),
    (lambda: ops.attention(Q, K1, K1[:, :4]), "v", "needs [B, S, HK, V]", "one value a key"),
    (lambda: ops.attention(Q, torch.zeros(2, 5, 3, 32), torch.zeros(2, 5, 3, 32)), "k", "HK = 3", "heads"),
    (lambda: ops.attention(Q[..., :20], K1[..., :20], K1), "q", "multiple of 16", "zeros"),
    (lambda: ops.attention(Q, K1[:, :3], K1[:, :3]), "k", "S = 3 keys for T = 5", "causal=False"),
    (lambda: ops.attention(Q, K1, K1, scale=0.0), "scale", "0.0", "positive"),
    (lambda: ops.attention(Q.transpose(2, 3), K1, K1), "q", "last dim must be contiguous", "contiguous()"),
    (lambda: ops.segment_sum(X, torch.tensor([0, 5])), "cu_seqlens", "ends at 5", "end at T"),
    (lambda: ops.segment_sum(X, torch.tensor([1, 4])), "cu_seqlens", "starts at 1", "token 0"),
    (lambda: ops.segment_sum(X, torch.tensor([0, 3, 2, 4])), "cu_seqlens", "goes down from 3 to 2", "not lengths"),
    (lambda: ops.segment_sum(X, torch.tensor([0.0, 4.0])), "cu_seqlens", "float32, needs int32 or int64", "int32"),
    (lambda: ops.segment_sum(X[0], CU), "values", "needs 2 dims [T, D]", "reshape"),
    (lambda: ops.segment_sum(X, CU.to("meta")), "cu_seqlens", "is on meta, values is on cpu", "'cpu'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "argument", "reason", "remedy"), WRONG)
def test_a_wrong_argument_is_named_with_the_reason_and_the_remedy(call, argument, reason, remedy) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.message.startswith(f"{argument}: ")
    assert reason in caught.value.message
    assert remedy in (caught.value.fix or "")


# ---- torch -------------------------------------------------------------------------------------------------------------

Y, CU_Y = numbers(6, 8), torch.tensor([0, 2, 6])
A4 = numbers(1, 6, 2, 16)
OVERLOADS = {
    "matmul": (torch.ops.k3dsl.matmul.default, (Y, numbers(8, 3), "ieee", F32)),
    "softmax": (torch.ops.k3dsl.softmax.default, (Y, F16)),
    "rmsnorm": (torch.ops.k3dsl.rmsnorm.default, (Y, W, 1e-6)),
    "attention": (torch.ops.k3dsl.attention.default, (A4, A4, A4, True, None, True, "ieee")),
    "segment_sum": (torch.ops.k3dsl.segment_sum.default, (Y, CU_Y, F32)),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_fake_implementation_gives_the_real_ones_shapes_and_dtypes(name: str) -> None:
    overload, arguments = OVERLOADS[name]
    torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_faketensor"))


def reference_grads(name: str, *inputs: torch.Tensor) -> torch.Tensor:
    """The op in plain torch, for autograd to differentiate."""
    if name == "matmul":
        return inputs[0] @ inputs[1]
    if name == "softmax":
        return torch.softmax(inputs[0], -1)
    if name == "rmsnorm":
        x, w = inputs
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w
    if name == "attention":
        q, k, v = (x.transpose(1, 2) for x in inputs)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return torch.stack([inputs[0][:2].sum(0), inputs[0][2:].sum(0)])


GRADS = {
    "matmul": (lambda a, b: ops.matmul(a, b), (Y, numbers(8, 3, seed=4))),
    "softmax": (lambda x: ops.softmax(x), (Y,)),
    "rmsnorm": (lambda x, w: ops.rmsnorm(x, w), (Y, numbers(8, seed=5))),
    "attention": (
        lambda q, k, v: ops.attention(q, k, v),
        (A4, numbers(1, 6, 2, 16, seed=6), numbers(1, 6, 2, 16, seed=7)),
    ),
    "segment_sum": (lambda x: ops.segment_sum(x, CU_Y), (Y,)),
}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_plain_torch(name: str) -> None:
    function, inputs = GRADS[name]
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    out, expected = function(*ours), reference_grads(name, *theirs)
    weight = numbers(*out.shape, seed=9)
    got = torch.autograd.grad((out * weight).sum(), ours)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), theirs)
    for n, (g, w) in enumerate(zip(got, wanted, strict=True)):
        assert_close_rms(f"gradient {n}", g, w, 1e-5)


def test_attention_passes_the_gradient_of_lse_on() -> None:
    q = A4.clone().requires_grad_()
    _, lse = ops.attention(q, A4, A4, return_lse=True)
    (got,) = torch.autograd.grad(lse.sum(), q)
    p = A4.double().requires_grad_()
    scores = torch.einsum("bthd,bshd->bhts", p, A4.double()) / 4.0
    scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf)
    (wanted,) = torch.autograd.grad(torch.logsumexp(scores, -1).sum(), p)
    assert_close_rms("gradient", got, wanted, 1e-5)


def test_ops_run_inside_torch_compile() -> None:
    def block(x: torch.Tensor, w: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.softmax(ops.matmul(ops.rmsnorm(x, weight), w)) + 1.0

    x, w = numbers(6, 8), numbers(8, 5)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, w, W), block(x, w, W))


# ---- dims that no code is made for -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", op_names())
def test_a_dim_that_is_compiled_in_is_at_least_1_and_none_is_beyond_int32(name: str) -> None:
    op = get_op(name)
    for dim in op.dims:
        for value in (-1, 2**31, 1.5, True, *([0] if dim.least else [])):
            with pytest.raises(
                ArgumentError, match=f"{name}: dim {dim.name}, .* must be an integer from {dim.least} to"
            ):
                op.point({dim.name: value}, {})
        if not dim.least:  # nothing to do, or as many as another dim
            op.point({dim.name: 0}, {}).reasons()


@pytest.mark.parametrize(
    "name", ["kda.forward", "kda.decode", "delta_rule", "linear_attention.decode", "attention", "attention.decode"]
)
def test_heads_that_do_not_go_together_are_refused_before_anything_is_compiled(name: str) -> None:
    many = "query" if name.startswith("attention") else "value"
    for H, HK in ((6, 4), (4, 8)):
        with pytest.raises(LegalityError, match=f"H = {H} {many} heads are no multiple of HK = {HK}"):
            get_op(name).point({"H": H, "HK": HK}, {}).check()
    get_op(name).point({"H": 8, "HK": 4}, {}).check()
