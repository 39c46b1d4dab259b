"""Small accesses whose indices data decide, in launches that run as scripts: what they read and write, and what they refuse."""

from __future__ import annotations

import sys

import pytest
import torch

from k3dsl.backends.torch.evaluate import Evaluator
from k3dsl.backends.torch.memory import Memory
from k3dsl.errors import EvaluationError
from k3dsl.language import In, InOut, Out, arange, f32, i32, kernel, program_id, span

LAUNCHES = 4  # seen, recorded, made into a script, run as one


@kernel(grid=lambda d, c: (d.B,))
def segments(d, c, x=In("R D", f32), first=In("B", i32), end=In("B", i32), y=Out("B 4 8", f32), z=InOut("R D", f32)):
    """The rows of each segment, at most 4, in a tile of 8 columns, -1 where there is none; and the same rows to z."""
    p = program_id(0)
    start = first[p]
    rows, cols = span(start, 4, end=end[p]), span(0, 8, end=d.D)
    tile = x.load(rows, cols, other=-1.0)
    y[p, :, :] = tile
    z[rows, cols] = tile


@kernel(grid=lambda d, c: (d.B,))
def scattered(d, c, x=In("B 4", f32), places=In("B 4", i32), y=InOut("S", f32)):
    """x to the places that are not negative."""
    at = places[program_id(0), :]
    y.store(at, value=x[program_id(0), :], mask=at >= 0)


@kernel(grid=lambda d, c: (d.B,))
def picked(d, c, x=In("S D", f32), rows=In("B 4", i32), y=Out("B 4 D", f32), counts=Out("B", i32)):
    """Rows of x, and how many are at least 2."""
    at = rows[program_id(0), :]
    y[program_id(0), :, :] = x[at, :]
    counts[program_id(0)] = (at >= 2).to(i32).sum(0) + arange(4).sum(0) * 0


def ints(*numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def evaluator(kernel, warm, **dims) -> Evaluator:
    """An evaluator whose launches of these tensors' layout run as scripts."""
    made = Evaluator(kernel.trace(dims, {}, {}))
    for _ in range(LAUNCHES):
        made({n: t.clone() for n, t in warm.items()}, {})
    return made


def located_nowhere_else(monkeypatch) -> None:
    def refuse(*_):
        raise AssertionError("the memory located an access")

    monkeypatch.setattr(Memory, "_located", refuse)


X = torch.arange(60.0).view(10, 6)


def run_segments(run: Evaluator, first, end) -> tuple[torch.Tensor, torch.Tensor]:
    y, z = torch.full((3, 4, 8), torch.nan), torch.zeros(10, 6)
    run({"x": X, "first": ints(*first), "end": ints(*end), "y": y, "z": z}, {})
    return y, z


def segments_evaluator() -> Evaluator:
    warm = {"x": X, "first": ints(0, 3, 6), "end": ints(2, 5, 8), "y": torch.zeros(3, 4, 8), "z": torch.zeros(10, 6)}
    return evaluator(segments, warm, B=3, R=10, D=6)


@pytest.mark.parametrize(
    ("first", "end"),
    [
        ((0, 2, 4), (2, 4, 6)),
        ((8, 1, 5), (10, 3, 7)),
        ((0, 3, 4), (3, 4, 6)),
        ((0, 5, 5), (0, 5, 5)),
        ((6, 0, 2), (10, 2, 2)),
    ],
    ids=["even", "uneven places", "different lengths", "empty", "one is empty"],
)
def test_rows_of_segments_are_read_and_written(first, end, monkeypatch):
    run = segments_evaluator()
    located_nowhere_else(monkeypatch)
    y, z = run_segments(run, first, end)
    expected, written = torch.full((3, 4, 8), -1.0), torch.zeros(10, 6)
    for p, (a, b) in enumerate(zip(first, end, strict=True)):
        expected[p, : b - a, :6] = X[a:b]
        written[a:b] = X[a:b]
    assert torch.equal(y, expected)
    assert torch.equal(z, written)


def test_a_segment_past_the_end_of_the_tensor_is_refused():
    run = segments_evaluator()
    with pytest.raises(EvaluationError, match="out of bounds: index 10 along axis 0"):
        run_segments(run, (0, 2, 8), (2, 4, 11))
    assert torch.equal(run_segments(run, (0, 2, 8), (2, 4, 10))[0][2, :2, :6], X[8:])


def test_two_programs_that_write_one_row_are_refused():
    run = segments_evaluator()
    with pytest.raises(EvaluationError, match=r"program \(0\) and program \(1\) both write z\[1, 0\]"):
        run_segments(run, (0, 1, 8), (2, 3, 10))


def run_scattered(run: Evaluator, places) -> torch.Tensor:
    y = torch.zeros(9)
    run({"x": torch.arange(1.0, 9.0).view(2, 4), "places": torch.tensor(places, dtype=torch.int32), "y": y}, {})
    return y


def scattered_evaluator() -> Evaluator:
    warm = {"x": torch.ones(2, 4), "places": torch.arange(8, dtype=torch.int32).view(2, 4), "y": torch.zeros(9)}
    return evaluator(scattered, warm, B=2, S=9)


def test_a_masked_scatter_writes_what_is_not_masked(monkeypatch):
    run = scattered_evaluator()
    located_nowhere_else(monkeypatch)
    assert run_scattered(run, [[8, -1, 0, -5], [-1, 3, 2, -1]]).tolist() == [3, 0, 7, 6, 0, 0, 0, 0, 1]
    assert run_scattered(run, [[-1, -1, -1, -1], [-1, -1, -1, -1]]).tolist() == [0] * 9


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([[0, 1, 2, 9], [3, 4, 5, 6]], "out of bounds: index 9 along axis 0"),
        ([[0, 1, 1, -1], [3, 4, 5, 6]], r"one store of program \(0\) writes y\[1\] twice"),
        ([[0, 1, 2, -1], [3, 2, 5, 6]], r"both write y\[2\]"),
    ],
    ids=["out of bounds", "twice by one program", "by two programs"],
)
def test_a_scatter_that_is_wrong_is_refused(places, message):
    run = scattered_evaluator()
    with pytest.raises(EvaluationError, match=message):
        run_scattered(run, places)


def test_gathered_rows_follow_the_data(monkeypatch):
    warm = {"x": X, "rows": torch.zeros(2, 4, dtype=torch.int32), "y": torch.zeros(2, 4, 6), "counts": ints(0, 0)}
    run = evaluator(picked, warm, B=2, S=10, D=6)
    rows = torch.tensor([[9, 0, 3, 3], [1, 7, 7, 2]], dtype=torch.int32)
    y, counts = torch.zeros(2, 4, 6), ints(0, 0)
    with monkeypatch.context() as patch:
        located_nowhere_else(patch)
        run({"x": X, "rows": rows, "y": y, "counts": counts}, {})
    assert torch.equal(y, X[rows.long()])
    assert counts.tolist() == [3, 3]
    with pytest.raises(EvaluationError, match="out of bounds: index 10 along axis 0"):
        run({"x": X, "rows": rows + 1, "y": y, "counts": counts}, {})


def test_contents_that_recur_do_not_depend_on_the_memory_they_were_seen_in(monkeypatch):
    monkeypatch.setattr(sys.modules[Evaluator.__module__], "OFTEN", 2)
    rows = torch.tensor([[9, 0, 3, 3], [1, 7, 7, 2]], dtype=torch.int32)
    warm = {"x": X, "rows": rows, "y": torch.zeros(2, 4, 6), "counts": ints(0, 0)}
    run = Evaluator(picked.trace({"B": 2, "S": 10, "D": 6}, {}, {}))
    for _ in range(2 * LAUNCHES):
        run(warm, {})
    rows.zero_()  # the tensor that was seen, now with other contents
    again = torch.tensor([[9, 0, 3, 3], [1, 7, 7, 2]], dtype=torch.int32)
    for given, most in ((rows, [0, 0]), (again, [3, 3])):
        y, counts = torch.zeros(2, 4, 6), ints(0, 0)
        run({"x": X, "rows": given, "y": y, "counts": counts}, {})
        assert torch.equal(y, X[given.long()])
        assert counts.tolist() == most


def test_small_launches_leave_the_number_of_threads_as_it_was():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = scattered_evaluator()
        run_scattered(run, [[0, 1, 2, 3], [4, 5, 6, 7]])
        with pytest.raises(EvaluationError):
            run_scattered(run, [[0, 1, 2, 9], [4, 5, 6, 7]])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@kernel(grid=lambda d, c: (d.B,))
def tall(d, c, x=In("R D", f32), first=In("B", i32), end=In("B", i32), y=Out("B 2 2 D", f32)):
    """Four rows of each segment as two by two, 0 where there is none."""
    p = program_id(0)
    y[p] = x[span(first[p], 4, end=end[p]).reshape(2, 2), :]


@pytest.mark.parametrize("rows", [8, 9, 12])
@pytest.mark.parametrize("end", [(4, 8), (3, 8)])
def test_rows_in_the_shape_of_a_tile_are_all_read(rows, end):
    """Up to the tensor's last row, with all rows there and with some missing."""
    x = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
    given = {"x": x, "first": ints(0, 4), "end": ints(*end), "y": torch.full((2, 2, 2, 3), float("nan"))}
    made = evaluator(tall, given, B=2, R=rows, D=3)
    made(given, {})
    expected = torch.stack([x[0:4], x[4:8]])
    expected[0, end[0] :] = 0
    assert torch.equal(given["y"].view(2, 4, 3), expected)
