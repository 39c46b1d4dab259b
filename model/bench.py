"""How fast a network reads prompts and writes tokens on this machine, and what its ops take of that."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from k3dsl.model.generate import DecodeStep
from k3dsl.ops.common import dtype_name
from k3dsl.runtime.executable import Call, recording
from k3dsl.runtime.timing import measure

if TYPE_CHECKING:
    from k3dsl.model.network import KimiK3ForCausalLM


@dataclass(frozen=True)
class Phase:
    """Median of one call. ops: (name, calls, ms of those calls run alone), the slowest first."""

    name: str
    time_ms: float
    tokens_per_s: float
    ops: tuple[tuple[str, int, float], ...]


@dataclass(frozen=True)
class BenchResult:
    """A network's times: a prefill of batch prompts of `length` tokens, and a decode step after it."""

    device: str
    dtype: str
    batch: int
    length: int
    prefill: Phase
    decode: Phase

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return asdict(self)


def bench(model: KimiK3ForCausalLM, *, batch: int = 1, length: int = 256, rep_ms: int = 1000) -> BenchResult:
    """Times a prefill with a cache and a decode step (on a GPU a replayed CUDA graph), and each of their ops alone.

    The context grows by a token with every decode step that is timed.
    """
    device = model.device
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    cache = model.new_cache(batch, capacity=length)

    def read() -> None:
        cache.reset()
        model(ids, past=cache, logits_to_keep=1, differentiable=False)

    def write() -> None:
        model(ids[:, :1], past=cache, differentiable=False)

    with torch.no_grad():
        read()
        with recording() as calls:
            read()
        prefill = _phase(
            "prefill", measure(read, device, rep_ms=rep_ms).median_ms, batch * length, calls, device, rep_ms
        )
        cache = model.new_cache(batch, capacity=length + 4096, growable=True)
        read()
        write()
        with recording() as calls:
            write()
        step, rows = DecodeStep(model, cache, batch), list(range(batch))
        tokens = ids[:, 0].contiguous()
        step(tokens, rows)
        time_ms = measure(lambda: step(tokens, rows), device, rep_ms=rep_ms).median_ms
        decode = _phase("decode", time_ms, batch, calls, device, rep_ms)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return BenchResult(name, dtype_name(model.dtype), batch, length, prefill, decode)


def _phase(name: str, time_ms: float, tokens: int, calls: list[Call], device: torch.device, rep_ms: int) -> Phase:
    """Each kind of call is timed once, on the tensors that it left, and counts as often as it came."""
    times: dict[str, list[float]] = {}
    known: dict[Any, float] = {}
    for call in calls:
        key = (id(call.executable), tuple(sorted(call.dims.items())))
        if key not in known:

            def run(call: Call = call) -> None:
                for launch in call.executable.launches:
                    launch.run(call.tensors, call.dims)

            known[key] = measure(run, device, rep_ms=max(1, rep_ms // 50)).median_ms
        times.setdefault(call.executable.plan.op, []).append(known[key])
    ops = sorted(((op, len(each), sum(each)) for op, each in times.items()), key=lambda row: -row[2])
    return Phase(name, time_ms, tokens / time_ms * 1e3, tuple(ops))
