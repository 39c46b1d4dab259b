"""A spawned Python process in a group of its own that is asked things, watched, and killed with all that it started."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from k3dsl.errors import K3Error

START_DEADLINE_S = 300.0
_START = "import sys; sys.path[:] = {path!r}; from k3dsl.autotune.child import main; main({serve!r}, {fd}, {life})"

Serve = Callable[..., None]


class DiedError(K3Error):
    """A child process ended on its own. signal: its name, such as SIGSEGV, if one ended it. tail: its last words."""

    def __init__(self, returncode: int | None, tail: str) -> None:
        self.signal = signal_name(returncode)
        self.tail = tail
        how = f"died by {self.signal}" if self.signal else f"ended with exit status {returncode}"
        super().__init__(f"{how}: {tail}" if tail else how)


class Child:
    """One process, started at once and not waited for.

    serve: 'module:function', called in the child with its end of a connection and then `args`; the child ends when it
    returns. env: variables that differ from this process's. The child ends too when this process does, however it does.
    """

    def __init__(self, serve: str, args: tuple[Any, ...] = (), env: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        life_read, self._life = os.pipe()
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115  kept as long as the child
        code = _START.format(path=sys.path, serve=serve, fd=theirs.fileno(), life=life_read)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                pass_fds=(theirs.fileno(), life_read),
                env={**os.environ, **(env or {})},
            )
        finally:
            theirs.close()
            os.close(life_read)
        self.connection = Connection(ours.detach())
        self.started = time.monotonic()
        _alive.add(self)
        with contextlib.suppress(OSError):  # one that is dead already says so at the first `receive`
            self.connection.send(args)

    def send(self, message: object) -> None:
        """Raises DiedError."""
        try:
            self.connection.send(message)
        except OSError:
            raise self._died() from None

    def receive(self, timeout_s: float) -> Any:
        """The next message. Raises TimeoutError when none comes in time, DiedError when none can come any more."""
        try:
            if not self.connection.poll(max(0.0, timeout_s)):
                raise TimeoutError
            return self.connection.recv()
        except (EOFError, ConnectionError):
            raise self._died() from None

    def forget_log(self) -> None:
        """Drops what the child printed so far, so that its last words are about what comes next."""
        self._log.truncate(0)

    def kill(self) -> None:
        """Ends the child and its whole group. Harmless when it is over."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self in _alive:
            _alive.discard(self)
            self.connection.close()
            os.close(self._life)
            self._log.close()

    def _died(self) -> DiedError:
        try:
            returncode: int | None = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # it closed its end and lives on
            returncode = None
        return DiedError(returncode, self._tail())

    def _tail(self) -> str:
        """The last line that the child printed; of a dump of a fatal error the line that names it."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 20000))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        fatal = [line for line in lines if line.startswith("Fatal Python error:")]
        return (fatal or lines or [""])[-1][:300]


_alive: set[Child] = set()


@atexit.register
def kill_all() -> None:
    """Ends every child of this process."""
    for child in list(_alive):
        child.kill()


def signal_name(returncode: int | None) -> str | None:
    """The signal that ended a process with this return code of `subprocess`; None when none did."""
    if returncode is None or returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def main(serve: str, fd: int, life: int) -> None:
    """Runs in the child: serves until the connection ends."""
    _die_with_parent(life)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends this process
    connection = Connection(fd)
    module, name = serve.split(":")
    try:
        args = connection.recv()
        function: Serve = getattr(importlib.import_module(module), name)
        function(connection, *args)
    except (EOFError, ConnectionError):
        pass  # the parent is gone
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no destructor of a broken device may hang


def _die_with_parent(life: int) -> None:
    """Has the kernel end this process group when the parent's end of the pipe closes, even if this process hangs in C."""
    if sys.platform != "linux":
        return
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_NONBLOCK | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        if os.read(life, 1) == b"":  # the parent ended before the kernel was asked to tell
            os._exit(1)
