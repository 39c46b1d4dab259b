"""The torch backend as a judge: programs of one launch that touch the same element."""

from __future__ import annotations

import pytest
import torch
from evaluation import poisoned, run

from k3dsl.errors import EvaluationError
from k3dsl.language import In, InOut, Out, arange, f32, i32, kernel, loop, program_id, span, where


def raises(k, tensors, **options):
    with pytest.raises(EvaluationError) as error:
        run(k, tensors, **options)
    return str(error.value)


@kernel(grid=lambda d, c: (2, 2))
def overlapping(d, c, y=Out("2 9")):
    y[program_id(0), span(program_id(1) * 4, 5)] = 1.0


@pytest.mark.parametrize("slab_bytes", [1, 2**28])
def test_two_programs_that_write_one_element_are_an_error(slab_bytes):
    text = raises(overlapping, {"y": poisoned(2, 9)}, slab_bytes=slab_bytes)
    assert "test_torch_backend_races.py:" in text
    assert "both write y[0, 4]" in text
    assert "program (0, 1)" in text
    assert "program (0, 0)" in text
    assert "fix: give each element one writer, or use atomic_add" in text


def test_without_the_check_the_later_one_wins_silently():
    y = poisoned(2, 9)
    run(overlapping, {"y": y}, check=False)
    assert torch.equal(y, torch.ones(2, 9))


def test_all_programs_writing_the_same_place_is_an_error_even_with_the_same_value():
    @kernel(grid=lambda d, c: (3,))
    def same(d, c, y=Out("4")):
        y[:] = 1.0

    assert "both write y[0]" in raises(same, {"y": poisoned(4)})


def test_a_program_may_overwrite_its_own_elements():
    @kernel(grid=lambda d, c: (3,))
    def again(d, c, y=Out("3 4"), z=Out("3 4")):
        @loop(4)
        def _(i):
            y[program_id(0), :] = i.to(f32)
            z[program_id(0), span(i, 2, end=4)] = i.to(f32)

    y, z = poisoned(3, 4), poisoned(3, 4)
    run(again, {"y": y, "z": z})
    assert y.tolist() == [[3.0] * 4] * 3
    assert z.tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3


@pytest.mark.parametrize("masked", [False, True])
def test_one_store_that_writes_an_element_twice_is_an_error(masked):
    @kernel(grid=lambda d, c: (2,))
    def scatter(d, c, index=In("2 4", i32), y=Out("2 9")):
        k = index[program_id(0), :]
        y.store(program_id(0), k, value=1.0, mask=k >= 0 if masked else None)

    index = torch.tensor([[0, 1, 2, 3], [8, 5, 7, 5]], dtype=torch.int32)
    if masked:
        index[0, 1:3] = -1
    text = raises(scatter, {"index": index, "y": poisoned(2, 9)})
    assert "one store of program (1) writes y[1, 5] twice" in text
    assert "mask the repeats" in text


def test_repeats_that_are_masked_are_fine():
    @kernel(grid=lambda d, c: (2,))
    def scatter(d, c, index=In("2 4", i32), y=Out("9")):
        k = index[program_id(0), :]
        y.store(k, value=k.to(f32), mask=(k != 3) | (arange(4) == 0))

    y = poisoned(9)
    run(scatter, {"index": torch.tensor([[3, 3, 2, 3], [8, 5, 3, 3]], dtype=torch.int32), "y": y})
    assert y.nan_to_num(-1).tolist() == [-1, -1, 2, 3, -1, 5, -1, -1, 8]


def test_scatters_of_two_programs_that_meet_are_an_error():
    @kernel(grid=lambda d, c: (2,))
    def scatter(d, c, index=In("2 2", i32), y=Out("6 3")):
        y[index[program_id(0), :], :] = 1.0

    text = raises(scatter, {"index": torch.tensor([[0, 4], [5, 4]], dtype=torch.int32), "y": poisoned(6, 3)})
    assert "both write y[4, 0]" in text


def test_reading_what_another_program_has_written_is_an_error():
    @kernel(grid=lambda d, c: (2,))
    def shift(d, c, x=InOut("2 3")):
        i = program_id(0)
        x[i, :] = 1.0
        x[i, :] = x[1 - i, :]

    text = raises(shift, {"x": torch.zeros(2, 3)}, slab_bytes=1)
    assert "program (1) writes x[1, 0], which program (0) reads in the same launch" in text
    assert "programs run in no fixed order" in text
    text = raises(shift, {"x": torch.zeros(2, 3)})
    assert "program (0) reads x[1, 0], which program (1) writes in the same launch" in text


def test_writing_what_several_others_have_read_is_an_error():
    @kernel(grid=lambda d, c: (3,))
    def first(d, c, x=InOut("3 4"), y=Out("3 4")):
        i = program_id(0)
        y[i, :] = x[0, :]
        x[i, :] = 1.0

    text = raises(first, {"x": torch.zeros(3, 4), "y": poisoned(3, 4)})
    assert "program (0) writes x[0, 0], which several programs read in the same launch" in text


def test_many_may_read_what_nobody_writes_and_each_may_update_its_own():
    @kernel(grid=lambda d, c: (3,))
    def update(d, c, x=InOut("4 4"), y=Out("3 4")):
        i = program_id(0)
        y[i, :] = x[3, :]
        x[i, :] = x[i, :] + 1.0
        x[i, :] = x[i, :] * 2.0

    x, y = torch.arange(16.0).reshape(4, 4), poisoned(3, 4)
    run(update, {"x": x, "y": y})
    want = torch.arange(16.0).reshape(4, 4)
    assert torch.equal(y, want[3].expand(3, 4))
    assert torch.equal(x, torch.cat([(want[:3] + 1) * 2, want[3:]]))


def test_what_is_masked_is_not_touched():
    @kernel(grid=lambda d, c: (2,))
    def halves(d, c, x=InOut("8")):
        i = program_id(0)
        rows = span(i * 3, 4, end=i * 4 + 3)  # rows 0-2 and 3-6
        mine = x.load(rows)
        x.store(rows, value=mine + 10.0)
        x.load(slice(None), mask=arange(8) >= 7)

    x = torch.zeros(8)
    run(halves, {"x": x})
    assert x.tolist() == [10.0] * 7 + [0.0]


def test_reading_what_another_program_adds_to_is_an_error_and_adding_is_not():
    @kernel(grid=lambda d, c: (2,))
    def count(d, c, x=InOut("4"), y=Out("2")):
        x.atomic_add(span(0, 2), value=1.0)
        y[program_id(0)] = x[program_id(0) + d.offset]

    def case(offset):
        return {"x": torch.zeros(4), "y": poisoned(2)}, {"offset": offset}

    tensors, dims = case(2)
    run(count, tensors, dims)
    assert tensors["x"].tolist() == [2.0, 2.0, 0.0, 0.0]
    tensors, dims = case(1)
    with pytest.raises(EvaluationError, match=r"program \(0\) reads x\[1\], which several programs add to"):
        run(count, tensors, dims)


def test_an_element_that_one_program_stores_and_another_adds_to_is_an_error():
    @kernel(grid=lambda d, c: (2,))
    def mix(d, c, x=InOut("4")):
        i = program_id(0)
        x[i] = 0.0
        x.atomic_add(where(i == 0, 0, 0), value=1.0)

    assert "program (1) adds to x[0], which program (0) writes" in raises(mix, {"x": torch.zeros(4)})


def test_elements_of_a_view_are_named_by_the_views_own_index():
    @kernel(grid=lambda d, c: (2,))
    def column(d, c, y=Out("5 4")):
        y[:, program_id(0) // 2 + 1] = 1.0

    assert "both write y[0, 1]" in raises(column, {"y": poisoned(3, 8, 10)[1, ::2, ::2].T})


def test_what_is_not_written_stays_as_it_was():
    @kernel(grid=lambda d, c: (2,))
    def some(d, c, y=Out("2 6")):
        y[program_id(0), span(program_id(0), 3)] = 1.0

    y = poisoned(2, 6)
    run(some, {"y": y})
    assert y.isnan().int().tolist() == [[0, 0, 0, 1, 1, 1], [1, 0, 0, 0, 1, 1]]
