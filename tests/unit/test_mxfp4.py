"""MXFP4 in the language: every code under every scale, the order of nibbles, what is refused, code for both GPU backends."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import k3dsl
from k3dsl.backends.tilelang.prelude import _MXFP4 as CUDA
from k3dsl.backends.triton.elementwise import HELPERS
from k3dsl.errors import VerifyError
from k3dsl.language import (
    In,
    Out,
    Sym,
    bf16,
    cdiv,
    dequantize_mxfp4,
    dot,
    f16,
    f32,
    i32,
    kernel,
    loop,
    program_id,
    span,
    u8,
    zeros,
)

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@kernel(grid=lambda d, c: (d.N,))
def unpack(d, c, packed=In("N K//2"), scale=In("N K//32"), o=Out("N K", bf16)):
    row = program_id(0)
    o[row, :] = dequantize_mxfp4(packed[row, :], scale[row, :])


def unpacked(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    N, K = packed.shape[0], 2 * packed.shape[1]
    run = k3dsl.compile(unpack, dims={"N": N, "K": K}, tensors={"packed": u8, "scale": u8}, target="cpu")
    o = torch.full((N, K), float("nan"), dtype=torch.bfloat16)
    run(packed=packed, scale=scale, o=o)
    return o


def test_all_16_codes_under_all_256_scales() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[::2] | codes[1::2] << 4).repeat(2).expand(256, 16).contiguous()
    got = unpacked(packed, torch.arange(256, dtype=torch.uint8)[:, None]).double()
    table = torch.tensor(VALUES, dtype=torch.float64)
    for b in range(255):
        wanted = (table * 2.0 ** (b - 127)).to(torch.bfloat16).double().repeat(2)
        if b < 253:  # nothing is rounded, subnormal numbers included
            assert torch.equal(wanted, table.repeat(2) * 2.0 ** (b - 127))
        assert torch.equal(got[b], wanted)
        assert torch.equal(got[b].signbit(), torch.tensor([x // 8 == 1 for x in range(16)] * 2))
    assert got[255].isnan().all()
    assert got[254, 7] == float("inf")  # 6 times 2^127


def test_the_low_nibble_is_the_even_element_and_a_scale_is_of_32_neighbours() -> None:
    """One code of 1 in one place, each group with a scale of its own: a unit vector for each element."""
    K = 96
    scale = torch.tensor([[127, 130, 120]], dtype=torch.uint8).expand(K, 3).contiguous()
    packed = torch.zeros(K, K // 2, dtype=torch.uint8)
    for n in range(K):
        packed[n, n // 2] = 2 if n % 2 == 0 else 2 << 4
    diagonal = torch.tensor([1.0] * 32 + [8.0] * 32 + [2.0**-7] * 32)
    assert torch.equal(unpacked(packed, scale).float(), torch.diag(diagonal))


# ---- rules -------------------------------------------------------------------------------------------------------------


def traced(packed: str, scale: str, dtype=u8):  # type: ignore[no-untyped-def]
    @kernel(grid=lambda d, c: (1,))
    def one(d, c, packed=In(packed, dtype), scale=In(scale, dtype), o=Out("4 64", bf16)):
        at = (slice(None),) * len(packed.shape), (slice(None),) * len(scale.shape)
        o[:, :] = dequantize_mxfp4(packed[at[0]], scale[at[1]])

    return one.trace({}, {})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: traced("4 32", "4 2", i32), "takes two u8 tiles"),
        (lambda: traced("4 8", "4 1"), "holds 16 codes in its last axis, no multiple of 32"),
        (lambda: traced("4 32", "4 1"), r"u8\[4,32\] need scales u8\[4,2\], got u8\[4,1\]"),
        (lambda: traced("4 32", "2"), r"need scales u8\[4,2\], got u8\[2\]"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(VerifyError, match=says) as caught:
        make()
    assert "test_mxfp4.py" in str(caught.value)


# ---- what the GPU backends run -----------------------------------------------------------------------------------------


def ptx_step(op: str, args: list[int]) -> int:
    """One PTX instruction on 32-bit numbers, as the ISA's manual defines it."""
    if op == "and.b32":
        return args[0] & args[1]
    if op == "or.b32":
        return args[0] | args[1]
    if op == "mov.u32":
        return args[0]
    if op == "mad.lo.u32":
        return args[0] * args[1] + args[2] & 0xFFFFFFFF
    if op == "shr.b32":
        return args[0] >> args[1]
    if op == "shl.b32":
        return args[0] << args[1] & 0xFFFFFFFF
    if op == "prmt.b32":
        sources = (args[0] | args[1] << 32).to_bytes(8, "little")
        picked = [args[2] >> 4 * n & 15 for n in range(4)]
        assert all(p < 8 for p in picked)  # the highest bit would repeat a sign
        return int.from_bytes(bytes(sources[p] for p in picked), "little")
    assert op == "lop3.b32"
    a, b, c, table = args
    bits = [table >> (4 * (a >> n & 1) + 2 * (b >> n & 1) + (c >> n & 1)) & 1 for n in range(32)]
    return sum(bit << n for n, bit in enumerate(bits))


def ptx(text: str, registers: dict[str, int]) -> dict[str, int]:
    """The registers after the instructions of a block of inline PTX."""
    known = dict(registers)
    for op, rest in re.findall(r"(\w+\.(?:lo\.)?[bu]32) ([^;]+)", text.replace(".reg .b32", "")):
        target, *names = (word.strip() for word in rest.split(","))
        known[target] = ptx_step(op, [known[n] if n in known else int(n, 0) for n in names])
    return known


def test_the_ptx_gives_every_byte_its_two_numbers() -> None:
    """The instructions of the Triton helper, run one by one: 4 bytes in, the even and the odd numbers as pairs of bf16 out."""
    tables, decoding = "".join(re.findall(r'"([^"]*)"', HELPERS["_e2m1_bf16"])).split("=&r")[0].split("=r,=r,r")
    steps = [line.split(None, 1) for line in re.findall(r"(?:and|shr|shl|prmt|lop3)\.b32 [^;]+", decoding)]
    assert len(steps) == 18
    for first in range(0, 256, 4):
        made = ptx(tables, {"%tid.x": first * 4 + 3})
        registers = {"$4": int.from_bytes(bytes(range(first, first + 4)), "little"), "$5": made["$0"], "$9": made["$1"]}
        registers = ptx(decoding, registers)
        for half, shift in (("low", 0), ("high", 4)):
            pair = [registers[n] for n in (("$0", "$1") if half == "low" else ("$2", "$3"))]
            bits = torch.tensor([pair[n // 2] >> 16 * (n % 2) & 0xFFFF for n in range(4)], dtype=torch.int32)
            got = bits.to(torch.int16).view(torch.bfloat16).double()
            wanted = torch.tensor([VALUES[(first + n) >> shift & 15] for n in range(4)], dtype=torch.float64)
            assert torch.equal(got, wanted)
            assert torch.equal(got.signbit(), wanted.signbit())


HOST = r"""
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#define TL_DEVICE static inline
typedef uint16_t half_bits;
static half_bits __ushort_as_half(unsigned x) { return (half_bits)x; }
static float __half2float(half_bits h) {
  int e = h >> 10 & 31, m = h & 1023;
  float v = e ? std::ldexp((float)(1024 + m), e - 25) : std::ldexp((float)m, -24);
  return h >> 15 ? -v : v;
}
static float __uint_as_float(uint32_t x) { float f; std::memcpy(&f, &x, 4); return f; }
CODE
int main() {
  for (int s = 0; s < 256; ++s)
    for (int b = 0; b < 256; ++b)
      for (int odd = 0; odd < 2; ++odd) { float v = k3dsl::mxfp4(b, s, odd); std::fwrite(&v, 4, 1, stdout); }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_cuda_function_gives_every_byte_under_every_scale_its_two_numbers(tmp_path: Path) -> None:
    """The function of TileLang's prelude, compiled for the host."""
    code = CUDA.replace("#include <cuda_fp16.h>", "")
    source, program = tmp_path / "mxfp4.cpp", tmp_path / "mxfp4"
    source.write_text(HOST.replace("CODE", code))
    subprocess.run(["g++", "-O1", "-o", str(program), str(source)], check=True, timeout=60)
    out = subprocess.run([str(program)], check=True, capture_output=True, timeout=60).stdout
    got = torch.frombuffer(bytearray(out), dtype=torch.float32).view(256, 256, 2).double()
    byte, table = torch.arange(256), torch.tensor(VALUES, dtype=torch.float64)
    codes = torch.stack([table[byte & 15], table[byte >> 4]], -1)
    wanted = codes * torch.exp2(torch.arange(256, dtype=torch.float64) - 127)[:, None, None]
    wanted[wanted.abs() >= 2.0**128] = wanted[wanted.abs() >= 2.0**128].sign() * float("inf")
    wanted[255] = float("nan")
    assert torch.equal(got.nan_to_num(nan=1e300), wanted.nan_to_num(nan=1e300))


@kernel(grid=lambda d, c: (cdiv(d.M, c.BM), cdiv(d.N, c.BN)))
def product(d, c, x=In("M K"), packed=In("N K//2", u8), scale=In("N K//32", u8), o=Out("M N", bf16)):
    """o = x w^T with packed w [N, K]; the last step of K may be a part of a block."""
    rows, cols = span(program_id(0) * c.BM, c.BM, end=d.M), span(program_id(1) * c.BN, c.BN, end=d.N)

    @loop(cdiv(d.K, c.BK), init=zeros((c.BM, c.BN), f32), label="k")
    def total(i, acc):
        codes = packed[cols, span(i * (c.BK // 2), c.BK // 2, end=d.K // 2)]
        powers = scale[cols, span(i * (c.BK // 32), c.BK // 32, end=d.K // 32)]
        return dot(x[rows, span(i * c.BK, c.BK, end=d.K)], dequantize_mxfp4(codes, powers).to(x.dtype).T, acc=acc)

    o[rows, cols] = total.to(bf16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_with_packed_weights_and_a_tail_of_scales(dtype: torch.dtype) -> None:
    """K = 96 in blocks of 64: what is past the end reads as code 0 under scale 0, and adds nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 96, generator=generator).to(dtype)
    packed = torch.randint(0, 256, (18, 48), generator=generator, dtype=torch.uint8)
    scale = torch.randint(120, 130, (18, 3), generator=generator, dtype=torch.uint8)
    dims, knobs = {"M": Sym("M"), "N": 18, "K": 96}, {"BM": 4, "BN": 16, "BK": 64}
    tensors = {"x": bf16 if dtype == torch.bfloat16 else f16}
    run = k3dsl.compile(product, dims=dims, knobs=knobs, tensors=tensors, target="cpu")
    o = torch.full((5, 18), float("nan"), dtype=torch.bfloat16)
    run(x=x, packed=packed, scale=scale, o=o)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    w = torch.tensor(VALUES, dtype=torch.float64)[codes] * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    assert ((o.double() - x.double() @ w.T).norm() / (x.double() @ w.T).norm()) < 3e-3


def check_built(backend: str, target: str, block_n: int, threads: int) -> None:
    how = {"num_warps": threads // 32} if backend == "triton" else {"threads": threads}
    made = k3dsl.compile(
        product, dims={"M": Sym("M"), "N": 3072, "K": 3584}, knobs={"BM": 64, "BN": block_n, "BK": 128},
        tensors={"x": bf16}, target=target, backend=backend, schedule={**how, "stages": {"k": 2}},
    )  # fmt: skip
    found = made.artifact.inspection
    assert found.spill_bytes in (0, None)
    assert set(found.instructions) == {"wgmma" if target == "sm_90a" else "mfma"}


@pytest.mark.parametrize(("target", "block_n", "warps"), [("sm_90a", 128, 4), ("sm_90a", 128, 8), ("gfx942", 64, 4)])
def test_triton_builds_a_packed_product_with_matrix_instructions(target: str, block_n: int, warps: int) -> None:
    """128 columns by 4 warps: a layout that Triton 3.9 cannot give a reshape straight in front of a dot."""
    pytest.importorskip("triton")
    check_built("triton", target, block_n, 32 * warps)


@pytest.mark.slow
def test_tilelang_builds_a_packed_product_with_matrix_instructions() -> None:
    pytest.importorskip("tilelang")
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    check_built("tilelang", "sm_90a", 64, 128)
