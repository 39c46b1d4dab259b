"""The text of generated Triton: what is masked, in how many bits offsets are computed, how loops and names come out."""

from __future__ import annotations

import math

import pytest
from triton_text import line_with, lines, printed

from k3dsl.language import (
    In,
    InOut,
    Out,
    Scalar,
    Sym,
    TensorSpec,
    arange,
    argmax,
    bf16,
    cdiv,
    cumsum,
    dot,
    exp2,
    f16,
    f32,
    full,
    i8,
    i32,
    i64,
    kernel,
    loop,
    maximum,
    program_id,
    reduce,
    scan,
    span,
    unit_lower_inverse,
    when,
    where,
    zeros,
)

# ---- masks -------------------------------------------------------------------------------------------------------------


@kernel(grid=lambda d, c: (cdiv(d.T, 64),))
def copy_rows(d, c, x=In("T 32", f32), o=Out("T 32", f32)):
    rows = span(program_id(0) * 64, 64, end=d.T)
    o[rows, :] = x[rows, :]


def test_rows_that_provably_end_inside_the_tensor_are_not_masked():
    assert "mask" not in printed(copy_rows, {"T": Sym("T", divisible_by=64)}).text
    assert "mask" not in printed(copy_rows, {"T": 256}).text


@pytest.mark.parametrize("T", [Sym("T"), Sym("T", divisible_by=32), 100])
def test_rows_that_may_end_inside_a_tile_are_masked(T):
    source = printed(copy_rows, {"T": T})
    end = T.name if isinstance(T, Sym) else T
    assert f"mask=rows_start + tl.arange(0, 64)[:, None] < {end}, other=0.0" in line_with(source, "tl.load")
    assert f"mask=rows_start + tl.arange(0, 64)[:, None] < {end})" in line_with(source, "tl.store")


def test_only_the_last_step_of_a_loop_may_need_a_mask_so_it_is_kept():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("T", f32), o=Out("1", f32)):
        @loop(cdiv(d.T, 16), init=zeros((16,)))
        def total(i, acc):
            return acc + x[span(i * 16, 16, end=d.T)]

        o[0] = total.sum(0)

    assert "mask" in printed(k, {"T": Sym("T")}).text
    assert "mask" not in printed(k, {"T": Sym("T", divisible_by=16)}).text


def test_a_users_mask_joins_the_masks_of_the_access():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("T", f32), o=Out("T", f32)):
        rows = span(0, 16, end=d.T)
        keep = arange(16) > 3
        o.store(rows, value=x.load(rows, mask=keep, other=2.0), mask=keep)

    source = printed(k, {"T": Sym("T")})
    assert "mask=(tl.arange(0, 16) < T) & keep, other=2.0" in line_with(source, "tl.load")
    assert "mask=(tl.arange(0, 16) < T) & keep)" in line_with(source, "tl.store")


# ---- offsets -----------------------------------------------------------------------------------------------------------


def test_small_tensors_are_addressed_in_32_bits():
    assert "int64" not in printed(copy_rows, {"T": 4096}).text


def test_beyond_2_31_elements_the_scalar_part_has_64_bits_and_the_tile_part_32():
    @kernel(grid=lambda d, c: (1000,))
    def k(d, c, x=In("1000 4096 4096", f32), o=Out("1000", f32)):
        o[program_id(0)] = x[program_id(0), span(8, 64), span(0, 64)].sum(1).sum(0)

    source = printed(k)
    assert "tl.program_id(0)" in source.text
    load = line_with(source, "tl.load")
    assert ".to(tl.int64) * 4096" in load
    offsets = line_with(source, "x_offsets =")
    assert "int64" not in offsets
    assert offsets.endswith("tl.arange(0, 64)[:, None] * 4096 + tl.arange(0, 64)[None, :]")


def test_terms_that_fit_32_bits_but_whose_sum_does_not_are_added_in_64():
    @kernel(grid=lambda d, c: (100, 100))
    def k(d, c, x=In("100 100 100", f32), o=Out("100 100", f32)):
        o[program_id(0), program_id(1)] = x[program_id(0), program_id(1), 0]

    wide = Sym("s0", max=1 << 24), Sym("s1", max=1 << 24), 1
    load = line_with(printed(k, tensors={"x": TensorSpec(f32, wide)}), "tl.load")
    assert load.count(".to(tl.int64)") == 1
    narrow = Sym("s0", max=1 << 20), Sym("s1", max=1 << 20), 1
    assert "int64" not in printed(k, tensors={"x": TensorSpec(f32, narrow)}).text


@pytest.mark.parametrize(("dtype", "casts"), [(i32, 1), (i64, 0)])
def test_a_row_number_that_was_loaded_is_multiplied_in_64_bits(dtype, casts):
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, starts=In("1", dtype), x=In("T 64 64", f32), o=Out("64", f32)):
        o[:] = x[starts[0], 3, :]

    load = line_with(printed(k, {"T": Sym("T")}), "tl.load(x")
    assert load.count(".to(tl.int64)") == casts
    assert "* 64 + 3) * 64" in load.replace(".to(tl.int64)", "")


def test_a_tile_wider_than_2_31_elements_is_addressed_in_64_bits():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("128 64 8", f32), o=Out("128", f32)):
        o[:] = x[:, :, 0].sum(1)

    def offsets(stride: int) -> str:
        strides = (Sym("s0", max=1 << 24), Sym("s1", max=stride), 1)
        return line_with(printed(k, tensors={"x": TensorSpec(f32, strides)}), "x_offsets =")

    assert "int64" not in offsets(1 << 18)  # 127 * 2^24 + 63 * 2^18 < 2^31
    assert "int64" in offsets(1 << 24)


@kernel(grid=lambda d, c: (cdiv(d.T, 32),))
def copy_blocks(d, c, x=In("T 64", f32), o=Out("T 64", f32)):
    rows = span(program_id(0) * 32, 32, end=d.T).reshape(2, 16)
    o[rows, :] = x[rows, :]


def test_of_rows_over_several_tile_axes_the_innermost_are_added_last():
    source = printed(copy_blocks, {"T": Sym("T", divisible_by=2, max=1 << 20)})
    offsets = line_with(source, "x_offsets =")
    assert offsets.endswith("= tl.arange(0, 2)[:, None, None] * 1024 + tl.arange(0, 64)[None, None, :]")
    assert line_with(source, "x_rows =").endswith("= tl.arange(0, 16)[None, :, None] * 64")
    load = line_with(source, "tl.load")
    assert "+ x_offsets + x_rows, mask=rows_start + tl.arange(0, 2)[:, None, None] * 16 + tl.arange(0, 16)" in load
    assert "+ x_offsets + x_rows, " in line_with(source, "tl.store")


@pytest.mark.parametrize(
    ("most", "outer", "inner"),
    # 16 and 15 rows of 2^26 elements are below 2^31, as are 15 but not 16 of a little less than 2^31 / 15
    [(1 << 26, False, False), ((1 << 31) // 15 - 1, True, False), (1 << 28, True, True)],
)
def test_each_part_of_rows_over_several_tile_axes_has_its_own_width(most, outer, inner):
    strides = Sym("s", max=most), 1
    source = printed(copy_blocks, {"T": Sym("T", max=32)}, tensors={"x": TensorSpec(f32, strides)})
    offsets, rows = line_with(source, "x_offsets ="), line_with(source, "x_rows =")
    assert ("tl.arange(0, 2)[:, None, None].to(tl.int64) * " in offsets) == outer
    assert ("tl.arange(0, 16)[None, :, None].to(tl.int64) * s" in rows) == inner
    assert ("int64" in offsets, "int64" in rows) == (outer, inner)


def test_neighbouring_elements_over_several_tile_axes_stay_one_term():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("8 64", f32), o=Out("8 64", f32)):
        columns = span(0, 64).reshape(4, 16)
        o[:, columns] = x[:, columns]

    text = printed(k).text
    assert "tl.arange(0, 4)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]" in text
    assert "_rows" not in text


def test_constant_indices_are_folded_into_one_number():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("5 70000 70000", f32), o=Out("1", f32)):
        o[0] = x[3, 2, 1]

    assert line_with(printed(k), "tl.load") == f"x_value = tl.load(x + {3 * 70000**2 + 2 * 70000 + 1})"


def test_gathered_rows_are_addressed_in_64_bits():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("T 64", f32), ids=In("16", i32), o=Out("16 64", f32)):
        o[:, :] = x[ids[:], :]

    assert "ids_tile[:, None].to(tl.int64) * 64" in line_with(printed(k, {"T": Sym("T")}), "tl.load(x").replace(
        "((", "("
    )


def test_runtime_dims_that_the_code_does_not_read_are_no_arguments():
    source = printed(copy_rows, {"T": Sym("T", divisible_by=64)})
    assert [a.name for a in source.args] == ["x", "o"]
    source = printed(copy_rows, {"T": Sym("T", divisible_by=2)})
    assert [(a.name, a.kind, a.dtype, a.divisible_by) for a in source.args] == [
        ("x", "pointer", "f32", 16),
        ("o", "pointer", "f32", 16),
        ("T", "dim", "i32", 2),
    ]


def test_strides_and_scalars_are_arguments_with_their_source():
    @kernel(grid=lambda d, c: (d.T,))
    def k(d, c, x=In("T 8", f32), o=Out("T 8", f32), factor=Scalar(f32)):
        o[program_id(0)] = x[program_id(0)] * factor

    source = printed(k, {"T": Sym("T")}, {"x": TensorSpec(f32, (Sym("x_stride0", 16), 1))})
    assert [(a.name, a.kind, a.source) for a in source.args[2:]] == [
        ("x_stride0", "stride", "x:0"),
        ("factor", "scalar", "factor"),
    ]
    assert source.args[2].divisible_by == 16


# ---- extents that are no power of two ----------------------------------------------------------------------------------


@kernel(grid=lambda d, c: (1,))
def reduced(d, c, x=In("96", f32), o=Out("4", f32)):
    plain = x[:]
    shifted = plain + 1.0
    o[0], o[1] = plain.sum(0), (plain * plain).sum(0)
    o[2], o[3] = shifted.sum(0), shifted.max(0)


def test_padding_lanes_are_masked_where_a_tile_is_read_and_reduced_and_not_where_they_are_known_to_be_0():
    source = printed(reduced)
    assert "mask=tl.arange(0, 128) < 96, other=0.0" in line_with(source, "tl.load")
    text = "\n".join(lines(source))
    assert "tl.sum(plain, axis=0)" in text
    assert "tl.sum(plain * plain, axis=0)" in text
    assert "tl.sum(tl.where(tl.arange(0, 128) < 96, shifted, 0.0), axis=0)" in text
    assert 'tl.reduce(tl.where(tl.arange(0, 128) < 96, shifted, -float("inf")), 0, _max)' in text


def test_padding_of_a_product_is_masked_along_the_inner_axis_only_and_stores_leave_it_out():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, a=In("24 40", f32), b=In("40 20", f32), o=Out("24 20", f32)):
        o[:, :] = dot(a[:, :] + 1.0, b[:, :])

    source = printed(k)
    assert line_with(source, "tl.dot").count("tl.where") == 1
    assert "tl.where(tl.arange(0, 64)[None, :] < 40, a_tile + 1.0, 0.0)" in line_with(source, "tl.dot")
    store = line_with(source, "tl.store")
    assert "mask=(tl.arange(0, 32)[:, None] < 24) & (tl.arange(0, 32)[None, :] < 20)" in store


def test_a_scan_masks_padding_only_when_it_starts_from_the_end():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("24", f32), o=Out("24", f32), p=Out("24", f32)):
        t = x[:] + 1.0
        o[:] = cumsum(t, 0)
        p[:] = cumsum(t, 0, reverse=True)

    source = printed(k)
    assert "tl.cumsum(t, axis=0)" in source.text
    assert "tl.cumsum(tl.where(tl.arange(0, 32) < 24, t, 0.0), axis=0, reverse=True)" in source.text


def test_integers_are_padded_with_the_ends_of_their_own_range():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("24", i8), o=Out("2", i8)):
        t = x[:] + 1
        o[0], o[1] = t.max(0), t.min(0)

    text = printed(k).text
    assert "tl.max(tl.where(tl.arange(0, 32) < 24, t, -128), axis=0).to(tl.int8)" in text
    assert "tl.min(tl.where(tl.arange(0, 32) < 24, t, 127), axis=0).to(tl.int8)" in text


# ---- numbers -----------------------------------------------------------------------------------------------------------


@kernel(grid=lambda d, c: (1,))
def narrow(d, c, x=In("32"), o=Out("32")):
    t = x[:]
    o[:] = 1.0 / t + exp2(t) + t.sum(0) + maximum(t, 0.0) * t.max(0) + cumsum(t, 0)


def test_functions_and_reductions_of_16_bit_floats_are_computed_in_fp32_and_rounded_once():
    text = printed(narrow, tensors={"x": bf16, "o": bf16}).text
    assert "(1.0 / t.to(tl.float32)).to(tl.bfloat16)" in text
    assert "tl.exp2(t.to(tl.float32)).to(tl.bfloat16)" in text
    assert "tl.sum(t.to(tl.float32), axis=0).to(tl.bfloat16)" in text
    assert "tl.reduce(t.to(tl.float32), 0, _max).to(tl.bfloat16)" in text
    assert "tl.cumsum(t.to(tl.float32), axis=0).to(tl.bfloat16)" in text
    assert "float32" not in printed(narrow, tensors={"x": f32, "o": f32}).text


def test_maxima_and_argmaxima_propagate_nan():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("32", f32), o=Out("1", i32), p=Out("1", f32)):
        t = x[:]
        o[0] = argmax(t, 0)
        p[0] = t.max(0)

    text = printed(k).text
    assert "tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)" in text
    assert "(a != a) & (b == b)" in text


def test_a_fast_function_is_inline_ptx_on_nvidia_and_exact_elsewhere():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("32", f32), o=Out("32", f32)):
        o[:] = exp2(-abs(x[:]))

    assert "inline_asm" in printed(k).text
    for other in (printed(k, target="gfx942"), printed(k, portable=True)):
        assert "inline_asm" not in other.text
        assert "tl.exp2(-tl.abs(x_tile))" in other.text


def test_precision_is_named_for_fp32_products_only():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, a=In("16 16"), o=Out("16 16", f32)):
        t = a[:, :]
        o[:, :] = dot(t, t, precision="tf32x3" if a.dtype == f32 else None)

    assert 'input_precision="tf32x3"' in printed(k, tensors={"a": f32}).text
    assert "input_precision" not in printed(k, tensors={"a": f16}).text


def test_inverses_are_spelled_out():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, a=In("16 16", f32), o=Out("16 16", f32)):
        o[:, :] = unit_lower_inverse(a[:, :])

    text = printed(k).text
    assert "inverse" not in text
    assert text.count("tl.dot(") == 6  # three merges of two products


# ---- control -----------------------------------------------------------------------------------------------------------


def test_carries_that_change_places_are_read_before_they_are_written():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16", f32), o=Out("16", f32)):
        a = x[:]

        @loop(3, init=(a, a + 1.0, a + 2.0))
        def carried(i, u, v, w):
            return v, w, u

        o[:] = carried[0] + carried[1] * carried[2]

    body = [line.strip() for line in lines(printed(k))]
    start = next(n for n, line in enumerate(body) if line.startswith("for "))
    assert body[start + 1 : start + 7] == ["v_old = v", "w_old = w", "u_old = u", "u = v_old", "v = w_old", "w = u_old"]


def test_a_single_carry_is_updated_in_place():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16", f32), o=Out("16", f32)):
        @loop(3, init=zeros((16,)))
        def acc(i, acc):
            return acc * 2.0 + x[:]

        o[:] = acc

    assert "        acc = (acc * 2.0) + x_tile" in lines(printed(k))


def test_a_loop_that_runs_backwards_counts_down_from_its_last_step():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, n=In("2", i32), o=Out("100", i32)):
        @loop(n[1], start=n[0], step=3, reverse=True)
        def body(i):
            o[i] = i

    body = [line.strip() for line in lines(printed(k))]
    assert "i_trips = (n_value - n_value_1 + 2) // 3" in body
    assert "for i_back in tl.range(0, i_trips, num_stages=1):" in body
    assert "i = n_value_1 + ((i_trips - 1 - i_back) * 3)" in body


def test_nested_conditions_and_loops_nest():
    @kernel(grid=lambda d, c: (4,))
    def k(d, c, n=In("4", i32), o=InOut("4", f32)):
        i = program_id(0)
        count = n[i]

        @when(count > 0)
        def outer():
            @loop(count)
            def steps(j):
                @when(j > 2)
                def inner():
                    o[i] = 1.0

    body = lines(printed(k))
    indents = [len(line) - len(line.lstrip()) for line in body if line.strip().startswith(("if ", "for ", "tl.store"))]
    assert indents == [4, 8, 12, 16]


def test_a_loop_without_anything_to_do_is_still_a_loop():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, n=In("1", i32), x=In("16", f32), o=Out("16", f32)):
        @loop(n[0], init=x[:])
        def same(i, t):
            return t

        o[:] = same

    assert "        pass" in lines(printed(k))


def test_numbers_that_are_carried_become_tensors_of_their_dtype():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, n=In("1", i32), o=Out("1", f16), p=Out("1", i64)):
        @loop(n[0], init=(full((), 0.0, f16), full((), 0, i64)))
        def last(i, a, b):
            return 1.5, b + 1

        o[0], p[0] = last

    body = [line.strip() for line in lines(printed(k))]
    assert "a = tl.full([], 0.0, tl.float16)" in body
    assert "b = tl.full([], 0, tl.int64)" in body
    assert "a = tl.full([], 1.5, tl.float16)" in body


@kernel(grid=lambda d, c: (1,))
def labelled(d, c, x=In("T 16", f32), o=Out("16", f32)):
    @loop(d.T, init=zeros((16,)), label="rows")
    def first(i, acc):
        return acc + x[i]

    @loop(d.T, init=first)
    def second(i, acc):
        return acc - x[i]

    o[:] = second


def test_stages_go_to_the_loop_of_that_label():
    source = printed(labelled, {"T": Sym("T")}, stages={"rows": 4})
    assert [line.split("num_stages=")[1] for line in lines(source) if "tl.range" in line] == ["4):", "1):"]
    assert source.options["num_stages"] == 4


@pytest.mark.parametrize(("warps", "cap", "kept"), [(4, 168, 168), (8, 255, 255), (16, 128, 128), (16, 168, None)])
def test_a_register_cap_that_would_stop_the_launch_is_dropped(warps, cap, kept):
    # a multiprocessor of Hopper has 65536 registers
    source = printed(copy_rows, {"T": 4096}, num_warps=warps, maxnreg=cap)
    assert source.options["maxnreg"] == kept


def test_a_combine_becomes_a_function_of_the_module():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16", f32), o=Out("16", f32), p=Out("1", f32)):
        t = x[:]
        a, _ = scan((t, t), 0, lambda g, h, m, n: (g * n + m, h * n), reverse=True)
        best, _ = reduce((t, t), 0, lambda g, h, m, n: (where(g > m, g, m), h + n))
        o[:] = a
        p[0] = best

    text = printed(k).text
    assert "@triton.jit\ndef _combine_k(g, h, m, n):" in text
    assert "tl.associative_scan((t, t), 0, _combine_k, reverse=True)" in text
    assert "tl.reduce((t, t), 0, _combine_k_1)" in text


# ---- hints and descriptors ---------------------------------------------------------------------------------------------


def test_contiguity_and_order_are_hints_of_the_access():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("32 64", f32), o=Out("32 64", f32)):
        rows = span(0, 32).reshape(2, 16)
        t = x.load(rows, slice(None), contiguity=4, order=(1, 0, 2))
        o.store(rows, slice(None), value=t, contiguity=2)

    source = printed(k)
    load = line_with(source, "tl.load")
    assert load.endswith(", (1, 0, 2))")
    assert load.startswith("t = tl.permute(")
    offsets = line_with(source, "x_offsets =")
    assert "tl.arange(0, 2)[None, :, None] * 1024 + " in offsets
    assert line_with(source, "x_rows =").endswith("tl.arange(0, 16)[:, None, None] * 64")
    assert "tl.max_contiguous(tl.arange(0, 64), 4)" in offsets
    assert "tl.max_contiguous(tl.arange(0, 64), 2)" in line_with(source, "o_offsets =")


@kernel(grid=lambda d, c: (cdiv(d.T, 64), d.H))
def copy_heads(d, c, x=In("T H 64", bf16), o=Out("T H 64", bf16)):
    rows, head = span(program_id(0) * 64, 64, end=d.T), program_id(1)
    o[rows, head] = x[rows, head]


def test_descriptors_are_made_once_and_clip_at_the_tensors_end():
    source = printed(copy_heads, {"T": Sym("T"), "H": 4}, descriptors=("x", "o"))
    made = line_with(source, "x_desc =")
    assert made == "x_desc = tl.make_tensor_descriptor(x, [T, 4, 64], [256, 64, 1], [64, 1, 64])"
    assert "mask" not in source.text
    assert "x_desc.load([rows_start, head, 0])" in source.text
    assert "o_desc.store([rows_start, head, 0], " in source.text


def test_strides_of_a_descriptor_have_64_bits_where_they_need_them():
    source = printed(copy_heads, {"T": Sym("T"), "H": Sym("H", max=1 << 30)}, descriptors=("x",))
    assert "[H.to(tl.int64) * 64, 64, 1]" in line_with(source, "x_desc =")


# ---- names -------------------------------------------------------------------------------------------------------------


def test_variables_keep_the_users_names_and_lines_name_their_origin():
    @kernel(grid=lambda d, c: (4,))
    def k(d, c, x=In("4 64", f32), o=Out("4 64", f32)):
        row = program_id(0)
        values = x[row]
        peak = values.max(0)
        weights = exp2(values - peak)
        o[row] = weights / weights.sum(0)

    text = printed(k).text
    for name in ("row", "values", "peak", "weights"):
        assert f"    {name} = " in text or f"{name})" in text
    assert "# tests/unit/test_triton_printer.py:" in text


def test_a_variable_may_have_any_name():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16", f32), o=Out("16", f32)):
        tl = x[:]
        _max = tl.max(0)
        float = tl + _max
        o[:] = where(float > 0.0, float, -math.inf) + float

    body = printed(k).text
    assert "tl_1 = tl.load" in body
    assert "float_1 = tl_1 + " in body


def test_floats_saturate_in_integers_of_few_bits():
    """int32 saturates by itself; what is stored of it in 8 bits would wrap."""

    @kernel(grid=lambda d, c: (1,))
    def quantise(d, c, x=In("64", f32), o=Out("64", i8), p=Out("64", i32)):
        o[:] = x[:].to(i8)
        p[:] = x[:].to(i32)

    source = printed(quantise, {})
    assert "tl.minimum(tl.maximum(x_tile.to(tl.int32), -128), 127).to(tl.int8)" in source.text
    assert "x_tile_1.to(tl.int32))" in line_with(source, "tl.store(p")
