"""The generated Triton of every op's kernels, for an H200 with default knobs, as it was last read by a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("triton")
from k3dsl.ops.registry import get_op
from k3dsl.runtime.executable import lower
from k3dsl.targets import get_target

POINTS: dict[str, tuple[str, Mapping[str, int], Mapping[str, Any]]] = {
    "matmul": ("matmul", {}, {}),
    "matmul-descriptors": ("matmul", {}, {"matmul.descriptors": ("a", "b", "o")}),
    "softmax": ("softmax", {}, {}),
    "softmax-two-passes": ("softmax", {"N": 100_000}, {}),
    "rmsnorm": ("rmsnorm", {}, {}),
    "attention": ("attention", {}, {}),
    "attention-d96-full": ("attention", {"D": 96, "HK": 8}, {"causal": False, "lse": False}),
    "segment_sum": ("segment_sum", {}, {}),
    "moe-experts": ("moe.experts", {}, {}),
    "moe-experts-few-mxfp4": ("moe.experts", {"T": 64, "E": 896}, {"weights": "mxfp4"}),
    "moe-router": ("moe.router", {}, {}),
    "moe-situ": ("moe.situ", {}, {}),
    "kda-forward": ("kda.forward", {}, {}),
    "kda-forward-segments": ("kda.forward", {"H": 12, "T": 32768}, {}),
    "kda-forward-one": ("kda.forward", {}, {"form": "one", "chunk": 16, "block_v": 128}),
    "kda-forward-softplus-varlen": ("kda.forward", {}, {"gate": "softplus", "lower_bound": None, "varlen": True}),
    "kda-decode": ("kda.decode", {}, {}),
    "kda-step": ("kda.step", {}, {}),
    "kda-step-kept": ("kda.step", {"T": 4}, {"kept": True}),
    "kda-commit": ("kda.commit", {}, {}),
    "causal_conv1d": ("causal_conv1d", {}, {}),
    "causal_conv1d-varlen": ("causal_conv1d", {"N": 3}, {"varlen": True, "initial_state": "bf16"}),
    "causal_conv1d-update": ("causal_conv1d.update", {}, {}),
    "gated_rmsnorm": ("gated_rmsnorm", {}, {}),
    "attention-decode": ("attention.decode", {}, {}),
    "attention-decode-split": ("attention.decode", {"B": 1, "S": 32768}, {}),
    "mla-prefill": ("mla.prefill", {}, {}),
    "mla-prefill-varlen": ("mla.prefill", {}, {"varlen": True, "lse": True}),
    "mla-decode": ("mla.decode", {}, {}),
    "mla-decode-tokens": ("mla.decode", {"B": 64, "T": 2}, {"num_splits": 1, "block_n": 128, "lse": True}),
    "mla-cache-write": ("mla.cache_write", {}, {}),
    "attnres-site": ("attnres.site", {}, {}),
    "attnres-phase1": ("attnres.phase1", {"N": 3}, {}),
    "attnres-merge": ("attnres.merge", {}, {}),
    "gated-delta-rule": ("gated_delta_rule", {}, {}),
    "gated-delta-rule-decode": ("gated_delta_rule.decode", {}, {}),
    "linear-attention": ("linear_attention", {}, {}),
}


def readable(text: str) -> str:
    """The code without its heading, which has the IR's hash, and without origin lines: both change with edits elsewhere."""
    code = text[text.index("import triton\n") :]
    return "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("# "))


@pytest.mark.parametrize("name", POINTS)
def test_the_generated_source_is_the_one_on_file(name: str, golden: Callable[[str, str], None]) -> None:
    op, dims, settings = POINTS[name]
    plan = get_op(op).point(dims, settings, symbolic=True).plan("triton")
    for launch in plan.launches:
        single = len(plan.launches) == 1
        golden(name if single else f"{name}-{launch.label}", readable(lower(launch, get_target("sm_90a")).text))
