"""What the TileLang backend refuses, each with a stable code and a reason that says where and what to change.

Where TileLang itself refuses the code, a test shows that too, so that a rule that a later release drops is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("tilelang")

from tilelang_text import cuda, printed, traced

from k3dsl.backends.base import Reason
from k3dsl.backends.tilelang import lower as lowering
from k3dsl.backends.tilelang.legality import check
from k3dsl.backends.tilelang.printer import Printer
from k3dsl.backends.tilelang.schedule import TileLangSchedule
from k3dsl.errors import ArgumentError, BuildError, LegalityError, ResourceError
from k3dsl.language import (
    In,
    InOut,
    Kernel,
    Out,
    Sym,
    bf16,
    dot,
    exp2,
    f32,
    i8,
    i16,
    kernel,
    loop,
    program_id,
    span,
    u8,
    unit_lower_inverse,
    zeros,
)
from k3dsl.targets import get_target

RESOURCES = {"threads", "registers", "blocks_per_sm", "shared_memory"}
HERE = "tests/unit/test_tilelang_legality.py:"


def reasons(k: Kernel, dims: dict[str, Any] | None = None, target: str = "sm_90a", **schedule: Any) -> list[Reason]:
    return check(traced(k, dims), TileLangSchedule(**schedule), get_target(target))


def the_reason(
    code: str, k: Kernel, dims: dict[str, Any] | None = None, target: str = "sm_90a", **schedule: Any
) -> str:
    """The message of the one reason, with the user's file and line in front where it has them."""
    (found,) = reasons(k, dims, target, **schedule)
    assert found.code == code
    error = ResourceError if code in RESOURCES else LegalityError
    with pytest.raises(error, match=re.escape(found.message)):
        printed(k, dims, target=target, **schedule)
    return str(found)


@pytest.fixture
def unchecked(monkeypatch) -> Callable[..., str]:
    """CUDA source of a kernel that goes to TileLang without the check."""

    def compile(k: Kernel, dims: dict[str, Any] | None = None, **schedule: Any) -> str:
        monkeypatch.setattr(lowering, "check", lambda *_: [])
        return cuda(printed(k, dims, **schedule))

    return compile


def product(m: int, n: int, transposed: bool = False) -> Kernel:
    shape = f"{n} 64" if transposed else f"64 {n}"

    @kernel(grid=lambda d, c: (1,))
    def k(d, c, a=In(f"{m} 64", bf16), b=In(shape, bf16), o=Out(f"{m} {n}", f32)):
        o[:, :] = dot(a[:, :], b[:, :].T if transposed else b[:, :])

    return k


@kernel(grid=lambda d, c: (d.M // 128, d.N // 128))
def matmul(d, c, a=In("M K", bf16), b=In("K N", bf16), o=Out("M N", bf16)):
    rows, cols = span(program_id(0) * 128, 128), span(program_id(1) * 128, 128)

    @loop(d.K // 64, init=zeros((128, 128)), label="k")
    def total(i, acc):
        inner = span(i * 64, 64)
        return dot(a[rows, inner], b[inner, cols], acc=acc)

    o[rows, cols] = total.to(bf16)


def tall(columns: int) -> Kernel:
    """A product of 192 rows, 64 for each of three warp groups."""

    @kernel(grid=lambda d, c: (d.M // 192,))
    def k(d, c, a=In("M 1024", bf16), b=In(f"{columns} 1024", bf16), o=Out(f"M {columns}", bf16)):
        rows = span(program_id(0) * 192, 192)

        @loop(16, init=zeros((192, columns)), label="k")
        def total(i, acc):
            return dot(a[rows, span(i * 64, 64)], b[:, span(i * 64, 64)].T, acc=acc)

        o[rows, :] = total.to(bf16)

    return k


SQUARE = {"M": 1024, "N": 1024, "K": 1024}
TALL = {"M": 1920}


# ---- names, labels, target -------------------------------------------------------------------------------------------


def test_a_target_that_tilelang_has_no_code_for_is_refused():
    text = the_reason("target", matmul, SQUARE, "gfx942", stages={"nothing": 2})
    assert text == "the TileLang backend generates no code for gfx942; use Triton"


@pytest.mark.parametrize(
    ("code", "fields", "text"),
    [
        ("unknown_label", {"stages": {"rows": 2}}, "stages name the loop 'rows'; labels of matmul: k"),
        ("unknown_dot", {"policy": {"d1": "row"}}, "policy names the dot 'd1'; dots of matmul: d0"),
        ("unknown_tensor", {"staged": ("x",)}, "staged names 'x', which matmul does not take"),
    ],
)
def test_a_schedule_may_only_name_what_the_kernel_has(code, fields, text):
    assert the_reason(code, matmul, SQUARE, **fields) == text


def test_the_dots_of_an_inverse_have_names_too():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16 16", f32), o=Out("16 16", f32)):
        o[:, :] = unit_lower_inverse(x[:, :])

    assert reasons(k, policy={"d0": "row"}) == []


@pytest.mark.parametrize("name", ["tl", "threadIdx", "o_ptr", "new", "template", "operator"])
def test_a_parameter_may_not_have_a_name_that_generated_code_needs(name):
    scope: dict[str, Any] = {"In": In, "Out": Out, "f32": f32}
    exec(f"def k(d, c, {name}=In('16', f32), o=Out('16', f32)):\n    o[:] = {name}[:]", scope)
    k = kernel(grid=lambda d, c: (1,))(scope["k"])
    assert f"the name {name!r} means something else in generated TileLang; rename it" in the_reason("name", k)


def test_two_parameters_may_not_share_a_name():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, n=In("n", f32), o=Out("n", f32)):
        o[span(0, 16, end=d.n)] = n[span(0, 16, end=d.n)]

    assert "'n' is the name of two parameters or dims" in the_reason("name", k, {"n": Sym("n")})


# ---- products --------------------------------------------------------------------------------------------------------


def test_wgmma_needs_whole_groups_of_64_rows(unchecked):
    text = the_reason("warp_partition", product(96, 64), threads=128)
    assert text.startswith(HERE)
    assert "d0: 4 warps cannot divide a 96 x 64 product for wgmma" in text
    with pytest.raises(BuildError, match="No valid warp partition"):
        unchecked(product(96, 64), threads=128)


@pytest.mark.parametrize(("m", "n", "threads", "share"), [(64, 48, 256, 24), (256, 32, 512, 8)])
def test_each_warp_group_needs_16_columns_of_a_row_major_operand(m, n, threads, share, unchecked):
    text = the_reason("dot_n", product(m, n), threads=threads, policy={"d0": "col"})
    assert f"gets {share} columns of a row-major operand; wgmma reads it in groups of 16" in text
    with pytest.raises(BuildError, match="canonical GMMA_MN layout"):
        unchecked(product(m, n), threads=threads, policy={"d0": "col"})


@pytest.mark.parametrize(
    ("m", "n", "transposed", "target", "threads"),
    [
        (96, 64, False, "sm_90a", 64),  # no whole warp group: mma.sync
        (96, 64, False, "sm_80", 128),
        (48, 64, False, "sm_90a", 128),  # fewer than 64 rows: mma.sync
        (64, 24, True, "sm_90a", 128),  # no multiple of 16 columns: multiply-adds
        (64, 24, False, "sm_90a", 128),
        (64, 48, False, "sm_90a", 128),
        (8, 64, False, "sm_90a", 128),  # multiply-adds
        (7, 5, False, "sm_90a", 128),
    ],
)
def test_other_products_are_not_refused(m, n, transposed, target, threads):
    k = product(m, n, transposed)
    assert reasons(k, target=target, threads=threads) == []
    assert cuda(printed(k, target=target, threads=threads), target)


# ---- threads and registers -------------------------------------------------------------------------------------------


def test_threads_count_the_warp_group_that_copies():
    text = the_reason("threads", matmul, SQUARE, threads=1024, stages={"k": 2})
    assert text == (
        "1024 threads and 128 that copy exceed the 1024 of a program; use fewer threads, or no warp_specialize"
    )
    assert reasons(matmul, SQUARE, threads=1024, stages={"k": 2}, warp_specialize=False) == []


def test_registers_change_hands_between_whole_warp_groups():
    text = the_reason("warp_group", matmul, SQUARE, threads=64, stages={"k": 2})
    assert "whole warp groups of 128, not 64 threads" in text
    assert reasons(matmul, SQUARE, threads=64, stages={"k": 2}, warp_specialize=False) == []
    assert reasons(matmul, SQUARE, threads=64) == []


def test_registers_that_a_multiprocessor_does_not_have_are_refused_before_a_kernel_waits_for_them(unchecked):
    # two programs of 256 threads leave 128 registers for each: 32768 a program
    text = the_reason("registers", matmul, SQUARE, threads=128, stages={"k": 2}, min_blocks_per_sm=2)
    assert "128 threads of 24 registers and 128 of 240 are 33792" in text
    assert "each of 2 programs a multiprocessor has 32768" in text
    fits = {"producer_registers": 24, "consumer_registers": 232}
    assert reasons(matmul, SQUARE, threads=128, stages={"k": 2}, min_blocks_per_sm=2, **fits) == []
    assert reasons(matmul, SQUARE, threads=256, stages={"k": 2}) == []
    generated = unchecked(matmul, SQUARE, threads=128, stages={"k": 2}, min_blocks_per_sm=2)
    assert "__launch_bounds__(256, 2)" in generated
    assert "warpgroup_reg_alloc<240>" in generated


def test_three_warp_groups_compute_beside_one_that_copies():
    source = printed(tall(128), TALL, threads=384, stages={"k": 2})
    assert "threads=384" in source.text
    assert "tl.annotate_producer_reg_dealloc(24)\n" in source.text
    assert "tl.annotate_consumer_reg_alloc(160)\n" in source.text
    generated = cuda(source)
    assert "__launch_bounds__(512, 1)" in generated
    assert "warpgroup_reg_alloc<160>" in generated
    assert "kFloat32, 64, 128, 16" in generated
    with pytest.raises(ArgumentError, match="a power of two from 32 to 1024, or 384, got 320"):
        printed(tall(128), TALL, threads=320)


def test_an_instruction_too_wide_for_the_registers_is_refused():
    text = the_reason("registers", tall(256), TALL, threads=384, stages={"k": 2})
    assert text.startswith(HERE)
    assert (
        "a wgmma instruction of 256 columns needs 154 registers a thread, and a program so large starts with 128"
        in text
    )
    assert reasons(tall(256), TALL, threads=384) == []  # no warp group that copies


def test_more_programs_than_a_multiprocessor_has_threads_for_are_refused():
    text = the_reason("blocks_per_sm", matmul, SQUARE, threads=128, min_blocks_per_sm=32)
    assert text.startswith("32 programs of 128 threads exceed the 2048 of a multiprocessor")


# ---- shared memory ---------------------------------------------------------------------------------------------------


def test_shared_memory_is_counted_by_stages_before_any_toolchain_runs():
    stage = 2 * (128 * 64 + 64 * 128)
    text = the_reason("shared_memory", matmul, SQUARE, stages={"k": 8})
    assert text.startswith(HERE)
    assert f"needs {8 * stage} bytes of shared memory at a time, and sm_90a has 232448 a program" in text
    assert f"a_shared {4 * stage} (8 stages), b_shared {4 * stage} (8 stages)" in text
    assert reasons(matmul, SQUARE, stages={"k": 7}) == []
    assert the_reason("shared_memory", matmul, SQUARE, "sm_120a", stages={"k": 4})


# ---- tiles, reductions, atomics --------------------------------------------------------------------------------------


def twice(rows: int, cols: int) -> Kernel:
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In(f"{rows} {cols}", f32), o=Out(f"{rows} {cols}", f32), p=Out(f"{rows} {cols}", f32)):
        t = exp2(-abs(x[:, :])) * exp2(-(x[:, :] * x[:, :]))
        o[:, :] = t
        p[:, :] = t * 2.0

    return k


@pytest.mark.parametrize(("rows", "cols", "threads"), [(5, 16, 32), (3, 64, 128), (7, 33, 128)])
def test_a_tile_in_registers_is_spread_evenly(rows, cols, threads, unchecked):
    text = the_reason("fragment", twice(rows, cols), threads=threads)
    assert text.startswith(HERE)
    assert f"a tile of {rows} x {cols} in registers cannot be spread evenly over {threads} threads" in text
    with pytest.raises(BuildError, match="no available layout"):
        unchecked(twice(rows, cols), threads=threads)


@pytest.mark.parametrize(("rows", "cols", "threads"), [(5, 16, 128), (3, 64, 64), (7, 33, 256)])
def test_a_tile_smaller_than_the_threads_or_a_multiple_of_them_is_fine(rows, cols, threads):
    assert cuda(printed(twice(rows, cols), threads=threads))


def test_a_tile_that_no_thread_has_registers_for_is_refused():
    assert "is 32768 bytes a thread, at most 16384 compile" in the_reason("tile_size", twice(1024, 1024))


def column_sums(rows: int, cols: int) -> Kernel:
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In(f"{rows} {cols}", f32), o=Out(f"{cols}", f32)):
        o[:] = x[:, :].sum(0)

    return k


def test_a_reduction_down_columns_needs_a_power_of_two_of_them(unchecked):
    text = the_reason("reduce_width", column_sums(16, 96))
    assert text.startswith(HERE)
    assert "a reduction over axis 0 of [16, 96] has 96 elements behind that axis, not a power of two" in text
    with pytest.raises(BuildError, match="no available layout"):
        unchecked(column_sums(16, 96))
    assert cuda(printed(column_sums(24, 16)))  # the reduced axis is padded


@pytest.mark.parametrize("dtype", [i8, u8, i16])
def test_an_atomic_add_that_cuda_does_not_have_is_refused(dtype):
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16", dtype), o=InOut("16", dtype)):
        o.atomic_add(slice(None), value=x[:])

    text = the_reason("atomic_dtype", k)
    assert text.startswith(HERE)
    assert text.endswith(f"TileLang has no atomic add of {dtype}")


# ---- all at once, and what nobody thought of -------------------------------------------------------------------------


def test_every_reason_is_given_at_once():
    found = reasons(matmul, SQUARE, threads=1024, stages={"k": 8})
    assert [r.code for r in found] == ["threads", "shared_memory"]
    with pytest.raises(ResourceError, match=r"exceed the 1024 of a program.*; .*bytes of shared memory"):
        printed(matmul, SQUARE, threads=1024, stages={"k": 8})


def test_a_failure_of_the_printer_is_a_reason_with_the_users_line(monkeypatch):
    def broken(self, op):
        raise KeyError("lost")

    monkeypatch.setattr(Printer, "op_store", broken)
    text = the_reason("op", matmul, SQUARE)
    assert text.startswith(HERE)
    assert "no TileLang is known for this (KeyError: 'lost')" in text
