"""Every kind of failure k3dsl reports, one class each, under one base."""

from __future__ import annotations


class K3Error(Exception):
    """Base of all errors that k3dsl raises on purpose.

    The message says what failed, where (the user's file and line when there is one), why, and what to change.
    """

    def __init__(self, message: str, *, where: object = None, fix: str | None = None) -> None:
        self.message = message
        self.where = str(where) if where is not None else None
        self.fix = fix
        text = f"{self.where}: {message}" if self.where else message
        super().__init__(f"{text}\n  fix: {fix}" if fix else text)


class ArgumentError(K3Error, ValueError):
    """A public function was called with an argument it cannot take."""


class UnknownNameError(ArgumentError):
    """An op, target, backend, knob, dim or kernel that does not exist."""


class TraceError(K3Error):
    """A kernel's Python function did something that cannot be traced."""


class KernelCodeError(TraceError):
    """Python itself refused what a kernel's function did: its cause is that error, and may be a fault of whoever wrote it."""


class ParseError(K3Error):
    """Printed IR that does not parse."""


class VerifyError(K3Error):
    """IR that breaks a rule of the language."""


class EvaluationError(K3Error):
    """A kernel misbehaved on real data: out of bounds, two writers of one element, a read of another program's write."""


class LegalityError(K3Error):
    """A backend cannot lower this kernel with this schedule for this target."""


class ResourceError(K3Error):
    """A kernel needs more shared memory, registers or threads than the target has."""


class BuildError(K3Error):
    """The toolchain (Triton, ptxas, ...) refused generated code."""


class LaunchError(K3Error):
    """A compiled kernel could not be loaded or launched."""


class NonFiniteError(K3Error):
    """A network's logits are NaN or infinite, so that no token follows from them."""


class NumericsWarning(UserWarning):
    """A kernel that is right on mild inputs and may overflow on others, such as an exponential without a bound."""


class BundleError(K3Error):
    """A bundle on disk is missing, malformed or does not fit this machine."""


class PackError(K3Error):
    """A pack of tuned settings is missing or malformed."""


class CheckpointError(K3Error):
    """A checkpoint is missing, damaged, or does not fit the network."""


class LockedError(K3Error):
    """Something would have been compiled or tuned after k3dsl.lock()."""


class CacheWarning(UserWarning):
    """A file of tuned settings that cannot be used, and is ignored."""
