"""What a sweep may choose: the space of an op, what depends on what in it, and why a point is refused."""

from __future__ import annotations

import random

import pytest

from k3dsl.autotune.space import Space
from k3dsl.autotune.trial import End, end_of_reasons
from k3dsl.errors import ArgumentError, UnknownNameError
from k3dsl.ops.kda import plans
from k3dsl.ops.registry import get_op
from k3dsl.targets import get_target

SM90 = get_target("sm_90a")
NORM = {"R": 128, "D": 1024}
DECODE = {"B": 4, "H": 8}


def space(op: str, dims: dict[str, int], *backends: str, **extra: object) -> Space:
    target = None if backends == ("torch",) else SM90
    return Space(get_op(op), dims, extra.pop("options", {}), target, backends, **extra)


def test_on_the_torch_backend_only_knobs_are_chosen():
    found = space("rmsnorm", NORM, "torch")
    assert set(found.default()) == {"rows", "num_warps"}
    assert found.size() == 5 * 6
    assert len(list(found.enumerate())) == 30


def test_constraints_are_resolved_before_a_point_is_listed():
    found = space("rmsnorm", {"R": 128, "D": 7168}, "torch")  # 16 rows of 8192 do not fit
    assert {point["rows"] for point in found.enumerate()} == {1, 2, 4, 8}
    (reason,) = found.reasons({"rows": 16, "num_warps": 8})
    assert "do not fit" in reason.message
    assert end_of_reasons([reason]) is End.ILLEGAL


def test_a_schedule_field_belongs_to_its_backend():
    found = space("kda.decode", DECODE, "triton", "tilelang")
    for seed in range(20):
        point = found.draw(random.Random(seed))
        names = set(found.parameters(point))
        one = {"block_v", "decode.backend"}
        if point.get("decode.backend") == "tilelang":
            assert names == one | {"decode.threads"}
        else:
            assert names == one | {"decode.num_warps"}


def test_every_launch_chooses_a_backend_and_its_loops_depths():
    found = space("kda.forward", {"T": 256, "H": 2}, "triton", "tilelang")
    moved = found.default() | {"scan.backend": "tilelang"}
    names = set(found.parameters(moved))
    assert {"prep.backend", "prep.num_warps", "scan.threads", "scan.stages.chunks", "scan.warp_specialize"} <= names
    assert "scan.num_warps" not in names
    assert [launch.backend for launch in found.launches(moved)] == ["triton", "tilelang", "triton"]


def test_a_launch_that_these_knobs_leave_out_has_nothing_to_choose():
    found = space("kda.forward", {"T": 256, "H": 2}, "triton")
    assert any(name.startswith("rescan.") for name in found.parameters(found.default()))
    wide = found.default() | {"factors": "bf16"}
    assert not any(name.startswith("rescan.") for name in found.parameters(wide))


def test_a_knob_that_decides_a_schedule_field_is_the_only_one_to_do_so():
    found = space("matmul", {}, "triton")
    assert set(found.parameters(found.default())) == {k.name for k in get_op("matmul").knobs}


@pytest.mark.parametrize(
    "op", ["kda.forward", "kda.decode", "matmul", "softmax", "rmsnorm", "attention", "segment_sum"]
)
def test_the_default_is_legal_and_is_what_its_parameters_lead_to(op):
    found = space(op, dict(get_op(op).cpu_dims), "triton")
    assert found.reasons(found.default()) == ()
    made = found.parameters(found.default())
    assert found.sample(lambda p: made[p.name]) == found.default()


def test_a_point_and_its_parameters_are_each_others():
    found = space("segment_sum", {}, "triton", "tilelang")
    for seed in range(10):
        point = found.draw(random.Random(seed))
        made = found.parameters(point)
        assert found.sample(lambda p, made=made: made[p.name]) == point


def test_enumeration_meets_every_point_once():
    found = space("kda.decode", DECODE, "triton", "tilelang")
    points = [found.text(p) for p in found.enumerate()]
    assert len(points) == len(set(points)) == found.size() == 5 * (5 + 2)  # 5 numbers of warps, 128 or 256 threads


def test_what_is_too_large_for_the_target_counts_as_such():
    found = space("kda.forward", {"T": 256, "H": 2}, "tilelang")
    deep = found.default() | {"chunk": 64, "block_v": 128, "scan.stages.chunks": 4}
    reasons = found.reasons(deep)
    assert {r.code for r in reasons} == {"shared_memory"}
    assert end_of_reasons(reasons) is End.OVER_RESOURCE


def test_a_pipeline_that_cannot_fit_never_reaches_triton():
    found = space("matmul", {"M": 1024, "N": 1024, "K": 1024}, "triton")
    deep = found.default() | {"block_m": 128, "block_n": 256, "block_k": 128, "num_warps": 8, "stages": 5}
    (reason,) = found.reasons(deep)
    assert reason.code == "shared_memory"
    assert "loop 'k' with 5 stages keeps at least 491520 bytes" in reason.message  # 5 x (128 + 256) x 128 bf16
    assert end_of_reasons([reason]) is End.OVER_RESOURCE
    assert found.reasons(deep | {"block_k": 64, "stages": 3}) == ()


def test_reasons_are_found_once(monkeypatch):
    found = space("rmsnorm", NORM, "triton")
    assert found.reasons(found.default()) == ()
    monkeypatch.setattr(found, "_find_reasons", None)
    assert found.reasons(found.default()) == ()


def test_a_fixed_setting_is_not_searched():
    found = space("kda.decode", DECODE, "triton", fixed={"block_v": 16, "decode.num_warps": 2})
    assert list(found.enumerate()) == [{"block_v": 16, "decode.num_warps": 2}]
    assert found.default() == {"block_v": 16, "decode.num_warps": 2}


def test_settings_read_as_the_command_line_takes_them():
    assert Space.text({"scan.warp_specialize": True, "chunk": 32}) == "--set chunk=32 --set scan.warp_specialize=true"


def test_seeds_are_the_ops_own_and_its_default_on_the_other_backend():
    found = space("matmul", {}, "triton", "tilelang").seeds()
    assert [s["block_n"] for s in found[:3]] == [256, 128, 256]
    assert found[-1]["matmul.backend"] == "tilelang"


def test_a_seed_for_a_backend_that_is_not_searched_is_left_out():
    dims = {"T": 8192, "H": 96}
    both = space("kda.forward", dims, "triton", "tilelang")
    moved = [point for point in both.seeds() if point.get("scan.backend") == "tilelang" and "prep.backend" not in point]
    assert [point["block_v"] for point in moved] == [128] + [64] * 6
    assert both.seeds()[: len(moved)] == moved
    for point in moved:
        assert both.reasons(point) == ()
        made = both.parameters(point)
        assert made | point == made  # nothing of it is lost on the way through the search
    for alone in (
        space("kda.forward", dims, "triton"),
        space("kda.forward", dims, "triton", "tilelang", fixed={"scan.backend": "triton"}),
    ):
        assert alone.seeds()
        assert not any("scan.threads" in point for point in alone.seeds())


def test_a_register_cap_is_chosen_where_the_op_sets_one(monkeypatch):
    monkeypatch.setattr(plans, "triton_release", lambda: (3, 6))
    for gate, cap in (("bounded", 128), ("softplus", 168)):
        found = space("kda.forward", {"T": 256, "H": 2}, "triton", options={"gate": gate})
        assert found.choices(found.default())["prep.maxnreg"] == (cap, (None, 96, 112, 128, 168))
        assert "scan.maxnreg" not in found.choices(found.default())
        free = found.default() | {"prep.maxnreg": None}
        assert found.launches(free)[0].schedule.maxnreg is None
        assert "--set prep.maxnreg=none" in found.text(free)
        assert "prep.maxnreg" not in found.choices(found.default() | {"chunk": 16})
    exact = space("kda.forward", {"T": 256, "H": 2}, "triton", options={"dtype": "f32"})
    assert "prep.maxnreg" not in exact.choices(exact.default() | {"chunk": 32})


def test_more_warps_or_deeper_pipelines_cost_more():
    found = space("kda.forward", {"T": 256, "H": 2}, "triton")
    shallow = found.cost(found.default() | {"scan.stages.chunks": 1})
    deep = found.cost(found.default() | {"scan.stages.chunks": 4})
    assert deep.shared_bytes > shallow.shared_bytes
    assert deep.threads == shallow.threads
    assert found.cost(found.default() | {"scan.num_warps": 8}).threads == deep.threads + 4 * 32


@pytest.mark.parametrize("backends", [("torch",), (), ("torch", "triton")])
def test_backends_that_do_not_go_together_are_refused(backends):
    with pytest.raises(ArgumentError):
        Space(get_op("rmsnorm"), NORM, {}, SM90, backends)


def test_an_unknown_fixed_setting_is_refused_with_near_misses():
    with pytest.raises(UnknownNameError, match="did you mean block_v"):
        space("kda.decode", DECODE, "triton", fixed={"block_w": 16})


def test_a_large_space_is_known_to_be_large_without_being_counted() -> None:
    """Its 10^10 points took 40 s to count, before any sweep."""
    found = space("moe.experts", {"T": 1024}, "triton", "tilelang")
    seen = iter(range(1000))
    whole = found._constraints
    found._constraints = lambda settings: (next(seen), whole(settings))[1]  # type: ignore[method-assign]
    assert found.small() is None
    assert next(seen) < 1000
