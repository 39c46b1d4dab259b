"""Runs small kernels on the torch backend: whole kernels, or one function of tiles on batches of arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from k3dsl.backends.torch import evaluate, from_torch, to_torch
from k3dsl.language import In, Kernel, Out, Tile, f64, kernel, program_id


def run(
    k: Kernel,
    tensors: Mapping[str, torch.Tensor],
    dims: Mapping[str, Any] | None = None,
    knobs: Mapping[str, Any] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    scalars: Mapping[str, float] | None = None,
    **options: Any,
) -> None:
    """Traces a kernel for the tensors' dtypes and evaluates it. `sizes`: values of runtime dims."""
    ir = k.trace(dims or {}, knobs, {name: from_torch(t.dtype) for name, t in tensors.items()})
    evaluate(ir, tensors, sizes, scalars, **options)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output buffer in which what nobody writes shows."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 77, dtype=dtype)


def apply(f: Callable[..., Any], *inputs: torch.Tensor, **options: Any) -> Any:
    """f, a function of tiles, applied by one program to each row of the inputs' first axis; returns what it returns.

    The outputs are [programs, *tile shape] tensors, one or a tuple as `f` returns. With compute_dtype=float64, floats come
    out in fp64, before they are rounded.
    """
    programs, wide = inputs[0].shape[0], options.get("compute_dtype") == torch.float64
    found: list[tuple[tuple[int, ...], torch.dtype]] = []

    def build(outputs: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Kernel:
        def body(d: Any, c: Any, **tensors: Any) -> None:
            out = f(*(tensors[f"x{k}"][program_id(0)] for k in range(len(inputs))))
            tiles: tuple[Tile, ...] = out if isinstance(out, tuple) else (out,)
            tiles = tuple(t.to(f64) if wide and t.dtype.is_float else t for t in tiles)
            found[:] = [(t.shape, to_torch(t.dtype)) for t in tiles]
            for k in range(len(outputs)):
                tensors[f"y{k}"][program_id(0)] = tiles[k]

        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("d", "c")]
        for k, x in enumerate(inputs):
            parameters.append(_parameter(f"x{k}", In(_text(x.shape), from_torch(x.dtype))))
        for k, (shape, dtype) in enumerate(outputs):
            parameters.append(_parameter(f"y{k}", Out(_text((programs, *shape)), from_torch(dtype))))
        body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return kernel(grid=lambda d, c: (programs,), name="applied")(body)

    build([]).trace({})  # only to learn the types of the results
    tensors = {f"x{k}": x for k, x in enumerate(inputs)}
    outputs = {
        f"y{k}": poisoned(programs, *shape, dtype=dtype).to(inputs[0].device) for k, (shape, dtype) in enumerate(found)
    }
    evaluate(build(list(found)).trace({}), {**tensors, **outputs}, **options)
    results = tuple(outputs.values())
    return results[0] if len(results) == 1 else results


def _parameter(name: str, declaration: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=declaration)


def _text(shape: Sequence[int]) -> str:
    return " ".join(map(str, shape))
