"""How long an op takes: the one timer, an op against its peers in one process, and each launch against its floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from k3dsl.errors import ArgumentError
from k3dsl.runtime.executable import Call, recording
from k3dsl.runtime.metrics import relative_rms
from k3dsl.runtime.op import Op, forced
from k3dsl.runtime.plan import Plan
from k3dsl.targets import Ceilings

COPY_BYTES = 1 << 30
MATMUL_SIDE = 8192
GPU_TIMER = "triton.testing.do_bench (GPU events, L2 cleared before each call)"
GRAPH_TIMER = "triton.testing.do_bench of a CUDA graph's replay (GPU events, L2 cleared before each)"
CPU_TIMER = "time.perf_counter (CPU wall clock)"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, and the 20th and 80th percentile. timer: how they were measured.

    least_ms: the least, where every call was timed (on the CPU).
    """

    median_ms: float
    low_ms: float
    high_ms: float
    timer: str
    least_ms: float | None = None


def measure(call: Callable[[], Any], device: torch.device | str, *, warmup_ms: int = 50, rep_ms: int = 200) -> Timing:
    """Times a call that is compiled already. On the CPU: at least 3 calls, and as many as fit into rep_ms."""
    if torch.device(device).type == "cuda":
        from triton.testing import do_bench

        with torch.cuda.device(torch.device(device)):
            median, low, high = do_bench(call, warmup=warmup_ms, rep=rep_ms, quantiles=[0.5, 0.2, 0.8])
        return Timing(median, low, high, GPU_TIMER)
    call()
    samples: list[float] = []
    while len(samples) < 3 or sum(samples) < rep_ms:
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e3)
    samples.sort()
    low, high = samples[len(samples) // 5], samples[-1 - len(samples) // 5]
    return Timing(statistics.median(samples), low, high, CPU_TIMER, samples[0])


def measure_graph(
    call: Callable[[], Any], device: torch.device | str, *, warmup_ms: int = 50, rep_ms: int = 200
) -> Timing | None:
    """Times the replay of a CUDA graph of one call that is compiled already: what the GPU takes without the host.

    None on the CPU, and for a call that cannot be captured.
    """
    if torch.device(device).type != "cuda":
        return None
    with torch.cuda.device(torch.device(device)):
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own behind
            torch.cuda.synchronize()
            return None
        return replace(measure(graph.replay, device, warmup_ms=warmup_ms, rep_ms=rep_ms), timer=GRAPH_TIMER)


HOST_CALLS = 20
"""Calls in a row for the host's time: few enough that none waits for room in the GPU's queue of launches."""


def host_us(call: Callable[[], Any], device: torch.device | str, *, rounds: int = 15) -> float | None:
    """Microseconds that the host takes to enqueue one call that is compiled already, while the GPU waits for nothing; None on
    the CPU, where the host computes."""
    if torch.device(device).type != "cuda":
        return None
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / HOST_CALLS)
    torch.cuda.synchronize(device)
    return statistics.median(samples)


def copy_gbps(device: torch.device | str) -> float:
    """What this GPU's memory does in a large device copy: bytes read plus bytes written, in 10^9 bytes/s."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / measure(lambda: target.copy_(source), device).median_ms / 1e6


def matmul_tflops(device: torch.device | str) -> float:
    """What torch's product of two large square bf16 matrices does on this GPU, in 10^12 FLOP/s."""
    a, b = torch.randn(2, MATMUL_SIDE, MATMUL_SIDE, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return 2 * MATMUL_SIDE**3 / measure(lambda: torch.mm(a, b, out=out), device).median_ms / 1e9


def ceilings(device: torch.device | str, *, products: bool) -> Ceilings:
    """This GPU's rates, measured now. products: whether that of matrix products is wanted too."""
    return Ceilings(copy_gbps(device), matmul_tflops(device) if products else None, "torch copy and bf16 product")


@dataclass(frozen=True)
class Work:
    """What a launch must do: bytes to move, and floating-point operations of products (0 where the op does not say)."""

    bytes: int
    flops: int

    def floor_ms(self, rates: Ceilings) -> float:
        """The time that the longer of the two takes at those rates. A product of fp32 tiles is held against the rate of bf16,
        which no other reaches."""
        moving = self.bytes / rates.copy_gbps / 1e6
        return max(moving, self.flops / rates.matmul_tflops / 1e9) if rates.matmul_tflops else moving


def plan_work(op: Op, plan: Plan, dims: Mapping[str, int]) -> dict[str, Work]:
    """What each launch must do, by label."""
    flops = op.flops(plan, dims) if op.flops is not None else {}
    moved = (op.traffic_bytes or plan_traffic)(plan, dims)
    return {label: Work(size, flops.get(label, 0)) for label, size in moved.items()}


def plan_traffic(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """Bytes that each launch moves if it reads and writes each of its tensors once; one updated in place counts twice."""
    moved: dict[str, int] = {}
    for launch in plan.launches:
        moved[launch.label] = 0
        for t in launch.kernel.tensors:
            size = t.dtype.bytes
            for extent in t.shape:
                size *= extent.evaluate(dims)
            moved[launch.label] += size * (2 if t.role == "inout" else 1)
    return moved


@dataclass(frozen=True)
class LaunchTime:
    """One launch of an op alone: its time, what it must do (see Work), and the time that this takes at the device's rates."""

    label: str
    timing: Timing
    bytes: int
    floor_ms: float
    flops: int = 0

    @property
    def share(self) -> float:
        """Floor over time: 1 is as fast as memory and matrix units allow."""
        return self.floor_ms / self.timing.median_ms


@dataclass(frozen=True)
class PeerTime:
    """Another library's function on the same inputs. problem: why it could not run. difference: relative RMS between its
    outputs and ours, by name."""

    name: str
    timing: Timing | None
    difference: Mapping[str, float] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class BenchResult:
    """An op's time on a device, with its peers and its launches. copy_gbps, matmul_tflops: this run's measured rates of a copy
    (10^9 bytes/s) and of a bf16 product (10^12 FLOP/s; None for an op without products).

    timing, and peers: of calls as a program makes them, which the host may bound. On a GPU also graph: of the replayed CUDA
    graph of one call, where it can be captured; and host_us: what the host takes to enqueue a call.
    """

    op: str
    device: str
    dims: Mapping[str, int]
    knobs: Mapping[str, Any]
    timing: Timing
    peers: tuple[PeerTime, ...]
    launches: tuple[LaunchTime, ...]
    copy_gbps: float | None
    graph: Timing | None = None
    host_us: float | None = None
    matmul_tflops: float | None = None

    @property
    def on_device(self) -> Timing:
        """The graph's timing, or else that of calls."""
        return self.graph or self.timing

    def ratio(self, peer: PeerTime) -> float | None:
        """Our time over the peer's, both of calls: under 1 is faster."""
        return self.timing.median_ms / peer.timing.median_ms if peer.timing is not None else None

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "device": self.device,
            "dims": dict(self.dims),
            "knobs": {n: v if isinstance(v, (int, float, str, type(None))) else str(v) for n, v in self.knobs.items()},
            "timing": asdict(self.timing),
            "graph": asdict(self.graph) if self.graph is not None else None,
            "host_us": self.host_us,
            "peers": [{**asdict(p), "ratio": self.ratio(p)} for p in self.peers],
            "launches": [{**asdict(launch), "share": launch.share} for launch in self.launches],
            "copy_gbps": self.copy_gbps,
            "matmul_tflops": self.matmul_tflops,
        }


def bench(
    op: Op,
    *,
    dims: Mapping[str, int] | None = None,
    options: Mapping[str, Any] | None = None,
    knobs: Mapping[str, Any] | None = None,
    schedules: Mapping[str, Mapping[str, Any]] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    with_peers: bool = True,
    rep_ms: int = 200,
) -> BenchResult:
    """Times an op at the given dims, its peers on the same tensors, and on a GPU its CUDA graph and each launch alone.

    knobs, schedules: in place of the op's own choice.

    Raises ArgumentError for an op that cannot draw inputs.
    """
    if op.inputs is None or op.call is None:
        raise ArgumentError(f"{op.name} has no inputs to be timed on")
    device = torch.device(device)
    on_cpu = device.type == "cpu"
    known = op.resolve_dims({**(op.cpu_dims if on_cpu else {}), **(dims or {})})
    inputs = op.inputs(known, op.resolve_options(options or {}), device, seed)
    call = op.call
    with torch.inference_mode(), forced(op, knobs or {}, schedules or {}):
        with recording() as calls:
            ours = {n: x.clone() for n, x in call(**op.fresh(inputs)).items() if x is not None}
        timed = op.fresh(inputs)  # an op in place would leave other inputs for the peers to be compared on
        timing = measure(lambda: call(**timed), device, rep_ms=rep_ms)
        peers = _time_peers(op, inputs, ours, device, rep_ms) if with_peers else ()
        if on_cpu:
            return BenchResult(op.name, _device_name(device), _ints(known), _knobs(calls), timing, peers, (), None)
        host = host_us(lambda: call(**timed), device)
        graph = measure_graph(lambda: call(**timed), device, rep_ms=rep_ms)
        rates = ceilings(device, products=op.flops is not None)
        launches = tuple(t for c in calls for t in launch_times(op, c, rates, rep_ms))
    where, copy, products = _device_name(device), rates.copy_gbps, rates.matmul_tflops
    return BenchResult(
        op.name, where, _ints(known), _knobs(calls), timing, peers, launches, copy, graph, host, products
    )


def launch_times(op: Op, call: Call, rates: Ceilings, rep_ms: int = 200) -> list[LaunchTime]:
    """Times every launch of a recorded call alone, all steps of it, again and again on the tensors that it left."""
    work = plan_work(op, call.executable.plan, call.dims)
    found = []
    for launch in call.executable.launches:
        label = launch.launch.label
        must = work[label]

        def run(launch: Any = launch) -> None:
            call.executable.run_alone(launch, call.tensors, call.dims)

        timing = measure(run, call.executable.device, rep_ms=rep_ms)
        found.append(LaunchTime(label, timing, must.bytes, must.floor_ms(rates), must.flops))
    return found


def _time_peers(
    op: Op, inputs: Mapping[str, Any], ours: Mapping[str, torch.Tensor], device: torch.device, rep_ms: int
) -> tuple[PeerTime, ...]:
    found = []
    for name, peer in (op.peers() if op.peers is not None else {}).items():
        try:
            theirs = peer(**op.fresh(inputs))
            difference = {n: relative_rms(x, ours[n]) for n, x in theirs.items() if x is not None and n in ours}

            def run(peer: Callable[..., Any] = peer, timed: Mapping[str, Any] = op.fresh(inputs)) -> None:
                peer(**timed)

            found.append(PeerTime(name, measure(run, device, rep_ms=rep_ms), difference))
        except Exception as error:  # a peer may lack this shape, this GPU, or this version of Triton
            found.append(PeerTime(name, None, {}, f"{type(error).__name__}: {error}".splitlines()[0][:200]))
    return tuple(found)


def _knobs(calls: list[Call]) -> dict[str, Any]:
    return dict(calls[-1].executable.plan.knobs) if calls else {}


def _ints(dims: Mapping[str, Any]) -> dict[str, int]:
    return {n: int(v) for n, v in dims.items()}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
