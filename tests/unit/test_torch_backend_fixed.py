"""Launches that take from a tape what is the same in all of them: the same bits, and the same strictness, every time."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from k3dsl.backends.torch import fixed
from k3dsl.backends.torch.evaluate import LAYOUTS, Evaluator
from k3dsl.errors import ArgumentError, EvaluationError
from k3dsl.ir.symbols import Sym
from k3dsl.language import In, InOut, Out, assume, cdiv, f32, i32, kernel, loop, program_id, scalar, span, when, zeros

LAUNCHES = range(5)


@kernel(grid=lambda d, c: (cdiv(d.T, 8),))
def scaled_rows(d, c, x=In("T D", f32), factor=In("T", f32), y=Out("T D", f32)):
    rows = span(program_id(0) * 8, 8, end=d.T)
    y[rows, :] = x[rows, :] * factor[rows][:, None]


@kernel(grid=lambda d, c: (d.B,))
def gathered(d, c, x=In("S D", f32), slots=In("B", i32), y=Out("B D", f32)):
    slot = slots[program_id(0)]

    @when(slot >= 0)
    def _():
        y[program_id(0), :] = x[assume(slot, min=0), :]

    @when(slot < 0)
    def _():
        y[program_id(0), :] = zeros((d.D,), f32)


@kernel(grid=lambda d, c: (d.B,))
def scattered(d, c, x=In("B D", f32), slots=In("B", i32), pool=InOut("S D", f32)):
    slot = slots[program_id(0)]
    pool[slot, :] = pool[slot, :] + x[program_id(0), :]


@kernel(grid=lambda d, c: (d.B,))
def prefix_sums(d, c, x=In("B T", f32), lengths=In("B", i32), y=Out("B T", f32)):
    """The first `length` prefix sums of each row; the length comes from memory."""
    row = program_id(0)

    @loop(lengths[row], init=scalar(0.0), label="t")
    def total(t, acc):
        acc = acc + x[row, t]
        y[row, t] = acc
        return acc


@kernel(grid=lambda d, c: (2,))
def twice(d, c, where=In("2", i32), y=Out("S", f32)):
    y[where[program_id(0)]] = scalar(1.0)


def made(k, dims, **settings):
    return Evaluator(k.trace(dims, {}), **settings)


def test_every_launch_gives_the_same_and_reads_the_new_data():
    run = made(scaled_rows, {"T": Sym("T"), "D": 4})
    for n in LAUNCHES:
        for T in (16, 13):
            x, factor = torch.randn(T, 4), torch.randn(T)
            y = torch.full((T, 4), torch.nan)
            run({"x": x, "factor": factor, "y": y})
            assert torch.equal(y, x * factor[:, None]), n


def test_slots_that_change_and_come_back():
    """Contents that repeat, an outcome of the condition that is new, programs of either branch."""
    run = made(gathered, {"B": 3, "D": 4, "S": 6})
    for slots in (
        [0, 1, 2],
        [0, 1, 2],
        [0, 1, 2],
        [5, -1, 3],
        [0, 1, 2],
        [5, -1, 3],
        [5, -1, 3],
        [-1, -1, -1],
        [4, 4, 4],
    ):
        x, y = torch.randn(6, 4), torch.full((3, 4), torch.nan)
        run({"x": x, "slots": torch.tensor(slots, dtype=torch.int32), "y": y})
        want = torch.stack([x[s] if s >= 0 else torch.zeros(4) for s in slots])
        assert torch.equal(y, want), slots


@pytest.mark.parametrize("lengths", [[5, 5], [3, 5], [0, 2], [0, 0]])
def test_trip_counts_from_memory(lengths):
    run = made(prefix_sums, {"B": 2, "T": 5})
    for other in ([2, 2], [4, 1], [2, 2], lengths, lengths, lengths, [4, 1]):
        x, y = torch.randn(2, 5), torch.full((2, 5), torch.nan)
        run({"x": x, "lengths": torch.tensor(other, dtype=torch.int32), "y": y})
        for row, n in enumerate(other):
            torch.testing.assert_close(y[row, :n], x[row, :n].cumsum(0))
            assert y[row, n:].isnan().all()  # what is not written stays what it was


def test_an_index_out_of_bounds_is_found_in_any_launch():
    run = made(gathered, {"B": 3, "D": 4, "S": 6})
    good, bad = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 6, 2], dtype=torch.int32)
    for n in LAUNCHES:
        for _ in range(n):
            run({"x": torch.randn(6, 4), "slots": good, "y": torch.empty(3, 4)})
        with pytest.raises(EvaluationError, match="out of bounds: index 6"):
            run({"x": torch.randn(6, 4), "slots": bad, "y": torch.empty(3, 4)})


def test_two_writers_are_found_in_any_launch():
    run = made(twice, {"S": 4})
    for n in LAUNCHES:
        for _ in range(n):
            run({"where": torch.tensor([0, 3], dtype=torch.int32), "y": torch.empty(4)})
        for _ in range(3):
            with pytest.raises(EvaluationError, match=r"both write y\[2\]"):
                run({"where": torch.tensor([2, 2], dtype=torch.int32), "y": torch.empty(4)})


def test_state_in_place_goes_on_and_its_conflicts_are_found():
    run = made(scattered, {"B": 2, "D": 4, "S": 3})
    pool, want = torch.zeros(3, 4), torch.zeros(3, 4)
    for slots in ([0, 2], [0, 2], [0, 2], [2, 1], [0, 2]):
        x = torch.randn(2, 4)
        run({"x": x, "slots": torch.tensor(slots, dtype=torch.int32), "pool": pool})
        want[slots] += x
        torch.testing.assert_close(pool, want)
    for _ in range(3):
        with pytest.raises(EvaluationError, match=r"pool\[1, 0\]"):
            run({"x": torch.randn(2, 4), "slots": torch.tensor([1, 1], dtype=torch.int32), "pool": pool.clone()})


def test_a_layout_that_is_new_is_checked_in_full():
    """After many launches: another shape, dtype or stride, and an output that shares the input's memory."""
    run = made(scaled_rows, {"T": 16, "D": 4})
    x, factor, y = torch.randn(16, 4), torch.randn(16), torch.empty(16, 4)
    for _ in LAUNCHES:
        run({"x": x, "factor": factor, "y": y})
    for wrong in (
        {"x": torch.randn(15, 4), "factor": factor, "y": y},
        {"x": x.double(), "factor": factor, "y": y},
        {"x": x, "factor": factor, "y": torch.empty(1, 4).expand(16, 4)},
        {"x": x, "factor": factor},
    ):
        with pytest.raises(ArgumentError):
            run(wrong)
    for _ in LAUNCHES:
        shared = x.clone()
        run({"x": shared, "factor": factor, "y": shared})
        assert torch.equal(shared, x * factor[:, None])


def test_slabs_have_their_own_tapes():
    run = made(scaled_rows, {"T": Sym("T"), "D": 4}, slab_bytes=600)
    assert run.programs_per_slab < 8
    for _ in LAUNCHES:
        x, factor, y = torch.randn(61, 4), torch.randn(61), torch.full((61, 4), torch.nan)
        run({"x": x, "factor": factor, "y": y})
        assert torch.equal(y, x * factor[:, None])


def test_a_tape_that_would_be_too_long_is_done_without(monkeypatch):
    monkeypatch.setattr(fixed, "MAX_ITEMS", 3)
    run = made(scaled_rows, {"T": Sym("T"), "D": 4})
    for _ in LAUNCHES:
        x, factor, y = torch.randn(13, 4), torch.randn(13), torch.full((13, 4), torch.nan)
        run({"x": x, "factor": factor, "y": y})
        assert torch.equal(y, x * factor[:, None])
    assert all(layout.tapes is None for layout in run._layouts.values())


def test_no_tensor_of_a_launch_is_kept_alive_and_layouts_are_bounded():
    run = made(scaled_rows, {"T": Sym("T"), "D": 4})
    held = []
    for n in range(1, LAYOUTS + 10):
        for _ in range(3):
            x, factor, y = torch.randn(n, 4), torch.randn(n), torch.empty(n, 4)
            run({"x": x, "factor": factor, "y": y})
            held += [weakref.ref(t) for t in (x, factor, y)]
    del x, factor, y
    gc.collect()
    assert all(ref() is None for ref in held)
    assert len(run._layouts) == LAYOUTS
