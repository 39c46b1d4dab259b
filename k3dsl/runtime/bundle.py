"""Bundles: an op's launches as machine code in a folder, which runs with torch and the GPU's driver alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from k3dsl.backends.base import Arg
from k3dsl.backends.driver import DriverKernel
from k3dsl.backends.host_call import HostCallKernel
from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.errors import ArgumentError, BundleError, LaunchError, ParseError, UnknownNameError
from k3dsl.ir.symbols import Expr, Sym, parse_expr
from k3dsl.ir.types import DTYPES
from k3dsl.runtime.extents import expression, solve, where_dims_are
from k3dsl.runtime.lanes import Enqueue, Lanes
from k3dsl.runtime.plan import Step
from k3dsl.targets import Target, arch_of, get_target

if TYPE_CHECKING:
    from k3dsl.runtime.bundle_writer import save as save

__all__ = ["FORMAT", "METADATA", "SCHEMA", "Bundle", "load", "save"]

FORMAT = "k3dsl-bundle"
SCHEMA = 1
METADATA = "metadata.json"
_ALIGNMENT = 16


def __getattr__(name: str) -> Any:
    """`save` lives apart: it needs the compiler, which loading must do without."""
    if name == "save":
        from k3dsl.runtime.bundle_writer import save

        return save
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class BundleBuffer:
    """A tensor of the op. role: 'in', 'out', 'inout' (the caller's) or 'scratch' (made for each call)."""

    name: str
    dtype: torch.dtype
    shape: tuple[Expr, ...]
    role: str
    strides: tuple[Expr, ...] | None


def load(folder: str | Path) -> Bundle:
    """Opens a bundle that `k3dsl compile` wrote. Needs torch, and no compiler.

    Raises BundleError when the folder is no bundle, or when it is incomplete or was changed since it was written.
    """
    path = Path(folder)
    metadata = read_metadata(path)
    files: dict[str, bytes] = {}
    for name, digest in metadata["files"].items():
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise BundleError(f"{path}: the file {name} cannot be read: {error.strerror}", fix=_REBUILD) from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise BundleError(
                f"{path}: the file {name} is not the one that was written (digest mismatch)", fix=_REBUILD
            )
        files[name] = content
    try:
        return Bundle(path, metadata, files)
    except (KeyError, TypeError, ValueError, AttributeError, ParseError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise BundleError(f"{path}: {METADATA} is malformed ({what})", fix=_REBUILD) from error


_REBUILD = "write the bundle again with `k3dsl compile`"


def read_metadata(path: Path) -> dict[str, Any]:
    """A bundle's metadata, as far as it says that this is a bundle. Raises BundleError."""
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise BundleError(f"{path} {problem}", fix="name the folder that `k3dsl compile ... -o FOLDER` wrote")
    try:
        metadata = json.loads((path / METADATA).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BundleError(
            f"{path} is no bundle: it has no {METADATA}", fix="name the folder that `k3dsl compile ... -o FOLDER` wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: {METADATA} cannot be read: {error}", fix=_REBUILD) from None
    if (
        not isinstance(metadata, dict)
        or metadata.get("format") != FORMAT
        or not isinstance(metadata.get("files"), dict)
    ):
        raise BundleError(f"{path} is no bundle: {METADATA} does not say so", fix=_REBUILD)
    if metadata.get("schema") != SCHEMA:
        raise BundleError(
            f"{path} has schema {metadata.get('schema')!r}, and this version of k3dsl reads schema {SCHEMA}",
            fix="load it with the k3dsl that wrote it (metadata.json names the version), or compile again",
        )
    return metadata


class Bundle:
    """A compiled op. Call it with its tensors by name; runtime dims are read off their shapes.

    Attributes: folder; metadata, what metadata.json holds; op; target; buffers by name; facts, the runtime dims.
    """

    def __init__(self, folder: Path, metadata: dict[str, Any], files: Mapping[str, bytes]) -> None:
        self.folder = folder
        self.metadata = metadata
        self.op: str = metadata["op"]
        try:
            self.target: Target = get_target(metadata["target"])
        except UnknownNameError as error:
            raise BundleError(f"{folder} is for a target that this k3dsl does not know: {error.message}") from None
        self.facts = {name: Sym(name, **facts) for name, facts in metadata["dims"]["runtime"].items()}
        given_by_steps = {name for step in metadata["steps"] for name in step["dims"]}
        self._symbols: dict[str, int | Sym] = {**self.facts, **{name: Sym(name) for name in given_by_steps}}
        self.buffers = {b["name"]: self._buffer(b) for b in metadata["buffers"]}
        self._callers = [b for b in self.buffers.values() if b.role != "scratch"]
        self._made = [b for b in self.buffers.values() if b.role in ("out", "scratch")]
        self._outputs = [b.name for b in self.buffers.values() if b.role in ("out", "inout")]
        self._extents = {b.name: expression(b.shape) for b in self.buffers.values()}
        self._strides = {b.name: expression(b.strides) for b in self._callers if b.strides is not None}
        self._where = where_dims_are([b for b in self._callers if b.role != "out"])
        self._launches = [_BundleLaunch(launch, self._read, files) for launch in metadata["launches"]]
        steps = [
            Step(s["launch"], {n: self._read(e) for n, e in s["dims"].items()}, s["lane"], tuple(s["after"]))
            for s in metadata["steps"]
        ]
        self._lanes = Lanes(steps)
        self._steps = [(s.launch, tuple(s.dims), expression(tuple(s.dims.values()))) for s in steps]
        self._kernels: dict[int, list[DriverKernel | HostCallKernel]] = {}

    def _read(self, text: str) -> Expr:
        return parse_expr(text, self._symbols)

    def _buffer(self, data: Mapping[str, Any]) -> BundleBuffer:
        strides = data["strides"]
        return BundleBuffer(
            data["name"],
            to_torch(DTYPES[data["dtype"]]),
            tuple(map(self._read, data["shape"])),
            data["role"],
            None if strides is None else tuple(map(self._read, strides)),
        )

    def __repr__(self) -> str:
        return f"<bundle of {self.op} for {self.target} in {self.folder}>"

    def __call__(self, **given: Any) -> dict[str, torch.Tensor]:
        """Runs the op on the current stream of the tensors' GPU and returns its outputs by name.

        given: every tensor of role 'in' or 'inout' by name, optionally those of role 'out' (else they are allocated), and
        those runtime dims that no shape tells, as integers. Nothing waits for the GPU.

        Raises ArgumentError for a tensor that the code was not compiled for, naming it, the reason and the remedy;
        LaunchError when this GPU cannot run the machine code.
        """
        tensors = self._checked_tensors(given)
        device = next(iter(tensors.values())).device
        dims = self._dims(given, tensors)
        self._check_layout(tensors, dims)
        kernels = self._kernels_for(device)
        for b in self._made:
            if b.name not in tensors:
                tensors[b.name] = torch.empty(self._extents[b.name](dims), dtype=b.dtype, device=device)
        enqueue: list[Enqueue] = []
        for number, names, values in self._steps:
            launch = self._launches[number]
            own = {**dims, **dict(zip(names, values(dims), strict=True))}
            x, y, z = (*launch.grid(own), 1, 1)[:3]
            args = [tensors[n] if kind == 0 else own[n] if kind == 1 else n for kind, n in launch.getters]
            enqueue.append(partial(kernels[number], (x, y, z), args))
        self._lanes.run(device, enqueue)
        return {name: tensors[name] for name in self._outputs}

    def _checked_tensors(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The caller's tensors, with their dtype, rank, device and alignment right."""
        tensors: dict[str, torch.Tensor] = {}
        known = {b.name for b in self._callers} | set(self.facts)
        for name in given:
            if name not in known:
                takes = ", ".join(b.name for b in self._callers)
                raise UnknownNameError(f"the bundle of {self.op} does not take {name!r}", fix=f"it takes {takes}")
        device: torch.device | None = None
        for b in self._callers:
            t = given.get(b.name)
            if t is None and b.role == "out":
                continue
            if not isinstance(t, torch.Tensor):
                what = "is missing" if t is None else f"is no tensor but {type(t).__name__}"
                self._refuse(b.name, what, f"pass {b.name} as {self._declared(b)}")
            if t.dtype != b.dtype:
                self._refuse(
                    b.name, f"is {t.dtype}, compiled for {b.dtype}", f"{b.name}.to({b.dtype}), or compile for it"
                )
            if t.dim() != len(b.shape):
                self._refuse(b.name, f"has {t.dim()} axes, compiled for {len(b.shape)}", f"it is {self._declared(b)}")
            device = device or t.device
            if t.device != device:
                self._refuse(
                    b.name, f"is on {t.device}, other tensors are on {device}", f"{b.name}.to({str(device)!r})"
                )
            if t.data_ptr() % _ALIGNMENT:
                self._refuse(b.name, f"does not start at a multiple of {_ALIGNMENT} bytes", f"pass {b.name}.clone()")
            tensors[b.name] = t
        return tensors

    def _dims(self, given: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Every runtime dim: off a shape or a stride, or as given; its facts hold."""
        dims: dict[str, int] = {}
        for name, fact in self.facts.items():
            seen: str | None = None
            if name in self._where:
                tensor, axis, stride, expr = self._where[name]
                t = tensors[tensor]
                solved = solve(expr, t.stride(axis) if stride else t.shape[axis])
                assert solved is not None
                dims[name], seen = solved[1], f"{tensor}.{'stride' if stride else 'shape'}[{axis}]"
            if (value := given.get(name)) is not None:
                if not isinstance(value, int) or isinstance(value, bool):
                    self._refuse(name, f"is {value!r}, not an integer", f"pass {name}=<integer>")
                if seen is not None and dims[name] != value:
                    self._refuse(name, f"is given as {value}, but {seen} says {dims[name]}", f"leave {name} out")
                dims[name] = value
            if name not in dims:
                self._refuse(name, "is a runtime dim that no tensor's shape tells", f"pass {name}=<integer>")
            value = dims[name]
            if value % fact.divisible_by or not fact.min <= value <= fact.max:
                self._refuse(
                    name,
                    f"is {value}{f' ({seen})' if seen else ''}, which breaks a fact the code was compiled with",
                    f"{name} must be {_fact_text(fact)}; or compile for other dims",
                )
        return dims

    def _check_layout(self, tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int]) -> None:
        for b in self._callers:
            t = tensors.get(b.name)
            if t is None:
                continue
            want = self._extents[b.name](dims)
            if tuple(t.shape) != want:
                self._refuse(b.name, f"has shape {list(t.shape)}, needs {list(want)}", f"it is {self._declared(b)}")
            if b.strides is None:
                if not t.is_contiguous():
                    self._refuse(
                        b.name, f"has strides {t.stride()}, compiled for a contiguous tensor", f"{b.name}.contiguous()"
                    )
            elif any(
                n > 1 and s != w for n, s, w in zip(t.shape, t.stride(), self._strides[b.name](dims), strict=True)
            ):
                self._refuse(b.name, f"has strides {t.stride()}, compiled for {b.strides}", "compile for this layout")

    def _kernels_for(self, device: torch.device) -> list[DriverKernel | HostCallKernel]:
        if device.type != "cuda":
            raise ArgumentError(
                f"bundle of {self.op}: the tensors are on {device}, and the code is for a GPU ({self.target})",
                fix="move the tensors to the GPU with .cuda(); on the CPU, k3dsl.ops runs the op without a bundle",
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        kernels = self._kernels.get(index)
        if kernels is None:
            arch = arch_of(index)
            vendor = "amd" if torch.version.hip else "nvidia"
            if vendor != self.target.vendor or not self.target.runs_on(arch):
                here = f"{arch // 10}.{arch % 10}" if isinstance(arch, int) else arch
                raise LaunchError(
                    f"the bundle of {self.op} in {self.folder} is for {self.target}, and {device} "
                    f"({torch.cuda.get_device_name(index)}) is {here}",
                    fix="compile the op for this GPU: `k3dsl doctor` names its target",
                )
            kernels = self._kernels[index] = [launch.kernel(index, self.target.name) for launch in self._launches]
        return kernels

    def _refuse(self, name: str, problem: str, fix: str) -> NoReturn:
        raise ArgumentError(f"bundle of {self.op}: {name} {problem}", fix=fix)

    def _declared(self, b: BundleBuffer) -> str:
        return f"{str(b.dtype).removeprefix('torch.')} [{', '.join(map(str, b.shape))}]"

    def describe(self) -> str:
        """What the bundle holds, as text: op, target, dims with their facts, tensors, launches."""
        d = self.metadata["dims"]
        lines = [f"{self.op} for {self.target}, in {self.folder}"]
        lines.append("static dims   " + (", ".join(f"{n}={v}" for n, v in d["static"].items()) or "none"))
        lines.append("runtime dims  " + (", ".join(f"{n} ({_fact_text(s)})" for n, s in self.facts.items()) or "none"))
        for title, key in (("knobs", "knobs"), ("options", "options")):
            lines.append(f"{title:14s}" + (", ".join(f"{n}={v}" for n, v in self.metadata[key].items()) or "none"))
        lines.append("tensors")
        lines += [f"  {b.role:8s}{b.name:16s}{self._declared(b)}" for b in self.buffers.values()]
        lines.append("launches, in order")
        for launch in self.metadata["launches"]:
            found = launch["inspection"]
            used = ", ".join(
                f"{found[key]} {text}"
                for key, text in (("registers", "registers"), ("spill_bytes", "bytes spilled"))
                if found[key] is not None
            )
            lines.append(
                f"  {launch['label']:16s}grid ({', '.join(launch['grid'])}), {launch['threads']} threads, "
                f"{launch['shared_bytes']} bytes of shared memory" + (f", {used}" if used else "")
            )
        return "\n".join(lines)


class _BundleLaunch:
    """One launch of a bundle: its grid, where its arguments come from, and its machine code."""

    def __init__(self, data: Mapping[str, Any], read: Any, files: Mapping[str, bytes]) -> None:
        self._data = data
        self._args = [Arg(**arg) for arg in data["args"]]
        self._binary = files[data["files"]["binary"]]
        self.grid = expression(tuple(map(read, data["grid"])))
        # 0: a tensor by name, 1: a runtime dim by name, 2: a number
        self.getters: list[tuple[int, Any]] = [
            (0, data["buffers"].get(arg.source, arg.source))
            if arg.kind == "pointer"
            else (2, data["scalars"][arg.source])
            if arg.kind == "scalar"
            else (1, arg.name)
            for arg in self._args
        ]

    def kernel(self, device: int, target: str) -> DriverKernel | HostCallKernel:
        data = self._data
        if "host_call" in data:
            return HostCallKernel.from_launch(
                self._binary, data["format"], data["entry"], data, self._args, device, target
            )
        return DriverKernel(
            self._binary,
            data["format"],
            data["entry"],
            data["threads"],
            data["shared_bytes"],
            data["params"],
            self._args,
            global_scratch_bytes=data["global_scratch_bytes"],
            num_ctas=data["num_ctas"],
            device=device,
            built_for=target,
        )


def _fact_text(fact: Sym) -> str:
    multiple = f"a multiple of {fact.divisible_by} " if fact.divisible_by > 1 else ""
    return f"{multiple}from {fact.min} to {fact.max}"
