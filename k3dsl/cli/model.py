"""`k3dsl model`: the network: what it weighs, what generating with it keeps, how fast it is."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import typer

from k3dsl.cli import model_bench, model_context
from k3dsl.cli.common import Json, ModelName
from k3dsl.cli.output import print_json, print_table, scaled

if TYPE_CHECKING:
    from k3dsl.model.info import ModelInfo

NAME = "model"
app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
_LABELS = {
    "embedding": "embedding",
    "kda": "KDA attention",
    "mla": "MLA attention",
    "dense_mlp": "dense FFN",
    "router": "router",
    "routed_experts": "routed experts",
    "shared_experts": "shared experts",
    "latent_projections": "latent projections",
    "attn_res": "AttnRes queries and norms",
    "norms": "norms",
    "lm_head": "lm_head",
}


@app.callback()
def start(context: typer.Context) -> None:
    """The network in PyTorch: what it is made of and what it needs."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("info")
def info_command(model: ModelName, as_json: Json = False) -> None:
    """Show parameters by part, layers, and the bytes of weights and caches; computed from the config, without weights."""
    from k3dsl.model.info import describe, load_config

    name, config = load_config(model)
    info = describe(config, name)
    if as_json:
        print_json(info.to_dict())
        return
    print_table(f"{name}: parameters", ("part", ">parameters", ">share"), _parameter_rows(info))
    print_table("layers, counted from 0", ("layers", "attention", "FFN"), _layer_rows(info))
    if info.snapshot_layers:
        print(f"AttnRes snapshots at layers {', '.join(map(str, info.snapshot_layers))}")
    print(f"features: {', '.join(info.features)}\n")
    print_table("memory", ("what", ">bytes", ""), _memory_rows(info, config.max_position_embeddings))


app.command("context")(model_context.context_command)
app.command("bench")(model_bench.bench_command)


def _parameter_rows(info: ModelInfo) -> list[list[str]]:
    rows = [[_LABELS[part], f"{n:,}", f"{n / info.total:.2%}"] for part, n in info.parameters.items()]
    rows.append(["total", f"{info.total:,}", scaled(info.total, "B").strip()])
    rows.append(["active for a token, without the embedding", f"{info.active:,}", scaled(info.active, "B").strip()])
    return rows


def _layer_rows(info: ModelInfo) -> list[list[str]]:
    """One row for each run of layers that are alike."""
    moe = set(info.moe_layers)
    kinds = [(kind.upper(), "experts" if i in moe else "dense") for i, kind in enumerate(info.layer_types)]
    runs: dict[tuple[str, str], list[str]] = {}
    for kind, group in groupby(range(len(kinds)), key=lambda i: kinds[i]):
        numbers = list(group)
        runs.setdefault(kind, []).append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]))
    count = {kind: kinds.count(kind) for kind in runs}
    return [[f"{count[kind]}: {', '.join(spans)}", *kind] for kind, spans in runs.items()]


def _memory_rows(info: ModelInfo, context: int | None) -> list[list[str]]:
    cache = info.cache
    rows = [("weights, all in bf16", info.bf16_weight_bytes)]
    if info.mxfp4_weight_bytes is not None:
        rows.append(("weights, routed experts in MXFP4", info.mxfp4_weight_bytes))
    rows += [
        ("MLA cache of a token", cache.per_token),
        ("KDA state of a request, fp32", cache.kda_state),
        ("convolution state of a request", cache.conv_state),
    ]
    if context is not None:
        rows.append((f"a request of {context:,} tokens", cache.at(context)))
    if cache.attn_res_bank_per_token:
        rows.append(("AttnRes bank of a token, in a forward pass", cache.attn_res_bank_per_token))
    table = [[what, f"{n:,}", f"{scaled(n)}B"] for what, n in rows]
    if cache.break_even_tokens:
        table.append([f"MLA's cache outgrows the states at {cache.break_even_tokens:,} tokens", "", ""])
    return table
