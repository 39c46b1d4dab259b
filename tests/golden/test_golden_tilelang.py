"""The generated TileLang of every op's kernels, for an H200 with default knobs, as it was last read by a person."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("tilelang")
from k3dsl.ops.registry import get_op
from k3dsl.runtime.executable import lower
from k3dsl.targets import get_target

POINTS: dict[str, tuple[str, Mapping[str, int], Mapping[str, Any]]] = {
    "matmul": ("matmul", {}, {}),
    "matmul-odd": ("matmul", {"M": 300, "N": 129, "K": 127}, {}),
    "softmax": ("softmax", {}, {}),
    "softmax-two-passes": ("softmax", {"N": 100_000}, {}),
    "rmsnorm": ("rmsnorm", {}, {}),
    "attention": ("attention", {}, {}),
    "attention-d96-full": ("attention", {"D": 96, "HK": 8}, {"causal": False, "lse": False}),
    "segment_sum": ("segment_sum", {}, {}),
    "moe-experts": ("moe.experts", {}, {}),
    "moe-experts-few-mxfp4": ("moe.experts", {"T": 64, "E": 896}, {"weights": "mxfp4"}),
    "moe-router": ("moe.router", {}, {}),
    "kda-forward": ("kda.forward", {}, {}),
    "kda-forward-segments": ("kda.forward", {"H": 12, "T": 32768}, {}),
    "kda-decode": ("kda.decode", {}, {}),
    "kda-step": ("kda.step", {}, {}),
    "kda-commit": ("kda.commit", {}, {}),
    "causal_conv1d": ("causal_conv1d", {}, {}),
    "causal_conv1d-update": ("causal_conv1d.update", {}, {}),
    "gated_rmsnorm": ("gated_rmsnorm", {}, {}),
    "attention-decode": ("attention.decode", {}, {}),
    "mla-prefill": ("mla.prefill", {}, {}),
    "mla-decode": ("mla.decode", {}, {}),
    "mla-cache-write": ("mla.cache_write", {}, {}),
    "attnres-site": ("attnres.site", {}, {}),
    "attnres-merge": ("attnres.merge", {}, {}),
    "gated-delta-rule": ("gated_delta_rule", {}, {}),
    "linear-attention": ("linear_attention", {}, {}),
}


def readable(text: str) -> str:
    """The code without its heading, which has the IR's hash, without CUDA that comes with it, and without origin lines."""
    code = text[text.index("import tilelang") :]
    code = re.sub(r'PRELUDE = r""".*?"""', 'PRELUDE = "..."', code, flags=re.DOTALL)
    return "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("# "))


@pytest.mark.parametrize("name", POINTS)
def test_the_generated_source_is_the_one_on_file(name: str, golden: Callable[[str, str], None]) -> None:
    op, dims, settings = POINTS[name]
    plan = get_op(op).point(dims, settings, symbolic=True).plan("tilelang")
    for launch in plan.launches:
        single = len(plan.launches) == 1
        golden(name if single else f"{name}-{launch.label}", readable(lower(launch, get_target("sm_90a")).text))
