"""The report of a sweep: what it says is what the journal holds, and it is whole or not there."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from tuned_fakes import POINTS, Fake, swept
from typer.testing import CliRunner

from k3dsl.autotune import journal, plots, report, study
from k3dsl.autotune.trial import End
from k3dsl.cli.main import app
from k3dsl.errors import ArgumentError

pytest.importorskip("matplotlib")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "cache"))


def page_of(result, folder) -> str:
    return report.write_report(result.journal, folder).read_text()


def test_the_page_says_what_won_and_how_the_trials_ended(tmp_path):
    result = swept(Fake({8: End.WRONG}), floor_ms=0.5)
    page = page_of(result, tmp_path / "out")
    assert page.startswith("# kda.decode B=4 H=8")
    assert "--set block_v=128 --set decode.num_warps=16" in page
    best, default = 1 + 8 / 128 + 1 / 16, result.default_ms
    assert f"{best:.4g} ms, {default / best:.2f} times the speed of the op's default" in page
    assert f"{0.5 / best:.0%} of the roofline (floor 0.5 ms)" in page
    assert "| wrong | 5 |" in page
    assert "| ok | 20 |" in page
    assert "| triton | 25 | 20 | 1.125 | 44% |" in page
    assert page.count("| wrong | `block_v=8") == 5
    assert "said by the fake" in page
    pictures = re.findall(r"\]\((\S+\.png)\)", page)
    assert pictures == ["time.png", "backends.png", "ends.png", "importance.png"]
    for name in pictures:
        assert (tmp_path / "out" / name).read_bytes().startswith(PNG)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted([*pictures, "report.md"])


def test_what_decides_the_time_is_what_mattered(tmp_path):
    result = swept(Fake())
    shares = report.importance_of(report.load(result.journal))
    assert set(shares) == {"block_v", "decode.num_warps"}
    assert sum(shares.values()) == pytest.approx(1)
    constant = [replace(r, outcome=replace(r.outcome, time_ms=1.0 if r.settings["block_v"] < 64 else 9.0)) for r in
                report.load(result.journal).records]  # fmt: skip
    only = report.importance_of(replace(report.load(result.journal), records=tuple(constant)))
    assert only["block_v"] > 0.9


def test_best_by_backend_tells_launches_of_two_backends_apart(tmp_path):
    found = report.load(swept(Fake()).journal)
    about = {**found.about, "backends": ["triton", "tilelang"]}
    record = found.records[0]
    both = replace(record, outcome=replace(record.outcome, sources={"scan": "a", "out": "b"}))
    cases = {
        "triton": {},
        "triton + tilelang": {"scan.backend": "tilelang"},
        "tilelang": {"scan.backend": "tilelang", "out.backend": "tilelang"},
    }
    for name, settings in cases.items():
        assert replace(found, about=about).backend_of(replace(both, settings=settings)) == name


def test_an_interrupted_sweep_has_a_report_too(tmp_path):
    def interrupt(number):
        if number == 4:
            raise KeyboardInterrupt

    page = page_of(swept(Fake(on_run=interrupt)), tmp_path / "out")
    assert "the sweep has not come to its end" in page
    assert "Best trial" in page
    assert "Too few timed trials" in page


def test_a_result_of_an_earlier_run_does_not_count(tmp_path):
    result = swept(Fake(), max_trials=10)
    assert report.load(result.journal).result is not None
    record = report.load(result.journal).trials[0]
    with journal.Journal(result.journal) as file:
        file.append(replace(record, key="--set block_v=8 --set decode.num_warps=1", number=99))
    assert report.load(result.journal).result is None


def test_the_lanes_are_compared_where_there_are_some(tmp_path):
    found = report.load(swept(Fake()).journal)
    lanes = ("tpe", "tpe", "random")
    records = tuple(
        replace(r, lane=lane, outcome=replace(r.outcome, time_ms=ms))
        for r, lane, ms in zip(found.trials, lanes, (3.0, 1.0, 2.0), strict=False)
    )
    page = report.text_of(replace(found, records=records, result=None), {}, {})
    assert "TPE beat the random lane: best 1 ms of 2 trials, 2 ms of 1 at random" in page
    assert "| tpe | 2 | 2 | 1 |" in page


def test_a_page_is_not_written_over_by_half_a_report(tmp_path, monkeypatch):
    result = swept(Fake())
    before = page_of(result, tmp_path / "out")

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plots, "_save", broken)
    with pytest.raises(ArgumentError, match="No space left"):
        report.write_report(result.journal, tmp_path / "out")
    assert (tmp_path / "out" / "report.md").read_text() == before


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"op": "softmax"}'])
def test_what_is_no_study_is_an_error(tmp_path, content):
    result = swept(Fake())
    about = result.journal.with_name(study.ABOUT)
    about.unlink() if content is None else about.write_text(content)
    with pytest.raises(ArgumentError, match=r"no study"):
        report.load(result.journal)
    assert report.studies() == []


def test_the_command_lists_and_writes(tmp_path):
    result = swept(Fake())
    run = lambda *words: CliRunner().invoke(app, ["report", *words])  # noqa: E731
    name = result.journal.parent.name
    assert name in run().output
    assert json.loads(run("--json").output)[0]["trials"] == POINTS
    for known in ("kda.decode", name, str(result.journal), str(result.journal.parent)):
        done = run(known, "-o", str(tmp_path / "out"))
        assert done.exit_code == 0, done.output
        assert (tmp_path / "out" / "report.md").exists()
    assert run("kda.decode").exit_code == 2
    assert run("no.such.op", "-o", str(tmp_path / "out")).exit_code == 2


def test_without_matplotlib_it_says_what_to_install(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    with pytest.raises(ArgumentError, match="matplotlib") as caught:
        report.write_report(tmp_path, tmp_path)
    assert "k3dsl[report]" in caught.value.fix


def test_tuning_does_not_import_matplotlib():
    code = "import sys, k3dsl.autotune.report, k3dsl.autotune.sweep; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
