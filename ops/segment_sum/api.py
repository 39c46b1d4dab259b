"""segment_sum on torch tensors: checks, launch, registration with torch.library."""

from __future__ import annotations

from typing import Any

import torch

from k3dsl.ops.common import (
    FLOATS,
    Caller,
    check_offset_values,
    check_offsets,
    check_rank,
    check_same,
    check_tensor,
    dtype_name,
    fail,
    has_data,
)
from k3dsl.ops.registration import torch_op
from k3dsl.ops.segment_sum.space import SEGMENT_SUM
from k3dsl.runtime.replay import replayed

_call = Caller(SEGMENT_SUM)


@torch_op("segment_sum")
def _segment_sum(values: torch.Tensor, cu_seqlens: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    (T, D), N = values.shape, cu_seqlens.shape[0] - 1
    if T * D == 0:
        return values.new_zeros((N, D), dtype=out_dtype)
    options = {"dtype": values.dtype, "out_dtype": out_dtype, "cu_dtype": cu_seqlens.dtype}
    return _call({"values": values, "cu_seqlens": cu_seqlens}, {"T": (T,), "N": (N,), "D": (D, 128, 16)}, options)[
        "out"
    ]


@_segment_sum.register_fake
def _(values, cu_seqlens, out_dtype):
    return values.new_empty((cu_seqlens.shape[0] - 1, values.shape[1]), dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    values, cu_seqlens, _ = inputs
    ctx.save_for_backward(cu_seqlens)
    ctx.rows, ctx.dtype = values.shape[0], values.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    # every row takes the gradient of its segment's sum
    (cu_seqlens,) = ctx.saved_tensors
    row = torch.arange(ctx.rows, device=grad.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    return grad[segment].to(ctx.dtype), None, None


_segment_sum.register_autograd(_backward, setup_context=_setup_context)


@replayed
def segment_sum(
    values: torch.Tensor, cu_seqlens: torch.Tensor, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Sums the rows of each segment, in fp32: out[n] = values[cu_seqlens[n] : cu_seqlens[n + 1]].sum(0).

    Args:
        values: [T, D], bf16, fp16 or fp32.
        cu_seqlens: [N + 1] int32 or int64, from 0, never down, to T. On a GPU its numbers are not checked.
        out_dtype: bf16, fp16 or fp32; None for the values' dtype.

    Returns:
        [N, D]; an empty segment gives 0. Differentiable; the backward pass is plain torch.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
    """
    check_tensor("values", values)
    check_rank("values", values, 2, "[T, D]", "values.reshape(T, -1)")
    check_offsets("cu_seqlens", cu_seqlens)
    check_same("cu_seqlens", cu_seqlens, "values", values, dtype=False)
    if has_data(cu_seqlens):
        check_offset_values("cu_seqlens", cu_seqlens.tolist(), "values", values.shape[0])
    out_dtype = values.dtype if out_dtype is None else out_dtype
    if out_dtype not in FLOATS:
        fail("out_dtype", f"is {dtype_name(out_dtype)}", "bfloat16, float16 or float32")
    return _segment_sum(values, cu_seqlens, out_dtype)
