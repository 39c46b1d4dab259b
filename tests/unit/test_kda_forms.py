"""KDA in segments and in one kernel: what the serial two-kernel form computes, with no more error and no other promises."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from k3dsl.backends.torch import evaluate, to_torch
from k3dsl.errors import LegalityError
from k3dsl.ir.graph import walk
from k3dsl.ir.types import bf16, f32
from k3dsl.ops import kda
from k3dsl.ops.kda import plans
from k3dsl.ops.kda.inputs import FAMILIES, Case, families, make
from k3dsl.ops.kda.reference import recurrence
from k3dsl.ops.kda.space import FORWARD
from k3dsl.runtime.executable import recording
from k3dsl.runtime.metrics import assert_close_rms, relative_rms
from k3dsl.runtime.op import forced

NAMED = {case.name: replace(case, T=200, H=2) for case in families()}
RAGGED = (0, 0, 5, 130, 130, 300, 331)
"""Empty sequences, one of a part of a chunk, some shorter than a segment, none a multiple of a chunk."""


def run(kwargs: dict[str, Any], **knobs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """kda with chunks of 16, so that short sequences have many of them."""
    with forced(FORWARD, {"chunk": 16, **knobs}, {}):
        return kda(**kwargs)


def check_against_serial(case: Case, kwargs: dict[str, Any], segments: int, **knobs: Any) -> None:
    """Errors against fp64 stay in the case's limits and no larger than the serial scan's; what differs is its rounding."""
    expected = recurrence(**kwargs)
    serial = run(kwargs)
    segmented = run(kwargs, segments=segments, **knobs)
    for name, got, before, want, limit in zip(
        ("o", "final state"), segmented, serial, expected, (case.limit_o, case.limit_state), strict=True
    ):
        assert got is not None
        assert before is not None
        assert want is not None
        assert_close_rms(name, got, want, limit)
        error = relative_rms(before, want)
        assert relative_rms(got, want) <= 1.1 * error + 1e-7
        assert relative_rms(got, before) <= error


# ---- prep ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_cut_short_have_the_same_factors_from_code_of_their_own(
    gate: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through Triton prep has two bodies, one of them without masks; the CPU runs the masked one unless it is told."""
    T, offsets = (331, RAGGED) if packed else (131, (0, 131))
    dims: dict[str, Any] = {"T": T, "H": 2, "HK": 2, "K": 64, "V": 64, "B": 1, "N": len(offsets) - 1}
    settings = {"gate": gate, "lower_bound": None if gate == "softplus" else -5.0, "varlen": packed}
    assert FORWARD.inputs is not None
    drawn = FORWARD.inputs(FORWARD.resolve_dims(dims), FORWARD.resolve_options(settings), "cpu", 0)
    original, found = plans.variant, []
    for own in (False, True):
        monkeypatch.setattr(plans, "variant", lambda *x, own=own: {**original(*x), "own_tails": own})
        plan = FORWARD.point(dims, settings, symbolic=True).plan("torch")
        (prep,) = (launch.kernel for launch in plan.launches if launch.label == "prep")
        assert (len([op for op in walk(prep.body) if op.opcode == "when"]) >= 2) == own
        sizes = {**dims, "chunks": -(-T // 32) + packed * dims["N"]}
        tensors = {n: t for n, t in drawn.items() if isinstance(t, torch.Tensor)}
        if packed:
            rows = [(first, end) for begin, end in pairwise(offsets) for first in range(begin, end, 32)]
            rows += [(-1, 0)] * (sizes["chunks"] - len(rows))
            tensors["chunk_table"] = torch.tensor(rows, dtype=torch.int32)
        for name in plans.FACTORS:
            b = plan.buffers[name]
            shape = [e.evaluate(sizes) for e in b.shape]
            tensors[name] = torch.full(shape, -1.0, dtype=to_torch(b.dtype))
        tensors["dt_bias"] = tensors["dt_bias"].view(2, 64)
        evaluate(prep, {t.name: tensors[t.name] for t in prep.tensors}, {s.name: sizes[s.name] for s in prep.dims})
        found.append(tensors)
    for name in plans.FACTORS:
        assert not (found[0][name] == -1.0).all()
        assert torch.equal(*(f[name].view(torch.uint8) for f in found)), name


# ---- segments --------------------------------------------------------------------------------------------------------

QUICK = ("bench", "slow-positive", "saturated", "identical-slow", "half-open", "large-values", "tiny-values")


@pytest.mark.parametrize("name", QUICK)
def test_segments_are_as_accurate_as_the_serial_scan(name: str, poisoned_memory: None) -> None:
    check_against_serial(NAMED[name], make(NAMED[name]), 5)


@pytest.mark.parametrize("name", ["slow-positive", "large-values"])
@pytest.mark.parametrize("ragged", [False, True])
def test_maps_in_one_launch_give_the_bits_of_two(name: str, ragged: bool, poisoned_memory: None) -> None:
    case = replace(NAMED[name], cu_seqlens=RAGGED) if ragged else NAMED[name]
    kwargs = make(case)
    apart, together = run(kwargs, segments=5), run(kwargs, segments=5, maps="one")
    assert torch.equal(together[0], apart[0])
    assert together[1] is not None
    assert apart[1] is not None
    assert torch.equal(together[1], apart[1])


@pytest.mark.slow
@pytest.mark.parametrize("segments", [2, 3, 4])
@pytest.mark.parametrize("name", NAMED)
def test_segments_are_as_accurate_as_the_serial_scan_on_every_family(
    name: str, segments: int, poisoned_memory: None
) -> None:
    case = replace(NAMED[name], T=200 + 125 * segments)
    check_against_serial(case, make(case), segments)


@pytest.mark.parametrize(("state", "v_first"), [("none", False), ("fp32", True)])
def test_packed_sequences_are_cut_one_by_one(state: str, v_first: bool, poisoned_memory: None) -> None:
    case = Case("packed", cu_seqlens=RAGGED, H=2, gate="slow", state=state, state_v_first=v_first)
    check_against_serial(case, make(case), 5)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["bench", "softplus"])
@pytest.mark.parametrize("case", FAMILIES["ragged"], ids=lambda c: c.name)
def test_every_ragged_family(case: Case, gate: str, poisoned_memory: None) -> None:
    for segments in (2, 5):
        wanted = replace(case, H=2, state="fp32", gate=gate)
        check_against_serial(wanted, make(wanted), segments)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["bench", "softplus"])
@pytest.mark.parametrize("state", ["fp32", "bf16", "arange"])
@pytest.mark.parametrize("v_first", [False, True])
def test_batches_and_states(gate: str, state: str, v_first: bool, poisoned_memory: None) -> None:
    case = Case("batch", B=2, T=250, H=2, HV=4, V=32, gate=gate, state=state, state_v_first=v_first)
    check_against_serial(case, make(case), 3)


@pytest.mark.slow
def test_the_output_is_the_same_when_no_final_state_is_wanted(poisoned_memory: None) -> None:
    kwargs = make(NAMED["bench"])
    o, _ = run(kwargs, segments=3)
    alone, nothing = run({**kwargs, "output_final_state": False}, segments=3)
    assert nothing is None
    assert torch.equal(alone, o)


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{"map_precision": "tf32"}, {"factors": bf16}, {"block_v": 16}])
def test_every_knob_of_the_maps_is_right(knobs: dict[str, Any], poisoned_memory: None) -> None:
    case = NAMED["slow"]
    kwargs = make(case)
    for got, want in zip(run(kwargs, segments=4, **knobs), recurrence(**kwargs), strict=True):
        assert_close_rms("o, state", got, want, case.limit_o)


def test_fp32_inputs_keep_fp32s_accuracy(poisoned_memory: None) -> None:
    case = replace(NAMED["slow"], dtype=torch.float32, T=200, H=1)
    kwargs = make(case)
    for got, want in zip(run(kwargs, segments=4, block_v=32), recurrence(**kwargs), strict=True):
        assert_close_rms("o, state", got, want, 1e-5)


def test_a_map_that_has_decayed_far_is_exact_beside_a_large_state(poisoned_memory: None) -> None:
    """The second segment's map is e^-15, below fp16's normal numbers; times a state of 1e6 it is as large as what is added."""
    kwargs = make(replace(NAMED["midpoint"], T=192, state="fp32"))
    kwargs["initial_state"] *= 1e6
    kwargs["g"][:, :48] = -30  # nearly no decay
    kwargs["g"][:, 48:] = math.log(1 / 15)  # -5 sigmoid(log(1/15)) = -5/16 a token, -15 over the 48 tokens of a segment
    o, state = run(kwargs, segments=4)
    serial, serial_state = run(kwargs)
    expected, expected_state = recurrence(**kwargs)
    third = slice(96, 144)
    assert expected[:, third].abs().max() > 1e-2  # the map's part is there
    error = relative_rms(serial[:, third], expected[:, third])
    assert relative_rms(o[:, third], expected[:, third]) <= 1.1 * error
    assert_close_rms("final state", state, expected_state, 1.1 * relative_rms(serial_state, expected_state))


@pytest.mark.parametrize(("first", "value"), [(100, 1e6), (0, 1e-7)])
def test_only_the_segments_that_fp16_cannot_hold_are_done_again(
    first: int, value: float, poisoned_memory: None
) -> None:
    """Segments of 48 rows. Rows 96 on are too large, or all are too small; of head 1 only."""
    kwargs = make(replace(NAMED["slow"], T=192))
    kwargs["v"][:, first:140, 1] = value
    if value < 1:
        kwargs["v"][:, 140:, 1] = value
    with recording() as calls:
        o, state = run(kwargs, segments=4)
    expected, expected_state = recurrence(**kwargs)
    for head in range(2):
        assert_close_rms(f"o of head {head}", o[:, :, head], expected[:, :, head], 5e-3)
        assert_close_rms(f"state of head {head}", state[:, head], expected_state[:, head], 5e-3)
    flags = {name: calls[0].tensors[name].squeeze(-1).tolist() for name in ("out_of_range", "end_out_of_range")}
    if value > 1:  # the third holds the large rows, the fourth starts from them; nobody starts from the fourth's end
        assert flags == {
            "out_of_range": [[0, 0], [0, 0], [0, 1], [0, 1]],
            "end_out_of_range": [[0, 0], [0, 0], [0, 1], [0, 0]],
        }
    else:
        assert flags == {"out_of_range": [[0, 1]] * 4, "end_out_of_range": [[0, 1]] * 3 + [[0, 0]]}


def test_the_segment_table_names_every_segment_once_and_pads_with_minus_one() -> None:
    """Chunks of 16, 9 of them at most in 3 segments of 3: sequences of 0, 5, 65 and 0 tokens have 0, 1, 5 and 0 chunks."""
    q = torch.randn(1, 70, 1, 64)
    with recording() as calls:
        run(
            {"q": q, "k": q, "v": q, "g": -q.abs(), "beta": q[..., 0], "cu_seqlens": torch.tensor([0, 0, 5, 70, 70])},
            segments=3,
        )
    tables = calls[0].tensors
    assert tables["segment_offsets"].tolist() == [0, 1, 2, 4, 5]
    assert tables["segment_table"].tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [3, 0], [-1, 0], [-1, 0]]


# ---- slices ----------------------------------------------------------------------------------------------------------

SLICED = (
    Case("plain", T=200, H=2, gate="slow"),
    Case("states", B=2, T=130, H=2, HV=4, V=32, gate="slow", state="fp32", state_v_first=True),
    Case("bf16-state", T=97, H=1, gate="bench", state="bf16"),
    Case("softplus", T=100, H=1, gate="softplus", state="arange"),
    Case("packed", cu_seqlens=RAGGED, H=2, gate="slow"),
    Case("packed-states", cu_seqlens=RAGGED, H=2, gate="slow", state="fp32", state_v_first=True),
    Case("packed-short", cu_seqlens=(0, 3, 3, 4), H=1, gate="bench", state="fp32"),
    Case("short", T=17, H=1, gate="bench", state="fp32"),
)


@pytest.mark.parametrize("slices", [2, 3, 16])
@pytest.mark.parametrize("case", SLICED, ids=lambda c: c.name)
def test_slices_give_the_bits_of_one_piece(case: Case, slices: int, poisoned_memory: None) -> None:
    """Also where some slices have no chunks, sequences begin and end in different ones, and some are empty."""
    kwargs = make(case)
    for got, want in zip(run(kwargs, slices=slices), run(kwargs), strict=True):
        assert torch.equal(got, want)
    o, nothing = run({**kwargs, "output_final_state": False}, slices=slices)
    assert nothing is None
    assert torch.equal(o, run(kwargs)[0])


@pytest.mark.parametrize("name", QUICK)
def test_slices_give_the_bits_of_one_piece_on_every_family(name: str, poisoned_memory: None) -> None:
    """Also where fp16 cannot hold the values, and the whole sequence is done again."""
    kwargs = make(NAMED[name])
    for got, want in zip(run(kwargs, slices=4), run(kwargs), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("value", "rows"), [(1e6, slice(100, 140)), (1e-7, slice(0, 192)), (1e-7, slice(0, 60))])
def test_a_sequence_is_judged_as_a_whole(value: float, rows: slice, poisoned_memory: None) -> None:
    """Slices of 48 rows. Of head 1 some rows are too large, or all too small; small ones beside others are fine."""
    kwargs = make(replace(NAMED["slow"], T=192))
    kwargs["v"][:, rows, 1] = value
    with recording() as calls:
        o, state = run(kwargs, slices=4)
        whole, whole_state = run(kwargs)
    flags = [call.tensors["out_of_range"].flatten().tolist() for call in calls]
    assert flags[0] == flags[1] == [0, int(rows != slice(0, 60))]
    assert torch.equal(o, whole)
    assert state is not None
    assert whole_state is not None
    assert torch.equal(state, whole_state)


def test_slices_run_prep_ahead_of_the_scan() -> None:
    """Each scan waits for its own prep alone; preps take turns on two lanes, and the scans have one that goes first. What fp16
    could not hold is done again once, at the end."""
    plan = FORWARD.point({"T": 8192, "H": 4}, {"slices": 4, "segments": 1}).plan("torch")
    plan.check()
    assert [launch.label for launch in plan.launches] == ["prep", "scan", "rescan"]
    assert [step.launch for step in plan.steps] == [0, 1] * 4 + [2]
    assert [step.lane for step in plan.steps] == [0, -1, 1, -1] * 2 + [-1]
    assert [step.after for step in plan.steps] == [after for n in range(4) for after in ((), (2 * n,))] + [()]
    sizes = [tuple(e.evaluate({"T": 8192}) for e in step.dims.values()) for step in plan.steps if step.launch == 1]
    assert sizes == [(0, 64, 0, 4), (64, 64, 1, 4), (128, 64, 2, 4), (192, 64, 3, 4)]
    assert not {"first", "slice_chunks", "part", "parts"} & set(plan.symbols())  # a call gives none of them


# ---- one kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["slow-positive", "large-values", "softplus-16"])
def test_one_kernel_gives_the_two_kernels_bits(name: str, poisoned_memory: None) -> None:
    kwargs = make(NAMED[name])
    for got, want in zip(run(kwargs, form="one"), run(kwargs), strict=True):
        assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_one_kernel_gives_the_two_kernels_bits_on_every_family(name: str, poisoned_memory: None) -> None:
    kwargs = make(NAMED[name])
    for knobs in ({}, {"factors": bf16}, {"chunk": 32, "block_v": 16}):
        for got, want in zip(run(kwargs, form="one", **knobs), run(kwargs, **knobs), strict=True):
            assert torch.equal(got, want)


def test_one_kernel_takes_packed_sequences(poisoned_memory: None) -> None:
    case = Case("packed", cu_seqlens=RAGGED, H=2, gate="slow", state="fp32", state_v_first=True)
    kwargs = make(case)
    for got, serial, want in zip(run(kwargs, form="one"), run(kwargs), recurrence(**kwargs), strict=True):
        assert_close_rms("o, state", got, want, case.limit_o)
        assert torch.equal(got, serial)


# ---- both ------------------------------------------------------------------------------------------------------------

FORMS = ({"segments": 4}, {"form": "one"}, {"slices": 4})


@pytest.mark.parametrize("knobs", FORMS)
def test_repeats_are_bitwise_equal(knobs: dict[str, Any], poisoned_memory: None) -> None:
    kwargs = make(NAMED["slow-positive"])
    for first, second in zip(run(kwargs, **knobs), run(kwargs, **knobs), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("knobs", FORMS)
@pytest.mark.parametrize("t", [17, 103])
def test_an_output_never_depends_on_later_tokens_to_the_last_bit(knobs: dict[str, Any], t: int) -> None:
    kwargs = make(NAMED["slow"])
    before = run(kwargs, **knobs)[0][:, :t].clone()
    generator = torch.Generator().manual_seed(1)
    for name in ("q", "k", "v", "g", "beta"):
        later = kwargs[name][:, t:]
        later.copy_(3 * torch.randn(later.shape, generator=generator))
    assert torch.equal(run(kwargs, **knobs)[0][:, :t], before)


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "segments"),
    [
        ({"H": 12, "T": 32768}, 11),  # 24 programs: 11 parts fill 264 places
        ({"H": 4, "T": 65536}, 32),
        ({"H": 4, "T": 16384}, 32),
        ({"H": 24, "T": 131072}, 5),
        ({"H": 12, "T": 8192}, 1),  # short
        ({"H": 96, "T": 131072}, 1),  # fills the GPU
        ({"H": 12, "T": 32768, "B": 4}, 1),
        ({"H": 12, "T": 16383}, 1),
    ],
)
def test_segments_are_for_long_sequences_of_few_heads(dims: dict[str, int], segments: int) -> None:
    knobs = FORWARD.point(dims, {}).knobs
    assert (knobs["segments"], knobs["form"], knobs["chunk"]) == (segments, "two", 32)


def test_packed_sequences_count_by_their_average_length() -> None:
    packed = lambda n: FORWARD.point({"H": 12, "T": 32768, "N": n}, {"varlen": True}).knobs["segments"]  # noqa: E731
    assert (packed(1), packed(2), packed(3)) == (11, 5, 1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"form": "one", "segments": 2}, "form one carries a whole sequence"),
        ({"slices": 2, "segments": 2}, "slices are of a scan in one piece"),
        ({"slices": 2, "form": "one"}, "slices are of a scan in one piece"),
        ({"map_precision": "tf32"}, "map_precision is for segments"),
        ({"map_precision": "tf32", "segments": 2, "dtype": f32}, "coarser than fp32 inputs"),
    ],
)
def test_what_makes_no_sense_together_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(LegalityError, match=reason):
        FORWARD.point({"H": 2}, settings).plan("torch")


def test_the_serial_form_has_no_launch_or_buffer_of_the_others() -> None:
    plan = FORWARD.point({"H": 96}, {}).plan("torch")
    assert [launch.label for launch in plan.launches] == ["prep", "scan", "rescan"]
    assert not {"segment_ends", "transition", "incoming", "end_out_of_range"} & set(plan.buffers)


# ---- machine code ----------------------------------------------------------------------------------------------------


def inspected(
    backend: str, dims: dict[str, int], settings: dict[str, Any], known: tuple[str, ...] = ("prep",)
) -> dict[str, Any]:
    """What the compiler says about each launch of a plan for sm_90a but those whose code is `known`."""
    from k3dsl.runtime.executable import fitted
    from k3dsl.targets import get_target

    plan = FORWARD.point(dims, settings, symbolic=True).plan(backend)
    target = get_target("sm_90a")
    return {x.label: fitted(x, target)[1].inspection for x in plan.launches if x.label not in known}


LONG = {"H": 12, "T": 32768}
WHOLE = {"form": "one", "chunk": 16, "block_v": 128}
UNBOUNDED = {"gate": "softplus", "lower_bound": None}


FEW = {"scan": 32, "ends": 32, "maps": 32, "ends_again": 64, "rescan": 64}
"""Spilled bytes a thread at most: what 64-bit row and chunk numbers cost beside a full register file."""


def check_code(found: dict[str, Any], spills: dict[str, int]) -> None:
    """No more spilled bytes than allowed to each launch, 0 where none are named; and the scans use wgmma."""
    for label, code in found.items():
        assert (code.spill_bytes or 0) <= spills.get(label, 0), label
        if label in ("ends", "transitions", "maps", "scan", "fused"):
            assert code.instructions.get("wgmma", 0) > 0


def test_the_new_kernels_compile_for_hopper_without_spills() -> None:
    pytest.importorskip("triton")
    apart = inspected("triton", LONG, {"maps": "two"}, ("prep", "ends", "ends_again", "fold", "scan", "rescan"))
    together = inspected("triton", LONG, {}, ("prep", "ends_again", "scan", "rescan"))
    assert (list(apart), list(together)) == (["transitions"], ["maps", "fold"])
    check_code({**apart, **together}, FEW)
    check_code(inspected("triton", {"H": 96}, WHOLE, ("fused_again",)), {})


@pytest.mark.slow
def test_every_new_kernel_compiles_for_hopper() -> None:
    pytest.importorskip("triton")
    apart, together = inspected("triton", LONG, {"maps": "two"}), inspected("triton", LONG, {})
    assert list(apart) == ["ends", "ends_again", "transitions", "fold", "scan", "rescan"]
    assert list(together) == ["maps", "ends_again", "fold", "scan", "rescan"]
    check_code({**apart, **together}, FEW)
    check_code(inspected("triton", {"H": 96}, WHOLE), {"fused_again": 128})
    check_code(inspected("triton", {"H": 96}, {**WHOLE, "varlen": True}), {"fused_again": 128})


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"varlen": True}, UNBOUNDED, {"factors": bf16}, {"maps": "one"}])
def test_variants_of_the_segments_compile_for_hopper(settings: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    check_code(inspected("triton", LONG, {"segments": 8, "initial_state": f32, **settings}), FEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"segments": 8}, {"segments": 8, "maps": "one"}, WHOLE, {**WHOLE, **UNBOUNDED}, {**WHOLE, "varlen": True}],
)
def test_the_new_kernels_compile_through_tilelang(settings: dict[str, Any]) -> None:
    pytest.importorskip("tilelang")
    from k3dsl.backends.tilelang import nvcc

    if nvcc.find() is None:
        pytest.skip("there is no nvcc")
    check_code(inspected("tilelang", {"H": 96}, settings), {"fused_again": 64})


def test_no_exponential_of_the_one_kernel_form_is_without_a_bound() -> None:
    from k3dsl.passes.exponents import check_exponents

    for settings in (WHOLE, {**WHOLE, **UNBOUNDED}):
        for launch in FORWARD.point({"H": 2}, settings, symbolic=True).plan("torch").launches:
            assert check_exponents(launch.kernel) == []
