"""How linear attention and the delta rules are judged and timed: inputs, cases, references, peers, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.ir.types import f32
from k3dsl.ops.kda import inputs as kda_inputs
from k3dsl.ops.kda.inputs import Case as Drawing
from k3dsl.ops.kda.judge import decode_traffic
from k3dsl.ops.linear_attention.reference import recurrence
from k3dsl.runtime.op import Case

Settings = Mapping[str, Any]
LINEAR, DELTA, GATED = "linear_attention", "delta_rule", "gated_delta_rule"
__all__ = ["decode_traffic"]

_PLAIN = Drawing("plain", gate="log-sigmoid", beta="given")
_KEYS: dict[str, tuple[str, Drawing]] = {
    "plain": ("mild", _PLAIN),
    "positive-keys": ("checkpoint", replace(_PLAIN, keys="positive")),
    "near-identical-keys": ("checkpoint", replace(_PLAIN, keys="near-identical")),
    "identical-keys": ("extreme", replace(_PLAIN, keys="identical")),
    "beta-0-1": ("extreme", replace(_PLAIN, beta="given-0-1")),
    "large-values": ("extreme", replace(_PLAIN, values="large")),
    "tiny-values": ("extreme", replace(_PLAIN, values="tiny")),
    "arange-state": ("extreme", replace(_PLAIN, state="arange")),
}
_GATES = ("none", "constant-5", "constant-3", "cut-10", "cut-50", "cut-90", "cut-10-slow", "cut-50-log-sigmoid")


def drawings(name: str) -> dict[str, tuple[str, Drawing]]:
    """The input families of an op: their group and how KDA's families draw them. The gate is that of channel 0."""
    found = dict(_KEYS)
    if name == LINEAR:
        found = {n: x for n, x in found.items() if n not in ("beta-0-1", "identical-keys")}
    if name == GATED:
        found |= {f"gate-{gate}": ("extreme", replace(_PLAIN, gate=gate)) for gate in _GATES}
    else:  # no gate: nothing fades
        found = {n: (group, replace(x, gate="none")) for n, (group, x) in found.items()}
    for title, offsets in kda_inputs.CU_SEQLENS.items():
        found[f"ragged-{title}"] = ("ragged", replace(found["plain"][1], cu_seqlens=offsets, state="fp32", H=2))
    return found


def make(name: str, drawing: Drawing, device: Any = "cpu", seed: int = 0, *, normalize: bool = False) -> dict[str, Any]:
    """Draws the keyword arguments of the op's torch function. With normalize q and k are at least 0.

    q, k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV] where the op has them, initial_state, cu_seqlens and flags.
    """
    x = kda_inputs.make(drawing, device, seed)
    names = ("q", "k", "v", "scale", "initial_state", "output_final_state", "cu_seqlens", "state_v_first")
    out = {n: x[n] for n in names}
    if name == LINEAR:
        out["normalize"] = normalize
        if normalize:
            out |= {n: out[n].abs() for n in ("q", "k")}
        return out
    out |= {"beta": x["beta"], "use_qk_l2norm_in_kernel": x["use_qk_l2norm_in_kernel"]}
    if name == GATED:
        out["g"] = x["g"][..., 0] if drawing.strided else x["g"][..., 0].contiguous()
    return out


def limits_of(name: str, drawing: Drawing) -> dict[str, float]:
    """Largest relative RMS error of a drawing: KDA's for the same keys, without its allowance for slow gates' factors."""
    o, state = kda_inputs.limits(drawing)
    if name == LINEAR:
        o = state = 1e-5 if drawing.dtype == torch.float32 else 5e-3
    return {"o": o, "final_state": state}


def forward_cases(name: str, size: str) -> list[Case]:
    """Every family, then lengths, widths, heads, dtypes, layouts and states; whole: on larger shapes."""
    found = []

    def add(title: str, group: str, drawing: Drawing, **options: Any) -> None:
        draw = partial(_make, name, drawing, options)
        found.append(Case(title, group, draw, limits_of(name, drawing)))

    width = 64 if size == "small" else 128
    for title, (group, drawing) in drawings(name).items():
        add(title, group, replace(drawing, K=width, T=drawing.T if group == "ragged" else 129))
    plain = drawings(name)["plain"][1]
    other = "shapes, states, layouts, dtypes"
    for tokens in (1, 15, 16, 63, 64, 65) if size == "small" else (1, 2, 63, 64, 65, 127, 1000):
        add(f"plain/T{tokens}", other, replace(plain, T=tokens, H=2, K=width))
    for changes in (
        {"K": 128, "V": 32},
        {"H": 2, "HV": 4, "B": 2},
        {"dtype": torch.float16},
        {"dtype": torch.float32, "T": 33},
        {"state": "bf16", "state_v_first": True, "V": 32},
        {"strided": True, "state": "fp32", "B": 2},
    ):
        add(f"plain/{'-'.join(f'{n}{v}' for n, v in changes.items())}", other, replace(plain, **changes))
    if name == LINEAR:
        add("normalized", "mild", replace(plain, T=129), normalize=True)
        add("normalized-ragged", "ragged", drawings(name)["ragged-edges"][1], normalize=True)
    return found


def _make(name: str, drawing: Drawing, options: dict[str, Any], device: Any, seed: int) -> dict[str, Any]:
    return make(name, drawing, device, seed, **options)


def forward_inputs(
    name: str, dims: Settings, options: Settings, device: torch.device | str, seed: int
) -> dict[str, Any]:
    """Keyword arguments of the op's function for its dims and options; with varlen N sequences of about equal length."""
    state = options["initial_state"]
    shape: dict[str, Any] = {"B": dims["B"], "T": dims["T"]}
    if options["varlen"]:
        shape = {"cu_seqlens": tuple(dims["T"] * n // max(1, dims["N"]) for n in range(dims["N"] + 1))}
    drawing = _drawing(dims, options, **shape)
    drawing = replace(drawing, state="none" if state is None else "fp32" if state == f32 else "bf16")
    x = _adjusted(make(name, drawing, device, seed, normalize=options.get("normalize", False)), options)
    x["output_final_state"] = options["final_state"] is not None
    if options["varlen"] and options["cu_dtype"] is not None:
        x["cu_seqlens"] = x["cu_seqlens"].to(to_torch(options["cu_dtype"]))
    return x


def _drawing(dims: Settings, options: Settings, **shape: Any) -> Drawing:
    return replace(
        _PLAIN,
        H=dims["HK"] or dims["H"],
        HV=dims["H"],
        K=dims["K"],
        V=dims["V"],
        dtype=to_torch(options["dtype"]),
        l2norm=options.get("l2norm", True),
        scale=options["scale"],
        state_v_first=options["v_first"],
        **shape,
    )


def _adjusted(x: dict[str, Any], options: Settings) -> dict[str, Any]:
    """The dtypes of gate and beta."""
    for name in ("g", "beta"):
        if name in x:
            x[name] = x[name].to(to_torch(options[f"{name}_dtype"]))
    return x


def forward_limits(options: Settings) -> dict[str, float]:
    """Largest relative RMS error of the drawn inputs by output."""
    limit = 1e-5 if options["dtype"] == f32 else 5e-3
    return {"o": limit, "final_state": limit}


def _function(name: str) -> Callable[..., Any]:
    from k3dsl.ops.linear_attention import api

    return getattr(api, name)


def forward_call(name: str, **kwargs: Any) -> dict[str, Any]:
    """The op's torch function, outputs by name."""
    o, final_state = _function(name)(**kwargs)
    return {"o": o, "final_state": final_state}


def forward_reference(**kwargs: Any) -> dict[str, Any]:
    """The fp64 recurrence on the same arguments."""
    kwargs.pop("output_final_state")
    o, final_state = recurrence(**kwargs)
    return {"o": o, "final_state": final_state}


def forward_peers(name: str) -> dict[str, Callable[..., dict[str, Any]]]:
    """fla's chunk kernel of the same op, where it can be imported."""
    try:
        if name == LINEAR:
            from fla.ops.linear_attn import chunk_linear_attn as function
        elif name == DELTA:
            from fla.ops.delta_rule import chunk_delta_rule as function
        else:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function
    except ImportError:
        return {}

    def call(**kwargs: Any) -> dict[str, Any]:
        # not every function of every release takes these, so they are passed where they say something
        if not kwargs["state_v_first"]:
            del kwargs["state_v_first"]
        if kwargs["cu_seqlens"] is None:
            del kwargs["cu_seqlens"]
        else:
            kwargs["cu_seqlens"] = kwargs["cu_seqlens"].long()
        o, final_state = function(**kwargs)
        return {"o": o, "final_state": final_state}

    return {f"fla {function.__name__}": call}


def decode_inputs(
    name: str, dims: Settings, options: Settings, device: torch.device | str, seed: int
) -> dict[str, Any]:
    """Keyword arguments of the op's one-token function; no padding."""
    x = kda_inputs.make_decode(_drawing(dims, options), dims["B"], device, seed, padding=0)
    out = {n: x[n] for n in ("q", "k", "v", "state", "state_indices", "scale", "state_v_first")}
    if name != LINEAR:
        out |= {"beta": x["beta"], "use_qk_l2norm_in_kernel": x["use_qk_l2norm_in_kernel"]}
    if name == GATED:
        out["g"] = x["g"][..., 0].contiguous()
    out = _adjusted(out, options)
    out["state"] = out["state"].to(to_torch(options["state"]))
    if not options["indexed"]:
        out |= {"state_indices": None, "state": out["state"][: dims["B"]].contiguous()}
    return {**out, "in_place": options["in_place"]}


def decode_call(name: str, **kwargs: Any) -> dict[str, Any]:
    """The op's one-token function: o, and state when in place, else new_state. Changes the state that it is given."""
    o, state = _function(f"{name}_decode")(**kwargs)
    return {"o": o, "state" if kwargs["in_place"] else "new_state": state}


def decode_reference(
    *, state: torch.Tensor, state_indices: torch.Tensor | None, in_place: bool, **kwargs: Any
) -> dict[str, Any]:
    """One step of the fp64 recurrence for each request; a request without a slot has output 0 and changes nothing."""
    batch = kwargs["q"].shape[0]
    slots = torch.arange(batch, device=state.device) if state_indices is None else state_indices.long()
    live = slots >= 0
    tokens = {n: kwargs.pop(n)[live] for n in ("q", "k", "v", "g", "beta") if n in kwargs}
    o_live, after = recurrence(**tokens, initial_state=state[slots[live]], **kwargs)
    o = o_live.new_zeros((batch, *o_live.shape[1:]))
    o[live] = o_live
    if not in_place:
        return {"o": o, "new_state": after}
    pool = state.double()
    pool[slots[live]] = after
    return {"o": o, "state": pool}


def decode_limits(options: Settings) -> dict[str, float]:
    """Largest relative RMS error of the drawn inputs by output."""
    o = 1e-5 if options["dtype"] == f32 else 5e-3
    state = 1e-5 if options["state"] == f32 else 5e-3
    return {"o": o, "state" if options["in_place"] else "new_state": state}
