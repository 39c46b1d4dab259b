"""How the KDA ops are judged and timed: inputs for given dims and options, cases, references, peers, traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.errors import ArgumentError
from k3dsl.ir.types import f32
from k3dsl.ops import common
from k3dsl.ops.kda import inputs
from k3dsl.ops.kda.reference import recurrence
from k3dsl.runtime.op import Case
from k3dsl.runtime.plan import Plan
from k3dsl.runtime.timing import plan_traffic

Settings = Mapping[str, Any]
DECODE_STATE_LIMIT = 1e-5
"""Of an fp32 state after one token: all arithmetic of the step is fp32."""


def _drawn(dims: Settings, options: Settings, **shape: Any) -> inputs.Case:
    """The case that the options describe: public benchmarks' gate, random keys."""
    if options["gate"] == "bounded":
        gate = (
            "bench"
            if options["A_log"] and options["dt_bias"]
            else "bench-no-bias"
            if options["A_log"]
            else "bench-no-A"
        )
    else:
        gate = "softplus" if options["gate"] == "softplus" else "log-sigmoid"
    beta = "given" if not options["beta_sigmoid"] else "double" if options["neg_eigval"] else "random"
    return inputs.Case(
        "given",
        gate=gate,
        beta=beta,
        H=dims["HK"] or dims["H"],
        HV=dims["H"],
        K=dims["K"],
        V=dims["V"],
        dtype=to_torch(options["dtype"]),
        l2norm=options["l2norm"],
        scale=options["scale"],
        state_v_first=options["v_first"],
        **shape,
    )


def _adjusted(kwargs: dict[str, Any], options: Settings) -> dict[str, Any]:
    """What the families do not vary: dtypes of gate and beta, the lower bound, a gate without rate or bias."""
    kwargs["g"] = kwargs["g"].to(to_torch(options["gate_dtype"]))
    kwargs["beta"] = kwargs["beta"].to(to_torch(options["beta_dtype"]))
    if options["gate"] == "bounded":
        kwargs["lower_bound"] = options["lower_bound"]
    for name in ("A_log", "dt_bias"):
        if not options[name]:
            kwargs[name] = None
    if options["gate"] == "softplus" and kwargs["A_log"] is None:
        raise ArgumentError("a softplus gate needs A_log", fix="leave option A_log at true")
    return kwargs


def forward_inputs(dims: Settings, options: Settings, device: torch.device | str, seed: int) -> dict[str, Any]:
    """Keyword arguments of `kda` for the op's dims and options; with varlen, N sequences of about equal length."""
    state = options["initial_state"]
    shape: dict[str, Any] = {"B": dims["B"], "T": dims["T"]}
    if options["varlen"]:
        shape = {"cu_seqlens": tuple(dims["T"] * n // max(1, dims["N"]) for n in range(dims["N"] + 1))}
    case = _drawn(dims, options, state="none" if state is None else "fp32" if state == f32 else "bf16", **shape)
    kwargs = _adjusted(inputs.make(case, device, seed), options)
    kwargs["output_final_state"] = options["final_state"] is not None
    if options["varlen"] and options["cu_dtype"] is not None:
        kwargs["cu_seqlens"] = kwargs["cu_seqlens"].to(to_torch(options["cu_dtype"]))
    if options["gate"] == "none":
        kwargs["safe_gate"] = options["safe_gate"]
        if options["safe_gate"]:
            kwargs["g"] = kwargs["g"].clamp(min=options["lower_bound"])
            kwargs["lower_bound"] = options["lower_bound"]
    return kwargs


def forward_limits(options: Settings) -> dict[str, float]:
    """Largest relative RMS error of the drawn inputs by output."""
    limit = 1e-5 if options["dtype"] == f32 else 5e-3
    return {"o": limit, "final_state": limit}


def _family(name: str) -> str:
    """The group that a case belongs to in reports: its family, or the shape, state or layout that it varies."""
    base, _, variation = name.partition("/")
    if "fp32" not in variation.split("-"):
        for family, cases in inputs.FAMILIES.items():
            if base in {case.name for case in cases} and not (family == "mild" and base == "bench"):
                return family
    return "shapes, states, layouts, dtypes"


def _maker(case: inputs.Case) -> Callable[[Any, int], dict[str, Any]]:
    return lambda device, seed: inputs.make(case, device, seed)


def forward_cases(size: str) -> list[Case]:
    """`correctness_cases` as the judge takes them. Raises ArgumentError for another size than small and whole."""
    common.check_suite(size)
    return [
        Case(case.name, _family(case.name), _maker(case), {"o": case.limit_o, "final_state": case.limit_state})
        for case in inputs.correctness_cases(size)  # type: ignore[arg-type]
    ]


def forward_call(**kwargs: Any) -> dict[str, Any]:
    """`kda`, outputs by name."""
    from k3dsl.ops.kda.api import kda  # the torch functions take their knobs from space.py, which takes this module

    o, final_state = kda(**kwargs)
    return {"o": o, "final_state": final_state}


def forward_reference(**kwargs: Any) -> dict[str, Any]:
    """The fp64 recurrence on the same arguments."""
    kwargs.pop("safe_gate", None)
    o, final_state = recurrence(**kwargs)
    return {"o": o, "final_state": final_state}


def forward_peers() -> dict[str, Callable[..., dict[str, Any]]]:
    """fla's chunk_kda, where it can be imported."""
    try:
        from fla.ops.kda import chunk_kda
    except ImportError:
        return {}

    def call(**kwargs: Any) -> dict[str, Any]:
        if kwargs["cu_seqlens"] is not None:
            kwargs["cu_seqlens"] = kwargs["cu_seqlens"].long()
        kwargs["safe_gate"] = kwargs["lower_bound"] is not None
        o, final_state = chunk_kda(**kwargs)
        return {"o": o, "final_state": final_state}

    return {"fla chunk_kda": call}


def forward_traffic(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """The guards' second passes read their flags, and nothing else where no value was out of range."""
    moved = plan_traffic(plan, dims)
    for label, flags_of in (
        ("rescan", "out_of_range"),
        ("ends_again", "end_out_of_range"),
        ("fused_again", "out_of_range"),
    ):
        for launch in plan.launches:
            if launch.label == label:
                flags = launch.kernel.tensor(flags_of)
                moved[label] = prod(extent.evaluate(dims) for extent in flags.shape) * flags.dtype.bytes
    return moved


def decode_inputs(dims: Settings, options: Settings, device: torch.device | str, seed: int) -> dict[str, Any]:
    """Keyword arguments of `kda_decode` for the op's dims and options; no padding."""
    kwargs = _adjusted(inputs.make_decode(_drawn(dims, options), dims["B"], device, seed, padding=0), options)
    return _decode_variant(kwargs, options["state"] == f32, options["indexed"], options["in_place"])


def _decode_variant(kwargs: dict[str, Any], fp32: bool, indexed: bool, in_place: bool) -> dict[str, Any]:
    if not fp32:
        kwargs["state"] = kwargs["state"].to(torch.bfloat16)
    if not indexed:
        kwargs["state_indices"] = None
        kwargs["state"] = kwargs["state"][: kwargs["q"].shape[0]].contiguous()
    kwargs["in_place"] = in_place
    return kwargs


def decode_limits(options: Settings) -> dict[str, float]:
    """Largest relative RMS error of the drawn inputs by output."""
    o = 1e-5 if options["dtype"] == f32 else 5e-3
    state = DECODE_STATE_LIMIT if options["state"] == f32 else 5e-3
    return {"o": o, "state": state, "new_state": state}


def decode_cases(size: str) -> list[Case]:
    """One token of every family, then layouts, dtypes and batches. Raises ArgumentError for another size."""
    common.check_suite(size)
    found: list[Case] = []

    def add(
        name: str,
        family: str,
        case: inputs.Case,
        batch: int,
        fp32: bool = True,
        indexed: bool = True,
        in_place: bool = True,
    ) -> None:
        def make(device: torch.device | str, seed: int) -> dict[str, Any]:
            padding = 1 if indexed and in_place else 0
            kwargs = inputs.make_decode(case, batch, device, seed, padding=padding)
            return _decode_variant(kwargs, fp32, indexed, in_place)

        o = 1e-5 if case.dtype == torch.float32 else 5e-3
        state = DECODE_STATE_LIMIT if fp32 else 5e-3
        found.append(Case(name, family, make, {"o": o, "state" if in_place else "new_state": state}))

    heads, widths = (2, (64,)) if size == "small" else (3, (64, 128))
    for family, cases in inputs.FAMILIES.items():
        for case in cases if family != "ragged" else ():
            for width in widths:
                add(f"{case.name}/K{width}", family, replace(case, H=heads, K=width), 4)
    other = "shapes, states, layouts, dtypes"
    bench = inputs.Case("bench", H=heads, K=widths[-1])
    add("bench/HV4", other, replace(bench, H=2, HV=4), 3)
    add("bench/V32", other, replace(bench, V=32), 3)
    for v_first in (False, True):
        layout = replace(bench, state_v_first=v_first)
        order = "v-first" if v_first else "k-first"
        for fp32 in (True, False):
            for in_place in (True, False):
                for indexed in (True, False):
                    words = [
                        order,
                        "fp32" if fp32 else "bf16",
                        *["indexed"] * indexed,
                        "in-place" if in_place else "new",
                    ]
                    add(f"bench/{'-'.join(words)}", other, layout, 3, fp32, indexed, in_place)
    for dtype, name in ((torch.float16, "fp16"), (torch.float32, "fp32")):
        add(f"bench/{name}-inputs", other, replace(bench, dtype=dtype), 3)
    add("bench/strided", other, replace(bench, strided=True), 3)
    for batch in (1, 2) if size == "small" else (1, 2, 63, 64):
        add(f"bench/B{batch}", other, bench, batch)
    if size == "whole":
        add("bench/B64-H96", other, replace(bench, H=96), 64)
    return found


def decode_call(**kwargs: Any) -> dict[str, Any]:
    """`kda_decode`, outputs by name: state when in place, else new_state. Changes the state that it is given."""
    from k3dsl.ops.kda.api import kda_decode

    o, state = kda_decode(**kwargs)
    return {"o": o, "state" if kwargs["in_place"] else "new_state": state}


def decode_reference(*, state: torch.Tensor, state_indices: Any, in_place: bool, **kwargs: Any) -> dict[str, Any]:
    """One step of the fp64 recurrence for each request; slots of no request stay as they are."""
    batch = kwargs["q"].shape[0]
    slots = torch.arange(batch, device=state.device) if state_indices is None else state_indices.long()
    live = slots >= 0
    tokens = {n: kwargs.pop(n)[live] for n in ("q", "k", "v", "g", "beta")}
    o_live, after = recurrence(**tokens, initial_state=state[slots[live]], output_final_state=True, **kwargs)
    assert after is not None
    o = o_live.new_zeros((batch, *o_live.shape[1:]))
    o[live] = o_live
    if not in_place:
        return {"o": o, "new_state": after}
    pool = state.to(after.dtype)
    pool[slots[live]] = after
    return {"o": o, "state": pool}


def decode_peers() -> dict[str, Callable[..., dict[str, Any]]]:
    """fla's fused_recurrent_kda where it can be imported: in place through its inner function, as serving engines call it."""
    try:
        from fla.ops.kda import fused_recurrent_kda
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    except ImportError:
        return {}

    def new(*, state: torch.Tensor, state_indices: Any, in_place: bool, **kwargs: Any) -> dict[str, Any]:
        states = state if state_indices is None else state[state_indices.long()]
        o, after = fused_recurrent_kda(**kwargs, initial_state=states, output_final_state=True)
        return {"o": o} if in_place else {"o": o, "new_state": after}

    def in_place(*, state: torch.Tensor, state_indices: Any, in_place: bool, **kwargs: Any) -> dict[str, Any]:
        if state_indices is None:
            state_indices = torch.arange(state.shape[0], dtype=torch.int32, device=state.device)
        o, after = fused_recurrent_kda_fwd(
            **kwargs, initial_state=state, inplace_final_state=True, ssm_state_indices=state_indices
        )
        return {"o": o, "state": after}

    return {"fla fused_recurrent_kda, in place": in_place, "fla fused_recurrent_kda, new state": new}


def decode_traffic(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """Of the pool only the slots in use are read and written."""
    return plan_traffic(plan, {**dims, "slots": min(dims["slots"], dims["B"])})
