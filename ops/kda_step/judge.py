"""How the KDA step and commit are judged and timed: inputs for given dims and options, cases, references, peers, traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.errors import ArgumentError
from k3dsl.ir.types import bf16, f32
from k3dsl.ops import common
from k3dsl.ops.kda import inputs
from k3dsl.ops.kda_step import reference
from k3dsl.runtime.op import Case
from k3dsl.runtime.plan import Plan
from k3dsl.runtime.timing import plan_traffic

Settings = Mapping[str, Any]


def canonical(options: Settings) -> dict[str, Any]:
    """The options with those that mean nothing beside the others set to one value."""
    o = dict(options)
    for name in ("output_gate_dtype", "weight_dtype", "conv_state"):
        o[name] = o[name] or o["dtype"]
    if o["gate"] != "bounded":
        o["lower_bound"] = None
    return o


def draw(
    case: inputs.Case, batch: int, tokens: int, width: int = 4, device: Any = "cpu", seed: int = 0
) -> dict[str, Any]:
    """The case's raw inputs as one [B, Tq, C], with a convolution, an output gate and windows: arguments of `kda_step`.

    The pools have three slots more than there are requests, in no order; no request is padding.
    """
    size = batch + 3
    one = replace(case, B=size, T=tokens, cu_seqlens=None, state="fp32", V=case.V or case.K, HV=case.H)
    raw = inputs.make(one, device, seed)
    if not raw["use_gate_in_kernel"] or not raw["use_beta_sigmoid_in_kernel"]:
        raise ArgumentError(f"case {case.name} has no raw gate or no raw beta", fix="take a bounded or softplus family")
    numbers = inputs.Draw(seed + 1)
    (_, _, H, K), V = raw["q"].shape, raw["v"].shape[-1]
    channels = H * (2 * K + V)
    # drawn slot by slot, so that the pools and the tokens are those of the case
    packed = torch.cat([raw[n][:batch].reshape(batch, tokens, -1) for n in ("q", "k", "v")], -1)
    if case.strided:  # a slice of a wider projection
        packed = torch.cat([packed, torch.full_like(packed[..., :16], torch.nan)], -1)[..., :channels]
    return {
        "qkv": packed,
        "g": raw["g"][:batch],
        "beta": raw["beta"][:batch],
        "output_gate": numbers.normal((batch, tokens, H, V), 2.0).to(device, raw["q"].dtype),
        "conv_weight": numbers.normal((channels, width), width**-0.5).to(device),
        "A_log": torch.zeros(H, device=device) if raw["A_log"] is None else raw["A_log"],
        "norm_weight": numbers.normal((V,), 0.1, 1.0).to(device),
        "state": raw["initial_state"],
        "conv_state": numbers.normal((size, width - 1, channels)).to(device, raw["q"].dtype),
        "slots": torch.randperm(size, generator=numbers.generator)[:batch].to(device, torch.int32),
        "dt_bias": raw["dt_bias"],
        "lower_bound": raw["lower_bound"],
        "scale": raw["scale"],
        "state_v_first": case.state_v_first,
    }


def step_inputs(dims: Settings, options: Settings, device: Any, seed: int) -> dict[str, Any]:
    """Keyword arguments of `kda_step` for the op's dims and options; no padding."""
    bounded = options["gate"] == "bounded"
    gate = ("bench" if options["dt_bias"] else "bench-no-bias") if bounded else "softplus"
    case = inputs.Case(
        "given",
        gate=gate,
        H=dims["H"],
        K=dims["K"],
        V=dims["V"],
        dtype=to_torch(options["dtype"]),
        scale=options["scale"],
        state_v_first=options["v_first"],
    )
    kwargs = draw(case, dims["B"], dims["T"], dims["W"], device, seed)
    if not options["dt_bias"]:
        kwargs["dt_bias"] = None
    if bounded:
        kwargs["lower_bound"] = options["lower_bound"]
    casts = {"g": "gate_dtype", "beta": "beta_dtype", "output_gate": "output_gate_dtype", "conv_weight": "weight_dtype"}
    for name, option in {**casts, "state": "state", "conv_state": "conv_state"}.items():
        kwargs[name] = kwargs[name].to(to_torch(options[option] or options["dtype"]))
    kwargs |= {"norm_eps": options["eps"], "gate_activation": options["gate_activation"]}
    size = max(dims["pool"], dims["B"]) if options["indexed"] else dims["B"]
    for name in ("state", "conv_state"):
        drawn = kwargs[name]
        kwargs[name] = drawn[torch.arange(size, device=drawn.device) % len(drawn)].contiguous()
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[: dims["B"]]
    kwargs["slots"] = order.to(device, torch.int32) if options["indexed"] else None
    return {**kwargs, "output_states": options["kept"]}


def step_call(**arguments: Any) -> dict[str, Any]:
    """`kda_step`, outputs by name: the pools, or what was kept. Changes the pools that it is given."""
    from k3dsl.ops.kda_step.api import kda_step  # takes its knobs from space.py, which takes this module

    if arguments["output_states"]:
        return dict(zip(("o", "states", "windows"), kda_step(**arguments), strict=True))
    o = kda_step(**arguments)
    return {"o": o, "state": arguments["state"], "conv_state": arguments["conv_state"]}


def step_reference(*, output_states: bool, **arguments: Any) -> dict[str, Any]:
    """Token by token in fp64; slots of no request stay as they are."""
    found = reference.kda_step(**arguments)._asdict()
    return {n: found[n] for n in (("o", "states", "windows") if output_states else ("o", "state", "conv_state"))}


def step_limits(options: Settings) -> dict[str, float]:
    """Largest relative RMS error of the drawn inputs by output: roundings of o and of a bf16 state; windows are copies."""
    state = 1e-5 if options["state"] == f32 else 5e-3
    o = max(1e-5 if options["dtype"] == f32 else 4e-3, state)
    return {"o": o, "state": state, "states": state, "conv_state": 0.0, "windows": 0.0}


def step_traffic(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """Of the pools only the slots in use are read and written."""
    return plan_traffic(plan, {**dims, "pool": min(dims["pool"], dims["B"])})


def step_peers() -> dict[str, Callable[..., dict[str, Any]]]:
    """This library's own three ops one after the other, which is what one launch has to beat."""

    def chain(*, output_states: bool, **x: Any) -> dict[str, Any]:
        from k3dsl.ops.causal_conv1d.api import causal_conv1d_update
        from k3dsl.ops.gated_rmsnorm.api import gated_rmsnorm
        from k3dsl.ops.kda.api import kda_decode

        (_, T, H, K), V = x["g"].shape, x["output_gate"].shape[-1]
        outputs = []
        y = causal_conv1d_update(x["qkv"], x["conv_state"], x["conv_weight"], x["slots"])
        q, k, v = (part.unflatten(-1, (H, -1)) for part in y.split([H * K, H * K, H * V], -1))
        for t in range(T):
            now = slice(t, t + 1)
            o, _ = kda_decode(
                q[:, now],
                k[:, now],
                v[:, now],
                x["g"][:, now],
                x["beta"][:, now],
                x["state"],
                x["slots"],
                scale=x["scale"],
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                lower_bound=x["lower_bound"],
                state_v_first=x["state_v_first"],
                A_log=x["A_log"],
                dt_bias=x["dt_bias"],
            )
            outputs.append(o)
        gate, activation = x["output_gate"], x.get("gate_activation", "sigmoid")
        y = gated_rmsnorm(torch.cat(outputs, 1), gate, x["norm_weight"], x.get("norm_eps", 1e-5), activation)
        return {"o": y} if output_states else {"o": y, "state": x["state"]}

    return {"k3dsl, three ops": chain}


def step_cases(size: str) -> list[Case]:
    """Every family with a raw gate, tokens, layouts, dtypes, padding, kept states. Raises ArgumentError for another size."""
    common.check_suite(size)
    found: list[Case] = []
    heads, widths = (2, (64,)) if size == "small" else (3, (64, 128))

    def add(
        name: str,
        family: str,
        case: inputs.Case,
        batch: int = 3,
        tokens: int = 1,
        state: Any = f32,
        kept: bool = False,
        padding: int = 0,
        **changes: Any,
    ) -> None:
        def make(device: Any, seed: int) -> dict[str, Any]:
            kwargs = draw(case, batch, tokens, changes.get("width", 4), device, seed)
            kwargs["state"] = kwargs["state"].to(to_torch(state))
            kwargs["slots"][batch - padding :] = -1
            kwargs |= {n: x for n, x in changes.items() if n != "width"}
            return {**kwargs, "output_states": kept}

        full = case.dtype == torch.float32
        limits = step_limits({"state": state, "dtype": f32 if full else bf16})
        if kept and padding:
            raise ArgumentError("what is kept of padding is undefined", fix="judge one of them at a time")
        found.append(Case(name, family, make, limits))

    raw = [
        (family, case)
        for family, cases in inputs.FAMILIES.items()
        for case in (cases if family != "ragged" else ())
        if inputs.GATES[case.gate].mode != "activated" and inputs.BETAS[case.beta].logits and case.beta != "double"
    ]
    for family, case in raw:
        for width in widths:
            add(f"{case.name}/K{width}", family, replace(case, H=heads, K=width), tokens=2)
    other = "shapes, states, layouts, dtypes"
    bench = inputs.Case("bench", H=heads, K=widths[-1])
    for tokens in (1, 2, 3, 4, 8):
        add(f"bench/T{tokens}", other, bench, tokens=tokens, padding=1)
        add(f"bench/T{tokens}-kept", other, bench, tokens=tokens, kept=True)
    for v_first in (False, True):
        for state in (f32, bf16):
            layout = replace(bench, state_v_first=v_first)
            order = "v-first" if v_first else "k-first"
            add(f"bench/{order}-{state}", other, layout, tokens=2, state=state)
            add(f"bench/{order}-{state}-kept", other, layout, tokens=2, state=state, kept=True)
    for dtype, name in ((torch.float16, "fp16"), (torch.float32, "fp32")):
        add(f"bench/{name}-inputs", other, replace(bench, dtype=dtype), tokens=2)
    for width in (2, 3):
        add(f"bench/W{width}", other, bench, tokens=2, width=width)
    add("bench/V32", other, replace(bench, V=32), tokens=2)
    add("bench/strided", other, replace(bench, strided=True), tokens=2)
    add("bench/silu", other, bench, gate_activation="silu", norm_eps=1e-6)
    for batch in (1, 2) if size == "small" else (1, 2, 63):
        add(f"bench/B{batch}", other, bench, batch=batch)
    if size == "whole":
        add("bench/B64-H96", other, replace(bench, H=96), batch=64)
    return found


def commit_inputs(dims: Settings, options: Settings, device: Any, seed: int) -> dict[str, Any]:
    """Keyword arguments of `call`: every count from 0 to T, one request of padding where slots are indexed."""
    generator = torch.Generator().manual_seed(seed)
    B, T, E, dtype = dims["B"], dims["T"], dims["E"], to_torch(options["dtype"])
    size = max(dims["size"], B) if options["indexed"] else B
    slots = torch.randperm(size, generator=generator)[:B].to(torch.int32)
    if B > 1:
        slots[-1] = -1
    return {
        "pool": torch.randn(size, E, generator=generator).to(device, dtype),
        "kept": torch.randn(B, T, E, generator=generator).to(device, dtype),
        "num_accepted": (torch.arange(B) % (T + 1)).to(device, torch.int32),
        "slots": slots.to(device) if options["indexed"] else None,
    }


def commit_call(*, pool: torch.Tensor, **arguments: Any) -> dict[str, Any]:
    """The launch on one pool. Changes the pool that it is given."""
    from k3dsl.ops.kda_step.api import commit_pool

    commit_pool(pool, **arguments)
    return {"pool": pool}


def commit_reference(**arguments: Any) -> dict[str, Any]:
    """A copy, request by request."""
    return {"pool": reference.kda_commit(**arguments)}


def commit_limits(options: Settings) -> dict[str, float]:
    """A copy has no error."""
    return {"pool": 0.0}


def commit_peers() -> dict[str, Callable[..., dict[str, Any]]]:
    """torch's gather and where over the requests' slots, without writing them back: a lower bound of what torch needs."""

    def plain(*, pool: Any, kept: Any, num_accepted: Any, slots: Any) -> dict[str, Any]:
        index = (num_accepted.long() - 1).clamp(min=0)
        chosen = kept[torch.arange(len(kept), device=kept.device), index]
        used = pool if slots is None else pool[slots.clamp(min=0).long()]
        torch.where((num_accepted > 0)[:, None], chosen, used)
        return {}

    return {"torch gather": plain}


def commit_traffic(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """One kept state a request is read and one slot is written."""
    kept = plan.launches[0].kernel.tensor("kept")
    return {"kda_commit": 2 * prod(e.evaluate(dims) for e in (kept.shape[0], kept.shape[2])) * kept.dtype.bytes}
