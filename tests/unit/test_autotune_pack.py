"""Packs: text that can be compared, a merge that keeps the better evidence, a check that names what broke."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner
from winner_examples import H100, H200, winner

from k3dsl.autotune import pack, store
from k3dsl.cli.main import app
from k3dsl.errors import PackError
from k3dsl.ops.registry import get_op, op_names


@pytest.mark.parametrize("name", [n for n in op_names() if get_op(n).inputs is not None])
def test_a_fresh_winner_of_every_op_holds(name):
    """Also of an op whose dims follow from others where they are left open, as attention's keys from its queries."""
    assert pack.check(winner(op=name, dims={}), toolchain=False) == []


def test_the_text_depends_on_the_winners_alone():
    a, b, c = winner(), winner(gpu=H100), winner(op="softmax", dims={"R": 64, "N": 128})
    assert pack.build([a, b, c]).text() == pack.build([c, a, b, a]).text()


def test_a_pack_comes_back_from_its_file(tmp_path):
    built = pack.build([winner(), winner(gpu=H100)])
    pack.save(built, tmp_path / "new" / "pack.json")
    assert pack.load(tmp_path / "new" / "pack.json") == built


def test_one_row_a_problem_the_best_evidence_before_the_best_time():
    quick, full = winner({"block_m": 64}, time_ms=1.0, gate="quick"), winner({"block_m": 128}, time_ms=2.0, gate="full")
    more = winner({"block_m": 128}, time_ms=3.0, gate="full", repeats=100)
    assert pack.build([quick, full]).rows == (full,)
    assert pack.build([full, more]).rows == (more,)


def test_merge_says_what_it_did():
    quick, full = winner({"block_m": 64}, gate="quick"), winner({"block_m": 128}, time_ms=2.0)
    other = winner(gpu=H100)
    merged, lines = pack.merge([pack.build([quick, other]), pack.build([full])])
    assert list(merged.rows) == [other, full]
    assert any("kept gate full, 30 repeats, 2 ms over gate quick, 30 repeats, 1 ms" in line for line in lines)
    assert any(line.endswith("added") and H100["name"] in line for line in lines)


def test_merge_in_any_order_gives_the_same_pack():
    a, b = pack.build([winner({"block_m": 64})]), pack.build([winner({"block_m": 128}, time_ms=0.5)])
    assert pack.merge([a, b])[0].text() == pack.merge([b, a])[0].text()


def test_diff_names_rows_and_fields():
    old = pack.build([winner({"block_m": 64}), winner(gpu=H100)])
    new = pack.build([winner({"block_m": 128}, time_ms=0.5), winner(op="softmax", dims={"R": 64, "N": 128})])
    lines = pack.diff(old, new)
    assert [line[0] for line in lines] == ["-", "~", "+"]
    assert "block_m 64 -> 128" in lines[1]
    assert "ms 1.0 -> 0.5" in lines[1]
    assert pack.diff(old, old) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no JSON"),
        ("[]", "no pack"),
        ('{"format": "k3dsl-pack", "schema": 7, "rows": []}', "schema 7"),
        ('{"format": "k3dsl-pack", "schema": 1}', "no rows"),
        ('{"format": "k3dsl-pack", "schema": 1, "rows": [{}]}', "row 1"),
    ],
)
def test_a_file_that_is_no_pack_is_a_clear_error(tmp_path, text, says):
    (tmp_path / "pack.json").write_text(text)
    with pytest.raises(PackError, match=says):
        pack.load(tmp_path / "pack.json")


def test_a_pack_that_was_cut_anywhere_is_a_clear_error(tmp_path):
    text = pack.build([winner({"block_m": 64}), winner(gpu=H100)]).text()
    for end in range(0, len(text) - 2, 97):
        (tmp_path / "pack.json").write_text(text[:end])
        with pytest.raises(PackError, match=r"pack\.json"):
            pack.load(tmp_path / "pack.json")


def test_a_row_of_the_future_is_named(tmp_path):
    data = json.loads(pack.build([winner(), winner(gpu=H100)]).text())
    data["rows"][1]["key"]["schema"] = 2
    (tmp_path / "pack.json").write_text(json.dumps(data))
    with pytest.raises(PackError, match="row 2: schema 2"):
        pack.load(tmp_path / "pack.json")


def test_verify_passes_what_the_present_code_makes():
    assert pack.verify(pack.build([winner({"block_m": 64}), winner(gpu=H100)]), here=True) == []


def test_verify_names_what_broke():
    row = winner({"block_m": 64})
    key = row.key
    broken = {
        "its kernel changed": replace(row, key=replace(key, ir={"matmul": "0" * 64})),
        "unknown target": replace(row, key=replace(key, gpu={**H200, "sm": "sm_1"})),
        "its dims are not": replace(row, key=replace(key, dims={}), region={}),
        "unknown op": replace(row, key=replace(key, op="no.such")),
        "unknown knob": replace(row, settings={"no_such": 1}),
        "num_warps": replace(row, settings={"matmul.num_warps": 3}),
        "tuned with triton 0.1": replace(row, key=replace(key, toolchain={**key.toolchain, "triton": "0.1"})),
    }
    for says, bad in broken.items():
        problems = pack.verify(pack.Pack((bad,)), here=True)
        assert any(says in problem for problem in problems), (says, problems)
        assert all(problem.startswith(pack.title(bad)) for problem in problems)


def test_a_key_whose_toolchain_is_not_that_of_its_launches_is_told_wherever_it_is_verified():
    """It could never be picked up: what a launch goes through is what a lookup compares."""
    row = winner({"block_m": 64})
    more = replace(row, key=replace(row.key, toolchain={**row.key.toolchain, "tilelang": "0.1.15"}))
    (problem,) = pack.verify(pack.Pack((more,)))
    assert problem.endswith("its key names tilelang, which no launch of it goes through now: tune it again")
    less = replace(row, key=replace(row.key, toolchain={"k3dsl": row.key.toolchain["k3dsl"]}))
    (problem,) = pack.verify(pack.Pack((less,)))
    assert "its key does not name ptxas, triton, which launches of it go through now" in problem


def test_a_row_is_named_with_the_options_that_are_not_usual_and_the_backends_of_its_launches():
    pytest.importorskip("tilelang")
    mixed = {"scan.backend": "tilelang", "segments": 1}
    row = winner(mixed, op="kda.forward", dims={"T": 256, "H": 2}, options={"v_first": True, "scale": 0.5})
    assert row.unusual == {"v_first": True}
    assert row.backends == ["tilelang", "triton"]
    assert pack.title(row).endswith(" v_first=true through tilelang + triton on NVIDIA H200")


def test_the_commands(tmp_path, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))
    run = lambda *words: CliRunner().invoke(app, list(words))  # noqa: E731
    first, second = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert "no winner" in run("pack", "build", "-o", first).output
    store.put(winner({"block_m": 64}))
    assert run("pack", "build", "-o", first, "--gpu", "H200").exit_code == 0
    assert "block_m=64" in run("pack", "show", first).output
    assert run("pack", "verify", first).exit_code == 0
    assert run("pack", "diff", first, first).exit_code == 0
    store.put(winner({"block_m": 128}, time_ms=0.1))
    assert run("pack", "build", "-o", second).exit_code == 0
    assert run("pack", "diff", first, second).exit_code == 1
    assert "kept" in run("pack", "merge", first, second, "-o", first).output
    assert json.loads((tmp_path / "a.json").read_text())["rows"][0]["settings"] == {"block_m": 128}
    assert json.loads(run("cache", "list", "--json").output)[0]["key"]["op"] == "matmul"
    at = ("--dims", "M=512,N=256,K=128", "--gpu")
    assert "exact" in run("cache", "why", "matmul", *at, "H200").output
    why = run("cache", "why", "matmul", *at, "B200").output
    assert "default" in why
    assert "gpu.sm: wanted sm_100a, the nearest entry has sm_90a" in why
    assert "2 files" in run("cache", "clear", "matmul").output
