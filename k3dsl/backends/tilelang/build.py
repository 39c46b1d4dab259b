"""Compiles a generated TileLang module for a target, on a machine with or without a GPU; no driver is ever asked."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3dsl.backends.base import Artifact, Inspection, Source
from k3dsl.backends.common import artifact_key, captured_stderr, import_module, write_module
from k3dsl.backends.host_call import TENSOR_MAP_BYTES, HostCall
from k3dsl.backends.machine_code import SERIALIZED, entry_and_params
from k3dsl.backends.tilelang import cache, host, nvcc
from k3dsl.backends.tilelang.inspect import inspect_compiled, inspect_source, is_asynchronous, register_demand
from k3dsl.errors import BuildError, K3Error, LegalityError, ResourceError

if TYPE_CHECKING:
    from k3dsl.targets import Target

TESTED = "0.1.15"
HOW_TO_GET = f"pip install 'k3dsl[tilelang]' (tilelang=={TESTED}, apache-tvm-ffi<0.1.13, z3-solver<4.15.5)"

# What every kernel is lowered with, where its own pass configs do not say otherwise.
# Addresses are promised to be multiples of 16 bytes, and 256-bit accesses (sm_100) take 32.
PASS_CONFIGS: dict[str, Any] = {
    "tl.enable_fast_math": False,
    "tl.disable_data_race_check": False,
    "tl.disable_vectorize_256": True,
}

_SIZES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "i1": 1}
_FIXES = (
    (
        r"[Ll]ayout infer conflict",
        "give the producer and the gemm one warp policy, or put the operand in shared memory",
    ),
    (r"M/16|m_warp|warp partition|wgmma", "use other tiles or threads: M a multiple of 64 per four warps"),
)

# TVM's pass context and its registry of callbacks belong to the process: builds take turns. Use processes to build in
# parallel.
lock = threading.RLock()


@dataclass(frozen=True)
class Lowered:
    """TileLang's two modules for a kernel, before code for the host is made."""

    context: Any
    host_module: Any
    device_module: Any
    cuda: str


# What this process lowered, by artifact_key, newest last. Only a bounded number: a search builds thousands.
_lowered: OrderedDict[str, Lowered] = OrderedDict()
_LOWERED_KEPT = 512


# the data-race check's words, and those of a barrier that TileLang moved to where it no longer separates the threads
_RACE = re.compile(
    r"Data race detected:.*?(?=\n\s*Example|\Z)|\[ThreadSync\] Hoisting sync[^\n]*the race remains[^\n]*", re.DOTALL
)


def build(source: Source, target: Target) -> Artifact:
    """Compiles `source` for `target` ahead of time and returns its machine code with all that a launch needs.

    Without nvcc the artifact has format 'cu': the CUDA source, and `launch['needs']` says what is missing. `launch` has
    threads and shared_bytes (dynamic) per program, params (bytes of each machine parameter) and host_call: TileLang
    drops, reorders and adds parameters, and this says where each comes from. host_call is None when only TileLang's own
    host code can launch the kernel; `needs` says why.

    What was built stays in the folder `tilelang` of K3DSL_CACHE_DIR.

    Raises LegalityError for a target that TileLang is not used for, BuildError when TileLang or nvcc refuses the source
    (or ptxas gave up overlapping wgmma that nothing waits for in place), ResourceError when the kernel needs more than
    a program may have.
    """
    if target.vendor != "nvidia":
        raise LegalityError(
            f"{source.name}: the TileLang backend generates no code for {target.name}", fix="use --backend triton"
        )
    version = require_tilelang(source.name)
    configs = {**PASS_CONFIGS, **source.options.get("pass_configs", {})}
    compiler = nvcc.find()
    flags = nvcc.flags(configs)
    key = cache.key(source, target.name, configs, version, compiler.version if compiler else None, flags)
    found = cache.read(key, source, target.name)
    if found is not None:
        return found
    path = write_module(source)
    with lock:
        lowered = lower(source, target, path, configs)
        try:
            function = host.read(lowered.host_module, lowered.device_module)
        except host.Unreadable as error:
            raise BuildError(f"{source.name}: {error}", where=path) from error
    _check(source, target, function.threads, function.shared_bytes)
    toolchain = {"tilelang": version}
    launch: dict[str, Any] = {
        "threads": function.threads,
        "shared_bytes": function.shared_bytes,
        "num_ctas": 1,
        "global_scratch_bytes": 0,
        "host_call": None if function.call is None else function.call.to_json(),
        "needs": function.needs,
    }
    inspection: Inspection
    if compiler is None:
        launch |= {"params": list(_sizes(function.call)), "needs": f"nvcc: {nvcc.HOW_TO_GET}"}
        inspection = inspect_source(lowered.cuda, dynamic_shared=function.shared_bytes, threads=function.threads)
        binary, assembly, format = lowered.cuda.encode(), "", "cu"
    else:
        toolchain["nvcc"] = compiler.version
        compiled = nvcc.compile_cuda(source.name, lowered.cuda, target.name, flags, compiler)
        entry, params = entry_and_params(compiled.ptx)
        if entry != function.entry or (function.call is not None and params != _sizes(function.call)):
            raise BuildError(
                f"{source.name}: the machine code is {entry} with parameters of {list(params)} bytes, and TileLang's host "
                f"code launches {function.entry} with {list(_sizes(function.call))}"
            )
        launch["params"] = list(params)
        inspection = inspect_compiled(compiled, dynamic_shared=function.shared_bytes, threads=function.threads)
        binary, assembly, format = compiled.cubin, compiled.ptx, "cubin"
    artifact = Artifact(
        source=source,
        target=target.name,
        format=format,
        entry=function.entry,
        binary=binary,
        launch=launch,
        inspection=inspection,
        assembly=assembly,
        cuda=lowered.cuda,
        toolchain=toolchain,
    )
    _check_built(artifact, target)
    cache.write(key, artifact)
    _remember(artifact, lowered)
    return artifact


def lowered_kernel(artifact: Artifact) -> Lowered | None:
    """TileLang's modules of this artifact if this process built it (and not too long ago), else None."""
    return _lowered.get(artifact_key(artifact))


def require_tilelang(name: str) -> str:
    """TileLang's version. Raises BuildError, with the command that installs it, where it is missing."""
    try:
        if importlib.util.find_spec("tilelang") is None:
            raise importlib.metadata.PackageNotFoundError
        return importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        raise BuildError(
            f"{name}: the TileLang backend needs TileLang, which is not installed", fix=HOW_TO_GET
        ) from None


def lower(source: Source, target: Target | str, path: Path, configs: Mapping[str, Any]) -> Lowered:
    """Lowers the module at `path` to CUDA source and TVM's two modules. Call with `lock` held. Raises BuildError."""
    arch = target if isinstance(target, str) else target.name
    # on a failure TileLang prints the whole function as it rewrote it
    with captured_stderr() as diagnostics, contextlib.redirect_stdout(io.StringIO()):
        try:
            lowered = _lower(source, arch, path, configs)
        except K3Error:
            raise
        except Exception as error:  # whatever TileLang raises: TVM's errors have no common base
            reason = _reason(error, diagnostics())
            fix = next((fix for pattern, fix in _FIXES if re.search(pattern, reason)), "try another schedule or tiles")
            raise BuildError(
                f"{source.name} does not lower for {arch}: {reason}",
                where=path,
                fix=f"{fix}; the file named above is the generated TileLang source",
            ) from error
        found = diagnostics()
        if race := _RACE.search(found):  # TileLang goes on regardless
            raise BuildError(
                f"{source.name}: {' '.join(race.group().split())}",
                where=path,
                fix="write each element from one thread; where TileLang is wrong about it, build with the pass config "
                "tl.disable_data_race_check=True",
            )
        sys.stderr.write(found)
    return lowered


def _lower(source: Source, arch: str, path: Path, configs: Mapping[str, Any]) -> Lowered:
    try:
        from tilelang import tvm
        from tilelang.backend.module import create_backend_context
    except ImportError as error:
        raise BuildError(f"{source.name}: TileLang cannot be imported ({error})", fix=HOW_TO_GET) from error
    # `tilelang.engine.lower` as an attribute is the function of that name
    engine = importlib.import_module("tilelang.engine.lower")
    make = getattr(import_module(path), source.name, None)
    if make is None:
        raise BuildError(f"the generated module has no function {source.name}", where=path)
    where = tvm.target.Target({"kind": "cuda", "arch": arch})
    with where, tvm.transform.PassContext(opt_level=3, config=dict(configs)):
        function = make()
        if len(function.params) != len(source.args):
            raise BuildError(
                f"{source.name}: its function takes {len(function.params)} parameters, and the source describes "
                f"{[arg.name for arg in source.args]}",
                where=path,
            )
        context = create_backend_context(where, None, "auto")
        host_module, device_module, *_ = engine.lower_to_host_device_ir(function, context)
        cuda = engine.device_codegen_without_compile(device_module, context).inspect_source()
    return Lowered(context, host_module, device_module, cuda)


def _reason(error: Exception, diagnostics: str) -> str:
    """The part of TileLang's failure that tells a person why: the last lines of the error, without TVM's stack."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not re.match(r'(File "|\d+: |Stack trace|Traceback|at /)', line)]
    lines = lines or [
        line.strip() for line in diagnostics.splitlines() if re.search(r"error|fatal", line, re.IGNORECASE)
    ]
    return "\n".join(lines[-8:]) or f"{type(error).__name__} without a message"


def _sizes(call: HostCall | None) -> tuple[int, ...]:
    sizes = {"pointer": 8, "tensor_map": TENSOR_MAP_BYTES}
    return tuple(sizes.get(p.kind) or _SIZES[p.dtype] for p in call.parameters) if call is not None else ()


def _check(source: Source, target: Target, threads: int, shared_bytes: int) -> None:
    """TileLang does not mind a kernel that cannot be launched."""
    if shared_bytes > target.shared_per_block:
        raise ResourceError(
            f"{source.name}: needs {shared_bytes} bytes of shared memory per program, "
            f"and {target.name} has {target.shared_per_block}",
            fix="use smaller tiles or fewer stages",
        )
    if threads > target.max_threads_per_block:
        raise ResourceError(
            f"{source.name}: launches {threads} threads per program, and {target.name} allows "
            f"{target.max_threads_per_block}",
            fix="use fewer threads",
        )


def _check_built(artifact: Artifact, target: Target) -> None:
    """What only the machine code tells: all of its shared memory, registers that never come free, wgmma in a row."""
    source, seen, threads = artifact.source, artifact.inspection, artifact.launch["threads"]
    _check(source, target, threads, seen.shared_bytes or 0)
    if seen.registers is not None and seen.registers * threads > target.registers_per_sm:
        raise ResourceError(
            f"{source.name}: needs {seen.registers} registers for each of {threads} threads, and an SM of {target.name} "
            f"has {target.registers_per_sm}",
            fix="use more threads or smaller tiles",
        )
    demand = register_demand(artifact.cuda, threads)
    if seen.registers is not None and demand is not None and demand > seen.registers * threads:
        raise ResourceError(
            f"{source.name}: its warp groups ask for {demand} registers, and a program is launched with "
            f"{seen.registers * threads} ({seen.registers} for each of {threads} threads): it would wait for ever",
            fix="give the consumers fewer registers, or run one program a multiprocessor",
        )
    if seen.instructions.get(SERIALIZED) and is_asynchronous(source.text):
        raise BuildError(
            f"{source.name}: ptxas could not overlap the wgmma instructions that it issues asynchronously, so that their "
            "order is no longer what the source says",
            fix="use synchronous gemm, or put a loop step's computations into one statement",
        )


def _remember(artifact: Artifact, lowered: Lowered) -> None:
    with lock:
        _lowered[artifact_key(artifact)] = lowered
        while len(_lowered) > _LOWERED_KEPT:
            _lowered.popitem(last=False)
