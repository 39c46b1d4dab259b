"""Making a network's ops ready before it serves: building them, and tuning them at the shapes that it calls them with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from k3dsl.autotune.tuning import Problem, problem, tune_each
from k3dsl.model.arguments import integers
from k3dsl.ops.common import fail
from k3dsl.ops.registry import get_op
from k3dsl.runtime.executable import Call, recording

if TYPE_CHECKING:
    from k3dsl.autotune.result import Result
    from k3dsl.model.network import KimiK3ForCausalLM


COUNTS = "pass positive numbers, one or several"


def run_once(model: KimiK3ForCausalLM, batch: int, length: int, decode: bool = True) -> None:
    """A prefill of `batch` random prompts of `length` tokens, as one batch, and then one token of each."""
    if batch < 1 or length < 1:
        fail("batch" if batch < 1 else "lengths", f"is {min(batch, length)}", "pass positive numbers")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator).to(model.device)
    cache = model.new_cache(batch, capacity=length + 1)
    with torch.no_grad():
        model(ids, past=cache, logits_to_keep=1, differentiable=False)
        if decode:
            model(ids[:, :1], past=cache, differentiable=False)


def warmup(model: KimiK3ForCausalLM, batch: int | Sequence[int] = 1, lengths: int | Sequence[int] = 1024) -> None:
    """Runs the network once for each batch size and prompt length, whole prompts and chunks after a prefix, equal lengths and
    ragged ones, so that every op is built or looked up. After that `k3dsl.lock()` holds for calls of those kinds.

    Ops are compiled for classes of sizes, not for each size: lengths that share their divisibility by 16, 32, 64 and 128
    share code. Pass one length of each kind that will come.
    """
    given = {"batch": integers("batch", batch, COUNTS), "lengths": integers("lengths", lengths, COUNTS)}
    for name, numbers in given.items():
        if not numbers or min(numbers) < 1:
            fail(name, f"is {numbers}", COUNTS)
    for number in given["batch"]:
        for length in given["lengths"]:
            run_once(model, number, length)
            _run_ragged(model, number, length)


def _run_ragged(model: KimiK3ForCausalLM, batch: int, length: int) -> None:
    """Packed prompts of two lengths, from the start and after a prefix."""
    rows = batch + 1
    lengths = [length] * batch + [max(1, length - 1)]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    ids = torch.zeros(1, sum(lengths), dtype=torch.int64, device=model.device)
    cache = model.new_cache(rows, capacity=2 * length)
    with torch.no_grad():
        for _ in range(2):
            model(ids, past=cache, cu_seqlens=offsets, logits_to_keep=1, differentiable=False)
        model(ids.new_zeros(rows, length), past=cache, logits_to_keep=1, differentiable=False)


def problems(model: KimiK3ForCausalLM, batch: int = 1, length: int = 1024) -> list[Problem]:
    """Every op at the dims and options that the network calls it with, for a prefill and a decode step, once each."""
    with recording() as calls:
        run_once(model, batch, length)
    found: dict[Any, Problem] = {}
    for call in calls:
        one = _problem(call)
        found.setdefault((one.op.name, str(sorted(one.dims.items())), str(one.options)), one)
    return list(found.values())


def _problem(call: Call) -> Problem:
    plan = call.executable.plan
    op = get_op(plan.op)
    dims: dict[str, int] = {}
    for dim in op.dims:
        value = call.dims.get(dim.name, plan.dims.get(dim.name))
        if isinstance(value, int):
            dims[dim.name] = value
    if plan.op == "mla.decode":  # the keys that a page table has room for
        dims["S"] = call.dims["max_pages"] * plan.dims["page"]  # type: ignore[assignment,operator]
    options = {option.name: plan.options[option.name] for option in op.options if option.name in plan.options}
    return problem(op, dims, options)


def tune(
    model: KimiK3ForCausalLM, batch: int = 1, length: int = 1024, *, budget_s: float = 60.0, **settings: Any
) -> Iterator[Result]:
    """Sweeps every op at this network's shapes, one after the other, and keeps the winners for later processes.

    batch, length: prompts of a prefill and tokens of each; the decode step has as many rows. budget_s: of each op. settings:
    see `k3dsl.autotune.tuning.tune_each` (total_budget_s, max_trials, seed, watch, ...).

    Raises LockedError after k3dsl.lock(), and what `tune_each` raises.
    """
    target = "cpu" if model.device.type == "cpu" else "auto"
    return tune_each(problems(model, batch, length), **{"target": target, "budget_s": budget_s, **settings})
