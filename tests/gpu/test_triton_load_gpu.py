"""Launching built Triton kernels on a GPU: through Triton's launcher, and through the driver without Triton."""

import dataclasses
import time

import pytest
import torch

from k3dsl.backends.base import Arg, Source
from k3dsl.errors import LaunchError
from k3dsl.targets import detect

pytest.importorskip("triton")

from k3dsl.backends.common import write_module
from k3dsl.backends.driver import DriverKernel
from k3dsl.backends.triton.build import build, import_function
from k3dsl.backends.triton.load import TritonLauncher, load

pytestmark = pytest.mark.gpu

HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
OPTIONS = {"num_warps": 4, "num_stages": 3, "maxnreg": None, "enable_fp_fusion": True}

ADD = """def add(x, y, z, n, scale):
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    mask = i < n
    tl.store(z + i, tl.load(x + i, mask=mask) + scale * tl.load(y + i, mask=mask), mask=mask)
"""

DOT = """def dot(a, b, c, k):
    m = tl.arange(0, 64)
    n = tl.arange(0, 128)
    kk = tl.arange(0, 64)
    acc = tl.zeros((64, 128), tl.float32)
    for i in tl.range(0, k, 64, num_stages=3):
        x = tl.load(a + m[:, None] * k + (i + kk)[None, :])
        y = tl.load(b + (i + kk)[:, None] * 128 + n[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * 128 + n[None, :], acc)
"""

DOUBLE = """def double(x, y, rows):
    source = tl.make_tensor_descriptor(x, shape=[rows, 64], strides=[64, 1], block_shape=[32, 64])
    result = tl.make_tensor_descriptor(y, shape=[rows, 64], strides=[64, 1], block_shape=[32, 64])
    tile = source.load([tl.program_id(0) * 32, 0])
    result.store([tl.program_id(0) * 32, 0], tile + tile)
"""


def pointers(names, dtype):
    return [Arg(name, "pointer", dtype, 16, name) for name in names]


SOURCES = {
    "add": Source(
        "triton", "add", HEAD + ADD, (*pointers("xyz", "f32"), Arg("n", "dim", "i32"), Arg("scale", "scalar", "f32"))
    ),
    "dot": Source(
        "triton", "dot", HEAD + DOT, (*pointers("ab", "bf16"), *pointers("c", "f32"), Arg("k", "dim", "i32", 16))
    ),
    "double": Source("triton", "double", HEAD + DOUBLE, (*pointers("xy", "f16"), Arg("rows", "dim", "i32"))),
}


def artifact(name):
    return build(dataclasses.replace(SOURCES[name], options=OPTIONS), detect())


def through_triton(name):
    launcher = load(artifact(name), 0)
    assert isinstance(launcher, TritonLauncher)
    return launcher


def through_driver(name):
    return DriverKernel.from_artifact(artifact(name), 0)


both_ways = pytest.mark.parametrize("kernel", [through_triton, through_driver])


def add_arguments(n=1000):
    x, y = torch.randn(2, n, device="cuda")
    return x, y, torch.full_like(x, float("nan"))


@both_ways
def test_add_with_a_ragged_end(kernel):
    x, y, z = add_arguments(1000)
    beyond = torch.cat([z, z])
    kernel("add")((4, 1, 1), [x, y, beyond, 1000, 0.5])
    torch.testing.assert_close(beyond[:1000], x + 0.5 * y)
    assert beyond[1000:].isnan().all()


@both_ways
def test_a_dot_that_needs_more_than_48_kib_of_shared_memory(kernel):
    assert artifact("dot").launch["shared_bytes"] > 48 * 1024
    a = torch.randn(64, 256, device="cuda").bfloat16()
    b = torch.randn(256, 128, device="cuda").bfloat16()
    c = torch.full((64, 128), float("nan"), device="cuda")
    kernel("dot")((1, 1, 1), [a, b, c, 256])
    torch.testing.assert_close(c.double(), a.double() @ b.double(), atol=1e-3, rtol=1e-5)


@both_ways
def test_descriptors_made_on_the_device(kernel):
    x = torch.randn(100, 64, device="cuda").half()  # the last tile has 4 rows
    y = torch.full_like(x, float("nan"))
    kernel("double")((4, 1, 1), [x, y, 100])
    assert torch.equal(y, x + x)


@both_ways
def test_addresses_do_for_tensors_and_zero_programs_launch_nothing(kernel):
    x, y, z = add_arguments()
    launch = kernel("add")
    launch((0, 1, 1), [x, y, z, 1000, 1.0])
    assert z.isnan().all()
    launch((4, 1, 1), [x.data_ptr(), y.data_ptr(), z.data_ptr(), 1000, 1.0])
    torch.testing.assert_close(z, x + y)


@both_ways
@pytest.mark.parametrize("name", ["add", "double"])
def test_launches_follow_torchs_stream_or_the_one_that_is_named(kernel, name):
    launch, side = kernel(name), torch.cuda.Stream()
    x = torch.ones(4096, 64, device="cuda").half() if name == "double" else torch.ones(2**20, device="cuda")
    grid = (128, 1, 1) if name == "double" else (4096, 1, 1)

    def args(result):
        return [x, result, 4096] if name == "double" else [x, x, result, x.numel(), 1.0]

    for named in (None, side.cuda_stream):
        result = torch.zeros_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # some 10 ms; a launch on another stream would overtake it
            if named is None:
                launch(grid, args(result))
        if named is not None:
            launch(grid, args(result), named)
        untouched = result.clone()  # on the default stream, which waits for nothing
        side.synchronize()
        assert (untouched == 0).all()
        assert (result == 2).all()


@both_ways
@pytest.mark.parametrize("name", ["add", "double"])
def test_launches_can_be_captured_in_a_graph_and_replayed_on_new_data(kernel, name):
    launch = kernel(name)
    x = torch.randn(128, 64, device="cuda").half() if name == "double" else torch.randn(1024, device="cuda")
    result = torch.zeros_like(x)
    args = [x, result, 128] if name == "double" else [x, x, result, 1024, 1.0]
    launch((4, 1, 1), args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch((4, 1, 1), args)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        result.zero_()
        graph.replay()
        assert torch.equal(result, x + x)


@both_ways
def test_a_tensor_on_the_cpu_is_refused(kernel):
    x, y, z = add_arguments()
    with pytest.raises(LaunchError, match=r"(?i)cpu tensor|on the CPU"):
        kernel("add")((4, 1, 1), [x.cpu(), y, z, 1000, 1.0])


def test_machine_code_for_another_gpu_is_refused_with_the_drivers_name_for_it():
    built = artifact("add")
    foreign = dataclasses.replace(built, binary=b"not machine code", target="sm_80")
    x, y, z = add_arguments()
    with pytest.raises(LaunchError, match=r"CUDA_ERROR_\w+|hipError\w+") as caught:
        load(foreign, 0)((4, 1, 1), [x, y, z, 1000, 1.0])
    assert "built for sm_80" in str(caught.value)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@both_ways
def test_a_launch_on_another_device_than_the_current_one(kernel):
    built = artifact("add")
    launch = load(built, 1) if kernel is through_triton else DriverKernel.from_artifact(built, 1)
    x, y = torch.randn(2, 1000, device="cuda:1")
    z = torch.zeros_like(x)
    launch((4, 1, 1), [x, y, z, 1000, 1.0])
    torch.testing.assert_close(z, x + y)
    assert torch.cuda.current_device() == 0


def microseconds(launch, launches=2000, rounds=5):
    """Host time of one launch: the best of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            launch()
        best = min(best, (time.perf_counter() - start) / launches * 1e6)
    torch.cuda.synchronize()
    return best


def test_a_launch_costs_at_most_1_3_times_tritons_own(record_property):
    x, y, z = add_arguments(256)
    args = [x, y, z, 256, 1.0]
    function = import_function(SOURCES["add"], write_module(SOURCES["add"]))
    ours, driver = through_triton("add"), through_driver("add")
    times = {
        "triton": microseconds(lambda: function[(1,)](*args, num_warps=4)),
        "ours": microseconds(lambda: ours((1, 1, 1), args)),
        "driver": microseconds(lambda: driver((1, 1, 1), args)),
    }
    for name, value in times.items():
        record_property(name, round(value, 2))
    print(" ".join(f"{name} {value:.2f} us" for name, value in times.items()))
    assert times["ours"] <= 1.3 * times["triton"]
    assert times["driver"] <= 1.3 * times["triton"]
