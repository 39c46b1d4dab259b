"""What the ops share: plans of launches, size classes of runtime dims, the way from torch tensors to a launch, and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn

import torch

from k3dsl.backends.torch.dtypes import from_torch
from k3dsl.errors import ArgumentError
from k3dsl.ir.graph import Kernel as IRKernel
from k3dsl.ir.graph import walk
from k3dsl.ir.symbols import INT32_MAX, Expr, Sym
from k3dsl.ir.types import DType
from k3dsl.ir.verifier import verify
from k3dsl.language import Kernel, TensorSpec
from k3dsl.passes.simplify import simplify
from k3dsl.runtime import backends
from k3dsl.runtime.dispatch import (
    Dispatcher,
    Layouts,
    Problem,
    aligned,
    computes_on_cpu,
    facts_of,
    layouts_of,
    provide,
    remembered,
    wanted_backend,
)
from k3dsl.runtime.executable import Executable
from k3dsl.runtime.op import Op, forced_for
from k3dsl.runtime.plan import Launch, Plan, buffers_of
from k3dsl.runtime.replay import not_replayed, rechecked

Settings = Mapping[str, Any]
Schedules = Mapping[str, Mapping[str, Any]] | None
Strides = Mapping[str, tuple[int | Sym, ...]] | None
NARROW = 1 << 22
provide("k3dsl.autotune.lookup:knobs_for")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


# ---- plans -------------------------------------------------------------------------------------------------------------


def traced(
    kernel: Kernel, dims: Settings, knobs: Settings, tensors: Mapping[str, DType | TensorSpec | None]
) -> IRKernel:
    """The kernel's IR for these dims, knobs and dtypes, simplified."""
    ir = kernel.trace(dims, knobs, tensors)
    verify(ir)
    return simplify(ir)


def spec_of(strides: Strides) -> Callable[[str, DType], DType | TensorSpec]:
    """What a tensor of a name is: its dtype, with its strides where the caller's tensor is not contiguous."""
    known = strides or {}
    return lambda name, dtype: TensorSpec(dtype, known[name]) if name in known else dtype


def generator_of(label: str, backend: str, schedules: Schedules) -> str:
    """The backend that a launch goes through: the caller's field `backend`, which on the CPU means nothing."""
    return backend if backend == "torch" else (schedules or {}).get(label, {}).get("backend", backend)


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raises ArgumentError for schedule fields that neither backend has. They mean nothing on the CPU, but a slip is a slip."""
    given = {n: x for n, x in fields.items() if n != "backend"}
    if not given:
        return
    names = [fields["backend"]] if "backend" in fields else list(backends.GENERATING)
    for name in names[::-1]:  # the first has the last word
        try:
            backends.schedule_from_json(name, given)
            return
        except ArgumentError:
            if name == names[0]:
                raise


def launch_of(
    label: str,
    kernel: IRKernel,
    backend: str,
    schedules: Schedules,
    triton: Mapping[str, Any],
    tilelang: Mapping[str, Any] | None = None,
) -> Launch:
    """One launch with its schedule: the backend's default with the caller's fields over it.

    triton, tilelang: the default fields of each backend; None derives TileLang's from Triton's. Fields that go by label,
    such as stages, are replaced label by label. The caller's field `backend` moves this launch to another backend that
    generates code; on the CPU it means nothing. Pipeline depths that the caller leaves open may shrink to fit a target.
    """
    own = generator_of(label, backend, schedules)
    if backend == "torch":
        _check_fields((schedules or {}).get(label, {}))
        return Launch(label, kernel, backend, None)
    given = {n: x for n, x in (schedules or {}).get(label, {}).items() if n != "backend"}
    backends.check_generating(own)
    default = dict(triton if own == "triton" else tilelang_defaults(triton) if tilelang is None else tilelang)
    # a loop that these dims leave out takes its default depth with it
    labels = {op.attrs.get("label") for op in walk(kernel.body) if op.opcode == "loop"}
    default["stages"] = {name: n for name, n in default.get("stages", {}).items() if name in labels}
    for name, value in given.items():
        if isinstance(value, Mapping):
            given[name] = {**default.get(name, {}), **value}
    chosen = backends.schedule_from_json(own, {**default, **given})
    smaller: list[Any] = []
    stages = default["stages"]
    if "stages" not in given:
        for depth in range(max(stages.values(), default=1) - 1, 0, -1):
            fewer = {name: min(n, depth) for name, n in stages.items()}
            smaller.append(backends.schedule_from_json(own, {**default, **given, "stages": fewer}))
    return Launch(label, kernel, own, chosen, smaller=tuple(smaller))


def tilelang_defaults(triton: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a TileLangSchedule like those of a TritonSchedule: as many threads, but a warp group at least."""
    return {"threads": max(128, 32 * triton.get("num_warps", 4)), "stages": dict(triton.get("stages", {}))}


def one_launch(
    op: str,
    kernel: Kernel,
    dims: Settings,
    knobs: Settings,
    options: Settings,
    dtypes: Mapping[str, DType | None],
    backend: str,
    schedules: Schedules,
    strides: Strides,
    default: Mapping[str, Any],
    tilelang: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of an op that is one launch, labelled like its kernel. Options and knobs are what the kernel calls `c`.

    default, tilelang: schedule fields of the two backends that generate code, see launch_of.
    """
    spec = spec_of(strides)
    tensors = {n: None if t is None else spec(n, t) for n, t in dtypes.items()}
    ir = traced(kernel, dims, {**options, **knobs}, tensors)
    launch = launch_of(kernel.name, ir, backend, schedules, default, tilelang)
    return Plan(op, dims, buffers_of([ir]), (launch,), knobs, options)


# ---- from torch tensors to a launch ------------------------------------------------------------------------------------


def size_class(name: str, value: int, *divisors: int) -> Sym:
    """A runtime dim with two facts, so that few variants of code arise: the first of `divisors` that divides the value, and
    whether it is small enough for a block of rows of that width to be addressed in 32 bits."""
    divisor = next((n for n in divisors if value % n == 0), 1)
    return Sym(name, divisible_by=divisor, min=1, max=NARROW if value <= NARROW else INT32_MAX)


def known_dims(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """The dims of a plan as numbers, for a call with these runtime dims; without those that depend on others."""
    exprs = {name: Expr.of(value) for name, value in plan.dims.items()}
    return {name: e.evaluate(dims) for name, e in exprs.items() if set(e.symbols()) <= set(dims)}


def seen_pairs(queries: int, keys: int, causal: bool) -> int:
    """Pairs of a query and a key that it sees; with `causal` query i sees keys up to i + keys - queries."""
    if not causal:
        return queries * keys
    seeing = min(queries, keys)
    return seeing * (keys - seeing) + seeing * (seeing + 1) // 2


def head_constraints(dims: Mapping[str, Any], many: str = "value heads", few: str = "query and key heads") -> list[str]:
    """Why heads do not go together: each of the HK few serves as many of the H many. HK 0 stands for as many."""
    H, HK = dims["H"], dims["HK"]
    return [f"H = {H} {many} are no multiple of HK = {HK} {few}"] if HK and H % HK else []


def is_width(width: int, most: int) -> bool:
    """Whether kernels take heads of that width: a multiple of 16."""
    return width % 16 == 0 and 16 <= width <= most


def width_constraints(dims: Mapping[str, Any], **most: int) -> list[str]:
    """Why the widths of heads, each up to its most, are not what kernels take."""
    odd = [n for n, top in most.items() if not is_width(dims[n], top)]
    return [f"{n} = {dims[n]}, needs a multiple of 16 up to {most[n]}: pad it with zeros" for n in odd]


def state_constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], **most: int) -> list[str]:
    """Why the widths are those of no state, or V is not made up of blocks of block_v value columns."""
    uneven = [f"block_v {knobs['block_v']} does not divide V = {dims['V']}"] if dims["V"] % knobs["block_v"] else []
    return width_constraints(dims, **most) or uneven


def value_block(width: int, most: int, least: int = 16) -> int:
    """The widest block of value columns up to `most` that divides them; `least` where none does, which is refused then."""
    block = most
    while block > least and width % block:
        block //= 2
    return block


def covering(choices: Sequence[int], size: int) -> int:
    """The least of some choices that is at least `size`, the greatest where none is: a tile for the CPU, whose time goes by
    steps and programs."""
    return min((n for n in choices if n >= size), default=max(choices))


def token_divisor(tokens: int) -> int:
    """64, 32 or 16 where it divides the tokens of a sequence, else 1: the facts that change the code."""
    return next((n for n in (64, 32, 16) if tokens % n == 0 and tokens > 0), 1)


def narrow(dims: Settings, options: Settings) -> dict[str, Any]:
    """The dims, runtime ones with the facts that most calls have; see size_class."""
    return {n: replace(x, max=NARROW) if isinstance(x, Sym) else x for n, x in dims.items()}


class Caller:
    """An op of one launch on torch tensors: picks knobs, compiles on first use, launches on the current stream."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self._dispatch = Dispatcher(op.plan)
        self._remembered = remembered(self._code)

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor],
        dims: Mapping[str, int | tuple[int, ...]],
        options: Mapping[str, Any],
    ) -> dict[str, torch.Tensor]:
        """Runs the op and returns its outputs by name.

        dims: an int is compiled in; a tuple (value, *divisors) is a runtime dim, see size_class. torch dtypes among the
        options become k3dsl's.
        """
        held = aligned(tensors)
        device = next(iter(held.values())).device
        find = self._code if forced_for(self.op.plan) is not None else self._remembered
        run, numbers = find(
            tuple(dims.items()), tuple(options.items()), layouts_of(held), device, wanted_backend(device)
        )
        return run(held, numbers)

    def _code(
        self,
        dims: tuple[Any, ...],
        options: tuple[Any, ...],
        layouts: Layouts,
        device: torch.device,
        backend: str,
    ) -> tuple[Executable, Mapping[str, int]]:
        """The code of a kind of call, and the runtime dims that it is called with."""
        strides, values = facts_of(layouts)
        chosen = self.op.resolve_options({n: from_torch(x) if isinstance(x, torch.dtype) else x for n, x in options})
        numbers = {n: x if isinstance(x, int) else x[0] for n, x in dims}
        known = {n: x if isinstance(x, int) else size_class(n, *x) for n, x in dims}
        code, _ = self._dispatch.pick(Problem(self.op, chosen, numbers, known, strides, device, backend))
        return code, {**numbers, **values}


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """[..., D] as [rows, D], also where D is 0."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


# ---- gradients ---------------------------------------------------------------------------------------------------------


def gradients_again(
    compute: Callable[..., Sequence[tuple[torch.Tensor, torch.Tensor]]],
    inputs: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
    materialize: bool = False,
) -> list[torch.Tensor | None]:
    """A backward pass by computing again: gradients of the inputs, None where none is needed.

    compute(*inputs): (output, its gradient) pairs, by differentiable torch operations. materialize: an input that no output
    depends on gets zeros.
    """
    with torch.enable_grad():
        own = [None if t is None else t.detach().requires_grad_(n) for t, n in zip(inputs, needed, strict=True)]
        pairs = compute(*own)
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs],
                [t for t in own if t is not None and t.requires_grad],
                [g.to(o.dtype) for o, g in pairs],
                allow_unused=True,
                materialize_grads=materialize,
            )
        )
    return [next(found) if t is not None and t.requires_grad else None for t in own]


# ---- checks ------------------------------------------------------------------------------------------------------------


def fail(argument: str, reason: str, remedy: str) -> NoReturn:
    """Raises ArgumentError: which argument, what is wrong with it, what to do."""
    raise ArgumentError(f"{argument}: {reason}", fix=remedy)


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' and the like."""
    return str(dtype).removeprefix("torch.")


def check_is_tensor(name: str, x: object) -> torch.Tensor:
    """x. Raises ArgumentError unless it is a tensor."""
    if not isinstance(x, torch.Tensor):
        fail(name, f"is a {type(x).__name__}, needs a tensor", f"pass {name} as a torch.Tensor")
    return x


def check_tensor(name: str, x: object, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raises ArgumentError unless x is a tensor of one of the dtypes."""
    x = check_is_tensor(name, x)
    if x.dtype not in dtypes:
        *others, last = map(dtype_name, dtypes)
        known = f"{', '.join(others)} or {last}" if others else last
        fail(name, f"is {dtype_name(x.dtype)}, needs {known}", f"{name}.to(torch.{dtype_name(dtypes[0])})")


def check_rank(name: str, x: torch.Tensor, rank: int, dims: str, remedy: str) -> None:
    """Raises ArgumentError unless x has `rank` dims; `dims` names them."""
    if x.dim() != rank:
        fail(name, f"has shape {list(x.shape)}, needs {rank} dims {dims}", f"pass {remedy}")


def check_width(name: str, dim: str, width: int, most: int) -> None:
    """Raises ArgumentError unless the last axis of a tensor is as wide as kernels take it."""
    if not is_width(width, most):
        fail(name, f"has {dim} = {width}, needs a multiple of 16 up to {most}", "pad the last dim with zeros")


def check_no_grad(name: str, *tensors: torch.Tensor | None, remedy: str = "use torch.no_grad()") -> None:
    """Raises ArgumentError where a gradient is wanted through an op that has none: torch would give none without a word."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        fail(name, "is for inference, but an input requires a gradient", remedy)


def check_same(name: str, x: torch.Tensor, other: str, y: torch.Tensor, dtype: bool = True) -> None:
    """Raises ArgumentError unless x lies on y's device and, with `dtype`, has its dtype."""
    if x.device != y.device:
        fail(name, f"is on {x.device}, {other} is on {y.device}", f"{name}.to({str(y.device)!r})")
    if dtype and x.dtype != y.dtype:
        fail(name, f"is {dtype_name(x.dtype)}, {other} is {dtype_name(y.dtype)}", f"{name}.to({other}.dtype)")


def check_contiguous_rows(name: str, x: torch.Tensor) -> None:
    """Raises ArgumentError unless the last dim is contiguous."""
    if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
        fail(name, f"has strides {x.stride()}, but its last dim must be contiguous", f"pass {name}.contiguous()")


def check_offsets(name: str, x: torch.Tensor) -> int:
    """Checks dtype and rank of cumulative lengths [N+1]; returns N."""
    check_tensor(name, x, (torch.int32, torch.int64))
    if x.dim() != 1 or x.shape[0] < 2:
        fail(name, f"has shape {list(x.shape)}, needs [N+1] with N at least 1", "one sequence of T tokens is [0, T]")
    check_contiguous_rows(name, x)
    return x.shape[0] - 1


def check_offset_values(name: str, offsets: list[int], owner: str, tokens: int, dim: str = "T") -> None:
    """Checks the numbers of cumulative lengths: from 0, never down, to the `tokens` that the tensor `owner` has (its dim)."""
    if offsets[0] != 0:
        fail(name, f"starts at {offsets[0]}", "the first sequence starts at token 0")
    for i, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            fail(name, f"goes down from {start} to {end} at entry {i + 1}", "pass offsets, not lengths")
    if offsets[-1] != tokens:
        fail(
            name,
            f"ends at {offsets[-1]}, but {owner} has {dim} = {tokens} tokens",
            f"end at {dim}; cut the padding off",
        )


def check_slots(name: str, slots: torch.Tensor | None, requests: int, pool: str, size: int, like: torch.Tensor) -> None:
    """Checks the slot of each request: [B] int32 on the device of `like`; its numbers where it lies on the CPU.

    None stands for slot b of request b. A negative slot is padding; no two requests may share one.
    """
    if slots is None:
        if size != requests:
            fail(pool, f"has {size} slots for {requests} requests", f"pass {name}, or one slot a request")
        return
    check_tensor(name, slots, (torch.int32,))
    if slots.shape != (requests,):
        fail(name, f"has shape {list(slots.shape)}, needs [B] = [{requests}]", "pass a slot a request")
    if slots.device != like.device:
        fail(name, f"is on {slots.device}, the inputs are on {like.device}", f"{name}.to({str(like.device)!r})")
    check_contiguous_rows(name, slots)
    check_numbers(_check_slot_numbers, slots, name, size)


def _check_slot_numbers(slots: torch.Tensor, name: str, size: int) -> None:
    used = [i for i in slots.tolist() if i >= 0]
    if used and max(used) >= size:
        fail(name, f"names slot {max(used)} of a pool of {size}", "number slots from 0; -1 is padding")
    if len(set(used)) != len(used):
        twice = next(i for i in used if used.count(i) > 1)
        fail(name, f"names slot {twice} twice", "give each request its own slot; -1 is padding")


def check_suite(size: str) -> None:
    """Raises ArgumentError for another set of cases than small and whole."""
    if size not in ("small", "whole"):
        raise ArgumentError(f"cases are small or whole, not {size!r}", fix="pass small or whole")


def _readable(x: torch.Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # first: torch.compile cannot look into what follows
        and computes_on_cpu(x.device)
        and not isinstance(x, torch._subclasses.FakeTensor)
    )


def has_data(x: torch.Tensor) -> bool:
    """Whether the tensor's numbers can be looked at without waiting for a GPU. A call that goes by them is not replayed."""
    found = _readable(x)
    if found:
        not_replayed()
    return found


def check_numbers(check: Callable[..., None], x: torch.Tensor, *rest: Any) -> None:
    """Runs check(x, *rest), where x's numbers can be looked at without waiting for a GPU; in replayed calls too."""
    if _readable(x):
        rechecked(check, x, *rest)
