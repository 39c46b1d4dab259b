"""Inputs that are drawn once and copied to every candidate: same numbers, same layout, nobody else's memory."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from k3dsl.autotune.drawn import Drawn, moved
from k3dsl.autotune.study import floor_of
from k3dsl.ir.identity import kernel_hash
from k3dsl.ops.registry import get_op
from k3dsl.runtime.dispatch import planning
from k3dsl.runtime.op import defaults_only
from k3dsl.runtime.sketch import sketched
from k3dsl.targets import Ceilings


def test_halves_of_one_tensor_are_halves_of_one_copy() -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    copied: dict[int, torch.Tensor] = {}
    left, right = (moved(half, "cpu", copied) for half in whole.split([1, 3], -1))
    assert left.stride() == (12, 4, 1)
    assert right.storage_offset() == 1
    assert torch.equal(left, whole[..., :1])
    assert torch.equal(right, whole[..., 1:])
    left.fill_(-1)
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    assert whole[0, 0, 0] == 0


def test_lists_are_copied_and_other_values_are_kept() -> None:
    rows = [torch.ones(2), torch.zeros(2)]
    there = moved(rows, "cpu", {})
    assert [r.tolist() for r in there] == [[1, 1], [0, 0]]
    assert there[0] is not rows[0]
    assert moved(None, "cpu", {}) is None
    assert moved(0.5, "cpu", {}) == 0.5


@pytest.mark.parametrize("op", ["mla.prefill", "kda.forward", "moe.experts", "attnres.site"])
def test_what_takes_long_to_draw_is_drawn_once_for_each_problem(op: str) -> None:
    chosen = get_op(op)
    dims, options = chosen.resolve_dims(chosen.cpu_dims), chosen.resolve_options({})
    draw, seeds = chosen.inputs, []
    assert draw is not None

    def counting(dims: Any, options: Any, device: Any, seed: int) -> dict[str, Any]:
        seeds.append(seed)
        return draw(dims, options, device, seed)

    cpu, counted = torch.device("cpu"), replace(chosen, inputs=counting)
    slow, quick = Drawn(keep_above_s=-1.0), Drawn(keep_above_s=1e9)
    first = slow.get(counted, dims, options, cpu, 3)
    for x in first.values():
        if isinstance(x, torch.Tensor):
            x.zero_()  # whoever had it may do with it as he likes
    again = slow.get(counted, dims, options, cpu, 3)
    assert seeds == [3]
    expected = draw(dims, options, cpu, 3)
    assert first.keys() == again.keys() == expected.keys()
    for name, want in expected.items():
        if isinstance(want, torch.Tensor):
            assert again[name].stride() == want.stride()
            assert torch.equal(again[name], want)
    slow.get(counted, dims, options, cpu, 4)
    slow.get(counted, {**dims, "T": 32}, options, cpu, 4)
    assert seeds == [3, 4, 4]
    quick.get(counted, dims, options, cpu, 5)
    quick.get(counted, dims, options, cpu, 5)
    assert seeds == [3, 4, 4, 5, 5]


@pytest.mark.parametrize("op", ["kda.forward", "kda.decode", "mla.decode", "moe.experts", "causal_conv1d"])
def test_a_sketch_of_inputs_plans_what_the_inputs_plan(op: str) -> None:
    """Layouts, offsets into shared memory and all."""
    chosen = get_op(op)
    assert chosen.cases is not None
    assert chosen.call is not None
    for case in chosen.cases("small")[:: 7 if op == "kda.forward" else 3]:
        hashes = []
        for inputs in (case.make("cpu", 0), sketched(partial(case.make, "cpu", 0))):
            with torch.inference_mode(), planning("triton") as calls, defaults_only(chosen):
                chosen.call(**chosen.fresh(inputs))
            hashes.append([kernel_hash(launch.kernel) for call in calls for launch in call.executable.plan.launches])
        assert hashes[0] == hashes[1] != []


def test_a_sketch_takes_no_memory_and_integers_read_as_0() -> None:
    before = resident()
    found = sketched(lambda: {"packed": torch.zeros(1 << 30, dtype=torch.uint8), "x": torch.empty(1 << 29)})
    assert resident() - before < 100 << 20
    assert found["packed"][12345] == 0
    assert found["x"].shape == (1 << 29,)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_sketch_is_drawn_where_its_shape_depends_on_numbers() -> None:
    x = torch.tensor([1.0, 0.0, 2.0])
    assert sketched(lambda: {"o": x[x.nonzero().flatten().tolist()]})["o"].tolist() == [1, 2]


def test_the_floor_counts_what_a_call_on_packed_sequences_moves() -> None:
    """Two sequences of 64 tokens, 2 heads of 128 in bf16: q, k, v, g read and o written once, and the factors and states."""
    op = get_op("kda.forward")
    rates = Ceilings(1e-6, None, "a byte a ms")
    dims = {**{d.name: d.default for d in op.dims}, "T": 128, "H": 2, "N": 2}
    packed = floor_of(op, dims, op.resolve_options({"varlen": True}), "triton", rates)
    whole = floor_of(op, {**dims, "N": 1}, op.resolve_options({}), "triton", rates)
    streams = 5 * 128 * 2 * 128 * 2
    assert packed > whole > streams
    assert packed < 4 * whole
