"""The inputs on which KDA is tested and measured, by name: shapes, gates, keys, betas, values, states, error limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

Shape = tuple[int, ...]
GateMode = Literal["activated", "bounded", "softplus"]
LOWER_BOUND = -5.0
"""The bounded gate's lower bound, nats a token, in every bounded family (Kimi K3's)."""


class Draw:
    """Random numbers of one seed, always drawn on the CPU so that every device sees the same inputs."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: Shape, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator) * std + mean

    def uniform(self, shape: Shape, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def chance(self, shape: Shape, probability: float) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) < probability


Recipe = Callable[[Draw, Shape], torch.Tensor]


def normal(std: float = 1.0, mean: float = 0.0) -> Recipe:
    """Normal numbers."""
    return lambda draw, shape: draw.normal(shape, std, mean)


def uniform(low: float, high: float) -> Recipe:
    """Numbers spread evenly from low to high."""
    return lambda draw, shape: draw.uniform(shape, low, high)


def constant(value: float) -> Recipe:
    """One number everywhere."""
    return lambda draw, shape: torch.full(shape, value)


def log_uniform(low: float, high: float) -> Recipe:
    """Logarithms of numbers spread evenly on a log scale; for A_log."""
    return lambda draw, shape: draw.uniform(shape).mul(torch.tensor(high / low).log()).add(torch.tensor(low).log())


def mixed(probability: float, chosen: float, other: Recipe) -> Recipe:
    """The number ``chosen`` with a probability, else ``other``."""
    return lambda draw, shape: torch.where(draw.chance(shape, probability), chosen, other(draw, shape))


def one_channel(chosen: float, other: float) -> Recipe:
    """The number ``chosen`` in channel 5 of every head, ``other`` in the rest."""
    return lambda draw, shape: torch.where(torch.arange(shape[-1]) == 5, chosen, other).expand(shape).clone()


def half_channels(even: float, odd: float) -> Recipe:
    """One number in the even channels of every head, another in the odd ones."""
    return lambda draw, shape: torch.where(torch.arange(shape[-1]) % 2 == 0, even, odd).expand(shape).clone()


def log_sigmoid(draw: Draw, shape: Shape) -> torch.Tensor:
    """Log decays of mild gates: log(sigmoid(normal))."""
    return torch.nn.functional.logsigmoid(draw.normal(shape))


@dataclass(frozen=True)
class Gate:
    """A gate family: its mode, and how g [B, T, HV, K], A_log [HV] and dt_bias [HV, K] are drawn (None: not passed).

    With mode ``activated`` g is the log decay itself, in nats. ``slow`` marks decays around 0.01 nats a token or less.
    """

    mode: GateMode
    g: Recipe
    A_log: Recipe | None = None
    dt_bias: Recipe | None = None
    slow: bool = False


ZERO = constant(0.0)
GATES: dict[str, Gate] = {
    # What public benchmarks time.
    "bench": Gate("bounded", normal(), A_log=uniform(0, 1), dt_bias=uniform(0, 1)),
    "bench-no-A": Gate("bounded", normal(), dt_bias=normal()),
    "bench-no-bias": Gate("bounded", normal(), A_log=uniform(0, 1)),
    "log-sigmoid": Gate("activated", log_sigmoid),
    "softplus": Gate("softplus", normal(), A_log=ZERO, dt_bias=normal(0.5, -1)),
    # -2.5 exactly: tells the bounded gate from a clamped softplus.
    "midpoint": Gate("bounded", ZERO, A_log=ZERO, dt_bias=ZERO),
    # Nearly no decay, about -0.01 nats a token: the state and the chunk's inverse see every token.
    "slow": Gate("bounded", normal(), A_log=ZERO, dt_bias=uniform(-6.5, -5.5), slow=True),
    "slow-softplus": Gate("softplus", normal(), A_log=ZERO, dt_bias=uniform(-5, -4), slow=True),
    "slower": Gate("bounded", normal(), A_log=ZERO, dt_bias=uniform(-8, -7), slow=True),
    "none": Gate("activated", ZERO, slow=True),
    # Like a trained network: rates exp(A_log) up to 200, so that one head's gate is a step function of z and another's
    # is smooth; open channels span the whole sequence and closed ones forget at once, in the same tile.
    "checkpoint": Gate("bounded", normal(0.5), A_log=log_uniform(1, 200), dt_bias=uniform(-4, 0.5)),
    "checkpoint-softplus": Gate("softplus", normal(0.5), A_log=log_uniform(1, 200), dt_bias=uniform(-11, 0.5)),
    # As Kimi Linear's parameters are before training.
    "fresh-softplus": Gate("softplus", normal(), A_log=log_uniform(1, 16), dt_bias=uniform(-6.9, -2.25)),
    # The bounded gate at its lower bound: 16 tokens span exp(-80).
    "saturated": Gate("bounded", normal(0.1), A_log=ZERO, dt_bias=uniform(12, 13)),
    "saturated-steep": Gate("bounded", constant(4.0), A_log=constant(5.3), dt_bias=uniform(0, 1)),
    "constant-5": Gate("activated", constant(-5.0)),
    "constant-3": Gate("activated", constant(-3.0)),
    # 16 tokens span more than 2^126, and 2^-8.5 a token.
    "constant-5.9": Gate("activated", constant(-5.9)),
    "softplus-5.6": Gate("softplus", constant(5.6), A_log=ZERO),
    "one-open": Gate("bounded", one_channel(-30.0, 20.0), A_log=ZERO, dt_bias=ZERO),
    "half-open": Gate("bounded", half_channels(-30.0, 20.0), A_log=ZERO, dt_bias=ZERO),
    # No lower bound: a tile where some decays are exp(-1000) = 0 and the others exactly or nearly 1.
    "cut-10": Gate("activated", mixed(0.1, -1000.0, ZERO)),
    "cut-50": Gate("activated", mixed(0.5, -1000.0, ZERO)),
    "cut-90": Gate("activated", mixed(0.9, -1000.0, ZERO)),
    "cut-10-slow": Gate("activated", mixed(0.1, -1000.0, uniform(-0.02, 0.0))),
    "cut-50-log-sigmoid": Gate("activated", mixed(0.5, -1000.0, log_sigmoid)),
    "cut-softplus": Gate("softplus", mixed(0.3, 1000.0, constant(-1000.0)), A_log=ZERO),
    "softplus-16": Gate("softplus", normal(), A_log=constant(2.7725887), dt_bias=ZERO),
}


def _alike(noise: float) -> Recipe:
    """One positive vector a head for every token, plus noise."""

    def recipe(draw: Draw, shape: Shape) -> torch.Tensor:
        batch, _, heads, width = shape
        return draw.uniform((batch, 1, heads, width)) + draw.normal(shape, noise)

    return recipe


@dataclass(frozen=True)
class Keys:
    """A key family: how k and q [B, T, H, K] are drawn. ``alike``: all keys of a head point about the same way."""

    k: Recipe
    q: Recipe
    alike: bool = False
    identical: bool = False


POSITIVE = uniform(0.0, 1.0)
KEYS: dict[str, Keys] = {
    "normal": Keys(normal(), normal()),
    "positive": Keys(POSITIVE, POSITIVE, alike=True),
    "near-identical": Keys(_alike(0.25), POSITIVE, alike=True),
    "identical": Keys(_alike(0.0), POSITIVE, alike=True, identical=True),
}


@dataclass(frozen=True)
class Beta:
    """A beta family: [B, T, HV], logits for a sigmoid in the kernel or (``logits`` False) the number itself."""

    draw: Recipe
    logits: bool = True
    allow_neg_eigval: bool = False


BETAS: dict[str, Beta] = {
    "random": Beta(normal()),
    "near-0": Beta(normal(0.5, -9)),
    "near-1": Beta(normal(0.5, 8)),
    "double": Beta(normal(2), allow_neg_eigval=True),
    "given": Beta(POSITIVE, logits=False),
    "given-0-1": Beta(mixed(0.5, 0.0, constant(1.0)), logits=False),
}

VALUES: dict[str, Recipe] = {
    "normal": normal(),
    # Outside float16's range on either side.
    "large": normal(1e5),
    "tiny": normal(1e-7),
}


def _arange(draw: Draw, shape: Shape) -> torch.Tensor:
    return 16 * torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@dataclass(frozen=True)
class State:
    """An initial-state family: [N, HV, K, V] (or v-first) in its dtype."""

    draw: Recipe
    dtype: torch.dtype = torch.float32


STATES: dict[str, State | None] = {
    "none": None,
    "fp32": State(normal()),
    "bf16": State(normal(), torch.bfloat16),
    # 0, 16, 32, ... to above 65504: catches a swapped layout and float16 overflow.
    "arange": State(_arange),
}


@dataclass(frozen=True)
class Case:
    """One set of inputs, by name; `make` draws it. Cases that differ in shape only are drawn from the same families.

    Attributes:
        name: unique within `correctness_cases`.
        gate, keys, beta, values, state: names in `GATES`, `KEYS`, `BETAS`, `VALUES`, `STATES`.
        T, B, H, HV, K, V: tokens, batch, query/key heads, value heads, key and value width. HV and V of 0 mean H and K.
        cu_seqlens: offsets of packed sequences; T is then their last one, and B is 1.
        dtype: of q, k, v, of raw gates and beta logits. Activated gates and betas are float32.
        l2norm: q and k are normalised in the kernel; otherwise they are handed over normalised.
        scale: attention scale; None lets the operator choose 1/sqrt(K).
        state_v_first: states are [N, HV, V, K].
        strided: every tensor is a view whose rows have a gap after them, filled with NaN.
    """

    name: str
    gate: str = "bench"
    keys: str = "normal"
    beta: str = "random"
    values: str = "normal"
    state: str = "none"
    T: int = 65
    B: int = 1
    H: int = 1
    HV: int = 0
    K: int = 64
    V: int = 0
    cu_seqlens: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.bfloat16
    l2norm: bool = True
    scale: float | None = None
    state_v_first: bool = False
    strided: bool = False

    @property
    def tokens(self) -> int:
        return self.T if self.cu_seqlens is None else self.cu_seqlens[-1]

    @property
    def sequences(self) -> int:
        return self.B if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def gate_mode(self) -> GateMode:
        return GATES[self.gate].mode

    @property
    def limit_o(self) -> float:
        """Largest allowed RMS(o - reference) / RMS(reference)."""
        return limits(self)[0]

    @property
    def limit_state(self) -> float:
        """The same for the final state."""
        return limits(self)[1]


def limits(case: Case) -> tuple[float, float]:
    """Relative RMS limits (o, final state) of a case against the float64 recurrence.

    16-bit inputs may cost 5e-3. Two kinds of input lose more in any kernel that keeps a chunk's factors in bfloat16:
    slow gates with keys that are alike, and identical keys.
    """
    keys = KEYS[case.keys]
    if case.dtype == torch.float32:
        return 1e-5, 1e-5
    if keys.identical:
        return 2.5e-2, 4.5e-2
    if keys.alike and GATES[case.gate].slow:
        return 1.3e-2, 1.3e-2
    return 5e-3, 5e-3


CU_SEQLENS: dict[str, tuple[int, ...]] = {
    "one-short": (0, 15),
    "one-token": (0, 1),
    "edges": (0, 63, 64, 65, 200),
    "empty": (0, 0, 5, 5, 70, 71, 71),
    "singles": (0, 1, 2, 3, 4),
    "documents": (0, 15, 100, 131, 300),
}

FAMILIES: dict[str, tuple[Case, ...]] = {
    "mild": (
        Case("bench"),
        Case("bench-no-A", gate="bench-no-A"),
        Case("bench-no-bias", gate="bench-no-bias"),
        Case("log-sigmoid", gate="log-sigmoid"),
        Case("softplus", gate="softplus"),
        Case("midpoint", gate="midpoint"),
        Case("positive-keys", keys="positive"),
        Case("given-all", gate="log-sigmoid", beta="given", l2norm=False, scale=1.0),
        Case("scale", scale=0.1),
    ),
    "checkpoint": (
        Case("checkpoint", gate="checkpoint"),
        Case("checkpoint-softplus", gate="checkpoint-softplus"),
        Case("checkpoint-positive", gate="checkpoint", keys="positive"),
        Case("checkpoint-near-identical", gate="checkpoint-softplus", keys="near-identical", beta="near-1"),
        Case("fresh-softplus", gate="fresh-softplus"),
        Case("slow", gate="slow"),
        Case("slow-softplus", gate="slow-softplus"),
        Case("slow-positive", gate="slow", keys="positive", beta="near-1"),
        Case("slow-softplus-positive", gate="slow-softplus", keys="positive"),
        Case("slow-near-identical", gate="slow", keys="near-identical", beta="near-1"),
    ),
    "extreme": (
        Case("saturated", gate="saturated"),
        Case("saturated-steep", gate="saturated-steep"),
        Case("saturated-positive", gate="saturated", keys="positive", beta="near-1"),
        Case("constant-5", gate="constant-5"),
        Case("constant-3", gate="constant-3"),
        Case("constant-5.9", gate="constant-5.9"),
        Case("softplus-5.6", gate="softplus-5.6"),
        Case("softplus-16", gate="softplus-16"),
        Case("one-open", gate="one-open"),
        Case("half-open", gate="half-open"),
        Case("cut-10", gate="cut-10"),
        Case("cut-50", gate="cut-50"),
        Case("cut-90", gate="cut-90"),
        Case("cut-10-slow", gate="cut-10-slow"),
        Case("cut-50-log-sigmoid", gate="cut-50-log-sigmoid"),
        Case("cut-softplus", gate="cut-softplus"),
        Case("no-decay", gate="none"),
        Case("identical", keys="identical"),
        Case("identical-slow", gate="slower", keys="identical", beta="near-1"),
        Case("beta-near-0", beta="near-0"),
        Case("beta-near-1", beta="near-1"),
        Case("beta-double", beta="double"),
        Case("beta-0-1", gate="slow", beta="given-0-1"),
        Case("large-values", gate="slow", values="large"),
        Case("tiny-values", gate="slow", values="tiny"),
        Case("arange-state", gate="slow", state="arange"),
    ),
    "ragged": tuple(Case(f"ragged-{name}", cu_seqlens=offsets) for name, offsets in CU_SEQLENS.items()),
}
TOKENS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 1000)
WIDTHS = (128, 64)
MODES = ("bench", "softplus", "log-sigmoid")
"""One mild gate family of each mode."""


def _vary(case: Case, **changes: Any) -> Case:
    """The case with some fields changed and the changes in its name."""
    words = []
    for key, value in changes.items():
        if key in ("dtype", "gate", "state", "keys"):
            words.append(str(value).removeprefix("torch."))
        elif isinstance(value, bool):
            words.append(key.replace("_", "-") if value else f"no-{key}")
        else:
            words.append(f"{key}{value}")
    return replace(case, name=f"{case.name}/{'-'.join(words)}", **changes)


def families() -> list[Case]:
    """Every family but the ragged ones, at the default shape."""
    return [case for group in ("mild", "checkpoint", "extreme") for case in FAMILIES[group]]


def _small() -> list[Case]:
    bench = Case("bench")
    # the wide ones first: whoever takes one case of a family takes one that blocks of any width divide
    cases = [
        _vary(case, T=65, H=1, K=128) for group in ("mild", "checkpoint", "extreme") for case in FAMILIES[group][::3]
    ]
    cases += [_vary(FAMILIES["ragged"][0], H=1, K=128)]
    cases += [_vary(case, T=129) for case in families()]
    cases += [_vary(bench, T=T, H=1 if T > 200 else 3) for T in TOKENS if T != 129]
    cases += [_vary(case, H=2, state="fp32") for case in FAMILIES["ragged"]]
    cases += [_vary(Case("ragged-empty", cu_seqlens=CU_SEQLENS["empty"]), gate="cut-50", state_v_first=True)]
    cases += [_vary(Case(gate, gate=gate), K=128) for gate in ("bench", "softplus-16")]
    cases += [_vary(bench, state=state, state_v_first=True) for state in ("fp32", "bf16")]
    cases += [_vary(bench, dtype=dtype, T=33) for dtype in (torch.float32, torch.float16)]
    cases += [_vary(bench, strided=True, state="fp32", B=2), _vary(bench, H=2, HV=4, B=2), _vary(bench, V=32)]
    return cases


def _whole() -> list[Case]:
    bench = Case("bench")
    modes = [Case(gate, gate=gate) for gate in MODES]
    cases = [_vary(case, T=T, H=3, K=128) for case in families() for T in (17, 64, 129, 1000)]
    cases += [_vary(case, T=65, H=3, K=64) for case in families()]
    cases += [_vary(case, T=65, H=1, K=64, dtype=torch.float32) for case in families()]
    cases += [_vary(bench, T=T, H=H, K=K) for T in TOKENS for H in (1, 12) for K in WIDTHS]
    for case in FAMILIES["ragged"]:
        for gate in (*MODES, "cut-50"):
            cases += [_vary(case, gate=gate, H=3, K=128)]
            cases += [_vary(case, gate=gate, state="fp32", state_v_first=True, H=1, K=64)]
    for case in modes:
        for state in ("fp32", "bf16", "arange"):
            cases += [_vary(case, state=state, T=129, H=3, K=128, state_v_first=v_first) for v_first in (False, True)]
        cases += [_vary(case, strided=True, state="fp32", B=2, H=3, K=K) for K in WIDTHS]
        cases += [_vary(case, H=2, HV=HV, B=2, K=128, T=129) for HV in (4, 8)]
        cases += [_vary(case, dtype=torch.float16, T=129, H=3, K=128), _vary(case, V=32, H=3, K=128)]
        cases += [_vary(case, T=129, H=96, K=128)]
    return cases


def correctness_cases(size: Literal["small", "whole"] = "small") -> list[Case]:
    """The cases on which the operator must be right.

    Args:
        size: ``small``, some 90 cases that the CPU runs in a test suite; ``whole``, some 400 for a GPU, with every
            family at four lengths and K = 128, and once in float32 and once at K = 64.

    Raises:
        KeyError: another size.
    """
    return {"small": _small, "whole": _whole}[size]()


def _gap(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a view with 16 NaNs after every row."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 16), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def make(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Draws a case: the keyword arguments of `k3dsl.ops.kda`, which `recurrence` and `chunked` take as well.

    Args:
        case: what to draw.
        device: where the tensors go. They are drawn on the CPU, so a seed gives the same numbers everywhere.
        seed: of the random numbers.

    Returns:
        q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K], beta [B, T, HV]; A_log [HV] and dt_bias [HV * K] float32
        or None; initial_state or None; cu_seqlens [N+1] int32 or None; and the flags and numbers.
    """
    draw = Draw(seed)
    gate, keys, beta, state = GATES[case.gate], KEYS[case.keys], BETAS[case.beta], STATES[case.state]
    batch, tokens, heads = case.B, case.tokens, case.H
    value_heads, width, value_width = case.HV or heads, case.K, case.V or case.K

    def place(x: torch.Tensor, dtype: torch.dtype, *, gap: bool = case.strided) -> torch.Tensor:
        x = x.to(dtype).to(device)
        return _gap(x) if gap else x

    q, k = (recipe(draw, (batch, tokens, heads, width)) for recipe in (keys.q, keys.k))
    if not case.l2norm:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v = VALUES[case.values](draw, (batch, tokens, value_heads, value_width))
    g = gate.g(draw, (batch, tokens, value_heads, width))
    b = beta.draw(draw, (batch, tokens, value_heads))
    rate = None if gate.A_log is None else gate.A_log(draw, (value_heads,))
    bias = None if gate.dt_bias is None else gate.dt_bias(draw, (value_heads, width)).flatten()
    initial = None
    if state is not None:
        inner = (value_width, width) if case.state_v_first else (width, value_width)
        initial = place(state.draw(draw, (case.sequences, value_heads, *inner)), state.dtype)
    offsets = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens, dtype=torch.int32, device=device)
    return {
        "q": place(q, case.dtype),
        "k": place(k, case.dtype),
        "v": place(v, case.dtype),
        "g": place(g, torch.float32 if gate.mode == "activated" else case.dtype),
        "beta": place(b, case.dtype if beta.logits else torch.float32),
        "scale": case.scale,
        "initial_state": initial,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": case.l2norm,
        "use_gate_in_kernel": gate.mode != "activated",
        "use_beta_sigmoid_in_kernel": beta.logits,
        "allow_neg_eigval": beta.allow_neg_eigval,
        "lower_bound": LOWER_BOUND if gate.mode == "bounded" else None,
        "state_v_first": case.state_v_first,
        "cu_seqlens": offsets,
        "A_log": None if rate is None else place(rate, torch.float32, gap=False),
        "dt_bias": None if bias is None else place(bias, torch.float32, gap=False),
    }


def make_decode(
    case: Case, batch: int, device: torch.device | str = "cpu", seed: int = 0, *, padding: int = 1
) -> dict[str, Any]:
    """Draws one token for each of ``batch`` requests and a pool of states: the decode function's keyword arguments.

    The case gives the families, heads, widths, dtype and state layout; its shape, state and cu_seqlens are not used.

    Returns:
        q, k, v, g, beta with T = 1; state [S, HV, K, V] (or v-first) float32 with S = batch + 3; state_indices [batch]
        int32, distinct slots in no order, the last ``padding`` of them -1; and the flags and numbers of `make`.
    """
    # A sequence a slot, each starting from its own state; the pool is those states, whichever slots are then used.
    slots = batch + 3
    one = replace(case, B=slots, T=1, cu_seqlens=None, state="fp32")
    kwargs = make(one, device, seed)
    for name in ("q", "k", "v", "g", "beta"):
        kwargs[name] = kwargs[name][:batch]
    indices = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:batch].to(torch.int32)
    indices[batch - padding :] = -1
    kwargs["state"] = kwargs.pop("initial_state")
    kwargs["state_indices"] = indices.to(device)
    for name in ("output_final_state", "cu_seqlens"):
        del kwargs[name]
    return kwargs
