"""AttnRes, the linear-attention line and cached attention compile ahead of time for both backends, without spills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from k3dsl.ops.registry import get_op
from k3dsl.runtime.executable import fitted
from k3dsl.targets import get_target

MATRIX = {"sm_80": "mma.sync", "sm_90a": "wgmma", "sm_100a": "tcgen05", "sm_120a": "mma.sync", "gfx942": "mfma"}
POINTS: dict[str, tuple[str, Mapping[str, int], Mapping[str, Any]]] = {
    "attnres.site": ("attnres.site", {}, {}),
    "attnres.site-logits": ("attnres.site", {}, {"logits": True, "h": False, "snapshot": True}),
    "attnres.site-unrolled": ("attnres.site", {}, {"unroll": True, "ahead": 1}),
    "attnres.phase1": ("attnres.phase1", {}, {}),
    "attnres.merge": ("attnres.merge", {}, {"snapshot": True}),
    "gated_delta_rule": ("gated_delta_rule", {"H": 8}, {}),
    "gated_delta_rule-varlen": ("gated_delta_rule", {"H": 8}, {"varlen": True, "l2norm": False}),
    "delta_rule": ("delta_rule", {"H": 8}, {}),
    "linear_attention": ("linear_attention", {"H": 8}, {}),
    "linear_attention-normalized": ("linear_attention", {"H": 8}, {"normalize": True, "varlen": True}),
    "gated_delta_rule.decode": ("gated_delta_rule.decode", {}, {}),
    "attention.decode": ("attention.decode", {}, {}),
    "attention.decode-split": ("attention.decode", {"B": 1, "S": 32768, "T": 4}, {}),
}
QUICK = ("attnres.site", "attnres.phase1", "attnres.merge", "gated_delta_rule", "linear_attention", "attention.decode")
PRODUCTS = {"score", "prep", "scan", "rescan", "linear", "attend"}
TRITON = [
    pytest.param(name, target, marks=[] if name in QUICK and target == "sm_90a" else [pytest.mark.slow])
    for target in ("sm_90a", "sm_80", "sm_100a", "sm_120a", "gfx942")
    for name in POINTS
]
# half a minute each
TILELANG = [pytest.param(name, marks=pytest.mark.slow) for name in POINTS if name != "attnres.site-unrolled"]


def check(name: str, backend: str, target_name: str) -> None:
    op, dims, settings = POINTS[name]
    target = get_target(target_name)
    for launch in get_op(op).point(dims, settings, symbolic=True).plan(backend).launches:
        _, artifact = fitted(launch, target)
        found = artifact.inspection
        assert found.shared_bytes is not None
        assert found.shared_bytes <= target.shared_per_block
        if target_name in ("sm_90a", "sm_100a"):
            assert found.spill_bytes in (0, None), launch.label
        if launch.label in PRODUCTS:
            assert set(found.instructions) & {MATRIX[target_name], "mma.sync"}, launch.label


@pytest.mark.parametrize(("name", "target"), TRITON)
def test_it_compiles_to_triton(name: str, target: str) -> None:
    pytest.importorskip("triton")
    check(name, "triton", target)


@pytest.mark.parametrize("name", TILELANG)
def test_it_compiles_to_tilelang(name: str) -> None:
    pytest.importorskip("tilelang")
    check(name, "tilelang", "sm_90a")


def test_the_scan_of_the_gated_delta_rule_is_kdas() -> None:
    """One source: the kernel that carries the state is the same IR as KDA's for the same chunk and factors."""
    from k3dsl.ir.identity import kernel_hash

    dims = {"T": 4096, "H": 8, "K": 128, "V": 128}
    kda = get_op("kda.forward").point(dims, {"chunk": 32}, symbolic=True).plan("torch")
    line = get_op("gated_delta_rule").point(dims, {"chunk": 32}, symbolic=True).plan("torch")
    scans = [next(x.kernel for x in plan.launches if x.label == "scan") for plan in (kda, line)]
    assert kernel_hash(scans[0]) == kernel_hash(scans[1])
