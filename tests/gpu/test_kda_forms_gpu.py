"""KDA in slices, in segments and in one kernel on the GPU: every family, long sequences, CUDA graphs; and their times compared.

`python tests/gpu/test_kda_forms_gpu.py` times the forms of `SHAPES` in one process and prints each as a ratio to the serial
two-kernel form; `--backend tilelang` for the other backend, `--each-kernel` for the time of every kernel alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from k3dsl.errors import K3Error
from k3dsl.ops import kda
from k3dsl.ops.kda.inputs import FAMILIES, Case, families, make
from k3dsl.ops.kda.reference import recurrence
from k3dsl.ops.kda.space import FORWARD
from k3dsl.runtime.dispatch import using_backend
from k3dsl.runtime.metrics import assert_close_rms, relative_rms
from k3dsl.runtime.op import forced
from k3dsl.runtime.timing import bench, measure

pytestmark = pytest.mark.gpu
BACKENDS = ("triton", "tilelang")
SERIAL: dict[str, Any] = {"segments": 1, "form": "two"}
ONE: dict[str, Any] = {"segments": 1, "form": "one", "chunk": 16, "block_v": 128}
CASES = [replace(case, T=1000, H=3, K=128) for case in families()]
CASES += [replace(case, H=3, K=128, state="fp32") for case in FAMILIES["ragged"]]


def run(kwargs: dict[str, Any], backend: str, knobs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    if backend == "tilelang":
        pytest.importorskip("tilelang")
    with using_backend(backend), forced(FORWARD, knobs, {}):
        return kda(**kwargs)


@pytest.mark.timeout(900)  # four forms of up to nine kernels, which nvcc takes 10 s each for where none is kept
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_every_form_meets_the_limits_and_repeats_bitwise(case: Case, backend: str, poisoned_memory: None) -> None:
    kwargs = make(case, "cuda")
    expected = recurrence(**kwargs)
    for knobs in ({"segments": 5}, {"segments": 5, "maps": "one"}, {"segments": 1, "slices": 4}, ONE):
        o, state = run(kwargs, backend, knobs)
        assert_close_rms("o", o, expected[0], case.limit_o)
        assert_close_rms("final state", state, expected[1], case.limit_state)
        for _ in range(10):
            again, state_again = run(kwargs, backend, knobs)
            assert torch.equal(o, again)
            assert torch.equal(state, state_again)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["bench", "slow", "half-open", "slow-softplus", "large-values", "arange-state"])
def test_a_long_sequence_in_segments_is_as_accurate_as_in_one_piece(name: str, backend: str) -> None:
    case = next(replace(c, T=16384 + 7, H=4, K=128) for c in families() if c.name == name)
    kwargs = make(case, "cuda")
    serial, segmented = run(kwargs, backend, SERIAL), run(kwargs, backend, {"segments": 32})
    for got, before, want in zip(segmented, serial, recurrence(**kwargs), strict=True):
        assert relative_rms(got, want) <= 1.1 * relative_rms(before, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "knobs", [{"segments": 4}, ONE, {"segments": 1, "slices": 4}], ids=["segments", "one", "slices"]
)
def test_an_output_never_depends_on_later_tokens_to_the_last_bit(knobs: dict[str, Any], backend: str) -> None:
    kwargs = make(Case("causal", gate="slow", T=600, K=128, H=4), "cuda")
    for t in (17, 301, 599):
        before = run(kwargs, backend, knobs)[0][:, :t]
        changed = dict(kwargs)
        for name in ("q", "k", "v", "g", "beta"):
            changed[name] = kwargs[name].clone()
            changed[name][:, t:] = torch.randn_like(changed[name][:, t:]) * 3
        assert torch.equal(run(changed, backend, knobs)[0][:, :t], before)


@pytest.mark.parametrize(
    "knobs", [{"segments": 4}, ONE, {"segments": 1, "slices": 4}], ids=["segments", "one", "slices"]
)
def test_packed_sequences_replay_in_a_cuda_graph_with_other_lengths_and_no_wait(knobs: dict[str, Any]) -> None:
    from cuda_calls import no_waiting  # of tests/, which is no place for imports when this file runs as a script

    kwargs = make(Case("graph", cu_seqlens=(0, 0, 300, 301, 2000), K=128, H=4, state="fp32"), "cuda")
    run(kwargs, "triton", knobs)
    with no_waiting():
        run(kwargs, "triton", knobs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = run(kwargs, "triton", knobs)
    kwargs["cu_seqlens"].copy_(torch.tensor([0, 1500, 1500, 1577, 2000]))
    graph.replay()
    torch.cuda.synchronize()
    expected, expected_state = recurrence(**kwargs)
    assert_close_rms("o", o, expected, 5e-3)
    assert_close_rms("state", state, expected_state, 5e-3)


# ---- time --------------------------------------------------------------------------------------------------------------

SHAPES: tuple[tuple[dict[str, int], tuple[dict[str, Any], ...]], ...] = (
    *(
        ({"T": T, "H": H}, tuple({"segments": n} for n in (2, 4, 8, 11, 16, 32)))
        for T in (8192, 32768, 131072)
        for H in (4, 12, 24)
    ),
    *(({"T": T, "H": 32}, tuple({"segments": n} for n in (2, 3, 4, 6, 8))) for T in (8192, 65536)),
    *(
        ({"T": T, "H": H}, tuple({"segments": n, "maps": "one"} for n in counts))
        for T, H, counts in ((65536, 32, (3, 4, 5, 6, 8)), (32768, 12, (8, 11, 16)))
    ),
    *(({"T": T, "H": H}, tuple({"slices": n} for n in (2, 3, 4, 8))) for T, H in ((8192, 32), (65536, 32), (8192, 96))),
    ({"T": 32768, "H": 12}, ({"segments": 8, "map_precision": "tf32"}, {"segments": 8, "block_v": 32})),
    *(
        ({"B": B, "T": T, "H": H}, (ONE, {**ONE, "block_v": 64}, {**ONE, "chunk": 32, "vector": 8}))
        for B, T, H in ((1, 8192, 96), (8, 1024, 96), (32, 256, 96), (8, 4096, 32), (256, 64, 32))
    ),
)


def median_ms(call: Callable[[], Any]) -> float:
    return measure(call, "cuda").median_ms


def kernels_ms(dims: dict[str, int], backend: str, knobs: dict[str, Any]) -> str:
    """Each kernel's own time. The scan falls with more segments, the fold grows, and ends and transitions move the same bytes
    in every cut: their sum decides how many segments pay."""
    with using_backend(backend):
        result = bench(FORWARD, dims=dims, knobs={**SERIAL, **knobs}, device="cuda", with_peers=False, rep_ms=50)
    return " ".join(f"{t.label} {t.timing.median_ms:.3f}" for t in result.launches)


def report(backend: str, each_kernel: bool) -> None:
    """Prints, for each shape, the serial form's time and each other form's as a ratio to it, timed in turn; with
    `each_kernel` also the time of every kernel alone."""
    for dims, forms in SHAPES:
        case = Case("speed", B=dims.get("B", 1), T=dims["T"], H=dims["H"], K=128)
        kwargs = make(case, "cuda")
        serial = median_ms(lambda kwargs=kwargs: run(kwargs, backend, SERIAL))
        shape = " ".join(f"{name}={size}" for name, size in dims.items())
        chosen = FORWARD.point(dims, {}).knobs
        print(f"{shape}: serial {serial:.3f} ms; the op's rule: segments={chosen['segments']} form={chosen['form']}")
        if each_kernel:
            print(f"  serial: {kernels_ms(dims, backend, {})}")
        for knobs in forms:
            words = " ".join(f"{name}={value}" for name, value in knobs.items())
            try:
                before = median_ms(lambda kwargs=kwargs: run(kwargs, backend, SERIAL))
                taken = median_ms(lambda kwargs=kwargs, knobs=knobs: run(kwargs, backend, knobs))
            except K3Error as error:
                print(f"  {words}: {error}")
                continue
            print(f"  {words}: {taken:.3f} ms, {taken / before:.2f} of the serial form")
            if each_kernel:
                print(f"    {kernels_ms(dims, backend, knobs)}")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--backend", choices=BACKENDS, default="triton")
    arguments.add_argument("--each-kernel", action="store_true", help="also time every kernel alone")
    given = arguments.parse_args()
    report(given.backend, given.each_kernel)
