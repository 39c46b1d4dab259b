"""AttnRes on torch tensors: checks, launches, registration with torch.library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from k3dsl.ops.attnres.space import MAX_SITES, MAX_WIDTH, MERGE, PHASE1, SITE
from k3dsl.ops.common import (
    Caller,
    check_contiguous_rows,
    check_no_grad,
    check_same,
    check_tensor,
    dtype_name,
    fail,
    gradients_again,
    rows_of,
)
from k3dsl.ops.registration import torch_op
from k3dsl.runtime.dispatch import ALIGNMENT
from k3dsl.runtime.replay import replayed

_site = Caller(SITE)
_merge = Caller(MERGE)
_phase1 = Caller(PHASE1)
F32 = torch.float32

NO_GRAD = "use torch.no_grad(), or attnres with a list of rows for training"


def plain(
    bank: torch.Tensor,
    prefix: torch.Tensor,
    query: torch.Tensor,
    key_norm: torch.Tensor | None,
    eps: float,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The op in plain torch with the kernel's roundings, in fp32; for autograd to differentiate."""
    rows = torch.cat([bank, prefix[None]]).float()
    weight = query.float() if key_norm is None else query.float() * key_norm.float()
    keys = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    h = torch.einsum("nt,ntd->td", torch.softmax(keys @ weight, 0), rows).to(prefix.dtype)
    if norm_weight is None:
        return h, None
    x = h.float()
    normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)).to(h.dtype)
    return h, (normed.float() * norm_weight.float()).to(h.dtype)


def _run(
    caller: Caller,
    tensors: dict[str, torch.Tensor | None],
    dims: dict[str, Any],
    eps: float,
    norm_eps: float,
    return_h: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch of a one-site kernel: h and normed, either empty where it is not asked for."""
    prefix, query, key_norm, norm = (tensors[n] for n in ("prefix", "query", "key_norm", "norm_weight"))
    assert prefix is not None
    snapshot = tensors.get("snapshot")
    if snapshot is not None and snapshot.data_ptr() % ALIGNMENT:  # the others are copied, this one is written
        fail("snapshot", "does not start at a multiple of 16 bytes", "allocate the bank with D a multiple of 8")
    options = {
        "dtype": prefix.dtype,
        "query_dtype": None if query is None else query.dtype,
        "eps": eps,
        "key_norm": key_norm is not None,
        "key_norm_dtype": None if key_norm is None else key_norm.dtype,
        "normed": norm is not None,
        "norm_dtype": None if norm is None else norm.dtype,
        "norm_eps": norm_eps,
        "h": return_h,
        "snapshot": snapshot is not None,
    }
    if caller is _site:
        options["logits"] = tensors.get("logits") is not None
    empty = prefix.new_empty(0)
    if prefix.numel() == 0:
        out = {}
    else:
        out = caller({n: t for n, t in tensors.items() if t is not None}, dims, options)
    h = out.get("h", torch.empty_like(prefix, memory_format=torch.contiguous_format) if return_h else empty)
    normed = out.get("normed", torch.empty_like(h if return_h else prefix) if norm is not None else empty)
    return h, normed


def _weights(query: Any, key_norm: Any, norm_weight: Any) -> dict[str, torch.Tensor | None]:
    given = {"query": query, "key_norm": key_norm, "norm_weight": norm_weight}
    return {n: None if t is None else t.contiguous() for n, t in given.items()}


def _run_site(
    bank: torch.Tensor,
    prefix: torch.Tensor,
    query: torch.Tensor,
    key_norm: torch.Tensor | None,
    logits: torch.Tensor | None,
    snapshot: torch.Tensor | None,
    eps: float,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    return_h: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    (N, T, D) = bank.shape
    tensors: dict[str, torch.Tensor | None] = {"prefix": prefix, **_weights(query, key_norm, norm_weight)}
    tensors["snapshot"] = snapshot
    if N:
        tensors |= {"bank": bank, "logits": logits}
    else:  # nothing to weigh: h is the prefix
        tensors |= {"query": None, "key_norm": None}
    return _run(_site, tensors, {"T": (T,), "N": N, "D": D}, eps, norm_eps, return_h)


def _run_merge(
    m: torch.Tensor,
    l: torch.Tensor,
    o: torch.Tensor,
    prefix: torch.Tensor,
    query: torch.Tensor,
    key_norm: torch.Tensor | None,
    snapshot: torch.Tensor | None,
    eps: float,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    return_h: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    T, D = prefix.shape
    tensors: dict[str, torch.Tensor | None] = {"prefix": prefix, **_weights(query, key_norm, norm_weight)}
    tensors |= {"top": m, "total": l, "mixed": o, "snapshot": snapshot}
    return _run(_merge, tensors, {"T": (T,), "D": D}, eps, norm_eps, return_h)


# ---- registration ------------------------------------------------------------------------------------------------------


@torch_op("attnres")
def _attnres(
    bank: torch.Tensor,
    prefix: torch.Tensor,
    query: torch.Tensor,
    key_norm: torch.Tensor | None,
    eps: float,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    return_h: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _run_site(bank, prefix, query, key_norm, None, None, eps, norm_weight, norm_eps, return_h)


def _like(prefix: torch.Tensor, norm_weight: torch.Tensor | None, return_h: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shape = prefix.shape
    return prefix.new_empty(shape if return_h else (0,)), prefix.new_empty(shape if norm_weight is not None else (0,))


@_attnres.register_fake
def _(bank, prefix, query, key_norm, eps, norm_weight, norm_eps, return_h):
    return _like(prefix, norm_weight, return_h)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    bank, prefix, query, key_norm, ctx.eps, norm_weight, ctx.norm_eps, ctx.return_h = inputs
    ctx.save_for_backward(bank, prefix, query, key_norm, norm_weight)


def _backward(ctx: Any, grad_h: torch.Tensor, grad_normed: torch.Tensor) -> tuple[Any, ...]:
    """Computes the mix again in plain torch and differentiates that."""

    def again(
        bank: Any, prefix: Any, query: Any, key_norm: Any, norm_weight: Any
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        h, normed = plain(bank, prefix, query, key_norm, ctx.eps, norm_weight, ctx.norm_eps)
        pairs = [(h, grad_h)] if ctx.return_h else []
        return pairs if normed is None else [*pairs, (normed, grad_normed)]

    needed = [ctx.needs_input_grad[i] for i in (0, 1, 2, 3, 5)]
    *found, norm_weight = gradients_again(again, ctx.saved_tensors, needed)
    return (*found, None, norm_weight, None, None)


_attnres.register_autograd(_backward, setup_context=_setup_context)

# Those that write a snapshot, or that serve inference alone, are defined by schema; see ops/kda/api.py.
_library = torch.library.Library("k3dsl", "FRAGMENT")
_REST = "float eps, Tensor? norm_weight, float norm_eps, bool return_h"
_SCHEMAS = {
    "attnres_site_": "Tensor bank, Tensor prefix, Tensor query, Tensor? key_norm, Tensor? logits, Tensor(a!)? snapshot, "
    + _REST,
    "attnres_merge_": "Tensor m, Tensor l, Tensor o, Tensor prefix, Tensor query, Tensor? key_norm, "
    "Tensor(a!)? snapshot, " + _REST,
}
for _name, _schema in _SCHEMAS.items():
    _library.define(f"{_name}({_schema}) -> (Tensor, Tensor)")
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _run_site if _name == "attnres_site_" else _run_merge, _key)


@torch.library.register_fake("k3dsl::attnres_site_")
def _(bank, prefix, query, key_norm, logits, snapshot, eps, norm_weight, norm_eps, return_h):
    return _like(prefix, norm_weight, return_h)


@torch.library.register_fake("k3dsl::attnres_merge_")
def _(m, l, o, prefix, query, key_norm, snapshot, eps, norm_weight, norm_eps, return_h):
    return _like(prefix, norm_weight, return_h)


@torch.library.custom_op("k3dsl::attnres_phase1", mutates_args=())
def _attnres_phase1(
    bank: torch.Tensor, queries: torch.Tensor, eps: float, mix: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (N, T, D), S = bank.shape, queries.shape[0]
    if N * T * S == 0:
        if mix:  # no row: the softmax over nothing
            top = bank.new_full((S, T), -math.inf, dtype=F32)
            return top, torch.zeros_like(top), bank.new_zeros((S, T, D), dtype=F32)
        inverse = torch.rsqrt(bank.float().square().mean(-1) + eps)
        return bank.new_empty((S, T, N), dtype=F32), inverse, bank.new_empty(0, dtype=F32)
    options = {"dtype": bank.dtype, "query_dtype": queries.dtype, "eps": eps, "mix": mix}
    tensors = {"bank": bank, "queries": queries.contiguous()}
    out = _phase1(tensors, {"T": (T, 64, 16), "N": N, "S": S, "D": D}, options)
    if mix:
        return out["top"], out["total"], out["mixed"]
    return out["logits"], out["inv_rms"], bank.new_empty(0, dtype=F32)


@_attnres_phase1.register_fake
def _(bank, queries, eps, mix):
    (N, T, D), S = bank.shape, queries.shape[0]
    shapes = ((S, T), (S, T), (S, T, D)) if mix else ((S, T, N), (N, T), (0,))
    return tuple(bank.new_empty(shape, dtype=F32) for shape in shapes)


# ---- functions ---------------------------------------------------------------------------------------------------------


@replayed
def attnres(
    bank: torch.Tensor | Sequence[torch.Tensor],
    prefix: torch.Tensor,
    query: torch.Tensor,
    key_norm: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    snapshot: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    return_h: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Block Attention Residuals at one site: a softmax mix of earlier residual snapshots and the running partial sum.

    With rows r_0 .. r_{N-1} of the bank and r_N the prefix: l_j = sum_d w_d gamma_d r_jd rsqrt(mean r_j^2 + eps),
    h = sum_j softmax_j(l)_j r_j (Attention Residuals, arXiv 2603.15031). fp32 inside, h rounded once. One launch; each row is
    read once.

    Args:
        bank: [N, T, D], the rows that are there: `buffer[:n]` of a preallocated one, no copy. N may be 0: h is the prefix. Or a
            sequence of N tensors [T, D], which is stacked: a copy, for training. bf16, fp16 or fp32, D up to 16384.
        prefix: [T, D] (any leading dims instead of T, in the bank too), of the bank's dtype. Rows may lie apart.
        query: [D] or [1, D], of the rows' dtype or fp32. key_norm: gamma [D], alike; None if the query has it folded in
            (`attnres_fold`).
        eps, norm_eps: positive numbers. A new value compiles anew.
        norm_weight: [D]. Also computes RMSNorm(h) in Llama's form: of the rounded h, rounded again before the weight.
        snapshot: [T, D], such as `buffer[n]`; takes a copy of the prefix, after the mix. For inference.
        logits: [T, N] fp32, the bank's logits at this site from `attnres_logits`, which spares their reductions. For inference.
        return_h: False, with a norm_weight, leaves h out.

    Returns:
        h [T, D]; (h, normed) with a norm_weight; normed without return_h. Differentiable without snapshot and logits; the
        backward pass is plain torch.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("prefix", prefix)
    if isinstance(bank, torch.Tensor) or not isinstance(bank, Sequence):
        check_tensor("bank", bank)
    else:
        for i, row in enumerate(bank):
            check_tensor(f"bank[{i}]", row, (prefix.dtype,))
            if row.shape != prefix.shape:
                fail(f"bank[{i}]", f"has shape {list(row.shape)}, prefix {list(prefix.shape)}", "one row a snapshot")
        bank = torch.stack(list(bank)) if len(bank) else prefix.new_empty((0, *prefix.shape))
    if bank.shape[1:] != prefix.shape or bank.dim() != prefix.dim() + 1:
        fail(
            "bank", f"has shape {list(bank.shape)}, needs [N, ...] with {list(prefix.shape)} of prefix", "bank[:n, :T]"
        )
    check_same("bank", bank, "prefix", prefix)
    check_contiguous_rows("bank", bank)
    query = _row_vector(query)
    _check_site(prefix, query, key_norm, norm_weight, snapshot, eps, norm_eps, return_h)
    shape, N = prefix.shape, bank.shape[0]
    flat = rows_of(prefix)
    rows = bank.reshape(N, *flat.shape)
    if logits is not None:
        _check_statistics("logits", logits, prefix, (flat.shape[0], N), "[T, N]")
    if snapshot is None and logits is None:
        out = torch.ops.k3dsl.attnres(rows, flat, query, key_norm, eps, norm_weight, norm_eps, return_h)
    else:
        check_no_grad(
            "logits" if snapshot is None else "snapshot", bank, prefix, query, key_norm, norm_weight, remedy=NO_GRAD
        )
        out = torch.ops.k3dsl.attnres_site_(
            rows, flat, query, key_norm, logits, _written(snapshot), eps, norm_weight, norm_eps, return_h
        )
        _copy_where_compiled(prefix, snapshot)
    return _chosen(out, shape, norm_weight, return_h)


def _written(snapshot: torch.Tensor | None) -> torch.Tensor | None:
    """What the op writes as [T, D]; None where torch copies. torch.compile loses track of a custom op's writes into
    `buffer[n]` once it has made n a number of run time: it writes another row. Its own copy finds the row."""
    return None if snapshot is None or torch.compiler.is_compiling() else snapshot.view(-1, snapshot.shape[-1])


def _copy_where_compiled(prefix: torch.Tensor, snapshot: torch.Tensor | None) -> None:
    if snapshot is not None and torch.compiler.is_compiling():
        snapshot.copy_(prefix)


def attnres_fold(query: torch.Tensor, key_norm: torch.Tensor) -> torch.Tensor:
    """The query [..., D] times the key norm's weight [D] in fp32, for the functions that take folded queries."""
    check_tensor("query", query)
    check_tensor("key_norm", key_norm)
    if key_norm.dim() != 1 or query.shape[-1:] != key_norm.shape:
        fail(
            "key_norm",
            f"has shape {list(key_norm.shape)}, needs [D] = {list(query.shape[-1:])} of query",
            "one a channel",
        )
    return query.float() * key_norm.float()


@replayed
def attnres_phase1(
    bank: torch.Tensor, queries: torch.Tensor, *, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """AttnRes in two phases, the first: S sites against a frozen bank, read three times (norms, logits, mix), not S times.

    Args:
        bank: [N, T, D] as for `attnres`. The result is S times as large as a row and in fp32: for decoding, or for few tokens
            at a time; else see `attnres_logits`.
        queries: [S, D] with the key norm folded in (`attnres_fold`), fp32 or of the bank's dtype; S up to 256.

    Returns:
        For every site the largest logit m [S, T], the denominator l = sum_j exp(l_j - m) [S, T] and the unnormalised mix
        o = sum_j exp(l_j - m) r_j [S, T, D], all fp32; -inf, 0 and 0 without rows. `attnres_merge` takes them site by site.
        Not differentiable.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    _check_phase1(bank, queries, eps)
    return torch.ops.k3dsl.attnres_phase1(bank, queries, eps, True)


@replayed
def attnres_logits(
    bank: torch.Tensor, queries: torch.Tensor, *, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first phase for many tokens: only the logits [S, T, N] and the inverse rms [N, T] of the bank's rows, in fp32.

    Arguments and errors as `attnres_phase1`. `attnres(..., logits=logits[s])` takes them site by site. Not differentiable.
    """
    _check_phase1(bank, queries, eps)
    return torch.ops.k3dsl.attnres_phase1(bank, queries, eps, False)[:2]


@replayed
def attnres_merge(
    m: torch.Tensor,
    l: torch.Tensor,
    o: torch.Tensor,
    prefix: torch.Tensor,
    query: torch.Tensor,
    key_norm: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    snapshot: torch.Tensor | None = None,
    return_h: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """AttnRes in two phases, the second: the prefix joins what phase 1 left of the bank for this site.

    Args:
        m, l: [T] fp32, o: [T, D] fp32, this site's of `attnres_phase1`.
        prefix: [T, D]. The rest and what comes back: as `attnres`. Not differentiable.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("prefix", prefix)
    if prefix.dim() != 2:
        fail("prefix", f"has shape {list(prefix.shape)}, needs [T, D]", "prefix.view(-1, D)")
    query = _row_vector(query)
    _check_site(prefix, query, key_norm, norm_weight, snapshot, eps, norm_eps, return_h)
    T, D = prefix.shape
    _check_statistics("m", m, prefix, (T,), "[T]")
    _check_statistics("l", l, prefix, (T,), "[T]")
    _check_statistics("o", o, prefix, (T, D), "[T, D]")
    check_no_grad("attnres_merge", m, l, o, prefix, query, key_norm, norm_weight, remedy=NO_GRAD)
    out = torch.ops.k3dsl.attnres_merge_(
        m, l, o, prefix, query, key_norm, _written(snapshot), eps, norm_weight, norm_eps, return_h
    )
    _copy_where_compiled(prefix, snapshot)
    return _chosen(out, prefix.shape, norm_weight, return_h)


# ---- checks ------------------------------------------------------------------------------------------------------------


def _row_vector(query: torch.Tensor) -> torch.Tensor:
    """The query as [D]; checkpoints keep it as the weight [1, D] of a projection."""
    return query[0] if isinstance(query, torch.Tensor) and query.dim() == 2 and query.shape[0] == 1 else query


def _chosen(out: tuple[torch.Tensor, torch.Tensor], shape: torch.Size, norm_weight: Any, return_h: bool) -> Any:
    h, normed = (x if x.dim() == len(shape) or x.dim() == 1 else x.view(shape) for x in out)
    if norm_weight is None:
        return h
    return (h, normed) if return_h else normed


def _check_site(
    prefix: torch.Tensor,
    query: torch.Tensor,
    key_norm: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    snapshot: torch.Tensor | None,
    eps: float,
    norm_eps: float,
    return_h: bool,
) -> None:
    if prefix.dim() < 2 or not 1 <= prefix.shape[-1] <= MAX_WIDTH:
        fail("prefix", f"has shape {list(prefix.shape)}, needs [..., T, D] with D from 1 to {MAX_WIDTH}", "reshape it")
    check_contiguous_rows("prefix", prefix)
    for name, x in (("query", query), ("key_norm", key_norm), ("norm_weight", norm_weight)):
        if x is None and name != "query":
            continue
        check_tensor(name, x)
        if x.shape != prefix.shape[-1:]:  # type: ignore[union-attr]
            fail(name, f"has shape {list(x.shape)}, needs [D] = [{prefix.shape[-1]}]", "one number a channel")  # type: ignore[union-attr]
        _check_parameter(name, x, "prefix", prefix)  # type: ignore[arg-type]
    for name, number in (("eps", eps), ("norm_eps", norm_eps)):
        _check_positive(name, number)
    if norm_weight is None and not return_h:
        fail("return_h", "leaves nothing to return without a norm_weight", "pass norm_weight, or keep h")
    if snapshot is None:
        return
    check_tensor("snapshot", snapshot, (prefix.dtype,))
    if snapshot.shape != prefix.shape:
        fail(
            "snapshot", f"has shape {list(snapshot.shape)}, needs {list(prefix.shape)} of prefix", "pass buffer[n, :T]"
        )
    check_same("snapshot", snapshot, "prefix", prefix)
    check_contiguous_rows("snapshot", snapshot)
    if snapshot.dim() > 2 and not snapshot[..., 0].is_contiguous() and snapshot.numel():
        try:
            snapshot.view(-1, snapshot.shape[-1])
        except RuntimeError:
            fail(
                "snapshot",
                f"has strides {snapshot.stride()}, so its tokens lie in no one dim",
                "allocate [N, B * T, D]",
            )


def _check_phase1(bank: torch.Tensor, queries: torch.Tensor, eps: float) -> None:
    check_tensor("bank", bank)
    if bank.dim() != 3 or not 1 <= bank.shape[-1] <= MAX_WIDTH:
        fail("bank", f"has shape {list(bank.shape)}, needs [N, T, D] with D from 1 to {MAX_WIDTH}", "bank[:n, :T]")
    check_contiguous_rows("bank", bank)
    check_tensor("queries", queries)
    if queries.dim() != 2 or queries.shape[1] != bank.shape[2] or not 1 <= queries.shape[0] <= MAX_SITES:
        reason = f"has shape {list(queries.shape)}, needs [S, D] = [1 to {MAX_SITES}, {bank.shape[2]}]"
        fail("queries", reason, "attnres_fold(torch.stack(queries), key_norm)")
    _check_parameter("queries", queries, "bank", bank)
    _check_positive("eps", eps)
    check_no_grad("attnres_phase1", bank, queries, remedy=NO_GRAD)


def _check_parameter(name: str, x: torch.Tensor, other: str, rows: torch.Tensor) -> None:
    check_same(name, x, other, rows, dtype=False)
    if x.dtype not in (rows.dtype, F32):
        reason = f"is {dtype_name(x.dtype)}, {other} is {dtype_name(rows.dtype)}"
        fail(name, reason, f"{name}.to({other}.dtype), or {name}.float()")


def _check_positive(name: str, number: float) -> None:
    if not 0 < number < math.inf:
        fail(name, f"is {number}", "pass a positive finite number; Kimi K3 has 1e-5")


def _check_statistics(name: str, x: torch.Tensor, prefix: torch.Tensor, shape: tuple[int, ...], dims: str) -> None:
    check_tensor(name, x, (F32,))
    if x.shape != shape:
        fail(name, f"has shape {list(x.shape)}, needs {dims} = {list(shape)}", "pass one site's of phase 1")
    check_same(name, x, "prefix", prefix, dtype=False)
    check_contiguous_rows(name, x)
