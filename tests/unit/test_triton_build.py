"""Building generated Triton ahead of time: machine code, inspection and errors, on a machine without a GPU."""

import contextlib
import ctypes
import dataclasses
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from k3dsl.backends.base import Arg, Source
from k3dsl.errors import BuildError, LaunchError, ResourceError
from k3dsl.targets import get_target

pytest.importorskip("triton")

from k3dsl.backends import driver, machine_code
from k3dsl.backends.driver import DriverKernel
from k3dsl.backends.triton.build import build, compiled_kernel
from k3dsl.backends.triton.load import TritonLauncher, load

HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"

ADD = """
def add(x, y, z, n):
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    mask = i < n
    tl.store(z + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)
"""

DOT = """
def dot(a, b, c, k):
    m = tl.arange(0, ROWS)
    n = tl.arange(0, COLUMNS)
    kk = tl.arange(0, 64)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in tl.range(0, k, 64, num_stages=STAGES):
        x = tl.load(a + m[:, None] * k + (i + kk)[None, :])
        y = tl.load(b + (i + kk)[:, None] * COLUMNS + n[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * COLUMNS + n[None, :], acc.to(tl.bfloat16))
"""

DOUBLE = """
def double(x, y, rows):
    source = tl.make_tensor_descriptor(x, shape=[rows, 64], strides=[64, 1], block_shape=[32, 64])
    result = tl.make_tensor_descriptor(y, shape=[rows, 64], strides=[64, 1], block_shape=[32, 64])
    tile = source.load([tl.program_id(0) * 32, 0])
    result.store([tl.program_id(0) * 32, 0], tile + tile)
"""


def pointer(name, dtype, divisible_by=16):
    return Arg(name, "pointer", dtype, divisible_by, name)


def dim(name, divisible_by=1):
    return Arg(name, "dim", "i32", divisible_by, name)


def source(body, args, **options):
    body = body.strip()
    name = body.split("(")[0].removeprefix("def ")
    options = {"num_warps": 4, "num_stages": 3, "maxnreg": None, "enable_fp_fusion": True, **options}
    return Source("triton", name, HEAD + body + "\n", tuple(args), options)


def add_source(dtype="f32", divisible_by=16, **options):
    tensors = [pointer(name, dtype, divisible_by) for name in "xyz"]
    return source(ADD, [*tensors, dim("n", divisible_by)], **options)


def dot_source(m=64, n=128, stages=3, **options):
    tensors = [pointer(name, "bf16") for name in "abc"]
    body = DOT.replace("ROWS", str(m)).replace("COLUMNS", str(n)).replace("STAGES", str(stages))
    return source(body, [*tensors, dim("k", 16)], **options)


def double_source():
    return source(DOUBLE, [pointer("x", "f16"), pointer("y", "f16"), dim("rows")])


def one_liner(line, **options):
    """A kernel with one statement on an i32 tensor `x` and a number `n`."""
    return source(
        f"def kernel(x, n):\n    i = tl.arange(0, 64)\n    {line}", [pointer("x", "i32"), dim("n")], **options
    )


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(cache_folder, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(cache_folder))


TARGETS = [get_target(name) for name in ("sm_80", "sm_90a", "sm_100a", "sm_120a", "gfx942", "gfx950")]
over_targets = pytest.mark.parametrize("target", TARGETS, ids=str)


@over_targets
def test_every_target_gives_machine_code_and_how_to_launch_it(target):
    artifact = build(add_source(), target)
    assert artifact.binary[:4] == b"\x7fELF"
    assert artifact.format == ("cubin" if target.vendor == "nvidia" else "hsaco")
    assert artifact.target == target.name
    assert artifact.entry == "add"
    assert artifact.launch["threads"] == 4 * target.warp_size
    assert artifact.launch["shared_bytes"] == 0
    assert artifact.launch["global_scratch_bytes"] == 0
    # three addresses, one i32, and the addresses of global and profile scratch
    assert artifact.launch["params"] == [8, 8, 8, 4, 8, 8]
    assert artifact.inspection.warps == 4
    assert 4 <= artifact.inspection.registers <= 64
    assert artifact.inspection.spill_bytes == 0
    assert artifact.inspection.instructions == {}
    assert "triton" in artifact.toolchain


@over_targets
def test_a_large_bf16_dot_uses_the_matrix_instructions_that_the_target_is_known_for(target):
    artifact = build(dot_source(), target)
    assert list(artifact.inspection.instructions) == [target.matrix_instructions]
    # at least two stages of a 64 x 64 and a 64 x 128 tile of 2 bytes per element
    assert 2 * (64 * 64 + 64 * 128) * 2 <= artifact.inspection.shared_bytes <= target.shared_per_block
    assert artifact.launch["shared_bytes"] == artifact.inspection.shared_bytes
    # the accumulator alone is 64 x 128 numbers, spread over the threads; tcgen05 keeps it in tensor memory
    least = 1 if target.matrix_instructions == "tcgen05" else 64 * 128 // artifact.launch["threads"]
    assert least <= artifact.inspection.registers <= target.max_registers_per_thread * 2


@over_targets
def test_descriptors_made_on_the_device_ask_for_global_scratch_where_there_is_tma(target):
    launch = build(double_source(), target).launch
    if target.vendor == "nvidia" and target.arch >= 90:
        assert launch["global_scratch_bytes"] == 2 * 128  # a descriptor has 128 bytes
        assert launch["global_scratch_align"] == 128
    else:
        assert launch["global_scratch_bytes"] == 0
    assert launch["params"] == [8, 8, 4, 8, 8]


@pytest.mark.parametrize(("divisible_by", "vectors"), [(16, True), (1, False)])
def test_known_divisors_let_the_compiler_load_whole_vectors(divisible_by, vectors):
    artifact = build(add_source(divisible_by=divisible_by), get_target("sm_80"))
    assert (".global.v2.b32" in artifact.assembly) == vectors


def test_options_reach_the_compiler():
    artifact = build(add_source(num_warps=8, maxnreg=32), get_target("sm_90a"))
    assert artifact.launch["threads"] == 256
    assert ".maxnreg 32" in artifact.assembly


def test_spills_and_wgmma_that_ptxas_serializes_are_reported_also_when_triton_has_the_kernel_cached():
    crowded = dot_source(128, 256)  # the accumulator takes all 255 registers of its 128 threads
    for _ in range(2):
        inspection = build(crowded, get_target("sm_90a")).inspection
        assert inspection.spill_bytes > 0
        assert inspection.instructions["wgmma.serialized"] == 1
    roomy = build(dataclasses.replace(crowded, options={**crowded.options, "num_warps": 8}), get_target("sm_90a"))
    assert "wgmma.serialized" not in roomy.inspection.instructions


def test_more_shared_memory_than_the_target_has_is_refused_with_both_numbers():
    target = get_target("sm_120a")
    deep = dot_source(64, 256, stages=4)
    needed = build(deep, get_target("sm_80")).inspection.shared_bytes
    with pytest.raises(ResourceError, match="dot") as caught:
        build(deep, target)
    assert needed > target.shared_per_block
    assert f"{target.shared_per_block}" in str(caught.value)
    assert f"{needed}" in str(caught.value)


def test_more_threads_than_the_target_allows_are_refused():
    with pytest.raises(ResourceError, match=r"2048 threads .* 1024"):
        build(add_source(num_warps=64), get_target("sm_90a"))


def failure(bad, target="sm_90a"):
    with pytest.raises(BuildError) as caught:
        build(bad, get_target(target))
    return str(caught.value)


def test_a_build_error_names_kernel_target_generated_line_reason_and_what_to_try():
    text = failure(one_liner("tl.store(x + tl.arange(0, 96), n)"))
    assert "kernel does not build for sm_90a" in text
    assert "kernel_" in text  # the generated module's file
    assert ".py:8: " in text  # and the line in it
    assert "power of 2" in text
    assert "fix: use tile extents that are powers of two" in text


def test_a_build_error_shows_the_line_that_triton_stopped_at():
    text = failure(one_liner("tl.no_such_function(x + i, n)"))
    assert "tl.no_such_function(x + i, n)" in text
    assert "has no attribute 'no_such_function'" in text


def test_a_build_error_gives_what_ptxas_said_and_prints_nothing(capfd):
    text = failure(dot_source(128, 256, maxnreg=64))
    assert "Insufficient registers (64)" in text
    assert "raise maxnreg" in text
    assert len(text.splitlines()) < 6
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_a_build_error_gives_what_the_assembler_said(target, capfd):
    asm = 'tl.inline_asm_elementwise("frobnicate $0, $1;", "=r,r", [tl.load(x + i)], tl.int32, True, 1)'
    if target == "gfx942":
        asm = asm.replace("=r,r", "=v,v")
    text = failure(one_liner(f"tl.store(x + i, {asm})"), target)
    assert "instruction" in text
    assert capfd.readouterr() == ("", "")


def test_what_a_build_prints_on_stderr_without_failing_is_not_swallowed(capfd):
    noisy = add_source()
    noisy = dataclasses.replace(noisy, text="import os\n\nos.write(2, b'a remark')\n" + noisy.text)
    build(noisy, get_target("sm_80"))
    assert capfd.readouterr().err == "a remark"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (add_source(no_such_option=1), "no option no_such_option"),
        (add_source(num_warps=3), "num_warps"),
        (dataclasses.replace(add_source(), name="other"), "no @triton.jit function other"),
        (dataclasses.replace(add_source(), args=add_source().args[:3]), "its arguments are"),
        (add_source("f4"), "no pointer argument of dtype f4"),
        (one_liner("this is not Python"), "does not build"),
    ],
    ids=["option", "warps", "name", "arguments", "dtype", "syntax"],
)
def test_a_source_that_its_description_does_not_fit_is_refused(bad, words):
    assert words in failure(bad, "sm_80")


def test_triton_keeps_its_cache_below_ours_and_the_users_own_setting_stays(cache_folder, tmp_path, monkeypatch):
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    build(add_source("f64"), get_target("sm_80"))
    assert os.environ["TRITON_CACHE_DIR"] == knobs.cache.dir == str(tmp_path)
    assert "TRITON_DUMP_PTXAS_LOG" not in os.environ
    assert list(tmp_path.iterdir()) == []
    assert any((cache_folder / "triton").iterdir())
    assert not any((cache_folder / "crashes").iterdir())


def test_equal_sources_share_one_generated_file_and_give_equal_machine_code(cache_folder):
    first, second = build(add_source("f16"), get_target("sm_90a")), build(add_source("f16"), get_target("sm_90a"))
    assert first.binary == second.binary
    files = (cache_folder / "triton-source").glob("add_*.py")
    assert [path.read_text() for path in files].count(first.source.text) == 1


def test_building_never_asks_a_gpu_driver(tmp_path):
    script = """
        import ctypes
        import sys

        import triton

        def refuse(*_):
            raise AssertionError("a driver was asked")

        # triton.runtime.driver is the one object through which Triton reaches a GPU
        type(triton.runtime.driver).active = property(refuse)
        type(triton.runtime.driver).default = property(refuse)
        open_library = ctypes.CDLL.__init__

        def guarded(self, name, *rest, **options):
            if name and ("libcuda" in str(name) or "libamdhip" in str(name)):
                refuse()
            open_library(self, name, *rest, **options)

        ctypes.CDLL.__init__ = guarded

        from k3dsl.backends.base import Arg, Source
        from k3dsl.backends.triton.build import build
        from k3dsl.targets import get_target

        args = tuple(Arg(name, "pointer", "f32", 16, name) for name in "xyz") + (Arg("n", "dim", "i32"),)
        source = Source("triton", "add", sys.argv[1], args, {"num_warps": 4})
        print(*(len(build(source, get_target(name)).binary) for name in ("sm_90a", "gfx942")))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), add_source().text],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "K3DSL_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert all(int(size) > 1000 for size in done.stdout.split())


def test_parameters_of_ptx_are_read_in_order():
    ptx = """
    .visible .func helper(.param .b64 a)
    .visible .entry scan(
        .param .u64 .ptr .global .align 1 scan_param_0,
        .param .align 64 .b8 scan_param_1[128],
        .param .f32 scan_param_2,
        .param .u8 scan_param_3
    )
    """
    assert machine_code.entry_and_params(ptx) == ("scan", (8, 128, 4, 1))


def test_parameters_that_the_amd_runtime_fills_in_are_not_the_callers():
    metadata = """
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           4
        .value_kind:     by_value
      - .offset:         16
        .size:           4
        .value_kind:     hidden_block_count_x
    .kernarg_segment_size: 272
    .name:           prep
    .private_segment_fixed_size: 24
    .vgpr_count:     148
    .vgpr_spill_count: 6
"""
    assert machine_code.entry_and_params(metadata) == ("prep", (8, 4))
    seen = machine_code.inspect_hsaco("v_mfma_f32_32x32x8_bf16 a, b\n" + metadata, shared_bytes=64, warps=8)
    assert (seen.registers, seen.spill_bytes, seen.instructions) == (148, 24, {"mfma": 1})


def test_without_cuobjdump_registers_and_stack_come_from_the_log_of_ptxas():
    log = "ptxas info : ...\n    40 bytes stack frame, 48 bytes spill stores\nptxas info : Used 96 registers, used 1"
    seen = machine_code.inspect_cubin(b"", "", shared_bytes=0, warps=4, ptxas_log=log, cuobjdump=None)
    assert (seen.registers, seen.spill_bytes) == (96, 40)
    unknown = machine_code.inspect_cubin(b"", "", shared_bytes=0, warps=4, ptxas_log=None, cuobjdump=None)
    assert (unknown.registers, unknown.spill_bytes) == (None, None)


def test_a_kernel_that_another_process_built_is_launched_by_the_driver():
    artifact = build(add_source(), get_target("sm_90a"))
    assert compiled_kernel(artifact) is not None
    foreign = dataclasses.replace(artifact, binary=artifact.binary + b"\0")
    assert compiled_kernel(foreign) is None
    assert isinstance(load(foreign, 0), DriverKernel)


# Launching without a GPU: a driver that notes what it is asked to do.


class NotingDriver:
    def __init__(self, sizes):
        self.sizes = sizes
        self.launches = []

    def function(self, kernel, binary, shared_bytes, built_for):
        return 7

    def launch(self, kernel, function, grid, threads, shared_bytes, stream, pointers):
        params = [ctypes.string_at(address, size) for address, size in zip(pointers, self.sizes, strict=True)]
        self.launches.append((grid, threads, shared_bytes, stream, params))


@pytest.fixture
def noting(monkeypatch):
    noting = NotingDriver([])
    monkeypatch.setattr(driver, "_driver", lambda format: noting)
    return noting


def driver_kernel(noting, args, sizes, **facts):
    noting.sizes = sizes
    return DriverKernel(b"\x7fELF", "cubin", "kernel", 128, 1024, sizes, args, **facts)


def scalar(dtype):
    return Arg(dtype, "scalar", dtype)


def test_the_driver_gets_each_argument_in_its_dtype_and_null_for_scratch_that_is_not_needed(noting):
    dtypes = ["i64", "i32", "i16", "i8", "u8", "i1", "f64", "f32", "f16", "bf16"]
    args = [pointer("x", "bf16"), *map(scalar, dtypes)]
    kernel = driver_kernel(noting, args, [8, 8, 4, 2, 1, 1, 1, 8, 4, 2, 2, 8, 8])
    tensor = torch.zeros(4)
    address = tensor.data_ptr()
    kernel((3, 2, 1), [address, -(2**40), -7, -2, -1, 255, True, 0.1, 0.1, 0.1, 1.0039063], stream=5)
    ((grid, threads, shared, stream, params),) = noting.launches
    assert (grid, threads, shared, stream) == ((3, 2, 1), 128, 1024, 5)

    def memory(value, dtype):
        return bytes(torch.tensor(value, dtype=dtype).reshape(1).view(torch.uint8).tolist())

    assert params == [
        address.to_bytes(8, "little"),
        memory(-(2**40), torch.int64),
        memory(-7, torch.int32),
        memory(-2, torch.int16),
        memory(-1, torch.int8),
        memory(255, torch.uint8),
        memory(True, torch.bool),
        memory(0.1, torch.float64),
        memory(0.1, torch.float32),
        memory(0.1, torch.float16),
        memory(1.0039063, torch.bfloat16),
        bytes(8),
        bytes(8),
    ]


def test_the_driver_gets_scratch_for_every_program_of_the_grid(noting, monkeypatch):
    asked = []

    def scratch(size, device, stream):
        asked.append((size, device, stream))
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(driver, "scratch_buffer", scratch)
    kernel = driver_kernel(noting, [dim("n")], [4, 8, 8], global_scratch_bytes=256, device=1)
    kernel((3, 2, 1), [9], stream=5)
    assert asked == [(256 * 6, 1, 5)]
    params = noting.launches[0][-1]
    assert params[0] == (9).to_bytes(4, "little")
    assert params[1] != bytes(8)
    assert params[2] == bytes(8)


def test_a_grid_without_programs_launches_nothing(noting):
    kernel = driver_kernel(noting, [dim("n")], [4])
    kernel((0, 1, 1), [9])
    kernel((4, 0, 1), [9])
    assert noting.launches == []


@pytest.mark.parametrize(
    ("grid", "args", "words"),
    [
        ((1, 65536, 1), [0, 1], "out of bounds"),
        ((1, 1, 1), [0], "takes 2 arguments, not 1"),
        ((1, 1, 1), [0, 2**31], r"argument n \(i32\) cannot be 2147483648"),
        ((1, 1, 1), [0, 1.5], r"argument n \(i32\) cannot be 1.5"),
        ((1, 1, 1), [torch.zeros(1), 1], "argument x is a tensor on the CPU"),
    ],
    ids=["grid", "count", "range", "type", "cpu"],
)
def test_a_launch_with_the_wrong_arguments_says_which(noting, grid, args, words):
    kernel = driver_kernel(noting, [pointer("x", "f32"), dim("n")], [8, 4])
    with pytest.raises(LaunchError, match=words):
        kernel(grid, args, stream=0)
    assert noting.launches == []


@pytest.mark.parametrize("sizes", [[8], [8, 8], [8, 4, 4], [8, 4, 8, 8, 8]])
def test_machine_code_whose_parameters_are_not_the_arguments_is_refused(noting, sizes):
    with pytest.raises(LaunchError, match="do not belong together"):
        driver_kernel(noting, [pointer("x", "f32"), dim("n")], sizes)


def test_launching_machine_code_imports_no_compiler():
    script = "import sys; import k3dsl.backends.driver; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


@pytest.fixture
def triton_launcher(monkeypatch):
    """A launcher of `add` through Triton, and the launches that reached Triton's stub."""
    launches = []
    kernel = SimpleNamespace(run=lambda *args: launches.append(args), function=7, packed_metadata=(4, 1, 0))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 11, raising=False)
    return TritonLauncher(build(add_source(), get_target("sm_90a")), kernel, 0), launches


def test_tritons_stub_gets_grid_stream_function_and_arguments(triton_launcher):
    launch, launches = triton_launcher
    launch((4, 2, 1), [1, 2, 3, 1000])
    launch((4, 2, 1), [1, 2, 3, 1000], stream=5)
    # no hook of a profiler is set, so the stub gets none, and no metadata for it
    expected = (7, (4, 1, 0), None, None, None, 1, 2, 3, 1000)
    assert launches == [(4, 2, 1, 11, *expected), (4, 2, 1, 5, *expected)]


@pytest.mark.parametrize(
    ("grid", "args", "words"),
    [
        ((65536, 32768, 1), [1, 2, 3, 4], "is not between 1 and 2147483647 programs"),
        ((-1, 1, 1), [1, 2, 3, 4], "is not between 1 and"),
        ((1, 1, 1), [1, 2, 3], "takes 4 arguments, not 3"),
        ((1, 1, 1), [1, 2, 3, 2**31], "argument n is 2147483648"),
    ],
    ids=["overflow", "negative", "count", "range"],
)
def test_what_triton_would_get_wrong_in_silence_is_refused(triton_launcher, grid, args, words):
    launch, launches = triton_launcher
    with pytest.raises(LaunchError, match=words):
        launch(grid, args)
    launch((3, 0, 1), args)
    assert launches == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_loading_says_so():
    artifact = build(add_source(), get_target("sm_90a"))
    with pytest.raises(LaunchError, match="cannot be loaded on device 0"):
        load(artifact, 0)
    kernel = DriverKernel.from_artifact(artifact)
    with pytest.raises(LaunchError, match="NVIDIA's driver"):
        kernel((1, 1, 1), [0, 0, 0, 1], stream=0)
