"""CUDA text put before a generated kernel, where TileLang's own functions do not mean what the language says.

TileLang prints maxima of floats as C's max, which passes over NaN, in elementwise code and in reductions alike. The names are
redefined after every header that uses them, so that all of a kernel's code gets NaN where either number is NaN.
"""

from __future__ import annotations

from k3dsl.ir.graph import Kernel, Op, walk

_HEADERS = ("common", "reduce", "scan", "intrin", "atomic", "debug", "instruction/mma")

_EXTREMA = """
namespace k3dsl {
template <typename T> TL_DEVICE T larger(T a, T b) { return a < b ? b : a; }
template <typename T> TL_DEVICE T smaller(T a, T b) { return b < a ? b : a; }
template <> TL_DEVICE float larger<float>(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
template <> TL_DEVICE float smaller<float>(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
template <> TL_DEVICE double larger<double>(double a, double b) { return a < b || b != b ? b : a; }
template <> TL_DEVICE double smaller<double>(double a, double b) { return b < a || b != b ? b : a; }
}  // namespace k3dsl
namespace tl {
template <typename T> TL_DEVICE T larger2(T a, T b) { return max2(a, b); }
template <typename T> TL_DEVICE T smaller2(T a, T b) { return min2(a, b); }
template <> TL_DEVICE float2 larger2<float2>(float2 a, float2 b) {
  return make_float2(k3dsl::larger(a.x, b.x), k3dsl::larger(a.y, b.y));
}
template <> TL_DEVICE float2 smaller2<float2>(float2 a, float2 b) {
  return make_float2(k3dsl::smaller(a.x, b.x), k3dsl::smaller(a.y, b.y));
}
}  // namespace tl
template <> TL_DEVICE float tl::MaxOp::operator()<float>(float const &a, float const &b) { return k3dsl::larger(a, b); }
template <> TL_DEVICE float tl::MinOp::operator()<float>(float const &a, float const &b) { return k3dsl::smaller(a, b); }
template <> TL_DEVICE double tl::MaxOp::operator()<double>(double const &a, double const &b) { return k3dsl::larger(a, b); }
template <> TL_DEVICE double tl::MinOp::operator()<double>(double const &a, double const &b) { return k3dsl::smaller(a, b); }
#define max(a, b) k3dsl::larger(a, b)
#define min(a, b) k3dsl::smaller(a, b)
#define max2(a, b) larger2(a, b)
#define min2(a, b) smaller2(a, b)
"""

_EXP2 = """
namespace k3dsl {
TL_DEVICE float exp2(float x) {  // one instruction; results below the normal range are 0
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
}  // namespace k3dsl
#define exp2f(x) k3dsl::exp2(x)
"""

_TF32 = """
namespace k3dsl {
TL_DEVICE float tf32(float x) {  // rounded to nearest; matrix instructions would cut the bits off
  unsigned r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return __uint_as_float(r);
}
}  // namespace k3dsl
"""


_MXFP4 = """
#include <cuda_fp16.h>
namespace k3dsl {
TL_DEVICE float mxfp4(unsigned char byte, unsigned char scale, int odd) {
  unsigned code = byte >> (4 * odd);
  // as the bits of an fp16 number a code is 2^14 times too small
  float value = __half2float(__ushort_as_half((code & 7) << 9 | (code & 8) << 12)) * 16384.0f;
  unsigned power = scale == 0 ? 0x400000u : scale == 255 ? 0x7fc00000u : (unsigned)scale << 23;
  return value * __uint_as_float(power);
}
}  // namespace k3dsl
"""


def prelude(kernel: Kernel) -> str:
    """What the kernel needs of it, or ''."""
    parts: list[str] = []
    ops = list(walk(kernel.body))
    if any(_is_extremum(op) for op in ops):
        parts.append(_EXTREMA)
    if any(op.opcode in ("exp2", "sigmoid") for op in ops):
        parts.append(_EXP2)
    if any(op.opcode == "tf32" for op in ops):
        parts.append(_TF32)
    if any(op.opcode == "dequantize_mxfp4" for op in ops):
        parts.append(_MXFP4)
    if not parts:
        return ""
    headers = [f"tl_templates/cuda/{name}.h" for name in _HEADERS] + ["utility", "cuda/std/utility", "cuda/std/limits"]
    return "".join(f"#include <{name}>\n" for name in headers) + "".join(parts).rstrip()


def _is_extremum(op: Op) -> bool:
    """True for a maximum or minimum of floats, also inside another op's combine."""
    if op.opcode in ("min", "max", "softplus") or (
        op.opcode in ("reduce", "scan") and op.attrs.get("kind") in ("min", "max")
    ):
        return any(v.dtype.is_float for v in op.operands)
    return False
