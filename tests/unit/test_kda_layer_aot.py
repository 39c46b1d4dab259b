"""The kernels around KDA, at the shapes that decide, compile for an H200 through both generators without spilling."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("triton")
from k3dsl.backends.base import Artifact
from k3dsl.ops.registry import get_op
from k3dsl.runtime.executable import build
from k3dsl.targets import get_target


def built(op: str, dims: Mapping[str, int], settings: Mapping[str, Any], backend: str = "triton") -> list[Artifact]:
    plan = get_op(op).point(dims, settings, symbolic=True).plan(backend)
    return [build(launch, get_target("sm_90a")) for launch in plan.launches]


def test_the_convolution_moves_8_bytes_a_thread() -> None:
    """Three older rows and eight of the step are read, eight are written; the weight is read wide, once a program. Twice the
    threads at half the width took 112 us on an H200 where 16 bytes a thread took 119 (T8192 P12288)."""
    convolve, _ = built("causal_conv1d", {}, {})
    assert convolve.assembly is not None
    moved = Counter(re.findall(r"(?:ld|st)\.global\S*", convolve.assembly))
    assert moved == {"ld.global.v2.b32": 3 + 8, "ld.global.v4.b32": 4, "st.global.v2.b32": 8}
    assert convolve.inspection.registers <= 64  # four programs of 256 threads a multiprocessor


@pytest.mark.slow
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_the_step_keeps_a_whole_state_in_registers(tokens: int, v_first: bool, dtype: str) -> None:
    for kept in (False, True):
        settings = {"v_first": v_first, "kept": kept, **dict.fromkeys(("dtype", "gate_dtype", "beta_dtype"), dtype)}
        (artifact,) = built("kda.step", {"T": tokens}, settings)
        assert artifact.inspection.spill_bytes == 0
        threads = 32 * artifact.inspection.warps
        assert 2 * artifact.inspection.registers * threads <= 65536  # two heads a multiprocessor


TILELANG: dict[str, tuple[str, Mapping[str, int], Mapping[str, Any]]] = {
    "step": ("kda.step", {}, {}),
    "step-kept": ("kda.step", {"T": 8}, {"kept": True}),
    "commit": ("kda.commit", {}, {}),
    "conv": ("causal_conv1d", {}, {}),
    "conv-varlen": ("causal_conv1d", {"N": 3}, {"varlen": True, "initial_state": "f32", "final_state": "f32"}),
    "update": ("causal_conv1d.update", {"T": 2}, {}),
    "norm": ("gated_rmsnorm", {}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TILELANG)
def test_tilelang_builds_them_without_spilling(name: str) -> None:
    pytest.importorskip("tilelang")
    from k3dsl.backends.tilelang import nvcc

    if nvcc.find() is None:
        pytest.skip("there is no nvcc")
    for artifact in built(*TILELANG[name], "tilelang"):
        assert artifact.format == "cubin"
        assert artifact.inspection.spill_bytes == 0
