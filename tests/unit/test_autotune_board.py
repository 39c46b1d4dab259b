"""A study that machines share: no point is run twice, nothing is lost, and the dead block nobody."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from tuned_fakes import DIMS, POINTS, SM90, Fake, swept

from k3dsl.autotune import board as boards
from k3dsl.autotune.board import Board, shown
from k3dsl.autotune.space import Space
from k3dsl.autotune.trial import End, Outcome
from k3dsl.errors import ArgumentError
from k3dsl.ops.registry import get_op

OK = Outcome(End.OK, time_ms=1.5, gate="quick", sources={"decode": "text"})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture
def join(url):
    """Boards of one study by the taker's name."""
    made: list[Board] = []

    def make(taker: str) -> Board:
        made.append(Board(url, "study", {"op": "kda.decode", "versions": {"triton": "3.9"}}, taker))
        return made[-1]

    yield make
    for board in made:
        board.close()


def point(block: int = 32):
    space = Space(get_op("kda.decode"), DIMS, {}, SM90, ("triton",))
    settings = {"block_v": block, "decode.num_warps": 2}
    return space.text(settings), "grid", settings, space.choices(settings)


def test_a_point_that_one_has_is_not_taken_by_another(join):
    a, b = join("a"), join("b")
    assert a.claim(*point())
    assert not b.claim(*point())
    assert b.claim(*point(64))
    assert b.pending() == {point()[0]}


def test_a_result_is_heard_once_by_everybody_else(join):
    a, b = join("a"), join("b")
    a.claim(*point())
    a.post(point()[0], OK, "cuda:3")
    (news,) = b.news()
    assert (news.key, news.settings, news.outcome) == (point()[0], point()[2], OK)
    assert news.by.endswith("cuda:3")
    assert b.news() == a.news() == []
    assert not b.claim(*point())


def test_the_study_is_one_that_optuna_reads(join, url):
    a = join("a")
    a.claim(*point())
    a.post(point()[0], OK)
    a.claim(*point(64))
    a.post(point(64)[0], Outcome(End.WRONG, "case ragged: o: error 1"))
    study = optuna.load_study(study_name="study", storage=url)
    good, bad = study.trials
    assert (good.state.name, good.value, good.params["block_v"]) == ("COMPLETE", 1.5, 32)
    assert (bad.state.name, bad.user_attrs["end"]) == ("PRUNED", "wrong")
    assert json.loads(good.user_attrs["toolchain"]) == {"triton": "3.9"}
    assert study.user_attrs["about"]["op"] == "kda.decode"


def test_what_is_given_back_can_be_taken(join):
    a, b = join("a"), join("b")
    a.claim(*point())
    a.release()
    assert b.claim(*point())


def test_a_taker_that_died_begins_anew_and_others_need_not_wait_for_ever(join, monkeypatch):
    dead, b = join("a"), join("b")
    dead.claim(*point())
    dead.claim(*point(64))
    monkeypatch.setattr(dead, "_mine", {})  # it knows nothing any more
    assert not b.claim(*point())
    join("a")  # the same taker after a restart
    assert b.claim(*point())
    later = time.time() + boards.CLAIM_S + 1
    monkeypatch.setattr(boards.time, "time", lambda: later)
    assert b.pending() == set()


def test_of_two_that_take_a_point_at_once_one_has_it(join, monkeypatch):
    a, b = join("a"), join("b")
    create = b._storage.create_new_trial

    def late(*how, **more):  # b has looked, and not yet written
        assert a.claim(*point())
        return create(*how, **more)

    monkeypatch.setattr(b._storage, "create_new_trial", late)
    assert not b.claim(*point())
    assert b.pending() == {point()[0]}


def test_a_storage_that_cannot_be_used_is_an_error_without_the_password(monkeypatch):
    monkeypatch.setattr(boards, "RETRIES", 1)
    with pytest.raises(ArgumentError, match="cannot be used") as caught:
        Board("sqlite:////no/such/folder/study.db", "study", {}, "a")
    assert "no/such/folder" in str(caught.value)
    assert shown("postgresql://me:secret@host/db") == "postgresql://me@host/db"
    assert shown("study.log") == "study.log"


# ---- sweeps --------------------------------------------------------------------------------------------------------------


def test_a_sweep_goes_on_from_what_others_found(url, monkeypatch, tmp_path):
    first = swept(Fake(), storage=url, max_trials=10)
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "another machine"))
    fake = Fake()
    second = swept(fake, storage=url)
    ran = {key for key, level, *_ in fake.ran if level == "quick"}
    assert len(ran) == POINTS - 10
    assert not ran & {t.proposal.key for t in first.trials}
    assert len(second.trials) == POINTS
    assert second.winner.settings == {"block_v": 128, "decode.num_warps": 16}
    again = Fake()
    third = swept(again, storage=url)  # from its own journal and the study
    assert [level for _, level, *_ in again.ran] == []
    assert third.winner == second.winner


def test_a_journal_from_before_is_shared_when_a_sweep_joins_a_study(url, monkeypatch, tmp_path):
    swept(Fake(), max_trials=10)
    swept(Fake(), max_trials=10, storage=url)
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "another machine"))
    fake = Fake()
    swept(fake, storage=url)
    assert len([1 for _, level, *_ in fake.ran if level == "quick"]) == POINTS - 10


def test_an_interrupted_sweep_gives_back_what_it_had_taken(url, monkeypatch, tmp_path):
    def interrupt(number):
        if number == 3:
            raise KeyboardInterrupt

    assert swept(Fake(on_run=interrupt), storage=url).interrupted
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "another machine"))
    assert len(swept(Fake(), storage=url).trials) == POINTS


CHILD = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from tuned_fakes import Fake, swept
log, url, runs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
kill = lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == runs else None
result = swept(Fake(log=log, delay=0.02, on_run=kill), storage=url)
print(json.dumps({{"set": result.to_json()["set"], "keys": [t.proposal.key for t in result.trials]}}))
"""


def begin(folder: Path, name: str, url: str, runs: int = 0) -> subprocess.Popen:
    script = CHILD.format(folder=str(Path(__file__).parents[1]))
    env = {**os.environ, "K3DSL_CACHE_DIR": str(folder / name)}
    command = [sys.executable, "-c", script, str(folder / f"{name}.log"), url, str(runs)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def check_two_processes(url: str, folder: Path) -> None:
    """Two sweeps at once, one of which dies and comes back: every point is run once, and both come to the same."""
    killed = begin(folder, "a", url, runs=4)
    other = begin(folder, "b", url)
    assert killed.wait() < 0
    killed.stdout.close()
    found = [json.loads(p.communicate()[0]) for p in (begin(folder, "a", url), other)]
    logs = [line for name in "ab" for line in (folder / f"{name}.log").read_text().splitlines()]
    trials = Counter(line for line in logs if line.startswith("quick "))
    assert len(trials) == POINTS
    assert set(trials.values()) == {1}  # the run that was cut short had written nothing
    assert found[0]["set"] == found[1]["set"] == "--set block_v=128 --set decode.num_warps=16"
    assert set(found[0]["keys"]) == set(found[1]["keys"])
    assert len(found[0]["keys"]) == len(found[1]["keys"]) == POINTS
    (summary,) = optuna.get_all_study_summaries(storage=boards._open(url))
    study = optuna.load_study(study_name=summary.study_name, storage=boards._open(url))
    over = [t for t in study.trials if t.state.name in ("COMPLETE", "PRUNED")]
    assert Counter(t.user_attrs["key"] for t in over) == Counter(found[0]["keys"])
    assert len([name for name in study.user_attrs if name.startswith("winner ")]) == 2


def test_two_processes_share_a_study_and_lose_nothing(url, tmp_path):
    check_two_processes(url, tmp_path)


@pytest.mark.slow
def test_two_processes_share_a_file_and_lose_nothing(tmp_path):
    check_two_processes(str(tmp_path / "study.log"), tmp_path)


@pytest.fixture
def postgresql(tmp_path) -> Iterator[str]:
    """The URL of a PostgreSQL server of the test's own, on a socket in its folder; no port is opened."""
    found = [Path(p) for p in Path("/usr/lib/postgresql").glob("*/bin")] if Path("/usr/lib/postgresql").exists() else []
    tools = max(found, default=None, key=lambda p: p.parent.name) or (
        Path(path).resolve().parent if (path := shutil.which("initdb")) else None
    )
    if tools is None or not (tools / "initdb").exists():
        pytest.skip("no PostgreSQL server is installed (Debian: apt-get install postgresql)")
    pytest.importorskip("psycopg", reason="no driver for PostgreSQL: pip install 'k3dsl[postgresql]'")
    user: dict[str, object] = {}
    if os.getuid() == 0:  # the server refuses to run as root
        import pwd

        try:
            account = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    import tempfile

    with tempfile.TemporaryDirectory(prefix="k3dsl-pg-", dir="/tmp") as folder:  # a socket's path is short
        if user:
            os.chown(folder, user["user"], user["group"])
        data = f"{folder}/data"
        how = {"check": True, "capture_output": True, "timeout": 120, "cwd": folder, **user}
        subprocess.run([tools / "initdb", "-D", data, "-U", "k3dsl", "-A", "trust", "--no-sync"], **how)
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        control = [tools / "pg_ctl", "-D", data, "-w", "-t", "100"]
        subprocess.run(
            [*control, "-l", f"{folder}/log", "-o", options, "start"],
            **{**how, "capture_output": False, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL},
        )
        try:
            yield f"postgresql://k3dsl@/postgres?host={folder}"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **how)


@pytest.mark.slow
def test_two_processes_share_a_postgresql_database_and_lose_nothing(postgresql, tmp_path):
    check_two_processes(postgresql, tmp_path)
