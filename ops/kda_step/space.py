"""The KDA step and commit for the registry: dims, options, knobs with their constraints, rules for shapes nobody tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3dsl.backends.triton.text import pow2
from k3dsl.ir.types import bf16, f16, f32, i32
from k3dsl.ops import common
from k3dsl.ops.causal_conv1d.space import WIDTHS
from k3dsl.ops.kda.space import key_constraints
from k3dsl.ops.kda_step import judge, kernels
from k3dsl.runtime.op import Dim, Knob, Op, Option
from k3dsl.runtime.plan import Plan

MAX_TOKENS = 8
"""Most tokens of one request in a call."""
MAX_VALUE_WIDTH = 128
"""A head's norm needs the whole of its state in one program's registers."""
COPY_BLOCK = 4096
"""Elements that a program of the commit copies."""


def step(
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """One launch. dims: B requests, T tokens of each (static), H heads, K and V widths, W taps, `pool` slots."""
    io, states = options["dtype"], options["state"]
    shape = (dims["V"], dims["K"]) if options["v_first"] else (dims["K"], dims["V"])
    windows = options["conv_state"] or io
    dtypes = {
        **dict.fromkeys(("q", "k", "v", "o"), io),
        "g": options["gate_dtype"],
        "beta": options["beta_dtype"],
        "output_gate": options["output_gate_dtype"] or io,
        "conv_weight": options["weight_dtype"] or io,
        "A_log": f32,
        "dt_bias": f32 if options["dt_bias"] else None,
        "norm_weight": f32,
        "slots": i32 if options["indexed"] else None,
        "state": states,
        "conv_state": windows,
    }
    if options["kept"]:
        dtypes |= {"states": states, "windows": windows}
    fixed = {
        **options,
        "scale": dims["K"] ** -0.5 if options["scale"] is None else options["scale"],
        "approx": io != f32,
        "activation": True,
        "l2norm": True,
        "beta_sigmoid": True,
        "neg_eigval": False,
        "silu": options["gate_activation"] == "silu",
    }
    kernel = kernels.kda_step_kept if options["kept"] else kernels.kda_step
    d = {**dims, "SA": shape[0], "SB": shape[1]}
    default = {"num_warps": knobs["num_warps"], "stages": {"tokens": 1}}
    # TileLang lays small tiles out over the threads once, so that more of them cost no registers
    own = {"threads": max(128, 64 * knobs["num_warps"]), "stages": {"tokens": 1}}
    return common.one_launch("kda.step", kernel, d, knobs, fixed, dtypes, backend, schedules, strides, default, own)


def step_constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    reasons = []
    if not 1 <= dims["T"] <= MAX_TOKENS:
        reasons.append(f"T = {dims['T']} tokens, needs 1 to {MAX_TOKENS}; use kda.forward for more")
    if dims["W"] not in WIDTHS:
        reasons.append(f"W = {dims['W']} taps, supported are {', '.join(map(str, WIDTHS))}")
    reasons += key_constraints(dims)
    if dims["V"] % 16 or not dims["V"]:
        reasons.append(f"V = {dims['V']}, needs a multiple of 16: pad it with zeros")
    if dims["V"] > MAX_VALUE_WIDTH:
        reasons.append(f"V = {dims['V']}, at most {MAX_VALUE_WIDTH}: a program holds the whole state of a head")
    held = pow2(dims["V"]) * dims["K"] // (32 * knobs["num_warps"])
    if held > 128:
        reasons.append(f"a state of {dims['V']} x {dims['K']} is {held} registers a thread; take more warps")
    return reasons


def step_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """128 registers of state a thread. All of a head's state is on its way at once, and two heads share a multiprocessor;
    more warps would repeat the work on a head's channels more often, and its registers leave room for one head only."""
    return {"num_warps": max(1, min(16, pow2(dims["V"]) * pow2(dims["K"]) // 4096))}


STEP = Op(
    name="kda.step",
    doc="A KDA layer between its projections for 1 to 8 tokens of every request: conv, gate, update, gated norm in one launch.",
    dims=(
        Dim("B", 64, "requests", divisor=1),
        Dim("T", 1, "tokens of a request", static=True),
        Dim("H", 96, "heads", static=True),
        Dim("K", 128, "key width", static=True),
        Dim("V", 128, "value width", static=True),
        Dim("W", 4, "taps of the convolution", static=True),
        Dim("pool", 64, "slots of the state pools", divisor=1),
    ),
    knobs=(Knob("num_warps", (1, 2, 4, 8, 16), 4, "warps a head"),),
    options=(
        Option("dtype", (bf16, f16, f32), bf16, "of q, k, v and o"),
        Option("gate_dtype", (bf16, f16, f32), bf16, "of g"),
        Option("beta_dtype", (bf16, f16, f32), bf16, "of beta"),
        Option("output_gate_dtype", (None, bf16, f16, f32), None, "of the output gate; None: as q"),
        Option("weight_dtype", (None, bf16, f16, f32), f32, "of the convolution's weight; None: as q"),
        Option("gate", ("bounded", "softplus"), "bounded", "decay gate"),
        Option("lower_bound", (), -5.0, "of a bounded gate, nats"),
        Option("dt_bias", (True, False), True, "whether the gate has a bias"),
        Option("scale", (), None, "of q; None: 1/sqrt(K)", constant=True),
        Option("eps", (), 1e-5, "of the norm, added to the mean of squares", constant=True),
        Option("gate_activation", ("sigmoid", "silu"), "sigmoid", "of the output gate"),
        Option("state", (f32, bf16), f32, "dtype of the state"),
        Option("conv_state", (None, bf16, f16, f32), None, "dtype of the windows: None, q's, or f32"),
        Option("v_first", (True, False), False, "states are [V, K] instead of [K, V]"),
        Option("indexed", (True, False), True, "slots by index"),
        Option(
            "kept", (True, False), False, "writes what the pools would hold after each token, and leaves them alone"
        ),
    ),
    plan=step,
    launches=("kda_step",),
    inputs=judge.step_inputs,
    cases=judge.step_cases,
    call=judge.step_call,
    reference=judge.step_reference,
    mutates=("state", "conv_state"),
    limits=judge.step_limits,
    peers=judge.step_peers,
    constraints=step_constraints,
    traffic_bytes=judge.step_traffic,
    canonical=judge.canonical,
    heuristic=step_rule,
    cpu_dims={"B": 3, "H": 2, "pool": 5},
)


def commit(
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """One launch. dims: B requests, T kept tokens, E elements of a slot, `size` slots."""
    dtypes = {
        "kept": options["dtype"],
        "num_accepted": i32,
        "slots": i32 if options["indexed"] else None,
        "pool": options["dtype"],
    }
    default = {"num_warps": knobs["num_warps"]}
    return common.one_launch(
        "kda.commit", kernels.kda_commit, dims, knobs, options, dtypes, backend, schedules, strides, default
    )


COMMIT = Op(
    name="kda.commit",
    doc="Takes the state after the last accepted token of every request over into its slot.",
    dims=(
        Dim("B", 64, "requests", divisor=1),
        Dim("T", 4, "kept tokens", static=True),
        Dim("E", 96 * 128 * 128, "elements of a slot"),
        Dim("size", 64, "slots of the pool", divisor=1),
    ),
    knobs=(
        Knob("block", (1024, 2048, 4096, 8192), COPY_BLOCK, "elements a program copies"),
        Knob("num_warps", (1, 2, 4, 8), 4, "warps a program"),
    ),
    options=(
        Option("dtype", (f32, bf16, f16), f32, "of the states"),
        Option("indexed", (True, False), True, "slots by index"),
    ),
    plan=commit,
    launches=("kda_commit",),
    inputs=judge.commit_inputs,
    call=judge.commit_call,
    reference=judge.commit_reference,
    mutates=("pool",),
    limits=judge.commit_limits,
    peers=judge.commit_peers,
    traffic_bytes=judge.commit_traffic,
    heuristic=lambda options, dims: {"block": 1024 if dims["B"] * dims["E"] < 1 << 20 else COPY_BLOCK},
    prepare_dims=common.narrow,
    cpu_dims={"B": 4, "E": 4096, "size": 6},
)
