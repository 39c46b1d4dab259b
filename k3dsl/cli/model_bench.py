"""`k3dsl model bench`: how fast a network reads and writes, and where the time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dsl.cli.common import BackendName, Json, OutputFile, Seed, parse_counts
from k3dsl.cli.generate import DType, Experts, Model, load
from k3dsl.cli.output import milliseconds, print_json, print_table, scaled, write_json
from k3dsl.errors import ArgumentError

if TYPE_CHECKING:
    from k3dsl.model.bench import BenchResult, Cell

NOTE = (
    "time alone: each kind of call by itself, times its calls. bytes at copy rate: what its bytes take, each tensor read and "
    "written once, at the rate of a large copy on this GPU ({rate:,.0f} GB/s). It bounds what moves bytes; an op that is bound "
    "by arithmetic (in a prefill: attention, experts, projections) stays far from it."
)


def bench_command(
    model: Model,
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="8k,32k", help="Tokens of a prompt, a prefill each; none: no prefill.")
    ] = "256",
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts that a prefill reads at once.")] = 1,
    contexts: Annotated[
        str | None,
        typer.Option(
            "--contexts", metavar="8k,128k", help="Tokens that a decode step sees; none: no decode. Default: --lengths."
        ),
    ] = None,
    batches: Annotated[
        str, typer.Option("--batches", metavar="1,16,64", help="Sequences of a decode step, each with each context.")
    ] = "1",
    chunk: Annotated[
        int, typer.Option("--chunk", min=0, help="Most tokens of a prompt in one call of a prefill; 0: all at once.")
    ] = 0,
    rep_ms: Annotated[int, typer.Option("--rep-ms", min=1, help="Milliseconds to repeat each measurement for.")] = 1000,
    experts: Experts = None,
    dtype: DType = None,
    backend: BackendName = None,
    seed: Seed = 0,
    output: OutputFile = None,
    as_json: Json = False,
) -> None:
    """Time a network: prompt tokens a second, milliseconds a new token (on a GPU as a CUDA graph), and its ops.

    The context of a decode step is made up, not read. What does not fit the memory is said, and the rest goes on. With
    --output the file is written after every measurement.
    """
    from k3dsl.model.bench import bench
    from k3dsl.runtime.dispatch import using_backend

    prefills = _counts(lengths, "--lengths", "8k,32k")
    decodes = prefills if contexts is None else _counts(contexts, "--contexts", "8k,128k")
    sizes = _counts(batches, "--batches", "1,16,64")
    if not prefills and not (decodes and sizes):
        raise ArgumentError("there is nothing to time", fix="pass --lengths, or --contexts with --batches")
    network, _ = load(model, dtype, backend, seed, experts)

    def show(result: BenchResult) -> None:
        if output is not None:
            write_json(output, {"model": model, **result.to_json()})
        if as_json:
            return
        if len(result.cells) == 1:
            print(
                f"{model} on {result.device}, {result.dtype}, experts in {result.experts}: "
                f"{scaled(result.weight_bytes)}B of weights\n"
            )
        _print_cell(result.cells[-1])

    with using_backend(backend):
        result = bench(
            network, lengths=prefills, prompts=prompts, contexts=decodes, batches=sizes, chunk=chunk, rep_ms=rep_ms,
            on_cell=show,
        )  # fmt: skip
    if as_json:
        print_json({"model": model, **result.to_json()})
    else:
        if len(result.cells) > 1:
            _print_summary(result.cells)
        if result.copy_gbps is not None:
            print(NOTE.format(rate=result.copy_gbps))
    if any(cell.problem is not None and not cell.out_of_memory for cell in result.cells):
        raise typer.Exit(1)


def _counts(text: str, option: str, example: str) -> list[int]:
    """Numbers with commas, of at least 1; none: no numbers."""
    found = [] if text.strip().lower() == "none" else parse_counts(text, option, example)
    if 0 in found:
        raise ArgumentError(f"{option} has 0", fix="counts are at least 1")
    return found


def _title(cell: Cell) -> str:
    if cell.phase == "prefill":
        return f"prefill, {cell.batch} x {cell.tokens:,} tokens"
    return f"decode, batch {cell.batch}, context {cell.tokens:,}"


def _print_cell(cell: Cell) -> None:
    """The cell's ops beside what their bytes take; why it has none."""
    if cell.time_ms is None or cell.rest_ms is None or cell.tokens_per_s is None:
        print(f"{_title(cell)}: {cell.problem}\n")
        return
    rows: list[list[Any]] = [_row(cell, op.op, op.calls, op.time_ms, op.bytes, op.bytes_ms) for op in cell.ops]
    note = "" if cell.rest_ms >= 0 else " (ops alone do not overlap, as they do in the whole)"
    rest = max(cell.rest_ms, 0.0)
    rows.append(_row(cell, "the rest: projections, host" + note, None, rest, cell.projection_bytes, cell.projection_ms))
    moved = cell.projection_bytes + sum(op.bytes for op in cell.ops)
    known = [ms for ms in (*(op.bytes_ms for op in cell.ops), cell.projection_ms) if ms is not None]
    rows.append(_row(cell, "all", None, cell.time_ms, moved, sum(known) if known else None))
    columns = ["op", ">calls", ">time alone", ">share of all", ">bytes"]
    on_gpu = cell.projection_ms is not None
    if on_gpu:
        columns += [">bytes at copy rate", ">of the time"]
    peak = "" if cell.peak_bytes is None else f", peak memory {scaled(cell.peak_bytes)}B"
    print_table(
        f"{_title(cell)}: {milliseconds(cell.time_ms)}, {cell.tokens_per_s:,.0f} tokens/s{peak}",
        columns,
        rows if on_gpu else [row[:5] for row in rows],
    )


def _row(cell: Cell, name: str, calls: int | None, ms: float, size: int, bytes_ms: float | None) -> list[Any]:
    assert cell.time_ms is not None
    least = None if bytes_ms is None or not ms else f"{bytes_ms / ms:.0%}"
    share = f"{ms / cell.time_ms:.0%}"
    return [name, calls, milliseconds(ms), share, f"{scaled(size)}B", milliseconds(bytes_ms), least]


def _print_summary(cells: tuple[Cell, ...]) -> None:
    rows = [
        [
            cell.phase,
            cell.batch,
            f"{cell.tokens:,}",
            "-" if cell.time_ms is None else milliseconds(cell.time_ms),
            None if cell.tokens_per_s is None else f"{cell.tokens_per_s:,.0f}",
            None if cell.peak_bytes is None else f"{scaled(cell.peak_bytes)}B",
            "out of memory" if cell.out_of_memory else "failed" if cell.problem is not None else "",
        ]
        for cell in cells
    ]
    print_table("all", ("phase", ">batch", ">tokens", ">time", ">tokens/s", ">peak memory", ""), rows)
