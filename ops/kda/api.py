"""KDA on torch tensors: argument checks, variant selection, launches, and registration with torch.library."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

from k3dsl.backends.torch.dtypes import from_torch
from k3dsl.errors import ArgumentError
from k3dsl.ir.symbols import Sym
from k3dsl.ops.common import check_no_grad, fail, gradients_again, token_divisor
from k3dsl.ops.kda import plans
from k3dsl.ops.kda.check import check_decode, check_forward
from k3dsl.ops.kda.chunked import chunked
from k3dsl.ops.kda.space import DECODE, FORWARD
from k3dsl.ops.registration import torch_op
from k3dsl.runtime.dispatch import ALIGNMENT, Dispatcher, Problem, aligned, remembered, strides_of, wanted_backend
from k3dsl.runtime.executable import Executable
from k3dsl.runtime.op import forced_key, size_number
from k3dsl.runtime.replay import replayed

_forward = Dispatcher(plans.forward)
_decode = Dispatcher(plans.decode)


class Call(NamedTuple):
    """What forward and decode share of the things that choose the code."""

    device: torch.device
    dtype: torch.dtype
    gate_dtype: torch.dtype
    beta_dtype: torch.dtype
    H: int
    HK: int
    K: int
    V: int
    scale: float | None
    l2norm: bool
    use_gate: bool
    beta_sigmoid: bool
    neg_eigval: bool
    lower_bound: float | None
    v_first: bool
    A_log: bool
    dt_bias: bool
    strides: tuple[tuple[str, tuple[int | Sym, ...]], ...]
    backend: str
    forced: str | None

    def options(self) -> dict[str, Any]:
        return {
            "dtype": from_torch(self.dtype),
            "gate_dtype": from_torch(self.gate_dtype),
            "beta_dtype": from_torch(self.beta_dtype),
            "gate": "none" if not self.use_gate else "softplus" if self.lower_bound is None else "bounded",
            "lower_bound": self.lower_bound,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "l2norm": self.l2norm,
            "beta_sigmoid": self.beta_sigmoid,
            "neg_eigval": self.neg_eigval and self.beta_sigmoid,
            "scale": self.scale,
            "v_first": self.v_first,
        }

    def dims(self) -> dict[str, int | Sym]:
        return {"H": self.H, "HK": self.HK, "K": self.K, "V": self.V}


@remembered
def _forward_code(
    call: Call,
    safe_gate: bool,
    initial: torch.dtype | None,
    final: torch.dtype | None,
    offsets: torch.dtype | None,
    single: int,
    divisor: int,
    tokens: int,
    sequences: int,
) -> tuple[Executable, int]:
    """The compiled plan for a kind of call, and its chunk length. tokens, sequences: numbers for their size classes."""
    options = FORWARD.resolve_options(
        {
            **call.options(),
            "safe_gate": safe_gate,
            "initial_state": None if initial is None else from_torch(initial),
            "final_state": None if final is None else from_torch(final),
            "varlen": offsets is not None,
            "cu_dtype": None if offsets is None else from_torch(offsets),
        }
    )
    numbers = {"H": call.H, "HK": call.HK, "K": call.K, "V": call.V, "T": tokens, "N": sequences}
    dims = call.dims()
    if offsets is None:
        batch = 1 if single else Sym("B", min=1, max=65535)
        dims |= {"T": Sym("T", divisible_by=divisor, min=1), "B": batch, "N": batch}
    else:
        dims |= {"T": Sym("T", min=1), "B": 1, "N": Sym("N", min=1), "chunks": Sym("chunks", min=1)}
    numbers["B"] = sequences if offsets is None else 1
    code, knobs = _forward.pick(Problem(FORWARD, options, numbers, dims, dict(call.strides), call.device, call.backend))
    return code, knobs["chunk"]


@remembered
def _decode_code(call: Call, state: torch.dtype, indexed: bool, in_place: bool, batch: int) -> Executable:
    options = DECODE.resolve_options(
        {**call.options(), "state": from_torch(state), "indexed": indexed, "in_place": in_place}
    )
    numbers = {"H": call.H, "HK": call.HK, "K": call.K, "V": call.V, "B": batch}
    dims = {**call.dims(), "B": Sym("B", min=1, max=65535), "slots": Sym("slots", min=1)}
    return _decode.pick(Problem(DECODE, options, numbers, dims, dict(call.strides), call.device, call.backend))[0]


def layout(tensors: dict[str, torch.Tensor]) -> tuple[tuple[tuple[str, tuple[int | Sym, ...]], ...], dict[str, int]]:
    """Copies what generated code cannot address; returns stride facts of the rest, hashable, and stride values. For all tensors
    of a call: what is added later is not looked at."""
    tensors.update(aligned(tensors))
    strides, values = strides_of(tensors)
    return tuple(strides.items()), values


def gate_tensors(
    tensors: dict[str, torch.Tensor], A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, H: int, K: int
) -> None:
    """Adds the gate's parameters in the form the kernels take: fp32, [H] and [H, K]."""
    if A_log is not None:
        tensors["A_log"] = A_log.to(torch.float32).reshape(H).contiguous()
    if dt_bias is not None:
        tensors["dt_bias"] = dt_bias.to(torch.float32).reshape(H, K).contiguous()


@torch_op("kda_forward")
def _kda_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float | None,
    output_final_state: bool,
    l2norm: bool,
    use_gate: bool,
    beta_sigmoid: bool,
    neg_eigval: bool,
    safe_gate: bool,
    lower_bound: float | None,
    v_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    B, T, HK, K = q.shape
    H, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state_shape = (N, H, V, K) if v_first else (N, H, K, V)
    final_dtype = torch.float32 if initial_state is None else initial_state.dtype
    if B * T * H == 0 or N == 0:
        o = torch.zeros_like(v, memory_format=torch.contiguous_format)
        if not output_final_state:
            return o, q.new_empty(0)
        if initial_state is not None:
            return o, initial_state.contiguous().clone()
        return o, torch.zeros(state_shape, dtype=final_dtype, device=q.device)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if initial_state is not None:
        tensors["initial_state"] = initial_state
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = cu_seqlens.contiguous()
    gate_tensors(tensors, A_log if use_gate else None, dt_bias if use_gate else None, H, K)
    strides, values = layout(tensors)
    executable, chunk = _forward_code(
        Call(q.device, q.dtype, g.dtype, beta.dtype, H, HK, K, V, scale, l2norm, use_gate, beta_sigmoid, neg_eigval,
             lower_bound, v_first, "A_log" in tensors, "dt_bias" in tensors, strides, wanted_backend(q.device),
             forced_key(FORWARD)),
        safe_gate,
        None if initial_state is None else initial_state.dtype,
        final_dtype if output_final_state else None,
        None if cu_seqlens is None else cu_seqlens.dtype,
        1 if B == 1 else 0,
        token_divisor(T),
        size_number(T),
        size_number(N),
    )  # fmt: skip
    values["T"] = T
    if cu_seqlens is None:
        values["B"] = B
    else:
        values |= {"N": N, "chunks": T // chunk + N}  # a bound that needs no look at the lengths
    out = executable(tensors, values)
    return out["o"], out["final_state"] if output_final_state else q.new_empty(0)


@_kda_forward.register_fake
def _(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale, output_final_state, l2norm, use_gate,
    beta_sigmoid, neg_eigval, safe_gate, lower_bound, v_first,
):  # fmt: skip
    B, _, _, K = q.shape
    H, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    if not output_final_state:
        return o, q.new_empty(0)
    dtype = torch.float32 if initial_state is None else initial_state.dtype
    return o, q.new_empty((N, H, V, K) if v_first else (N, H, K, V), dtype=dtype)


_NAMES = (
    "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "scale", "output_final_state",
    "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate",
    "lower_bound", "state_v_first",
)  # fmt: skip
_DIFFERENTIABLE = 8


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[: _DIFFERENTIABLE + 1])
    ctx.rest = inputs[_DIFFERENTIABLE + 1 :]


def _backward(ctx: Any, grad_o: torch.Tensor, grad_state: torch.Tensor) -> tuple[Any, ...]:
    """Runs the plain torch chunk form again and differentiates it."""
    *saved, cu_seqlens = ctx.saved_tensors

    def again(*inputs: torch.Tensor | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        arguments: dict[str, Any] = dict(zip(_NAMES, (*inputs, cu_seqlens, *ctx.rest), strict=True))
        arguments.pop("safe_gate")
        o, state = chunked(**arguments)
        return [(o, grad_o)] if state is None or grad_state is None else [(o, grad_o), (state, grad_state)]

    found = gradients_again(again, saved, ctx.needs_input_grad[:_DIFFERENTIABLE])
    return (*found, *[None] * (len(_NAMES) - _DIFFERENTIABLE))


_kda_forward.register_autograd(_backward, setup_context=_setup_context)


@replayed
def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention over whole sequences; takes what fla's `chunk_kda` takes.

    Per value head, with a state S of K by V: S <- diag(exp(g_t)) S; S <- S + beta_t k_t (v_t - S^T k_t)^T; o_t = scale S^T q_t
    (Kimi Linear, arXiv 2510.26692, section 3).

    Args:
        q, k: [B, T, H, K], K 64 or 128. v: [B, T, HV, V], HV a multiple of H, V a multiple of 16 up to 256. bf16, fp16 or
            fp32; any strides, last dim contiguous.
        g: [B, T, HV, K]. The log decay (natural log, at most 0), or with use_gate_in_kernel the gate's raw input.
        beta: [B, T, HV]. In (0, 1), or with use_beta_sigmoid_in_kernel its logit (twice the sigmoid with allow_neg_eigval).
        scale: of q; 1/sqrt(K) by default. A new value compiles anew.
        initial_state: [N, HV, K, V] (or [N, HV, V, K] with state_v_first), fp32 or bf16. The final state has its dtype.
        use_qk_l2norm_in_kernel: normalises q and k by x rsqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: the gate is lower_bound sigmoid(exp(A_log) (g + dt_bias)) with a lower_bound (Kimi K3), else
            -exp(A_log) softplus(g + dt_bias) (Kimi Linear). A_log [HV] and dt_bias [HV K], fp32.
        safe_gate: without use_gate_in_kernel, promises g in [lower_bound, 0] (lower_bound -5 if None), which is faster.
        cu_seqlens: [N + 1] int32 or int64, offsets of packed sequences (B = 1); it must end at T, or the rows past it are
            left undefined. Its numbers are read on the device only; cu_seqlens_cpu, a copy, lets them be checked.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state or None.

    Differentiable. The backward pass is a plain torch chunk form for now: right, but slow, and it keeps the inputs only.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    if "transpose_state_layout" in kwargs:
        warnings.warn("transpose_state_layout is now state_v_first", DeprecationWarning, stacklevel=2)
        state_v_first = kwargs.pop("transpose_state_layout")
    ignored = {"disable_recompute", "use_graph", "max_num_seqs"}
    usual = {"cp_context": None, "chunk_indices": None, "return_intermediate_states": False}
    for name, value in kwargs.items():
        if name in usual and value is not usual[name]:
            fail(name, f"is {value!r}, which kda does not do", f"leave it out, or pass {usual[name]}")
        if name not in ignored | usual.keys():
            raise TypeError(f"kda() does not take {name}")
    if lower_bound is not None and not (use_gate_in_kernel or safe_gate):
        fail(
            "lower_bound",
            "bounds a gate that is not asked for",
            "set use_gate_in_kernel=True, or safe_gate for decay given",
        )
    if safe_gate and lower_bound is None and not use_gate_in_kernel:
        lower_bound = -5.0
    bounded = lower_bound if use_gate_in_kernel or safe_gate else None
    check_forward(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        state_v_first=state_v_first,
    )
    o, state = _kda_forward(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        scale,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        safe_gate,
        bounded,
        state_v_first,
    )
    return o, state if output_final_state else None


# Defined by schema: torch.library.custom_op costs some 80 us a call for an op that mutates an argument.
_library = torch.library.Library("k3dsl", "FRAGMENT")
_DECODE_REST = (
    "Tensor? state_indices, Tensor? A_log, Tensor? dt_bias, float? scale, bool l2norm, bool use_gate, bool beta_sigmoid, "
    "bool neg_eigval, float? lower_bound, bool v_first"
)
_TOKENS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"
_library.define(f"kda_decode_({_TOKENS}, Tensor(a!) state, {_DECODE_REST}) -> Tensor")
_library.define(f"kda_decode({_TOKENS}, Tensor state, {_DECODE_REST}) -> (Tensor, Tensor)")


def _decode_in_place(*arguments: Any) -> torch.Tensor:
    return _run_decode(*arguments, in_place=True)["o"]


def _decode_new(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = _run_decode(*arguments, in_place=False)
    return out["o"], out["new_state"]


for _key in ("CPU", "CUDA"):
    _library.impl("kda_decode_", _decode_in_place, _key)
    _library.impl("kda_decode", _decode_new, _key)


@torch.library.register_fake("k3dsl::kda_decode_")
def _(q, k, v, *rest):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.register_fake("k3dsl::kda_decode")
def _(q, k, v, g, beta, state, *rest):
    return torch.empty_like(v, memory_format=torch.contiguous_format), state.new_empty((q.shape[0], *state.shape[1:]))


def _run_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    scale: float | None,
    l2norm: bool,
    use_gate: bool,
    beta_sigmoid: bool,
    neg_eigval: bool,
    lower_bound: float | None,
    v_first: bool,
    *,
    in_place: bool,
) -> dict[str, torch.Tensor]:
    B, _, HK, K = q.shape
    H, V = v.shape[2:]
    if B == 0:
        empty = torch.zeros_like(v, memory_format=torch.contiguous_format)
        return {"o": empty, "new_state": state.new_empty((0, *state.shape[1:]))}
    tensors = {name: x.squeeze(1) for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))}
    if state.data_ptr() % ALIGNMENT:
        raise ArgumentError("state: does not start at a multiple of 16 bytes", fix="allocate the pool on its own")
    tensors["state"] = state
    gate_tensors(tensors, A_log if use_gate else None, dt_bias if use_gate else None, H, K)
    if state_indices is not None:
        tensors["state_indices"] = state_indices
    strides, values = layout(tensors)
    executable = _decode_code(
        Call(q.device, q.dtype, g.dtype, beta.dtype, H, HK, K, V, scale, l2norm, use_gate, beta_sigmoid, neg_eigval,
             lower_bound, v_first, "A_log" in tensors, "dt_bias" in tensors, strides, wanted_backend(q.device),
             forced_key(DECODE)),
        state.dtype,
        state_indices is not None,
        in_place,
        B,
    )  # fmt: skip
    values["B"] = B
    values["slots"] = state.shape[0]
    out = executable(tensors, values)
    return {name: x.unsqueeze(1) if name == "o" else x for name, x in out.items()}


@replayed
def kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    in_place: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of Kimi Delta Attention for every request of a batch.

    Args:
        q, k: [B, 1, H, K]. v: [B, 1, HV, V]. g: [B, 1, HV, K]. beta: [B, 1, HV]. Flags and the rest: as `kda`.
        state: a pool [S, HV, K, V] (or [S, HV, V, K] with state_v_first), fp32 or bf16.
        state_indices: [B] int32, the slot of each request; a negative one is padding: its output is 0 and no slot changes.
            None: request b has slot b.
        in_place: updates the pool; else it is left alone and new states come back (undefined for padding).

    Returns:
        o [B, 1, HV, V] in v's dtype, and the pool (in_place) or new states [B, HV, ...].

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_decode(
        q,
        k,
        v,
        g,
        beta,
        state=state,
        state_indices=state_indices,
        scale=scale,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        state_v_first=state_v_first,
    )
    check_no_grad(
        "kda_decode", q, k, v, g, beta, state, A_log, dt_bias, remedy="use torch.no_grad(), or kda for training"
    )
    call = torch.ops.k3dsl.kda_decode_ if in_place else torch.ops.k3dsl.kda_decode
    out = call(
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices,
        A_log,
        dt_bias,
        scale,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        lower_bound if use_gate_in_kernel else None,
        state_v_first,
    )
    return (out, state) if in_place else out


__all__ = ["kda", "kda_decode"]
