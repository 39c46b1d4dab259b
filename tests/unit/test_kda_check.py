"""Every wrong argument of KDA is refused with its name, the reason and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from k3dsl.errors import ArgumentError
from k3dsl.ops.kda.check import DecodeShapes, Shapes, check_decode, check_forward

BF16 = torch.bfloat16


def forward(**changes: Any) -> dict[str, Any]:
    """Right arguments: B 2, T 5, H 2, HV 4, K 64, V 32, with some of them changed."""
    right = {
        "q": torch.zeros(2, 5, 2, 64, dtype=BF16),
        "k": torch.zeros(2, 5, 2, 64, dtype=BF16),
        "v": torch.zeros(2, 5, 4, 32, dtype=BF16),
        "g": torch.zeros(2, 5, 4, 64, dtype=BF16),
        "beta": torch.zeros(2, 5, 4),
    }
    return {**right, **changes}


def packed(**changes: Any) -> dict[str, Any]:
    """Right arguments of three packed sequences of 10 tokens together."""
    flat = {name: x.flatten(0, 1).unsqueeze(0) for name, x in forward().items()}
    return {**flat, "cu_seqlens": torch.tensor([0, 4, 4, 10]), **changes}


def decode(**changes: Any) -> dict[str, Any]:
    """Right arguments: three requests on a pool of six slots."""
    right = {name: x.flatten(0, 1)[:3].unsqueeze(1) for name, x in forward().items()}
    right["state"] = torch.zeros(6, 4, 64, 32)
    right["state_indices"] = torch.tensor([4, -1, 0], dtype=torch.int32)
    return {**right, **changes}


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def gate(**changes: Any) -> dict[str, Any]:
    return forward(use_gate_in_kernel=True, **{"A_log": torch.zeros(4), "dt_bias": torch.zeros(256), **changes})


META = torch.device("meta")
WRONG_TENSORS = [
    (forward(q=zeros(5, 2, 64)), "q", "has shape [5, 2, 64], needs 4 dims", "[1, T, H, K]"),
    (forward(k=zeros(2, 5, 64)), "k", "needs 4 dims [B, T, H, K]", "q's shape"),
    (forward(v=zeros(2, 5, 128)), "v", "needs 4 dims [B, T, HV, V]", "heads"),
    (forward(k=zeros(2, 5, 4, 64)), "k", "has shape [2, 5, 4, 64], needs [2, 5, 2, 64]", "come from q"),
    (forward(v=zeros(2, 6, 4, 32)), "v", "needs [2, 5, 4, 32]", "come from q"),
    (forward(g=zeros(2, 5, 2, 64)), "g", "needs [2, 5, 4, 64]", "[B, T, HV, K]"),
    (forward(beta=zeros(2, 5, 4, 1)), "beta", "needs [2, 5, 4]", "[B, T, HV]"),
    (
        forward(v=zeros(2, 5, 3, 32), g=zeros(2, 5, 3, 64), beta=zeros(2, 5, 3)),
        "v",
        "HV = 3 heads, not a multiple of q's H = 2",
        "HV / H",
    ),
    (
        forward(q=zeros(2, 5, 2, 96), k=zeros(2, 5, 2, 96), g=zeros(2, 5, 4, 96)),
        "q",
        "K = 96, supported are 64, 128",
        "pad",
    ),
    (forward(v=zeros(2, 5, 4, 40)), "v", "V = 40, needs a multiple of 16 up to 256", "pad"),
    (forward(v=zeros(2, 5, 4, 272)), "v", "V = 272, needs a multiple of 16 up to 256", "pad"),
    (forward(q=zeros(2, 5, 2, 64, dtype=torch.float64)), "q", "is float64", "q.to(torch.bfloat16)"),
    (forward(k=zeros(2, 5, 2, 64, dtype=torch.float32)), "k", "is float32, q is bfloat16", "k.to(q.dtype)"),
    (forward(v=zeros(2, 5, 4, 32, dtype=torch.float16)), "v", "is float16, q is bfloat16", "v.to(q.dtype)"),
    (forward(g=zeros(2, 5, 4, 64, dtype=torch.float16)), "g", "is float16, needs q's bfloat16 or float32", "g.float()"),
    (forward(beta=zeros(2, 5, 4, dtype=torch.int32)), "beta", "is int32, needs a float dtype", "beta.float()"),
    (forward(k=zeros(2, 5, 2, 64).to(META)), "k", "is on meta, q is on cpu", "k.to('cpu')"),
    (forward(beta=zeros(2, 5, 4).to(META)), "beta", "is on meta, q is on cpu", "beta.to('cpu')"),
    (forward(q=zeros(2, 5, 64, 2).mT), "q", "last dim must be contiguous", "q.contiguous()"),
    (forward(g=zeros(2, 5, 4, 128)[..., ::2]), "g", "last dim must be contiguous", "g.contiguous()"),
]
WRONG_SETTINGS = [
    (forward(scale=float("nan")), "scale", "is nan", "1/sqrt(K)"),
    (forward(scale="x"), "scale", "is 'x'", "1/sqrt(K)"),
    (forward(lower_bound="x"), "lower_bound", "is x", "-5.0 for Kimi K3"),
    *(
        (forward(**{n: [1.0]}), n, "is a list, needs a tensor", f"{n} as a torch.Tensor")
        for n in ("q", "k", "g", "beta")
    ),
    (forward(q=None), "q", "is a NoneType, needs a tensor", "torch.Tensor"),
    (forward(initial_state=[1.0]), "initial_state", "is a list", "torch.Tensor"),
    (forward(A_log=torch.zeros(4)), "A_log", "is of a gate that is not asked for", "use_gate_in_kernel=True"),
    (forward(dt_bias=torch.zeros(256)), "dt_bias", "is of a gate that is not asked for", "use_gate_in_kernel=True"),
    (gate(A_log=[1.0]), "A_log", "is a list", "torch.Tensor"),
    (forward(lower_bound=0.0), "lower_bound", "is 0.0", "-5.0 for Kimi K3"),
    (forward(lower_bound=5.0), "lower_bound", "below 0", "-5.0 for Kimi K3"),
    (forward(lower_bound=-float("inf")), "lower_bound", "finite", "None for the softplus gate"),
    (forward(allow_neg_eigval=True), "allow_neg_eigval", "sigmoid of beta", "use_beta_sigmoid_in_kernel"),
    (gate(A_log=None), "A_log", "is missing", "lower_bound for the bounded gate"),
    (gate(A_log=torch.zeros(128)), "A_log", "has shape [128], needs HV = 4 numbers", "A_log[:HV]"),
    (gate(A_log=torch.zeros(4, dtype=torch.int64)), "A_log", "is int64", "A_log.float()"),
    (gate(A_log=torch.zeros(4, device=META)), "A_log", "is on meta", "A_log.to('cpu')"),
    (gate(dt_bias=torch.zeros(4)), "dt_bias", "has shape [4], needs HV*K = 256 numbers", "every value head"),
    (gate(dt_bias=torch.zeros(256, device=META)), "dt_bias", "is on meta", "dt_bias.to('cpu')"),
]
WRONG_SEQUENCES = [
    (packed(cu_seqlens=torch.tensor([0.0, 10.0])), "cu_seqlens", "is float32, needs int32 or int64", "torch.int32"),
    (packed(cu_seqlens=torch.tensor([[0, 10]])), "cu_seqlens", "has shape [1, 2], needs [N+1]", "[0, T]"),
    (packed(cu_seqlens=torch.tensor([0])), "cu_seqlens", "has shape [1]", "[0, T]"),
    (
        packed(cu_seqlens=torch.tensor([0, 10]).to(META)),
        "cu_seqlens",
        "is on meta, q is on cpu",
        "cu_seqlens.to('cpu')",
    ),
    (
        packed(cu_seqlens=torch.tensor([0, 1, 10, 1])[::2]),
        "cu_seqlens",
        "must be contiguous",
        "cu_seqlens.contiguous()",
    ),
    (forward(cu_seqlens=torch.tensor([0, 5])), "cu_seqlens", "q has B = 2", "[1, B*T, ...]"),
    (packed(cu_seqlens=torch.tensor([1, 10])), "cu_seqlens", "starts at 1", "token 0"),
    (packed(cu_seqlens=torch.tensor([0, 6, 4, 10])), "cu_seqlens", "goes down from 6 to 4 at entry 2", "not lengths"),
    (packed(cu_seqlens=torch.tensor([0, 9])), "cu_seqlens", "ends at 9, but q has T = 10 tokens", "end at T"),
    (packed(cu_seqlens=torch.tensor([0, 11])), "cu_seqlens", "ends at 11", "end at T"),
    (forward(cu_seqlens_cpu=torch.tensor([0, 5])), "cu_seqlens_cpu", "without cu_seqlens", "pass both"),
    (
        packed(cu_seqlens_cpu=torch.tensor([0, 10])),
        "cu_seqlens_cpu",
        "has shape [2], cu_seqlens has [4]",
        "same numbers",
    ),
    (packed(cu_seqlens_cpu=torch.zeros(4)), "cu_seqlens_cpu", "is float32", "torch.int32"),
    (
        packed(cu_seqlens_cpu=torch.zeros(4, device=META, dtype=torch.int32)),
        "cu_seqlens_cpu",
        "is on meta",
        "where the lengths are known",
    ),
    (packed(cu_seqlens_cpu=torch.tensor([0, 4, 4, 8])), "cu_seqlens", "ends at 8", "end at T"),
]
WRONG_STATES = [
    (forward(initial_state=zeros(4, 64, 32)), "initial_state", "has shape [4, 64, 32]", "one state"),
    (
        forward(initial_state=torch.zeros(2, 4, 32, 64)),
        "initial_state",
        "needs [., 4, 64, 32]",
        "this is [., HV, V, K]: pass state_v_first=True",
    ),
    (
        forward(initial_state=torch.zeros(2, 4, 64, 32), state_v_first=True),
        "initial_state",
        "needs [., 4, 32, 64]",
        "this is [., HV, K, V]: pass state_v_first=False",
    ),
    (
        forward(initial_state=torch.zeros(2, 2, 64, 32)),
        "initial_state",
        "needs [., 4, 64, 32]",
        "state_v_first=False means [., HV, K, V]",
    ),
    (
        forward(initial_state=zeros(2, 4, 64, 32, dtype=torch.float16)),
        "initial_state",
        "is float16, needs float32 or bfloat16",
        "initial_state.float()",
    ),
    (forward(initial_state=torch.zeros(2, 4, 64, 32, device=META)), "initial_state", "is on meta", ".to('cpu')"),
    (forward(initial_state=torch.zeros(2, 4, 32, 64).mT), "initial_state", "must be contiguous", ".contiguous()"),
    (
        forward(initial_state=torch.zeros(3, 4, 64, 32)),
        "initial_state",
        "holds 3 states, but the batch has 2 sequences",
        "zeros for a new one",
    ),
    (
        packed(initial_state=torch.zeros(2, 4, 64, 32)),
        "initial_state",
        "holds 2 states, but cu_seqlens describes 3 sequences",
        "zeros for a new one",
    ),
]
WRONG_DECODE = [
    (decode(q=zeros(3, 2, 64)), "q", "needs 4 dims [B, 1, H, K]", "q.unsqueeze(1)"),
    ({**forward(), "state": torch.zeros(2, 4, 64, 32)}, "q", "has T = 5 tokens, decode takes 1", "forward function"),
    (decode(g=zeros(3, 1, 2, 64)), "g", "needs [3, 1, 4, 64]", "[B, T, HV, K]"),
    (decode(lower_bound=1.0), "lower_bound", "below 0", "-5.0"),
    (decode(use_gate_in_kernel=True), "A_log", "is missing", "lower_bound"),
    (decode(allow_neg_eigval=True), "allow_neg_eigval", "sigmoid of beta", "use_beta_sigmoid_in_kernel"),
    (decode(state=torch.zeros(6, 4, 32, 64)), "state", "needs [., 4, 64, 32]", "state_v_first=True"),
    (decode(state=zeros(6, 4, 64, 32, dtype=torch.float16)), "state", "is float16", "state.float()"),
    (decode(state=torch.zeros(6, 4, 64, 48)[..., :32]), "state", "a slot must be contiguous", "[S, ...]"),
    (decode(state_indices=None), "state", "has 6 slots for 3 requests", "pass state_indices"),
    (
        decode(state_indices=torch.zeros(2, dtype=torch.int32)),
        "state_indices",
        "has shape [2], needs [B] = [3]",
        "slot",
    ),
    (decode(state_indices=torch.tensor([0, 1, 2])), "state_indices", "is int64, needs int32", "torch.int32"),
    (
        decode(state_indices=torch.zeros(3, dtype=torch.int32, device=META)),
        "state_indices",
        "is on meta",
        "state_indices.to('cpu')",
    ),
    (
        decode(state_indices=torch.zeros(6, dtype=torch.int32)[::2]),
        "state_indices",
        "must be contiguous",
        "state_indices.contiguous()",
    ),
    (
        decode(state_indices=torch.tensor([0, 6, 1], dtype=torch.int32)),
        "state_indices",
        "names slot 6 of a pool of 6",
        "-1 is padding",
    ),
    (
        decode(state_indices=torch.tensor([1, -1, 1], dtype=torch.int32)),
        "state_indices",
        "names slot 1 twice",
        "-1 is padding",
    ),
]


@pytest.mark.parametrize(
    ("kwargs", "argument", "reason", "remedy"), WRONG_TENSORS + WRONG_SETTINGS + WRONG_SEQUENCES + WRONG_STATES
)
def test_a_wrong_argument_of_forward_is_named_with_the_remedy(
    kwargs: dict[str, Any], argument: str, reason: str, remedy: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        check_forward(**kwargs)
    assert caught.value.message.startswith(f"{argument}: ")
    assert reason in caught.value.message
    assert caught.value.fix is not None
    assert remedy in caught.value.fix


@pytest.mark.parametrize(("kwargs", "argument", "reason", "remedy"), WRONG_DECODE)
def test_a_wrong_argument_of_decode_is_named_with_the_remedy(
    kwargs: dict[str, Any], argument: str, reason: str, remedy: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        check_decode(**kwargs)
    assert caught.value.message.startswith(f"{argument}: ")
    assert reason in caught.value.message
    assert caught.value.fix is not None
    assert remedy in caught.value.fix


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"g": torch.zeros(2, 5, 4, 64)},
        {"beta": zeros(2, 5, 8)[..., ::2]},
        {"q": zeros(2, 5, 2, 192)[..., :64], "k": zeros(2, 5, 2, 192)[..., 64:128]},
        {"initial_state": zeros(2, 4, 64, 32)},
        {"initial_state": torch.zeros(2, 4, 32, 64), "state_v_first": True},
        {"use_gate_in_kernel": True, "A_log": torch.zeros(1, 1, 4, 1), "dt_bias": torch.zeros(4, 64)},
        {"use_gate_in_kernel": True, "lower_bound": -5.0},
        {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    ],
)
def test_right_arguments_of_forward_give_the_dims(changes: dict[str, Any]) -> None:
    assert check_forward(**forward(**changes)) == Shapes(B=2, T=5, H=2, HV=4, K=64, V=32, N=2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_right_packed_arguments_give_the_number_of_sequences(dtype: torch.dtype) -> None:
    offsets = torch.tensor([0, 4, 4, 10], dtype=dtype)
    kwargs = packed(cu_seqlens=offsets, cu_seqlens_cpu=offsets.clone(), initial_state=torch.zeros(3, 4, 64, 32))
    assert check_forward(**kwargs) == Shapes(B=1, T=10, H=2, HV=4, K=64, V=32, N=3)


def test_no_tokens_are_fine() -> None:
    x = {name: value[:, :0] for name, value in forward().items()}
    assert check_forward(**x).T == 0


def test_tensors_without_data_are_checked_by_shape_only() -> None:
    kwargs = {name: value.to(META) for name, value in packed().items()}
    assert check_forward(**kwargs).N == 3
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert check_forward(**packed(cu_seqlens=fake.from_tensor(torch.tensor([0, 7])))).N == 1
        twice = torch.tensor([1, 1, 1], dtype=torch.int32)
        assert check_decode(**decode(state_indices=fake.from_tensor(twice))).S == 6


def test_right_arguments_of_decode_give_the_dims() -> None:
    assert check_decode(**decode()) == DecodeShapes(B=3, H=2, HV=4, K=64, V=32, S=6)
    apart = torch.zeros(6, 2, 4, 64, 32)[:, 0]
    assert check_decode(**decode(state=apart)).S == 6
    own = decode(state=torch.zeros(3, 4, 32, 64), state_v_first=True, state_indices=None)
    assert check_decode(**own).S == 3


def test_what_fla_passes_by_default_is_taken_and_what_it_changes_is_not() -> None:
    from k3dsl.ops import kda

    given = forward()
    kda(**given, cp_context=None, chunk_indices=None, return_intermediate_states=False, disable_recompute=True)
    with pytest.raises(ArgumentError, match="return_intermediate_states: is True, which kda does not do"):
        kda(**given, return_intermediate_states=True)
    with pytest.raises(ArgumentError, match="lower_bound: bounds a gate that is not asked for"):
        kda(**given, lower_bound=-5.0)
    with pytest.raises(TypeError, match="kda\\(\\) does not take nothing_known"):
        kda(**given, nothing_known=1)
