"""The shared memory that a Triton kernel is sure to need: never more than what it is built with, and near it for a matmul."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3dsl.backends.triton.legality import check
from k3dsl.backends.triton.schedule import TritonSchedule
from k3dsl.backends.triton.shared import least_bytes
from k3dsl.ops.registry import get_op
from k3dsl.runtime import executable
from k3dsl.targets import get_target

pytest.importorskip("triton")
EVEN = {"M": 1024, "N": 1024, "K": 1024}
SQUARE = {"block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4}


def launch_of(op, dims, settings, label=None):
    launches = get_op(op).point(dims, settings, symbolic=True).plan("triton").launches
    return next(x for x in launches if label in (None, x.label))


def least(launch, target) -> int:
    return max((size for _, size in least_bytes(launch.kernel, launch.schedule, get_target(target))), default=0)


@pytest.mark.parametrize(
    ("target", "stages", "bytes"),
    [
        ("sm_90a", 3, 3 * 8192),
        ("sm_80", 3, 2 * 8192),
        ("sm_100a", 3, 2 * 8192),
        ("gfx942", 4, 3 * 8192),
        ("sm_90a", 1, 0),
    ],
)
def test_what_is_in_flight_is_counted(target, stages, bytes):
    # a step of K: 64 x 32 of a and 32 x 64 of b in bf16; Hopper's product reads one more step than is under way
    assert least(launch_of("matmul", EVEN, {**SQUARE, "stages": stages}), target) == bytes


@pytest.mark.parametrize("dims", [{"M": 1023, "N": 1021, "K": 1021}, {"M": 1024, "N": 1032, "K": 1032}])
def test_loads_that_triton_may_not_pipeline_count_nothing(dims):
    assert least(launch_of("matmul", dims, {**SQUARE, "stages": 3}), "sm_90a") == 0


BUILDS = [
    ("matmul", EVEN, {**SQUARE, "stages": 3}, None, "sm_90a", True),
    ("matmul", EVEN, {**SQUARE, "stages": 4}, None, "sm_80", True),
    ("matmul", EVEN, {**SQUARE, "dtype": "f32", "stages": 3}, None, "sm_90a", False),
    ("matmul", EVEN, {**SQUARE, "num_warps": 8, "stages": 3}, None, "sm_90a", False),
    ("matmul", EVEN, {"block_m": 32, "block_n": 64, "block_k": 64, "num_warps": 4, "stages": 3}, None, "sm_90a", False),
    ("attention", {}, {"attention.stages.keys": 3}, None, "sm_90a", False),
    ("kda.forward", {}, {"scan.stages.chunks": 3}, "scan", "sm_90a", False),
]
MORE = [
    ("matmul", {"M": 1024, "N": 1028, "K": 1028}, {**SQUARE, "stages": 3}, None, "sm_90a", False),
    ("matmul", EVEN, {**SQUARE, "stages": 3}, None, "gfx942", True),
    ("matmul", EVEN, {**SQUARE, "stages": 3}, None, "sm_120a", True),
    ("matmul", EVEN, {**SQUARE, "stages": 3}, None, "sm_100a", False),
    (
        "matmul",
        EVEN,
        {"block_m": 256, "block_n": 128, "block_k": 64, "num_warps": 8, "stages": 3},
        None,
        "sm_90a",
        False,
    ),
    (
        "matmul",
        EVEN,
        {"block_m": 16, "block_n": 64, "block_k": 128, "num_warps": 4, "stages": 5},
        None,
        "sm_90a",
        False,
    ),
    ("attention", {"T": 512, "S": 512, "D": 64}, {"attention.stages.keys": 4}, None, "sm_80", False),
    ("attention", {}, {"attention.stages.keys": 2}, None, "sm_100a", False),
    ("kda.forward", {}, {"scan.stages.chunks": 2}, "scan", "sm_80", False),
    ("kda.forward", {}, {"scan.stages.chunks": 3}, "scan", "sm_100a", False),
]


@pytest.mark.parametrize(
    ("op", "dims", "settings", "label", "target", "exact"),
    [*BUILDS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_no_kernel_is_built_with_less(op, dims, settings, label, target, exact):
    launch = launch_of(op, dims, settings, label)
    built = executable.build(launch, get_target(target)).inspection.shared_bytes
    bound = least(launch, target)
    assert bound <= built
    assert not exact or bound == built


def test_a_loop_that_cannot_fit_is_refused_with_its_place_and_numbers():
    launch = launch_of("matmul", EVEN, {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8})
    wide = replace(launch.schedule, stages={"k": 5})
    (reason,) = check(launch.kernel, wide, get_target("sm_90a"))
    assert reason.code == "shared_memory"
    assert "5 stages keeps at least 245760 bytes" in reason.message  # 5 x 48 KiB
    assert "sm_90a has 232448 a program" in reason.message
    assert "kernels.py:" in reason.where
    assert check(launch.kernel, TritonSchedule(num_warps=8, stages={"k": 4}), get_target("sm_90a")) == []
