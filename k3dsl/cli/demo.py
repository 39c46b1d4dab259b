"""`k3dsl demo`: what k3dsl does, in two minutes and without a GPU."""

from __future__ import annotations

import codecs
import contextlib
import io
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from k3dsl.cli.demo_model import run_model
from k3dsl.cli.output import RESOURCE_COLUMNS, milliseconds, print_table, resource_rows

NAME = "demo"
TARGET = "sm_90a"
HEADS, WIDTH, EMBEDDING, DECODED = 4, 128, 64, 16
TRAINING_S = 60


def demo_command(
    fast: Annotated[bool, typer.Option("--fast", help="A shorter text and one head: some ten seconds.")] = False,
) -> None:
    """Compile KDA for an H200; on the CPU run it against the fp64 recurrence, tune a matmul, train a tiny network."""
    start = time.perf_counter()
    print(f"1. KDA compiled for {TARGET} (H100, H200); no GPU is needed for that\n")
    compile_kda()
    print("\n2. KDA on this machine's CPU: the same kernels, evaluated on torch tensors\n")
    passed = run_kda(text()[:128] if fast else text(), 1 if fast else HEADS)
    print("\n3. A sweep of the tuner, on the CPU too: every candidate is judged before it is timed\n")
    tuned = tune_matmul(trials=2 if fast else None)
    print("\n4. The whole network: a tiny Kimi K3 learns some text, then reads and writes through the compiled ops\n")
    learnt = run_model(2 if fast else TRAINING_S)
    print(f"\n5. Next, on a machine with a GPU\n{NEXT}")
    print(f"\nThis took {time.perf_counter() - start:.0f} s.")
    if not (passed and tuned and learnt):
        raise typer.Exit(1)


NEXT = """
  k3dsl doctor                                      what this machine can do
  k3dsl run kda.forward --cases whole               every input family through Triton, against fp64
  k3dsl bench kda.forward --dims B=1,T=8192,H=96    time, against fla (if it is installed) and the memory's floor
  k3dsl compile kda.forward --target sm_90a -o DIR  a bundle; k3dsl.load(DIR) runs it without a compiler
  k3dsl tune kda.forward --budget 600               the fastest settings there, kept for later calls

  and in Python, in place of fla's chunk_kda, with the same arguments:

    from k3dsl.ops import kda
    o, final_state = kda(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0, use_gate_in_kernel=True,
                         use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True)"""


def compile_kda() -> None:
    """Builds kda.forward and kda.decode at Kimi K3's dims and prints what they use."""
    from k3dsl.ops.registry import get_op
    from k3dsl.runtime.bundle import save

    rows: list[list[Any]] = []
    notes: list[str] = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="k3dsl-demo-") as folder:
        for name in ("kda.forward", "kda.decode"):
            summary = save(get_op(name).point({}, {}, symbolic=True).plan("triton"), TARGET, Path(folder, name))
            for row in resource_rows(summary["launches"]):
                rows.append([f"{name}: {row[0]}", *row[1:]])
            notes += [
                f"note: {name}: {launch['label']}: {launch['note']}" for launch in summary["launches"] if launch["note"]
            ]
    print_table("96 heads of width 128, bf16; batch and tokens vary at run time", RESOURCE_COLUMNS, rows)
    for note in notes:
        print(note)
    print(f"compiled in {time.perf_counter() - start:.1f} s")


def text() -> bytes:
    """The Zen of Python (PEP 20, public domain), which every Python carries."""
    with contextlib.redirect_stdout(io.StringIO()):  # importing it prints it
        import this
    return codecs.decode(this.s, "rot13").encode()


def byte_inputs(content: bytes, heads: int, seed: int = 0) -> dict[str, Any]:
    """KDA's inputs for a text: random embeddings of its bytes, projected to q, k, v, g and beta."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    embedded = normal(256, EMBEDDING)[torch.tensor(list(content))]
    found: dict[str, Any] = {}
    for name in ("q", "k", "v", "g"):
        found[name] = (
            (embedded @ normal(EMBEDDING, heads * WIDTH) / EMBEDDING**0.5).view(1, -1, heads, WIDTH).bfloat16()
        )
    found["beta"] = (embedded @ normal(EMBEDDING, heads) / EMBEDDING**0.5).view(1, -1, heads).bfloat16()
    found["A_log"] = torch.rand(heads, generator=generator)
    found["dt_bias"] = torch.rand(heads * WIDTH, generator=generator) * 4 - 4
    return found


def run_kda(content: bytes, heads: int) -> bool:
    """Prefill against the fp64 recurrence, then prefill plus decode against one long prefill. True when both are right."""
    import torch

    from k3dsl.ops import kda, kda_decode
    from k3dsl.ops.kda.reference import recurrence
    from k3dsl.runtime.metrics import relative_rms

    drawn = byte_inputs(content, heads)
    gate = {"A_log": drawn.pop("A_log"), "dt_bias": drawn.pop("dt_bias"), "lower_bound": -5.0}
    flags = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    options: dict[str, Any] = {**gate, **flags}
    tokens = len(content)
    start = time.perf_counter()
    o, state = kda(**drawn, **options, output_final_state=True)
    seconds = time.perf_counter() - start
    expected_o, expected_state = recurrence(**drawn, **options)
    assert state is not None
    assert expected_state is not None

    first = tokens - DECODED
    prompt = {name: x[:, :first].contiguous() for name, x in drawn.items()}
    some, carried = kda(**prompt, **options, output_final_state=True)
    assert carried is not None
    steps = [some]
    for t in range(first, tokens):
        step, carried = kda_decode(
            **{n: x[:, t : t + 1].contiguous() for n, x in drawn.items()}, state=carried, **options
        )
        steps.append(step)
    decoded_o = torch.cat(steps, 1)

    limit = 5e-3
    measured = [
        (f"prefill of {tokens} bytes: o", relative_rms(o, expected_o)),
        ("prefill: final state", relative_rms(state, expected_state)),
        (f"prefill of {first}, then {DECODED} times decode: o", relative_rms(decoded_o, expected_o)),
        ("prefill, then decode: state", relative_rms(carried, expected_state)),
        ("decoded o against the long prefill's", relative_rms(decoded_o[:, first:], o[:, first:].double())),
        ("decoded state against the long prefill's", relative_rms(carried, state.double())),
    ]
    rows = [[what, f"{error:.1e}", f"{limit:.0e}", "pass" if error <= limit else "FAIL"] for what, error in measured]
    title = f"the Zen of Python as bytes, {heads} heads of width {WIDTH}, bf16; relative RMS error against fp64"
    print_table(title, ("what", ">error", ">limit", ""), rows)
    print(f"the prefill took {seconds:.1f} s on {torch.get_num_threads()} CPU threads")
    return all(error <= limit for _, error in measured)


def tune_matmul(trials: int | None) -> bool:
    """How many columns of a a step of a product takes. True when a candidate passed the gate."""
    from k3dsl.autotune import tune

    fixed = {"block_m": 16, "block_n": 16, "group": 1, "num_warps": 4, "stages": 3}
    result = tune(
        "matmul", {"M": 16, "N": 16, "K": 2048}, fixed, target="cpu", max_trials=trials, resume=False, keep=False
    )
    rows = [
        [t.proposal.settings["block_k"], t.outcome.end.value, milliseconds(t.outcome.time_ms), t.outcome.detail]
        for t in sorted(result.trials, key=lambda t: t.proposal.settings["block_k"])
    ]
    print_table("matmul M=16 N=16 K=2048: block_k, the columns of a step", (">block_k", "end", ">time", "why"), rows)
    if result.winner is None:
        return False
    best = result.finalists[0]
    print(f"winner: block_k={result.winner.settings['block_k']}, {milliseconds(best.time_ms)}", end="")
    if result.default_ms is not None:
        print(f", {result.default_ms / best.time_ms:.2f} x the default's speed", end="")
    print("; it passed the gate at level full, 30 times with the same bits")
    print(f"a sweep of {result.seconds:.0f} s; on a CPU its times say nothing about a GPU")
    return True
