"""What the network asks of the tuner: its calls are those that `k3dsl tune` tunes, so that a pack's rows are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from k3dsl.autotune.key import options_of
from k3dsl.model import KimiK3ForCausalLM
from k3dsl.ops.registry import get_op
from k3dsl.runtime import dispatch
from k3dsl.runtime.dispatch import Problem, planning


def asked(network: KimiK3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """By op, the options that lookups of a prefill and a decode step compare, where they are not the op's default."""
    found: dict[str, list[dict[str, Any]]] = {}

    def look(problem: Problem) -> None:
        op = problem.op
        usual = options_of(op, op.resolve_options({}))
        given = options_of(op, problem.options)
        found.setdefault(op.name, []).append({n: x for n, x in given.items() if x != usual[n]})

    monkeypatch.setattr(dispatch, "tuned", look)
    cache = network.new_cache(2, capacity=64)
    with torch.no_grad(), planning("triton"):
        network(torch.zeros(2, 20, dtype=torch.long), past=cache, differentiable=False)
        network.decode(torch.zeros(2, 1, dtype=torch.long), cache, cache.slots)
    return found


def test_the_networks_calls_differ_from_the_usual_ones_in_what_changes_the_work_alone(monkeypatch):
    network = KimiK3ForCausalLM.from_config("K3-tiny", dtype=torch.bfloat16).eval()
    found = asked(network, monkeypatch)
    usual = (
        "mla.decode",
        "mla.prefill",
        "moe.experts",
        "moe.router",
        "moe.situ",
        "rmsnorm",
        "gated_rmsnorm",
        "causal_conv1d",
    )
    for name in usual:
        assert found[name]
        assert not any(found[name]), name
    assert found["kda.forward"] == [{"v_first": True}]  # which `k3dsl tune kda.forward --set v_first=true` tunes
    assert all(get_op(name) for name in found)
