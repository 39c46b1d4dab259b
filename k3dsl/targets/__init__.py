"""Facts about GPUs, read from targets.toml: what an architecture allows and what a product has."""

from __future__ import annotations

import difflib
import importlib.resources
import sys
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from k3dsl.errors import UnknownNameError

if TYPE_CHECKING or sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Ceilings",
    "Device",
    "Target",
    "all_devices",
    "all_targets",
    "arch_of",
    "detect",
    "device_facts",
    "get_target",
]


@dataclass(frozen=True)
class Target:
    """One GPU architecture that code is generated for.

    name: how k3dsl and its users write it ('sm_90a', 'gfx942'). arch: NVIDIA's compute capability as one number (90),
    AMD's name ('gfx942'). Sizes are in bytes, registers are 32 bits wide. For AMD an SM is a compute unit, a warp a
    wavefront and shared memory the LDS. shared_per_block: the most that one program may use, which for NVIDIA needs an
    opt-in at launch. matrix_instructions: the family expected of a large bf16 dot. tf32: whether its matrix instructions
    take fp32 operands rounded to tf32.
    """

    name: str
    vendor: Literal["nvidia", "amd"]
    arch: int | str
    warp_size: int
    shared_per_block: int
    shared_per_sm: int
    registers_per_sm: int
    max_registers_per_thread: int
    max_threads_per_block: int
    max_threads_per_sm: int
    matrix_instructions: Literal["mma.sync", "wgmma", "tcgen05", "mfma"]
    tf32: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def max_warps_per_block(self) -> int:
        """Warps of a program with as many threads as a launch may have."""
        return self.max_threads_per_block // self.warp_size

    def runs_on(self, arch: int | str) -> bool:
        """Whether machine code for this target runs on a GPU of that architecture.

        NVIDIA's plain targets (sm_80) run on newer GPUs of the same generation too, those with an `a` on their own only.
        """
        if arch == self.arch:
            return True
        both = isinstance(arch, int) and isinstance(self.arch, int)
        return both and not self.name.endswith("a") and arch // 10 == self.arch // 10 and arch > self.arch  # type: ignore[operator]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Ceilings:
    """Rates measured on a device, never a data sheet's peak.

    copy_gbps: device copy, bytes read plus bytes written, in 10^9 bytes/s. matmul_tflops: a large bf16 matrix product,
    in 10^12 FLOP/s, or None where it was not measured. source: how they were measured.
    """

    copy_gbps: float
    matmul_tflops: float | None
    source: str


@dataclass(frozen=True)
class Device:
    """One GPU product: SM (or compute unit) count, L2 size in bytes, and the ceilings measured on it, if any were.

    reported: the names that the driver gives it. aliases: other names that people use for it.
    """

    name: str
    target: str
    sm_count: int
    l2_bytes: int
    reported: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    measured: Ceilings | None = None


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    text = importlib.resources.files(__name__).joinpath("targets.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@lru_cache(maxsize=1)
def _targets() -> Mapping[str, Target]:
    tables = _data()["targets"]
    return MappingProxyType(
        {name: Target(name=name, **{**row, "aliases": tuple(row.get("aliases", ()))}) for name, row in tables.items()}
    )


@lru_cache(maxsize=1)
def _devices() -> tuple[Device, ...]:
    devices = []
    for name, row in _data()["devices"].items():
        fields: dict[str, Any] = {**row, "reported": tuple(row["reported"]), "aliases": tuple(row.get("aliases", ()))}
        if "measured" in row:
            fields["measured"] = Ceilings(**row["measured"])
        devices.append(Device(name=name, **fields))
    return tuple(devices)


def all_targets() -> tuple[Target, ...]:
    """Every architecture that k3dsl has facts about, NVIDIA first, oldest first."""
    return tuple(_targets().values())


def all_devices() -> tuple[Device, ...]:
    """Every GPU product that k3dsl has facts about."""
    return _devices()


def get_target(name: str) -> Target:
    """The architecture of this name; 'sm_90', 'sm_100' and 'sm_120' mean their `a` forms.

    Raises UnknownNameError, which names the near misses.
    """
    targets = _targets()
    key = name.strip().lower()
    for target in targets.values():
        if key == target.name or key in target.aliases:
            return target
    near = difflib.get_close_matches(key, targets, n=3, cutoff=0.6)
    known = ", ".join(targets)
    fix = f"did you mean {' or '.join(near)}? The targets are {known}" if near else f"use one of {known}"
    raise UnknownNameError(f"unknown target {name!r}", fix=fix)


def device_facts(name: str) -> Device | None:
    """Facts about the product of this name, ours ('H200') or the driver's ('NVIDIA H200'); None when there are none."""
    key = name.strip().casefold()
    for device in _devices():
        if key in (known.casefold() for known in (device.name, *device.reported, *device.aliases)):
            return device
    return None


def arch_of(device: int) -> int | str:
    """How the GPU of this number, as torch counts, names its own architecture: 90, 'gfx942'. Needs a GPU."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName.split(":")[0])  # "gfx942:sramecc+:xnack-"
    return int(10 * properties.major + properties.minor)


def detect() -> Target | None:
    """The architecture of the current GPU as torch sees it; None without a GPU, and for one without facts here."""
    import torch

    if not torch.cuda.is_available():
        return None
    arch = arch_of(torch.cuda.current_device())
    return next((target for target in all_targets() if target.arch == arch), None)
