"""How the convolution ops are judged and timed: inputs for given dims and options, cases, references, peers, traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import prod
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.errors import ArgumentError
from k3dsl.ir.types import bf16, f16, f32
from k3dsl.ops import common
from k3dsl.ops.causal_conv1d import reference
from k3dsl.runtime.op import Case
from k3dsl.runtime.plan import Plan
from k3dsl.runtime.timing import plan_traffic

Settings = Mapping[str, Any]
LIMIT = {bf16: 3e-3, f16: 4e-4, f32: 2e-6}
"""Largest relative RMS error of y: the rounding of the result."""
STATE_LIMIT = 0.0
"""Of a state: it is a copy of inputs. A wider input in a narrower state is not an option."""


def canonical(options: Settings) -> dict[str, Any]:
    """The options with those that mean nothing beside the others set to one value."""
    o = dict(options)
    for name in ("weight_dtype", "state"):
        if name in o and o[name] is None:
            o[name] = o["dtype"]
    if "varlen" in o and not o["varlen"]:
        o["cu_dtype"] = None
    return o


class _Draw:
    """Random numbers of one seed, drawn on the CPU so that every device sees the same."""

    def __init__(self, device: Any, seed: int) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.device, dtype)

    def offsets(self, tokens: int, sequences: int, dtype: torch.dtype) -> torch.Tensor:
        """Ragged, some of them empty or of one token."""
        cuts = torch.randint(0, tokens + 1, (sequences - 1,), generator=self.generator).sort().values
        return torch.cat([torch.zeros(1), cuts, torch.full((1,), tokens)]).to(self.device, dtype)

    def slots(self, requests: int, pool: int, padding: int) -> torch.Tensor:
        """Distinct slots in no order, the last `padding` of them -1."""
        found = torch.randperm(pool, generator=self.generator)[:requests].to(torch.int32)
        found[requests - padding :] = -1
        return found.to(self.device)


def _weights(draw: _Draw, dims: Settings, options: Settings) -> dict[str, Any]:
    dtype = to_torch(options["weight_dtype"] or options["dtype"])
    weight = draw.normal(dims["P"], dims["W"], dtype=dtype, scale=dims["W"] ** -0.5)
    bias = draw.normal(dims["P"], dtype=dtype) if options["bias"] else None
    return {"weight": weight, "bias": bias, "activation": "silu" if options["activation"] else None}


def _check_state(options: Settings, name: str) -> None:
    """The torch functions take states of x's dtype or fp32 only."""
    if options[name] not in (None, options["dtype"], f32):
        raise ArgumentError(f"{name} is {options[name]} beside x of {options['dtype']}", fix="x's dtype, or f32")


def forward_inputs(
    dims: Settings, options: Settings, device: Any, seed: int, scale: float = 1.0, strided: bool = False
) -> dict[str, Any]:
    """Keyword arguments of `causal_conv1d` for the op's dims and options: normal numbers; packed sequences are ragged."""
    draw, io = _Draw(device, seed), to_torch(options["dtype"])
    _check_state(options, "initial_state")
    batch = 1 if options["varlen"] else dims["B"]
    states = dims["N"] if options["varlen"] else batch
    wide = dims["P"] * 2 if strided else dims["P"]
    given = options["initial_state"]
    return {
        "x": draw.normal(batch, dims["T"], wide, dtype=io, scale=scale)[..., wide - dims["P"] :],
        **_weights(draw, dims, options),
        "initial_state": None
        if given is None
        else draw.normal(states, dims["W"] - 1, dims["P"], dtype=to_torch(given), scale=scale),
        "output_final_state": options["final_state"] is not None,
        "cu_seqlens": draw.offsets(dims["T"], states, to_torch(options["cu_dtype"])) if options["varlen"] else None,
    }


def forward_call(**arguments: Any) -> dict[str, Any]:
    """`causal_conv1d`, outputs by name."""
    from k3dsl.ops.causal_conv1d.api import causal_conv1d  # takes its knobs from space.py, which takes this module

    y, final_state = causal_conv1d(**arguments)
    return {"y": y, "final_state": final_state}


def forward_reference(*, output_final_state: bool, **arguments: Any) -> dict[str, Any]:
    """One token at a time in fp64."""
    y, state = reference.causal_conv1d(**arguments)
    return {"y": y, "final_state": state if output_final_state else None}


def forward_limits(options: Settings) -> dict[str, float]:
    """Largest relative RMS error of the drawn inputs by output."""
    return {"y": LIMIT[options["dtype"]], "final_state": STATE_LIMIT}


def forward_traffic(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """The launch for the final state reads no more of x than it writes."""
    moved = plan_traffic(plan, dims)
    for launch in plan.launches:
        if launch.label == "final_window":
            state = launch.kernel.tensor("final_state")
            moved["final_window"] = 2 * prod(extent.evaluate(dims) for extent in state.shape) * state.dtype.bytes
    return moved


def forward_peers() -> dict[str, Callable[..., dict[str, Any]]]:
    """torch's conv1d on each sequence; fla's kernel where it can be imported."""

    def plain(*, x: Any, weight: Any, bias: Any, activation: Any, initial_state: Any, cu_seqlens: Any, **_: Any) -> Any:
        bounds = [] if cu_seqlens is None else list(pairwise(cu_seqlens.tolist()))
        parts = [x] if cu_seqlens is None else [x[:, a:b] for a, b in bounds]
        done, width = [], weight.shape[-1]
        for n, part in enumerate(parts):
            past = part.new_zeros(len(part), width - 1, part.shape[-1])
            if initial_state is not None:
                past = (initial_state if cu_seqlens is None else initial_state[n : n + 1]).to(x.dtype)
            padded = torch.cat([past, part], 1).transpose(1, 2)
            taps, offset = weight.to(x.dtype)[:, None], None if bias is None else bias.to(x.dtype)
            y = torch.nn.functional.conv1d(padded, taps, offset, groups=part.shape[-1])
            done.append((y if activation is None else torch.nn.functional.silu(y)).transpose(1, 2))
        return {"y": torch.cat(done, 1)}

    peers: dict[str, Callable[..., dict[str, Any]]] = {"torch conv1d": plain}
    try:
        from fla.modules.causal_conv1d import causal_conv1d as theirs
    except ImportError:
        return peers

    def fla(*, initial_state: Any, cu_seqlens: Any, **arguments: Any) -> dict[str, Any]:
        if initial_state is not None:  # [N, P, W], the oldest column unused
            initial_state = torch.nn.functional.pad(initial_state.transpose(1, 2), (1, 0))
        offsets = None if cu_seqlens is None else cu_seqlens.long()
        y, state = theirs(**arguments, initial_state=initial_state, cu_seqlens=offsets)
        return {"y": y} if state is None else {"y": y, "final_state": state[..., 1:].transpose(1, 2)}

    return peers | {"fla causal_conv1d": fla}


def forward_cases(size: str) -> list[Case]:
    """Tokens around a window and a program, widths, dtypes, states, packed sequences. Raises ArgumentError for another size."""
    from k3dsl.ops.causal_conv1d.space import CAUSAL_CONV1D

    common.check_suite(size)
    found: list[Case] = []
    channels = 200 if size == "small" else 12288

    def add(name: str, family: str, dims: Settings | None = None, options: Settings | None = None, **how: Any) -> None:
        sizes = CAUSAL_CONV1D.resolve_dims({"P": channels, "T": 70, **(dims or {})})
        given = dict(options or {})
        chosen = CAUSAL_CONV1D.resolve_options(
            {"final_state": given.get("initial_state") or given.get("dtype", bf16), **given}
        )
        make = lambda device, seed: forward_inputs(sizes, chosen, device, seed, **how)  # noqa: E731
        found.append(Case(name, family, make, forward_limits(chosen)))

    for tokens in (1, 2, 3, 4, 8, 31, 32, 33, 100, *(() if size == "small" else (1000, 8192))):
        add(f"T{tokens}", "tokens", {"T": tokens})
        add(f"T{tokens}/state", "tokens", {"T": tokens, "B": 2}, {"initial_state": bf16})
    for width in (2, 3, 4):
        for dtype in (bf16, f16, f32):
            add(f"W{width}/{dtype}", "widths, dtypes", {"W": width}, {"dtype": dtype, "initial_state": f32})
    for packed, n in ((70, 1), (70, 9), (20, 40), (300, 7)):
        for state in (None, f32):
            options = {"varlen": True, "initial_state": state, "final_state": state or bf16}
            add(f"packed-{n}-of-{packed}/{state or 'none'}", "packed", {"T": packed, "N": n}, options)
    add("packed/i64", "packed", {"N": 5}, {"varlen": True, "cu_dtype": "i64", "dtype": f32})
    for scale in (1e-4, 1e2, 1e4):
        add(f"scale-{scale:g}", "scales", {}, {"dtype": f32, "bias": True}, scale=scale)
    add("strided", "layouts", {"B": 3}, {"initial_state": bf16}, strided=True)
    add("no-activation", "layouts", {}, {"activation": False, "bias": True, "weight_dtype": None})
    add("no-final-state", "layouts", {"P": 7}, {"final_state": None})
    return found


# ---- a few tokens of every request -------------------------------------------------------------------------------------


def update_inputs(dims: Settings, options: Settings, device: Any, seed: int, padding: int = 0) -> dict[str, Any]:
    """Keyword arguments of `causal_conv1d_update` for the op's dims and options."""
    draw, io = _Draw(device, seed), to_torch(options["dtype"])
    _check_state(options, "state")
    pool = max(dims["pool"], dims["B"]) if options["indexed"] else dims["B"]
    return {
        "x": draw.normal(dims["B"], dims["T"], dims["P"], dtype=io),
        "conv_state": draw.normal(pool, dims["W"] - 1, dims["P"], dtype=to_torch(options["state"] or options["dtype"])),
        **_weights(draw, dims, options),
        "slots": draw.slots(dims["B"], pool, padding) if options["indexed"] else None,
    }


def update_call(**arguments: Any) -> dict[str, Any]:
    """`causal_conv1d_update`, outputs by name. Changes the state that it is given."""
    from k3dsl.ops.causal_conv1d.api import causal_conv1d_update

    return {"y": causal_conv1d_update(**arguments), "conv_state": arguments["conv_state"]}


def update_reference(**arguments: Any) -> dict[str, Any]:
    """One token at a time in fp64; slots of no request stay as they are."""
    return dict(zip(("y", "conv_state"), reference.causal_conv1d_update(**arguments), strict=True))


def update_limits(options: Settings) -> dict[str, float]:
    """Largest relative RMS error of the drawn inputs by output."""
    return {"y": LIMIT[options["dtype"]], "conv_state": STATE_LIMIT}


def update_traffic(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """Of the pool only the slots in use are read and written."""
    return plan_traffic(plan, {**dims, "pool": min(dims["pool"], dims["B"])})


def update_peers() -> dict[str, Callable[..., dict[str, Any]]]:
    """fla's update of one token where it can be imported; it takes no slots, so they are gathered first."""
    try:
        from fla.modules.causal_conv1d import causal_conv1d_update as theirs
    except ImportError:
        return {}

    def fla(*, x: Any, conv_state: Any, slots: Any, **arguments: Any) -> dict[str, Any]:
        used = conv_state if slots is None else conv_state[slots.long()]
        cache = torch.nn.functional.pad(used.transpose(1, 2), (1, 0)).contiguous()
        return {"y": torch.stack([theirs(x[:, t], cache, **arguments)[0] for t in range(x.shape[1])], 1)}

    return {"fla causal_conv1d_update": fla}


def update_cases(size: str) -> list[Case]:
    """Tokens, widths, dtypes, slots with padding. Raises ArgumentError for another size."""
    from k3dsl.ops.causal_conv1d.space import CAUSAL_CONV1D_UPDATE

    common.check_suite(size)
    found: list[Case] = []
    channels = 200 if size == "small" else 36864

    def add(name: str, family: str, dims: Settings, options: Settings, padding: int = 0) -> None:
        sizes = CAUSAL_CONV1D_UPDATE.resolve_dims({"P": channels, "B": 5, "pool": 9, **dims})
        chosen = CAUSAL_CONV1D_UPDATE.resolve_options(options)
        make = lambda device, seed: update_inputs(sizes, chosen, device, seed, padding)  # noqa: E731
        found.append(Case(name, family, make, update_limits(chosen)))

    for tokens in (1, 2, 3, 4, 8, 16):
        add(f"T{tokens}", "tokens", {"T": tokens}, {}, padding=2)
    for width in (2, 3, 4):
        for dtype in (bf16, f16, f32):
            add(f"W{width}/{dtype}", "widths, dtypes", {"W": width, "T": 2}, {"dtype": dtype, "state": f32})
    for batch in (1, 64) if size == "small" else (1, 64, 256):
        add(f"B{batch}", "batches", {"B": batch, "pool": batch + 2}, {}, padding=int(batch > 1))
    add("no-slots", "layouts", {}, {"indexed": False, "bias": True})
    add("no-activation", "layouts", {"P": 7}, {"activation": False, "weight_dtype": None})
    return found
