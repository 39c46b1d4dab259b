"""Every op compiles ahead of time for every target, on a machine without a GPU, and the machine code is what was meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("triton")
from interpreter_cases import CONSTRUCTS

from k3dsl.backends.base import Artifact
from k3dsl.backends.triton.build import build as build_source
from k3dsl.backends.triton.lower import lower
from k3dsl.backends.triton.schedule import TritonSchedule
from k3dsl.errors import ResourceError
from k3dsl.ir.graph import Kernel as IRKernel
from k3dsl.ir.types import DTYPES
from k3dsl.language import (
    In,
    Out,
    argmax,
    cos,
    cummax,
    cumprod,
    cumsum,
    erf,
    exp,
    exp2,
    f8e5m2,
    f32,
    floor,
    kernel,
    log,
    log1p,
    log2,
    maximum,
    minimum,
    program_id,
    reciprocal,
    rsqrt,
    sigmoid,
    sin,
    softplus,
    sqrt,
    tanh,
    where,
)
from k3dsl.ops.registry import get_op
from k3dsl.passes.simplify import simplify
from k3dsl.runtime.executable import build, fitted
from k3dsl.targets import get_target

TARGETS = ("sm_80", "sm_90a", "sm_100a", "sm_120a", "gfx942")
OPS: dict[str, tuple[str, Mapping[str, int], Mapping[str, Any]]] = {
    "matmul": ("matmul", {}, {"block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4}),
    "matmul-edges": ("matmul", {"M": 33, "N": 35, "K": 37}, {}),
    "softmax": ("softmax", {"N": 1000}, {}),
    "softmax-two-passes": ("softmax", {"N": 100_000}, {"block": 1024}),
    "rmsnorm": ("rmsnorm", {"D": 2304}, {}),
    "attention": ("attention", {"D": 64}, {"block_q": 64, "num_warps": 4}),
    "attention-d96": ("attention", {"D": 96, "HK": 8}, {"block_q": 64, "block_k": 32, "num_warps": 4, "lse": False}),
    "segment_sum": ("segment_sum", {}, {}),
    "causal_conv1d": ("causal_conv1d", {}, {}),
    "causal_conv1d-varlen": ("causal_conv1d", {"N": 3}, {"varlen": True, "initial_state": "f32", "final_state": "f32"}),
    "causal_conv1d.update": ("causal_conv1d.update", {"T": 2}, {}),
    "gated_rmsnorm": ("gated_rmsnorm", {}, {}),
    "kda.step": ("kda.step", {}, {}),
    "kda.step-kept": ("kda.step", {"T": 4}, {"kept": True, "v_first": True, "state": "bf16"}),
    "kda.commit": ("kda.commit", {}, {}),
}
PRODUCTS = {"matmul", "matmul-edges", "attention", "attention-d96"}
QUICK = [("matmul", target) for target in TARGETS] + [(name, "sm_90a") for name in OPS if name != "matmul"]
QUICK += [("attention", "gfx942"), ("rmsnorm", "sm_100a"), ("segment_sum", "sm_80"), ("softmax", "sm_120a")]
CROSS = [(name, target) for name in OPS for target in TARGETS if (name, target) not in QUICK]


def built(name: str, target: str) -> dict[str, Artifact]:
    op, dims, settings = OPS[name]
    plan = get_op(op).point(dims, settings, symbolic=True).plan("triton")
    return {launch.label: build(launch, get_target(target)) for launch in plan.launches}


def check(name: str, target_name: str) -> None:
    target = get_target(target_name)
    for artifact in built(name, target_name).values():
        found = artifact.inspection
        assert artifact.format == ("cubin" if target.vendor == "nvidia" else "hsaco")
        assert artifact.binary[:4] == b"\x7fELF"
        assert found.warps is not None
        assert artifact.launch["threads"] == found.warps * target.warp_size <= target.max_threads_per_block
        assert found.shared_bytes is not None
        assert 0 <= found.shared_bytes <= target.shared_per_block
        if found.registers is not None:
            assert 0 < found.registers <= 512 if target.vendor == "amd" else found.registers <= 255
            assert found.spill_bytes == 0
        # few rows are no work for the large instructions, so an edge shape may have the smaller family
        families = {target.matrix_instructions} | ({"mma.sync"} if name == "matmul-edges" else set())
        assert bool(set(found.instructions) & families) == (name in PRODUCTS)
        assert len(artifact.launch["params"]) >= len(artifact.source.args)


@pytest.mark.parametrize(("name", "target"), QUICK)
def test_an_op_compiles_and_fits_the_target(name: str, target: str) -> None:
    check(name, target)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), CROSS)
def test_every_other_op_and_target(name: str, target: str) -> None:
    check(name, target)


@pytest.mark.parametrize("knobs", [{}, {"block_m": 128, "block_n": 256, "stages": 3}])
def test_a_hopper_matmul_uses_wgmma_and_nothing_else_without_spills(knobs: Mapping[str, Any]) -> None:
    plan = get_op("matmul").point({}, knobs, symbolic=True).plan("triton")
    found = build(plan.launches[0], get_target("sm_90a")).inspection
    assert set(found.instructions) == {"wgmma"}
    assert found.spill_bytes in (0, None)


def test_hopper_attention_uses_wgmma_for_both_products() -> None:
    plan = get_op("attention").point({}, {}, symbolic=True).plan("triton")
    found = build(plan.launches[0], get_target("sm_90a")).inspection
    assert set(found.instructions) == {"wgmma"}
    assert found.spill_bytes in (0, None)


def test_the_kda_scan_uses_wgmma_on_hopper() -> None:
    plan = get_op("kda.forward").point({"H": 8}, {}, symbolic=True).plan("triton")
    (scan,) = (launch for launch in plan.launches if launch.label == "scan")
    assert build(scan, get_target("sm_90a")).inspection.instructions.get("wgmma", 0) > 0


def test_descriptors_become_bulk_copies_on_hopper() -> None:
    settings = {"matmul.descriptors": ("a", "b", "o"), "block_m": 64, "block_n": 64, "num_warps": 4}
    plan = get_op("matmul").point({}, settings, symbolic=True).plan("triton")
    artifact = build(plan.launches[0], get_target("sm_90a"))
    assert "cp.async.bulk.tensor" in artifact.assembly
    assert artifact.launch["global_scratch_bytes"] > 0


# ---- the language ------------------------------------------------------------------------------------------------------


def compiles(ir: IRKernel, target: str) -> None:
    source = lower(ir, TritonSchedule(), get_target(target))
    assert build_source(source, get_target(target)).binary[:4] == b"\x7fELF"


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_every_construct_compiles(name: str) -> None:
    for target in ("sm_90a", "gfx942"):
        compiles(CONSTRUCTS[name].ir(), target)


@kernel(grid=lambda d, c: (4,))
def every_function(d, c, x=In("4 48"), o=Out("4 48"), p=Out("4 48")):
    i = program_id(0)
    t = x[i]
    a = abs(t) + 1.0
    o[i] = exp(-a) + exp2(-a) + log(a) + log2(a) + log1p(a) + sqrt(a) + rsqrt(a) + tanh(t) + sigmoid(t) + softplus(t)
    fast = exp2(-a, approx=True) + sigmoid(t, approx=True) + tanh(t, approx=True) + reciprocal(a, approx=True)
    more = sin(t) + cos(t) + erf(t) + floor(t) + where(t > 0.1, t, 0.1) + 1.0 / a + minimum(t, 0.5)
    reduced = t.max(0) + t.sum(0) * t.min(0) + (t * 0.01).prod(0) + argmax(t, 0).to(x.dtype)
    p[i] = (
        fast + more + maximum(reduced, a) + cumsum(t, 0) + cummax(t, 0) + cumprod(t, 0, reverse=True) + t.select(0, 3)
    )


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "gfx942"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
def test_functions_and_reductions_compile_for_every_float(dtype: str, target: str) -> None:
    t = DTYPES[dtype]
    compiles(simplify(every_function.trace({}, {}, {"x": t, "o": t, "p": t})), target)


@kernel(grid=lambda d, c: (4,))
def bytes_of_floats(d, c, x=In("4 32"), o=Out("4 32", f8e5m2)):
    i = program_id(0)
    rows = x[i].reshape(2, 16)
    o[i] = ((rows.select(0, 1)[None, :] + rows).to(f8e5m2) * rows.to(f32).to(f8e5m2)).reshape(32)


@pytest.mark.parametrize("target", ["sm_90a", "sm_120a", "gfx942"])
def test_8_bit_floats_compile(target: str) -> None:
    compiles(simplify(bytes_of_floats.trace({}, {}, {"x": DTYPES["f8e4m3"]})), target)


def test_a_default_pipeline_depth_shrinks_to_the_targets_shared_memory_and_a_given_one_does_not() -> None:
    target = get_target("gfx942")
    op = get_op("kda.forward")
    scan = op.point({"H": 4}, {}, symbolic=True).plan("triton").launches[1]
    launch, artifact = fitted(scan, target)
    assert scan.schedule.stages["chunks"] == 3
    assert launch.schedule.stages["chunks"] == 2
    assert artifact.inspection.shared_bytes <= target.shared_per_block
    asked = op.point({"H": 4}, {"scan.stages.chunks": 3}, symbolic=True).plan("triton").launches[1]
    with pytest.raises(ResourceError, match="shared memory"):
        fitted(asked, target)
