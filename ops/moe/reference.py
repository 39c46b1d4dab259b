"""What the MoE ops compute, in float64 and plain torch."""

from __future__ import annotations

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """MXFP4 [..., K/2] and [..., K/32] u8 -> [..., K] in float64; the low four bits of a byte come first."""
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64, device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    power = torch.where(scale == 255, torch.nan, torch.exp2(scale.double() - 127))
    return table[codes.long()] * power.repeat_interleave(32, -1)


def glu(
    gate: torch.Tensor, up: torch.Tensor, kind: str = "situ", beta: float = 4.0, linear_beta: float = 25.0
) -> torch.Tensor:
    """[beta tanh(g / beta) sigmoid(g)] [l tanh(u / l)], or g sigmoid(g) u, in the dtype of the inputs."""
    if kind == "silu":
        return gate * torch.sigmoid(gate) * up
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))


def scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """The sigmoid or the softmax of logits [T, E]."""
    return torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, -1)


def topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool = True,
    scale: float = 1.0,
    scoring: str = "sigmoid",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [T, K], ids [T, K]) in float64: the best by score + bias, ties to the lowest id, a NaN below any number."""
    score = scores(logits.double(), scoring)
    biased = score if bias is None else score + bias.double()
    floor = torch.finfo(torch.float64).min
    ranked = torch.where(biased.isnan(), -torch.inf, biased.clamp(min=floor))
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = score.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * scale, ids


def router(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, top_k: int, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids) of tokens [T, D] under a router [E, D], in float64."""
    return topk(x.double() @ weight.double().T, bias, top_k, **options)  # type: ignore[arg-type]


def sort(ids: torch.Tensor, num_experts: int, block_m: int) -> dict[str, torch.Tensor]:
    """The order of the pairs by expert and the table of row blocks, counted one by one."""
    flat = ids.flatten().tolist()
    lists: list[list[int]] = [[] for _ in range(num_experts + 1)]
    for pair, expert in enumerate(flat):
        lists[expert if 0 <= expert < num_experts else num_experts].append(pair)
    order = [pair for pairs in lists for pair in pairs]
    slots = [-1] * len(flat)
    for slot, pair in enumerate(order[: len(flat) - len(lists[-1])]):
        slots[pair] = slot
    offsets, table = [0], []
    for expert, pairs in enumerate(lists[:-1]):
        table += [(expert, offsets[-1] + n) for n in range(0, len(pairs), block_m)]
        offsets.append(offsets[-1] + len(pairs))
    bound = min(len(flat), -(-len(flat) // block_m) + num_experts - 1)
    table += [(-1, 0)] * (bound - len(table))
    found = {
        "order": order,
        "slots": slots,
        "expert_offsets": offsets,
        "block_expert": [expert for expert, _ in table],
        "block_row": [row for _, row in table],
    }
    return {name: torch.tensor(x, dtype=torch.int32, device=ids.device) for name, x in found.items()}


def experts(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_scale: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    activation: str = "situ",
    beta: float = 4.0,
    linear_beta: float = 25.0,
) -> torch.Tensor:
    """The weighted sum of each token's experts [T, D], in float64, expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)

    def matrix(weight: torch.Tensor, scale: torch.Tensor | None, e: int) -> torch.Tensor:
        return weight[e].double() if scale is None else dequantize(weight[e], scale[e])

    for e in range(w_gate.shape[0]):
        token, choice = torch.where(ids == e)
        if not token.numel():
            continue
        rows = x[token].double()
        gate, up = rows @ matrix(w_gate, gate_scale, e).T, rows @ matrix(w_up, up_scale, e).T
        h = glu(gate, up, activation, beta, linear_beta)
        y = h @ matrix(w_down, down_scale, e).T
        out.index_add_(0, token, weights[token, choice].double()[:, None] * y)
    return out
