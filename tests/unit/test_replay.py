"""Calls again of a kind that was seen: they give what the op's function gives, and never pass what its checks refuse."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from op_examples import called, drawn
from torch.utils._python_dispatch import TorchDispatchMode

import k3dsl
from k3dsl import ops
from k3dsl.errors import ArgumentError
from k3dsl.ops.registry import get_op, op_names
from k3dsl.runtime import dispatch, replay
from k3dsl.runtime.executable import BoundLaunch, recording
from k3dsl.runtime.op import Op, forced

SMALL: dict[str, dict[str, int]] = {
    "matmul": {"M": 32, "N": 24, "K": 40},
    "softmax": {"R": 5, "N": 24},
    "rmsnorm": {"R": 5, "D": 32},
    "gated_rmsnorm": {"N": 5, "H": 2, "D": 16},
    "segment_sum": {"T": 20, "N": 3, "D": 16},
    "causal_conv1d": {"T": 16, "P": 32},
    "causal_conv1d.update": {"B": 3, "P": 32, "pool": 4},
    "attention": {"T": 16, "S": 16, "H": 2, "HK": 2, "D": 16, "V": 16},
    "attention.decode": {"B": 2, "S": 32, "H": 2, "HK": 1, "D": 16, "V": 16},
    "kda.forward": {"T": 32, "H": 1, "K": 64, "V": 16},
    "kda.decode": {"B": 3, "H": 2, "K": 64, "V": 16, "slots": 3},
    "kda.step": {"B": 3, "H": 1, "K": 64, "V": 16, "pool": 3},
    "kda.commit": {"B": 3, "T": 2, "E": 24, "size": 4},
    "mla.prefill": {"T": 16, "S": 16, "H": 2, "D": 16, "E": 16, "V": 16},
    "mla.decode": {"B": 2, "H": 2, "S": 64, "C": 32, "E": 16},
    "mla.cache_write": {"N": 5, "C": 32, "E": 16, "pages": 2},
    "moe.router": {"T": 5, "D": 32, "E": 12, "K": 2},
    "moe.topk": {"T": 5, "E": 12, "K": 2},
    "moe.sort": {"T": 6, "E": 5, "K": 2},
    "moe.experts": {"T": 6, "E": 4, "K": 2, "D": 32, "I": 32},
    "moe.situ": {"R": 5, "I": 32},
    "attnres.site": {"T": 3, "N": 2, "D": 32},
    "attnres.phase1": {"T": 3, "N": 2, "S": 2, "D": 32},
    "attnres.merge": {"T": 3, "D": 32},
    **{name: {"T": 32, "H": 2, "K": 16, "V": 16} for name in ("linear_attention", "delta_rule", "gated_delta_rule")},
    **{
        f"{name}.decode": {"B": 2, "H": 2, "K": 16, "V": 16, "slots": 2}
        for name in ("linear_attention", "delta_rule", "gated_delta_rule")
    },
}
UNREPLAYED = {
    "kda.commit",  # judged through a function without checks
    "segment_sum",  # goes by the numbers of its offsets where it can look at them
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each replayed call went."""
    seen: list[str] = []
    for kind in (replay._ByTensors, replay._ByAddress):

        def counted(self: Any, *given: Any, again: Callable[..., Any] = kind.__call__) -> Any:
            seen.append(type(self).__name__)
            return again(self, *given)

        monkeypatch.setattr(kind, "__call__", counted)
    return seen


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches take addresses, as on a GPU: what they are given is put together to tensors again, and evaluated."""

    def fixed(self: BoundLaunch, dims: dict[str, int]) -> Any:
        tensors = {self.launch.buffer_of(t.name): t for t in self.kernel.tensors}

        def at(name: str, address: int) -> torch.Tensor:
            from k3dsl.backends.torch.dtypes import to_torch

            t = tensors[name]
            shape = [e.evaluate(dims) for e in t.shape]
            strides = [e.evaluate(dims) for e in t.strides] if t.strides is not None else None
            if strides is None:
                strides = list(torch.empty(shape, device="meta").stride())
            count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            memory = (ctypes.c_char * (count * t.dtype.bytes)).from_address(address)
            return torch.frombuffer(memory, dtype=to_torch(t.dtype)).as_strided(shape, strides)

        def launcher(grid: tuple[int, ...], args: list[Any]) -> None:
            assert grid == (*self.grid(dims), 1, 1)[:3]
            self.run({n: at(n, address) for n, address in zip(tensors, args, strict=True)}, dims)

        return launcher, (*self.grid(dims), 1, 1)[:3], [0] * len(tensors), list(enumerate(tensors))

    monkeypatch.setattr(BoundLaunch, "fixed", fixed)


def agree(op: Op) -> None:
    for seed in (0, 1):
        called(op, drawn(op, SMALL[op.name], "cpu", seed))
    inputs = drawn(op, SMALL[op.name], "cpu", 2)
    again = called(op, inputs)
    with recording():
        expected = called(op, inputs)
    assert again.keys() == expected.keys()
    for name, x in again.items():
        assert x.shape == expected[name].shape
        assert x.dtype == expected[name].dtype
        assert torch.equal(x.nan_to_num(7.0), expected[name].nan_to_num(7.0)), name


@pytest.mark.parametrize("name", op_names())
def test_a_call_again_gives_what_the_function_gives_on_other_numbers(name: str, replays: list[str]) -> None:
    agree(get_op(name))
    assert replays == ([] if name in UNREPLAYED else ["_ByTensors"])


@pytest.mark.parametrize("name", [n for n in op_names() if n not in UNREPLAYED])
@pytest.mark.usefixtures("addresses")
def test_launches_by_address_get_the_same_tensors(name: str, replays: list[str]) -> None:
    agree(get_op(name))
    assert replays == ["_ByAddress"]


# ---- what is no call of a kind that passed ---------------------------------------------------------------------------------


def decode_inputs() -> dict[str, Any]:
    return drawn(get_op("kda.decode"), SMALL["kda.decode"], "cpu", 0)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


BAD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "dtype": (lambda p: {"k": p["k"].to(torch.float16)}, "k: is float16"),
    "shape": (lambda p: {"beta": p["beta"][:, :, :1].contiguous()}, "beta: has shape"),
    "rank": (lambda p: {"q": p["q"][:, 0]}, "q: has shape"),
    "rows that lie apart": (lambda p: {"v": p["v"].repeat_interleave(2, -1)[..., ::2]}, "v: has strides"),
    "slots in parts": (
        lambda p: {"state": p["state"].transpose(-1, -2).contiguous().transpose(-1, -2)},
        "state: has strides",
    ),
    "device": (lambda p: {"g": p["g"].to("meta")}, "g: is on meta"),
    "a pool off its alignment": (lambda p: {"state": misaligned(p["state"])}, "state: does not start at"),
    "a positive bound": (lambda p: {"lower_bound": 5.0}, "lower_bound: is 5.0"),
    "no number": (lambda p: {"scale": float("nan")}, "scale: is nan"),
    "a slot beyond the pool": (lambda p: {"state_indices": p["state_indices"] + 99}, "state_indices: names slot"),
    "a slot twice": (
        lambda p: {"state_indices": torch.zeros_like(p["state_indices"])},
        "state_indices: names slot 0 twice",
    ),
    "a list for a tensor": (lambda p: {"state_indices": [0, 1, 2]}, "state_indices: is a list"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_the_checks_refuse_is_refused_after_any_number_of_good_calls(what: str, replays: list[str]) -> None:
    good = decode_inputs()
    change, message = BAD[what]
    bad = {**good, **change(good)}
    for _ in range(3):
        for _ in range(3):
            ops.kda_decode(**{**good, "state": good["state"].clone()})
        with pytest.raises(ArgumentError, match=message):
            ops.kda_decode(**bad)
    assert len(replays) == 7


def test_numbers_that_are_equal_but_of_other_types_are_other_calls() -> None:
    logits = torch.randn(5, 12)
    for _ in range(3):
        ops.moe_topk(logits, None, 1)
    with pytest.raises(ArgumentError, match="top_k: is True"):
        ops.moe_topk(logits, None, True)


def test_what_makes_a_kind_of_call() -> None:
    def key(*arguments: Any) -> list[Any] | None:
        found: list[Any] = []
        return found if replay._describe(arguments, found, [], [], False) else None

    assert key(1.0) == key(1.0) != key(1)
    assert key(0.0) == key(0.0) != key(-0.0)
    assert key(math.nan) is None  # equal to nothing
    x = torch.view_as_complex(torch.ones(8, 2)).conj().imag[:1]  # to be negated when it is read
    assert x.is_neg()
    assert x.is_contiguous()
    assert key(x) is None
    assert key(x.resolve_neg()) is not None


def test_page_tables_and_lengths_are_looked_at_in_every_call(replays: list[str]) -> None:
    inputs = drawn(get_op("mla.decode"), SMALL["mla.decode"], "cpu", 0)
    for _ in range(3):
        ops.mla_decode(**inputs)
    assert replays == ["_ByTensors"]
    with pytest.raises(ArgumentError, match="cache_seqlens: is 9999"):
        ops.mla_decode(**{**inputs, "cache_seqlens": torch.full_like(inputs["cache_seqlens"], 9999)})
    with pytest.raises(ArgumentError, match="page_table: names page 99"):
        ops.mla_decode(**{**inputs, "page_table": inputs["page_table"] + 99})


# ---- tensors that share memory -----------------------------------------------------------------------------------------------


def test_arguments_that_were_one_tensor_in_the_calls_before_are_told_apart(replays: list[str]) -> None:
    x, other, w = torch.randn(4, 2, 16), torch.randn(4, 2, 16), torch.randn(16)
    for _ in range(2):
        ops.gated_rmsnorm(x, x, w)
    got = ops.gated_rmsnorm(x, other, w)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    torch.testing.assert_close(got.double(), normed * torch.sigmoid(other.double()), rtol=1e-5, atol=1e-5)
    assert len(replays) == 1


def test_parts_of_a_fused_tensor_are_found_wherever_they_lie(replays: list[str]) -> None:
    fused = torch.randn(6, 64)
    for _ in range(2):
        ops.situ(fused[:, :32], fused[:, 32:])
    gate, up = torch.randn(6, 64)[:, 32:], torch.randn(6, 64)[:, :32]
    g, u = gate.double(), up.double()
    expected = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
    torch.testing.assert_close(ops.situ(gate, up).double(), expected, rtol=1e-5, atol=1e-5)
    assert len(replays) == 1


def test_queries_in_two_parts_are_joined_anew_whether_or_not_they_are_neighbours() -> None:
    inputs = drawn(get_op("mla.prefill"), SMALL["mla.prefill"], "cpu", 0)
    q = inputs.pop("q")
    with recording():
        expected = ops.mla_prefill(q, **inputs)
    for pair in ((q[..., :16], q[..., 16:]), (q[..., :16].clone(), q[..., 16:].clone())) * 3:
        got = ops.mla_prefill(pair, **inputs)
        assert isinstance(got, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(got, expected)


def test_a_pool_comes_back_as_the_tensor_that_was_given() -> None:
    inputs = decode_inputs()
    for _ in range(4):
        assert ops.kda_decode(**inputs)[1] is inputs["state"]


def test_what_lies_off_its_alignment_or_is_to_be_negated_goes_the_long_way(replays: list[str]) -> None:
    w = torch.ones(8)
    x = torch.randn(5, 8)
    for _ in range(3):
        ops.rmsnorm(x, w)
    torch.testing.assert_close(ops.rmsnorm(misaligned(x), w), ops.rmsnorm(x, w))
    z = torch.complex(torch.zeros(5, 8), x).conj().imag
    assert z.is_neg()
    for _ in range(3):
        torch.testing.assert_close(ops.rmsnorm(z, w), -ops.rmsnorm(x, w))
    assert len(replays) == 5


# ---- who wants to know -------------------------------------------------------------------------------------------------------


def executables(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The knob `rows` of each executable that is called, replayed or not."""
    from k3dsl.runtime.executable import Executable

    rows: list[int] = []

    def noted(self: Any, *given: Any, run: Any = Executable.__call__) -> Any:
        rows.append(int(self.plan.knobs["rows"]))
        return run(self, *given)

    monkeypatch.setattr(Executable, "__call__", noted)
    return rows


def test_what_is_forced_or_provided_counts_from_the_next_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    op, x = get_op("softmax"), torch.randn(24, 96)
    before = dispatch._provider
    rows = executables(monkeypatch)
    try:
        dispatch.provide(None)
        for _ in range(3):
            ops.softmax(x)
        default = rows[-1]
        assert default != 4
        for knob in (4, 2):
            with forced(op, {"rows": knob}, {}):
                for _ in range(3):
                    ops.softmax(x)
        ops.softmax(x)
        dispatch.provide(lambda p: dispatch.Choice(op.resolve_knobs({"rows": 2}), None, "torch"))
        for _ in range(4):
            ops.softmax(x)
        dispatch.provide(None)
        ops.softmax(x)
    finally:
        dispatch.provide(before)
    assert rows[3:] == [4, 4, 4, 2, 2, 2, default, 2, 2, 2, 2, default]


def test_replayed_calls_run_after_lock(replays: list[str]) -> None:
    x = torch.randn(7, 40)
    for _ in range(2):
        ops.softmax(x)
    with k3dsl.lock():
        torch.testing.assert_close(ops.softmax(x), x.softmax(-1))
    assert len(replays) == 1


def test_recordings_modes_and_gradients_see_every_call(replays: list[str]) -> None:
    x, w = torch.randn(5, 32), torch.randn(32)
    for _ in range(3):
        ops.rmsnorm(x, w)
    assert len(replays) == 1

    names: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with recording() as calls:
        ops.rmsnorm(x, w)
    with Seen():
        ops.rmsnorm(x, w)
    assert len(calls) == 1
    assert "k3dsl.rmsnorm.default" in names
    needs = x.clone().requires_grad_()
    ops.rmsnorm(needs, w).sum().backward()
    ref = x.double().requires_grad_()
    (ref * torch.rsqrt(ref.square().mean(-1, keepdim=True) + 1e-6) * w.double()).sum().backward()
    assert needs.grad is not None
    assert ref.grad is not None
    torch.testing.assert_close(needs.grad.double(), ref.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not ops.rmsnorm(needs, w).requires_grad
    assert len(replays) == 2


def test_threads_do_not_meet() -> None:
    xs = [torch.randn(3 + n, 24) for n in range(4)]
    for x in xs:
        ops.softmax(x)  # kernels are traced in one thread at a time
    dispatch.forget()
    right: list[bool] = []

    def work(seed: int) -> None:
        own = torch.Generator().manual_seed(seed)
        for n in range(40):
            x = torch.randn(3 + n % 4, 24, generator=own)
            right.append(torch.allclose(ops.softmax(x), x.softmax(-1), atol=1e-6))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 160


def test_a_function_remembers_so_many_kinds_of_calls_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST", 4)
    for rows in range(1, 12):
        x = torch.randn(rows, 24)
        for _ in range(3):
            torch.testing.assert_close(ops.softmax(x), x.softmax(-1))
    memo = next(m for m in dispatch._caches if getattr(m, "function", None) is ops.softmax.__wrapped__)  # type: ignore[attr-defined]
    assert isinstance(memo, replay._Memo)
    assert len(memo.known) <= 4


def test_a_function_that_works_on_the_way_is_never_replayed(replays: list[str]) -> None:
    @replay.replayed
    def halved(x: torch.Tensor) -> torch.Tensor:
        return ops.softmax(x * 0.5)

    for _ in range(4):
        x = torch.randn(6, 24)
        torch.testing.assert_close(halved(x), (x * 0.5).softmax(-1))
    assert len(replays) == 1  # the softmax inside, whose own third call it is but for the one that was watched


# ---- where tensors start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", op_names())
def test_code_that_counts_on_16_bytes_gets_no_tensor_that_starts_elsewhere(name: str) -> None:
    """Copied on the way, or refused where the op writes into it. Small cases have packed sequences and slots too."""
    op = get_op(name)
    assert op.call is not None
    cases = op.cases("small") if op.cases is not None else []
    ragged = [c for c in cases if c.family == "ragged" or "packed" in c.name][:1]
    inputs = [drawn(op, SMALL.get(name, {}), "cpu", 0), *(case.make("cpu", 0) for case in ragged)]
    for given in inputs:
        off = {n: misaligned(x) if isinstance(x, torch.Tensor) and n not in op.mutates else x for n, x in given.items()}
        with recording() as calls, contextlib.suppress(ArgumentError):
            op.call(**op.fresh(off))
        for call in calls:
            astray = [n for n, t in call.tensors.items() if t.numel() and t.data_ptr() % 16]
            assert astray == []
