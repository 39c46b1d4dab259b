"""`k3dsl model bench`: how fast a network reads and writes, and where the time goes."""

from __future__ import annotations

from typing import Annotated

import typer

from k3dsl.cli.common import BackendName, Json, OutputFile, Seed
from k3dsl.cli.generate import DType, Model, load
from k3dsl.cli.output import milliseconds, print_json, print_table, write_json


def bench_command(
    model: Model,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences.")] = 1,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of each prompt.")] = 256,
    rep_ms: Annotated[int, typer.Option("--rep-ms", min=1, help="Milliseconds to repeat each measurement for.")] = 1000,
    dtype: DType = None,
    backend: BackendName = None,
    seed: Seed = 0,
    output: OutputFile = None,
    as_json: Json = False,
) -> None:
    """Time a network: prompt tokens a second, milliseconds a new token (on a GPU as a CUDA graph), and its ops."""
    from k3dsl.model.bench import bench
    from k3dsl.runtime.dispatch import using_backend

    network, _ = load(model, dtype, backend, seed)
    with using_backend(backend):
        result = bench(network, batch=batch, length=length, rep_ms=rep_ms)
    data = {"model": model, **result.to_json()}
    if output is not None:
        write_json(output, data)
    if as_json:
        print_json(data)
        return
    print(f"{model}: {batch} x {length} tokens on {result.device}, {result.dtype}")
    for phase in (result.prefill, result.decode):
        rate = f"{phase.tokens_per_s:,.0f} tokens/s"
        rows = [[name, count, milliseconds(ms), f"{ms / phase.time_ms:.0%}"] for name, count, ms in phase.ops]
        rest = phase.time_ms - sum(ms for _, _, ms in phase.ops)
        note = "" if rest >= 0 else " (ops alone do not overlap, as they do in the whole)"
        rows.append(["the rest: projections, host" + note, None, milliseconds(max(rest, 0.0)), None])
        print_table(
            f"{phase.name}: {milliseconds(phase.time_ms)}, {rate}", ("op", ">calls", ">time alone", ">share"), rows
        )
