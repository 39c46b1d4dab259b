"""The operators of the Kimi K3 network as torch functions, each written once in the tile language."""

# Functions share their names with the folders they live in, so they are bound here, after the folders were imported.
from k3dsl.ops.attention.api import attention, attention_decode
from k3dsl.ops.attnres.api import attnres, attnres_fold, attnres_logits, attnres_merge, attnres_phase1
from k3dsl.ops.causal_conv1d.api import causal_conv1d, causal_conv1d_update
from k3dsl.ops.gated_rmsnorm.api import gated_rmsnorm
from k3dsl.ops.kda.api import kda, kda_decode
from k3dsl.ops.kda_step.api import kda_commit, kda_step
from k3dsl.ops.linear_attention.api import (
    delta_rule,
    delta_rule_decode,
    gated_delta_rule,
    gated_delta_rule_decode,
    linear_attention,
    linear_attention_decode,
)
from k3dsl.ops.matmul.api import matmul
from k3dsl.ops.mla.api import mla_cache_write, mla_decode, mla_prefill
from k3dsl.ops.moe.activation import situ, swiglu
from k3dsl.ops.moe.experts import moe_experts, moe_sort
from k3dsl.ops.moe.latent import latent_moe
from k3dsl.ops.moe.router import moe_router, moe_topk
from k3dsl.ops.rmsnorm.api import rmsnorm
from k3dsl.ops.segment_sum.api import segment_sum
from k3dsl.ops.softmax.api import softmax

__all__ = [
    "attention",
    "attention_decode",
    "attnres",
    "attnres_fold",
    "attnres_logits",
    "attnres_merge",
    "attnres_phase1",
    "causal_conv1d",
    "causal_conv1d_update",
    "delta_rule",
    "delta_rule_decode",
    "gated_delta_rule",
    "gated_delta_rule_decode",
    "gated_rmsnorm",
    "kda",
    "kda_commit",
    "kda_decode",
    "kda_step",
    "latent_moe",
    "linear_attention",
    "linear_attention_decode",
    "matmul",
    "mla_cache_write",
    "mla_decode",
    "mla_prefill",
    "moe_experts",
    "moe_router",
    "moe_sort",
    "moe_topk",
    "rmsnorm",
    "segment_sum",
    "situ",
    "softmax",
    "swiglu",
]
