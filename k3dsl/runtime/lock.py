"""lock(): from then on nothing is compiled or tuned, so that a server never stalls on a kernel it did not warm up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from k3dsl.errors import LockedError

_locked = False
_subject: ContextVar[tuple[str, Mapping[str, Any]] | None] = ContextVar("k3dsl_lock_subject", default=None)


class _Restore:
    """Puts the lock back as it was when a `with` block ends."""

    def __init__(self, before: bool) -> None:
        self._before = before

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _locked
        _locked = self._before


def lock(on: bool = True) -> _Restore:
    """Forbids compiling and tuning in this process, every thread of it; `lock(False)` allows both again.

    Also a context manager: `with k3dsl.lock(): ...` puts the lock back as it was at the end. Calls of a kind that was seen
    before run as ever. One that needs code which is not there raises LockedError, which names op, dims and the remedy.
    """
    global _locked
    before, _locked = _locked, on
    return _Restore(before)


def is_locked() -> bool:
    """Whether compiling and tuning are forbidden."""
    return _locked


@contextmanager
def about(op: str, dims: Mapping[str, Any]) -> Iterator[None]:
    """While active, an error of the lock names this op and these dims."""
    token = _subject.set((op, dims))
    try:
        yield
    finally:
        _subject.reset(token)


def check(what: str, op: str, dims: Mapping[str, Any] | None = None) -> None:
    """Raises LockedError when the lock is on. what: 'tuning', 'compiling kernel scan for sm_90a'."""
    if not _locked:
        return
    name, known = _subject.get() or (op, dims or {})
    at = ", ".join(f"{n}={_text(v)}" for n, v in known.items()) or "its dims"
    raise LockedError(
        f"{name} at {at}: {what} is forbidden since k3dsl.lock()",
        fix="call the op once with such inputs before k3dsl.lock(), or unlock with k3dsl.lock(False)",
    )


def _text(value: Any) -> str:
    divisor = getattr(value, "divisible_by", None)
    if divisor is None:
        return str(value)
    return "any" if divisor == 1 else f"any multiple of {divisor}"
