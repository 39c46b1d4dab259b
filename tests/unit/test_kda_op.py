"""k3dsl.ops.kda and kda_decode on the CPU backend: right on every family, and well behaved as torch functions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from k3dsl import compile
from k3dsl.errors import ArgumentError, EvaluationError
from k3dsl.language import In, Out, Sym, bf16, f16, f32, kernel
from k3dsl.ops import kda, kda_decode
from k3dsl.ops.kda import kernels, plans
from k3dsl.ops.kda.inputs import Case, correctness_cases, make, make_decode
from k3dsl.ops.kda.reference import recurrence
from k3dsl.ops.kda.space import DECODE, FORWARD
from k3dsl.runtime.executable import Executable, recording
from k3dsl.runtime.metrics import assert_close_rms, relative_rms
from k3dsl.runtime.op import forced

SMALL = correctness_cases("small")


@pytest.mark.parametrize("case", SMALL, ids=[c.name for c in SMALL])
def test_forward_meets_its_limits_and_repeats_bitwise(case: Case, poisoned_memory: None) -> None:
    kwargs = make(case)
    o, state = kda(**kwargs)
    again, state_again = kda(**kwargs)
    expected, expected_state = recurrence(**kwargs)
    assert state is not None
    assert state_again is not None
    assert expected_state is not None
    assert_close_rms("o", o, expected, case.limit_o)
    assert_close_rms("final state", state, expected_state, case.limit_state)
    assert torch.equal(o, again)
    assert torch.equal(state, state_again)


def test_the_gate_of_the_levels_keeps_its_relative_accuracy_however_small_it_is() -> None:
    @kernel(grid=lambda d, c: (1,))
    def gate(d, c, z=In("N", f32), y=Out("N", f32)):
        y[:] = kernels.log2_softplus(z[:])

    z = torch.linspace(-120, 120, 4096)
    got = torch.empty_like(z)
    compile(gate, dims={"N": 4096}, target="cpu")(z=z, y=got)
    expected = torch.logaddexp2(torch.zeros(()).double(), z.double())
    assert ((got - expected) / expected).abs().max() < 1e-6


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_a_gate_that_closes_between_slow_tokens_loses_nothing_after_it(chunk: int, poisoned_memory: None) -> None:
    kwargs = make(Case("closing", gate="slow-softplus", T=150, H=2, K=64))
    kwargs |= {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None, "lower_bound": None}
    kwargs["g"] = torch.full(kwargs["g"].shape, -1e-3, dtype=torch.float32)
    kwargs["g"][
        :, 3::11
    ] = -1000.0  # tokens 4 to 13 of each period meet across differences of log decays of many thousands
    kwargs["g"][:, :, 0, ::2] = -1e-3  # half of the first head's channels stay open
    with forced(FORWARD, {"chunk": chunk}, {}):
        o, state = kda(**kwargs)
    expected, expected_state = recurrence(**kwargs)
    assert state is not None
    assert expected_state is not None
    # rounding o to bf16 alone is 1.7e-3
    assert_close_rms("o", o, expected, 2.2e-3)
    assert_close_rms("final state", state, expected_state, 1e-3)


@pytest.mark.parametrize("factors", [bf16, f16])
@pytest.mark.parametrize("knobs", [{}, {"chunk": 16}, {"inverse": "substitution"}, {"block_v": 32}, {"vector": 4}])
def test_every_knob_gives_right_numbers_into_poisoned_buffers(factors, knobs) -> None:
    case = Case("knobs", T=70, K=128, H=2, state_v_first=True)
    kwargs = make(case)
    options = FORWARD.resolve_options({"v_first": True, "lower_bound": kwargs["lower_bound"]})
    chosen = FORWARD.resolve_knobs({"factors": factors, **knobs})
    dims = {"B": 1, "N": 1, "H": 2, "HK": 2, "K": 128, "V": 128, "T": Sym("T", min=1)}
    run = Executable(plans.forward(dims, chosen, options, "torch"), None, "cpu")
    tensors = {n: kwargs[n] for n in ("q", "k", "v", "g", "beta", "A_log")} | {
        "dt_bias": kwargs["dt_bias"].view(2, 128)
    }
    values = {"T": 70}
    for name, shape, dtype in run.made:
        filled = torch.full(shape(values), float("nan") if dtype.is_floating_point else -1, dtype=dtype)
        tensors[name] = filled
    out = run(tensors, values)
    expected, expected_state = recurrence(**kwargs)
    assert_close_rms("o", out["o"], expected, 5e-3)
    assert_close_rms("state", out["final_state"], expected_state, 5e-3)


def test_fp16_factors_are_more_accurate_than_bf16_where_bf16_storage_is_the_limit() -> None:
    kwargs = make(Case("slow", gate="slow", keys="positive", T=129, K=64))
    options = {"lower_bound": kwargs["lower_bound"]}
    expected, _ = recurrence(**kwargs)
    errors = {}
    for factors in (bf16, f16):
        dims = {"B": 1, "N": 1, "H": 1, "HK": 1, "K": 64, "V": 64, "T": 129}
        plan = plans.forward(
            dims, FORWARD.resolve_knobs({"factors": factors}), FORWARD.resolve_options(options), "torch"
        )
        tensors = {n: kwargs[n] for n in ("q", "k", "v", "g", "beta", "A_log")}
        tensors["dt_bias"] = kwargs["dt_bias"].view(1, 64)
        errors[factors] = relative_rms(Executable(plan, None, "cpu")(tensors, {})["o"], expected)
    assert errors[f16] < errors[bf16] / 3


def test_values_that_fp16_cannot_hold_are_done_again_and_only_their_blocks() -> None:
    kwargs = make(Case("mixed", T=64, H=2, K=64))
    kwargs["v"][:, 40, 1] = 1e6  # head 1 overflows fp16, head 0 does not
    o, state = kda(**kwargs)
    expected, expected_state = recurrence(**kwargs)
    for head in range(2):
        assert_close_rms(f"o of head {head}", o[:, :, head], expected[:, :, head], 5e-3)
        assert_close_rms(f"state of head {head}", state[:, head], expected_state[:, head], 5e-3)
    plain = make(Case("mixed", T=64, H=2, K=64))
    assert torch.equal(kda(**plain)[0][:, :, 0], o[:, :, 0])


@pytest.mark.parametrize("gate", ["bench", "softplus"])
@pytest.mark.parametrize("t", [17, 40, 69])
def test_an_output_never_depends_on_later_tokens_to_the_last_bit(gate: str, t: int) -> None:
    kwargs = make(Case("causal", gate=gate, T=70, K=64))
    before = kda(**kwargs)[0][:, :t].clone()
    for name in ("q", "k", "v", "g", "beta"):
        kwargs[name][:, t:] = torch.randn_like(kwargs[name][:, t:]) * 3
    assert torch.equal(kda(**kwargs)[0][:, :t], before)
    for name in ("q", "k", "v", "g", "beta"):
        kwargs[name] = kwargs[name][:, :t]
    assert torch.equal(kda(**kwargs)[0], before)


@pytest.mark.parametrize("v_first", [False, True])
def test_decode_after_prefill_equals_one_long_prefill(v_first: bool) -> None:
    kwargs = make(Case("split", T=40, H=2, K=64, state_v_first=v_first))
    whole, last = kda(**kwargs)
    part = {n: (x[:, :37] if n in ("q", "k", "v", "g", "beta") else x) for n, x in kwargs.items()}
    _, state = kda(**part)
    flags = {n: x for n, x in kwargs.items() if n not in ("initial_state", "output_final_state", "cu_seqlens")}
    outputs = []
    for t in range(37, 40):
        token = {n: (x[:, t : t + 1] if n in ("q", "k", "v", "g", "beta") else x) for n, x in flags.items()}
        o, state = kda_decode(**token, state=state)
        outputs.append(o)
    assert_close_rms("o", torch.cat(outputs, 1), whole[:, 37:], 5e-3)
    assert_close_rms("state", state, last, 5e-3)


@pytest.mark.parametrize("gate", ["bench", "softplus", "log-sigmoid", "cut-10"])
@pytest.mark.parametrize("v_first", [False, True])
def test_decode_updates_its_slots_and_no_others(gate: str, v_first: bool) -> None:
    case = Case("decode", gate=gate, H=2, HV=4, K=64, V=32, state_v_first=v_first, dtype=torch.float32)
    kwargs = make_decode(case, batch=3)
    pool = kwargs["state"].clone()
    indices = kwargs["state_indices"]
    o, updated = kda_decode(**kwargs)
    assert updated is kwargs["state"]
    used = [i for i in indices.tolist() if i >= 0]
    untouched = [s for s in range(pool.shape[0]) if s not in used]
    assert torch.equal(updated[untouched], pool[untouched])
    flags = {n: x for n, x in kwargs.items() if n not in ("state", "state_indices")}
    for row, slot in enumerate(indices.tolist()):
        if slot < 0:
            assert torch.equal(o[row], torch.zeros_like(o[row]))
            continue
        token = {n: (x[row : row + 1] if n in ("q", "k", "v", "g", "beta") else x) for n, x in flags.items()}
        expected, expected_state = recurrence(**token, initial_state=pool[slot : slot + 1])
        assert_close_rms("o", o[row : row + 1], expected, 1e-5)
        assert_close_rms("state", updated[slot : slot + 1], expected_state, 1e-5)


def test_decode_out_of_place_leaves_the_pool_alone() -> None:
    kwargs = make_decode(Case("decode", H=2, K=64), batch=3)
    pool = kwargs["state"].clone()
    o, new = kda_decode(**kwargs, in_place=False)
    assert torch.equal(kwargs["state"], pool)
    in_place, state = kda_decode(**kwargs)
    assert torch.equal(o, in_place)
    rows = kwargs["state_indices"] >= 0
    assert torch.equal(new[rows], state[kwargs["state_indices"][rows].long()])


def tables(lengths: list[int], **knobs: Any) -> dict[str, torch.Tensor]:
    """What a call on packed sequences of these lengths works out about them."""
    cu = torch.tensor([0, *itertools.accumulate(lengths)])
    q = torch.randn(1, int(cu[-1]), 1, 64)
    with recording() as calls, forced(FORWARD, knobs, {}):
        kda(q, q, q, -q.abs(), q[..., 0].sigmoid(), cu_seqlens=cu, use_qk_l2norm_in_kernel=True)
    return dict(calls[0].tensors)


def test_the_chunk_table_tells_the_rows_of_every_chunk_once_and_pads_with_minus_one() -> None:
    found = tables([0, 5, 65, 0, 1], chunk=32)
    assert found["chunk_offsets"].tolist() == [0, 0, 1, 4, 4, 5]
    rows = [[0, 5], [5, 70], [37, 70], [69, 70], [70, 71]]
    assert found["chunk_table"].tolist() == [*rows, [-1, 0], [-1, 0]]


def test_the_tables_of_many_and_of_long_sequences_are_whole() -> None:
    """More sequences than a program counts at once, and more chunks of one than it writes at once."""
    lengths = [(7 * n) % 40 for n in range(600)] + [16 * 700]
    found = tables(lengths, chunk=16, segments=3)
    counts = [-(-n // 16) for n in lengths]
    assert found["chunk_offsets"].tolist() == [0, *itertools.accumulate(counts)]
    starts = [0, *itertools.accumulate(lengths)]
    rows = [[starts[n] + 16 * i, starts[n + 1]] for n, count in enumerate(counts) for i in range(count)]
    spare = sum(lengths) // 16 + len(lengths) - len(rows)
    assert found["chunk_table"].tolist() == rows + [[-1, 0]] * spare
    per_segment = -(-(sum(lengths) // 16 + len(lengths)) // 3)
    parts = [max(1, -(-count // per_segment)) for count in counts]
    segments = [[n, i] for n, count in enumerate(parts) for i in range(count)]
    assert found["segment_offsets"].tolist() == [0, *itertools.accumulate(parts)]
    assert found["segment_table"].tolist() == segments + [[-1, 0]] * (3 + len(lengths) - len(segments))


@pytest.mark.parametrize("shape", [{"T": 0}, {"B": 0}, {"cu": [0, 0, 0]}])
def test_empty_calls_return_empty_outputs_and_the_initial_state(shape: dict) -> None:
    b, t = shape.get("B", 1), shape.get("T", 3) if "cu" not in shape else 0
    n = len(shape["cu"]) - 1 if "cu" in shape else b
    q = torch.zeros(b, t, 2, 64)
    state = torch.randn(n, 2, 64, 64)
    cu = torch.tensor(shape["cu"]) if "cu" in shape else None
    o, last = kda(q, q, q, q, q[..., 0], initial_state=state, output_final_state=True, cu_seqlens=cu)
    assert o.shape == q.shape
    assert torch.equal(last, state)


def test_works_under_torch_compile_without_graph_breaks() -> None:
    kwargs = make(Case("compile", T=33, K=64))
    compiled = torch.compile(lambda **kw: kda(**kw), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**kwargs)[0], kda(**kwargs)[0])
    decode = make_decode(Case("compile", H=1, K=64), batch=2)
    eager_state = decode["state"].clone()
    eager, _ = kda_decode(**{**decode, "state": eager_state})
    compiled_decode = torch.compile(lambda **kw: kda_decode(**kw)[0], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled_decode(**decode), eager)
    assert torch.equal(decode["state"], eager_state)


def test_gradients_equal_those_of_the_recurrence() -> None:
    kwargs = make(Case("grad", T=20, K=64, dtype=torch.float32))
    names = ["q", "k", "v", "g", "beta", "A_log", "dt_bias"]
    from k3dsl.ops.kda.chunked import chunked

    def gradients(function) -> list[torch.Tensor]:
        leaves = {n: kwargs[n].detach().clone().requires_grad_() for n in names}
        o, state = function(**{**kwargs, **leaves})
        loss = (o.double() * weight).sum() + (state.double() * state_weight).sum()
        return list(torch.autograd.grad(loss, list(leaves.values())))

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 20, 1, 64, dtype=torch.float64, generator=generator)
    state_weight = torch.randn(1, 1, 64, 64, dtype=torch.float64, generator=generator)
    for name, got, want in zip(
        names, gradients(kda), gradients(lambda **kw: chunked(**kw, dtype=torch.float64)), strict=True
    ):
        assert_close_rms(f"gradient of {name}", got, want, 2e-5)


def test_opcheck_accepts_the_registrations() -> None:
    kwargs = make(Case("opcheck", T=18, K=64))
    arguments = (
        kwargs["q"], kwargs["k"], kwargs["v"], kwargs["g"], kwargs["beta"], kwargs["A_log"], kwargs["dt_bias"], None, None,
        None, True, True, True, True, False, False, -5.0, False,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.k3dsl.kda_forward.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_knob_that_does_not_fit_says_so() -> None:
    with pytest.raises(ArgumentError, match="chunk cannot be 48"):
        FORWARD.resolve_knobs({"chunk": 48})
    with pytest.raises(ArgumentError, match="did you mean block_v"):
        FORWARD.resolve_knobs({"block_w": 64})


def test_two_requests_on_one_slot_are_found_by_the_cpu_backend() -> None:
    """The checks of the torch function catch it first; the backend itself does too."""
    kwargs = make_decode(Case("decode", H=1, K=64), batch=2, padding=0)
    options = DECODE.resolve_options({"lower_bound": kwargs["lower_bound"], "dtype": bf16, "state": f32})
    dims = {"B": 2, "H": 1, "HK": 1, "K": 64, "V": 64, "slots": 5}
    plan = plans.decode(dims, DECODE.resolve_knobs({"block_v": 64}), options, "torch")
    tensors = {n: kwargs[n].squeeze(1) for n in ("q", "k", "v", "g", "beta")}
    tensors |= {"A_log": kwargs["A_log"], "dt_bias": kwargs["dt_bias"].view(1, 64), "state": kwargs["state"]}
    tensors["state_indices"] = torch.tensor([2, 2], dtype=torch.int32)
    with pytest.raises(EvaluationError):
        Executable(plan, None, "cpu")(tensors, {})


def test_a_gate_of_a_checkpoints_shape_is_the_gate() -> None:
    """A_log is [1, 1, H, 1] in Kimi Linear's checkpoint."""
    kwargs = make(Case("shape", T=20, H=2, K=64, V=32))
    assert kwargs["A_log"] is not None
    expected = kda(**kwargs)[0]
    assert torch.equal(kda(**{**kwargs, "A_log": kwargs["A_log"].view(1, 1, -1, 1)})[0], expected)
