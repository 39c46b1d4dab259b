"""Prints IR as a readable TileLang module: one function that returns the prim_func, all static values as literals."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from k3dsl.backends.tilelang.access import Access, shape_text, strides_text
from k3dsl.backends.tilelang.elementwise import cast_text, negated
from k3dsl.backends.tilelang.overlap import overlapped
from k3dsl.backends.tilelang.placement import REGISTERS
from k3dsl.backends.tilelang.prelude import prelude
from k3dsl.backends.tilelang.products import ProductPrinter
from k3dsl.backends.tilelang.text import all_of, atom, dim_text, literal, opened, tl_dtype, total
from k3dsl.backends.tilelang.uses import SHAPE_OPS
from k3dsl.ir.graph import Op, Region, Value, walk
from k3dsl.ir.scalars import uniform_constant
from k3dsl.ir.symbols import INT32_MAX
from k3dsl.ir.types import DType, TileType, f32

MAX_INLINE = 60
STAGED_BYTES = 4096


def _passed(dtype: DType) -> DType:
    """What a scalar is passed as: TileLang's host code knows no float of fewer than 32 bits."""
    return f32 if dtype.is_float and dtype.bits < 32 else dtype


class Printer(ProductPrinter):
    """Walks the regions; products and reductions are in the classes above."""

    def module(self, name: str, header: str) -> str:
        """The whole module."""
        kernel = self.kernel
        self.used.update(t.name for t in kernel.tensors)
        self.used.update(s.name for s in kernel.dims)
        self.used.update(s.name for s in kernel.scalars)
        self.used.add(name)
        for s, v in zip(kernel.scalars, kernel.scalar_values, strict=True):
            self.text_of[id(v)] = cast_text(s.name, _passed(s.dtype), s.dtype)
        self.programs = [self.name(f"program_{axis}") for axis in range(len(kernel.grid))]
        self.depth = 3
        self.region(kernel.body)
        body = self.lines
        self.lines, self.depth, self.last_loc = [], 0, None
        self._signature(name)
        threads = self.schedule.threads
        grid = ", ".join(dim_text(e) for e in kernel.grid)
        before = prelude(kernel)
        extra = ", prelude=PRELUDE" if before else ""
        self.line(f"with tl.Kernel({grid}, threads={threads}{extra}) as ({', '.join(self.programs)},):")
        self.depth += 1
        self._annotations()
        for text in self.allocations:
            self.line(text)
        text = "\n".join([*self.lines, *body]) if body else "\n".join([*self.lines, "            pass"])
        head = f'"""{header}"""\n\nimport tilelang.language as tl\n'
        if before:
            head += f'\nPRELUDE = r"""{before}\n"""\n'
        return f"{head}\n\n{text}\n\n    return {name}\n"

    def _signature(self, name: str) -> None:
        kernel = self.kernel
        parameters = [f"{t.name}_ptr: tl.ptr({tl_dtype(t.dtype)})" for t in kernel.tensors]
        parameters += [f"{s.name}: tl.{'int32' if s.max <= INT32_MAX else 'int64'}" for s in kernel.dims]
        parameters += [f"{s.name}: {tl_dtype(_passed(s.dtype))}" for s in kernel.scalars]
        self.line(f"def {name}():")
        self.depth += 1
        self.line("@tl.prim_func")
        self.line(f"def {name}(")
        for p in parameters:
            self.line(f"    {p},")
        self.line("):")
        self.depth += 1
        for t in kernel.tensors:
            strides = "" if t.strides is None else f", strides=({strides_text(t)},)"
            self.line(f"{t.name} = tl.make_tensor({t.name}_ptr, ({shape_text(t)}), {tl_dtype(t.dtype)}{strides})")
        for s in kernel.dims:
            if s.divisible_by > 1:
                self.line(f"tl.assume({s.name} % {s.divisible_by} == 0)")

    def _annotations(self) -> None:
        schedule = self.schedule
        if schedule.min_blocks_per_sm is not None:
            self.line(f"tl.annotate_min_blocks_per_sm({schedule.min_blocks_per_sm})")
        divided = self.placement.registers()
        if divided is not None and divided != REGISTERS[128]:
            self.line(f"tl.annotate_producer_reg_dealloc({divided[0]})")
            self.line(f"tl.annotate_consumer_reg_alloc({divided[1]})")
        if schedule.swizzle is not None:
            self.line(f"tl.use_swizzle(panel_size={schedule.swizzle})")

    # ---- regions -----------------------------------------------------------------------------------------------------

    def region(self, region: Region, skip: set[int] | None = None) -> None:
        for op in region.ops:
            if skip and id(op) in skip:
                continue
            method = getattr(self, f"op_{op.opcode}", None)
            if method is not None:
                method(op)
            elif not op.result.shape:
                self._scalar_op(op)
            else:
                self._tile_op(op)

    def _tile_op(self, op: Op) -> None:
        """An elementwise or shape op: a loop if the value is kept in a buffer."""
        v = op.result
        home = self.placement.of(v)
        if home.kind == "inline":
            return
        self.keep(op, v, lambda at: self.computed(op, at))

    def keep(self, op: Op, v: Value, text: Callable[[list[str]], str]) -> None:
        """Writes every element of v into its buffer or buffers."""
        home = self.placement.of(v)
        fallback = op.opcode if op.opcode not in SHAPE_OPS else "t"
        name = self.fragment(v, fallback) if home.fragment else self.shared_tile(v, fallback)
        with self.over(v.shape, op.loc) as at:
            self.line(f"{self.buffer_at(name, v.shape, at)} = {self._stored(v, text(at))}")
        if home.kind == "both":
            self.line(f"tl.copy({name}, {self.shared_tile(v, fallback)})")

    def _stored(self, v: Value, text: str) -> str:
        """A value's text as its buffer holds it."""
        return f"tl.cast({opened(text)}, tl.int32)" if v.dtype.is_bool else opened(text)

    # ---- scalars -----------------------------------------------------------------------------------------------------

    def _scalar_op(self, op: Op) -> None:
        v = op.result
        operand = op.operands[0] if op.operands else None
        if op.opcode in ("select", "reshape") and operand is not None and operand.shape:
            at = [str(op.attrs["position"])] if op.opcode == "select" and len(operand.shape) == 1 else None
            at = at or (self.reindexed(op, []) if op.opcode == "select" else ["0"] * len(operand.shape))
            self.bind(v, self.at(operand, at), op.loc)
            return
        text = self.applied(op, [self.scalar(o) for o in op.operands])
        if not self.inlined_scalars and (_is_a_choice_of_choices(op) or self._finds_numbers(op)):
            # as a variable: with such an expression in its indices TileLang's prover takes minutes, or does not come back
            name = self.name(v.name, "s")
            self.line(f"{name} = tl.alloc_var({tl_dtype(v.dtype)})", op.loc)
            self.line(f"{name} = {text}")
            self.text_of[id(v)] = name
            return
        self.bind(v, text, op.loc)

    def _finds_numbers(self, op: Op) -> bool:
        """Whether a scalar is a sum with a quotient and a remainder that serves to find numbers in memory alone."""
        made = {x.opcode for x in _sources(op, ("add", "mul", "floordiv", "mod"))} if op.opcode == "add" else set()
        if not {"floordiv", "mod"} <= made:
            return False
        users = [use.op for use in self.placement.uses.uses(op.result)]
        finds = any(user.opcode == "load" and not user.result.shape for user in users)
        return finds and all(user.opcode != "store" and user.results and not user.result.shape for user in users)

    def bind(self, v: Value, text: str, loc: str | None, keep: bool = False) -> None:
        """A scalar: folded into its users while short, else a variable."""
        many = len(self.placement.uses.uses(v)) > 1
        if self.inlined_scalars or (not keep and (len(text) <= 12 or (not many and len(text) <= MAX_INLINE))):
            self.text_of[id(v)] = atom(text) if not text.isidentifier() else text
            return
        name = self.name(v.name, "s")
        self.line(f"{name} = {text}", loc)
        self.text_of[id(v)] = name

    def op_const(self, op: Op) -> None:
        v = op.result
        if v.shape:
            self._tile_op(op)
        else:
            text = literal(op.attrs["value"], v.dtype)
            self.text_of[id(v)] = f"({text})" if text.startswith("-") else text

    def op_program_id(self, op: Op) -> None:
        self.text_of[id(op.result)] = self.programs[op.attrs["axis"]]

    def op_dim(self, op: Op) -> None:
        text = dim_text(op.attrs["expr"], wide=op.result.dtype.bits == 64)
        self.bind(op.result, text, op.loc)

    def op_assume(self, op: Op) -> None:
        self.text_of[id(op.result)] = self.scalar(op.operands[0])

    # ---- memory ------------------------------------------------------------------------------------------------------

    def op_load(self, op: Op) -> None:
        v = op.result
        access = Access(op, self.kernel, self.analysis)
        if not v.shape:
            self.bind(v, self.loaded(op, []), op.loc, keep=True)
            return
        home = self.placement.of(v)
        if home.kind == "inline":
            return
        fallback = f"{access.tensor.name}_tile"
        fragment = home.fragment
        name = self.fragment(v, fallback) if fragment else self.shared_tile(v, access.tensor.name)
        padded = any(self.placement.extent(n) != n for n in v.shape)
        patched = self.placement.patched(op)
        if access.copy_reason(self.target, clipping=not fragment, patched=patched) is None and not padded:
            # TileLang waits for TMA where the tile is first read: in a loop or branch that may not run, never
            own = self.placement.uses.home[id(op)]
            late = any(r.region is not own for r in self.placement.reads(v))
            late = late and not fragment and not self.placement.runs_ahead(op)
            block = access.block(lambda o: opened(self.scalar(o)))
            options = ", disable_tma=True" if late else ""
            if late and access.vectors():  # all threads of the program copy, and their number is no power of two
                options += f", coalesced_width={16 // v.dtype.bytes}"
            self.line(f"tl.copy({block}, {name}{options})", op.loc)
        else:
            with self.over(v.shape, op.loc) as at:
                self.line(f"{self.buffer_at(name, v.shape, at)} = {self._stored(v, self.loaded(op, at))}")
        if home.kind == "both":
            self.line(f"tl.copy({name}, {self.shared_tile(v, fallback)})")

    def op_store(self, op: Op) -> None:
        v = op.operands[op.attrs["value_slot"]]
        access = Access(op, self.kernel, self.analysis)
        if self._staged(op, v, access):
            tile = self.allocate("shared", f"{access.tensor.name}_shared", v.shape, v.dtype)
            with self.over(v.shape, op.loc) as at:
                self.line(f"{self.buffer_at(tile, v.shape, at)} = {self._stored(v, self.at(v, at))}")
            self.line(f"tl.copy({tile}, {access.block(lambda o: opened(self.scalar(o)))})")
            return
        self._element_store(op, v, access)

    def _element_store(self, op: Op, v: Value, access: Access) -> None:
        with self.over(v.shape, op.loc, order=self._loop_order(v)) as at:
            where, guards = access.element(at, self.scalar, self.at, self.placement.extent)
            element = f"{access.tensor.name}[{', '.join(map(opened, where))}]"
            text = opened(self.at(v, at))
            if v.dtype.is_bool:
                text = f"tl.cast({text}, {tl_dtype(access.tensor.dtype)})"
            if guards:
                self.line(f"if {all_of(guards)}:")
                self.depth += 1
            if op.opcode == "store":
                self.line(f"{element} = {text}")
            else:
                self.line(f'tl.atomic_add({element}, {text}, memory_order="relaxed")')
            if guards:
                self.depth -= 1

    def op_atomic_add(self, op: Op) -> None:
        v = op.operands[op.attrs["value_slot"]]
        self._element_store(op, v, Access(op, self.kernel, self.analysis))

    def _loop_order(self, v: Value) -> list[int]:
        """Axes of a stored tile in the order of the buffer it comes from."""
        order = list(range(len(v.shape)))
        op = v.op
        while op is not None and self.placement.of(v).kind == "inline" and len(op.operands) == 1:
            if op.opcode == "permute":
                inverse = [list(op.attrs["axes"]).index(k) for k in range(len(order))]
                order = [order[k] for k in inverse]
            elif op.opcode in SHAPE_OPS:
                break
            v = op.operands[0]
            op = v.op
        return order

    def _staged(self, op: Op, v: Value, access: Access) -> bool:
        """Whether a store goes through a shared tile, so that it leaves in whole rows."""
        if access.copy_reason(self.target, clipping=True) is not None or not access.uses_tma(self.target):
            return False
        if any(self.placement.extent(n) != n for n in v.shape):
            return False
        if self.schedule.staged is not None:
            return access.tensor.name in self.schedule.staged
        in_loop = self.placement.uses.in_loop(op)
        size = v.type.size * v.dtype.bytes
        natural = self._loop_order(v) == list(range(len(v.shape))) and v.dtype.bits == 16
        return not in_loop and natural and size >= STAGED_BYTES and self.placement.anchored(v)

    # ---- control -----------------------------------------------------------------------------------------------------

    def op_when(self, op: Op) -> None:
        if self._is_all_that_is_left(op):
            self.line(f"if tl.Not({opened(self.scalar(op.operands[0]))}):", op.loc)
            with self.indented():
                self.line("tl.thread_return()")
            self.region(op.regions[0])
            return
        self.line(f"if {opened(self.scalar(op.operands[0]))}:", op.loc)
        with self.indented():
            self.region(op.regions[0])

    def _is_all_that_is_left(self, op: Op) -> bool:
        """Whether programs whose condition is false can end here. Within a branch no two of TileLang's buffers would share
        memory. Pipelines stay in theirs: barriers are set up around them."""
        ops = self.kernel.body.ops
        return op is ops[-1] and not any(inner.opcode in ("loop", "when") for inner in walk(op.regions[0]))

    def op_loop(self, op: Op) -> None:
        body = op.regions[0]
        index, carries = body.args[0], body.args[1:]
        for v, initial in zip(carries, op.operands[2:], strict=True):
            self._start_carry(op, v, initial)
        start, stop = self.scalar(op.operands[0]), self.scalar(op.operands[1])
        step, depth = op.attrs["step"], self.placement.stages(op)
        i = self.name(
            index.name if index.name not in ("i", "j", "k") else f"{op.attrs.get('label') or 'loop'}_step", "step"
        )
        if op.attrs.get("reverse") or step > 1:
            trips = f"tl.ceildiv({total(stop, '' if start == '0' else f'-{atom(start)}').removesuffix(' + ')}, {step})"
            last = f"{trips} - 1 - {i}" if op.attrs.get("reverse") else i
            position = total(start, f"({last}) * {step}" if step > 1 else f"({last})")
            self.line(f"for {i} in tl.serial({trips}):", op.loc)
            self.text_of[id(index)] = f"({position})"
        else:
            bounds = opened(stop) if start == "0" else f"{opened(start)}, {opened(stop)}"
            kind = f"tl.Pipelined({bounds}, num_stages={depth})" if depth > 1 else f"tl.serial({bounds})"
            self.line(f"for {i} in {kind}:", op.loc)
            self.text_of[id(index)] = i
        with self.indented():
            if depth > 1:
                self._pipelined_body(op, body)
            else:
                self._body(op, body, set())
        for v in op.results:
            self._finish_carry(v)

    def _pipelined_body(self, op: Op, body: Region) -> None:
        """All copies first, then the whole computation as one statement: its tiles are then released together."""
        ahead = self.placement.hoisted.get(id(op), [])
        self.inlined_scalars += 1
        done: set[int] = set()
        for o in ahead:
            for v in o.operands:
                self._scalars_before(v, body, done)
        for o in ahead:
            self.op_load(o)
        self.inlined_scalars -= 1
        group = self.name("_step")
        self.line(f"for {group} in tl.serial(1):")
        with self.indented():
            before = len(self.lines)
            for o in ahead:
                if self.placement.patched_in_place(o):
                    self._patch(o)
            self._body(op, body, {id(o) for o in ahead} | done)
            if self.placement.overlaps(op):
                self.lines[before:] = overlapped(self.lines[before:])
                self.last_loc = None
            if self.placement.reads_may_be_under_way(op):
                self.line("tl.fence_proxy_async()")

    def _patch(self, op: Op) -> None:
        """Rows past the span's end, which the copy has read from what follows, get what they should read as. A tile whose last
        row lies before the end has none: all threads see that alike."""
        v = op.result
        access = Access(op, self.kernel, self.analysis)
        other = literal(op.attrs.get("other", 0.0), v.dtype)
        last = access.past_end([str(n - 1) for n in v.shape], self.scalar)
        self.line(f"if {negated(all_of(last))}:", op.loc)
        with self.indented(), self.over(v.shape, op.loc) as at:
            self.line(f"if {negated(all_of(access.past_end(at, self.scalar)))}:")
            with self.indented():
                self.line(f"{self.buffer_at(self.shared[id(v)], v.shape, at)} = {other}")

    def _scalars_before(self, v: Value, body: Region, done: set[int]) -> None:
        """Gives the scalars that v is computed from their texts."""
        op = v.op
        if op is None or self.placement.uses.region_of.get(id(v)) is not body or id(op) in done:
            return
        for o in op.operands:
            self._scalars_before(o, body, done)
        done.add(id(op))
        if not v.shape:
            method = getattr(self, f"op_{op.opcode}", None)
            if method is not None:
                method(op)
            else:
                self._scalar_op(op)

    def _body(self, op: Op, body: Region, skip: set[int]) -> None:
        for v in body.args[1:]:
            if v.shape and self.placement.of(v).kind == "both":
                self.line(f"tl.copy({self.fragment(v, 'carry')}, {self.shared_tile(v, 'carry')})", op.loc)
        self.region(body, skip)
        self._yield(op, body)

    def _start_carry(self, op: Op, v: Value, initial: Value) -> None:
        if not v.shape:
            name = self.name(v.name, "carry")
            self.line(f"{name} = tl.alloc_var({tl_dtype(v.dtype)})", op.loc)
            self.line(f"{name} = {opened(self.scalar(initial))}")
            self.text_of[id(v)] = name
            return
        name = self.fragment(v, "carry")
        if self.placement.buffer(v) is self.placement.buffer(initial) and self.placement.of(initial).fragment:
            return
        number = uniform_constant(initial)
        if number is not None:
            self.line(f"tl.fill({name}, {self._stored(v, literal(number, v.dtype))})", op.loc)
            return
        with self.over(v.shape, op.loc) as at:
            self.line(f"{self.buffer_at(name, v.shape, at)} = {self._stored(v, self.at(initial, at))}")

    def _finish_carry(self, v: Value) -> None:
        carry = self.placement.owner.get(id(v))
        if not v.shape:
            op = v.op
            assert op is not None
            k = next(k for k, r in enumerate(op.results) if r is v)
            self.text_of[id(v)] = self.text_of[id(op.regions[0].args[1 + k])]
        elif self.placement.of(v).kind == "both":
            assert carry is not None
            self.line(f"tl.copy({self.fragment(v, 'carry')}, {self.shared_tile(v, 'carry')})")

    def _yield(self, op: Op, body: Region) -> None:
        """Writes the carries for the next step; one that others still read is written after them."""
        pending: list[tuple[Value, Value]] = []
        for arg, new in zip(body.args[1:], body.yields, strict=True):
            same = arg.shape and self.placement.buffer(new) is self.placement.buffer(arg)
            if not same and arg is not new:
                pending.append((arg, new))
        while pending:
            free = next(
                (p for p in pending if not any(self._reads_carry(q[1], p[0]) for q in pending if q is not p)), None
            )
            if free is None:
                arg, new = pending[0]
                pending[0] = (arg, self._set_aside(op, new))
                continue
            pending.remove(free)
            self._write_carry(op, *free)

    def _write_carry(self, op: Op, arg: Value, new: Value) -> None:
        if not arg.shape:
            self.line(f"{self.text_of[id(arg)]} = {opened(self.scalar(new))}")
            return
        name = self.fragment(arg, "carry")
        with self.over(arg.shape, op.loc) as at:
            self.line(f"{self.buffer_at(name, arg.shape, at)} = {self._stored(arg, self.at(new, at))}")

    def _set_aside(self, op: Op, new: Value) -> Value:
        """A copy of a yielded value that no carry's change can reach."""
        held = Value(TileType(new.dtype, new.shape), None, f"{new.name or 'next'}")
        if not new.shape:
            name = self.name(held.name)
            self.line(f"{name} = tl.alloc_var({tl_dtype(new.dtype)})", op.loc)
            self.line(f"{name} = {opened(self.scalar(new))}")
            self.text_of[id(held)] = name
            self._aside.append(held)
            return held
        self.placement.home[id(held)] = self._fragment_home()
        self._aside.append(held)
        name = self.fragment(held, "next")
        with self.over(new.shape, op.loc) as at:
            self.line(f"{self.buffer_at(name, new.shape, at)} = {self._stored(new, self.at(new, at))}")
        return held

    def _reads_carry(self, v: Value, carry: Value) -> bool:
        """True when computing v reads the carry's buffer (or, for a scalar, its variable)."""
        if v is carry or (v.shape and carry.shape and self.placement.buffer(v) is self.placement.buffer(carry)):
            return True
        if v.op is None or (v.shape and self.placement.of(v).kind != "inline"):
            return False
        return any(self._reads_carry(o, carry) for o in v.op.operands)


def _sources(op: Op, among: tuple[str, ...] | None = None) -> Iterator[Op]:
    """The ops that a scalar is computed from; with among, as far as these reach."""
    for v in op.operands:
        if not v.shape and v.op is not None and (among is None or v.op.opcode in among):
            yield v.op
            yield from _sources(v.op, among)


def _is_a_choice_of_choices(op: Op) -> bool:
    """Whether a scalar is chosen by or from a number in memory that another choice has found."""
    return op.opcode == "where" and any(
        load.opcode == "load" and any(x.opcode == "where" for x in _sources(load)) for load in _sources(op)
    )
