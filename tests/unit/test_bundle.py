"""Bundles: what `save` writes, that `load` needs no compiler, and what a bundle checks before it launches."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3dsl.backends.torch import evaluate
from k3dsl.backends.triton.schedule import TritonSchedule
from k3dsl.errors import ArgumentError, BundleError, LaunchError, LegalityError, UnknownNameError
from k3dsl.ir.parser import parse_kernel
from k3dsl.language import In, Out, Scalar, Sym, TensorSpec, bf16, cdiv, f32, kernel, program_id, span
from k3dsl.ops.registry import get_op
from k3dsl.passes.simplify import simplify
from k3dsl.runtime import bundle as bundles
from k3dsl.runtime import bundle_writer
from k3dsl.runtime.bundle import Bundle, load
from k3dsl.runtime.bundle_writer import save
from k3dsl.runtime.plan import Launch, Plan, buffers_of
from k3dsl.targets import get_target

pytest.importorskip("triton")


@kernel(grid=lambda d, c: (cdiv(d.R, 16),))
def square(d, c, x=In("R 64"), t=Out("R 64", f32)):
    rows = span(program_id(0) * 16, 16, end=d.R)
    xf = x[rows, :].to(f32)
    t[rows, :] = xf * xf


@kernel(grid=lambda d, c: (cdiv(d.R, 16),))
def total(d, c, t=In("R 64", f32), marks=In("2*M+1"), shift=Scalar(f32), y=Out("R", f32)):
    rows = span(program_id(0) * 16, 16, end=d.R)
    y[rows] = t[rows, :].sum(1) + shift + marks[0]


def small_plan(**specs) -> Plan:
    """Two launches with a scratch tensor between them: y = sum(x^2) + 0.5 + marks[0]. R is a multiple of 4."""
    dims = {"R": Sym("R", divisible_by=4, max=4096), "M": Sym("M", min=1)}
    first = simplify(square.trace(dims, {}, {"x": specs.get("x", bf16)}))
    second = simplify(total.trace(dims, {}, {"marks": f32}))
    schedule = TritonSchedule(num_warps=2)
    return Plan(
        "small",
        dims,
        buffers_of([first, second], scratch=("t",)),
        (
            Launch("square", first, "triton", schedule),
            Launch("total", second, "triton", schedule, scalars={"shift": 0.5}),
        ),
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "small"
    save(small_plan(), "sm_90a", folder)
    return folder


@pytest.fixture
def copy(small, tmp_path) -> Path:
    """A bundle that a test may break."""
    return Path(shutil.copytree(small, tmp_path / "bundle"))


def change(folder: Path, **fields) -> None:
    path = folder / "metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def on_the_cpu(monkeypatch) -> None:
    """Bundles run on CPU tensors: each launch evaluates the bundle's own IR text with the arguments it would launch with."""

    def kernels(self: Bundle, device):
        assert device.type == "cpu"
        made = []
        for launch in self.metadata["launches"]:
            ir = parse_kernel((self.folder / launch["files"]["ir"]).read_text())

            def run(grid, values, stream=None, ir=ir, launch=launch):
                by_kind: dict = {"pointer": {}, "dim": {}, "stride": {}, "scalar": {}}
                for arg, value in zip(launch["args"], values, strict=True):
                    name = arg["name"] if arg["kind"] == "stride" else arg["source"]
                    by_kind[arg["kind"]][name] = value
                sizes = {s.name: self.seen[s.name] for s in ir.dims} | by_kind["dim"] | by_kind["stride"]
                assert grid == tuple([*(e.evaluate(sizes) for e in ir.grid), 1, 1][:3])
                evaluate(ir, by_kind["pointer"], sizes, by_kind["scalar"])

            made.append(run)
        return made

    dims = Bundle._dims

    def remember(self, given, tensors):
        self.seen = dims(self, given, tensors)
        return self.seen

    monkeypatch.setattr(Bundle, "_kernels_for", kernels)
    monkeypatch.setattr(Bundle, "_dims", remember)


def inputs(rows: int = 8) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 64).to(torch.bfloat16), "marks": torch.tensor([2.0, 0.0, 0.0])}


# ---- what is written --------------------------------------------------------------------------------------------------


def test_a_bundle_holds_ir_source_and_binary_of_every_launch_and_their_digests(small):
    names = {f"{label}.{kind}" for label in ("square", "total") for kind in ("ir", "py", "cubin")}
    assert {p.name for p in small.iterdir()} == names | {"metadata.json"}
    metadata = json.loads((small / "metadata.json").read_text())
    assert metadata["files"] == {n: hashlib.sha256((small / n).read_bytes()).hexdigest() for n in names}
    assert (small / "square.cubin").read_bytes()[:4] == b"\x7fELF"
    assert (small / "square.ir").read_text().startswith("kernel square\n")
    compile((small / "square.py").read_text(), "square.py", "exec")


def test_metadata_says_all_that_a_launch_needs(small):
    metadata = json.loads((small / "metadata.json").read_text())
    assert metadata["format"] == "k3dsl-bundle"
    assert (metadata["schema"], metadata["op"], metadata["target"]) == (1, "small", "sm_90a")
    assert metadata["dims"] == {
        "static": {},
        "runtime": {
            "M": {"divisible_by": 1, "min": 1, "max": 2**31 - 1},
            "R": {"divisible_by": 4, "min": 0, "max": 4096},
        },
        "derived": {},
    }
    buffers = {b["name"]: (b["role"], b["dtype"], b["shape"]) for b in metadata["buffers"]}
    assert buffers == {
        "x": ("in", "bf16", ["R", "64"]),
        "t": ("scratch", "f32", ["R", "64"]),
        "marks": ("in", "f32", ["M * 2 + 1"]),
        "y": ("out", "f32", ["R"]),
    }
    launch = metadata["launches"][1]
    assert (launch["label"], launch["entry"], launch["backend"], launch["format"]) == (
        "total",
        "total",
        "triton",
        "cubin",
    )
    assert launch["grid"] == ["cdiv(R, 16)"]
    assert launch["threads"] == 64
    assert launch["schedule"]["num_warps"] == 2
    assert launch["scalars"] == {"shift": 0.5}
    assert [a["name"] for a in launch["args"]] == ["t", "marks", "y", "R", "shift"]
    assert len(launch["params"]) >= len(launch["args"])
    assert launch["inspection"]["registers"] > 0
    assert {"k3dsl", "python", "torch", "triton", "ptxas"} <= set(metadata["toolchain"])


def test_knobs_options_and_static_dims_of_an_op_are_recorded(tmp_path):
    settings = {"dtype": "f16", "block_v": 16, "decode.num_warps": 4}
    plan = get_op("kda.decode").point({"H": 2}, settings, symbolic=True).plan("triton")
    summary = save(plan, get_target("gfx942"), tmp_path / "decode")
    metadata = json.loads((tmp_path / "decode" / "metadata.json").read_text())
    assert metadata["knobs"] == {"block_v": 16}
    assert metadata["options"]["dtype"] == "f16"
    assert metadata["options"]["scale"] is None
    assert metadata["dims"]["static"] == {"H": 2, "HK": 2, "K": 128, "V": 128, "SA": 128, "SB": 128}
    assert set(metadata["dims"]["runtime"]) == {"B", "slots"}
    assert (tmp_path / "decode" / "decode.hsaco").read_bytes()[:4] == b"\x7fELF"
    assert metadata["launches"][0]["threads"] == 4 * 64
    (launch,) = summary["launches"]
    assert (launch["label"], launch["warps"], launch["note"]) == ("decode", 4, None)


def test_dots_that_missed_the_targets_best_instructions_are_noted(tmp_path):
    for chunk, note in ((32, "some of its dots are mma.sync instead of wgmma"), (16, "mma.sync only: none")):
        plan = get_op("kda.forward").point({"H": 1}, {"chunk": chunk}, symbolic=True).plan("triton")
        notes = {launch["label"]: launch["note"] for launch in save(plan, "sm_90a", tmp_path / "b")["launches"]}
        assert notes["prep"].startswith(note)
        assert notes["scan"] is None


def test_equal_names_of_launches_and_backends_without_machine_code_are_refused(tmp_path):
    plan = small_plan()
    twice = Plan("twice", plan.dims, plan.buffers, (plan.launches[0], plan.launches[0]))
    with pytest.raises(ArgumentError, match="two launches are called 'square'"):
        save(twice, "sm_90a", tmp_path / "b")
    on_torch = Plan("torch", plan.dims, plan.buffers, (Launch("square", plan.launches[0].kernel, "torch", None),))
    with pytest.raises(LegalityError, match="generates no source"):
        save(on_torch, "sm_90a", tmp_path / "b")
    assert not (tmp_path / "b").exists()


# ---- where it is written ----------------------------------------------------------------------------------------------


def test_a_bundle_replaces_a_bundle_and_an_empty_folder(copy, tmp_path):
    (copy / "square.py").write_text("changed")
    save(small_plan(), "sm_90a", copy)
    assert load(copy).op == "small"
    (tmp_path / "empty").mkdir()
    save(small_plan(), "sm_90a", tmp_path / "empty")
    assert load(tmp_path / "empty").op == "small"


@pytest.mark.parametrize("what", ["file", "folder", "link", "bundle with a stranger"])
def test_anything_else_is_left_alone(what, copy, tmp_path):
    place = tmp_path / "place"
    if what == "file":
        place.write_text("mine")
    elif what == "folder":
        place.mkdir()
        (place / "mine.txt").write_text("mine")
    elif what == "link":
        place.symlink_to(copy)
    else:
        place = copy
        (place / "mine.txt").write_text("mine")
    before = sorted(p.name for p in place.iterdir()) if place.is_dir() else place.read_text()
    with pytest.raises(BundleError) as error:
        save(small_plan(), "sm_90a", place)
    assert "-o" in error.value.fix
    assert before == (sorted(p.name for p in place.iterdir()) if place.is_dir() else place.read_text())


def test_a_write_that_fails_leaves_the_old_bundle_and_nothing_beside_it(copy, monkeypatch):
    rename = os.rename

    def fail(source, target):
        if Path(target) == copy and Path(source).name == "new":
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(bundle_writer.os, "rename", fail)
    with pytest.raises(BundleError, match="No space left"):
        save(small_plan(), "sm_90a", copy)
    assert load(copy).op == "small"
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]


# ---- loading ----------------------------------------------------------------------------------------------------------

LOAD = """
import sys
for name in ("triton", "optuna", "typer", "rich", "safetensors", "platformdirs", "tilelang"):
    sys.modules[name] = None  # importing it raises
import k3dsl
bundle = k3dsl.load(sys.argv[1])
print(bundle.describe())
ours = {m for m in sys.modules if m.startswith("k3dsl.")}
wrong = {m for m in ours if m.startswith(("k3dsl.frontend", "k3dsl.language", "k3dsl.passes", "k3dsl.ops", "k3dsl.cli",
         "k3dsl.backends.triton", "k3dsl.runtime.bundle_writer", "k3dsl.runtime.executable"))}
assert not wrong, wrong
"""


def test_loading_needs_torch_and_no_compiler(small):
    done = subprocess.run([sys.executable, "-c", LOAD, str(small)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"small for sm_90a, in {small}"
    assert "runtime dims  M (from 1 to 2147483647), R (a multiple of 4 from 0 to 4096)" in done.stdout
    assert "grid (cdiv(R, 16)), 64 threads" in done.stdout


def test_what_is_no_bundle_is_said_to_be_none(tmp_path):
    for path, text in ((tmp_path / "none", "does not exist"), (tmp_path, "has no metadata.json")):
        with pytest.raises(BundleError, match=text) as error:
            load(path)
        assert "k3dsl compile" in error.value.fix
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="is a file"):
        load(tmp_path / "file")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"format": "zip"}, "is no bundle"),
        ({"schema": 99}, "has schema 99, and this version of k3dsl reads schema 1"),
        ({"target": "sm_999"}, "target that this k3dsl does not know"),
        ({"buffers": [{"name": "x"}]}, "malformed .KeyError"),
        ({"launches": None}, "malformed .TypeError"),
        ({"dims": {"static": {}, "runtime": {"R": {"odd": 1}}, "derived": {}}}, "malformed"),
        ({"dims": {"static": {}, "runtime": {}, "derived": {}}}, "malformed .ParseError: unknown name 'R'"),
    ],
)
def test_malformed_metadata_is_refused(copy, fields, text):
    change(copy, **fields)
    with pytest.raises(BundleError, match=text) as error:
        load(copy)
    assert error.value.fix or "sm_999" in str(error.value)


def test_a_file_that_changed_or_is_gone_is_refused(copy):
    (copy / "total.cubin").write_bytes((copy / "total.cubin").read_bytes() + b"\0")
    with pytest.raises(BundleError, match=r"total.cubin is not the one that was written .digest mismatch"):
        load(copy)
    (copy / "total.cubin").unlink()
    with pytest.raises(BundleError, match=r"total.cubin cannot be read"):
        load(copy)
    (copy / "metadata.json").write_text("{")
    with pytest.raises(BundleError, match="cannot be read"):
        load(copy)


# ---- calling ----------------------------------------------------------------------------------------------------------


def test_a_call_passes_the_right_tensors_dims_and_numbers(small, monkeypatch):
    on_the_cpu(monkeypatch)
    bundle = load(small)
    for rows in (4, 40):
        given = inputs(rows)
        (y,) = bundle(**given).values()
        torch.testing.assert_close(y, given["x"].float().square().sum(1) + 2.5)


def test_a_callers_own_output_is_used(small, monkeypatch):
    on_the_cpu(monkeypatch)
    y = torch.full((8,), float("nan"))
    out = load(small)(**inputs(), y=y)
    assert out["y"] is y
    assert y.isfinite().all()


def test_a_bundle_of_an_op_gives_what_the_op_gives(tmp_path, monkeypatch):
    """kda.decode, state in place at slots; the same IR from text, arguments by the bundle's own account."""
    op = get_op("kda.decode")
    dims = {"B": 3, "H": 2, "K": 64, "V": 64, "slots": 6}
    save(op.point(dims, {}, symbolic=True).plan("triton"), "sm_90a", tmp_path / "b")
    kwargs = op.inputs(op.resolve_dims(dims), op.resolve_options({}), "cpu", 0)
    expected = op.call(**op.fresh(kwargs))
    on_the_cpu(monkeypatch)
    names = ("q", "k", "v", "g", "beta")
    out = load(tmp_path / "b")(
        **{n: kwargs[n].squeeze(1) for n in names},
        A_log=kwargs["A_log"],
        dt_bias=kwargs["dt_bias"].view(2, 64),
        state=kwargs["state"],
        state_indices=kwargs["state_indices"],
    )
    assert set(out) == {"o", "state"}
    assert torch.equal(out["o"], expected["o"].squeeze(1))
    assert torch.equal(out["state"], expected["state"])


def test_a_bundle_runs_a_launch_as_often_as_the_op_with_the_dims_of_each_step(tmp_path, monkeypatch):
    """kda.forward in two slices: 5 chunks of 16 are 3 and 2."""
    op = get_op("kda.forward")
    settings = {"slices": 2, "segments": 1, "chunk": 16, "final_state": None}
    save(
        op.point({"T": 80, "H": 2, "K": 64, "V": 64}, settings, symbolic=True).plan("triton"), "sm_90a", tmp_path / "b"
    )
    bundle = load(tmp_path / "b")
    launched = []

    def kernels(self: Bundle, device):
        return [
            lambda grid, values, stream=None, label=launch["label"]: launched.append((label, grid))
            for launch in self.metadata["launches"]
        ]

    monkeypatch.setattr(Bundle, "_kernels_for", kernels)
    monkeypatch.setattr(bundle._lanes, "_lanes", [])  # no streams here
    kwargs = op.inputs(op.resolve_dims({"T": 80, "H": 2, "K": 64, "V": 64}), op.resolve_options({}), "cpu", 0)
    given = {n: kwargs[n] for n in ("q", "k", "v", "g", "beta", "A_log")} | {"dt_bias": kwargs["dt_bias"].view(2, 64)}
    bundle(**given)
    assert launched == [
        *[("prep", (2, 3, 1)), ("scan", (1, 2, 1)), ("prep", (2, 2, 1)), ("scan", (1, 2, 1))],
        ("rescan", (1, 2, 1)),
    ]


def test_strides_are_read_off_the_tensor(tmp_path, monkeypatch):
    spec = TensorSpec(bf16, (Sym("x_stride", divisible_by=16), 1))
    save(small_plan(x=spec), "sm_90a", tmp_path / "b")
    on_the_cpu(monkeypatch)
    bundle = load(tmp_path / "b")
    given = inputs()
    wide = torch.zeros(8, 96, dtype=torch.bfloat16)
    wide[:, :64] = given["x"]
    y = bundle(x=wide[:, :64], marks=given["marks"])["y"]
    torch.testing.assert_close(y, given["x"].float().square().sum(1) + 2.5)
    with pytest.raises(ArgumentError, match=r"x_stride is 72 .x.stride.0.., which breaks a fact"):
        bundle(x=torch.zeros(8, 72, dtype=torch.bfloat16)[:, :64], marks=given["marks"])


X = torch.zeros(8, 64, dtype=torch.bfloat16)
MARKS = torch.zeros(3)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"marks": MARKS}, "x is missing"),
        ({"x": 3, "marks": MARKS}, "x is no tensor but int"),
        ({"x": X.float(), "marks": MARKS}, r"x is torch.float32, compiled for torch.bfloat16"),
        ({"x": X[0], "marks": MARKS}, "x has 1 axes, compiled for 2"),
        ({"x": X[:6], "marks": MARKS}, r"R is 6 .x.shape.0.., which breaks a fact"),
        ({"x": X, "marks": MARKS[:1]}, r"M is 0 .marks.shape.0.., which breaks a fact"),
        ({"x": X, "marks": torch.zeros(4)}, r"marks has shape .4., needs .3."),
        ({"x": torch.zeros(8, 32, dtype=torch.bfloat16), "marks": MARKS}, r"x has shape .8, 32., needs .8, 64."),
        (
            {"x": torch.zeros(64, 8, dtype=torch.bfloat16).T, "marks": MARKS},
            "x has strides .1, 8., compiled for a contig",
        ),
        (
            {"x": torch.zeros(513, dtype=torch.bfloat16)[1:].view(8, 64), "marks": MARKS},
            "x does not start at a multiple",
        ),
        ({"x": X, "marks": MARKS, "R": 16}, r"R is given as 16, but x.shape.0. says 8"),
        ({"x": X, "marks": MARKS, "R": 8.0}, "R is 8.0, not an integer"),
        ({"x": X, "marks": MARKS, "y": torch.zeros(4)}, r"y has shape .4., needs .8."),
        ({"x": X, "marks": MARKS}, "the tensors are on cpu, and the code is for a GPU"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_with_its_name_and_the_remedy(small, given, text):
    with pytest.raises(ArgumentError, match=text) as error:
        load(small)(**given)
    assert error.value.fix


def test_an_unknown_argument_is_refused(small):
    with pytest.raises(UnknownNameError, match="does not take 'z'"):
        load(small)(**inputs(), z=1)


def test_a_runtime_dim_that_no_shape_tells_must_be_given(tmp_path, monkeypatch):
    @kernel(grid=lambda d, c: (d.P,))
    def fill(d, c, x=In("2"), y=Out("2 4", f32)):
        y[program_id(0), :] = x[0].broadcast(4)

    dims = {"P": Sym("P", max=2)}
    ir = simplify(fill.trace(dims, {}, {"x": f32}))
    save(
        Plan("fill", dims, buffers_of([ir]), (Launch("fill", ir, "triton", TritonSchedule()),)),
        "sm_90a",
        tmp_path / "b",
    )
    on_the_cpu(monkeypatch)
    bundle = load(tmp_path / "b")
    with pytest.raises(ArgumentError, match="P is a runtime dim that no tensor's shape tells"):
        bundle(x=torch.ones(2))
    assert torch.equal(bundle(x=torch.ones(2), P=2)["y"], torch.ones(2, 4))


@pytest.mark.parametrize(
    ("target", "arch", "runs"), [("sm_90a", 80, False), ("sm_90a", 90, True), ("gfx942", 90, False)]
)
def test_another_gpu_is_refused_before_any_launch(tmp_path, monkeypatch, target, arch, runs):
    save(small_plan(), target, tmp_path / "b")
    bundle = load(tmp_path / "b")
    monkeypatch.setattr(bundles, "arch_of", lambda device: arch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    device = torch.device("cuda", 0)
    if runs:
        assert len(bundle._kernels_for(device)) == 2
        return
    with pytest.raises(LaunchError, match=rf"is for {target}, and cuda:0 .Some GPU. is") as error:
        bundle._kernels_for(device)
    assert "k3dsl doctor" in error.value.fix


@pytest.mark.parametrize(
    ("target", "arch", "runs"),
    [("sm_80", 80, True), ("sm_80", 86, True), ("sm_80", 90, False), ("sm_86", 80, False), ("sm_120a", 121, False)],
)
def test_plain_targets_run_on_newer_gpus_of_their_generation(target, arch, runs):
    assert get_target(target).runs_on(arch) is runs
