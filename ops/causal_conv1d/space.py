"""The convolution ops for the registry: dims, options, knobs with their constraints, and rules for shapes nobody tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3dsl.ir.types import bf16, f16, f32, i32, i64
from k3dsl.ops import common
from k3dsl.ops.causal_conv1d import judge, kernels
from k3dsl.runtime.op import Dim, Knob, Op, Option
from k3dsl.runtime.plan import Plan, buffers_of

WIDTHS = (2, 3, 4)
MAX_TOKENS = 16
"""Most tokens of one request in a call of the update."""
ENOUGH = 264
"""Programs that keep a GPU of 132 multiprocessors busy."""


def forward_dims(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's dims from the op's: one row of packed sequences, or as many sequences as rows."""
    return {**common.narrow(given, options), **({"B": 1} if options["varlen"] else {"N": given["B"]})}


def forward(
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """The convolution, before it for packed sequences a small launch that finds each token's, and with a final state one for
    that. dims: B, T, P channels, W taps, N states."""
    dims = forward_dims(dims, options)
    spec = common.spec_of(strides)
    io, given, packed = options["dtype"], options["initial_state"], options["varlen"]
    c = {**knobs, "activation": options["activation"], "approx": io != f32}
    states: dict[str, Any] = {
        "x": spec("x", io),
        "initial_state": None if given is None else spec("initial_state", given),
        "cu_seqlens": options["cu_dtype"] if packed else None,
    }
    weights = {
        "weight": spec("weight", options["weight_dtype"] or io),
        "bias": spec("bias", options["weight_dtype"] or io) if options["bias"] else None,
        "sequence": i32 if packed else None,
        "y": io,
    }
    convolve = common.traced(kernels.causal_conv1d, dims, c, {**states, **weights})
    default = {"num_warps": knobs["num_warps"], "stages": {"tokens": 1}}
    launches = [common.launch_of("causal_conv1d", convolve, backend, schedules, default)]
    if packed:
        find = common.traced(kernels.sequences, dims, c, {"cu_seqlens": options["cu_dtype"], "sequence": i32})
        launches.insert(0, common.launch_of("sequences", find, backend, schedules, {"num_warps": 4}))
    if options["final_state"] is not None:
        last = common.traced(kernels.final_window, dims, c, {**states, "final_state": options["final_state"]})
        launches.append(common.launch_of("final_window", last, backend, schedules, default))
    buffers = buffers_of([launch.kernel for launch in launches], scratch=("sequence",))
    return Plan("causal_conv1d", dims, buffers, tuple(launches), knobs, options)


def _registers(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any], rows: int) -> list[str]:
    """Why a thread cannot hold the inputs of so many tokens."""
    held = rows * knobs["block_p"] * options["dtype"].bytes // (128 * knobs["num_warps"])
    if held <= 160:
        return []
    return [f"{rows} tokens of {knobs['block_p']} channels are {held} registers a thread; take more warps"]


def forward_constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    return [*_width(dims), *_registers(dims, knobs, options, knobs["rows"] + dims["W"])]


def _width(dims: Mapping[str, Any]) -> list[str]:
    return [] if dims["W"] in WIDTHS else [f"W = {dims['W']} taps, supported are 2, 3 and 4"]


def _block(channels: int, most: int, nbytes: int) -> dict[str, Any]:
    """The largest block of channels that divides them (or one that covers few), and 16 bytes of a token a thread."""
    block = most
    while block > 128 and (channels % block if channels > 128 else channels < block):
        block //= 2
    return {"block_p": block, "num_warps": max(1, block * nbytes // 512)}


def forward_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Long runs of tokens, so that little is read twice, unless that would leave multiprocessors idle."""
    most, steps, nbytes = 1024, 4, options["dtype"].bytes
    while True:
        chosen = {"steps": steps, **_block(dims["P"], most, nbytes)}
        chosen["num_warps"] = min(8, 2 * chosen["num_warps"])  # several rows at a time keep twice the threads busy
        programs = dims["B"] * -(-dims["T"] // (8 * steps)) * -(-dims["P"] // chosen["block_p"])
        if programs >= ENOUGH or (steps == 1 and most == 256):
            return chosen
        steps, most = (steps // 2, most) if steps > 1 else (1, most // 2)


_VARIANTS = (
    Option("dtype", (bf16, f16, f32), bf16, "of x and y"),
    Option("weight_dtype", (None, bf16, f16, f32), f32, "of the weight and the bias; None: as x"),
    Option("bias", (True, False), False, "whether there is a bias"),
    Option("activation", (True, False), True, "SiLU after the convolution"),
)

CAUSAL_CONV1D = Op(
    name="causal_conv1d",
    doc="Depthwise causal convolution of 2 to 4 taps with SiLU over whole or packed sequences, state in and out.",
    dims=(
        Dim("B", 1, "batch", divisor=1),
        Dim("T", 8192, "tokens of a sequence", divisor=1),
        Dim("P", 12288, "channels", static=True),
        Dim("W", 4, "taps", static=True),
        Dim("N", 1, "packed sequences, with option varlen", divisor=1),
    ),
    knobs=(
        Knob("block_p", (128, 256, 512, 1024, 2048), 1024, "channels a program"),
        Knob("rows", (2, 4, 8, 16), 8, "tokens that are read at a time"),
        Knob("steps", (1, 2, 4, 8, 16), 4, "times that a program does so, one after the other"),
        Knob("num_warps", (1, 2, 4, 8), 4, "warps a program"),
    ),
    options=(
        *_VARIANTS,
        Option("initial_state", (None, bf16, f16, f32), None, "dtype of the initial state: x's or f32"),
        Option("final_state", (None, bf16, f16, f32), bf16, "dtype of the final state"),
        Option("varlen", (True, False), False, "packed sequences by cu_seqlens"),
        Option("cu_dtype", (None, i32, i64), i32, "of cu_seqlens"),
    ),
    plan=forward,
    launches=("sequences", "causal_conv1d", "final_window"),
    inputs=judge.forward_inputs,
    cases=judge.forward_cases,
    call=judge.forward_call,
    reference=judge.forward_reference,
    peers=judge.forward_peers,
    limits=judge.forward_limits,
    constraints=forward_constraints,
    traffic_bytes=judge.forward_traffic,
    canonical=judge.canonical,
    heuristic=forward_rule,
    prepare_dims=forward_dims,
    cpu_dims={"T": 200, "P": 512},
)


def update(
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """One launch. dims: B requests, T tokens of each (static), P channels, W taps, `pool` slots."""
    io = options["dtype"]
    weights = options["weight_dtype"] or io
    dtypes = {
        "x": io,
        "weight": weights,
        "bias": weights if options["bias"] else None,
        "slots": i32 if options["indexed"] else None,
        "conv_state": options["state"] or io,
        "y": io,
    }
    default = {"num_warps": knobs["num_warps"]}
    fixed = {**options, "approx": io != f32}
    return common.one_launch(
        "causal_conv1d.update", kernels.conv_update, dims, knobs, fixed, dtypes, backend, schedules, strides, default
    )


def update_constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    reasons = [*_width(dims), *_registers(dims, knobs, options, dims["T"] + dims["W"])]
    if not 1 <= dims["T"] <= MAX_TOKENS:
        reasons.append(f"T = {dims['T']} tokens, needs 1 to {MAX_TOKENS}; use causal_conv1d for more")
    return reasons


def update_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Narrow blocks for few requests."""
    most = 1024
    while most > 128 and dims["B"] * dims["P"] // most < ENOUGH:
        most //= 2
    return _block(dims["P"], most, options["dtype"].bytes)


CAUSAL_CONV1D_UPDATE = Op(
    name="causal_conv1d.update",
    doc="Depthwise causal convolution for one token or a few of every request, state in place.",
    dims=(
        Dim("B", 64, "requests", divisor=1),
        Dim("T", 1, "tokens of a request", static=True),
        Dim("P", 36864, "channels", static=True),
        Dim("W", 4, "taps", static=True),
        Dim("pool", 64, "slots of the state pool", divisor=1),
    ),
    knobs=(
        Knob("block_p", (128, 256, 512, 1024, 2048), 1024, "channels a program"),
        Knob("num_warps", (1, 2, 4, 8), 4, "warps a program"),
    ),
    options=(
        *_VARIANTS,
        Option("state", (None, bf16, f16, f32), None, "dtype of the state: None, x's, or f32"),
        Option("indexed", (True, False), True, "slots by index"),
    ),
    plan=update,
    launches=("conv_update",),
    inputs=judge.update_inputs,
    cases=judge.update_cases,
    call=judge.update_call,
    reference=judge.update_reference,
    mutates=("conv_state",),
    peers=judge.update_peers,
    limits=judge.update_limits,
    constraints=update_constraints,
    traffic_bytes=judge.update_traffic,
    canonical=judge.canonical,
    heuristic=update_rule,
    prepare_dims=common.narrow,
    cpu_dims={"B": 4, "P": 512, "pool": 6},
)
