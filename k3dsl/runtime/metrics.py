"""How far a result is from its reference: the one error metric of tests, tuning and reports."""

from __future__ import annotations

import math

import torch

from k3dsl.errors import ArgumentError


def _errors(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(actual - expected, expected), both flat float64 on expected's device.

    Where the reference itself is infinite or NaN both are 0 if actual says the same, and the error is inf if not. A
    non-finite actual where the reference is finite is an error of inf.
    """
    if actual.shape != expected.shape:
        raise ArgumentError(
            f"actual: shape {list(actual.shape)} differs from expected's {list(expected.shape)}",
            fix="compare tensors of the same shape",
        )
    expected = expected.detach().flatten().to(torch.float64)
    actual = actual.detach().flatten().to(device=expected.device, dtype=torch.float64)
    wanted = expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = torch.where(wanted & actual.isfinite(), actual - expected, torch.where(same, 0.0, math.inf))
    return error, torch.where(wanted, expected, 0.0)


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS(actual - expected) / RMS(expected), in float64.

    A NaN or infinity in ``actual`` where the reference is finite gives inf. Elements where the reference is itself
    infinite or NaN must be the same in ``actual`` (else inf) and do not count. For a reference that is zero everywhere
    the result is RMS(actual), an absolute error. Empty tensors give 0.

    Raises:
        ArgumentError: the shapes differ.
    """
    error, reference = _errors(actual, expected)
    if not error.numel():
        return 0.0
    # Scaled before squaring, so that no square over- or underflows.
    largest_error, largest = float(error.abs().max()), float(reference.abs().max())
    if largest_error == 0 or math.isinf(largest_error):
        return largest_error
    rms = largest_error * float((error / largest_error).square().mean().sqrt())
    return rms if largest == 0 else rms / (largest * float((reference / largest).square().mean().sqrt()))


def limit_of(actual: torch.Tensor, expected: torch.Tensor, error: float, limit: float) -> float:
    """What `error`, their `relative_rms`, may be: the limit or, where rounding the reference itself to the dtype of `actual`
    costs more, just that. It does where one or two elements are all rounded by nearly half a unit in the last place, and where
    a dtype has no more digits (numbers of 1e-7 in fp16)."""
    if error <= limit or not limit or not actual.is_floating_point():
        return limit
    rounding = relative_rms(expected.to(actual.dtype), expected)
    return max(limit, rounding * (1 + 1e-3)) if math.isfinite(rounding) else limit


def max_abs(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest |actual - expected|, in float64; inf and NaN count as in `relative_rms`.

    Raises:
        ArgumentError: the shapes differ.
    """
    error, _ = _errors(actual, expected)
    return float(error.abs().max()) if error.numel() else 0.0


def assert_close_rms(name: str, actual: torch.Tensor, expected: torch.Tensor, limit: float) -> float:
    """Asserts that `relative_rms` is at most ``limit`` and returns it.

    Raises:
        AssertionError: it is above; the message has the tensor's name, the ratio, the worst element and the count of
            non-finite elements.
        ArgumentError: the shapes differ.
    """
    ratio = relative_rms(actual, expected)
    if ratio <= limit:
        return ratio
    error, _ = _errors(actual, expected)
    place = torch.unravel_index(error.abs().argmax(), expected.shape)
    index = tuple(int(i) for i in place)
    broken = int((~actual.isfinite()).sum())
    raise AssertionError(
        f"{name}: relative RMS error {ratio:.3e} is above {limit:.1e}; worst at {list(index)}: "
        f"{float(actual[index]):.6g} instead of {float(expected[index]):.6g}; "
        f"{broken} of {actual.numel()} elements are not finite"
    )
