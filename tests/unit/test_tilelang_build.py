"""Building generated TileLang ahead of time: machine code, parameters, inspection and errors, without a GPU."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from tilelang_sources import ADD, add_source, dim, gemm_source

import k3dsl
from k3dsl.backends.host_call import HostCall, HostCallKernel
from k3dsl.errors import BuildError, LaunchError, LegalityError, ResourceError
from k3dsl.language import In, Out, Sym, Tile, arange, argmax, argmin, cdiv, f32, i32, kernel, program_id, span
from k3dsl.passes.simplify import simplify
from k3dsl.targets import get_target

pytest.importorskip("tilelang")

from k3dsl.backends.tilelang import cache, nvcc
from k3dsl.backends.tilelang.build import build, lowered_kernel
from k3dsl.backends.tilelang.inspect import inspect_source, is_asynchronous, register_demand, static_shared
from k3dsl.backends.tilelang.load import host_function, load
from k3dsl.backends.tilelang.lower import lower
from k3dsl.backends.tilelang.schedule import TileLangSchedule

needs_nvcc = pytest.mark.skipif(nvcc.find() is None, reason="there is no nvcc")
HOPPER = get_target("sm_90a")
TARGETS = [
    pytest.param(get_target(name), id=name, marks=[pytest.mark.slow] if slow else [])
    for name, slow in (("sm_80", False), ("sm_90a", False), ("sm_100a", True), ("sm_120a", True))
]
over_targets = pytest.mark.parametrize("target", TARGETS)


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(cache_folder, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(cache_folder))


@pytest.fixture
def without_nvcc(monkeypatch, tmp_path):
    monkeypatch.setattr(nvcc, "find", lambda: None)
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))


# ---- machine code and its parameters ----------------------------------------------------------------------------------


@needs_nvcc
@over_targets
def test_every_target_gives_machine_code_and_how_to_launch_it(target):
    artifact = build(add_source(), target)
    assert artifact.format == "cubin"
    assert artifact.binary[:4] == b"\x7fELF"
    assert artifact.target == target.name
    assert artifact.entry == "add_kernel"
    assert 'extern "C" __global__' in artifact.cuda
    assert ".entry add_kernel(" in artifact.assembly
    assert (artifact.launch["threads"], artifact.launch["shared_bytes"]) == (128, 0)
    # three addresses, then n, the length of x (guards of the accesses), and scale; `unused` is gone
    assert artifact.launch["params"] == [8, 8, 8, 4, 4, 4]
    call = HostCall.from_json(artifact.launch["host_call"])
    assert [(p.kind, p.value) for p in call.parameters] == [
        ("pointer", 0),
        ("pointer", 1),
        ("pointer", 2),
        ("scalar", ["shape", 0, 0]),
        ("scalar", ["arg", 4]),
        ("scalar", ["arg", 5]),
    ]
    assert [p.dtype for p in call.parameters[3:]] == ["i32", "i32", "f32"]
    assert call.grid == (["//", ["+", ["arg", 4], 255], 256], 1, 1)
    assert artifact.inspection.warps == 4
    assert 4 <= artifact.inspection.registers <= 64
    assert artifact.inspection.spill_bytes == 0
    assert artifact.inspection.instructions == {}
    assert {"tilelang", "nvcc"} <= set(artifact.toolchain)


@needs_nvcc
@over_targets
def test_a_large_bf16_product_uses_the_targets_matrix_instructions(target):
    artifact = build(gemm_source(), target)
    seen = artifact.inspection
    # 3 stages of a 128 x 64 and a 64 x 128 tile of bf16
    assert artifact.launch["shared_bytes"] == 3 * 2 * (128 * 64 + 64 * 128)
    assert artifact.launch["shared_bytes"] <= seen.shared_bytes <= target.shared_per_block
    # a fragment accumulator never becomes tcgen05
    assert set(seen.instructions) - {"setmaxnreg"} == {"wgmma" if target.name == "sm_90a" else "mma.sync"}
    # from Hopper on a warp group of its own starts the copies, and the groups trade registers
    specialised = target.name != "sm_80"
    assert artifact.launch["threads"] == (256 if specialised else 128)
    assert seen.warps * 32 == artifact.launch["threads"]
    assert ("setmaxnreg" in seen.instructions) == specialised
    assert 128 <= seen.registers <= 255


@needs_nvcc
def test_copies_by_tma_take_descriptors_whose_recipe_is_known():
    artifact = build(gemm_source(), HOPPER)
    assert artifact.launch["params"] == [128, 128, 8, 4, 4]
    call = HostCall.from_json(artifact.launch["host_call"])
    assert [p.kind for p in call.parameters] == ["tensor_map", "tensor_map", "pointer", "scalar", "scalar"]
    a, b = call.tensor_maps
    assert (a.base, a.dims, a.strides, a.box) == (0, (1024, ["shape", 0, 0]), (2, 2048), (64, 128))
    assert (b.base, b.dims, b.strides, b.box) == (1, (512, 1024), (2, 1024), (64, 64))
    assert (a.dtype, a.swizzle, a.element_strides) == (9, 3, (1, 1))  # bf16, rows of 128 bytes
    assert call.grid == (["//", ["+", ["arg", 3], 127], 128], 4, 1)
    assert artifact.launch["needs"] is None


@needs_nvcc
def test_pass_configs_of_the_source_reach_tilelang():
    artifact = build(gemm_source(**{"tl.disable_warp_specialized": True, "tl.disable_tma_lower": True}), HOPPER)
    assert artifact.launch["threads"] == 128
    assert artifact.launch["params"] == [8, 8, 8, 4, 4]
    assert "setmaxnreg" not in artifact.inspection.instructions


@needs_nvcc
def test_the_host_function_holds_the_machine_code_and_refuses_tensors_on_the_cpu():
    artifact = build(add_source(), HOPPER)
    lowered = lowered_kernel(artifact)
    assert lowered is not None
    run = host_function(artifact, lowered)
    with pytest.raises(Exception, match="device_type mismatch, expected cuda"):
        run(*torch.zeros(3, 8), 0, 8, 1.0)


@needs_nvcc
def test_what_this_process_built_is_launched_as_what_comes_from_the_cache_is(monkeypatch):
    artifact = build(gemm_source(), HOPPER)
    assert lowered_kernel(artifact) is not None
    monkeypatch.setattr(HostCallKernel, "from_artifact", lambda *given: given)
    assert load(artifact, 7) == (artifact, 7)


# ---- without nvcc -----------------------------------------------------------------------------------------------------


def test_without_nvcc_there_is_cuda_source_that_says_what_is_missing(without_nvcc):
    artifact = build(gemm_source(), HOPPER)
    assert artifact.format == "cu"
    assert artifact.binary.decode() == artifact.cuda
    assert artifact.launch["params"] == [128, 128, 8, 4, 4]
    assert artifact.launch["threads"] == 256
    assert "nvcc" in artifact.launch["needs"]
    assert artifact.inspection.registers is None
    assert set(artifact.inspection.instructions) == {"wgmma", "setmaxnreg"}
    with pytest.raises(LaunchError, match=r"only CUDA source.*\n.*nvcc"):
        load(artifact, 0)


def test_nvcc_of_cuda_home_comes_first(monkeypatch, tmp_path):
    for name, version in (("home", "13.1.2"), ("path", "12.9.1")):
        (tmp_path / name / "bin").mkdir(parents=True)
        tool = tmp_path / name / "bin" / "nvcc"
        tool.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 1, V{version}'\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path' / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert nvcc.find() == nvcc.Nvcc(str(tmp_path / "home/bin/nvcc"), "13.1.2")
    monkeypatch.delenv("CUDA_HOME")
    assert nvcc.find() == nvcc.Nvcc(str(tmp_path / "path/bin/nvcc"), "12.9.1")


def test_without_tilelang_the_error_has_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"not installed\n.*pip install 'k3dsl\[tilelang\]'"):
        build(add_source(), HOPPER)


# ---- refusals ---------------------------------------------------------------------------------------------------------


def test_amd_is_refused():
    with pytest.raises(LegalityError, match="no code for gfx942"):
        build(add_source(), get_target("gfx942"))


def test_too_much_shared_memory_is_refused_before_nvcc_runs(monkeypatch):
    monkeypatch.setattr(nvcc, "compile_cuda", lambda *_: pytest.fail("nvcc ran"))
    needed = 8 * 2 * (128 * 64 + 64 * 128)
    with pytest.raises(ResourceError, match=f"needs {needed} bytes .* sm_90a has 232448"):
        build(gemm_source(stages=8), HOPPER)


def test_a_data_race_is_refused_unless_the_source_vouches_for_it(monkeypatch):
    monkeypatch.setattr(nvcc, "find", lambda: None)
    text = ADD.replace("z[bx * 256 + i] =", "z[bx] =")
    with pytest.raises(BuildError, match=r"Data race detected.*`z\(bx,\)` is written by multiple threads"):
        build(add_source(text), HOPPER)
    assert build(add_source(text, **{"tl.disable_data_race_check": True}), HOPPER).format == "cu"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ADD.replace("def add():", "def other():"), "has no function add"),
        (ADD.replace("        unused: T.int32,\n", ""), "takes 5 parameters"),
        (ADD.replace("T.Parallel", "T.Paralel"), "Paralel"),
    ],
)
def test_a_module_that_does_not_lower_says_why_and_where(text, words):
    with pytest.raises(BuildError, match=words) as error:
        build(add_source(text), HOPPER)
    assert "tilelang-source" in str(error.value)


@needs_nvcc
def test_what_nvcc_refuses_is_a_build_error_with_its_reason():
    with pytest.raises(BuildError, match=r"nvcc [\d.]+ refuses the CUDA source for sm_90a: .*no_such_file"):
        build(add_source(**{"tl.device_compile_flags": ["-include no_such_file.h"]}), HOPPER)


@needs_nvcc
def test_a_compiler_that_hangs_is_stopped_with_its_children(monkeypatch, tmp_path):
    tool = tmp_path / "nvcc"
    tool.write_text("#!/bin/sh\nsleep 600 &\nwait\n")
    tool.chmod(0o755)
    monkeypatch.setattr(nvcc, "DEADLINE_S", 0.5)
    with pytest.raises(BuildError, match=r"took more than 0.5 s"):
        nvcc.compile_cuda("add", "", "sm_90a", [], nvcc.Nvcc(str(tool), "1.0.0"))


# ---- the cache on disk ------------------------------------------------------------------------------------------------


@needs_nvcc
def test_another_process_takes_the_kernel_from_disk_without_importing_tilelang(cache_folder):
    built = build(gemm_source(), HOPPER)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tilelang_sources import gemm_source\n"
        "from k3dsl.backends.tilelang.build import build\n"
        "from k3dsl.backends.tilelang.load import load\n"
        "from k3dsl.targets import get_target\n"
        "artifact = build(gemm_source(), get_target('sm_90a'))\n"
        "print(len(artifact.binary), type(load(artifact, 0)).__name__, 'tilelang' in sys.modules)\n"
    )
    tests = os.path.dirname(sys.modules["tilelang_sources"].__file__)
    done = subprocess.run([sys.executable, "-c", script, tests], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(built.binary)), "HostCallKernel", "False"]


def test_an_entry_that_is_not_whole_is_a_miss(without_nvcc, tmp_path):
    built = build(add_source(), HOPPER)
    (path,) = (tmp_path / "tilelang").rglob("*.json")
    key = path.stem
    assert cache.read(key, built.source, "sm_90a") == built
    for text in (path.read_text()[:-20], path.read_text().replace('"digest": "', '"digest": "0'), "{}", ""):
        path.write_text(text)
        assert cache.read(key, built.source, "sm_90a") is None
    assert build(add_source(), HOPPER) == built


def test_what_changes_the_machine_code_changes_the_key():
    source = add_source()
    same = ("sm_90a", {}, "0.1.15", "13.0.88", ["-O3"])
    keys = {
        cache.key(source, *same),
        cache.key(source, "sm_80", *same[1:]),
        cache.key(source, *same[:1], {"tl.enable_fast_math": True}, *same[2:]),
        cache.key(source, *same[:2], "0.1.16", *same[3:]),
        cache.key(source, *same[:3], None, *same[4:]),
        cache.key(source, *same[:4], ["-O2"]),
        cache.key(dataclasses.replace(source, text=source.text + "#"), *same),
        cache.key(dataclasses.replace(source, args=(*source.args, dim("k"))), *same),
    }
    assert len(keys) == 8
    assert cache.key(add_source(), *same) in keys


# ---- reading what was built -------------------------------------------------------------------------------------------


def test_warp_groups_that_ask_for_more_registers_than_there_are_would_hang():
    text = "tl::warpgroup_reg_dealloc<24>(); tl::warpgroup_reg_alloc<240>();"
    assert register_demand(text, 256) == 128 * 24 + 128 * 240 > 256 * 128  # 128 registers a thread at launch: hangs
    assert register_demand(text, 384) == 128 * 24 + 256 * 240 == 384 * 168
    assert register_demand("", 256) is None


def test_static_shared_memory_comes_from_the_log_of_ptxas():
    assert static_shared("ptxas info : Used 240 registers, used 1 barriers, 1072 bytes smem") == 1072
    assert static_shared("ptxas info : Used 16 registers, used 0 barriers") == 0


def test_asynchronous_wgmma_is_told_by_the_source():
    assert is_asynchronous("wgmma_gemm(x, y, acc)")
    assert not is_asynchronous("T.gemm(x, y, acc)")


def test_instruction_families_are_counted_in_cuda_source():
    text = "tl::wgmma_ss<a>(x); tl::wgmma_rs<b>(y); tl::mma_sync<c>(z); tl::warpgroup_reg_alloc<240>();"
    seen = inspect_source(text, dynamic_shared=64, threads=256)
    assert seen.instructions == {"wgmma": 2, "mma.sync": 1, "setmaxnreg": 1}
    assert (seen.shared_bytes, seen.warps) == (64, 8)


def test_a_kernel_from_elsewhere_is_launched_by_the_driver():
    if nvcc.find() is None:
        pytest.skip("there is no nvcc")
    artifact = build(add_source(), HOPPER)
    foreign = dataclasses.replace(artifact, binary=artifact.binary + b"\0")
    assert lowered_kernel(foreign) is None
    assert isinstance(load(foreign, 0), HostCallKernel)


def test_nothing_imports_tilelang_unless_it_is_asked_for():
    script = (
        "import sys; import k3dsl, k3dsl.ops.registry, k3dsl.cli.main, k3dsl.runtime.compile\n"
        "from k3dsl.cli.doctor import examine\n"
        "examine(); k3dsl.ops.registry.get_op('matmul').point({}, {}).plan('triton')\n"
        "sys.exit('tilelang' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


@kernel(grid=lambda d, c: (1,))
def few_rows(d, c, x=In("4 64", f32), o=Out("4", i32)):
    o[arange(4)] = argmax(x[span(0, 4), :], 1)


RACING = """import tilelang.language as tl


def few_rows():
    @tl.prim_func
    def few_rows(x_ptr: tl.ptr(tl.float32), o_ptr: tl.ptr(tl.int32)):
        x = tl.make_tensor(x_ptr, (4, 64), tl.float32)
        o = tl.make_tensor(o_ptr, (4,), tl.int32)
        with tl.Kernel(1, threads=128) as (program_0,):
            line = tl.alloc_shared((4, 64), tl.float32)
            highest = tl.alloc_shared((4,), tl.int32)
            for i, j in tl.Parallel(4, 64):
                line[i, j] = x[i, j]
            for i in tl.Parallel(4):
                highest[i] = 0
                for r in tl.serial(63):
                    if line[i, r + 1] > line[i, 0]:
                        line[i, 0] = line[i, r + 1]
                        highest[i] = r + 1
            for i in tl.Parallel(4):
                o[i] = highest[i]

    return few_rows
"""


def test_a_barrier_that_no_longer_separates_the_threads_is_refused() -> None:
    """TileLang only warns of it: the race is in the kernel that it goes on to build. Here four threads of 128 write."""
    source = lower(simplify(few_rows.trace({}, {})), TileLangSchedule(), HOPPER)
    with pytest.raises(BuildError, match="the race remains"):
        build(dataclasses.replace(source, text=RACING), HOPPER)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("find", [argmax, argmin])
def test_positions_of_extremes_build_for_any_number_of_rows(find: Callable[..., Tile], rows: int) -> None:
    @kernel(grid=lambda d, c: (cdiv(d.R, rows),))
    def found(d, c, x=In("R 48", f32), o=Out("R", i32)):
        own = span(program_id(0) * rows, rows, end=d.R)
        o[own] = find(x[own, :], axis=1)

    compiled = k3dsl.compile(found, dims={"R": Sym("R")}, target="sm_90a", backend="tilelang")
    assert "found_kernel" in (compiled.artifact.cuda or "")
