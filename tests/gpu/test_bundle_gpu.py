"""Bundles on a GPU: in a process without Triton they give, bit for bit, what the op gives; streams and CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from k3dsl.errors import ArgumentError, LaunchError
from k3dsl.ops.registry import get_op
from k3dsl.runtime.bundle import load
from k3dsl.runtime.bundle_writer import save
from k3dsl.targets import all_targets, detect

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]

RUN = """
import sys
for name in ("triton", "optuna", "typer"):
    sys.modules[name] = None
import torch
import k3dsl
case = torch.load(sys.argv[2])
given = {n: x.cuda() for n, x in case["given"].items()}
out = k3dsl.load(sys.argv[1])(**given)
torch.cuda.synchronize()
for name, expected in case["expected"].items():
    got = out[name].cpu()
    assert got.shape == expected.shape, (name, got.shape, expected.shape)
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), (name, (got - expected).abs().max())
print("equal")
"""


def decode(folder: Path, dims: dict[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Writes a bundle of kda.decode; returns its inputs and what the op itself gives for them."""
    op = get_op("kda.decode")
    point = op.point(dims, {}, symbolic=True)
    save(point.plan("triton"), detect(), folder)
    kwargs = op.inputs(op.resolve_dims(dims), op.resolve_options({}), "cuda", 0)
    given = {n: kwargs[n].squeeze(1).contiguous() for n in ("q", "k", "v", "g", "beta")}
    given |= {"A_log": kwargs["A_log"], "dt_bias": kwargs["dt_bias"].view(dims["H"], -1)}
    given |= {"state": kwargs["state"].clone(), "state_indices": kwargs["state_indices"]}
    expected = op.call(**op.fresh(kwargs))
    return given, {"o": expected["o"].squeeze(1), "state": expected["state"]}


def forward(
    folder: Path, dims: dict[str, int], settings: dict[str, Any] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    op = get_op("kda.forward")
    save(op.point(dims, settings or {}, symbolic=True).plan("triton"), detect(), folder)
    kwargs = op.inputs(op.resolve_dims(dims), op.resolve_options({}), "cuda", 0)
    given = {n: kwargs[n] for n in ("q", "k", "v", "g", "beta", "A_log")}
    return given | {"dt_bias": kwargs["dt_bias"].view(dims["H"], -1)}, op.call(**kwargs)


def sliced(folder: Path, dims: dict[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Slices on streams of their own; the op in one piece has the same bits."""
    return forward(folder, dims, {"slices": 3, "segments": 1})


@pytest.mark.parametrize(
    ("write", "dims"),
    [
        (sliced, {"B": 1, "T": 1024, "H": 3}),
        (decode, {"B": 5, "H": 4}),
        (forward, {"B": 2, "T": 200, "H": 3}),
        (forward, {"B": 1, "T": 256, "H": 3}),
    ],
)
def test_a_bundle_gives_what_the_op_gives_without_triton(tmp_path, write, dims):
    given, expected = write(tmp_path / "b", dims)
    case = {"given": given, "expected": expected}
    torch.save({key: {n: x.cpu() for n, x in tensors.items()} for key, tensors in case.items()}, tmp_path / "case.pt")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "b"), str(tmp_path / "case.pt")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


def test_other_sizes_run_from_the_same_bundle(tmp_path):
    """The batch and the tokens vary; the fact about T (a multiple of 8) stays."""
    forward(tmp_path / "b", {"B": 1, "T": 200, "H": 2})
    bundle = load(tmp_path / "b")
    op = get_op("kda.forward")
    kwargs = op.inputs(op.resolve_dims({"B": 3, "T": 72, "H": 2}), op.resolve_options({}), "cuda", 1)
    given = {n: kwargs[n] for n in ("q", "k", "v", "g", "beta", "A_log")}
    out = bundle(**given, dt_bias=kwargs["dt_bias"].view(2, -1))
    expected = op.reference(**kwargs)
    error = (out["o"].double() - expected["o"]).square().mean() / expected["o"].square().mean()
    assert error.sqrt() < 5e-3


def test_a_bundle_runs_on_another_stream_and_inside_a_cuda_graph(tmp_path):
    given, expected = decode(tmp_path / "b", {"B": 5, "H": 4})
    bundle = load(tmp_path / "b")
    start = given["state"].clone()
    o = torch.empty_like(expected["o"])
    with torch.cuda.stream(torch.cuda.Stream()):
        bundle(**given, o=o)
    torch.cuda.synchronize()
    assert torch.equal(o, expected["o"])

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bundle(**given, o=o)
    given["state"].copy_(start)
    o.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, expected["o"])
    assert torch.equal(given["state"], expected["state"])


def test_a_bundle_for_another_gpu_and_tensors_on_the_cpu_are_refused(tmp_path):
    here = detect()
    other = next(t for t in all_targets() if t.vendor == here.vendor and not t.runs_on(here.arch))
    given, _ = decode(tmp_path / "here", {"B": 5, "H": 4})
    save(get_op("kda.decode").point({"H": 4}, {}, symbolic=True).plan("triton"), other, tmp_path / "there")
    with pytest.raises(LaunchError, match=f"is for {other}"):
        load(tmp_path / "there")(**given)
    with pytest.raises(ArgumentError, match="the tensors are on cpu"):
        load(tmp_path / "here")(**{n: x.cpu() for n, x in given.items()})
