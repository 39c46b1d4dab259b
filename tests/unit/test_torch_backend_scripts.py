"""Small launches on the CPU run as scripts: the same bits as the interpreter gives, launch after launch."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch

from k3dsl.backends.torch import script
from k3dsl.backends.torch.evaluate import Evaluator
from k3dsl.ops.registry import get_op
from k3dsl.runtime import judge

LAUNCHES = 4  # seen, recorded, made into a script, run again

SMALL: dict[str, dict[str, int]] = {
    "kda.forward": {"T": 40, "H": 1, "HK": 1},
    "kda.step": {"B": 2, "H": 2, "pool": 3},
    "mla.prefill": {"T": 20, "S": 20, "H": 2},
    "mla.decode": {"B": 2, "H": 2, "S": 40},
    "moe.router": {"T": 3, "E": 16, "K": 4, "D": 64},
    "moe.experts": {"T": 3, "E": 4, "K": 2, "D": 64, "I": 32},
    "attnres.site": {"T": 3, "N": 2, "D": 96},
    "causal_conv1d": {"T": 9, "P": 48},
    "gated_delta_rule.decode": {"B": 2, "H": 2},
    "attention.decode": {"B": 2, "S": 40},
    "segment_sum": {"T": 20, "D": 16, "N": 3},
}


def evaluators() -> list[Evaluator]:
    return [x for x in gc.get_objects() if type(x) is Evaluator]


def scripts() -> int:
    layouts = [layout for e in evaluators() for layout in e._layouts.values()]
    layouts += [inner for layout in layouts for inner in layout.by_contents.values()]
    return sum(s is not None for layout in layouts for s in layout.scripts)


def outputs(name: str) -> list[dict[str, Any]]:
    """What the op gives for inputs of two seeds in turn, again and again; layouts seen before are forgotten first."""
    op = get_op(name)
    (case,) = judge.cases_of(op, dims=SMALL[name])
    for evaluator in evaluators():
        evaluator._layouts.clear()
    drawn = [case.make("cpu", seed) for seed in (0, 1)]
    return [op.call(**op.fresh(drawn[n % 2])) for n in range(2 * LAUNCHES)]


@pytest.mark.parametrize("often", [2, 1000], ids=["by_contents", "by_layout"])
@pytest.mark.parametrize("name", list(SMALL))
def test_a_script_gives_what_the_interpreter_gives(name, often, monkeypatch):
    """often: launches after which what small integer tensors hold is a part of the layout."""
    monkeypatch.setattr(sys.modules[Evaluator.__module__], "OFTEN", often)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[Evaluator.__module__], "launch_script", lambda *_: None)
        expected = outputs(name)
        assert scripts() == 0
    found = outputs(name)
    assert scripts() > 0
    for n, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for output, x in theirs.items():
            if isinstance(x, torch.Tensor):
                assert torch.equal(ours[output].nan_to_num(7.0), x.nan_to_num(7.0)), (n, output)


@pytest.mark.parametrize("limit", ["MAX_CALLS", "MAX_BYTES"])
def test_a_launch_that_would_be_too_large_is_left_to_the_interpreter(limit, monkeypatch):
    monkeypatch.setattr(script, limit, 2)
    outputs("segment_sum")
    assert scripts() == 0
