"""`k3dsl bench`: an op's time, against its peers and against the floor of each of its kernels."""

from __future__ import annotations

from typing import Annotated

import typer

from k3dsl.cli.common import (
    BackendName,
    Dims,
    Json,
    OpName,
    OutputFile,
    Seed,
    Settings,
    device_for,
    parse_dims,
    parse_settings,
)
from k3dsl.cli.output import megabytes, milliseconds, print_json, print_table, scaled, write_json

NAME = "bench"


def bench_command(
    op: OpName,
    dims: Dims = None,
    settings: Settings = None,
    backend: BackendName = None,
    peers: Annotated[
        bool, typer.Option(help="Also time other libraries' functions, where they can be imported.")
    ] = True,
    rep_ms: Annotated[int, typer.Option("--rep-ms", min=1, help="Milliseconds to repeat each measurement for.")] = 200,
    seed: Seed = 0,
    output: OutputFile = None,
    as_json: Json = False,
) -> None:
    """Time an op: median of many calls, its peers in the same process, and on a GPU its CUDA graph and each kernel alone."""
    from k3dsl.ops.registry import get_op
    from k3dsl.runtime.dispatch import using_backend
    from k3dsl.runtime.timing import bench

    chosen = get_op(op)
    knobs, options, schedules = chosen.split_settings(parse_settings(settings))
    chosen.resolve_knobs(knobs)
    given = parse_dims(dims)
    chosen.resolve_dims(given)
    device = device_for(backend)
    with using_backend(backend):
        result = bench(
            chosen,
            dims=given,
            options=chosen.resolve_options(options),
            knobs=knobs,
            schedules=schedules,
            device=device,
            seed=seed,
            with_peers=peers,
            rep_ms=rep_ms,
        )
    if output is not None:
        write_json(output, result.to_json())
    if as_json:
        print_json(result.to_json())
        return
    at = " ".join(f"{name}={value}" for name, value in result.dims.items())
    host = None if result.host_us is None else f"the host enqueues a call in {result.host_us:.0f} us"
    rows = [[f"k3dsl {chosen.name}", milliseconds(result.timing.median_ms), "1", host]]
    if result.graph is not None:
        note = "one call replayed, without the host; peers are compared with the row above"
        rows.append([f"k3dsl {chosen.name}, CUDA graph", milliseconds(result.graph.median_ms), None, note])
    for peer in result.peers:
        if peer.timing is None:
            rows.append([peer.name, None, None, f"cannot run: {peer.problem}"])
            continue
        ratio = result.ratio(peer)
        differs = ", ".join(f"{name} {value:.1e}" for name, value in peer.difference.items())
        rows.append(
            [peer.name, milliseconds(peer.timing.median_ms), f"{ratio:.3f}", f"differs from ours by: {differs}"]
        )
    print_table(f"{at} on {result.device}", ("function", ">median", ">k3dsl / this", "note"), rows)
    if chosen.peers is not None and peers and not result.peers:
        print("no peer can be imported here (pip install flash-linear-attention, on a GPU machine)")
    if result.launches:
        columns = ("kernel", ">median", ">must move", ">must compute", ">floor", ">floor / median")
        rows = [
            [
                t.label,
                milliseconds(t.timing.median_ms),
                megabytes(t.bytes),
                f"{scaled(t.flops)}FLOP" if t.flops else None,
                milliseconds(t.floor_ms),
                f"{t.share:.0%}",
            ]
            for t in result.launches
        ]
        rates = f"{result.copy_gbps:.0f} GB/s, measured by copying"
        if result.matmul_tflops is not None:
            rates += f", and {result.matmul_tflops:.0f} TFLOP/s, by torch's bf16 product"
        print_table(f"each kernel alone; floor at {rates}", columns, rows)
    print(f"timer: {result.timing.timer}")
    if device.type == "cpu":
        print("this is the torch backend, which evaluates the IR on the CPU: its time says nothing about a GPU")
