"""The command line: what each command prints, what a user's mistake costs (one line, status 2), and JSON alone on stdout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import k3dsl
from k3dsl.cli.common import parse_dims, parse_settings, parse_value
from k3dsl.cli.main import app
from k3dsl.errors import ArgumentError
from k3dsl.ops.registry import get_op, op_names
from k3dsl.runtime import judge, timing
from k3dsl.runtime.timing import Timing

pytest.importorskip("triton")
SMALL = ("--dims", "B=3,H=2,K=64,V=64,slots=4")


def run(*args: str, status: int = 0):
    """Runs a command in this process; a crash fails the test with its traceback."""
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def process(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "k3dsl.cli.main", *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )


# ---- a user's mistake -------------------------------------------------------------------------------------------------

DECODE = ("show", "kda.decode")
MISTAKES = [
    (("ops", "kda.foward"), "unknown op 'kda.foward'; did you mean kda.forward?"),
    (("ops", "kda"), "unknown op 'kda'; did you mean kda.forward or kda.decode or kda.step or kda.commit?"),
    (("show", "xyz"), f"unknown op 'xyz'; known: {', '.join(op_names())}"),
    ((*DECODE, "--target", "sm_91a"), "unknown target 'sm_91a'; did you mean sm_90a or"),
    ((*DECODE, "--set", "blok_v=8"), "unknown knob or option 'blok_v' of kda.decode; did you mean block_v?"),
    ((*DECODE, "--set", "decod.num_warps=8"), "did you mean decode.num_warps?"),
    (
        (*DECODE, "--set", "decode.num_wraps=8"),
        "unknown schedule field 'num_wraps' of the triton backend; did you mean num_",
    ),
    ((*DECODE, "--dims", "slot=3"), "unknown dim 'slot' of kda.decode; did you mean slots?"),
    ((*DECODE, "--stage", "irr"), "unknown stage 'irr'; did you mean ir?"),
    ((*DECODE, "--kernel", "decod"), "unknown kernel 'decod' of kda.decode; did you mean decode?"),
    (
        ("compile", "kda.decode", "--target", "sm_90a", "--backend", "trion"),
        "unknown backend 'trion'; did you mean triton?",
    ),
    (("run", "kda.decode", "--backend", "trion"), "unknown backend 'trion'; did you mean triton?"),
    (("run", "kda.decode", "--cases", "hole"), "unknown set of cases 'hole'; did you mean whole?"),
    (("pack", "build", "--gpu", "H300", "-o", "nowhere.json"), "unknown GPU 'H300'; did you mean H200 or MI300X?"),
    (("shw",), "No such command 'shw'. Did you mean 'show'?"),
    (("show",), "Missing argument 'OP'"),
    (("show", "kda.decode", "--tarmget", "x"), "No such option: --tarmget"),
]
REFUSED = [
    ((*DECODE, "--set", "block_v=33"), "knob block_v cannot be 33", "choose one of 8, 16, 32, 64, 128"),
    ((*DECODE, "--set", "gate=boundd"), "option gate cannot be 'boundd'", "choose one of bounded, softplus, none"),
    ((*DECODE, "--set", "scale=abc"), "option scale cannot be 'abc'", "give a number, or none"),
    ((*DECODE, "--dims", "B=3,H=2", "--dims", "B=4"), "dim B is given as 3 and as 4", "give it once"),
    ((*DECODE, "--set", "block_v"), "--set takes NAME=VALUE, got 'block_v'", "--set NAME=VALUE"),
    ((*DECODE, "--set", "decode.num_warps=3"), "num_warps must be a power of two up to 32, got 3", None),
    ((*DECODE, "--set", "decode.stages=3"), "stages go by loop label, got 3", "stages.LABEL=3"),
    ((*DECODE, "--set", "decode.maxnreg=many"), "maxnreg must be 16 to 255 or None, got 'many'", None),
    ((*DECODE, "--dims", "B=x"), "dim B must be an integer, got 'x'", "--dims T=8192,H=96"),
    ((*DECODE, "--dims", "B=-1"), "dim B, requests, must be an integer from 0 to 2147483647, got -1", None),
    ((*DECODE, "--stage", "amdgcn", "--target", "sm_90a"), "code for sm_90a has no stage amdgcn", "ptx or sass"),
    (("compile", "kda.decode"), "no target is named, and there is no GPU here", "--target one of sm_80"),
    (("compile", "kda.decode", "--target", "sm_90a", "--backend", "torch"), "generates no code", "--backend triton"),
    (("run", "kda.decode", "--backend", "triton"), "runs on a GPU, and torch sees none here", "--backend torch"),
    (("run", "kda.decode", "--dims", "B=2", "--output", "/proc/none/x.json"), "cannot be written", "another file"),
]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(("args", "text"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_a_name_that_does_not_exist_is_one_line_with_the_near_misses_and_status_2(args, text):
    result = run(*args, status=2)
    assert result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert first.startswith("error: ")
    assert text in first
    assert all(line.startswith("fix: `k3dsl --help`") for line in rest)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("args", "text", "fix"), REFUSED, ids=[" ".join(args) for args, _, _ in REFUSED])
def test_a_value_that_cannot_be_is_a_line_what_and_a_line_what_to_do_and_status_2(args, text, fix):
    result = run(*args, status=2)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1 + (fix is not None)
    assert lines[0].startswith("error: ")
    assert text in lines[0]
    assert fix is None or (lines[1].startswith("fix: ") and fix in lines[1])


def test_what_was_meant_but_cannot_be_done_has_status_1():
    result = run("show", "kda.forward", "--stage", "triton", "--set", "scan.stages.chunk=3", status=1)
    assert result.stderr.startswith(
        "error: scan cannot be lowered to Triton for sm_90a: stages name the loop 'chunk'; "
    )
    assert result.stdout == ""
    result = run("show", "kda.forward", "--stage", "triton", "--set", "dtype=f16", "--set", "factors=bf16", status=1)
    assert result.stderr.startswith("error: kda.forward refuses these settings: fp16 inputs need fp16 factors")


def test_a_real_process_prints_no_traceback_unless_asked():
    done = process("ops", "kda.foward")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown op 'kda.foward'; did you mean kda.forward?\n"
    done = process("--traceback", "ops", "kda.foward")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "UnknownNameError" in done.stderr


def test_a_setting_of_the_environment_that_cannot_be_is_a_users_mistake_too(tmp_path):
    done = process("compile", "kda.decode", "--target", "sm_90a", "-o", str(tmp_path / "b"), K3DSL_CACHE_DIR=__file__)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the environment variable K3DSL_CACHE_DIR is ")
    assert "Traceback" not in done.stderr


def test_generated_sources_are_dumped_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("K3DSL_DUMP", str(tmp_path / "dump"))
    shown = run("show", "kda.decode", *SMALL, "--stage", "triton", "--target", "sm_80").stdout
    (path,) = (tmp_path / "dump").iterdir()
    assert path.name.startswith("decode-sm_80-")
    assert path.read_text().strip() == shown.strip()


# ---- how text is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("-3", -3), ("1e-5", 1e-5), ("0.5", 0.5), ("-5.0", -5.0), ("true", True), ("False", False), ("none", None),
        ("bf16", "bf16"), ("tf32x3", "tf32x3"), ("v,o", ("v", "o")), ("1.2.3", "1.2.3"), ("1e", "1e"),
    ],
)  # fmt: skip
def test_values_are_numbers_words_or_text(text, value):
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_dims_and_settings_may_be_given_at_once_or_one_by_one():
    assert parse_dims(["T=8192,H=96", "B=2"]) == {"T": 8192, "H": 96, "B": 2}
    assert parse_dims(None) == {}
    assert parse_settings(["dtype=bf16", "scan.num_warps=8", "a=1", "a=2"]) == {
        "dtype": "bf16",
        "scan.num_warps": 8,
        "a": 2,
    }
    for wrong in (["T"], ["T="], ["=3"], ["T=8192,,H=96"]):
        with pytest.raises(ArgumentError):
            parse_dims(wrong)


def test_settings_reach_knobs_options_and_schedules():
    point = get_op("kda.forward").point(
        {"T": 64}, parse_settings(["chunk=16", "dtype=f16", "factors=f16", "scan.num_warps=8", "scan.stages.chunks=2"])
    )
    assert point.knobs["chunk"] == 16
    assert str(point.options["dtype"]) == "f16"
    assert point.dims["N"] == point.dims["B"] == 1
    schedule = point.plan("triton").launches[1].schedule
    assert (schedule.num_warps, dict(schedule.stages)) == (8, {"chunks": 2})


# ---- the commands -----------------------------------------------------------------------------------------------------


def test_help_and_version():
    assert run("--version").stdout == f"{k3dsl.__version__}\n"
    assert "Usage:" in run().stdout
    for command in ("ops", "show", "compile", "explain", "run", "bench", "tune", "doctor", "demo"):
        assert command in run("--help").stdout
        assert "--help" in run(command, "--help").stdout


def test_ops_lists_every_op_and_all_about_one():
    listed = run("ops").stdout
    assert all(name in listed for name in op_names())
    assert {op["name"] for op in json.loads(run("ops", "--json").stdout)} == set(op_names())
    shown = run("ops", "kda.decode").stdout
    about = json.loads(run("ops", "kda.decode", "--json").stdout)
    op = get_op("kda.decode")
    assert about["doc"] == op.doc
    assert [d["name"] for d in about["dims"]] == [d.name for d in op.dims]
    for entries, key in ((op.knobs, "knobs"), (op.options, "options")):
        assert [e["name"] for e in about[key]] == [e.name for e in entries]
        assert all(e.name in shown and e.doc in shown for e in entries)
    assert next(e for e in about["options"] if e["name"] == "state") == {
        "name": "state", "default": "f32", "choices": ["f32", "bf16"], "doc": "dtype of the state",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "target", "pattern"),
    [
        ("ir", "sm_90a", r"\Akernel decode\n  dim B"),
        ("triton", "sm_90a", r"@triton\.jit\ndef decode\("),
        ("ptx", "sm_90a", r"\.target sm_90a"),
        ("sass", "sm_90a", r"EXIT"),
        ("amdgcn", "gfx942", r"amdgcn-amd-amdhsa|amdgcn_target"),
    ],
)
def test_show_prints_a_kernel_at_each_stage(stage, target, pattern):
    assert re.search(pattern, run("show", "kda.decode", *SMALL, "--stage", stage, "--target", target).stdout)


def test_a_warning_is_one_line_without_the_place_that_gave_it(tmp_path):
    (tmp_path / "pack.json").write_text("{")
    at = ("cache", "why", "softmax", "--dims", "R=4,N=64", "--gpu", "cpu")
    done = process(*at, K3DSL_PACK=str(tmp_path / "pack.json"), K3DSL_CACHE_DIR=str(tmp_path))
    (line,) = [text for text in done.stderr.splitlines() if "pack.json" in text]
    assert line.startswith("warning: ")
    assert ".py" not in done.stderr


def test_a_slip_in_a_schedule_is_one_on_the_cpu_too():
    at = ("run", "softmax", "--dims", "R=4,N=64", "--set")
    assert "unknown schedule field 'num_wraps'" in run(*at, "softmax.num_wraps=2", status=1).stdout
    run(*at, "softmax.num_warps=2")
    run(*at, "softmax.threads=64")  # a field of the other backend


def test_show_has_the_text_of_what_does_not_fit():
    wide = ("--target", "sm_120a", "--set", "block_h=64", "--dims", "B=4,H=64,S=512")
    assert "tl.dot" in run("show", "mla.decode", "--stage", "triton", "--kernel", "mla_decode", *wide).stdout
    result = run("show", "mla.decode", "--stage", "ptx", "--kernel", "mla_decode", *wide, status=1)
    assert "bytes of shared memory per program, and sm_120a has 101376" in result.stderr


@pytest.mark.parametrize("op", ["kda.decode", "kda.forward", "kda.step"])
def test_explain_refuses_widths_that_a_call_refuses(op):
    assert "K = 96, supported are 64, 128" in run("explain", op, "--dims", "K=96", status=1).stdout


def test_show_has_the_depth_that_compile_builds(tmp_path):
    def depth(text: str) -> list[str]:
        return re.findall(r"num_stages=(\d)", text)

    show = ("show", "mla.prefill", "--stage", "triton", "--kernel", "mla_prefill")
    run("compile", "mla.prefill", "--target", "sm_86", "--output", str(tmp_path / "bundle"))
    built = depth((tmp_path / "bundle" / "mla_prefill.py").read_text())
    assert depth(run(*show, "--target", "sm_86").stdout) == built < depth(run(*show, "--target", "sm_90a").stdout)


def test_show_prints_all_kernels_or_the_one_that_is_named():
    settings = ("--dims", "H=1", "--set", "factors=bf16")
    both = run("show", "kda.forward", *settings).stdout
    assert both.count("# kernel ") == 2
    one = run("show", "kda.forward", *settings, "--kernel", "scan").stdout
    assert one.startswith("kernel scan\n")
    assert one in both
    assert "dim T" in one
    assert "dim T" not in run("show", "kda.forward", *settings, "--kernel", "scan", "--static").stdout
    result = run("show", "kda.forward", *settings, "--kernel", "rescan", status=2)
    assert "kda.forward does not use kernel rescan with these settings" in result.stderr


def test_compile_writes_a_bundle_and_prints_a_table(tmp_path):
    shown = run("compile", "kda.forward", "--dims", "H=1", "--target", "sm_90a", "-o", str(tmp_path / "b")).stdout
    for word in ("shared memory", "registers", "spilled", "warps", "prep", "scan", "wgmma"):
        assert word in shown
    assert "note: prep: some of its dots are mma.sync instead of wgmma" in shown
    assert k3dsl.load(tmp_path / "b").op == "kda.forward"


def test_compile_prints_json_alone_and_names_the_folder_after_op_and_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = json.loads(run("compile", "kda.decode", *SMALL, "--target", "gfx942", "--static", "--json").stdout)
    assert summary["folder"] == "kda.decode-gfx942"
    assert summary["launches"][0]["label"] == "decode"
    assert summary["launches"][0]["shared_bytes"] <= 65536
    bundle = k3dsl.load(tmp_path / "kda.decode-gfx942")
    assert bundle.facts == {}
    assert bundle.metadata["dims"]["static"]["B"] == 3
    (tmp_path / "kda.decode-gfx942" / "mine").write_text("")
    again = run("compile", "kda.decode", *SMALL, "--target", "gfx942", status=2)
    assert "is a bundle with other files in it (mine)" in again.stderr


def test_explain_gives_every_reason_or_says_that_all_is_fine():
    shown = run("explain", "kda.decode", *SMALL).stdout
    assert "fine: nothing refuses these settings" in shown
    wrong = ("--dims", "H=1", "--set", "dtype=f16", "--set", "factors=bf16", "--set", "prep.stages.no=2")
    result = run("explain", "kda.forward", *wrong, status=1)
    assert "refused (constraint): fp16 inputs need fp16 factors" in result.stdout
    assert "refused (unknown_label): prep: stages name the loop 'no'" in result.stdout
    deep = ("--dims", "H=1", "--set", "prep.stages.no=2", "--set", "scan.stages.chunks=16")
    result = run("explain", "kda.forward", *deep, status=1)
    assert "refused (unknown_label): prep: stages name the loop 'no'" in result.stdout
    assert "refused (resources): scan: needs" in result.stdout
    found = json.loads(run("explain", "kda.forward", *wrong, "--json", status=1).stdout)
    assert found["fine"] is False
    assert [r["code"] for r in found["reasons"]] == ["constraint", "unknown_label"]


def test_run_judges_an_op_and_writes_the_results(tmp_path):
    path = tmp_path / "results.json"
    shown = run("run", "kda.decode", *SMALL, "--backend", "torch", "--output", str(path)).stdout
    assert "1 of 1 cases pass; 2 calls each, compared bit for bit" in shown
    report = json.loads(path.read_text())
    assert report["passed"] == 1
    (case,) = report["cases"]
    assert set(case["errors"]) == {"o", "state"}
    assert all(case["errors"][n] <= case["limits"][n] for n in case["errors"])
    same = json.loads(run("run", "kda.decode", *SMALL, "--backend", "torch", "--json").stdout)
    assert same["cases"][0]["errors"] == case["errors"]


def test_run_fails_where_a_case_fails(monkeypatch):
    op = get_op("kda.decode")
    real = op.call

    def wrong(**kwargs):
        out = real(**kwargs)
        return {"o": out["o"] * 1.5, "state": out["state"]}

    monkeypatch.setitem(vars(op), "call", wrong)
    result = run("run", "kda.decode", *SMALL, "--backend", "torch", status=1)
    assert re.search(r"FAILED .*: o: error 5\.00e-01 is above 5\.0e-03", result.stdout)
    assert "0 of 1 cases pass" in result.stdout


@pytest.mark.usefixtures("no_gpu")
def test_bench_times_an_op_and_says_what_the_time_is_worth():
    shown = run("bench", "kda.decode", *SMALL, "--rep-ms", "1", "--set", "block_v=8").stdout
    assert "time.perf_counter" in shown
    assert "its time says nothing about a GPU" in shown
    result = json.loads(run("bench", "kda.decode", *SMALL, "--rep-ms", "1", "--set", "block_v=8", "--json").stdout)
    assert result["knobs"] == {"block_v": 8}
    assert result["dims"]["slots"] == 4
    assert result["timing"]["median_ms"] > 0


@pytest.mark.usefixtures("no_gpu")
def test_bench_shows_a_cuda_graph_in_a_row_of_its_own_and_compares_peers_by_calls(monkeypatch):
    def timed(ms):
        return Timing(ms, ms, ms, "a GPU timer")

    peer = timing.PeerTime("fla", timed(0.2), {"o": 1e-3})
    made = timing.BenchResult(
        "kda.decode", "a GPU", {"B": 3}, {}, timed(0.4), (peer,), (), 4000.0, graph=timed(0.1), host_us=37.4
    )
    monkeypatch.setattr(timing, "bench", lambda *_, **__: made)
    shown = " ".join(run("bench", "kda.decode").stdout.split())
    assert "kda.decode, CUDA graph" in shown
    assert "the host enqueues a call in 37 us" in shown
    assert "compared with the row above" in shown
    result = json.loads(run("bench", "kda.decode", "--json").stdout)
    assert result["graph"]["median_ms"] == 0.1
    assert result["host_us"] == 37.4
    assert result["peers"][0]["ratio"] == 2.0
    assert made.on_device.median_ms == 0.1
    assert timing.measure_graph(lambda: None, "cpu") is None
    assert timing.host_us(lambda: None, "cpu") is None


@pytest.mark.usefixtures("no_gpu")
def test_doctor_says_what_there_is_and_what_will_work(monkeypatch, tmp_path):
    monkeypatch.setenv("K3DSL_CACH_DIR", "/tmp")
    monkeypatch.setenv("K3DSL_BACKEND", "tritn")
    shown = run("doctor").stdout
    assert "K3DSL_CACH_DIR is set, but k3dsl reads no such variable; did you mean K3DSL_CACHE_DIR?" in shown
    found = json.loads(run("doctor", "--json").stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert found["gpu"] is None
    settings = {s["name"]: s for s in found["settings"]}
    assert settings["K3DSL_BACKEND"]["value"].startswith("wrong: ")
    works = [w["works"] for w in found["works"]]
    assert works[:3] + works[-1:] == [True, True, False, False]


def test_demo_compiles_runs_and_says_what_comes_next():
    shown = run("demo", "--fast").stdout
    assert "kda.forward: scan" in shown
    assert "prefill of 128 bytes: o" in shown
    assert "decoded state against the long prefill's" in shown
    assert "FAIL" not in shown
    assert "k3dsl run kda.forward --cases whole" in shown
    assert "winner: block_k=" in shown
    assert "the same weights, plain torch" in shown
    assert "it writes: 'The " in shown


def test_a_place_for_the_results_is_looked_at_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of hours must not end where nothing can be written."""
    monkeypatch.setattr(judge, "judge", lambda *_, **__: pytest.fail("it began"))
    (tmp_path / "file").write_text("")
    for place in ("/proc/x/report.json", str(tmp_path), str(tmp_path / "file" / "report.json")):
        result = CliRunner().invoke(app, ["run", "rmsnorm", "--output", place])
        assert result.exit_code == 2
        assert re.search(r"cannot be written|is a folder", result.output + result.stderr)


@pytest.mark.usefixtures("no_gpu")
def test_explain_builds_nothing_of_what_the_op_itself_refuses():
    shown = run("explain", "causal_conv1d.update", "--dims", "P=7,W=3,T=100", status=1).stdout
    assert "refused (constraint): T = 100 tokens, needs 1 to 16; use causal_conv1d for more" in shown
    assert "what builds" not in shown


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("op", "dims", "says"),
    [
        ("kda.forward", "V=100", "V = 100, needs a multiple of 16 up to 256: pad it with zeros"),
        ("kda.decode", "V=1", "V = 1, needs a multiple of 16 up to 256"),
        ("gated_delta_rule", "V=100", "V = 100, needs a multiple of 16"),
        ("delta_rule.decode", "K=100", "K = 100, needs a multiple of 16"),
        ("linear_attention", "K=7,V=5", "K = 7, needs a multiple of 16"),
        ("attention", "D=100,H=3", "D = 100, needs a multiple of 16 up to 256"),
        ("attention", "T=5,S=3", "S = 3 keys for T = 5 queries: a causal mask needs as many"),
        ("attention.decode", "D=512", "D = 512, needs a multiple of 16 up to 256"),
        ("mla.prefill", "D=100,E=20,V=60", "E = 20, needs a multiple of 16 up to 256"),
        ("mla.decode", "C=500,E=60", "C = 500, needs a multiple of 16 up to 512"),
        ("mla.decode", "page=3", "page = 3 tokens, needs a multiple of 16"),
        ("mla.cache_write", "C=7,E=3,page=5", "C = 7, needs a multiple of 16 up to 512"),
        ("kda.step", "W=5", "W = 5 taps, supported are 2, 3, 4"),
        ("gated_rmsnorm", "D=20000", "D = 20000, needs 1 to 16384"),
    ],
)
def test_explain_refuses_what_a_call_refuses(op, dims, says):
    """By the dim, not by the knob that the op's rule chose for it."""
    shown = run("explain", op, "--dims", dims, "--static", status=1).stdout
    assert f"refused (constraint): {says}" in " ".join(shown.split())


@pytest.mark.usefixtures("no_gpu")
def test_a_choice_that_is_called_none_can_be_given():
    assert "1 of 1" in run("run", "kda.decode", "--dims", "B=1,H=1,slots=1", "--set", "gate=none").stdout
