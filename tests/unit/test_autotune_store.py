"""The winner store: one file an entry, whole or not at all; what cannot be read is a miss with one warning."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from winner_examples import winner

from k3dsl.autotune import store
from k3dsl.autotune.store import Winner, region_of, winner_from
from k3dsl.autotune.trial import Candidate, End, Outcome
from k3dsl.errors import ArgumentError, CacheWarning
from k3dsl.ops.registry import get_op


@pytest.fixture(autouse=True)
def empty_store(tmp_path, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(store, "_warned", set())


def test_a_winner_comes_back_as_it_was_put():
    kept = winner({"block_m": 64})
    path = store.put(kept)
    assert path.parent == store.folder("matmul")
    assert store.entries() == store.entries("matmul") == [kept]
    assert store.entries("softmax") == []


def test_other_settings_for_one_problem_are_kept_beside_each_other_best_evidence_first():
    fast, proven = (
        winner({"block_m": 64}, time_ms=1.0, gate="quick"),
        winner({"block_m": 128}, time_ms=2.0, gate="ship"),
    )
    store.put(fast)
    store.put(proven)
    assert store.entries("matmul") == [proven, fast]
    assert store.clear("matmul") == 2
    assert store.entries() == []


def test_the_same_settings_again_replace_the_entry():
    store.put(winner(time_ms=2.0))
    store.put(winner(time_ms=1.0))
    assert [w.time_ms for w in store.entries()] == [1.0]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "\x00\xff", '{"key": {}}', "[" * 100_000, "cut", "schema", "nan", "renamed op"],
)
def test_a_file_that_cannot_be_used_is_a_miss_with_one_warning(text):
    good = winner({"block_m": 64})
    path = store.put(good).with_name("bad.json")
    whole = json.dumps(good.to_json())
    made = {
        "cut": whole[: len(whole) // 2],
        "schema": whole.replace('"schema": 1', '"schema": 99'),
        "nan": whole.replace('"time_ms": 1.0', '"time_ms": NaN'),
        "renamed op": whole.replace('"op": "matmul"', '"op": "softmax"'),
    }
    path.write_bytes(made.get(text, text).encode("latin-1"))
    with pytest.warns(CacheWarning, match=r"bad\.json"):
        assert store.entries("matmul") == [good]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.entries("matmul") == [good]


def test_nothing_but_whole_entries_lies_in_the_folder():
    store.put(winner())
    assert [p.suffix for p in store.folder("matmul").iterdir()] == [".json"]


def _put(number: int) -> None:
    store.put(winner({"block_m": (64, 128)[number % 2]}, dims={"M": 512 + number, "N": 256, "K": 128}))


def test_several_processes_that_write_at_once_lose_nothing():
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        list(pool.map(_put, range(24)))
    assert {w.key.dims["M"] for w in store.entries("matmul")} == set(range(512, 536))


def test_the_region_is_the_own_bucket_of_a_runtime_dim_and_its_neighbours():
    region = region_of(get_op("kda.decode"), {"B": 64, "H": 96, "slots": 0})
    assert region == {"B": (17, 128), "H": (96, 96), "slots": (0, 0)}


def test_a_trial_that_is_not_ok_cannot_win():
    candidate = Candidate("matmul", {}, {}, {}, "triton")
    with pytest.raises(ArgumentError, match="wrong"):
        winner_from(candidate, Outcome(End.WRONG, time_ms=1.0, gate="full"), {}, {}, 1)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_setting(tmp_path):
    (tmp_path / "winners").write_text("a file")
    with pytest.raises(ArgumentError, match="K3DSL_CACHE_DIR"):
        store.put(winner())


def test_json_keeps_everything():
    kept = winner({"block_m": 64})
    assert Winner.from_json(json.loads(json.dumps(kept.to_json()))) == kept
