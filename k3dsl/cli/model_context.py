"""`k3dsl model context`: what a context costs a network, beside the same widths with other attention."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dsl.cli.common import BackendName, Json, ModelName, device_for, parse_counts
from k3dsl.cli.output import milliseconds, print_json, print_table, scaled

if TYPE_CHECKING:
    from k3dsl.model.config import KimiK3Config
    from k3dsl.model.context import ContextCost, ContextTimes

DEFAULT = "1k,8k,64k,512k,1M"


def context_command(
    model: ModelName,
    contexts: Annotated[
        str, typer.Option("--contexts", metavar=DEFAULT, help="Tokens of a request; k is 1,024, M is 1,048,576.")
    ] = DEFAULT,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests, each of that context.")] = 1,
    time: Annotated[
        bool, typer.Option("--time", help="Also time the attention ops of a decode step here, a layer of each kind.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw it; needs matplotlib.")
    ] = None,
    backend: BackendName = None,
    as_json: Json = False,
) -> None:
    """Show the cache over the context: as the network is, with MLA in every layer, with plain attention in every layer."""
    from k3dsl.model.context import context_cost, context_times
    from k3dsl.model.context_plot import check_plot, write_plot
    from k3dsl.model.info import load_config
    from k3dsl.runtime.dispatch import using_backend

    name, config = load_config(model)
    tokens = parse_counts(contexts, "--contexts", DEFAULT)
    cost = context_cost(config, tokens, batch)
    if plot is not None:
        check_plot(plot)
    times = None
    if time:
        device = device_for(backend)
        with using_backend(backend):
            times = context_times(config, tokens, batch, device=device, name=name)
    if as_json:
        print_json({"model": name, **cost.to_dict(), "times": None if times is None else times.to_dict()})
    else:
        _print_bytes(name, config, cost)
        if times is not None:
            _print_times(name, cost, times)
    if plot is not None:  # last, so that a plot that cannot be written costs no measurement
        write_plot(plot, name, cost, times)
        print(f"plot: {plot}", file=sys.stderr)


def _print_bytes(name: str, config: KimiK3Config, cost: ContextCost) -> None:
    requests = "a request" if cost.batch == 1 else f"{cost.batch} requests together"
    columns = (
        *("tokens", "KDA states", "conv windows", "MLA latents", "as it is", "all MLA", "plain"),
        *("all MLA / as it is", "plain / as it is"),
    )
    rows = [
        [
            f"{row.tokens:,}",
            *(
                f"{scaled(value)}B"
                for value in (row.kda_state, row.conv_state, row.mla_latents, row.network, row.all_mla, row.plain)
            ),
            *(f"{value / row.network:.3g}x" if row.network else None for value in (row.all_mla, row.plain)),
        ]
        for row in cost.rows
    ]
    print_table(f"{name}: cache of {requests}", [f">{column}" for column in columns], rows)
    layers = config.num_hidden_layers
    print(f"as it is: {cost.kda_layers} KDA and {cost.mla_layers} MLA layers; a token adds {cost.mla_token:,} bytes")
    print(f"all MLA: latents in all {layers} layers; a token adds {cost.all_mla_token:,} bytes")
    print(
        f"plain: softmax attention in all {layers} layers, with keys ({config.qk_head_dim}) and values"
        f" ({config.v_head_dim}) of {config.num_attention_heads} heads; a token adds {cost.plain_token:,} bytes"
    )
    if cost.states:
        print(f"KDA states and windows: {cost.states:,} bytes a request, at any context")
    if cost.latents_equal_states is not None:
        print(f"the MLA layers' latents take as much from {cost.latents_equal_states:,} tokens")
    if cost.kda_layers:
        for other, first in (("all MLA", cost.smaller_than_all_mla), ("plain", cost.smaller_than_plain)):
            print(f"smaller than {other}: " + ("never" if first is None else f"from {first:,} tokens"))
    longest, known = cost.rows[-1].tokens, config.max_position_embeddings
    if known is not None and longest > known:
        print(f"note: the config is made for {known:,} tokens; longer contexts are computed all the same")


def _print_times(name: str, cost: ContextCost, times: ContextTimes) -> None:
    from k3dsl.model.context import MEASURED

    print()
    layers = cost.kda_layers + cost.mla_layers
    rows: list[list[Any]] = [
        [
            f"{row.tokens:,}",
            *(milliseconds(ms) for ms in (times.kda_layer, row.mla_layer, row.plain_layer)),
            *(milliseconds(ms) for ms in (row.network, row.all_mla, row.plain)),
        ]
        for row in times.rows
    ]
    requests = "a request" if times.batch == 1 else f"{times.batch} requests"
    print_table(
        f"{name}: attention ops of a decode step, {requests}, {times.dtype}, on {times.device}",
        (
            ">tokens",
            ">kda_step",
            ">mla_decode",
            ">attention_decode",
            f">as it is: {cost.kda_layers} + {cost.mla_layers} layers",
            f">all MLA: {layers}",
            f">plain: {layers}",
        ),
        rows,
    )
    print(MEASURED)
    if times.timer:
        print(f"Median, by {times.timer}.")
    for note in times.notes:
        print(f"note: {note}")
