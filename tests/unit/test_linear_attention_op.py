"""Linear attention and the delta rules on the CPU backend: right on every family, and kin to KDA where they meet it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from k3dsl import ops
from k3dsl.errors import ArgumentError
from k3dsl.ir.types import bf16, f16
from k3dsl.ops.kda.inputs import Case, make_decode
from k3dsl.ops.linear_attention import judge
from k3dsl.ops.linear_attention.chunked import chunked
from k3dsl.ops.linear_attention.reference import recurrence
from k3dsl.ops.linear_attention.space import DECODE, FORWARD
from k3dsl.ops.registry import get_op
from k3dsl.runtime.metrics import assert_close_rms
from k3dsl.runtime.op import forced

NAMES = tuple(FORWARD)
OTHER = "shapes, states, layouts, dtypes"
# the delta rule is the gated one's code without its gate: its shapes are left to the slow tests
CASES = [
    pytest.param(name, case, id=f"{name}-{case.name}", marks=[pytest.mark.slow] if slow else [])
    for name in NAMES
    for case in FORWARD[name].cases("small")
    for slow in [name == "delta_rule" and case.family in (OTHER, "extreme")]
]
BF16, F32 = torch.bfloat16, torch.float32


def drawn(name: str, **changes) -> dict:
    """Mild inputs of an op."""
    plain = judge.drawings(name)["plain"][1]
    return judge.make(name, replace(plain, **changes))


@pytest.mark.parametrize(("name", "case"), CASES)
def test_every_case_meets_its_limits_and_repeats_bitwise(name, case, poisoned_memory) -> None:
    x = case.make("cpu", 0)
    outputs, expected = FORWARD[name].call(**x), FORWARD[name].reference(**x)
    for key, limit in case.limits.items():
        assert_close_rms(key, outputs[key], expected[key], limit)
    again = FORWARD[name].call(**x)
    assert all(torch.equal(outputs[key], again[key]) for key in outputs)


@pytest.mark.parametrize("name", NAMES)
def test_the_definition_step_by_step(name: str) -> None:
    """Two tokens by hand: K = V = 16 with keys along one axis."""
    k = torch.zeros(1, 2, 1, 16)
    k[..., 0] = 1.0
    q, v = k.clone(), torch.zeros(1, 2, 1, 16)
    v[0, :, 0, 3] = torch.tensor([2.0, 5.0])
    beta, g = torch.full((1, 2, 1), 0.5), torch.full((1, 2, 1), -0.6931471805599453)
    if name == "linear_attention":
        o, s = ops.linear_attention(q, k, v, 1.0, output_final_state=True, normalize=False)
        first, second = 2.0, 7.0
        normalized, _ = ops.linear_attention(q, k, v, 1.0)
        torch.testing.assert_close(normalized[0, :, 0, 3], torch.tensor([2.0, 3.5]))
    elif name == "delta_rule":
        o, s = ops.delta_rule(q, k, v, beta, 1.0, output_final_state=True)
        first, second = 1.0, 1.0 + 0.5 * (5.0 - 1.0)
    else:
        o, s = ops.gated_delta_rule(q, k, v, g, beta, 1.0, output_final_state=True)
        first, second = 1.0, 0.5 + 0.5 * (5.0 - 0.5)
    torch.testing.assert_close(o[0, :, 0, 3], torch.tensor([first, second]))
    torch.testing.assert_close(s[0, 0, 0, 3], torch.tensor(second))
    assert s.abs().sum() == s[0, 0, 0, 3].abs()


@pytest.mark.parametrize("gate", ["log-sigmoid", "cut-50", "none"])
def test_the_gated_delta_rule_is_kda_with_one_gate_for_all_channels(gate: str) -> None:
    x = drawn("gated_delta_rule", gate=gate, T=70, H=2)
    o, state = ops.gated_delta_rule(**x)
    g = x.pop("g")[..., None].expand(*x["q"].shape).contiguous()
    expected, expected_state = ops.kda(g=g, **x)
    assert_close_rms("o", o, expected, 5e-3)
    assert_close_rms("state", state, expected_state, 5e-3)


def test_the_delta_rule_is_the_gated_one_that_never_fades() -> None:
    x = drawn("delta_rule", T=70, H=2)
    o, state = ops.delta_rule(**x)
    again, state_again = ops.gated_delta_rule(g=torch.zeros(1, 70, 2), **x)
    assert_close_rms("o", o, again, 1e-6)
    assert_close_rms("state", state, state_again, 1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("t", [17, 40])
def test_an_output_never_depends_on_later_tokens_to_the_last_bit(name: str, t: int) -> None:
    x = drawn(name, T=70)
    before = FORWARD[name].call(**x)["o"][:, :t].clone()
    for key in ("q", "k", "v", "g", "beta"):
        if key in x:
            x[key][:, t:] = x[key][:, t:].flip(1)
    assert torch.equal(FORWARD[name].call(**x)["o"][:, :t], before)


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_can_go_on_from_its_state(name: str) -> None:
    x = drawn(name, T=70, H=2)
    whole = FORWARD[name].call(**x)
    tokens = [key for key in ("q", "k", "v", "g", "beta") if key in x]
    first = FORWARD[name].call(**{**x, **{key: x[key][:, :33] for key in tokens}})
    rest = {**x, **{key: x[key][:, 33:] for key in tokens}, "initial_state": first["final_state"]}
    second = FORWARD[name].call(**rest)
    assert_close_rms("o", torch.cat([first["o"], second["o"]], 1), whole["o"].double(), 5e-3)
    assert_close_rms("state", second["final_state"], whole["final_state"].double(), 3e-3)


@pytest.mark.parametrize("knobs", [{"chunk": 16}, {"chunk": 64}, {"block_v": 16}])
@pytest.mark.parametrize("name", NAMES)
def test_every_tile_gives_right_numbers(name: str, knobs: dict, poisoned_memory) -> None:
    x = drawn(name, T=70, H=2, state="fp32", state_v_first=True)
    with forced(FORWARD[name], knobs, {}):
        outputs = FORWARD[name].call(**x)
    expected = FORWARD[name].reference(**x)
    for key, value in outputs.items():
        assert_close_rms(key, value, expected[key], 5e-3)


@pytest.mark.parametrize("factors", [bf16, f16])
@pytest.mark.parametrize("inverse", ["doubling", "substitution"])
def test_factors_and_inverses(factors, inverse) -> None:
    x = drawn("gated_delta_rule", T=70, keys="near-identical")
    with forced(FORWARD["gated_delta_rule"], {"factors": factors, "inverse": inverse}, {}):
        o, state = ops.gated_delta_rule(**x)
    expected, expected_state = recurrence(**{n: v for n, v in x.items() if n != "output_final_state"})
    assert_close_rms("o", o, expected, 1e-2)
    assert_close_rms("state", state, expected_state, 1e-2)


def test_two_bf16_parts_of_the_state_are_more_accurate_than_one() -> None:
    """A state that is large beside what a token reads of it: what one rounding loses is all that there is."""
    x = {n: torch.randn(1, 64, 1, 64, generator=torch.Generator().manual_seed(i)).to(BF16) for i, n in enumerate("qkv")}
    state = 100 * torch.randn(1, 1, 64, 64)
    expected, _ = recurrence(**x, initial_state=state)
    errors = []
    for parts in (1, 2):
        with forced(FORWARD["linear_attention"], {"state_parts": parts}, {}):
            o, _ = ops.linear_attention(**x, initial_state=state, normalize=False)
        errors.append(((o.double() - expected).square().mean() / expected.square().mean()).sqrt())
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule"])
def test_a_query_that_is_nearly_orthogonal_to_its_key_keeps_its_precision(name: str) -> None:
    # one token: o = scale beta <q, k> / (|q| |k|) v, and <q, k> is 1/500 of |q| |k|
    torch.manual_seed(0)
    k, q, v = (torch.randn(1, 1, 4, 64) for _ in range(3))
    q = q - (q * k).sum(-1, keepdim=True) / (k * k).sum(-1, keepdim=True) * k * 0.998
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    beta = torch.rand(1, 1, 4)
    gate = {"g": torch.zeros(1, 1, 4)} if name == "gated_delta_rule" else {}
    o, _ = getattr(ops, name)(q, k, v, beta=beta, use_qk_l2norm_in_kernel=True, **gate)
    qd, kd, vd = q.double(), k.double(), v.double()
    cosine = (qd * kd).sum(-1) / (qd.norm(dim=-1) * kd.norm(dim=-1))
    assert cosine.abs().max() < 0.01
    expected = (64**-0.5 * beta.double() * cosine)[..., None] * vd
    for head in range(4):
        assert_close_rms(f"o of head {head}", o[:, :, head], expected[:, :, head], 5e-3)


def test_values_that_fp16_cannot_hold_are_done_again() -> None:
    x = drawn("delta_rule", T=64, H=2)
    x["v"][:, 40, 1] = 1e6
    outputs, expected = FORWARD["delta_rule"].call(**x), FORWARD["delta_rule"].reference(**x)
    for key, value in outputs.items():
        assert_close_rms(key, value, expected[key], 5e-3)


def test_fp16_scores_and_sums_beyond_its_range_stay_right() -> None:
    x = {
        n: (100 * torch.rand(1, 70, 1, 64, generator=torch.Generator().manual_seed(i))).half()
        for i, n in enumerate("qkv")
    }
    o, _ = ops.linear_attention(**x)
    expected, _ = recurrence(**x, normalize=True)
    assert_close_rms("o", o, expected, 1e-3)


# ---- one token ---------------------------------------------------------------------------------------------------------

TOKEN_VARIANTS = (
    {},
    {"v_first": True, "state": "bf16"},
    {"indexed": False, "in_place": False},
    {"dtype": "f32", "scale": 0.5},
)


@pytest.mark.parametrize("settings", TOKEN_VARIANTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_one_token_of_every_request(name: str, settings: dict, poisoned_memory) -> None:
    op = get_op(f"{name}.decode")
    options = op.resolve_options(settings)
    dims = {"B": 3, "H": 4, "HK": 2, "K": 64, "V": 32, "slots": 6}
    x = op.inputs(dims, options, "cpu", 0)
    expected, outputs = op.reference(**op.fresh(x)), op.call(**op.fresh(x))
    assert set(outputs) == set(expected) == set(op.limits(options))
    for key, limit in op.limits(options).items():
        assert_close_rms(key, outputs[key], expected[key], limit)


def test_a_padded_request_has_output_0_and_leaves_its_pool_alone() -> None:
    x = make_decode(Case("decode", gate="log-sigmoid", beta="given", H=2, K=64), batch=3, padding=1)
    x = {n: x[n] for n in ("q", "k", "v", "g", "beta", "state", "state_indices")}
    x["g"] = x["g"][..., 0]
    before = x["state"].clone()
    o, state = ops.gated_delta_rule_decode(**x)
    assert (o[2] == 0).all()
    used = {i for i in x["state_indices"].tolist() if i >= 0}
    for slot in range(before.shape[0]):
        assert torch.equal(state[slot], before[slot]) == (slot not in used)


def test_decoding_token_by_token_is_the_whole_sequence() -> None:
    x = drawn("gated_delta_rule", T=9, H=2, dtype=F32)
    whole, final = ops.gated_delta_rule(**x)
    state = torch.zeros(1, 2, 64, 64)
    for t in range(9):
        token = {n: x[n][:, t : t + 1] for n in ("q", "k", "v", "g", "beta")}
        o, _ = ops.gated_delta_rule_decode(**token, state=state, use_qk_l2norm_in_kernel=True)
        assert_close_rms("o", o, whole[:, t : t + 1].double(), 1e-5)
    assert_close_rms("state", state, final.double(), 1e-5)


# ---- torch -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cu", [None, (0, 5, 5, 20)])
def test_gradients_are_those_of_the_recurrence(name: str, cu) -> None:
    """Against fp64 differences: the loss along a random direction, forward and back."""
    x = drawn(name, T=20, H=1, dtype=F32, state="fp32", **({"cu_seqlens": cu} if cu else {}))
    x = {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in x.items()}
    leaves = [n for n in ("q", "k", "v", "g", "beta", "initial_state") if n in x]
    generator = torch.Generator().manual_seed(3)
    weight, state_weight = (torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in recurrence_of(x))

    def loss(inputs: dict) -> torch.Tensor:
        o, state = recurrence_of(inputs)
        return (o * weight).sum() + (state * state_weight).sum()

    single = {n: v.float().requires_grad_() if n in leaves else v for n, v in x.items()}
    o, state = getattr(ops, name)(**single)
    got = torch.autograd.grad((o * weight).sum() + (state * state_weight).sum(), [single[n] for n in leaves])
    for n, gradient in zip(leaves, got, strict=True):
        direction = torch.randn(x[n].shape, generator=generator, dtype=torch.float64)
        h = 1e-5
        up, down = ({**x, n: x[n] + sign * h * direction} for sign in (1, -1))
        wanted = (loss(up) - loss(down)) / (2 * h)
        found = (gradient.double() * direction).sum()
        scale = gradient.double().square().sum().sqrt() * direction.square().sum().sqrt()
        assert abs(found - wanted) < 1e-5 * scale, n


def recurrence_of(x: dict) -> tuple[torch.Tensor, torch.Tensor]:
    return recurrence(**{n: v for n, v in x.items() if n != "output_final_state"})


@pytest.mark.parametrize("normalize", [False, True])
def test_the_torch_form_of_linear_attention_is_the_recurrence(normalize: bool) -> None:
    x = judge.make("linear_attention", replace(judge.drawings("linear_attention")["plain"][1], T=40, H=2, HV=4, B=2,
                                               state="fp32"), normalize=normalize)  # fmt: skip
    x = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in x.items()}
    expected, expected_state = recurrence_of(x)
    o, state = chunked(**x)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(state, expected_state)


@pytest.mark.parametrize("name", NAMES)
def test_registrations_pass_opcheck_and_run_under_torch_compile(name: str) -> None:
    x = drawn(name, T=18)
    rest = (None, None, None, True, True, False, False)
    arguments = (x["q"], x["k"], x["v"], x.get("g"), x.get("beta"), *rest)
    torch.library.opcheck(
        torch.ops.k3dsl.linear_forward.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    compiled = torch.compile(lambda **kw: getattr(ops, name)(**kw), backend="eager", fullgraph=True)
    assert torch.equal(compiled(**x)[0], getattr(ops, name)(**x)[0])


@pytest.mark.parametrize("shape", [{"T": 0}, {"B": 0}, {"cu": [0, 0, 0]}])
def test_empty_calls_return_empty_outputs_and_the_initial_state(shape: dict) -> None:
    b, t = shape.get("B", 1), 0 if "cu" in shape else shape.get("T", 3)
    n = len(shape["cu"]) - 1 if "cu" in shape else b
    q, state = torch.zeros(b, t, 2, 64), torch.randn(n, 2, 64, 64)
    cu = torch.tensor(shape["cu"]) if "cu" in shape else None
    o, last = ops.delta_rule(q, q, q, q[..., 0], initial_state=state, output_final_state=True, cu_seqlens=cu)
    assert o.shape == q.shape
    assert torch.equal(last, state)


@pytest.mark.parametrize("name", NAMES)
def test_rules_of_the_registry_are_points_of_the_space(name: str) -> None:
    for dtype in ("bf16", "f16", "f32"):
        for dims in ({}, {"K": 64, "V": 48}, {"K": 256, "V": 256}, {"T": 5}):
            assert get_op(name).point(dims, {"dtype": dtype}).reasons() == []
    for dims in ({}, {"B": 1, "V": 48}):
        assert DECODE[name].point(dims, {}).reasons() == []
    op = get_op(name)
    dims = {"B": 1, "T": 40, "H": 2, "HK": 1, "K": 64, "V": 32, "N": 1}
    for settings in ({}, {"varlen": True, "initial_state": "f32"}):
        options = op.resolve_options(settings)
        x = op.inputs({**dims, "N": 3}, options, "cpu", 0)
        outputs, expected = op.call(**x), op.reference(**x)
        for key, limit in op.limits(options).items():
            assert_close_rms(key, outputs[key], expected[key], limit)


Q, V4, B3 = torch.zeros(2, 5, 2, 32), torch.zeros(2, 5, 4, 16), torch.zeros(2, 5, 4)
WRONG = [
    (lambda: ops.linear_attention(Q[0], Q, V4), "q", "needs 4 dims", "[B, T, H, K]"),
    (lambda: ops.linear_attention(Q, Q[:, :3], V4), "k", "q has [2, 5, 2, 32]", "a query"),
    (lambda: ops.linear_attention(Q, Q, V4[:, :, :3]), "v", "HV = 3 heads", "heads"),
    (lambda: ops.linear_attention(Q[..., :20], Q[..., :20], V4), "q", "K = 20", "zeros"),
    (lambda: ops.linear_attention(Q, Q, V4.half()), "v", "float16, q is float32", "q.dtype"),
    (lambda: ops.delta_rule(Q, Q, V4, B3[..., :2]), "beta", "needs [B, T, HV] = [2, 5, 4]", "value head"),
    (lambda: ops.delta_rule(Q, Q, V4, None), "beta", "NoneType", "torch.Tensor"),
    (lambda: ops.gated_delta_rule(Q, Q, V4, Q, B3), "g", "needs [B, T, HV]", "value head"),
    (lambda: ops.gated_delta_rule(Q, Q, V4, B3, B3, scale=float("nan")), "scale", "nan", "1/sqrt(K)"),
    (lambda: ops.delta_rule(Q, Q, V4, B3, cu_seqlens=torch.tensor([0, 5])), "cu_seqlens", "B = 2", "flatten"),
    (
        lambda: ops.delta_rule(Q[:1], Q[:1], V4[:1], B3[:1], cu_seqlens=torch.tensor([0, 4])),
        "cu_seqlens", "ends at 4", "end at T",
    ),
    (
        lambda: ops.delta_rule(Q, Q, V4, B3, initial_state=torch.zeros(2, 4, 16, 32)),
        "initial_state", "needs [., 4, 32, 16]", "[., HV, K, V]",
    ),
    (
        lambda: ops.delta_rule_decode(Q, Q, V4, B3, torch.zeros(2, 4, 32, 16)),
        "q", "T = 5 tokens", "forward function",
    ),
    (
        lambda: ops.linear_attention_decode(Q[:, :1], Q[:, :1], V4[:, :1], torch.zeros(3, 4, 32, 16)),
        "state", "3 slots for 2 requests", "state_indices",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "argument", "reason", "remedy"), WRONG)
def test_a_wrong_argument_is_named_with_the_reason_and_the_remedy(call, argument, reason, remedy) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.message.startswith(f"{argument}: ")
    assert reason in caught.value.message
    assert remedy in (caught.value.fix or "")
