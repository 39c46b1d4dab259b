"""TileLang as a backend of ops: plans, k3dsl.compile, bundles and the command line, on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import k3dsl
from k3dsl.errors import ArgumentError, LegalityError, UnknownNameError
from k3dsl.language import In, Out, bf16, kernel, program_id, span
from k3dsl.ops.registry import get_op
from k3dsl.runtime import executable
from k3dsl.runtime.bundle_writer import save
from k3dsl.runtime.dispatch import choose_backend, using_backend
from k3dsl.targets import get_target

pytest.importorskip("tilelang")

from k3dsl.backends.tilelang import nvcc
from k3dsl.backends.tilelang.schedule import TileLangSchedule
from k3dsl.backends.triton.schedule import TritonSchedule

needs_nvcc = pytest.mark.skipif(nvcc.find() is None, reason="there is no nvcc")


@kernel(grid=lambda d, c: (d.R,))
def double(d, c, x=In("R 64", bf16), y=Out("R 64", bf16)):
    rows = span(program_id(0), 1, end=d.R)
    y[rows, :] = x[rows, :] * 2


def test_every_launch_of_a_plan_gets_a_schedule_of_its_backend():
    plan = get_op("kda.forward").point({"H": 2}, {"block_v": 128}, symbolic=True).plan("tilelang")
    assert {launch.backend for launch in plan.launches} == {"tilelang"}
    scan = plan.launches[1].schedule
    assert isinstance(scan, TileLangSchedule)
    assert scan.threads == 256  # a warp group for every 64 rows of the state


def test_schedule_fields_of_tilelang_are_set_by_launch():
    settings = {"scan.threads": 256, "scan.stages.chunks": 2, "scan.warp_specialize": False}
    plan = get_op("kda.forward").point({"H": 2}, settings, symbolic=True).plan("tilelang")
    scan = plan.launches[1].schedule
    assert (scan.threads, scan.stages, scan.warp_specialize) == (256, {"chunks": 2}, False)
    with pytest.raises(UnknownNameError, match="num_warps"):
        get_op("matmul").point({}, {"matmul.num_warps": 4}).plan("tilelang")


def test_one_launch_can_go_through_another_backend():
    point = get_op("kda.forward").point({"H": 2}, {"scan.backend": "tilelang"}, symbolic=True)
    backends = {launch.label: (launch.backend, type(launch.schedule)) for launch in point.plan("triton").launches}
    assert backends["prep"] == ("triton", TritonSchedule)
    assert backends["scan"] == ("tilelang", TileLangSchedule)
    assert {launch.backend for launch in point.plan("torch").launches} == {"torch"}
    with pytest.raises(LegalityError, match="generates no source"):
        get_op("matmul").point({}, {"matmul.backend": "torch"}).plan("triton")


def test_a_backend_can_be_chosen_for_a_while(monkeypatch):
    gpu = torch.device("cuda")
    assert choose_backend(gpu) == "triton"
    with using_backend("tilelang"):
        assert choose_backend(gpu) == "tilelang"
        assert choose_backend(torch.device("cpu")) == "torch"
        with using_backend(None):
            assert choose_backend(gpu) == "tilelang"
    monkeypatch.setenv("K3DSL_BACKEND", "tilelang")
    assert choose_backend(gpu) == "tilelang"


def test_compile_takes_the_backend_by_name_or_from_the_schedule():
    dims = {"R": 128}
    for given in ({"backend": "tilelang"}, {"schedule": TileLangSchedule(threads=64)}):
        compiled = k3dsl.compile(double, dims=dims, target="sm_90a", **given)
        assert compiled.source.backend == "tilelang"
    assert compiled.source.options["threads"] == 64
    with pytest.raises(ArgumentError, match="the schedule is one of tilelang, and the backend is triton"):
        k3dsl.compile(double, dims=dims, target="sm_90a", schedule=TileLangSchedule(), backend="triton")
    with pytest.raises(UnknownNameError, match="unknown backend 'tilelangs'"):
        k3dsl.compile(double, dims=dims, target="sm_90a", backend="tilelangs")


def test_amd_is_refused():
    plan = get_op("softmax").point({}, {}, symbolic=True).plan("tilelang")
    with pytest.raises(LegalityError, match="gfx942"):
        executable.build(plan.launches[0], get_target("gfx942"))


@needs_nvcc
def test_a_bundle_of_a_kernel_with_descriptors_loads_without_a_compiler(tmp_path):
    plan = get_op("matmul").point({}, {}, symbolic=True).plan("tilelang")
    summary = save(plan, "sm_90a", tmp_path / "bundle")
    (launch,) = summary["launches"]
    assert (launch["backend"], launch["needs"], launch["note"]) == ("tilelang", None, None)
    assert launch["instructions"]["wgmma"] > 0
    assert {p.suffix for p in (tmp_path / "bundle").iterdir()} == {".ir", ".py", ".cu", ".cubin", ".json"}
    metadata = json.loads((tmp_path / "bundle" / "metadata.json").read_text())
    assert {"tilelang", "nvcc"} <= set(metadata["toolchain"])
    kinds = [p[1] for p in metadata["launches"][0]["host_call"]["parameters"]]
    assert "tensor_map" in kinds
    script = (
        "import sys\n"
        "for name in ('triton', 'tilelang', 'tvm_ffi'):\n"
        "    sys.modules[name] = None\n"
        "import k3dsl\n"
        "bundle = k3dsl.load(sys.argv[1])\n"
        "print(bundle._launches[0].kernel(0, 'sm_90a').call.grid)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "bundle"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr


@needs_nvcc
def test_a_dot_that_missed_the_targets_instructions_is_reported(tmp_path):
    # wgmma takes 64 rows at least
    settings = {"block_m": 32, "matmul.threads": 128}
    op = get_op("matmul")
    if 32 not in next(k.choices for k in op.knobs if k.name == "block_m"):
        pytest.skip("matmul has no tile of 32 rows")
    (launch,) = save(op.point({}, settings, symbolic=True).plan("tilelang"), "sm_90a", tmp_path / "b")["launches"]
    assert "none of its dots became wgmma" in launch["note"]


def shown(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "k3dsl.cli.main", *words], capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    ("stage", "text"),
    [("tilelang", "prim_func"), ("cuda", "__global__ void __launch_bounds__(")],
)
def test_show_prints_each_stage(stage, text):
    done = shown("show", "softmax", "--stage", stage)
    assert done.returncode == 0, done.stderr
    assert text in done.stdout


def test_a_stage_of_another_backend_is_refused():
    done = shown("show", "softmax", "--stage", "triton", "--backend", "tilelang")
    assert done.returncode == 2
    assert "code of backend tilelang has no stage triton" in done.stderr
