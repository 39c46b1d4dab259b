"""The MLA kernels compile ahead of time, and the machine code is what was meant: wgmma, shared memory, no spills, 64 bits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("triton")
from k3dsl.backends.base import Artifact
from k3dsl.errors import ResourceError
from k3dsl.ops.mla import space
from k3dsl.ops.registry import get_op
from k3dsl.runtime.executable import fitted, lower
from k3dsl.runtime.explain import explain
from k3dsl.targets import all_targets, get_target

H200 = get_target("sm_90a")
DECODES: list[dict[str, int]] = [{}, {"H": 24}, {"page": 32}, {"page": 16, "T": 4}, {"C": 256, "E": 32}]


def compiled(
    name: str, dims: Mapping[str, int], settings: Mapping[str, Any], backend: str, target: str = "sm_90a"
) -> dict[str, Artifact]:
    where = get_target(target)
    plan = get_op(name).point(dims, settings, symbolic=True, target=where).plan(backend)
    return {launch.label: fitted(launch, where)[1] for launch in plan.launches}


def check(artifact: Artifact, families: set[str], spills: int = 0) -> None:
    found = artifact.inspection
    assert set(found.instructions) - {"setmaxnreg"} == families
    assert found.shared_bytes is not None
    assert found.shared_bytes <= H200.shared_per_block
    assert found.spill_bytes is not None
    assert found.spill_bytes <= spills


def test_the_defaults_for_k3_use_wgmma_and_hardly_spill() -> None:
    check(compiled("mla.prefill", {}, {}, "triton")["mla_prefill"], {"wgmma"})
    decode = compiled("mla.decode", {}, {}, "triton")
    # 64 keys a step took 0.62 ms on an H200 where 32 without such a spill took 0.80 (B128 H64 S8192)
    check(decode["mla_decode"], {"wgmma"}, 192)
    check(decode["mla_combine"], set())
    check(compiled("mla.cache_write", {}, {}, "triton")["mla_cache_write"], set())


VARIANTS = [
    ("mla.prefill", {}, {"varlen": True, "lse": True, "packed": False}, {"wgmma"}, 0),
    ("mla.prefill", {"T": 33, "S": 100}, {"lse": True}, {"wgmma"}, 0),
    ("mla.prefill", {"T": 16}, {"lse": True}, {"mma.sync"}, 0),
    ("mla.prefill", {}, {"dtype": "f32"}, set(), 0),
    *[("mla.prefill", {}, dict(seed), {"wgmma"}, 0) for seed in space.PREFILL.seeds],
    # one split writes the result itself: a few numbers that the loop does not use go to local memory and back once
    ("mla.decode", {"B": 64}, {"lse": True}, {"wgmma"}, 256),
    ("mla.decode", {"B": 64, "H": 48, "T": 2}, {"lse": True}, {"wgmma"}, 256),
    ("mla.decode", {"H": 12}, {}, {"mma.sync"}, 0),
    ("mla.decode", {"H": 24}, {}, {"mma.sync"}, 0),
    ("mla.decode", {"page": 16}, {}, {"wgmma"}, 0),
    ("mla.decode", {}, {"dtype": "f32"}, set(), 0),
    ("mla.decode", {}, {"stages": 4}, {"wgmma"}, 192),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dims", "settings", "families", "spills"), VARIANTS)
def test_a_variant_compiles_for_hopper_within_its_limits(name, dims, settings, families, spills) -> None:
    found = compiled(name, dims, settings, "triton")
    check(found[name.replace(".", "_")], families, spills)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_100a", "gfx942"])
@pytest.mark.parametrize("name", ["mla.prefill", "mla.cache_write"])
def test_every_op_compiles_and_fits_every_target(name: str, target: str) -> None:
    fits(name, {}, target)


@pytest.mark.parametrize(
    ("target", "dims"),
    [("sm_120a", {}), *(pytest.param(t.name, d, marks=pytest.mark.slow) for t in all_targets() for d in DECODES)],
)
def test_decode_has_blocks_that_fit_every_target(target: str, dims: dict[str, int]) -> None:
    """64 rows of queries beside 64 keys take 147 KiB."""
    fits("mla.decode", dims, target)


def test_narrow_blocks_are_all_of_the_narrow_rule_and_keep_their_registers() -> None:
    op, where = get_op("mla.decode"), get_target("gfx942")
    few = op.point({"H": 12}, {}, target=where).knobs
    for dims in ({}, {"H": 24, "T": 4}, {"page": 128}):
        knobs = op.point(dims, {}, target=where).knobs
        assert {n: knobs[n] for n in knobs if n != "num_splits"} == {n: few[n] for n in few if n != "num_splits"}
    assert compiled("mla.decode", {}, {}, "triton", "gfx942")["mla_decode"].inspection.spill_bytes == 0


def test_fp32_blocks_that_nothing_holds_are_refused_before_ptxas_tries_them() -> None:
    """It took 107 s to find that 311552 bytes are more than 232448."""
    wide = {"dtype": "f32", "block_h": 64, "block_n": 64}
    point = get_op("mla.decode").point({"H": 64}, wide, symbolic=True)
    found = explain(point, "triton", H200)
    assert [(r.launch, r.reason.code) for r in found.refusals] == [("mla_decode", "shared_memory")]
    launch = point.plan("triton").launches[0]
    with pytest.raises(ResourceError, match="needs 294912 bytes of shared memory per program, and sm_90a has 232448"):
        fitted(launch, H200)


def fits(name: str, dims: Mapping[str, int], target: str) -> None:
    for artifact in compiled(name, dims, {}, "triton", target).values():
        assert artifact.inspection.shared_bytes is not None
        assert artifact.inspection.shared_bytes <= get_target(target).shared_per_block


TILELANG = [
    ("mla.prefill", {}, {}, {"wgmma"}),
    ("mla.prefill", {}, {"varlen": True, "lse": True, "packed": False}, {"wgmma"}),
    ("mla.decode", {}, {}, {"wgmma"}),
    ("mla.decode", {}, {"block_n": 64, "stages": 2}, {"wgmma"}),
    ("mla.decode", {"B": 64, "T": 2}, {"lse": True}, {"wgmma"}),
    ("mla.decode", {"H": 12}, {}, {"mma.sync"}),
    ("mla.cache_write", {}, {}, set()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dims", "settings", "families"), TILELANG)
def test_tilelang_compiles_for_hopper_without_spills(name, dims, settings, families) -> None:
    pytest.importorskip("tilelang")
    found = compiled(name, dims, settings, "tilelang")
    check(found[name.replace(".", "_")], families)


@pytest.mark.parametrize("block", [32, 128])
def test_generated_code_counts_pages_in_64_bits(block: int) -> None:
    """A page number by itself, and page numbers gathered: 58255 pages of 64 x 576 are past 2^31 elements."""
    plan = space.DECODE.point({}, {"block_n": block}, symbolic=True).plan("triton")
    reads = [x for x in lower(plan.launches[0], H200).text.splitlines() if "tl.load(kv_cache" in x]
    assert len(reads) == 4
    assert all(re.search(r"page(_1)?(\[:, None\])?\.to\(tl\.int64\) \*", x) for x in reads)


def test_the_latent_is_read_once_for_keys_and_values() -> None:
    """Two reads of a cached row in each of the two loops: 512 numbers and 64, and none of the 512 again."""
    text = lower(space.DECODE.point({}, {}, symbolic=True).plan("triton").launches[0], H200).text
    loop = text[text.index("for j in") : text.index("for j_1 in")]
    assert loop.count("tl.load(kv_cache") == 2
    assert len(re.findall(r"tl\.dot\(", loop)) == 3
    assert "tl.trans(latent)" in loop
    assert re.search(r"tl\.dot\(p\.to\(tl\.bfloat16\), latent,", loop)


def test_prefill_never_copies_the_shared_key() -> None:
    text = lower(space.PREFILL.point({}, {}, symbolic=True).plan("triton").launches[0], H200).text
    loop = text[text.index("for j in") : text.index("for j_1 in")]
    assert re.search(r"tl\.dot\(q_nope, tl\.trans\(\w+\), tl\.dot\(q_pe, tl\.trans\(\w+\)\)\)", loop)
    (shared,) = [x for x in loop.splitlines() if "tl.load(k_pe" in x]
    assert "head" not in shared
    assert "mask" not in loop  # the body's blocks of keys are whole and below the diagonal
