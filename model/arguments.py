"""Checks of what a user hands to the model layer: numbers, token ids, rows of a cache, and the cache itself."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from k3dsl.ops.common import dtype_name, fail

if TYPE_CHECKING:
    from k3dsl.model.cache import Cache

INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes of networks; fp64 runs on plain torch alone."""


def integer(name: str, x: object, least: int, what: str) -> int:
    """x as an int of at least `least`; what: the remedy. Numbers of numpy and of torch tensors count. Raises ArgumentError."""
    try:
        number = None if isinstance(x, bool) else operator.index(x)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or number < least:
        fail(name, f"is {x!r}", what)
    return number


def number(name: str, x: object, what: str) -> float:
    """x as a float; what: the remedy. Raises ArgumentError for what is no number."""
    if isinstance(x, bool) or not isinstance(x, (int, float)) or x != x:
        fail(name, f"is {x!r}", what)
    return float(x)


def float_dtype(name: str, x: object) -> torch.dtype:
    """x, a dtype or its name, as a dtype that networks have. Raises ArgumentError."""
    found = getattr(torch, x.removeprefix("torch."), None) if isinstance(x, str) else x
    if found not in FLOATS:
        shown = dtype_name(found) if isinstance(found, torch.dtype) else repr(x)
        fail(name, f"is {shown}", "pass torch.bfloat16, torch.float16 or torch.float32")
    assert isinstance(found, torch.dtype)
    return found


def integers(name: str, x: object, what: str) -> list[int]:
    """Numbers, one or several, of a sequence or a tensor of integers, as a list; what: the remedy. Raises ArgumentError."""
    if isinstance(x, torch.Tensor):
        if x.dtype not in INTEGERS or x.dim() > 1:
            fail(name, f"is {dtype_name(x.dtype)} of shape {list(x.shape)}", what)
        return [int(n) for n in x.reshape(-1).tolist()]
    if isinstance(x, SupportsIndex):
        return [integer(name, x, -(2**63), what)]
    if isinstance(x, (str, bytes)) or not isinstance(x, (Sequence, Set)):
        fail(name, f"is {x!r}", what)
    return [integer(name, n, -(2**63), what) for n in x]


def check_vocabulary(name: str, ids: torch.Tensor, most: int, what: str, ignored: int | None = None) -> None:
    """Raises ArgumentError for a number below 0 or from `most` on, but for `ignored`. On the CPU alone: a GPU would have to be
    waited for."""
    if ids.device.type != "cpu" or ids.numel() == 0 or torch.compiler.is_compiling():
        return
    wrong = (ids < 0) | (ids >= most)
    if ignored is not None:
        wrong &= ids != ignored
    if bool(wrong.any()):
        found = int(ids[wrong][0])
        fail(name, f"has {found}, and the vocabulary is 0 to {most - 1}", what)


def check_shape(name: str, x: object, shape: Sequence[int | None], what: str) -> torch.Tensor:
    """x. Raises ArgumentError unless it is a tensor of that shape, of which None fits any size."""
    if not isinstance(x, torch.Tensor):
        fail(name, f"is a {type(x).__name__}", what)
    if x.dim() != len(shape) or any(n not in (None, m) for n, m in zip(shape, x.shape, strict=True)):
        fail(name, f"has shape {list(x.shape)}", what)
    return x


def check_mask(mask: object, batch: int, width: int) -> None:
    """Raises ArgumentError unless it is a mask [batch, at least width]."""
    what = f"pass [B, T] with B = {batch} and at least T = {width} columns, 1 for tokens and 0 for padding"
    mask = check_shape("attention_mask", mask, (batch, None), what)
    if mask.shape[1] < width:
        fail("attention_mask", f"has shape {list(mask.shape)}", what)


def check_past(past: object, model: Any) -> None:
    """Raises ArgumentError unless it is a cache for this network."""
    from k3dsl.model.cache import Cache

    own = "pass what model.new_cache(rows) makes"
    if not isinstance(past, Cache):
        fail("past", f"is a {type(past).__name__}", own)
    if past.config is not model.config and past.config != model.config:
        fail("past", "is of another network: the configs differ", own)
    if past.dtype != model.dtype:
        fail("past", f"holds {dtype_name(past.dtype)}, the network {dtype_name(model.dtype)}", own)
    if past.device != model.device:
        fail("past", f"is on {past.device}, the network on {model.device}", own)
    if past.lengths.is_inference() and not torch.is_inference_mode_enabled():
        fail(
            "past", "was made or filled under torch.inference_mode()", "call the network under it too, or under no_grad"
        )


def check_rows(past: Cache, rows: object, number: int, *, padding: bool) -> list[int] | None:
    """The rows of a call as a list. padding: whether -1 may stand for a token that is none. Raises ArgumentError."""
    if rows is None:
        if number != past.rows:
            fail("past", f"holds {past.rows} sequences, input_ids {number}", "name the cache's rows: rows=[...]")
        return None
    known = integers("rows", rows, "pass the cache's row of each sequence, as integers")
    if len(known) != number:
        fail("rows", f"names {len(known)} rows for {number} sequences", "name one row of the cache a sequence")
    if not padding and any(row < 0 for row in known):
        fail("rows", f"is {known}", "-1, for padding, is for calls of one token a sequence; leave the sequence out")
    past.check_rows([row for row in known if row >= 0])
    return known


def check_no_autocast(device: torch.device) -> None:
    """Raises ArgumentError under torch.autocast, which would change the dtype of some of the ops' inputs and not of others."""
    if torch.is_autocast_enabled(device.type):
        fail(
            "torch.autocast",
            f"is on for {device.type}, and the network keeps its own dtypes",
            "leave it out, and cast the network: model.to(torch.bfloat16)",
        )
