"""Every kernel of every op lowers to TileLang, and TileLang to CUDA source with its check for data races on."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("tilelang")

from tilelang_text import cuda, printed

from k3dsl.backends.base import Source
from k3dsl.errors import ResourceError
from k3dsl.language import (
    In,
    InOut,
    Kernel,
    Out,
    Scalar,
    Sym,
    bf16,
    cdiv,
    f32,
    i8,
    i32,
    kernel,
    loop,
    program_id,
    span,
    u8,
    zeros,
)
from k3dsl.ops.registry import get_op, op_names
from k3dsl.runtime.executable import fitted, lower
from k3dsl.targets import get_target

OTHER: dict[str, Mapping[str, Any]] = {
    "matmul": {"matmul.threads": 128, "matmul.stages.k": 4, "matmul.swizzle": 8},
    "softmax": {"softmax.threads": 128},
    "rmsnorm": {"rmsnorm.threads": 128},
    "attention": {"attention.threads": 128, "attention.stages.keys": 1, "attention.stages.edge": 1},
    "segment_sum": {"segment_sum.threads": 256, "segment_sum.stages.rows": 3},
    "kda.forward": {"block_v": 128, "scan.threads": 256, "scan.stages.chunks": 2, "prep.threads": 256},
    "kda.decode": {"decode.threads": 256},
    "kda.step": {"kda_step.threads": 128},
    "kda.commit": {"kda_commit.threads": 256},
    "causal_conv1d": {"rows": 4, "final_window.threads": 128},
    "causal_conv1d.update": {"conv_update.threads": 256},
    "gated_rmsnorm": {"gated_rmsnorm.threads": 256},
    "mla.prefill": {"mla_prefill.stages.keys": 2, "block_k": 128},
    "mla.decode": {"block_n": 32, "mla_decode.stages.keys": 3, "mla_combine.threads": 256},
    "mla.cache_write": {"mla_cache_write.threads": 256},
    "attention.decode": {"attend.stages.keys": 1, "attend.stages.edge": 1, "attend.threads": 256},
    "attnres.site": {"site.threads": 128},
    "attnres.phase1": {"norms.threads": 256, "score.stages.width": 3, "mix.threads": 256},
    "attnres.merge": {"merge.threads": 128},
    "moe.router": {"logits.stages.k": 2, "block_t": 32, "topk.threads": 256},
    "moe.topk": {"topk.threads": 256},
    "moe.sort": {"count.threads": 256, "offsets.threads": 128, "place.threads": 256},
    "moe.experts": {"chunk": 256, "swap_ab": True, "block_m": 16, "block_n": 64, "num_warps": 4, "block_d": 512},
    "moe.situ": {"situ.threads": 256},
    **{
        name: {"prep.threads": 256, "scan.stages.chunks": 2, "rescan.threads": 256}
        for name in ("delta_rule", "gated_delta_rule")
    },
    "linear_attention": {"linear.stages.chunks": 1},
    **{f"{name}.decode": {"token.threads": 256} for name in ("linear_attention", "delta_rule", "gated_delta_rule")},
}
"""A second schedule of each op."""
WGMMA = ("linear", "matmul", "attention", "scan", "mla_prefill", "mla_decode", "logits", "gate_up", "down")
SLOW = ("prep", "rescan", "attention", "mla_prefill", "mla_decode")


MIXED = ("linear", "prep")
"""Kernels with a product too small for wgmma beside those that use it."""
SLOW_OPS = (
    "attention.decode",
    "attnres.site",
    "attnres.phase1",
    "delta_rule",
    "delta_rule.decode",
    "gated_delta_rule",
    "gated_delta_rule.decode",
    "linear_attention",
    "moe.router",
    "moe.topk",
    "moe.sort",
    "moe.experts",
)


@functools.cache
def sources(op: str, second: bool, target: str = "sm_90a") -> dict[str, Source]:
    """By kernel, with pipelines that the target's shared memory allows."""
    where = get_target(target)
    plan = get_op(op).point({}, OTHER[op] if second else {}, symbolic=True, target=where).plan("tilelang")
    found: dict[str, Source] = {}
    for launch in plan.launches:
        shallow = replace(launch.schedule, stages=dict.fromkeys(launch.schedule.stages, 2))
        for schedule in (launch.schedule, *launch.smaller, shallow):
            with contextlib.suppress(ResourceError):
                found[launch.label] = lower(replace(launch, schedule=schedule), where)
                break
    return found


def kernels() -> list[Any]:
    """(op, kernel) of the registry."""
    labels = [(name, label) for name in op_names() for label in get_op(name).launches]
    return [
        pytest.param(name, label, id=f"{name}-{label}", marks=[pytest.mark.slow] if name in SLOW_OPS else [])
        for name, label in labels
    ]


def compiled(op: str, label: str, second: bool, target: str, capfd: pytest.CaptureFixture[str]) -> str:
    """The CUDA source; TileLang must not have reported a race on the way."""
    if label not in sources(op, second, target):
        pytest.skip(f"{op} has no {label} at its default dims")
    generated = cuda(sources(op, second, target)[label], target)
    assert "race" not in capfd.readouterr().err
    return generated


def wants_wgmma(op: str, label: str, chunk: int = 32) -> bool:
    """KDA's prep has one product for k's and q's rows, which are 64 from chunks of 32 on."""
    return label in WGMMA or ((op, label) == ("kda.forward", "prep") and chunk >= 32)


def test_there_is_a_second_schedule_of_every_op():
    assert set(OTHER) == set(op_names())


@pytest.mark.parametrize(("op", "label"), kernels())
def test_every_kernel_compiles_with_its_own_schedule(op, label, capfd):
    generated = compiled(op, label, False, "sm_90a", capfd)
    assert f"{label}_kernel" in generated
    assert ("wgmma_ss<" in generated or "wgmma_rs<" in generated) == wants_wgmma(op, label)
    if label in WGMMA and label not in MIXED:
        assert "mma_sync<" not in generated


@pytest.mark.parametrize(
    ("op", "label"),
    [pytest.param(*p.values, id=p.id, marks=pytest.mark.slow if p.values[1] in SLOW else p.marks) for p in kernels()],
)
def test_every_kernel_compiles_with_another_schedule(op, label, capfd):
    generated = compiled(op, label, True, "sm_90a", capfd)
    assert sources(op, True)[label].text != sources(op, False)[label].text or label == "rescan"
    assert ("wgmma_ss<" in generated or "wgmma_rs<" in generated) == wants_wgmma(op, label, OTHER[op].get("chunk", 32))


PACKED = {"varlen": True, "segments": 3}


@pytest.mark.parametrize(
    ("op", "label"),
    [
        ("kda.forward", "tables"),
        ("kda.forward", "segment_tables"),
        ("causal_conv1d", "sequences"),
        ("mla.prefill", "blocks"),
        ("mla.prefill", "ordered"),
    ],
)
def test_what_packed_sequences_are_worked_out_by_compiles(op, label, capfd):
    settings = PACKED if op == "kda.forward" else {"varlen": True}
    plan = get_op(op).point({"T": 8192, "N": 3}, settings, symbolic=True).plan("tilelang")
    (launch,) = (x for x in plan.launches if x.label == label)
    generated = cuda(lower(launch, get_target("sm_90a")), "sm_90a")
    assert f"{launch.kernel.name}_kernel" in generated
    assert "race" not in capfd.readouterr().err


def test_a_program_ends_early_where_a_condition_holds_all_that_is_left():
    """Within a branch no two of TileLang's buffers share memory; a pipeline stays in its branch."""
    plan = get_op("kda.forward").point({"T": 8192, "N": 3}, PACKED, symbolic=True).plan("tilelang")
    text = {launch.label: lower(launch, get_target("sm_90a")).text for launch in plan.launches}
    early = "            if tl.Not(start >= 0):\n                tl.thread_return()\n"
    assert early in text["prep"]
    assert not any("thread_return" in text[label] for label in ("scan", "rescan", "ends_again", "fold"))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_choice_between_numbers_from_memory_does_not_hang_the_compiler():
    settings = {"block_m": 128, "block_n": 128, "group": 2}
    plan = get_op("moe.experts").point({"T": 1024}, settings, symbolic=True).plan("tilelang")
    (down,) = (x for x in plan.launches if x.label == "down")
    assert "tl.alloc_var(tl.int32)" in lower(down, get_target("sm_90a")).text
    assert fitted(down, get_target("sm_90a"))[1].inspection.instructions["wgmma"] > 0


@pytest.mark.slow
@pytest.mark.timeout(40)
def test_a_number_that_finds_numbers_in_memory_does_not_slow_the_compiler_down():
    """40 s with the quotient and the remainder in every index, 8 with a variable."""
    settings = {"block_m": 128, "block_n": 128, "group": 2, "gather": "before"}
    plan = get_op("moe.experts").point({"T": 1024}, settings, symbolic=True).plan("tilelang")
    (gate_up,) = (x for x in plan.launches if x.label == "gate_up")
    text = lower(gate_up, get_target("sm_90a")).text
    assert "block = tl.alloc_var(tl.int32)" in text
    assert "expert_offsets[expert + 1]" in text
    assert fitted(gate_up, get_target("sm_90a"))[1].inspection.instructions["wgmma"] > 0


@pytest.mark.slow
def test_prep_of_packed_sequences_fits_for_every_gate():
    """430 KiB of shared memory a program without it."""
    for gate in ("bounded", "softplus"):
        plan = (
            get_op("kda.forward").point({"T": 8192, "N": 3}, {**PACKED, "gate": gate}, symbolic=True).plan("tilelang")
        )
        (prep,) = (x for x in plan.launches if x.label == "prep")
        assert fitted(prep, get_target("sm_90a"))[1].inspection.shared_bytes <= 120_000


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_100a", "sm_120a"])
@pytest.mark.parametrize(("op", "label"), kernels())
def test_every_kernel_compiles_for_every_target(op, label, target, capfd):
    assert f"{label}_kernel" in compiled(op, label, False, target, capfd)


# ---- guards ----------------------------------------------------------------------------------------------------------


@kernel(grid=lambda d, c: (cdiv(d.R, 4),))
def scaled_rows(d, c, x=In("R 64", f32), o=Out("R 64", f32)):
    rows = span(program_id(0) * 4, 4, end=d.R)
    o[rows, :] = x[rows, :] * 2.0


def body(k: Kernel, dims: Mapping[str, Any], **schedule: Any) -> str:
    return printed(k, dims, **schedule).text.split("with tl.Kernel")[1]


def test_a_ragged_edge_keeps_its_guards_on_reads_and_writes():
    text = body(scaled_rows, {"R": Sym("R")})
    assert "rows_start = program_0 * 4" in text
    assert "if rows_start + i < R:" in text
    assert "tl.if_then_else(rows_start + i < R, x[rows_start + i, j], tl.float32(0.0))" in text


def test_an_edge_that_cannot_be_crossed_has_no_guard():
    text = body(scaled_rows, {"R": Sym("R", divisible_by=4)})
    assert "if_then_else" not in text
    assert "if " not in text


def test_a_masked_read_gives_what_it_says_and_not_zero():
    @kernel(grid=lambda d, c: (cdiv(d.N, 64),))
    def k(d, c, x=In("N", f32), o=Out("1", f32)):
        o[0] = x.load(span(program_id(0) * 64, 64, end=d.N), other=float("-inf")).max(0)

    text = body(k, {"N": Sym("N", divisible_by=4)})
    assert re.search(r"tl\.if_then_else\(.* < N, x\[.*\], \(-tl\.infinity\(tl\.float32\)\)\)", text)
    assert "tl.copy(x[" not in text


@pytest.mark.parametrize(
    ("target", "divisor", "copied"),
    [("sm_90a", 8, True), ("sm_80", 8, False), ("sm_90a", 1, False)],
)
def test_only_a_copy_whose_bounds_hardware_checks_may_go_over_the_edge(target, divisor, copied):
    @kernel(grid=lambda d, c: (cdiv(d.M, 64),))
    def k(d, c, x=In("M N", bf16), o=Out("M 1", bf16)):
        rows = span(program_id(0) * 64, 64, end=d.M)

        @loop(cdiv(d.N, 64), init=zeros((64, 1)), label="cols")
        def total(i, s):
            return s + x[rows, span(i * 64, 64, end=d.N)].to(f32).sum(1, keepdim=True)

        o[rows, :] = total.to(bf16)

    dims = {"M": Sym("M"), "N": Sym("N", divisible_by=divisor, min=1)}
    text = body(k, dims, target=target, stages={"cols": 2})
    assert ("tl.copy(x[" in text) == copied
    assert ("tl.if_then_else(" in text) == (not copied)


def test_a_scatter_is_taken_at_its_word_that_no_element_is_written_twice():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, ids=In("16", i32), x=In("16 64", f32), o=InOut("50 64", f32)):
        o[ids[:], :] = x[:, :]

    source = printed(k)
    assert source.options["pass_configs"]["tl.disable_data_race_check"] is True
    assert "o[ids[i], j] = x[i, j]" in source.text
    assert cuda(source)


def test_the_negative_of_an_unsigned_number_wraps_around():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("64", u8), o=Out("64", u8)):
        o[:] = -x[:]

    assert "o[i] = tl.cast(-tl.cast(x[i], tl.int32), tl.uint8)" in printed(k).text
    assert cuda(printed(k))


def narrow(body: Any) -> str:
    return cuda(printed(kernel(grid=lambda d, c: (1,))(body)))


def test_integers_narrower_than_cs_int_wrap_after_every_step():
    """C computes in int: without the way back 0 - 1 of u8 would be -1, and (x << 4) >> 4 of i8 the whole byte."""

    def body(d, c, x=In("64", i8), y=In("64", u8), o=Out("64", i32), p=Out("64", i32), q=Out("64", i32)):
        o[:] = ((x[:] << 4) >> 4).to(i32)
        p[:] = (y[:] - 1).to(i32)
        q[:] = ((y[:] + y[:]) > 100).to(i32)

    text = narrow(body)
    assert re.search(r"\(signed char\)\(\(\(int\)x\[[^\]]*\]+\)*\) << 4\)\) >> ", text), text
    assert re.search(r"\(\(int\)\(\(uchar\)\(\(\(int\)y\[[^\]]*\]+\)*\) - 1\)\)\)", text), text
    assert re.search(r"100 < \(\(uchar\)\(\(\(int\)y\[", text), text


def test_floats_saturate_in_integers_of_few_bits_and_constants_are_rounded_as_tensors_are():
    def body(
        d, c, x=In("64", f32), y=In("64", bf16), s=Scalar(bf16), o=Out("64", i8), p=Out("64", u8), q=Out("64", i32)
    ):
        o[:] = x[:].to(i8)
        p[:] = (y[:] * s).to(u8)
        q[:] = (y[:] > 0.1).to(i32)

    text = narrow(body)
    assert re.search(r"\(signed char\)max\(min\(\(\(int\)x\[.*127\), -128\)", text), text
    assert re.search(r"\(uchar\)max\(min\(.*255\), 0\)", text), text
    assert "0x1.9ap-4f" in text, text  # 0.10009765625, which bf16 has
    assert "float s" in text, text  # a bf16 number by value is none of TileLang's host code
