"""Linear attention and the delta rules on torch tensors: launches, and registration with torch.library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from k3dsl.backends.torch.dtypes import from_torch
from k3dsl.ir.symbols import Sym
from k3dsl.ops.common import check_no_grad, check_slots, fail, gradients_again, token_divisor
from k3dsl.ops.kda.api import layout
from k3dsl.ops.linear_attention.check import (
    check_one_token,
    check_pool,
    check_sequences,
    check_state,
    check_tokens,
)
from k3dsl.ops.linear_attention.chunked import chunked
from k3dsl.ops.linear_attention.space import DECODE, FORWARD
from k3dsl.ops.registration import torch_op
from k3dsl.runtime.dispatch import ALIGNMENT, Dispatcher, Problem, remembered, wanted_backend
from k3dsl.runtime.executable import Executable
from k3dsl.runtime.op import forced_key, size_number
from k3dsl.runtime.replay import replayed

_dispatch = {name: Dispatcher(op.plan) for name, op in FORWARD.items()}
_token = {name: Dispatcher(op.plan) for name, op in DECODE.items()}


class Call(NamedTuple):
    """What chooses the code of a call. sizes: tokens and sequences (numbers for their classes), or requests and 0."""

    name: str
    device: torch.device
    options: tuple[tuple[str, Any], ...]
    heads: tuple[int, int, int, int]
    single: bool
    divisor: int
    sizes: tuple[int, int]
    strides: tuple[tuple[str, tuple[int | Sym, ...]], ...]
    backend: str
    forced: str | None


@remembered
def _code(call: Call) -> tuple[Executable, int]:
    """The compiled plan for a kind of call, and its chunk length."""
    op = FORWARD[call.name]
    options = op.resolve_options({n: from_torch(x) if isinstance(x, torch.dtype) else x for n, x in call.options})
    fixed = dict(zip(("H", "HK", "K", "V"), call.heads, strict=True))
    tokens, sequences = call.sizes
    dims: dict[str, Any] = dict(fixed)
    if options["varlen"]:
        dims |= {"T": Sym("T", min=1), "B": 1, "N": Sym("N", min=1), "chunks": Sym("chunks", min=1)}
    else:
        batch = 1 if call.single else Sym("B", min=1, max=65535)
        dims |= {"T": Sym("T", divisible_by=call.divisor, min=1), "B": batch, "N": batch}
    numbers = {**fixed, "T": tokens, "N": sequences, "B": 1 if options["varlen"] else sequences}
    problem = Problem(op, options, numbers, dims, dict(call.strides), call.device, call.backend)
    code, knobs = _dispatch[call.name].pick(problem)
    return code, knobs["chunk"]


@remembered
def _token_code(call: Call) -> Executable:
    """The compiled plan for one token. The pool's size changes nothing."""
    op = DECODE[call.name]
    options = op.resolve_options({n: from_torch(x) if isinstance(x, torch.dtype) else x for n, x in call.options})
    fixed = dict(zip(("H", "HK", "K", "V"), call.heads, strict=True))
    dims = {**fixed, "B": Sym("B", min=1, max=65535), "slots": Sym("slots", min=1)}
    numbers = {**fixed, "B": call.sizes[0]}
    problem = Problem(op, options, numbers, dims, dict(call.strides), call.device, call.backend)
    return _token[call.name].pick(problem)[0]


def op_name(g: torch.Tensor | None, beta: torch.Tensor | None) -> str:
    """The op that a call with these inputs is."""
    return "linear_attention" if beta is None else "delta_rule" if g is None else "gated_delta_rule"


@torch_op("linear_forward")
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float | None,
    output_final_state: bool,
    l2norm: bool,
    normalize: bool,
    v_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    B, T, HK, K = q.shape
    H, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = torch.float32 if initial_state is None else initial_state.dtype
    if B * T == 0 or N == 0:
        o = torch.zeros_like(v, memory_format=torch.contiguous_format)
        if not output_final_state:
            return o, q.new_empty(0)
        if initial_state is not None:
            return o, initial_state.contiguous().clone()
        return o, torch.zeros((N, H, V, K) if v_first else (N, H, K, V), dtype=final, device=q.device)
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {n: t for n, t in (("g", g), ("beta", beta), ("initial_state", initial_state)) if t is not None}
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = cu_seqlens.contiguous()
    strides, values = layout(tensors)
    name = op_name(g, beta)
    options: dict[str, Any] = {
        "dtype": q.dtype,
        "scale": scale,
        "v_first": v_first,
        "initial_state": None if initial_state is None else initial_state.dtype,
        "final_state": final if output_final_state else None,
        "varlen": cu_seqlens is not None,
        "cu_dtype": None if cu_seqlens is None else cu_seqlens.dtype,
    }
    if beta is None:
        options["normalize"] = normalize
    else:
        options |= {"beta_dtype": beta.dtype, "l2norm": l2norm}
    if g is not None:
        options["g_dtype"] = g.dtype
    code, chunk = _code(
        Call(name, q.device, tuple(options.items()), (H, HK, K, V), B == 1, token_divisor(T),
             (size_number(T), size_number(N)), strides, wanted_backend(q.device), forced_key(FORWARD[name]))
    )  # fmt: skip
    values["T"] = T
    if cu_seqlens is None:
        values["B"] = B
    else:
        values |= {"N": N, "chunks": T // chunk + N}  # a bound that needs no look at the lengths
    out = code(tensors, values)
    return out["o"], out["final_state"] if output_final_state else q.new_empty(0)


@_forward.register_fake
def _(q, k, v, g, beta, initial_state, cu_seqlens, scale, output_final_state, l2norm, normalize, v_first):
    B, _, _, K = q.shape
    H, V = v.shape[2:]
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    if not output_final_state:
        return o, q.new_empty(0)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = torch.float32 if initial_state is None else initial_state.dtype
    return o, q.new_empty((N, H, V, K) if v_first else (N, H, K, V), dtype=dtype)


_DIFFERENTIABLE = 6


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[: _DIFFERENTIABLE + 1])
    ctx.rest = inputs[_DIFFERENTIABLE + 1 :]


def _backward(ctx: Any, grad_o: torch.Tensor, grad_state: torch.Tensor) -> tuple[Any, ...]:
    """Runs the plain torch chunk form again and differentiates it."""
    *saved, cu_seqlens = ctx.saved_tensors
    scale, output_final_state, l2norm, normalize, v_first = ctx.rest

    def again(*inputs: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        o, state = chunked(
            *inputs[:5],
            scale=scale,
            initial_state=inputs[5],
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=l2norm,
            normalize=normalize,
            cu_seqlens=cu_seqlens,
            state_v_first=v_first,
        )
        return [(o, grad_o)] if state is None or grad_state is None else [(o, grad_o), (state, grad_state)]

    return (*gradients_again(again, saved, ctx.needs_input_grad[:_DIFFERENTIABLE]), *[None] * 6)


_forward.register_autograd(_backward, setup_context=_setup_context)

# Defined by schema: torch.library.custom_op costs some 80 us a call for an op that mutates an argument.
_library = torch.library.Library("k3dsl", "FRAGMENT")
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta"
_REST = "Tensor? state_indices, float? scale, bool l2norm, bool v_first"
_library.define(f"linear_decode_({_INPUTS}, Tensor(a!) state, {_REST}) -> Tensor")
_library.define(f"linear_decode({_INPUTS}, Tensor state, {_REST}) -> (Tensor, Tensor)")


def _decode_in_place(*arguments: Any) -> torch.Tensor:
    return _run_token(*arguments, in_place=True)["o"].unsqueeze(1)


def _decode_new(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = _run_token(*arguments, in_place=False)
    return out["o"].unsqueeze(1), out["new_state"]


for _key in ("CPU", "CUDA"):
    _library.impl("linear_decode_", _decode_in_place, _key)
    _library.impl("linear_decode", _decode_new, _key)


@torch.library.register_fake("k3dsl::linear_decode_")
def _(q, k, v, *rest):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.register_fake("k3dsl::linear_decode")
def _(q, k, v, g, beta, state, *rest):
    return torch.empty_like(v, memory_format=torch.contiguous_format), state.new_empty((q.shape[0], *state.shape[1:]))


def _run_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    state_indices: torch.Tensor | None,
    scale: float | None,
    l2norm: bool,
    v_first: bool,
    *,
    in_place: bool,
) -> dict[str, torch.Tensor]:
    B, _, HK, K = q.shape
    H, V = v.shape[2:]
    if B == 0:
        return {"o": v.new_zeros((0, H, V)), "new_state": state.new_empty((0, *state.shape[1:]))}
    if state.data_ptr() % ALIGNMENT:
        fail("state", "does not start at a multiple of 16 bytes", "allocate the pool on its own")
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    given = {n: t.squeeze(1) for n, t in tensors.items() if t is not None}
    given["state"] = state
    options: dict[str, Any] = {
        "dtype": q.dtype,
        "scale": scale,
        "v_first": v_first,
        "state": state.dtype,
        "indexed": state_indices is not None,
        "in_place": in_place,
    }
    if beta is not None:
        options |= {"beta_dtype": beta.dtype, "l2norm": l2norm}
    if g is not None:
        options["g_dtype"] = g.dtype
    if state_indices is not None:
        given["state_indices"] = state_indices
    strides, values = layout(given)
    name = op_name(g, beta)
    code = _token_code(
        Call(name, q.device, tuple(options.items()), (H, HK, K, V), False, 1, (B, 0), strides, wanted_backend(q.device),
             forced_key(DECODE[name]))
    )  # fmt: skip
    return code(given, {**values, "B": B, "slots": state.shape[0]})


# ---- functions ---------------------------------------------------------------------------------------------------------


def _sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    rates: tuple[str, ...],
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    l2norm: bool,
    normalize: bool,
    v_first: bool,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    given = {"g": g, "beta": beta}
    HV, _, K, V = check_tokens(q, k, v, {n: given[n] for n in rates}, scale)
    count = check_sequences(q, cu_seqlens, cu_seqlens_cpu)
    if initial_state is not None:
        check_state("initial_state", initial_state, q, count, (HV, K, V), v_first)
    o, state = torch.ops.k3dsl.linear_forward(
        q, k, v, g, beta, initial_state, cu_seqlens, scale, output_final_state, l2norm, normalize, v_first
    )
    return o, state if output_final_state else None


@replayed
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal linear attention over whole sequences; takes what fla's `chunk_linear_attn` takes.

    Per value head, with a state S of K by V: S <- S + k_t v_t^T; o_t = scale S^T q_t (arXiv 2006.16236). A feature map is the
    caller's.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. K and V multiples of 16 up to 256. bf16, fp16 or fp32; any
            strides, last dim contiguous.
        scale: of q; 1/sqrt(K) by default. A new value compiles anew.
        initial_state: [N, HV, K, V] (or [N, HV, V, K] with state_v_first), fp32 or bf16. The final state has its dtype.
        normalize: divides o_t by scale q_t . (sum of the keys of this call up to t) + 1e-10. Only right for features that are
            at least 0; the initial state counts in o, not in the divisor.
        cu_seqlens: [N + 1] int32 or int64, offsets of packed sequences (B = 1); it must end at T, or the rows past it are
            left undefined. Its numbers are read on the device only; cu_seqlens_cpu, a copy, lets them be checked.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state or None. Differentiable; the backward pass is a plain torch chunk
        form: right, but slow.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    return _sequences(
        q, k, v, None, None, (), scale, initial_state, output_final_state, False, normalize, state_v_first, cu_seqlens,
        cu_seqlens_cpu,
    )  # fmt: skip


@replayed
def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The delta rule over whole sequences; takes what fla's `chunk_delta_rule` takes.

    Per value head: S <- S + beta_t k_t (v_t - S^T k_t)^T; o_t = scale S^T q_t (DeltaNet, arXiv 2406.06484).

    Args:
        beta: [B, T, HV], in (0, 1), or up to 2 for negative eigenvalues; bf16, fp16 or fp32.
        use_qk_l2norm_in_kernel: normalises q and k by x rsqrt(sum x^2 + 1e-6). Without it keys must be of length 1 or less, or
            the state grows without bound.
        The rest, what comes back and what is raised: as `linear_attention`.
    """
    return _sequences(
        q, k, v, None, beta, ("beta",), scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, False,
        state_v_first, cu_seqlens, cu_seqlens_cpu,
    )  # fmt: skip


@replayed
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule over whole sequences; takes what fla's `chunk_gated_delta_rule` takes.

    Per value head: S <- exp(g_t) S, then as `delta_rule` (Gated DeltaNet, arXiv 2412.06464).

    Args:
        g: [B, T, HV], the log decay (natural log, at most 0, as negative as it likes); bf16, fp16 or fp32.
        The rest, what comes back and what is raised: as `delta_rule`.
    """
    return _sequences(
        q, k, v, g, beta, ("g", "beta"), scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, False,
        state_v_first, cu_seqlens, cu_seqlens_cpu,
    )  # fmt: skip


def _one_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    rates: tuple[str, ...],
    state: torch.Tensor,
    state_indices: torch.Tensor | None,
    scale: float | None,
    l2norm: bool,
    v_first: bool,
    in_place: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_one_token(q)
    given = {"g": g, "beta": beta}
    HV, _, K, V = check_tokens(q, k, v, {n: given[n] for n in rates}, scale)
    check_state("state", state, q, None, (HV, K, V), v_first)
    check_pool(state)
    check_slots("state_indices", state_indices, q.shape[0], "state", state.shape[0], q)
    remedy = "use torch.no_grad(), or the op for whole sequences for training"
    check_no_grad("the op for one token", q, k, v, g, beta, state, remedy=remedy)
    call: Callable[..., Any] = torch.ops.k3dsl.linear_decode_ if in_place else torch.ops.k3dsl.linear_decode
    out = call(q, k, v, g, beta, state, state_indices, scale, l2norm, v_first)
    return (out, state) if in_place else out


@replayed
def linear_attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    in_place: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of unnormalised linear attention for every request of a batch.

    Args:
        q, k: [B, 1, H, K]. v: [B, 1, HV, V]. The rest of the inputs: as `linear_attention`.
        state: a pool [S, HV, K, V] (or [S, HV, V, K] with state_v_first), fp32 or bf16.
        state_indices: [B] int32, the slot of each request; a negative one is padding: its output is 0 and no slot changes.
            None: request b has slot b.
        in_place: updates the pool; else it is left alone and new states come back (undefined for padding).

    Returns:
        o [B, 1, HV, V] in v's dtype, and the pool (in_place) or new states [B, HV, ...]. Not differentiable.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    return _one_token(q, k, v, None, None, (), state, state_indices, scale, False, state_v_first, in_place)


@replayed
def delta_rule_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    in_place: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the delta rule for every request of a batch. beta: [B, 1, HV]; the rest as `linear_attention_decode`."""
    return _one_token(
        q, k, v, None, beta, ("beta",), state, state_indices, scale, use_qk_l2norm_in_kernel, state_v_first, in_place
    )


@replayed
def gated_delta_rule_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    in_place: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the gated delta rule for every request. g, beta: [B, 1, HV]; the rest as `linear_attention_decode`."""
    return _one_token(
        q, k, v, g, beta, ("g", "beta"), state, state_indices, scale, use_qk_l2norm_in_kernel, state_v_first, in_place
    )
