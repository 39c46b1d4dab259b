"""A part of `k3dsl demo`: K3-tiny learns some text on the CPU, then reads and writes through the compiled ops."""

from __future__ import annotations

import math
import time
from typing import Any

from k3dsl.cli.output import print_table

WINDOW, BATCH, HELD_OUT, PROMPT, WRITTEN = 64, 8, 256, b"The ", 48
AGREE = 1e-3


def corpus() -> bytes:
    """English text that every Python carries: the topics of its help(), or where they are left out, its own docstrings."""
    try:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics)).encode()
    except ImportError:
        import builtins

        return "\n".join(getattr(builtins, name).__doc__ or "" for name in dir(builtins)).encode()


def run_model(seconds: float, seed: int = 0) -> bool:
    """Trains for so many seconds, then compares the two paths on text that was not trained on. True when they agree."""
    import torch

    from k3dsl.model import KimiK3ForCausalLM

    data = torch.tensor(list(corpus()))
    learnt, held = data[:-HELD_OUT], data[-HELD_OUT:]
    torch.manual_seed(seed)
    model = KimiK3ForCausalLM.from_config("K3-tiny", dtype=torch.float32)
    before = bits(model, held)
    start = time.perf_counter()
    steps = train(model, learnt, seconds, seed)
    trained = time.perf_counter() - start
    model.eval()

    start = time.perf_counter()
    compiled = bits(model, held)
    read = time.perf_counter() - start
    plain = bits(model, held, differentiable=True)
    start = time.perf_counter()
    new = model.generate(
        [list(PROMPT)], max_new_tokens=WRITTEN, temperature=0.7, top_p=0.9, seed=seed, eos_token_id=[]
    ).tokens[0]
    wrote = time.perf_counter() - start

    uniform = math.log2(model.config.vocab_size)
    rows = [
        (f"every byte alike likely ({model.config.vocab_size} tokens)", f"{uniform:.3f}"),
        ("untrained, compiled ops", f"{before:.3f}"),
        (f"after {steps} steps of {WINDOW * BATCH} bytes, compiled ops", f"{compiled:.3f}"),
        ("the same weights, plain torch", f"{plain:.3f}"),
    ]
    size = sum(p.numel() for p in model.parameters())
    kinds = model.config.layer_types
    print(
        f"K3-tiny: {kinds.count('kda')} KDA and {kinds.count('mla')} MLA layers, {model.config.num_experts} experts, "
        f"Block AttnRes, {size / 1e6:.1f}M parameters\n"
    )
    title = f"mean cross entropy over {HELD_OUT} bytes of Python's help() that were not trained on"
    print_table(title, ("what", ">bits a byte"), rows)
    print(
        f"training took {trained:.0f} s through autograd, reading {read:.1f} s, writing {WRITTEN / wrote:.0f} tokens a second"
    )
    print(f"it writes: {(PROMPT + bytes(t for t in new if t < 256)).decode(errors='replace')!r}")
    return abs(compiled - plain) <= AGREE * plain and compiled < before


def bits(model: Any, text: Any, **how: Any) -> float:
    """Mean cross entropy of the next byte, in bits."""
    import torch

    with torch.no_grad():
        ids = text[None]
        return model(ids, labels=ids, **how).loss.item() / math.log(2)


def train(model: Any, text: Any, seconds: float, seed: int) -> int:
    """AdamW on random windows for so long; returns the number of steps, one at least."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    model.train()
    until, steps = time.perf_counter() + seconds, 0
    while steps == 0 or time.perf_counter() < until:
        first = torch.randint(len(text) - WINDOW, (BATCH,), generator=generator)
        ids = text[first[:, None] + torch.arange(WINDOW)]
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
    return steps
