"""Compiles a generated Triton module for a target, on a machine with or without a GPU; no driver is ever asked."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3dsl import settings
from k3dsl.backends import machine_code
from k3dsl.backends.base import Artifact, Inspection, Source
from k3dsl.backends.common import artifact_key, captured_stderr, import_module, write_module, write_whole
from k3dsl.errors import BuildError, K3Error, ResourceError

if TYPE_CHECKING:
    from k3dsl.targets import Target

# Triton's names of our dtypes. A boolean is one byte in memory.
_TRITON_DTYPE = {
    "f64": "fp64",
    "f32": "fp32",
    "f16": "fp16",
    "bf16": "bf16",
    "f8e4m3": "fp8e4nv",
    "f8e5m2": "fp8e5",
    "i64": "i64",
    "i32": "i32",
    "i16": "i16",
    "i8": "i8",
    "u8": "u8",
    "i1": "i1",
}
_ALIGNMENT = 16  # the one divisibility that Triton's compiler makes use of
_TENSOR_MEMORY_COLUMNS = 512  # of one SM on sm_100

_FIXES = (
    (r"Insufficient registers|maxnreg", "raise maxnreg, use more warps, or use smaller tiles"),
    (r"SIGSEGV|Internal Triton PTX codegen error", "try other tile extents, warps or stages; ptxas itself failed"),
    (r"exceeds triton maximum tensor numel", "use smaller tiles"),
    (r"num_warps|num_ctas", "num_warps is a power of two, and num_ctas above 1 needs sm_90a or newer"),
    (r"power of (2|two)", "use tile extents that are powers of two"),
)

# Triton's knobs, the ptxas log and file descriptor 2 belong to the process: builds take turns. Use processes to build
# in parallel.
_lock = threading.RLock()

# The compiled kernels of this process, by artifact_key, newest last. Only a bounded number: a search builds thousands.
_compiled: OrderedDict[str, Any] = OrderedDict()
_COMPILED_KEPT = 512


def build(source: Source, target: Target) -> Artifact:
    """Compiles `source` for `target` ahead of time and returns its machine code with all that a launch needs.

    `launch` of the artifact has threads and shared_bytes per program, num_ctas, params (sizes in bytes; after the
    source's own arguments come the addresses of global scratch and of profile scratch), and global_scratch_bytes per
    program with global_scratch_align: more than 0 when the kernel makes tensor descriptors on the device.

    Triton's cache and the generated module live in folders of K3DSL_CACHE_DIR. Arguments with divisible_by a multiple
    of 16 are compiled as such: passing others to the kernel is an error that nothing here can notice.

    Raises BuildError when Triton or ptxas refuses the source, ResourceError when the kernel builds but needs more
    than a program may have on the target.
    """
    _require_triton(source)
    path = write_module(source)
    with _lock, triton_cache(), captured_stderr() as diagnostics, _ptxas_log() as log:
        try:
            compiled = _compile(source, target, path)
        except K3Error:
            raise
        except Exception as error:  # whatever a toolchain raises, assertion errors included
            raise _build_error(source, target, path, error, diagnostics()) from error
        ptxas_log = _kept_log(compiled, "\n".join(log))
        artifact = _artifact(source, target, compiled, ptxas_log)
    _check_resources(artifact, target, getattr(compiled.metadata, "tmem_size", None) or 0)
    _remember(artifact, compiled)
    return artifact


def compiled_kernel(artifact: Artifact) -> Any | None:
    """Triton's CompiledKernel of this artifact if this process built it (and not too long ago), else None."""
    return _compiled.get(artifact_key(artifact))


@contextlib.contextmanager
def triton_cache() -> Iterator[None]:
    """Points Triton's cache (kernels, launch stubs) below K3DSL_CACHE_DIR for as long as the block lasts."""
    from triton import knobs

    with _lock, knobs.cache.scope():
        knobs.cache.dir = str(Path(settings.get("K3DSL_CACHE_DIR")) / "triton")
        yield


def _require_triton(source: Source) -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise BuildError(
            f"{source.name}: Triton cannot be imported ({error})", fix="pip install 'triton>=3.6,<3.10' (Linux only)"
        ) from error


def _compile(source: Source, target: Target, path: Path) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    if triton.knobs.runtime.interpret:
        raise BuildError(
            f"{source.name}: Triton's interpreter is on, so there is nothing to compile", fix="unset TRITON_INTERPRET"
        )
    gpu = GPUTarget("cuda" if target.vendor == "nvidia" else "hip", target.arch, target.warp_size)
    options = {name: value for name, value in source.options.items() if value is not None}
    options.setdefault("enable_fp_fusion", True)  # Triton's default differs between versions
    known = vars(make_backend(gpu).parse_options({"enable_fp_fusion": True}))
    if unknown := sorted(set(options) - set(known)):
        raise BuildError(
            f"{source.name}: Triton {triton.__version__} has no option {', '.join(unknown)} for {target.name}"
        )
    function = import_function(source, path)
    if list(function.arg_names) != [arg.name for arg in source.args]:
        raise BuildError(
            f"{source.name}: its arguments are {list(function.arg_names)}, but the source describes "
            f"{[arg.name for arg in source.args]}"
        )
    signature = {arg.name: _type_of(source, arg.kind, arg.dtype) for arg in source.args}
    attributes = {
        (index,): [["tt.divisibility", _ALIGNMENT]]
        for index, arg in enumerate(source.args)
        if arg.divisible_by % _ALIGNMENT == 0 and not signature[arg.name].startswith(("fp", "bf"))
    }
    return triton.compile(ASTSource(function, signature, {}, attributes), target=gpu, options=options)


def _type_of(source: Source, kind: str, dtype: str) -> str:
    if dtype not in _TRITON_DTYPE or (kind != "pointer" and dtype.startswith("f8")):
        raise BuildError(f"{source.name}: Triton takes no {kind} argument of dtype {dtype}")
    return "*" * (kind == "pointer") + _TRITON_DTYPE[dtype]


def import_function(source: Source, path: Path) -> Any:
    """The jitted function of the module at `path`, imported under a name that nothing else has."""
    module = import_module(path)
    function = getattr(module, source.name, None)
    if function is None or not hasattr(function, "arg_names"):
        raise BuildError(f"the generated module has no @triton.jit function {source.name}", where=path)
    return function


def _artifact(source: Source, target: Target, compiled: Any, ptxas_log: str | None) -> Artifact:
    import triton

    metadata = compiled.metadata
    is_nvidia = target.vendor == "nvidia"
    binary_format = "cubin" if is_nvidia else "hsaco"
    binary, assembly = compiled.asm[binary_format], compiled.asm["ptx" if is_nvidia else "amdgcn"]
    entry, params = machine_code.entry_and_params(assembly)
    toolchain = {"triton": triton.__version__}
    inspection: Inspection
    if is_nvidia:
        toolchain["ptxas"] = _ptxas_version(target)
        inspection = machine_code.inspect_cubin(
            binary,
            assembly,
            shared_bytes=metadata.shared,
            warps=metadata.num_warps,
            ptxas_log=ptxas_log,
            cuobjdump=_cuobjdump(),
        )
    else:
        inspection = machine_code.inspect_hsaco(assembly, shared_bytes=metadata.shared, warps=metadata.num_warps)
    launch = {
        # warp specialisation launches more warps than were asked for: the metadata has the number after compiling
        "threads": metadata.num_warps * target.warp_size,
        "shared_bytes": metadata.shared,
        "num_ctas": getattr(metadata, "num_ctas", 1),
        # Triton 3.6 has no such figure for AMD, where descriptors become pointers
        "global_scratch_bytes": getattr(metadata, "global_scratch_size", 0) or 0,
        "global_scratch_align": getattr(metadata, "global_scratch_align", 1) or 1,
        "params": list(params),
    }
    return Artifact(
        source=source,
        target=target.name,
        format=binary_format,
        entry=entry,
        binary=binary,
        launch=launch,
        inspection=inspection,
        assembly=assembly,
        toolchain=toolchain,
    )


def _ptxas_version(target: Target) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(target.arch).version)


def _cuobjdump() -> str | None:
    from triton import knobs

    try:
        return knobs.nvidia.cuobjdump.path
    except RuntimeError:  # Triton was packaged without it
        return None


def _check_resources(artifact: Artifact, target: Target, tensor_memory: int) -> None:
    """Neither toolchain minds a kernel that cannot be launched."""
    name, launch = artifact.source.name, artifact.launch
    if launch["shared_bytes"] > target.shared_per_block:
        raise ResourceError(
            f"{name}: needs {launch['shared_bytes']} bytes of shared memory per program, "
            f"and {target.name} has {target.shared_per_block}",
            fix="use smaller tiles or fewer stages",
        )
    if launch["threads"] > target.max_threads_per_block:
        raise ResourceError(
            f"{name}: launches {launch['threads']} threads per program, and {target.name} allows "
            f"{target.max_threads_per_block}",
            fix="use fewer warps",
        )
    if tensor_memory > _TENSOR_MEMORY_COLUMNS:
        raise ResourceError(
            f"{name}: needs {tensor_memory} columns of tensor memory, and {target.name} has {_TENSOR_MEMORY_COLUMNS}",
            fix="use smaller tiles or fewer dots per loop",
        )


def _remember(artifact: Artifact, compiled: Any) -> None:
    for stage in ("source", "ttir", "ttgir", "llir"):  # megabytes that no launch reads
        compiled.asm.pop(stage, None)
    with _lock:
        _compiled[artifact_key(artifact)] = compiled
        while len(_compiled) > _COMPILED_KEPT:
            _compiled.popitem(last=False)


def _kept_log(compiled: Any, log: str) -> str | None:
    """The ptxas log of this kernel: kept beside Triton's cache entry, since a hit runs no ptxas. None: not known."""
    metadata_file = next(path for name, path in compiled.metadata_group.items() if name.endswith(".json"))
    path = Path(metadata_file).parent / "ptxas.log"
    if log:
        write_whole(path, log)
        return log
    return path.read_text(encoding="utf-8") if path.exists() else None


@contextlib.contextmanager
def _ptxas_log() -> Iterator[list[str]]:
    """Collects what Triton's NVIDIA backend would print: the log of ptxas, and its appeal to report a failure."""
    from triton import knobs
    from triton.backends.nvidia import compiler

    lines: list[str] = []
    with knobs.nvidia.scope():
        knobs.nvidia.dump_ptxas_log = True
        # a module global of this name stands before the builtin, in that module alone
        vars(compiler)["print"] = lambda *words, **_: lines.append(" ".join(map(str, words)))
        try:
            yield lines
        finally:
            del vars(compiler)["print"]


def _build_error(source: Source, target: Target, path: Path, error: Exception, diagnostics: str) -> BuildError:
    reason = _reason(error, diagnostics)
    fix = next((fix for pattern, fix in _FIXES if re.search(pattern, reason)), "try another schedule or other tiles")
    return BuildError(
        f"{source.name} does not build for {target.name}: {reason}",
        where=f"{path}:{line}" if (line := _failing_line(source, error)) else path,
        fix=f"{fix}; the file named above is the generated Triton source",
    )


def _failing_line(source: Source, error: Exception) -> int | None:
    """The line of the module at which Triton's front end stopped; it counts from the function's own first line."""
    line = getattr(getattr(error, "node", None), "lineno", None)
    start = re.search(rf"^def {re.escape(source.name)}\b", source.text, re.MULTILINE)
    return source.text.count("\n", 0, start.start()) + line if line and start else None


def _reason(error: Exception, diagnostics: str) -> str:
    """The part of a toolchain's failure that tells a person why: often the innermost cause, or a line on stderr."""
    innermost: BaseException = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    text = f"{innermost}".strip()
    complaints = [line.strip() for line in text.splitlines() if re.match(r"\s*ptxas.*\b(fatal|error)\s*:", line)]
    if complaints:
        complaints = [line for line in complaints if "aborted due to errors" not in line] or complaints
    else:
        complaints = [line.strip() for line in diagnostics.splitlines() if re.search(r"\b(error|fatal):", line)]
        complaints += [text] if text and not complaints else []
    reason = "\n".join(complaints) or f"{type(innermost).__name__} without a message"
    lines = reason.splitlines()
    return "\n".join(lines[-12:]) if len(lines) > 12 else reason
