"""AttnRes, the linear-attention line and cached attention on the GPU: cases, repeats, both backends, graphs, long tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_calls import check_replays, no_waiting

from k3dsl import ops
from k3dsl.errors import BuildError, LegalityError, ResourceError
from k3dsl.ops.attention import reference as attention_reference
from k3dsl.ops.attnres import inputs as attnres_inputs
from k3dsl.ops.attnres import reference as attnres_reference
from k3dsl.ops.linear_attention import judge as linear_judge
from k3dsl.ops.registry import get_op
from k3dsl.runtime.dispatch import using_backend
from k3dsl.runtime.metrics import assert_close_rms
from k3dsl.runtime.op import Case

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
LINE = ("linear_attention", "delta_rule", "gated_delta_rule")
CASES = [(name, case) for name in ("attnres.site", *LINE) for case in get_op(name).cases("whole")]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}-{c.name}" for n, c in CASES])
def test_every_case_meets_its_limits_and_repeats_bitwise(name: str, case: Case, poisoned_memory: None) -> None:
    op = get_op(name)
    x = case.make("cuda", 0)
    outputs, expected = op.call(**x), op.reference(**x)
    for key, limit in case.limits.items():
        assert_close_rms(key, outputs[key], expected[key], limit)
    for _ in range(10):
        again = op.call(**x)
        assert all(torch.equal(outputs[key], again[key]) for key in outputs)


VARIANTS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    *[("attnres.site", {"T": t, "N": n}, s) for t in (1, 65) for n in (0, 1, 8) for s in ({}, {"snapshot": True})],
    ("attnres.site", {"T": 129, "N": 8}, {"logits": True, "h": False}),
    ("attnres.site", {"T": 129, "N": 8}, {"dtype": "f32"}),
    *[("attnres.phase1", {"T": t}, s) for t in (1, 64, 200) for s in ({}, {"mix": False}, {"dtype": "f32"})],
    *[("attnres.merge", {"T": t}, {"snapshot": True}) for t in (1, 65)],
    *[(f"{name}.decode", {"B": b}, s) for name in LINE for b in (1, 64) for s in ({}, {"in_place": False})],
    *[("attention.decode", {"B": b, "T": t, "S": 2000}, {}) for b in (1, 33) for t in (1, 4, 100)],
    ("attention.decode", {"B": 3, "S": 500, "H": 6, "HK": 2, "D": 64}, {"dtype": "f32"}),
]


@pytest.mark.parametrize("backend", ["triton", "tilelang"])
@pytest.mark.parametrize(("name", "dims", "settings"), VARIANTS, ids=str)
def test_every_variant_on_both_backends(name, dims, settings, backend, poisoned_memory: None) -> None:
    if backend == "tilelang":
        pytest.importorskip("tilelang")
    op = get_op(name)
    options = op.resolve_options(settings)
    sizes = {d.name: dims.get(d.name, d.default) for d in op.dims}
    x = op.inputs(sizes, options, "cuda", 0)
    expected = op.reference(**op.fresh(x))
    with using_backend(backend):
        try:
            outputs = op.call(**op.fresh(x))
        except (LegalityError, ResourceError, BuildError) as error:
            pytest.skip(f"{backend} refuses: {error}")
        again = op.call(**op.fresh(x))
    for key, limit in op.limits(options).items():
        assert_close_rms(key, outputs[key], expected[key], limit)
        assert torch.equal(outputs[key], again[key])


@pytest.mark.parametrize("lengths", [[0, 5, 0], [1, 64, 65, 2000], [2000] * 3, [3, 0, 8]])
@pytest.mark.parametrize("T", [1, 8])
def test_cached_attention_of_any_lengths(lengths: list[int], T: int, poisoned_memory: None) -> None:
    B, S = len(lengths), 2000
    seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    q = torch.randn(B, T, 8, 128, device="cuda").to(BF16)
    empty = (torch.arange(S, device="cuda")[None, :] >= seqlens[:, None])[..., None, None]
    k, v = (torch.randn(B, S, 2, 128, device="cuda").to(BF16).masked_fill(empty, float("nan")) for _ in range(2))
    o, lse = ops.attention_decode(q, k, v, seqlens, return_lse=True)
    expected, expected_lse = attention_reference.attention_decode(q, k, v, seqlens)
    assert_close_rms("o", o, expected, 5e-3)
    assert torch.equal(lse.isinf(), expected_lse.isinf())


def calls() -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    x = attnres_inputs.make("random", 4, 64, 7168, device="cuda")
    buffer = torch.zeros(8, 64, 7168, dtype=BF16, device="cuda")
    buffer[:4] = x["bank"]
    weights = x["query"], x["key_norm"]
    folded = ops.attnres_fold(*weights)[None]
    m, l, o = ops.attnres_phase1(x["bank"], folded)
    q = torch.randn(2, 64, 4, 64, device="cuda").to(BF16)
    beta = torch.rand(2, 64, 4, device="cuda")
    seqlens = torch.tensor([64, 10], dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, 10, 64], dtype=torch.int32, device="cuda")
    one, rate, state = q[:, :1].contiguous(), beta[:, :1].contiguous(), torch.zeros(2, 4, 64, 64, device="cuda")
    return {
        "attnres": (lambda p: ops.attnres(buffer[:4], p, *weights, snapshot=buffer[4]), (x["prefix"],)),
        "attnres_phase1": (lambda b: ops.attnres_phase1(b, folded)[2], (x["bank"],)),
        "attnres_merge": (lambda p: ops.attnres_merge(m[0], l[0], o[0], p, *weights), (x["prefix"],)),
        "linear_attention": (lambda a: ops.linear_attention(a, a.clone(), a.clone(), normalize=False)[0], (q,)),
        "gated_delta_rule": (
            lambda a: ops.gated_delta_rule(a[:1], a[:1], a[:1], -beta[:1], beta[:1], cu_seqlens=offsets,
                                           use_qk_l2norm_in_kernel=True)[0],
            (q,),
        ),
        "delta_rule_decode": (
            lambda a: ops.delta_rule_decode(a, a, a, rate, state, use_qk_l2norm_in_kernel=True, in_place=False)[0],
            (one,),
        ),
        "attention_decode": (lambda a: ops.attention_decode(a[:, -1:], a, a, seqlens), (q,)),
    }  # fmt: skip


NAMES = (
    "attnres",
    "attnres_phase1",
    "attnres_merge",
    "linear_attention",
    "gated_delta_rule",
    "delta_rule_decode",
    "attention_decode",
)


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_captured_in_a_cuda_graph_and_never_waits_for_the_gpu(name: str) -> None:
    function, inputs = calls()[name]
    function(*inputs)
    with no_waiting():
        function(*inputs)
    check_replays(function, inputs)


def test_a_bank_beyond_2_31_elements() -> None:
    tokens, width = 40_000, 7168
    bank = torch.zeros(8, tokens, width, dtype=BF16, device="cuda")
    x = attnres_inputs.make("random", 8, 3, width, device="cuda")
    bank[:, -3:] = x["bank"]
    prefix = torch.zeros(tokens, width, dtype=BF16, device="cuda")
    prefix[-3:] = x["prefix"]
    h, normed = ops.attnres(bank, prefix, x["query"], x["key_norm"], norm_weight=x["norm_weight"])
    expected, expected_normed = attnres_reference.attnres(**x)
    assert_close_rms("h", h[-3:], expected, 4e-3)
    assert_close_rms("normed", normed[-3:], expected_normed, 6e-3)
    assert (h[:-3] == 0).all()


@pytest.mark.parametrize("name", LINE)
def test_a_long_sequence(name: str) -> None:
    plain = linear_judge.drawings(name)["plain"][1]
    x = linear_judge.make(name, replace(plain, T=5000, H=4, K=128), "cuda")
    outputs, expected = get_op(name).call(**x), get_op(name).reference(**x)
    for key, value in outputs.items():
        assert_close_rms(key, value, expected[key], 5e-3)
