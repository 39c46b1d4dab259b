"""The MoE kernels compile ahead of time on both GPU backends, for K3's dims: instructions, no spills, 64-bit places."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from k3dsl.backends.base import Artifact
from k3dsl.ops.moe.space import EXPERTS
from k3dsl.ops.registry import get_op
from k3dsl.runtime.executable import fitted, lower
from k3dsl.targets import get_target

K3 = {"E": 896, "K": 16, "D": 3584, "I": 3072}
FEW, SOME, MANY = {**K3, "T": 64}, {**K3, "T": 8192}, {**K3, "T": 32768}  # 1, 146 and 585 rows an expert
PRODUCTS = ("logits", "gate_up", "down")
# name: op, dims, settings, launches
POINTS: dict[str, tuple[str, Mapping[str, int], Mapping[str, Any], tuple[str, ...]]] = {
    "few": ("moe.experts", FEW, {}, ("gate_up", "down")),
    "some": ("moe.experts", SOME, {}, ("gate_up", "down")),
    "many": ("moe.experts", MANY, {}, ("gate_up", "down", "combine")),
    "grouped": ("moe.experts", SOME, {"group": 4}, ("gate_up",)),
    "gathered": ("moe.experts", SOME, {"gather": "before", "wide_down": True}, ("gather", "gate_up", "down")),
    "few-mxfp4": ("moe.experts", FEW, {"weights": "mxfp4"}, ("gate_up", "down")),
    "some-mxfp4": ("moe.experts", SOME, {"weights": "mxfp4"}, ("gate_up", "down")),
    "many-mxfp4": ("moe.experts", MANY, {"weights": "mxfp4"}, ("gate_up", "down")),
    "fp16": ("moe.experts", SOME, {"dtype": "f16", "activation": "silu"}, ("gate_up", "down")),
    "fp32": ("moe.experts", SOME, {"dtype": "f32"}, ("gate_up", "down")),
    "kimi-linear": (
        "moe.experts",
        {"T": 4096, "E": 256, "K": 8, "D": 2304, "I": 1024},
        {"activation": "silu"},
        ("gate_up", "down"),
    ),
    "sort": ("moe.sort", {"T": 8192}, {}, ("count", "offsets", "place")),
    "sort-few": ("moe.sort", {"T": 4}, {"ids_dtype": "i64", "block_m": 16}, ("count", "offsets", "place")),
    "router": ("moe.router", {"T": 8192}, {}, ("logits", "topk")),
    "router-few": ("moe.router", {"T": 4}, {}, ("logits", "topk")),
    "router-fp32": ("moe.router", {"T": 512}, {"dtype": "f32"}, ("logits",)),
    "topk-softmax": ("moe.topk", {}, {"scoring": "softmax", "bias": False}, ("topk",)),
    "situ": ("moe.situ", {}, {}, ("situ",)),
    "situ-backward": ("moe.situ", {}, {"backward": True}, ("situ_backward",)),
}
SPILLS_ALLOWED = {
    ("tilelang", "fp32"): 10**6,  # plain multiply-adds of whole tiles
    ("triton", "some-mxfp4"): 96,  # bytes with Triton 3.9; none with 3.6
    ("triton", "many-mxfp4"): 64,
}


def built(name: str, backend: str, target: str) -> dict[str, Artifact]:
    op, dims, settings, labels = POINTS[name]
    plan = get_op(op).point(dims, settings, symbolic=True).plan(backend)
    launches = [launch for launch in plan.launches if launch.label in labels]
    assert len(launches) == len(labels)
    return {launch.label: fitted(launch, get_target(target))[1] for launch in launches}


def check(name: str, backend: str, target: str = "sm_90a") -> None:
    wanted = get_target(target).matrix_instructions
    for label, artifact in built(name, backend, target).items():
        found = artifact.inspection
        assert artifact.binary[:4] == b"\x7fELF"
        assert (found.spill_bytes or 0) <= SPILLS_ALLOWED.get((backend, name), 0), label
        if label not in PRODUCTS:
            assert not set(found.instructions) & {"wgmma", "mma.sync", wanted}
        elif "fp32" not in name or label == "logits":
            assert found.instructions.get(wanted, 0) > 0, label
            assert "mma.sync" not in found.instructions, label


QUICK = ("few-mxfp4", "some", "router-few")


@pytest.mark.parametrize("name", QUICK)
def test_triton_builds_it(name: str) -> None:
    pytest.importorskip("triton")
    check(name, "triton")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in POINTS if n not in QUICK])
def test_triton_builds_the_rest(name: str) -> None:
    pytest.importorskip("triton")
    check(name, "triton")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_100a", "sm_120a", "gfx942"])
@pytest.mark.parametrize("name", ["few", "some-mxfp4", "sort", "router", "topk-softmax"])
def test_triton_builds_it_for_other_targets(name: str, target: str) -> None:
    """Default knobs are an H200's: elsewhere products may spill, but they build and have matrix instructions."""
    pytest.importorskip("triton")
    for label, artifact in built(name, "triton", target).items():
        assert artifact.binary[:4] == b"\x7fELF"
        if label in PRODUCTS:
            assert set(artifact.inspection.instructions) & {get_target(target).matrix_instructions, "mma.sync"}


@pytest.mark.slow
@pytest.mark.parametrize("name", POINTS)
def test_tilelang_builds_it(name: str) -> None:
    pytest.importorskip("tilelang")
    check(name, "tilelang")


@pytest.mark.parametrize("weights", ["plain", "mxfp4"])
def test_places_in_weights_and_rows_are_in_64_bits(weights: str) -> None:
    """896 x 3072 x 3584 elements are far beyond 2^31, and so are T K rows of 3584 from T = 37450 on."""
    plan = EXPERTS.point(SOME, {"weights": weights}, symbolic=True).plan("triton")
    texts = {launch.label: lower(launch, get_target("sm_90a")).text for launch in plan.launches}
    reads = re.findall(r"tl\.load\((?:w_gate|w_up|gate_scale|up_scale) \+ .*", texts["gate_up"])
    assert len(reads) == (2 if weights == "plain" else 4)
    for line in (*reads, *re.findall(r"tl\.load\(w_down \+ .*", texts["down"])):
        assert "expert.to(tl.int64) * " in line
    taken = [("gate_up", "x")] if weights == "plain" else [("gather", "x"), ("gather", "xs"), ("gate_up", "xs")]
    for label, tensor in (*taken, ("gate_up", "h"), ("down", "h"), ("down", "y"), ("combine", "y")):
        lines = re.findall(rf"tl\.(?:load|store)\({tensor} \+ .*", texts[label])
        assert lines
        assert all(".to(tl.int64) * " in line for line in lines), (label, tensor)


def test_no_kernel_adds_floats_atomically() -> None:
    for name in ("some", "sort", "router"):
        op, dims, settings, _ = POINTS[name]
        for launch in get_op(op).point(dims, settings, symbolic=True).plan("triton").launches:
            assert "atomic" not in lower(launch, get_target("sm_90a")).text
