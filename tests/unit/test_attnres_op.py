"""AttnRes on the CPU backend: right on every family in all its forms, exact where it must be, and clear about wrong input."""

from __future__ import annotations

import math

import pytest
import torch

from k3dsl import ops
from k3dsl.errors import ArgumentError, LegalityError
from k3dsl.ir.types import bf16, f32
from k3dsl.language import Sym, TensorSpec
from k3dsl.ops.attnres import kernels, reference
from k3dsl.ops.attnres.inputs import FAMILIES, make
from k3dsl.ops.attnres.space import MERGE, PHASE1, SITE
from k3dsl.ops.common import traced
from k3dsl.ops.registry import get_op
from k3dsl.runtime.metrics import assert_close_rms
from k3dsl.runtime.op import forced

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {BF16: 4e-3, F16: 5e-4, F32: 3e-6}
SHAPES = ((0, 3, 96), (1, 1, 200), (8, 5, 96), (3, 2, 7168))


def agree(h: torch.Tensor, normed: torch.Tensor, expected: tuple, dtype: torch.dtype = BF16) -> None:
    assert_close_rms("h", h, expected[0], LIMIT[dtype])
    assert_close_rms("normed", normed, expected[1], 1.5 * LIMIT[dtype])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_of_a_site_agrees_with_float64_and_repeats_bitwise(family, shape, poisoned_memory) -> None:
    x = make(family, *shape)
    expected = reference.attnres(**x)
    direct = ops.attnres(**x)
    agree(*direct, expected)
    assert all(torch.equal(a, b) for a, b in zip(direct, ops.attnres(**x), strict=True))
    queries = ops.attnres_fold(x["query"], x["key_norm"])[None]
    m, l, o = ops.attnres_phase1(x["bank"], queries)
    rest = {n: x[n] for n in ("prefix", "query", "key_norm", "norm_weight")}
    agree(*ops.attnres_merge(m[0], l[0], o[0], **rest), expected)
    logits, inverse = ops.attnres_logits(x["bank"], queries)
    agree(*ops.attnres(x["bank"], **rest, logits=logits[0]), expected)
    if shape[0]:
        rows = x["bank"].double()
        assert_close_rms("logits", logits, reference.scores(rows, queries), 2e-5 if family != "uniform" else 0.0)
        assert_close_rms("inverse rms", inverse, (rows.square().mean(-1) + 1e-5).rsqrt(), 1e-6)


@pytest.mark.parametrize("sites", [1, 3, 24, 33])
def test_phase_1_gives_the_softmax_of_every_site_over_the_bank_alone(sites: int, poisoned_memory) -> None:
    x = make("random", 5, 37, 130, sites=max(sites, 2))
    queries = ops.attnres_fold(x["query"][:sites], x["key_norm"])
    m, l, o = ops.attnres_phase1(x["bank"], queries)
    logits = reference.scores(x["bank"], queries)
    assert m.shape == l.shape == (sites, 37)
    assert_close_rms("m", m, logits.amax(-1), 1e-5)
    assert_close_rms("l", l, (logits - logits.amax(-1, keepdim=True)).exp().sum(-1), 1e-5)
    weights = torch.softmax(logits, -1)
    mean = torch.einsum("stn,ntd->std", weights, x["bank"].double())
    assert_close_rms("o / l", o / l[..., None], mean, 1e-5)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_phase_1_keeps_fp32_logits_for_every_dtype_of_rows(dtype, precision) -> None:
    x = make("massive-channels", 3, 20, 256, dtype, sites=4)
    queries = x["query"].float() * x["key_norm"].float()
    with forced(PHASE1, {"precision": precision, "depth": 64, "tokens": 32}, {}):
        logits, _ = ops.attnres_logits(x["bank"], queries)
    assert_close_rms("logits", logits, reference.scores(x["bank"], queries), 1e-5)


KNOBS = (
    {"unroll": True, "ahead": 0},
    {"unroll": True, "ahead": 8, "rows": 2},
    {"rows": 4, "num_warps": 16},
    {"width": 512, "num_warps": 8},
    {"width": 4096, "num_warps": 4},
)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_every_knob_gives_right_numbers(knobs, poisoned_memory) -> None:
    for tokens, width in ((7, 640), (1, 1000)):
        x = make("random", 5, tokens, width)
        with forced(SITE, knobs, {}):
            agree(*ops.attnres(**x), reference.attnres(**x))
        merge = {n: v for n, v in knobs.items() if n in ("rows", "width", "num_warps")}
        m, l, o = ops.attnres_phase1(x["bank"], ops.attnres_fold(x["query"], x["key_norm"])[None])
        with forced(MERGE, merge, {}):
            rest = {n: x[n] for n in ("prefix", "query", "key_norm", "norm_weight")}
            agree(*ops.attnres_merge(m[0], l[0], o[0], **rest), reference.attnres(**x))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("weights", ["rows", "fp32"])
def test_dtypes_of_rows_and_weights(dtype, weights) -> None:
    x = make("random", 4, 6, 160, dtype)
    if weights == "fp32":
        x |= {n: x[n].float() + 1e-4 for n in ("query", "key_norm", "norm_weight")}
    h, normed = ops.attnres(**x)
    assert h.dtype == normed.dtype == dtype
    agree(h, normed, reference.attnres(**x), dtype)


# ---- exact where it must be --------------------------------------------------------------------------------------------


def test_without_a_bank_h_is_the_prefix_to_the_last_bit_and_still_normed() -> None:
    x = make("random", 0, 5, 96)
    h, normed = ops.attnres(**x)
    assert torch.equal(h, x["prefix"])
    assert h.data_ptr() != x["prefix"].data_ptr()
    assert torch.equal(normed, ops.rmsnorm(x["prefix"], x["norm_weight"], 1e-5))
    m, l, o = ops.attnres_phase1(x["bank"], x["query"].float()[None])
    assert (m == -math.inf).all()
    merged = ops.attnres_merge(m[0], l[0], o[0], x["prefix"], x["query"], x["key_norm"])
    assert torch.equal(merged, x["prefix"])


def test_the_norm_is_of_the_rounded_mix_in_llamas_order() -> None:
    x = make("random", 3, 4, 96)
    h, normed = ops.attnres(**x)
    assert torch.equal(normed, ops.rmsnorm(h, x["norm_weight"], 1e-5))
    only = ops.attnres(**x, return_h=False)
    assert isinstance(only, torch.Tensor)
    assert torch.equal(only, normed)


def test_a_zero_query_gives_the_mean_of_the_rows() -> None:
    x = make("uniform", 7, 3, 64, F32)
    h = ops.attnres(x["bank"], x["prefix"], x["query"], x["key_norm"])
    torch.testing.assert_close(h, torch.cat([x["bank"], x["prefix"][None]]).mean(0))


def test_values_are_the_raw_rows_and_the_logits_have_no_other_scale() -> None:
    """Two rows a and 10 a have the same key, so each counts half, whatever their sizes and D."""
    a = torch.linspace(-1, 1, 64)[None]
    h = ops.attnres(10 * a[None], a, torch.ones(64), torch.ones(64), eps=1e-12)
    torch.testing.assert_close(h, 5.5 * a)
    # keys +1 and -1 in every channel: logits are +sum(w) and -sum(w)
    one, w = torch.ones(1, 64), torch.full((64,), 0.01)
    h = ops.attnres(-one[None], one, w, torch.ones(64), eps=1e-12)
    torch.testing.assert_close(h, math.tanh(0.64) * one)


def test_the_key_norm_is_folded_into_the_query_and_not_rounded_into_the_rows() -> None:
    x = make("random", 6, 9, 512, F32)
    folded = ops.attnres(x["bank"], x["prefix"], ops.attnres_fold(x["query"], x["key_norm"]))
    assert torch.equal(folded, ops.attnres(x["bank"], x["prefix"], x["query"], x["key_norm"]))


# ---- the bank ----------------------------------------------------------------------------------------------------------


def test_rows_and_tokens_past_those_in_use_never_leak_and_a_snapshot_goes_into_the_next_row() -> None:
    x = make("random", 3, 5, 96)
    buffer = torch.full((8, 9, 96), math.nan, dtype=BF16)
    buffer[:3, :5] = x["bank"]
    rest = {n: x[n] for n in ("prefix", "query", "key_norm", "norm_weight")}
    before = buffer.clone()
    h, normed = ops.attnres(buffer[:3, :5], **rest, snapshot=buffer[3, :5])
    plain = ops.attnres(**x)
    assert torch.equal(h, plain[0])
    assert torch.equal(normed, plain[1])
    assert torch.equal(buffer[3, :5], x["prefix"])
    buffer[3, :5] = before[3, :5]
    assert torch.equal(buffer.view(torch.int16), before.view(torch.int16))


def test_a_snapshot_can_be_taken_by_the_merge_too() -> None:
    x = make("random", 2, 4, 64)
    m, l, o = ops.attnres_phase1(x["bank"], ops.attnres_fold(x["query"], x["key_norm"])[None])
    target = torch.full((4, 64), math.nan, dtype=BF16)
    ops.attnres_merge(m[0], l[0], o[0], x["prefix"], x["query"], x["key_norm"], snapshot=target)
    assert torch.equal(target, x["prefix"])


@pytest.mark.parametrize("stride", [97, 104])
def test_rows_that_lie_apart_need_no_copy(stride: int) -> None:
    x = make("random", 4, 6, 96)
    expected = ops.attnres(**x)
    wide = torch.full((6, stride), math.nan, dtype=BF16)
    wide[:, :96] = x["prefix"]
    bank = torch.full((6, 4, stride), math.nan, dtype=BF16)  # [T, N, D] in memory
    bank[..., :96] = x["bank"].transpose(0, 1)
    x |= {"prefix": wide[:, :96], "bank": bank[..., :96].transpose(0, 1)}
    assert all(torch.equal(a, b) for a, b in zip(ops.attnres(**x), expected, strict=True))


def test_leading_dims_and_lists_of_rows() -> None:
    x = make("random", 4, 6, 96)
    h, normed = ops.attnres(**x)
    shaped = {**x, "bank": x["bank"].view(4, 2, 3, 96), "prefix": x["prefix"].view(2, 3, 96), "query": x["query"][None]}
    found = ops.attnres(**shaped)
    assert found[0].shape == (2, 3, 96)
    assert torch.equal(found[1].view(6, 96), normed)
    assert torch.equal(ops.attnres(**{**x, "bank": list(x["bank"])})[0], h)
    assert torch.equal(ops.attnres([], x["prefix"], x["query"], x["key_norm"]), x["prefix"])


def test_no_tokens() -> None:
    x = make("random", 4, 0, 96)
    assert all(t.shape == (0, 96) for t in ops.attnres(**x))
    m, _, o = ops.attnres_phase1(x["bank"], x["query"].float()[None])
    assert (m.shape, o.shape) == ((1, 0), (1, 0, 96))


def test_a_block_in_two_phases_equals_its_sites_one_by_one() -> None:
    """Twelve sites over a frozen bank with a prefix that grows, as the layers of a block see it."""
    x = make("random", 4, 3, 128, sites=12)
    m, l, o = ops.attnres_phase1(x["bank"], ops.attnres_fold(x["query"], x["key_norm"]))
    prefix = x["prefix"]
    for s in range(12):
        query = x["query"][s]
        expected, _ = reference.attnres(x["bank"], prefix, query, x["key_norm"])
        h = ops.attnres_merge(m[s], l[s], o[s], prefix, query, x["key_norm"])
        assert_close_rms(f"h of site {s}", h, expected, LIMIT[BF16])
        prefix = prefix + h


@pytest.mark.parametrize("name", ["site", "merge", "mix"])
def test_tokens_beyond_2_31_elements_are_addressed_in_64_bits(name: str) -> None:
    """8 rows of 40000 tokens are 2.3e9 elements: a token's offset is computed in 64 bits, a channel's in 32."""
    pytest.importorskip("triton")
    dims = {"attnres.site": {"N": 8}, "attnres.merge": {}, "attnres.phase1": {"N": 8, "S": 2}}
    op = {"site": SITE, "merge": MERGE, "mix": PHASE1}[name]
    plan = op.point({"T": 40000, "D": 7168, **dims[op.name]}, {}, symbolic=True).plan("triton")
    from k3dsl.runtime.executable import lower
    from k3dsl.targets import get_target

    (launch,) = (x for x in plan.launches if x.label == name)
    text = lower(launch, get_target("sm_90a")).text
    rows = [line for line in text.splitlines() if "tl.load(prefix" in line or "tl.load(bank" in line]
    assert rows
    assert all("to(tl.int64)" in line for line in rows)
    offsets = [line for line in text.splitlines() if "bank_offsets = " in line or "prefix_offsets = " in line]
    assert offsets
    assert not any("int64" in line for line in offsets)


def test_a_token_stride_beyond_32_bits_is_a_fact_that_the_code_respects() -> None:
    pytest.importorskip("triton")
    from k3dsl.backends.triton.lower import lower
    from k3dsl.backends.triton.schedule import TritonSchedule
    from k3dsl.targets import get_target

    knobs = {"width": 1024, "rows": 1, "eps": 1e-5, "norm_eps": 1e-5, "unroll": False, "ahead": 0}
    strides = (Sym("s0", max=1 << 45), Sym("s1", max=1 << 45), 1)
    tensors = {"bank": TensorSpec(bf16, strides), "prefix": bf16, "query": f32, "h": bf16}
    ir = traced(kernels.site, {"T": Sym("T", min=1), "N": 8, "D": 7168}, knobs, tensors)
    text = lower(ir, TritonSchedule(), get_target("sm_90a")).text
    assert "s0" in text
    assert all(".to(tl.int64)" in line for line in text.splitlines() if "tl.load(bank" in line)


# ---- torch -------------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_plain_torch() -> None:
    x = make("random", 3, 4, 32, F32)
    x["query"] *= 20
    names = list(x)
    weight, weight_normed = torch.randn(4, 32), torch.randn(4, 32)
    ours = {n: v.clone().requires_grad_() for n, v in x.items()}
    h, normed = ops.attnres(**ours)
    got = torch.autograd.grad((h * weight).sum() + (normed * weight_normed).sum(), [ours[n] for n in names])
    theirs = {n: v.double().requires_grad_() for n, v in x.items()}
    expected, expected_normed = reference.attnres(**theirs)
    loss = (expected * weight).sum() + (expected_normed * weight_normed).sum()
    for n, g, wanted in zip(names, got, torch.autograd.grad(loss, [theirs[n] for n in names]), strict=True):
        assert_close_rms(f"gradient of {n}", g, wanted, 2e-5)


def test_one_row_has_no_gradient_for_its_query() -> None:
    x = make("random", 0, 4, 32, F32)
    query = x["query"].clone().requires_grad_()
    h = ops.attnres(x["bank"], x["prefix"], query, x["key_norm"])
    (grad,) = torch.autograd.grad(h.sum(), query)
    assert (grad.abs() < 1e-6).all()


def test_registrations_pass_opcheck_and_run_under_torch_compile() -> None:
    x = make("random", 3, 4, 64)
    overload = torch.ops.k3dsl.attnres.default
    arguments = (x["bank"], x["prefix"], x["query"], x["key_norm"], 1e-5, x["norm_weight"], 1e-5, True)
    torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_faketensor"))
    phase1 = torch.ops.k3dsl.attnres_phase1.default
    for mix in (True, False):
        queries = x["query"].float()[None]
        torch.library.opcheck(phase1, (x["bank"], queries, 1e-5, mix), test_utils=("test_schema", "test_faketensor"))
    snapshot = torch.zeros(4, 64, dtype=BF16)

    def block(snapshot, **kwargs):
        return ops.attnres(**kwargs, snapshot=snapshot)[1] + 1

    expected = ops.attnres(**x)[1] + 1
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.equal(compiled(snapshot, **x), expected)
    assert torch.equal(snapshot, x["prefix"])


@pytest.mark.slow
def test_a_compiled_call_writes_the_row_it_is_given() -> None:
    """From the third n on torch.compile makes it a number of run time, and takes a custom op's write to another row."""
    torch.manual_seed(0)
    query = torch.randn(64)
    compiled = torch.compile(lambda bank, n, x: ops.attnres(bank[:n], x, query, snapshot=bank[n]))
    for n in range(4):
        bank, x = torch.randn(4, 5, 64), torch.randn(5, 64)
        other = bank.clone()
        torch.testing.assert_close(compiled(bank, n, x), ops.attnres(other[:n], x, query, snapshot=other[n]))
        assert torch.equal(bank, other)
        assert torch.equal(bank[n], x)


@pytest.mark.parametrize("name", ["attnres.site", "attnres.phase1", "attnres.merge"])
def test_the_registry_has_what_the_command_line_asks_of_an_op(name: str) -> None:
    op = get_op(name)
    base = {"T": 3, "N": 4, "S": 5, "D": 96}
    dims = {d.name: base[d.name] for d in op.dims}
    variants = {
        "attnres.site": ({}, {"logits": True}, {"snapshot": True, "h": False}, {"key_norm": False, "normed": False}),
        "attnres.phase1": ({}, {"mix": False}, {"dtype": "f32"}),
        "attnres.merge": ({}, {"snapshot": True, "query_dtype": "f32"}),
    }
    for settings in variants[name]:
        options = op.resolve_options(settings)
        drawn = op.inputs(dims, options, "cpu", 0)
        outputs, expected, limits = op.call(**drawn), op.reference(**drawn), op.limits(options)
        assert set(outputs) == set(expected) == set(limits)
        for key, limit in limits.items():
            assert_close_rms(key, outputs[key], expected[key], limit)
        if settings == {}:
            for peer in op.peers().values():
                for key, actual in peer(**drawn).items():
                    assert_close_rms(f"peer's {key}", actual, expected[key], 1e-2)
    for size in (1, 64, 65, 9000):
        assert op.point({"T": size}, {}).reasons() == []
    for seed in op.seeds:
        assert op.point({}, seed).reasons() == []


def test_cases_of_the_registry_meet_their_limits() -> None:
    for case in SITE.cases("small"):
        drawn = case.make("cpu", 1)
        outputs, expected = SITE.call(**drawn), SITE.reference(**drawn)
        for key, limit in case.limits.items():
            assert_close_rms(f"{case.name}: {key}", outputs[key], expected[key], limit)


def test_knobs_that_hold_too_much_are_refused() -> None:
    with pytest.raises(LegalityError, match="channels a thread"):
        SITE.point({}, {"rows": 4, "num_warps": 4}).plan("torch")
    with pytest.raises(LegalityError, match="17 rows are too many to unroll"):
        SITE.point({"N": 17}, {"unroll": True}).plan("torch")


# ---- wrong arguments ---------------------------------------------------------------------------------------------------

B, P, Q = torch.zeros(2, 4, 8), torch.zeros(4, 8), torch.zeros(8)
STATS = (torch.zeros(4), torch.ones(4), torch.zeros(4, 8))
WRONG = [
    (lambda: ops.attnres(B[:, :3], P, Q), "bank", "needs [N, ...] with [4, 8]", "bank[:n, :T]"),
    (lambda: ops.attnres(B.half(), P, Q), "bank", "float16, prefix is float32", "prefix.dtype"),
    (lambda: ops.attnres([P, P[:2]], P, Q), "bank[1]", "[2, 8], prefix [4, 8]", "one row a snapshot"),
    (lambda: ops.attnres(None, P, Q), "bank", "NoneType", "torch.Tensor"),
    (lambda: ops.attnres_fold(Q, Q[:1]), "key_norm", "has shape [1], needs [D] = [8]", "a channel"),
    (lambda: ops.attnres(B, P, Q[:3]), "query", "needs [D] = [8]", "a channel"),
    (lambda: ops.attnres(B, P, None), "query", "NoneType", "torch.Tensor"),
    (lambda: ops.attnres(B, P, Q, Q.half()), "key_norm", "float16, prefix is float32", "float()"),
    (lambda: ops.attnres(B, P, Q, eps=0.0), "eps", "0.0", "1e-5"),
    (lambda: ops.attnres(B, P, Q, return_h=False), "return_h", "nothing to return", "norm_weight"),
    (lambda: ops.attnres(B, P, Q, snapshot=P[:3].clone()), "snapshot", "[3, 8]", "buffer[n, :T]"),
    (lambda: ops.attnres(B, P, Q, snapshot=torch.zeros(40)[1:33].view(4, 8)), "snapshot", "16 bytes", "multiple of 8"),
    (lambda: ops.attnres(B, P, Q, logits=torch.zeros(4, 3)), "logits", "needs [T, N] = [4, 2]", "one site's"),
    (lambda: ops.attnres(B, P.T.contiguous().T, Q), "prefix", "last dim must be contiguous", "contiguous()"),
    (lambda: ops.attnres(B, P, Q.clone().requires_grad_(), snapshot=P.clone()), "snapshot", "for inference", "no_grad"),
    (lambda: ops.attnres_phase1(B, Q), "queries", "needs [S, D]", "attnres_fold"),
    (lambda: ops.attnres_phase1(P, Q[None]), "bank", "needs [N, T, D]", "bank[:n, :T]"),
    (lambda: ops.attnres_merge(STATS[0][:2], *STATS[1:], P, Q), "m", "needs [T] = [4]", "phase 1"),
    (lambda: ops.attnres_merge(STATS[0], STATS[1], STATS[2].half(), P, Q), "o", "float16, needs float32", "float32"),
    (lambda: ops.attnres_merge(*STATS, B, Q), "prefix", "needs [T, D]", "view"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "argument", "reason", "remedy"), WRONG)
def test_a_wrong_argument_is_named_with_the_reason_and_the_remedy(call, argument, reason, remedy) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.message.startswith(f"{argument}: ")
    assert reason in caught.value.message
    assert remedy in (caught.value.fix or "")
