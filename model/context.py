"""What a network's context costs: bytes of its cache, and time of attention in a decode step, beside the same widths with MLA
in every layer and with plain softmax attention in every layer."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from k3dsl import ops
from k3dsl.errors import ArgumentError
from k3dsl.model.cache import PAGE_SIZE
from k3dsl.model.config import KimiK3Config
from k3dsl.model.info import BYTES, cache_info
from k3dsl.runtime.timing import measure

CONTEXTS = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 1 << 20)
MOST_TOKENS = 2**31 - 1
"""The ops count a request's tokens in int32."""
CPU_MOST_WIDTH = 1024
"""Values of all heads up to which the CPU is timed; the torch backend is there to judge results, not to be fast."""
CPU_MOST_BYTES = 1 << 30
"""Of a layer's cache on the CPU, which then takes about a second for a step."""
MEMORY_SHARE = 0.9
"""Of the free memory, for a layer's cache; the rest is for the op's own tensors."""

Step = Callable[[], Any]


@dataclass(frozen=True)
class ContextBytes:
    """Caches of `batch` requests that have `tokens` tokens each; bytes.

    Attributes:
        kda_state, conv_state, mla_latents: the network as it is: fixed, fixed, and growing with the context.
        all_mla: latent and shared key part in every layer. plain: keys and values of every head in every layer.
    """

    tokens: int
    kda_state: int
    conv_state: int
    mla_latents: int
    all_mla: int
    plain: int

    @property
    def network(self) -> int:
        """All that the network as it is keeps."""
        return self.kda_state + self.conv_state + self.mla_latents


@dataclass(frozen=True)
class ContextCost:
    """A network's cache over contexts.

    Attributes:
        kda_layers, mla_layers: how many; together all layers.
        mla_token, all_mla_token, plain_token: bytes that a token adds to a request: in the network as it is, with MLA in
            every layer, with plain attention in every layer.
        states: bytes of a request that do not grow: S and convolution window of every KDA layer.
        latents_equal_states: the context from which the MLA layers' latents take as much as the states.
        smaller_than_all_mla, smaller_than_plain: the shortest context at which the network's cache is the smaller one.
            All three in tokens, None where there is none.
    """

    batch: int
    kda_layers: int
    mla_layers: int
    mla_token: int
    all_mla_token: int
    plain_token: int
    states: int
    latents_equal_states: int | None
    smaller_than_all_mla: int | None
    smaller_than_plain: int | None
    rows: tuple[ContextBytes, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "rows": [{**asdict(row), "network": row.network} for row in self.rows]}


def context_cost(config: KimiK3Config, contexts: Sequence[int] = CONTEXTS, batch: int = 1) -> ContextCost:
    """Bytes of the caches of `batch` requests at each context, in tokens of each request. From the config alone.

    The plain network has num_attention_heads heads in every layer, with keys of qk_nope_head_dim + qk_rope_head_dim and values
    of v_head_dim, all in the network's dtype.

    Raises:
        ArgumentError: a context or a batch that is out of range.
    """
    contexts = _checked(contexts, batch)
    info, own = cache_info(config), BYTES[config.dtype]
    states = info.kda_state + info.conv_state
    all_mla = config.num_hidden_layers * config.mla_cache_width * own
    plain = config.num_hidden_layers * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim) * own
    return ContextCost(
        batch=batch,
        kda_layers=len(config.kda_layers),
        mla_layers=len(config.mla_layers),
        mla_token=info.per_token,
        all_mla_token=all_mla,
        plain_token=plain,
        states=states,
        latents_equal_states=-(-states // info.per_token) if states and info.per_token else None,
        smaller_than_all_mla=_smaller_from(states, all_mla - info.per_token),
        smaller_than_plain=_smaller_from(states, plain - info.per_token),
        rows=tuple(
            ContextBytes(
                tokens=tokens,
                kda_state=batch * info.kda_state,
                conv_state=batch * info.conv_state,
                mla_latents=batch * tokens * info.per_token,
                all_mla=batch * tokens * all_mla,
                plain=batch * tokens * plain,
            )
            for tokens in contexts
        ),
    )


def _smaller_from(states: int, saved_per_token: int) -> int | None:
    """The first context at which what is saved on every token exceeds the states."""
    return states // saved_per_token + 1 if saved_per_token > 0 else None


def _checked(contexts: Sequence[int], batch: int) -> tuple[int, ...]:
    if not contexts:
        raise ArgumentError("contexts is empty", fix="name at least one context in tokens")
    for tokens in contexts:
        if not 1 <= tokens <= MOST_TOKENS:
            raise ArgumentError(f"contexts has {tokens:,} tokens", fix=f"from 1 to {MOST_TOKENS:,}")
    if batch < 1:
        raise ArgumentError(f"batch is {batch}", fix="at least one request")
    return tuple(sorted(set(contexts)))


# ---- time ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContextTime:
    """Medians of one layer's op at a context, and their sums over the layers; ms. None: not measured, see ContextTimes.notes.

    Attributes:
        mla_layer, plain_layer: one call of mla_decode, and of attention_decode.
        network: KDA layers times kda_step plus MLA layers times mla_decode. all_mla, plain: all layers times theirs.
    """

    tokens: int
    mla_layer: float | None
    plain_layer: float | None
    network: float | None
    all_mla: float | None
    plain: float | None


@dataclass(frozen=True)
class ContextTimes:
    """The attention part of a decode step over contexts: each op measured for one layer, times the number of layers.

    Attributes:
        device, dtype, timer, batch: what it ran on, in what, how it was timed, and how many requests a step has.
        kda_layer: median of one kda_step, which no context changes; ms; None without KDA layers.
        notes: what was left out, and why.
    """

    device: str
    dtype: str
    timer: str
    batch: int
    kda_layer: float | None
    rows: tuple[ContextTime, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "measured": MEASURED}


MEASURED = (
    "Measured: one call for one layer and one new token of each request, times the number of layers of that kind. "
    "kda_step: convolution, gate, state update, gated norm. mla_decode: absorbed queries over paged latents. "
    "attention_decode: queries over the keys and values of every head. "
    "Not in it: projections (MLA's absorbed ones among them), cache writes, experts, and everything between layers."
)


def context_times(
    config: KimiK3Config,
    contexts: Sequence[int] = CONTEXTS,
    batch: int = 1,
    *,
    device: torch.device | str = "cpu",
    name: str = "this network",
    rep_ms: int = 200,
) -> ContextTimes:
    """Times the ops of a decode step's attention on a device, at the config's dims and dtype, on random inputs.

    Only one layer's cache is in memory at a time, so a context can be timed whose whole cache would not fit. A context whose
    single layer does not fit either is left out, with a note.

    Raises:
        ArgumentError: a context or a batch out of range; a network too wide for the CPU; dims that an op does not take.
    """
    contexts, device = _checked(contexts, batch), torch.device(device)
    _check_device(config, device, name)
    notes: list[str] = []
    timers: set[str] = set()

    def time(step: Step) -> float:
        step()  # compiles
        timing = measure(step, device, rep_ms=rep_ms)
        timers.add(timing.timer)
        return timing.median_ms

    def time_layer(op: str, tokens: int, token_bytes: int, make: Callable[..., Step]) -> float | None:
        wanted, most = batch * tokens * token_bytes, _room(device)
        if wanted > most:
            limit = "that one layer may take on the CPU" if device.type == "cpu" else "that this GPU has free for it"
            notes.append(
                f"{op} at {tokens:,} tokens is left out: one layer's cache has {wanted / 1e9:.4g} GB, above the"
                f" {most / 1e9:.4g} GB {limit}"
            )
            return None
        try:
            return time(make(config, tokens, batch, device))
        except torch.OutOfMemoryError:
            notes.append(f"{op} at {tokens:,} tokens is left out: the GPU has not enough memory for one layer's step")
            return None

    own = BYTES[config.dtype]
    layers, kda, mla = config.num_hidden_layers, len(config.kda_layers), len(config.mla_layers)
    plain_bytes = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim) * own
    with torch.inference_mode():
        kda_ms = time(kda_layer_step(config, batch, device)) if kda else None
        rows = []
        for tokens in contexts:
            mla_ms = time_layer("mla_decode", tokens, config.mla_cache_width * own, mla_layer_step)
            plain_ms = time_layer("attention_decode", tokens, plain_bytes, plain_layer_step)
            rows.append(
                ContextTime(
                    tokens=tokens,
                    mla_layer=mla_ms,
                    plain_layer=plain_ms,
                    network=_sum((kda, kda_ms), (mla, mla_ms)),
                    all_mla=_sum((layers, mla_ms)),
                    plain=_sum((layers, plain_ms)),
                )
            )
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return ContextTimes(where, config.dtype, ", ".join(sorted(timers)), batch, kda_ms, tuple(rows), tuple(notes))


def _sum(*parts: tuple[int, float | None]) -> float | None:
    """Layers times ms, over the kinds that there are; None where one is not known."""
    known = [(count, ms) for count, ms in parts if count]
    return (
        None if any(ms is None for _, ms in known) else math.fsum(count * ms for count, ms in known if ms is not None)
    )


def _check_device(config: KimiK3Config, device: torch.device, name: str) -> None:
    width = max(config.num_attention_heads * max(config.mla_cache_width, config.qk_head_dim), config.kda_width)
    if device.type == "cpu" and width > CPU_MOST_WIDTH:
        raise ArgumentError(
            f"{name} is too wide to be timed on the CPU: its heads have {width:,} values together, at most"
            f" {CPU_MOST_WIDTH:,} are timed there",
            fix="run this on a machine with a GPU, take K3-tiny or Kimi-Linear-tiny, or leave the time out",
        )


def _room(device: torch.device) -> int:
    """Bytes that one layer's cache may have."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on every system
        free = CPU_MOST_BYTES
    return min(CPU_MOST_BYTES, int(MEMORY_SHARE * free))


# ---- one layer's step, on random inputs -----------------------------------------------------------------------------------


def _random(config: KimiK3Config, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, config.dtype), device=device).normal_()


def kda_layer_step(config: KimiK3Config, batch: int, device: torch.device) -> Step:
    """A call of kda_step for one layer and a token of each request."""
    H, K, W = config.kda_num_heads, config.kda_head_dim, config.short_conv_kernel_size
    qkv, taps = _random(config, device, batch, 1, 3 * H * K), _random(config, device, 3 * H * K, W)
    g, gate = (_random(config, device, batch, 1, H, K) for _ in range(2))
    beta = _random(config, device, batch, 1, H)
    A_log, dt_bias = torch.zeros(H, device=device), torch.zeros(H * K, device=device)
    norm = torch.ones(K, device=device)
    state = torch.zeros(batch, H, K, K, device=device)
    windows = _random(config, device, batch, W - 1, 3 * H * K)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    return lambda: ops.kda_step(
        qkv, g, beta, gate, taps, A_log, norm, state, windows, slots, dt_bias=dt_bias,
        lower_bound=config.gate_lower_bound, norm_eps=config.rms_norm_eps, state_v_first=True,
    )  # fmt: skip


def mla_layer_step(config: KimiK3Config, tokens: int, batch: int, device: torch.device) -> Step:
    """A call of mla_decode for one layer and a token of each request, whose cache holds `tokens` tokens."""
    pages = -(-tokens // PAGE_SIZE)
    q = _random(config, device, batch, 1, config.num_attention_heads, config.mla_cache_width)
    cache = _random(config, device, batch * pages, PAGE_SIZE, config.mla_cache_width)
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    rank, scale = config.kv_lora_rank, config.qk_head_dim**-0.5
    return lambda: ops.mla_decode(q, cache, table, lengths, scale=scale, kv_lora_rank=rank)


def plain_layer_step(config: KimiK3Config, tokens: int, batch: int, device: torch.device) -> Step:
    """A call of attention_decode for one layer and a token of each request, whose cache holds `tokens` tokens."""
    heads = config.num_attention_heads
    q = _random(config, device, batch, 1, heads, config.qk_head_dim)
    keys = _random(config, device, batch, tokens, heads, config.qk_head_dim)
    values = _random(config, device, batch, tokens, heads, config.v_head_dim)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    return lambda: ops.attention_decode(q, keys, values, lengths)
