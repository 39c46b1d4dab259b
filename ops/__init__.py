"""The operators of the Kimi K3 network as torch functions, each written once in the tile language."""

# Functions share their names with the folders they live in, so they are bound here, after the folders were imported.
from k3dsl.ops.attention.api import attention
from k3dsl.ops.kda.api import kda, kda_decode
from k3dsl.ops.matmul.api import matmul
from k3dsl.ops.rmsnorm.api import rmsnorm
from k3dsl.ops.segment_sum.api import segment_sum
from k3dsl.ops.softmax.api import softmax

__all__ = ["attention", "kda", "kda_decode", "matmul", "rmsnorm", "segment_sum", "softmax"]
