"""Launching by a host call: which values reach the driver, and what a description that means nothing is told."""

from __future__ import annotations

import ctypes
import json
from types import SimpleNamespace

import pytest
import torch

from k3dsl.backends import driver, host_call
from k3dsl.backends.base import Arg
from k3dsl.backends.driver import DriverKernel
from k3dsl.backends.host_call import HostCall, HostCallKernel, Parameter, TensorMap, compile_values
from k3dsl.errors import LaunchError

ARGS = (Arg("x", "pointer", "bf16"), Arg("n", "dim", "i32"), Arg("s", "scalar", "f32"))

# The kernel takes a descriptor of x [rows, 64], then s, the rows of x, and x itself; n sets the grid.
CALL = HostCall(
    (["//", ["+", ["arg", 1], 127], 128], ["max", ["arg", 1], 2], 1),
    (
        Parameter("x_desc", "tensor_map", 0),
        Parameter("s", "scalar", ["arg", 2], "f32"),
        Parameter("rows", "scalar", ["shape", 0, 0], "i32"),
        Parameter("x", "pointer", 0),
    ),
    (TensorMap(0, 9, (64, ["shape", 0, 0]), (2, ["*", ["stride", 0, 0], 2]), (64, 32), (1, 1), 0, 3, 2, 0),),
)


class Library:
    """libcuda's encoder: writes the extents it was given where the descriptor goes."""

    def __init__(self):
        self.encoded = []
        self.code = 0

    def cuTensorMapEncodeTiled(self, place, dtype, rank, base, dims, strides, box, steps, *enums):
        assert place.value % 64 == 0
        self.encoded.append(
            (dtype.value, rank.value, base.value, *map(list, (dims, strides, box, steps)), [e.value for e in enums])
        )
        ctypes.memset(place, len(self.encoded), 128)
        return self.code


class NotingDriver:
    def __init__(self):
        self.library = Library()
        self.launches = []

    def function(self, kernel, binary, shared_bytes, built_for):
        return 7

    def launch(self, kernel, function, grid, threads, shared_bytes, stream, pointers):
        sizes = [128, 4, 4, 8]
        self.launches.append((grid, [ctypes.string_at(p, n) for p, n in zip(pointers, sizes, strict=True)]))


@pytest.fixture
def noting(monkeypatch):
    noting = NotingDriver()
    monkeypatch.setattr(driver, "_driver", lambda format: noting)
    return noting


def kernel(call: HostCall = CALL) -> HostCallKernel:
    inner = DriverKernel(b"\x7fELF", "cubin", "kernel", 128, 1024, [128, 4, 4, 8], call.machine_args())
    return HostCallKernel(inner, call, ARGS)


def tensor(rows: int = 40, address: int = 4096) -> SimpleNamespace:
    """What a launch reads of a tensor on the GPU."""
    return SimpleNamespace(
        shape=(rows, 64), stride=lambda: (80, 1), data_ptr=lambda: address, is_cuda=True, __index__=None
    )


def test_every_machine_parameter_is_made_from_the_arguments(noting):
    kernel()((1, 1, 1), [tensor(), 300, 0.5], stream=0)
    ((grid, params),) = noting.launches
    assert grid == (3, 300, 1)  # ceil(300 / 128), max(300, 2)
    assert params[0] == bytes([1]) * 128
    assert params[1] == bytes(torch.tensor([0.5]).view(torch.uint8).tolist())
    assert params[2:] == [(40).to_bytes(4, "little"), (4096).to_bytes(8, "little")]
    # bf16, rank 2, dims innermost first, the stride of rows in bytes, the box, steps; swizzle 3, L2 promotion 2
    assert noting.library.encoded == [(9, 2, 4096, [64, 40], [160], [64, 32], [1, 1], [0, 3, 2, 0])]


def test_a_descriptor_is_made_once_for_equal_tensors(noting):
    launch = kernel()
    for rows, address in ((40, 4096), (40, 4096), (41, 4096), (40, 8192), (40, 4096)):
        launch((1, 1, 1), [tensor(rows, address), 1, 0.0], stream=0)
    assert len(noting.library.encoded) == 3
    firsts = [params[0][0] for _, params in noting.launches]
    assert firsts == [1, 1, 2, 3, 1]


def test_a_grid_without_programs_launches_nothing(noting):
    kernel()((0, 1, 1), [tensor(), 300, 0.5])
    assert noting.launches == []


def test_a_descriptor_that_the_driver_refuses_says_for_which_extents(noting):
    noting.library.code = 1
    with pytest.raises(LaunchError, match=r"error 1 .* extents \[64, 40\].*\n.*multiples of 16"):
        kernel()((1, 1, 1), [tensor(), 300, 0.5], stream=0)


def test_an_address_does_not_do_where_a_shape_is_read(noting):
    launch = kernel()
    assert launch.needs_tensors
    with pytest.raises(LaunchError, match="got an address"):
        launch((1, 1, 1), [4096, 300, 0.5], stream=0)


def test_a_fixed_launch_takes_addresses_alone_and_keeps_descriptors_by_address(noting):
    parameters = [Parameter(p.name, p.kind, 40, "i32") if p.name == "rows" else p for p in CALL.parameters]
    map = TensorMap(0, 9, (64, ["arg", 1]), (2, 160), (64, 32), (1, 1), 0, 3, 2, 0)
    launch = kernel(HostCall(CALL.grid, tuple(parameters), (map,))).fixed([None, 300, 0.5])
    assert launch.fixed([]) is launch
    launch((0, 1, 1), [4096, 300, 0.5], stream=0)
    for address in (4096, 8192, 4096):
        launch((1, 1, 1), [address, 300, 0.5], stream=0)
    assert [grid for grid, _ in noting.launches] == [(3, 300, 1)] * 3
    assert [params[0][0] for _, params in noting.launches] == [1, 2, 1]
    assert [int.from_bytes(params[3], "little") for _, params in noting.launches] == [4096, 8192, 4096]
    assert [encoded[2:4] for encoded in noting.library.encoded] == [(4096, [64, 300]), (8192, [64, 300])]
    assert kernel().fixed([None, 300, 0.5]) is None  # it reads a tensor's shape


def test_a_host_call_survives_json():
    assert HostCall.from_json(json.loads(json.dumps(CALL.to_json()))) == CALL


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, 7),
        (["arg", 1], 10),
        (["shape", 0, 0], 40),
        (["stride", 0, 0], 80),
        (["-", ["*", ["arg", 1], 3], ["%", ["arg", 1], 4]], 28),
        (["select", ["<", ["arg", 1], 11], 5, 6], 5),
        (["min", ["arg", 1], 4], 4),
    ],
)
def test_values_are_computed_from_the_arguments(value, expected):
    assert compile_values([value])([tensor(), 10, 0.5]) == (expected,)


@pytest.mark.parametrize("value", ["__import__('os')", ["arg", "0]"], ["arg", -1], ["exec", 1], None, ["+", 1], [1, 2]])
def test_what_is_no_value_is_not_evaluated(value):
    with pytest.raises(ValueError, match="is no value of a host call"):
        compile_values([value])


def test_a_kernel_without_a_host_call_says_what_it_needs():
    launch = {"host_call": None, "needs": "TileLang's own host code (it calls f)"}
    with pytest.raises(LaunchError, match="TileLang's own host code"):
        HostCallKernel.from_launch(b"", "cubin", "kernel", launch, ARGS, 0, "sm_90a")


def test_maps_of_too_many_axes_are_refused():
    six = TensorMap(0, 9, (1,) * 6, (2,) * 6, (1,) * 6, (1,) * 6, 0, 0, 0, 0)
    with pytest.raises(LaunchError, match="rank 6"):
        host_call._TensorMapMaker("kernel", six)
