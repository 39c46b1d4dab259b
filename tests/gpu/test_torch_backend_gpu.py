"""The torch backend on a GPU gives what it gives on the CPU: values live on both, indices and conditions on the host."""

from __future__ import annotations

import pytest
import torch
from evaluation import apply, run

from k3dsl.errors import EvaluationError
from k3dsl.language import (
    In,
    InOut,
    Out,
    Sym,
    arange,
    argmax,
    bf16,
    cdiv,
    cumsum,
    dot,
    f32,
    i32,
    kernel,
    loop,
    program_id,
    reduce,
    span,
    unit_lower_inverse,
    when,
    where,
    zeros,
)

pytestmark = pytest.mark.gpu


@kernel(grid=lambda d, c: (d.N,))
def everything(
    d, c, cu=In("N+1", i32), index=In("N 4", i32), x=In("T 16"), y=Out("N 16", f32), rows=Out("M 16"), best=Out("N", i32),
    count=InOut("2", i32),
):  # fmt: skip
    p = program_id(0)
    begin, end = cu[p], cu[p + 1]

    @loop(cdiv(end - begin, 4), init=zeros((16,)))
    def total(i, acc):
        tile = x[span(begin + i * 4, 4, end=end), :]
        square = dot(tile.T, tile)
        inverse = unit_lower_inverse(square * 0.01)
        return acc + cumsum(inverse, 0, reverse=True).sum(1) * 0.1

    y[p, :] = total
    k = index[p, :]
    rows.store(k, slice(None), value=x.load(k, slice(None), mask=(k >= 0)[:, None].broadcast(4, 16)),
               mask=(k >= 0)[:, None].broadcast(4, 16))  # fmt: skip

    def highest(v1, i1, v2, i2):
        return where(v2 > v1, v2, v1), where(v2 > v1, i2, i1)

    best[p] = reduce((total, arange(16)), 0, highest)[1] - argmax(total, 0)

    @when((total > 1.0).any(0))
    def _():
        count.atomic_add(p % 2, value=1)


def case():
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 0, 1, 17, 8, 4]
    index = torch.randperm(24, generator=generator).reshape(6, 4).int()
    index[index % 5 == 0] = -3
    return {
        "cu": torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        "index": index,
        "x": torch.randn(35, 16, generator=generator).bfloat16(),
        "y": torch.full((6, 16), float("nan")),
        "rows": torch.zeros(24, 16).bfloat16(),
        "best": torch.full((6,), -1, dtype=torch.int32),
        "count": torch.zeros(2, dtype=torch.int32),
    }


@pytest.mark.parametrize("compute_dtype", [None, torch.float64])
def test_a_kernel_with_everything_in_it_gives_what_the_cpu_gives(compute_dtype):
    cpu, gpu = case(), {name: t.cuda() for name, t in case().items()}
    dims = {"N": Sym("N"), "T": Sym("T"), "M": Sym("M")}
    for tensors in (cpu, gpu):
        run(everything, tensors, dims, compute_dtype=compute_dtype)
    assert cpu["best"].tolist() == [0] * 6
    for name, want in cpu.items():
        torch.testing.assert_close(gpu[name].cpu(), want, rtol=1e-4, atol=1e-4)


def test_a_bf16_product_is_the_same_to_fp32_rounding():
    a, b = torch.randn(8, 32, 64).bfloat16(), torch.randn(8, 64, 16).bfloat16()
    got = apply(dot, a.cuda(), b.cuda()).cpu()
    torch.testing.assert_close(got.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


def test_errors_are_found_on_a_gpu_too():
    @kernel(grid=lambda d, c: (2,))
    def overlap(d, c, y=Out("9", bf16)):
        y[span(program_id(0) * d.step, 5)] = 1.0

    with pytest.raises(EvaluationError, match=r"both write y\[4\]"):
        run(overlap, {"y": torch.zeros(9).bfloat16().cuda()}, {"step": 4})
    with pytest.raises(EvaluationError, match="index 9 along axis 0"):
        run(overlap, {"y": torch.zeros(9).bfloat16().cuda()}, {"step": 5})
