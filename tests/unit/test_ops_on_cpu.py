"""Ops that compute on the CPU: the knobs they take there, and what a process's first call costs beside computing."""

from __future__ import annotations

import cProfile
import subprocess
import sys

import torch

from k3dsl import ops
from k3dsl.ops.common import covering
from k3dsl.ops.registry import get_op
from k3dsl.runtime.dispatch import planning
from k3dsl.runtime.executable import recording


def test_covering_takes_the_least_choice_that_is_enough():
    assert [covering((32, 64, 128), n) for n in (1, 32, 33, 128, 500)] == [32, 32, 64, 128, 128]


def test_a_call_on_the_cpu_takes_the_cpus_knobs_and_one_for_a_gpu_does_not():
    x, weight = torch.randn(1, 96, dtype=torch.bfloat16), torch.ones(96, dtype=torch.bfloat16)
    with recording() as calls:
        ops.rmsnorm(x, weight)
    assert calls[0].executable.plan.knobs["rows"] == 1
    with planning("triton") as calls:
        ops.rmsnorm(x, weight)
    assert calls[0].executable.plan.knobs["rows"] == 8  # as many as make 1024 elements


def test_experts_on_the_cpu_have_blocks_of_columns_without_padding():
    op = get_op("moe.experts")
    dims = {"T": 1, "E": 16, "K": 4, "D": 96, "I": 64}
    knobs = op.default_knobs(op.resolve_options({}), dims, on_cpu=True)
    assert (knobs["block_n"], knobs["block_k"]) == (32, 128)
    knobs = op.default_knobs(op.resolve_options({}), {**dims, "D": 3584, "I": 3072}, on_cpu=True)
    assert (knobs["block_n"], knobs["block_k"]) == (256, 128)
    knobs = op.default_knobs(op.resolve_options({}), {**dims, "D": 72, "I": 40}, on_cpu=True)
    assert knobs["block_n"] == 128  # no block divides both


def test_the_first_call_imports_nothing_of_torchs_compiler():
    code = (
        "import sys, torch; from k3dsl import ops; ops.rmsnorm(torch.ones(2, 16), torch.ones(16)); "
        "print([n for n in ('torch._dynamo', 'sympy', 'triton') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.strip() == "[]"


def test_a_kernel_can_be_traced_under_a_profiler():
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        get_op("softmax").point({}, {}).plan("torch")
        assert sys.getprofile() is profiler
    finally:
        profiler.disable()
    assert profiler.getstats()
