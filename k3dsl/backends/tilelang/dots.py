"""How each product is computed: matrix instructions or plain multiply-adds, how warps divide it, and its operands."""

from __future__ import annotations

from dataclasses import dataclass, replace

from k3dsl.backends.tilelang.schedule import TileLangSchedule
from k3dsl.backends.tilelang.uses import is_swap
from k3dsl.ir.graph import Kernel, Op, Value, walk
from k3dsl.ir.types import f32
from k3dsl.targets import Target

ATOM_K = {8: 32, 16: 16, 32: 8}


@dataclass
class DotPlan:
    """One product.

    name: d0, d1, ... in program order, as a schedule's policies name it. form: 'wgmma', 'mma' or 'fma'. why: what keeps it
    from the fastest form. policy: which axis of the result the warps divide. a, b: the buffers read, and whether
    transposed. a_fragment: the left operand stays in registers.
    """

    name: str
    op: Op
    form: str
    why: str
    policy: str
    warps: tuple[int, int]
    a: Value
    b: Value
    a_transposed: bool
    b_transposed: bool
    a_fragment: bool = False

    @property
    def matrix(self) -> bool:
        return self.form != "fma"


def operand(v: Value) -> tuple[Value, bool]:
    """The value under transposes, and whether their number is odd."""
    transposed = False
    while is_swap(v.op):
        assert v.op is not None
        v, transposed = v.op.operands[0], not transposed
    return v, transposed


def partition(m: int, n: int, warps: int, policy: str, wgmma: bool) -> tuple[int, int] | None:
    """(warps along M, warps along N) as TileLang divides a product, or None where it has no way."""
    group = 4 if wgmma else 1
    fits = [
        (rows, warps // rows)
        for rows in range(group, warps + 1, group)
        if warps % rows == 0 and m % (16 * rows) == 0 and n % (8 * (warps // rows)) == 0
    ]
    if not fits or policy == "col":
        return fits[0] if fits else None
    if policy == "row":
        return fits[-1]
    return min(fits, key=lambda f: abs((m / (16 * f[0])) / (n / (8 * f[1])) - m / n))


def plan_dots(kernel: Kernel, schedule: TileLangSchedule, target: Target) -> dict[int, DotPlan]:
    """The plan of every product, by id of its op."""
    dots = [op for op in walk(kernel.body) if op.opcode == "dot"]
    plans: dict[int, DotPlan] = {}
    for number, op in enumerate(dots):
        name = f"d{number}"
        policy = schedule.policy.get(name) or ("row" if len(dots) > 1 else "square")
        form, why, warps, policy = _form(op, policy, schedule, target)
        (a, a_t), (b, b_t) = operand(op.operands[0]), operand(op.operands[1])
        plans[id(op)] = DotPlan(name, op, form, why, policy, warps, a, b, a_t, b_t)
    return plans


THREADS = (128, 64, 32)
"""Choices of `threads_for`, the first where they are equal."""


def threads_for(kernel: Kernel, schedule: TileLangSchedule, target: Target) -> int:
    """How many threads a program gets that nobody gave any: those with which most products become matrix instructions."""

    def products(threads: int) -> int:
        return sum(plan.matrix for plan in plan_dots(kernel, replace(schedule, threads=threads), target).values())

    return max(THREADS, key=products)


def _form(op: Op, policy: str, schedule: TileLangSchedule, target: Target) -> tuple[str, str, tuple[int, int], str]:
    a, n = op.operands[0].type, op.operands[1].shape[-1]
    plain = (0, 0)
    if a.rank != 2:
        return "fma", "a batch of matrices", plain, policy
    if a.dtype == f32 and op.attrs["precision"] != "tf32":
        return "fma", f"{op.attrs['precision']} products of fp32", plain, policy
    if a.dtype.bits not in ATOM_K:
        return "fma", f"no matrix instruction for {a.dtype}", plain, policy
    if a.dtype.bits == 8:
        return "fma", f"{a.dtype} products are not matched to instructions yet", plain, policy
    m, k = a.shape
    if k % ATOM_K[a.dtype.bits]:
        return "fma", f"K = {k} is no multiple of {ATOM_K[a.dtype.bits]}", plain, policy
    warps = schedule.threads // 32
    hopper = target.vendor == "nvidia" and isinstance(target.arch, int) and target.arch == 90
    why = ""
    if hopper and a.dtype.bits == 16:
        if schedule.threads % 128:
            why = f"wgmma needs threads in whole warp groups of 128, there are {schedule.threads}"
        elif m % 64:
            why = f"wgmma needs M to be a multiple of 64, it is {m}"
        elif n % 16:
            # here TileLang picks wgmma or mma.sync by B's orientation, with other warps: neither is planned for
            return "fma", f"wgmma needs N to be a multiple of 16, it is {n}", plain, policy
        else:
            for p in dict.fromkeys((policy, "square", "col", "row")):
                found = partition(m, n, warps, p, wgmma=True)
                if found is not None:
                    return "wgmma", "" if p == policy else f"policy {policy} does not divide {m} x {n}", found, p
            why = f"{warps} warps do not divide {m} x {n}"
    for p in dict.fromkeys((policy, "square", "col", "row")):
        found = partition(m, n, warps, p, wgmma=False)
        if found is not None:
            return "mma", why, found, p
    return "fma", f"{warps} warps do not divide {m} x {n} into 16 x 8 tiles", plain, policy
