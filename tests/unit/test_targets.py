"""Facts about GPUs: names resolve, mistakes are answered with near misses, and the data is consistent."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from k3dsl.errors import ArgumentError, UnknownNameError
from k3dsl.targets import all_devices, all_targets, detect, device_facts, get_target

KIB = 1024


def test_every_promised_architecture_is_there():
    names = [target.name for target in all_targets()]
    assert names == ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "gfx942", "gfx950"]


@pytest.mark.parametrize(
    ("name", "kib"),
    [
        ("sm_80", 163),
        ("sm_86", 99),
        ("sm_89", 99),
        ("sm_90a", 227),
        ("sm_100a", 227),
        ("sm_120a", 99),
        ("gfx942", 64),
        ("gfx950", 160),
    ],
)
def test_shared_memory_of_one_program(name, kib):
    assert get_target(name).shared_per_block == kib * KIB


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("sm_80", "mma.sync"),
        ("sm_90a", "wgmma"),
        ("sm_100a", "tcgen05"),
        ("sm_120a", "mma.sync"),
        ("gfx942", "mfma"),
        ("gfx950", "mfma"),
    ],
)
def test_matrix_instructions_expected_of_a_large_dot(name, family):
    assert get_target(name).matrix_instructions == family


@pytest.mark.parametrize("target", all_targets(), ids=str)
def test_an_architectures_numbers_fit_together(target):
    assert target.vendor == ("amd" if target.name.startswith("gfx") else "nvidia")
    assert target.arch == (target.name if target.vendor == "amd" else int(target.name[3:].rstrip("a")))
    assert target.warp_size == (64 if target.vendor == "amd" else 32)
    assert target.max_warps_per_block == 1024 // target.warp_size
    assert 0 < target.shared_per_block <= target.shared_per_sm
    assert target.max_threads_per_block <= target.max_threads_per_sm
    # A program of the largest size can still be given registers.
    assert target.registers_per_sm // target.max_threads_per_block >= 64


@pytest.mark.parametrize(
    ("alias", "name"),
    [("sm_90", "sm_90a"), ("sm_100", "sm_100a"), ("sm_120", "sm_120a"), ("SM_90A", "sm_90a"), (" gfx942 ", "gfx942")],
)
def test_aliases_mean_the_full_name(alias, name):
    assert get_target(alias).name == name


def test_an_unknown_target_names_the_near_misses():
    with pytest.raises(UnknownNameError, match=r"unknown target 'sm_90b'(.|\n)*did you mean sm_90a") as caught:
        get_target("sm_90b")
    assert isinstance(caught.value, ArgumentError)


def test_a_target_unlike_any_other_lists_them_all():
    with pytest.raises(UnknownNameError) as caught:
        get_target("tpu")
    assert all(target.name in str(caught.value) for target in all_targets())


def test_every_device_has_a_known_architecture_and_names_are_unambiguous():
    names = []
    for device in all_devices():
        assert get_target(device.target).name == device.target
        assert device.sm_count > 0
        assert device.l2_bytes % KIB == 0
        names += [name.casefold() for name in {device.name, *device.reported, *device.aliases}]
    assert len(names) == len(set(names))


def test_a_device_is_found_under_our_name_and_the_drivers():
    h200 = device_facts("H200")
    assert h200 is not None
    assert h200 is device_facts("NVIDIA H200")
    assert (h200.sm_count, h200.target) == (132, "sm_90a")
    assert h200.measured is not None
    assert (h200.measured.copy_gbps, h200.measured.matmul_tflops) == (4267.0, 694.0)
    assert "measured" in h200.measured.source
    assert device_facts("h100") is device_facts("NVIDIA H100 80GB HBM3")


def test_a_device_without_facts_is_none_and_an_unmeasured_one_has_no_ceilings():
    assert device_facts("NVIDIA GeForce 256") is None
    b200 = device_facts("B200")
    assert b200 is not None
    assert b200.measured is None


def test_targets_are_values_that_cannot_be_changed():
    assert get_target("sm_80") == get_target("sm_80")
    with pytest.raises(AttributeError):
        get_target("sm_80").warp_size = 64


@pytest.mark.parametrize(
    ("hip", "properties", "name"),
    [
        (None, SimpleNamespace(major=9, minor=0), "sm_90a"),
        (None, SimpleNamespace(major=8, minor=9), "sm_89"),
        (None, SimpleNamespace(major=12, minor=0), "sm_120a"),
        (None, SimpleNamespace(major=7, minor=0), None),
        ("7.0", SimpleNamespace(major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-"), "gfx942"),
        ("7.0", SimpleNamespace(major=11, minor=0, gcnArchName="gfx1100"), None),
    ],
)
def test_detect_maps_what_torch_reports(monkeypatch, hip, properties, name):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = detect()
    assert (found.name if found else None) == name


def test_detect_without_a_gpu_is_none(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect() is None


def test_reading_facts_does_not_import_torch():
    """With the package's own __init__ left out, since that may import torch for other reasons."""
    code = (
        "import sys, types, pathlib; package = types.ModuleType('k3dsl');"
        f"package.__path__ = [{str(_package_folder())!r}]; sys.modules['k3dsl'] = package;"
        "from k3dsl.targets import get_target; get_target('sm_90a'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0


def _package_folder():
    from pathlib import Path

    import k3dsl.targets

    return Path(k3dsl.targets.__file__).parent.parent
