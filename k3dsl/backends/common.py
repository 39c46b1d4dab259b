"""What every backend with a toolchain does: generated modules on disk, files written whole, a toolchain's stderr."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from k3dsl import settings
from k3dsl.backends.base import Artifact, Source
from k3dsl.errors import BuildError


class Launcher(Protocol):
    """Launches one kernel on one device."""

    def __call__(self, grid: tuple[int, int, int], args: Sequence[Any], stream: int | None = None) -> None:
        """Enqueues the kernel and returns; nothing waits for the GPU, so it can be captured in a CUDA graph.

        grid: programs along each axis; with none along some axis nothing is launched. args: one value for each Arg of
        the source, a tensor (or an address) for a pointer. stream: a raw stream handle; None is torch's current one.
        Raises LaunchError.
        """
        ...

    def fixed(self, args: Sequence[Any]) -> Launcher | None:
        """A launcher for addresses in place of tensors and these numbers; None where it needs the tensors themselves.

        args: as for a call, with anything in place of tensors."""
        ...


def artifact_key(artifact: Artifact) -> str:
    """Identity of an artifact's machine code and of the way it is called."""
    signature = repr([(arg.kind, arg.dtype) for arg in artifact.source.args])
    head = f"{artifact.target}\n{artifact.entry}\n{signature}\n".encode()
    return hashlib.sha256(head + artifact.binary).hexdigest()


def write_module(source: Source) -> Path:
    """Writes the module to a file named by its content: toolchains read a kernel's source back from its file."""
    folder = Path(settings.get("K3DSL_CACHE_DIR")) / f"{source.backend}-source"
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:24]
    path = folder / f"{source.name[:80]}_{digest}.py"
    try:
        if not path.exists() or path.read_text(encoding="utf-8") != source.text:  # cut short by a crash, say
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, source.text)
    except OSError as error:
        raise BuildError(
            f"{source.name}: cannot write the generated module: {error}",
            fix="set K3DSL_CACHE_DIR to a folder that can be written",
        ) from error
    return path


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes so that a reader sees either the whole file or none; text as UTF-8. Who may read it is the umask's to say."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def one_at_a_time(source: Source, target: str) -> Iterator[None]:
    """While active, no other process or thread of this machine is inside with the same source and target.

    Whoever waits finds in the cache what the first one built. A process that ends lets go. Where the cache's folder cannot
    be locked, nothing waits.
    """
    digest = hashlib.sha256(f"{target}\n{source.told}".encode()).hexdigest()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder = Path(settings.get("K3DSL_CACHE_DIR")) / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            # few files, of which two sources seldom share one
            file = stack.enter_context((folder / digest[:3]).open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def import_module(path: Path) -> ModuleType:
    """The generated module at `path`, imported under a name that nothing else has."""
    spec = importlib.util.spec_from_file_location(f"k3dsl_generated_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    write_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = write_bytecode
    return module


@contextlib.contextmanager
def captured_stderr() -> Iterator[Callable[[], str]]:
    """Holds back what is written to file descriptor 2, where compilers in C++ put the reason of a failure.

    Yields a function that takes what has come so far. What is not taken goes to the real stderr at the end; where
    the toolchain takes the whole process down, it stays in the folder `crashes` of K3DSL_CACHE_DIR.
    """
    try:
        real = os.dup(2)
    except OSError:  # the process has no stderr
        yield lambda: ""
        return
    folder = Path(settings.get("K3DSL_CACHE_DIR")) / "crashes"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{os.getpid()}.log"
    with path.open("wb+") as file:

        def take() -> str:
            file.seek(0)
            text = file.read().decode(errors="replace")
            file.seek(0)
            file.truncate()
            return text

        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield take
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            rest = take()
            path.unlink(missing_ok=True)
            sys.stderr.write(rest)
