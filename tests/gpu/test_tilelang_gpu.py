"""TileLang kernels on a GPU: handwritten ones launched both ways, the registry's ops, bundles, and against Triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tilelang_sources import add_source, gemm_source

from k3dsl import ops
from k3dsl.autotune.drawn import moved
from k3dsl.backends.base import Artifact
from k3dsl.backends.host_call import HostCallKernel
from k3dsl.errors import BuildError, LaunchError, LegalityError, ResourceError
from k3dsl.ops.registry import get_op, op_names
from k3dsl.runtime.bundle_writer import save
from k3dsl.runtime.dispatch import using_backend
from k3dsl.runtime.executable import Call, recording
from k3dsl.runtime.judge import cases_of, judge, poisoned
from k3dsl.runtime.metrics import relative_rms
from k3dsl.targets import detect

pytest.importorskip("tilelang")

from k3dsl.backends.tilelang.build import build, lowered_kernel
from k3dsl.backends.tilelang.load import TileLangLauncher, load

pytestmark = pytest.mark.gpu
REFUSALS = (LegalityError, ResourceError, BuildError)
REPEATS = 30


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    """Each test builds: TileLang's host code is there for kernels that this process lowered."""
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))


def through_tilelang(artifact: Artifact):
    lowered = lowered_kernel(artifact)
    assert lowered is not None
    return TileLangLauncher(artifact, lowered, 0)


def through_driver(artifact: Artifact):
    launcher = load(artifact, 0)
    assert isinstance(launcher, HostCallKernel)
    return launcher


both_ways = pytest.mark.parametrize("way", [through_tilelang, through_driver])


def add_arguments(n=1000):
    x, y = torch.randn(2, n, device="cuda")
    return [x, y, torch.full_like(x, float("nan")), 0, n, 0.5]


def gemm_arguments(rows):
    a = torch.randn(rows, 1024, device="cuda").bfloat16()
    b = torch.randn(1024, 512, device="cuda").bfloat16()
    return [a, b, torch.full((rows, 512), float("nan"), device="cuda", dtype=torch.bfloat16), rows]


@both_ways
def test_add_with_a_ragged_end(way):
    args = add_arguments(1000)
    beyond = torch.full((2000,), float("nan"), device="cuda")
    args[2] = beyond[:1000]
    way(build(add_source(), detect()))((4, 1, 1), args)
    torch.testing.assert_close(beyond[:1000], args[0] + 0.5 * args[1])
    assert beyond[1000:].isnan().all()


@both_ways
@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("rows", [256, 200, 1])
def test_a_product_with_and_without_tma(way, tma, rows):
    artifact = build(gemm_source(**{"tl.disable_tma_lower": not tma}), detect())
    a, b, c, _ = args = gemm_arguments(rows)
    way(artifact)((-(-rows // 128), 4, 1), args)
    assert relative_rms(c, a.double() @ b.double()) < 3e-3


@both_ways
def test_thirty_repeats_agree_in_every_bit_and_new_tensors_get_new_descriptors(way):
    launch = way(build(gemm_source(), detect()))
    a, b, first, _ = args = gemm_arguments(384)
    launch((3, 4, 1), args)
    for _ in range(REPEATS):
        again = torch.full_like(first, float("nan"))
        launch((3, 4, 1), [a, b, again, 384])
        assert torch.equal(again.view(torch.int16), first.view(torch.int16))
    other = gemm_arguments(128)
    launch((1, 4, 1), other)
    assert relative_rms(other[2], other[0].double() @ other[1].double()) < 3e-3


@both_ways
def test_a_grid_without_programs_launches_nothing(way):
    args = add_arguments()
    way(build(add_source(), detect()))((0, 1, 1), args)
    assert args[2].isnan().all()


@both_ways
def test_launches_follow_torchs_stream_or_the_one_that_is_named(way):
    launch, side = way(build(add_source(), detect())), torch.cuda.Stream()
    args = add_arguments(2**20)
    launch((4096, 1, 1), args)  # loaded
    for named in (None, side.cuda_stream):
        args[2].zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # some 10 ms; a launch on another stream would overtake it
            if named is None:
                launch((4096, 1, 1), args)
        if named is not None:
            launch((4096, 1, 1), args, named)
        untouched = args[2].clone()  # on the default stream, which waits for nothing
        side.synchronize()
        assert (untouched == 0).all()
        torch.testing.assert_close(args[2], args[0] + 0.5 * args[1])


@both_ways
def test_launches_can_be_captured_in_a_graph_and_replayed_on_new_data(way):
    launch = way(build(gemm_source(), detect()))
    a, b, c, _ = args = gemm_arguments(256)
    launch((2, 4, 1), args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch((2, 4, 1), args)
    for _ in range(3):
        a.copy_(torch.randn_like(a))
        c.fill_(float("nan"))
        graph.replay()
        assert relative_rms(c, a.double() @ b.double()) < 3e-3


@both_ways
def test_a_tensor_on_the_cpu_is_refused(way):
    args = add_arguments()
    args[0] = args[0].cpu()
    with pytest.raises(LaunchError, match=r"expected cuda|on the CPU"):
        way(build(add_source(), detect()))((4, 1, 1), args)


def test_the_cache_on_disk_gives_the_same_numbers_without_tilelang():
    artifact = build(gemm_source(), detect())
    args = gemm_arguments(256)
    through_tilelang(artifact)((2, 4, 1), args)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch\n"
        "from tilelang_sources import gemm_source\n"
        "from k3dsl.backends.tilelang.build import build\n"
        "from k3dsl.backends.tilelang.load import load\n"
        "from k3dsl.targets import detect\n"
        "a, b = (t.cuda() for t in torch.load(sys.argv[2]))\n"
        "c = torch.empty(256, 512, device='cuda', dtype=torch.bfloat16)\n"
        "load(build(gemm_source(), detect()), 0)((2, 4, 1), [a, b, c, 256])\n"
        "assert 'tilelang' not in sys.modules\n"
        "torch.save(c.cpu(), sys.argv[2])\n"
    )
    from k3dsl import settings

    path = settings.get("K3DSL_CACHE_DIR") / "tensors.pt"
    torch.save([t.cpu() for t in args[:2]], path)
    folder = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", script, folder, path], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(path), args[2].cpu())


# ---- the ops ----------------------------------------------------------------------------------------------------------


def recorded(name: str, backend: str) -> list[Call]:
    """What happened in one call of the op on its smallest inputs. Skips where the backend refuses the op."""
    op = get_op(name)
    case = cases_of(op)[0]
    inputs = case.make(torch.device("cuda"), 0)
    try:
        with using_backend(backend), recording() as calls, poisoned():
            op.call(**op.fresh(inputs))
    except REFUSALS as error:
        pytest.skip(f"{backend} refuses {name}: {error}")
    torch.cuda.synchronize()
    return calls


over_ops = pytest.mark.parametrize("name", op_names())


@over_ops
def test_every_op_keeps_its_limits_and_repeats_bit_for_bit(name):
    recorded(name, "tilelang")  # skips with the reason
    op = get_op(name)
    (verdict,) = judge(op, cases_of(op)[:1], device="cuda", repeats=REPEATS, backend="tilelang")
    assert verdict.problem is None


@over_ops
def test_each_kernel_gives_what_triton_gives(name):
    """Kernel by kernel, on the tensors that Triton's call left: an error of one kernel is not carried into the next."""
    theirs, ours = recorded(name, "triton"), recorded(name, "tilelang")
    assert len(theirs) == len(ours)
    for call, other in zip(theirs, ours, strict=True):
        for before, after in zip(call.executable.launches, other.executable.launches, strict=True):
            results = []
            for bound in (before, after):
                storages: dict[int, torch.Tensor] = {}  # a clone of a view with gaps would lose its strides
                tensors = {n: moved(t, t.device, storages) for n, t in call.tensors.items()}
                for t in bound.kernel.tensors:
                    buffer = tensors[bound.launch.buffer_of(t.name)]
                    if t.role == "out":
                        buffer.fill_(float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)
                bound.run(tensors, call.dims)
                results.append(tensors)
            for t in before.kernel.tensors:
                if t.role == "in":
                    continue
                x, y = (found[before.launch.buffer_of(t.name)].double() for found in results)
                where = f"{before.launch.label}: {t.name}"
                assert torch.equal(x.isnan(), y.isnan()), where
                assert relative_rms(y.nan_to_num(), x.nan_to_num()) < 1e-2 or torch.equal(x, y), where


@pytest.mark.parametrize("batch", [1, 2])
def test_tensors_cut_out_of_a_joint_one_give_what_their_copies_give(batch):
    """An axis of one, and one along which a tensor is repeated, have strides that TileLang's own host code refuses."""
    torch.manual_seed(0)
    joint = torch.randn(1, 200, 3, 2, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = joint.expand(batch, -1, -1, -1, -1).unbind(2)
    assert v.stride(0) == (0 if batch == 2 else joint.stride(0))
    g = -torch.rand(batch, 200, 2, 64, device="cuda", dtype=torch.bfloat16)
    beta = torch.rand(batch, 200, 2, device="cuda", dtype=torch.bfloat16)
    with using_backend("tilelang"):
        for call in (
            lambda *x: ops.kda(*x, g, beta, use_qk_l2norm_in_kernel=True)[0],
            lambda *x: ops.attention(*x, causal=True),
        ):
            cut, copied = call(q, k, v), call(*(x.contiguous() for x in (q, k, v)))
            assert relative_rms(cut, copied.double()) < 1e-3


@pytest.mark.parametrize("name", ["matmul", "softmax", "kda.decode"])
def test_a_bundle_gives_bit_for_bit_what_the_op_gives(name, tmp_path):
    calls = recorded(name, "tilelang")
    (call,) = calls
    folder = tmp_path / "bundle"
    save(call.executable.plan, detect(), folder)
    plan = call.executable.plan
    op = get_op(name)
    inputs = cases_of(op)[0].make(torch.device("cuda"), 0)
    with using_backend("tilelang"), recording() as again:
        fresh = op.fresh(inputs)
        before = {n: t.clone() for n, t in fresh.items() if isinstance(t, torch.Tensor)}
        op.call(**fresh)
    given = {
        b.name: again[0].tensors[b.name].cpu()
        for b in plan.buffers.values()
        if b.role == "in" or (b.role == "inout" and b.name not in before)
    }
    given |= {b.name: before[b.name].cpu() for b in plan.buffers.values() if b.role == "inout" and b.name in before}
    known = set(plan.symbols())
    dims = {n: v for n, v in call.dims.items() if n in known}
    expected = {b.name: again[0].tensors[b.name].cpu() for b in plan.buffers.values() if b.role in ("out", "inout")}
    torch.save({"given": given, "dims": dims, "expected": expected}, tmp_path / "case.pt")
    script = (
        "import sys\n"
        "for name in ('triton', 'tilelang', 'tvm_ffi'):\n"
        "    sys.modules[name] = None\n"
        "import torch, k3dsl\n"
        "case = torch.load(sys.argv[2])\n"
        "out = k3dsl.load(sys.argv[1])(**{n: x.cuda() for n, x in case['given'].items()}, **case['dims'])\n"
        "torch.cuda.synchronize()\n"
        "for name, expected in case['expected'].items():\n"
        "    assert torch.equal(out[name].cpu().view(torch.uint8), expected.view(torch.uint8)), name\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, folder, tmp_path / "case.pt"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
