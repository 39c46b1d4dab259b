"""What a context costs: bytes worked out by hand for Kimi K3, times on the CPU for a tiny network, and the plot."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from k3dsl.autotune import plots
from k3dsl.cli.common import parse_counts
from k3dsl.cli.main import app
from k3dsl.errors import ArgumentError
from k3dsl.model import context
from k3dsl.model.cache import Cache
from k3dsl.model.config import KimiK3Config
from k3dsl.model.context import context_cost, context_times
from k3dsl.runtime.timing import Timing

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is missing")
STATES = 434_110_464 + 15_261_696
LATENTS = 27_648
ALL_MLA = 93 * 1152
PLAIN = 93 * 96 * (192 + 128) * 2


def run(*args: str, status: int = 0):
    result = CliRunner().invoke(app, ["model", "context", *args])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture
def no_clock(monkeypatch):
    """Ops are only counted, and their time is made up: 2 ms for kda_step, 3 for mla_decode, 5 for attention_decode."""
    ran: list[str] = []
    known = {"kda_step": 2.0, "mla_decode": 3.0, "attention_decode": 5.0}
    for name in known:
        monkeypatch.setattr(context.ops, name, lambda *_, name=name, **__: ran.append(name))

    def measure(call, device, *, rep_ms):
        call()
        ms = known[ran[-1]]
        return Timing(ms, ms, ms, "no clock")

    monkeypatch.setattr(context, "measure", measure)
    return ran


# ---- bytes -------------------------------------------------------------------------------------------------------------


def test_k3_keeps_the_published_bytes_at_every_context():
    cost = context_cost(KimiK3Config.k3(), (1024, 1 << 20))
    assert (cost.kda_layers, cost.mla_layers) == (69, 24)
    assert (cost.mla_token, cost.all_mla_token, cost.plain_token) == (LATENTS, 107_136, 5_713_920)
    assert (ALL_MLA, PLAIN) == (107_136, 5_713_920)
    assert cost.states == STATES == 449_372_160
    short, long = cost.rows
    assert (short.kda_state, short.conv_state, short.mla_latents) == (434_110_464, 15_261_696, 1024 * LATENTS)
    assert (long.kda_state, long.conv_state, long.mla_latents) == (434_110_464, 15_261_696, 28_991_029_248)
    assert long.network == 29_440_401_408
    assert (long.all_mla, long.plain) == (112_340_238_336, 5_991_479_377_920)


def test_k3_breaks_even_where_the_bytes_say():
    """The state is that of 16.3 thousand tokens of latents; KDA layers repay themselves against MLA after 5.7 thousand."""
    cost = context_cost(KimiK3Config.k3())
    assert cost.latents_equal_states == 16_254
    assert 16_253 * LATENTS < STATES <= 16_254 * LATENTS
    assert (cost.smaller_than_all_mla, cost.smaller_than_plain) == (5_654, 80)
    for tokens, other in ((5_654, ALL_MLA), (80, PLAIN)):
        assert STATES + tokens * LATENTS < tokens * other
        assert STATES + (tokens - 1) * LATENTS >= (tokens - 1) * other


def test_bytes_are_those_of_a_cache():
    config = KimiK3Config.k3_tiny()
    (row,) = context_cost(config, [128], batch=3).rows
    held = Cache(config, 3, capacity=128).nbytes()
    assert (row.kda_state, row.conv_state, row.mla_latents) == (
        held["kda_state"],
        held["conv_window"],
        held["mla_latent"],
    )
    assert row.all_mla == 3 * 128 * 9 * (64 + 32) * 2
    assert row.plain == 3 * 128 * 9 * 2 * (64 + 32 + 64) * 2


def test_a_network_without_one_kind_has_no_break_even():
    config = KimiK3Config.kimi_linear_tiny()
    layers = tuple(range(1, 6))
    full = replace(config.linear_attn_config, kda_layers=(), full_attn_layers=layers)
    only_mla = context_cost(replace(config, linear_attn_config=full), [64])
    assert only_mla.states == 0
    assert only_mla.rows[0].network == only_mla.rows[0].all_mla == 64 * 5 * 96 * 2
    assert (only_mla.latents_equal_states, only_mla.smaller_than_all_mla) == (None, None)
    linear = replace(config.linear_attn_config, kda_layers=layers, full_attn_layers=())
    only_kda = context_cost(replace(config, linear_attn_config=linear), [64, 1 << 20])
    assert only_kda.mla_token == 0
    assert only_kda.rows[0].network == only_kda.rows[1].network == 5 * (2 * 64 * 64 * 4 + 3 * 3 * 128 * 2)
    assert only_kda.latents_equal_states is None


@pytest.mark.parametrize(
    ("contexts", "batch", "match"),
    [
        ((), 1, "contexts is empty"),
        ((0,), 1, "0 tokens"),
        ((2**31,), 1, "2,147,483,648 tokens"),
        ((1,), 0, "batch is 0"),
    ],
)
def test_what_is_out_of_range_is_an_error(contexts, batch, match):
    with pytest.raises(ArgumentError, match=match) as caught:
        context_cost(KimiK3Config.k3_tiny(), contexts, batch)
    assert caught.value.fix


# ---- time --------------------------------------------------------------------------------------------------------------


def test_times_are_of_one_layer_times_the_layers(no_clock):
    times = context_times(KimiK3Config.k3_tiny(), [64, 100], batch=2)
    assert no_clock == ["kda_step"] * 2 + (["mla_decode"] * 2 + ["attention_decode"] * 2) * 2  # to compile, then timed
    assert (times.kda_layer, times.dtype, times.batch, times.timer) == (2.0, "bfloat16", 2, "no clock")
    assert [row.tokens for row in times.rows] == [64, 100]
    for row in times.rows:
        assert (row.mla_layer, row.plain_layer) == (3.0, 5.0)
        assert (row.network, row.all_mla, row.plain) == (6 * 2.0 + 3 * 3.0, 9 * 3.0, 9 * 5.0)
    assert times.notes == ()


def test_the_ops_are_timed_over_the_whole_context():
    """A step sees the last cached token: it alone has a key that takes all the weight, and its value comes out."""
    config, tokens = KimiK3Config.k3_tiny(), 70
    step = context.mla_layer_step(config, tokens, 1, torch.device("cpu"))
    cells = dict(zip(step.__code__.co_freevars, (cell.cell_contents for cell in step.__closure__), strict=True))
    cells["q"].fill_(1.0)
    cells["cache"].fill_(-1.0)[1, tokens - 64 - 1] = 1.0
    torch.testing.assert_close(step(), torch.ones(1, 1, 2, 64, dtype=torch.bfloat16))
    step = context.plain_layer_step(config, tokens, 1, torch.device("cpu"))
    cells = dict(zip(step.__code__.co_freevars, (cell.cell_contents for cell in step.__closure__), strict=True))
    cells["q"].fill_(1.0)
    cells["keys"].fill_(-1.0)[0, tokens - 1] = 1.0
    cells["values"].zero_()[0, tokens - 1] = 1.0
    torch.testing.assert_close(step(), torch.ones(1, 1, 2, 64, dtype=torch.bfloat16))


def test_a_context_that_does_not_fit_is_left_out_with_a_note(no_clock, monkeypatch):
    """At 100 tokens a layer has 19,200 bytes of latents and 64,000 of keys and values; the room is between the two."""
    monkeypatch.setattr(context, "CPU_MOST_BYTES", 20_000)
    times = context_times(KimiK3Config.k3_tiny(), [16, 100, 1000])
    assert [(row.mla_layer, row.plain_layer) for row in times.rows] == [(3.0, 5.0), (3.0, None), (None, None)]
    assert [(row.network, row.all_mla, row.plain) for row in times.rows] == [
        (21.0, 27.0, 45.0),
        (21.0, 27.0, None),
        (None, None, None),
    ]
    assert len(times.notes) == 3
    assert times.notes[0].startswith("attention_decode at 100 tokens is left out: one layer's cache has 6.4e-05 GB")


def test_memory_that_runs_out_while_timing_is_a_note_too(no_clock, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(context, "plain_layer_step", full)
    times = context_times(KimiK3Config.k3_tiny(), [16])
    assert times.rows[0].plain is None
    assert times.rows[0].network == 21.0
    assert "not enough memory" in times.notes[0]


def test_k3_is_not_timed_on_the_cpu():
    with pytest.raises(ArgumentError, match=r"K3 is too wide to be timed on the CPU") as caught:
        context_times(KimiK3Config.k3(), name="K3")
    assert "a machine with a GPU" in caught.value.fix
    assert "K3-tiny" in caught.value.fix


# ---- the command -------------------------------------------------------------------------------------------------------


def test_contexts_are_read_in_powers_of_two():
    assert parse_counts("1k,8K, 3 ,1M", "--contexts", "1k,8k") == [1024, 8192, 3, 1 << 20]
    for text in ("", "1k,", "1G", "-1", "1.5k", "k"):
        with pytest.raises(ArgumentError, match="--contexts takes numbers with commas"):
            parse_counts(text, "--contexts", "1k,8k")


def test_the_command_prints_the_figures_that_people_quote():
    text = run("K3").stdout
    for figure in ("27,648", "107,136", "5,713,920", "449,372,160", "16,254", "5,654", "from 80 tokens", "29.44 GB",
                   "112.3 GB", "5.991 TB", "434.1 MB", "15.26 MB"):  # fmt: skip
        assert figure in text
    assert "note:" not in text
    assert "kda_step" not in text


def test_the_command_prints_json_alone():
    data = json.loads(run("K3", "--contexts", "64k", "--batch", "4", "--json").stdout)
    assert data["model"] == "K3"
    assert data["times"] is None
    (row,) = data["rows"]
    assert row["network"] == 4 * (STATES + 65_536 * LATENTS)
    assert row["plain"] == 4 * 65_536 * PLAIN


def test_the_command_times_a_tiny_network_on_the_cpu():
    result = run("K3-tiny", "--contexts", "64,128", "--time", "--backend", "torch", "--json")
    times = json.loads(result.stdout)["times"]
    assert times["device"].startswith("CPU")
    assert "time.perf_counter" in times["timer"]
    assert "Not in it: projections" in times["measured"]
    assert [row["tokens"] for row in times["rows"]] == [64, 128]
    for row in times["rows"]:
        assert row["mla_layer"] > 0
        assert row["network"] == pytest.approx(6 * times["kda_layer"] + 3 * row["mla_layer"])
        assert row["all_mla"] == pytest.approx(9 * row["mla_layer"])
        assert row["plain"] == pytest.approx(9 * row["plain_layer"])


def test_the_command_says_what_was_measured(no_clock):
    text = run("K3-tiny", "--contexts", "64,128", "--time", "--backend", "torch", "--batch", "2").stdout
    assert "attention ops of a decode step, 2 requests, bfloat16, on CPU" in text
    for figure in ("2 ms", "3 ms", "5 ms", "21 ms", "27 ms", "45 ms"):
        assert figure in text
    assert "one layer and one new token of each request, times the number of layers" in text


def test_the_command_says_when_a_context_is_longer_than_the_config_allows():
    assert "the config is made for 65,536 tokens" in run("K3-tiny", "--contexts", "128k").stdout
    assert "the config is made for" not in run("K3-tiny", "--contexts", "64k").stdout


def test_the_command_says_what_it_cannot_do(tmp_path):
    assert "too wide to be timed on the CPU" in run("K3", "--time", "--backend", "torch", status=2).stderr
    assert "fix: write --contexts 1k,8k" in run("K3", "--contexts", "1x", status=2).stderr
    assert "known names: K3" in run("K2", status=2).stderr


# ---- the plot ----------------------------------------------------------------------------------------------------------


@needs_matplotlib
def test_the_plot_has_a_panel_of_bytes_and_one_of_times(no_clock, tmp_path, monkeypatch):
    figures = []
    write = plots.write_figure
    monkeypatch.setattr(
        "k3dsl.model.context_plot.write_figure", lambda path, figure: (figures.append(figure), write(path, figure))
    )
    file = tmp_path / "new" / "tiny.png"
    run("K3-tiny", "--contexts", "64,1k", "--plot", str(file))
    run("K3-tiny", "--contexts", "64,1k", "--time", "--backend", "torch", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in file.parent.iterdir()] == ["tiny.png"]
    assert [len(figure.axes) for figure in figures] == [1, 2]
    size, time = figures[1].axes
    assert (size.get_ylabel(), time.get_ylabel()) == (
        "cache of a request (bytes)",
        "attention ops of a decode step (ms)",
    )
    for axes in (size, time):
        assert axes.get_xlabel() == "context (tokens of a request)"
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [list(line.get_ydata()) for line in time.lines] == [[21.0] * 2, [27.0] * 2, [45.0] * 2]
    assert list(size.lines[1].get_ydata()) == [64 * 9 * 96 * 2, 1024 * 9 * 96 * 2]
    assert list(size.lines[3].get_xdata()) == [366, 366]  # 210,432 bytes of states, 576 of latents a token


@needs_matplotlib
def test_a_plot_is_not_written_over_by_half_a_plot(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    file = tmp_path / "k3.png"
    run("K3", "--plot", str(file))
    before = file.read_bytes()

    def broken(self, target, **_):
        target.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", broken)
    result = run("K3", "--plot", str(file), status=2)
    assert "No space left" in result.stderr
    assert "27,648" in result.stdout  # the table is there all the same
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["k3.png"]


@needs_matplotlib
def test_a_plot_is_a_png(tmp_path):
    assert "does not end in .png" in run("K3", "--plot", str(tmp_path / "k3.pdf"), status=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_what_to_install(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = run("K3", "--plot", str(tmp_path / "k3.png"), status=2)
    assert "a plot needs matplotlib" in result.stderr
    assert "k3dsl[report]" in result.stderr
