"""The KDA step and commit on torch tensors: launches, and registration with torch.library."""

from __future__ import annotations

from typing import Any

import torch

from k3dsl.ops.common import (
    Caller,
    check_contiguous_rows,
    check_no_grad,
    check_numbers,
    check_same,
    check_slots,
    check_tensor,
    fail,
)
from k3dsl.ops.kda_step.check import QKV, check_pool, check_step
from k3dsl.ops.kda_step.space import COMMIT, STEP
from k3dsl.runtime.replay import replayed

Dims = dict[str, int | tuple[int, ...]]
_call = Caller(STEP)
_call_commit = Caller(COMMIT)

# Defined by schema: torch.library.custom_op costs some 80 us a call for an op that mutates an argument.
_library = torch.library.Library("k3dsl", "FRAGMENT")
_TOKENS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor output_gate, Tensor conv_weight, Tensor A_log, "
    "Tensor? dt_bias, Tensor norm_weight"
)
_REST = "Tensor? slots, float? lower_bound, float? scale, float norm_eps, str gate_activation, bool v_first"
_library.define(f"kda_step_({_TOKENS}, Tensor(a!) state, Tensor(b!) conv_state, {_REST}) -> Tensor")
_library.define(f"kda_step({_TOKENS}, Tensor state, Tensor conv_state, {_REST}) -> (Tensor, Tensor, Tensor)")
_library.define("kda_commit_(Tensor(a!) pool, Tensor kept, Tensor num_accepted, Tensor? slots) -> ()")


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    output_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    conv_state: torch.Tensor,
    slots: torch.Tensor | None,
    lower_bound: float | None,
    scale: float | None,
    norm_eps: float,
    gate_activation: str,
    v_first: bool,
    *,
    kept: bool,
) -> dict[str, torch.Tensor]:
    (B, T, H, K), V, W = g.shape, output_gate.shape[-1], conv_weight.shape[1]
    if B == 0:
        made = {"o": v, "states": state[:0, None].expand(0, T, *state.shape[1:]), "windows": conv_state[:0, None]}
        made["windows"] = made["windows"].expand(0, T, *conv_state.shape[1:])
        return {n: x.new_empty(x.shape) for n, x in made.items()}
    tensors = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "output_gate": output_gate, "conv_weight": conv_weight,
        "A_log": A_log.to(torch.float32).reshape(H).contiguous(),
        "norm_weight": norm_weight.to(torch.float32).reshape(V).contiguous(),
        "state": state, "conv_state": conv_state,
    }  # fmt: skip
    if dt_bias is not None:
        tensors["dt_bias"] = dt_bias.to(torch.float32).reshape(H, K).contiguous()
    if slots is not None:
        tensors["slots"] = slots
    options = {
        "dtype": q.dtype,
        "gate_dtype": g.dtype,
        "beta_dtype": beta.dtype,
        "output_gate_dtype": output_gate.dtype,
        "weight_dtype": conv_weight.dtype,
        "gate": "softplus" if lower_bound is None else "bounded",
        "lower_bound": lower_bound,
        "dt_bias": dt_bias is not None,
        "scale": scale,
        "eps": norm_eps,
        "gate_activation": gate_activation,
        "state": state.dtype,
        "conv_state": conv_state.dtype,
        "v_first": v_first,
        "indexed": slots is not None,
        "kept": kept,
    }
    dims: Dims = {"B": (B,), "T": T, "H": H, "K": K, "V": V, "W": W, "pool": (state.shape[0],)}
    return _call(tensors, dims, options)


def _step_in_place(*arguments: Any) -> torch.Tensor:
    return _run(*arguments, kept=False)["o"]


def _step_kept(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = _run(*arguments, kept=True)
    return out["o"], out["states"], out["windows"]


def commit_pool(
    pool: torch.Tensor, kept: torch.Tensor, num_accepted: torch.Tensor, slots: torch.Tensor | None = None
) -> None:
    """pool[slots[b]] = kept[b, num_accepted[b] - 1] for a pool [size, E] and kept [B, Tq, E], without checks."""
    B, T, E = kept.shape
    if kept.numel() == 0:
        return
    tensors = {"pool": pool, "kept": kept, "num_accepted": num_accepted}
    if slots is not None:
        tensors["slots"] = slots
    dims: Dims = {"B": (B,), "T": T, "E": (E, 64, 16), "size": (pool.shape[0],)}
    _call_commit(tensors, dims, {"dtype": pool.dtype, "indexed": slots is not None})


for _key in ("CPU", "CUDA"):
    _library.impl("kda_step_", _step_in_place, _key)
    _library.impl("kda_step", _step_kept, _key)
    _library.impl("kda_commit_", commit_pool, _key)


def _fake_o(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.register_fake("k3dsl::kda_step_")
def _(q, k, v, *rest):
    return _fake_o(q, v)


@torch.library.register_fake("k3dsl::kda_step")
def _(q, k, v, g, beta, output_gate, conv_weight, A_log, dt_bias, norm_weight, state, conv_state, *rest):
    kept = [x.new_empty((*q.shape[:2], *x.shape[1:])) for x in (state, conv_state)]
    return _fake_o(q, v), *kept


@torch.library.register_fake("k3dsl::kda_commit_")
def _(pool, kept, num_accepted, slots):
    return None


@replayed
def kda_step(
    qkv: QKV,
    g: torch.Tensor,
    beta: torch.Tensor,
    output_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    conv_state: torch.Tensor,
    slots: torch.Tensor | None = None,
    *,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    norm_eps: float = 1e-5,
    gate_activation: str = "sigmoid",
    state_v_first: bool = False,
    output_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A KDA layer between its projections, for 1 to 8 tokens of every request, in one launch.

    Short causal convolution and SiLU of q, k and v, decay gate, l2 norm of q and k, the KDA update, and RMSNorm times the
    output gate: what `causal_conv1d_update`, `kda_decode` and `gated_rmsnorm` give one after the other, without rounding
    in between. All arithmetic is fp32. Source: Kimi Linear (arXiv 2510.26692), sections 3 and 4.

    Args:
        qkv: the projections before the convolution, [B, Tq, 2 H K + H V] with q, k and v side by side, or (q, k, v), each
            [B, Tq, H width] or [B, Tq, H, width]. bf16, fp16 or fp32; any strides, last dim contiguous. As many query and
            key heads as value heads; K 64 or 128, V a multiple of 16 up to 128.
        g: raw decay logits [B, Tq, H, K]. beta: raw logits [B, Tq, H]. output_gate: raw, [B, Tq, H, V].
        conv_weight: [2 H K + H V, W] or [., 1, W], W from 2 to 4, channels as in qkv. fp32 or q's dtype.
        A_log: [H]. dt_bias: [H K] or None. norm_weight: [V]. Used in fp32.
        state: a pool [slots, H, K, V] (or [slots, H, V, K] with state_v_first), fp32 or bf16. A bf16 state is rounded after
            every token, so that several tokens give what one at a time give.
        conv_state: a pool [slots, W-1, 2 H K + H V], the last inputs of each request, oldest first; q's dtype or fp32.
        slots: [B] int32, the slot of each request in both pools; a negative one is padding: its output is 0 and no slot
            changes. No two requests may share a slot. None: request b has slot b. Checked on the CPU only.
        lower_bound: of the bounded gate lower_bound sigmoid(exp(A_log) (g + dt_bias)) (Kimi K3: -5); None for
            -exp(A_log) softplus(g + dt_bias) (Kimi Linear).
        scale: of q; 1/sqrt(K) by default. norm_eps: of the output norm. New values compile anew, and so does a new Tq.
        gate_activation: of the output gate, "sigmoid" or "silu".
        output_states: for speculative decoding. The pools are left alone, and what they would hold after each token comes
            back; `kda_commit` then takes over as many tokens as were accepted.

    Returns:
        o [B, Tq, H, V] in q's dtype. With output_states also states [B, Tq, H, K, V] (or v-first) and windows
        [B, Tq, W-1, 2 H K + H V], in the pools' dtypes, undefined for padding. Not differentiable.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    (q, k, v), taps, _ = check_step(
        qkv,
        g,
        beta,
        output_gate,
        conv_weight,
        A_log,
        norm_weight,
        state,
        conv_state,
        slots,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        scale=scale,
        norm_eps=norm_eps,
        gate_activation=gate_activation,
        state_v_first=state_v_first,
    )
    check_no_grad("kda_step", q, k, v, g, beta, output_gate, conv_weight, A_log, dt_bias, norm_weight, state)
    call = torch.ops.k3dsl.kda_step if output_states else torch.ops.k3dsl.kda_step_
    return call(
        q, k, v, g, beta, output_gate, taps, A_log, dt_bias, norm_weight, state, conv_state, slots, lower_bound, scale,
        float(norm_eps), gate_activation, state_v_first,
    )  # fmt: skip


@replayed
def kda_commit(
    state: torch.Tensor,
    conv_state: torch.Tensor,
    states: torch.Tensor,
    windows: torch.Tensor,
    num_accepted: torch.Tensor,
    slots: torch.Tensor | None = None,
) -> None:
    """Takes the accepted tokens of a `kda_step` with output_states over into the pools, in place.

    Both pools' slots[b] become what they were after token num_accepted[b] - 1. A request with 0 accepted tokens keeps the
    state from before the step, and so does a negative slot; a count above Tq counts as Tq.

    Args:
        state, conv_state: the pools, as in the step. states, windows: what the step returned, [B, Tq, ...].
        num_accepted: [B] int32. Its numbers are checked on the CPU only. slots: as in the step.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    requests = states.shape[0] if isinstance(states, torch.Tensor) and states.dim() else 0
    for name, pool, kept_name, kept in (
        ("state", state, "states", states),
        ("conv_state", conv_state, "windows", windows),
    ):
        check_tensor(name, pool)
        check_tensor(kept_name, kept)
        if kept.dim() != pool.dim() + 1 or kept.shape[2:] != pool.shape[1:] or kept.shape[:2] != states.shape[:2]:
            have, need = list(kept.shape), f"[B, Tq, {', '.join(map(str, pool.shape[1:]))}]"
            fail(kept_name, f"has shape {have}, needs {need}", "pass what kda_step returned")
        check_same(kept_name, kept, name, pool)
        check_same(name, pool, "state", state, dtype=False)
        check_pool(name, pool)
    check_tensor("num_accepted", num_accepted, (torch.int32,))
    if num_accepted.shape != (requests,):
        fail("num_accepted", f"has shape {list(num_accepted.shape)}, needs [B] = [{requests}]", "a count a request")
    check_same("num_accepted", num_accepted, "state", state, dtype=False)
    check_contiguous_rows("num_accepted", num_accepted)
    check_numbers(_check_counts, num_accepted, states.shape[1])
    check_slots("slots", slots, requests, "state", state.shape[0], state)
    for pool, kept in ((state, states), (conv_state, windows)):
        torch.ops.k3dsl.kda_commit_(pool.flatten(1), kept.flatten(2), num_accepted, slots)


def _check_counts(num_accepted: torch.Tensor, tokens: int) -> None:
    wrong = [n for n in num_accepted.tolist() if not 0 <= n <= tokens]
    if wrong:
        fail("num_accepted", f"is {wrong[0]}, needs 0 to Tq = {tokens}", "0 keeps the state from before the step")


__all__ = ["kda_commit", "kda_step"]
