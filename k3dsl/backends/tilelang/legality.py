"""What the TileLang backend cannot lower, as reasons; the same list serves the tuner, `k3dsl explain` and the tests.

Each rule was seen to be broken in TileLang 0.1.15: it refuses such code, or takes it and makes a kernel that hangs,
cannot be launched or is wrong. Products that no matrix instruction fits are multiply-adds, so they are no reason here.
"""

from __future__ import annotations

from k3dsl.backends.base import Reason, grid_reasons
from k3dsl.backends.tilelang.buffers import Recorder, shared_in_use
from k3dsl.backends.tilelang.dots import DotPlan, partition
from k3dsl.backends.tilelang.emitter import RESERVED
from k3dsl.backends.tilelang.placement import PRODUCER_THREADS, Placement
from k3dsl.backends.tilelang.prepare import prepared
from k3dsl.backends.tilelang.schedule import TileLangSchedule
from k3dsl.backends.tilelang.text import pow2
from k3dsl.errors import LegalityError
from k3dsl.ir.graph import Kernel, Op, walk
from k3dsl.ir.types import bf16, f16, f32, f64, i32, i64
from k3dsl.targets import Target

CUDA_NAMES = frozenset({"threadIdx", "blockIdx", "blockDim", "gridDim"})
MAX_FRAGMENT_BYTES = 16384
"""Most that one fragment may take of each thread. Far more than there are registers; beyond it compilers take minutes."""
WGMMA_REGISTERS = 26
"""What ptxas wants for a wgmma instruction beside its accumulators (its message C7602)."""
_CPP = (
    "alignas alignof and and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t compl "
    "concept const consteval constexpr constinit const_cast co_await co_return co_yield decltype default delete "
    "do double dynamic_cast enum explicit export extern friend goto inline int long mutable namespace new "
    "noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires "
    "short signed sizeof static static_assert static_cast struct switch template this thread_local throw typedef "
    "typeid typename union unsigned using virtual void volatile wchar_t xor xor_eq"
)
CPP_NAMES = frozenset(_CPP.split())
"""Keywords of C++, in which TileLang writes the names of parameters; a kernel's own gets an ending."""
_ATOMIC = (f16, bf16, f32, f64, i32, i64)


def check(kernel: Kernel, schedule: TileLangSchedule, target: Target) -> list[Reason]:
    """Reasons why this kernel, schedule and target do not go together; empty when they do."""
    if target.vendor != "nvidia":
        return [Reason("target", f"the TileLang backend generates no code for {target.name}; use Triton")]
    reasons = grid_reasons(kernel) + _labels(kernel, schedule) + _names(kernel)
    for op in walk(kernel.body):
        if op.opcode == "atomic_add" and kernel.tensor(op.attrs["tensor"]).dtype not in _ATOMIC:
            dtype = kernel.tensor(op.attrs["tensor"]).dtype
            reasons.append(Reason("atomic_dtype", f"TileLang has no atomic add of {dtype}", op.loc))
    if reasons:
        return reasons
    printer: Recorder | None = None
    try:
        expanded = prepared(kernel)
        placement = Placement(expanded, schedule, target)
        printer = Recorder(expanded, placement)
        text = printer.module(kernel.name, "")
    except LegalityError as error:
        return [Reason("op", error.message, error.where or kernel.source)]
    except Exception as error:  # a case that the printer was not written for
        where = printer.loc if printer is not None else kernel.source
        return [Reason("op", f"no TileLang is known for this ({type(error).__name__}: {error})", where)]
    reasons += _dots(expanded, placement)
    reasons += _warps(schedule, placement, target)
    reasons += _fragments(schedule, placement, printer)
    reasons += _reductions(expanded, placement) + _overlap(expanded, placement)
    return reasons + _shared(text, printer, target)


def _labels(kernel: Kernel, schedule: TileLangSchedule) -> list[Reason]:
    reasons = []
    ops = list(walk(kernel.body))
    loops = {op.attrs["label"] for op in ops if op.opcode == "loop" and op.attrs.get("label")}
    for label in schedule.stages:
        if label not in loops:
            known = ", ".join(sorted(loops)) or "none"
            reasons.append(Reason("unknown_label", f"stages name the loop {label!r}; labels of {kernel.name}: {known}"))
    inverses = any(op.opcode == "unit_lower_inverse" for op in ops)
    dots = [op for op in (walk(prepared(kernel).body) if inverses else ops) if op.opcode == "dot"]
    for name in schedule.policy:
        if name not in {f"d{k}" for k in range(len(dots))}:
            known = ", ".join(f"d{k}" for k in range(len(dots))) or "none"
            reasons.append(Reason("unknown_dot", f"policy names the dot {name!r}; dots of {kernel.name}: {known}"))
    for name in schedule.staged or ():
        if name not in {t.name for t in kernel.tensors}:
            reasons.append(Reason("unknown_tensor", f"staged names {name!r}, which {kernel.name} does not take"))
    return reasons


def _names(kernel: Kernel) -> list[Reason]:
    """Parameters keep their names in generated code, so these must be free there, and differ from each other."""
    names = [t.name for t in kernel.tensors] + [s.name for s in kernel.dims] + [s.name for s in kernel.scalars]
    pointers = {f"{t.name}_ptr" for t in kernel.tensors}
    reasons = []
    for name in dict.fromkeys([kernel.name, *names]):
        taken = name in RESERVED | CUDA_NAMES or name in pointers or (name in CPP_NAMES and name in names)
        if taken or not name.isidentifier():
            reasons.append(
                Reason(
                    "name", f"the name {name!r} means something else in generated TileLang; rename it", kernel.source
                )
            )
        elif names.count(name) > 1:
            reasons.append(Reason("name", f"{name!r} is the name of two parameters or dims; rename one", kernel.source))
    return reasons


def _dots(kernel: Kernel, placement: Placement) -> list[Reason]:
    """TileLang takes wgmma for each product that is tall enough, and then insists on dividing it among whole warp groups."""
    reasons: list[Reason] = []
    warps = placement.schedule.threads // 32
    for op in walk(kernel.body):
        plan = placement.dots.get(id(op)) if op.opcode == "dot" else None
        if plan is None or not plan.matrix or not _takes_wgmma(plan, placement):
            continue
        m, n = op.result.shape
        divided = partition(m, n, warps, plan.policy, wgmma=True)
        if m % 64 or divided is None:
            message = (
                f"{plan.name}: {warps} warps cannot divide a {m} x {n} product for wgmma, 64 rows and 8 columns each"
            )
            reasons.append(Reason("warp_partition", f"{message}; use M a multiple of 64, or other threads", op.loc))
            continue
        share = n // divided[1]
        if share % 16 and not plan.b_transposed:
            message = (
                f"{plan.name}: each of {divided[1]} warp groups along N gets {share} columns of a row-major operand"
            )
            fix = "wgmma reads it in groups of 16; use a larger N, fewer threads or policy row"
            reasons.append(Reason("dot_n", f"{message}; {fix}", op.loc))
        needed, had = min(share, 256) // 2 + WGMMA_REGISTERS, _registers_at_launch(placement)
        if 0 < had < needed:
            message = f"{plan.name}: a wgmma instruction of {min(share, 256)} columns needs {needed} registers a thread"
            fix = "use a smaller N, fewer threads or policy col"
            reasons.append(Reason("registers", f"{message}, and a program so large starts with {had}; {fix}", op.loc))
    return reasons


def _registers_at_launch(placement: Placement) -> int:
    """Registers a thread that the compiler may count on, before a split between those that copy and those that compute; 0 of
    more threads than a multiprocessor has."""
    threads = placement.schedule.threads + (PRODUCER_THREADS if placement.specialised() else 0)
    blocks = placement.schedule.min_blocks_per_sm or 1
    target = placement.target
    if blocks * threads > target.max_threads_per_sm:
        return 0
    return min(target.max_registers_per_thread, target.registers_per_sm // (blocks * threads)) // 8 * 8


def _takes_wgmma(plan: DotPlan, placement: Placement) -> bool:
    a = plan.op.operands[0].type
    tall = a.shape[0] >= 64 and placement.schedule.threads % 128 == 0
    return placement.target.arch == 90 and a.dtype.bits == 16 and tall


def _warps(schedule: TileLangSchedule, placement: Placement, target: Target) -> list[Reason]:
    """Threads, and registers where a warp group of its own copies."""
    producer = PRODUCER_THREADS if placement.specialised() else 0
    threads = schedule.threads + producer
    if threads > target.max_threads_per_block:
        own = f" and {producer} that copy" if producer else ""
        message = f"{schedule.threads} threads{own} exceed the {target.max_threads_per_block} of a program"
        return [Reason("threads", f"{message}; use fewer threads" + (", or no warp_specialize" if own else ""))]
    if producer and schedule.threads % 128:
        message = (
            f"warp specialization trades registers between whole warp groups of 128, not {schedule.threads} threads"
        )
        return [Reason("warp_group", f"{message}; use 128 threads, one stage, or no warp_specialize")]
    blocks = schedule.min_blocks_per_sm or 1
    if blocks * threads > target.max_threads_per_sm:
        message = f"{blocks} programs of {threads} threads exceed the {target.max_threads_per_sm} of a multiprocessor"
        return [Reason("blocks_per_sm", f"{message}; lower min_blocks_per_sm")]
    divided = placement.registers()
    if divided is None:
        return []
    copying, computing = divided
    each = _registers_at_launch(placement)
    asked = copying * producer + computing * schedule.threads
    if asked <= each * threads:
        return []
    message = (
        f"{producer} threads of {copying} registers and {schedule.threads} of {computing} are {asked}, "
        f"and each of {blocks} programs a multiprocessor has {each * threads}: it would wait for them for ever"
    )
    return [Reason("registers", f"{message}; lower consumer_registers or min_blocks_per_sm")]


def _fragments(schedule: TileLangSchedule, placement: Placement, printer: Recorder) -> list[Reason]:
    """TileLang spreads a fragment evenly over the threads, unless it is smaller or laid out by a product."""
    products = any(plan.matrix for plan in placement.dots.values())
    reasons: dict[str, Reason] = {}
    for b in printer.buffers():
        if b.kind != "fragment":
            continue
        shape = " x ".join(map(str, b.sizes))
        if b.elements * b.dtype.bytes > MAX_FRAGMENT_BYTES * schedule.threads:
            message = (
                f"a tile of {shape} {b.dtype} in registers is {b.elements * b.dtype.bytes // schedule.threads} bytes"
            )
            fix = f"at most {MAX_FRAGMENT_BYTES} compile; use smaller tiles or more threads"
            reasons.setdefault(f"size {b.where}", Reason("tile_size", f"{message} a thread, {fix}", b.where))
        elif b.elements > schedule.threads and b.elements % schedule.threads and not (products and len(b.sizes) == 1):
            message = f"a tile of {shape} in registers cannot be spread evenly over {schedule.threads} threads"
            fix = "use extents that are powers of two, or other threads"
            reasons.setdefault(f"layout {b.where}", Reason("fragment", f"{message}; {fix}", b.where))
    return list(reasons.values())


def _reductions(kernel: Kernel, placement: Placement) -> list[Reason]:
    """A reduction among threads needs the axes after the reduced one to be a power of two of elements."""
    reasons = []
    for op in walk(kernel.body):
        if op.opcode != "reduce" or not _by_instruction(op) or placement.anchored(op.operands[0]):
            continue
        shape, axis = op.operands[0].shape, op.attrs["axis"]
        after = 1
        for n in shape[axis + 1 :]:
            after *= placement.extent(n)
        if shape[axis] != 1 and pow2(after) != after:
            message = f"a reduction over axis {axis} of {list(shape)} has {after} elements behind that axis"
            reasons.append(
                Reason("reduce_width", f"{message}, not a power of two; transpose the tile or pad it", op.loc)
            )
    return reasons


def _overlap(kernel: Kernel, placement: Placement) -> list[Reason]:
    loops = [op for op in walk(kernel.body) if op.opcode == "loop"]
    if not placement.schedule.overlap or any(placement.overlaps(loop) for loop in loops):
        return []
    message = (
        "overlap is for a pipelined loop whose copies have a warp group of their own and whose products are all wgmma, on "
        "registers or on tiles that the step does not write; there is none"
    )
    return [Reason("overlap", f"{message}; leave overlap out", loops[0].loc if loops else kernel.source)]


def _by_instruction(op: Op) -> bool:
    return op.attrs.get("kind") not in (None, "prod")


def _shared(text: str, printer: Recorder, target: Target) -> list[Reason]:
    """Neither TileLang nor nvcc minds a kernel that asks for more shared memory than there is."""
    live = shared_in_use(text, printer.buffers())
    need = sum(b.bytes for b in live)
    if need <= target.shared_per_block:
        return []
    largest = sorted(live, key=lambda b: -b.bytes)
    parts = [f"{b.name} {b.bytes}" + (f" ({b.copies} stages)" if b.copies > 1 else "") for b in largest[:4]]
    rest = f", {len(live) - 4} more" if len(live) > 4 else ""
    message = (
        f"needs {need} bytes of shared memory at a time, and {target.name} has {target.shared_per_block} a program"
    )
    fix = "use smaller tiles or fewer stages"
    return [Reason("shared_memory", f"{message}: {', '.join(parts)}{rest}; {fix}", largest[0].where)]
