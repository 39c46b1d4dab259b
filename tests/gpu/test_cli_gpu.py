"""The commands that a GPU machine is for: judging through Triton, and timing with peers and floors."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from k3dsl.cli.main import app

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


def run(*args: str):
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("op", ["kda.decode", "matmul", "softmax", "rmsnorm"])
def test_run_judges_through_triton(op):
    report = json.loads(run("run", op, "--json").stdout)
    assert report["device"] == f"{torch.cuda.get_device_name()}, triton backend"
    assert report["failed"] == 0
    assert report["passed"] >= 1


def test_run_takes_knobs_and_schedules():
    settings = ("--set", "block_v=16", "--set", "decode.num_warps=2")
    assert json.loads(run("run", "kda.decode", "--dims", "B=3,H=2", *settings, "--json").stdout)["failed"] == 0


def test_bench_times_the_op_and_each_kernel_against_its_floor():
    dims = ("--dims", "B=1,T=2048,H=16")
    result = json.loads(run("bench", "kda.forward", *dims, "--rep-ms", "20", "--json").stdout)
    assert "do_bench" in result["timing"]["timer"]
    assert "CUDA graph" in result["graph"]["timer"]
    assert 0 < result["graph"]["median_ms"] < 1.1 * result["timing"]["median_ms"]
    assert result["host_us"] > 0
    assert {"prep", "scan"} <= {launch["label"] for launch in result["launches"]}
    assert 100 < result["copy_gbps"] < 20000
    for launch in result["launches"]:
        assert 0 < launch["floor_ms"] / launch["timing"]["median_ms"] == pytest.approx(launch["share"])
    if torch.cuda.get_device_properties(0).L2_cache_size < 100e6:  # tensors of this size do not stay in the L2 cache
        assert all(launch["share"] < 1.2 for launch in result["launches"] if launch["label"] in ("prep", "scan"))


def test_doctor_says_that_all_works():
    found = json.loads(run("doctor", "--json").stdout)
    assert found["gpu"]["target"] is not None
    assert all(row["works"] for row in found["works"])
