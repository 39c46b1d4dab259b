"""How fast a network reads prompts and writes tokens on this machine, and what its ops take of that."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from k3dsl.errors import BuildError, LaunchError, ResourceError
from k3dsl.model.cache import Cache, KDASlots
from k3dsl.model.generate import DecodeStep
from k3dsl.ops.common import dtype_name, fail
from k3dsl.ops.registry import get_op
from k3dsl.runtime.executable import Call, watching
from k3dsl.runtime.timing import copy_gbps, measure, measure_graph, plan_traffic

if TYPE_CHECKING:
    from k3dsl.model.network import KimiK3ForCausalLM

OP_SHARE = 50
"""An op alone is repeated for this fraction of the time that the whole is."""
CONTENT_STD = 0.1
"""Deviation of what a made-up context holds."""

NO_MEMORY = "out of memory"


@dataclass(frozen=True)
class OpTime:
    """The calls of one op in a call of the network. time_ms: of each kind of call alone, times how often it came. bytes: that
    they move if every launch reads and writes its tensors once (of experts, those that uniform routing hits).
    bytes_ms: what the bytes take at the device's copy rate; None on the CPU."""

    op: str
    calls: int
    time_ms: float
    bytes: int
    bytes_ms: float | None


@dataclass(frozen=True)
class Cell:
    """One measurement of the network.

    Attributes:
        phase: 'prefill': `batch` prompts of `tokens` tokens; 'decode': one new token of `batch` sequences, each of which sees
            `tokens` tokens, itself included.
        time_ms: median of the whole; on a GPU a decode step is a replayed CUDA graph. None: it could not run.
        tokens_per_s: read or written, over all sequences.
        ops: the slowest first.
        projection_bytes: weights of all linear layers, lm_head included, which no op counts; projection_ms: reading them
            once at the device's copy rate; None on the CPU.
        peak_bytes: most memory in use, the network included; None on the CPU.
        problem: why it could not run.
    """

    phase: str
    batch: int
    tokens: int
    time_ms: float | None = None
    tokens_per_s: float | None = None
    ops: tuple[OpTime, ...] = ()
    projection_bytes: int = 0
    projection_ms: float | None = None
    peak_bytes: int | None = None
    problem: str | None = None

    @property
    def rest_ms(self) -> float | None:
        """What the ops alone do not account for: projections and the host. Negative where ops overlap in the whole."""
        return None if self.time_ms is None else self.time_ms - sum(op.time_ms for op in self.ops)

    @property
    def out_of_memory(self) -> bool:
        """Whether the device's memory was too small for it."""
        return self.problem is not None and self.problem.startswith(NO_MEMORY)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "rest_ms": self.rest_ms}


@dataclass(frozen=True)
class BenchResult:
    """A network's times on a device. experts: 'mxfp4' or the dtype of their weights. weight_bytes: of all parameters.
    copy_gbps: this run's measured memory rate in 10^9 bytes/s, read plus written; None on the CPU."""

    device: str
    dtype: str
    experts: str
    weight_bytes: int
    copy_gbps: float | None
    cells: tuple[Cell, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {**asdict(self), "cells": [cell.to_json() for cell in self.cells]}


def bench(
    model: KimiK3ForCausalLM,
    *,
    lengths: Sequence[int] = (256,),
    prompts: int = 1,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] = (1,),
    chunk: int = 0,
    rep_ms: int = 1000,
    on_cell: Callable[[BenchResult], None] | None = None,
) -> BenchResult:
    """Times prefills with a cache, decode steps at given contexts, and each of their ops alone.

    A decode step's context is made up (`fill`), not read. A cell that the memory cannot hold, or that the device refuses, is
    reported as such, and the others go on.

    Args:
        lengths: tokens of a prompt, one prefill each. prompts: that a prefill reads at once.
        contexts, batches: of the decode steps, each context with each batch. contexts None: as lengths.
        chunk: most tokens of a prompt in one call, so that a prefill takes less memory; 0: all at once.
        rep_ms: to repeat each measurement for.
        on_cell: gets the result so far after each cell.

    Raises:
        ArgumentError: a count below 1 (of chunk: below 0).
    """
    contexts = lengths if contexts is None else contexts
    for name, values in (
        ("lengths", lengths), ("contexts", contexts), ("batches", batches), ("prompts", (prompts,)), ("rep_ms", (rep_ms,))
    ):  # fmt: skip
        if any(value < 1 for value in values):
            fail(name, f"has {min(values)}", "pass counts of at least 1")
    if chunk < 0:
        fail("chunk", f"is {chunk}", "pass tokens, or 0 for all at once")
    device = model.device
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    packed = model.config.experts_mxfp4
    result = BenchResult(
        name,
        dtype_name(model.dtype),
        "mxfp4" if packed else dtype_name(model.dtype),
        sum(p.nbytes for p in model.parameters()),
        copy_gbps(device) if on_gpu else None,
        (),
    )
    wanted = [Cell("prefill", prompts, length) for length in lengths]
    wanted += [Cell("decode", batch, context) for context in contexts for batch in batches]
    for cell in wanted:
        with torch.no_grad():
            done = _tried(model, cell, chunk, rep_ms, result.copy_gbps)
        result = replace(result, cells=(*result.cells, done))
        if on_cell is not None:
            on_cell(result)
    _free(device)
    return result


def fill(cache: Cache, tokens: int) -> None:
    """Gives every row of an empty cache a made-up context of so many tokens: normal numbers in states, windows and latents.

    The caller sees to it that no row holds any token.
    """
    cache.reserve([tokens] * cache.rows)
    for layer in cache.layers:
        for x in (layer.state, layer.windows) if isinstance(layer, KDASlots) else (layer.pages,):
            x.normal_(0.0, CONTENT_STD)
    cache.advance([tokens] * cache.rows)
    cache.lengths.fill_(tokens)


# ---- cells -------------------------------------------------------------------------------------------------------------


def _tried(model: KimiK3ForCausalLM, cell: Cell, chunk: int, rep_ms: int, rate: float | None) -> Cell:
    """The cell with its times, or with why there are none."""
    problem = None
    _free(model.device)
    try:
        return (
            _prefill(model, cell, chunk, rep_ms, rate)
            if cell.phase == "prefill"
            else _decode(model, cell, rep_ms, rate)
        )
    except RuntimeError as error:  # what is no allocation, such as a graph, has no class of its own
        if not isinstance(error, torch.OutOfMemoryError) and NO_MEMORY not in str(error):
            raise
        problem = f"{NO_MEMORY}: {str(error).split('. ')[1] if '. ' in str(error) else error}"
    except (BuildError, LaunchError, ResourceError) as error:
        problem = str(error)
    # the error is gone here, and with it the frames that held the cell's tensors
    return replace(cell, problem=problem, peak_bytes=_peak(model.device))


def _prefill(model: KimiK3ForCausalLM, cell: Cell, chunk: int, rep_ms: int, rate: float | None) -> Cell:
    batch, length = cell.batch, cell.tokens
    cache = model.new_cache(batch, capacity=length)
    ids = _tokens(model, batch, length)

    def read() -> None:
        cache.reset()
        for part in ids.split(chunk or length, 1):
            model(part, past=cache, logits_to_keep=1, differentiable=False)

    with _timing_ops(model.device, rep_ms) as ops:
        read()
    return _done(model, cell, measure(read, model.device, rep_ms=rep_ms).median_ms, batch * length, ops, rate)


def _decode(model: KimiK3ForCausalLM, cell: Cell, rep_ms: int, rate: float | None) -> Cell:
    batch, earlier = cell.batch, cell.tokens - 1
    cache = model.new_cache(batch, capacity=cell.tokens, growable=False)
    fill(cache, earlier)
    step = DecodeStep(model, cache, batch)
    step(_tokens(model, batch, 1)[:, 0], list(range(batch)))

    def write() -> None:
        cache.lengths.fill_(earlier)
        step.again()

    time_ms = measure(write, model.device, rep_ms=rep_ms).median_ms
    cache.lengths.fill_(earlier)
    with _timing_ops(model.device, rep_ms) as ops:
        model.decode(step.ids, cache, step.slots)
    return _done(model, cell, time_ms, batch, ops, rate)


def _tokens(model: KimiK3ForCausalLM, batch: int, length: int) -> torch.Tensor:
    drawn = torch.randint(0, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    return drawn.to(model.device)


def _done(
    model: KimiK3ForCausalLM, cell: Cell, time_ms: float, tokens: int, ops: dict[str, OpTime], rate: float | None
) -> Cell:
    def at_rate(size: int) -> float | None:
        return None if rate is None else size / rate / 1e6

    linear = sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))
    if model.config.tie_word_embeddings:
        linear += model.model.embed_tokens.weight.nbytes
    rows = sorted((replace(op, bytes_ms=at_rate(op.bytes)) for op in ops.values()), key=lambda op: -op.time_ms)
    return replace(
        cell,
        time_ms=time_ms,
        tokens_per_s=tokens / time_ms * 1e3,
        ops=tuple(rows),
        projection_bytes=linear,
        projection_ms=at_rate(linear),
        peak_bytes=_peak(model.device),
    )


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# ---- ops ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _timing_ops(device: torch.device, rep_ms: int) -> Iterator[dict[str, OpTime]]:
    """While active, every kind of call of an executable is timed once, as it comes, on the tensors that it left.

    Nothing is kept of a call, so that this takes no more memory than the call of the network alone.
    """
    found: dict[str, OpTime] = {}
    known: dict[Any, tuple[float, int]] = {}

    def seen(call: Call) -> None:
        plan = call.executable.plan
        key = (id(call.executable), tuple(sorted(call.dims.items())))
        if key not in known:
            moved = (get_op(plan.op).traffic_bytes or plan_traffic)(plan, call.dims)
            known[key] = _time_alone(call, device, max(1, rep_ms // OP_SHARE)), sum(moved.values())
        time_ms, size = known[key]
        before = found.get(plan.op, OpTime(plan.op, 0, 0.0, 0, None))
        found[plan.op] = OpTime(plan.op, before.calls + 1, before.time_ms + time_ms, before.bytes + size, None)

    with watching(seen):
        yield found


def _time_alone(call: Call, device: torch.device, rep_ms: int) -> float:
    def run() -> None:
        call.executable.run(call.tensors, call.dims)

    # small launches take the GPU less time than they take the host
    replayed = measure_graph(run, device, warmup_ms=max(1, rep_ms // 4), rep_ms=rep_ms)
    return (replayed or measure(run, device, rep_ms=rep_ms)).median_ms
