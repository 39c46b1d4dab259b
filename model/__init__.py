"""The network in PyTorch, built from the operators."""

from k3dsl.model.cache import Cache
from k3dsl.model.config import KimiK3Config, LinearAttnConfig
from k3dsl.model.generate import DecodeStep, Generated, NewTokens
from k3dsl.model.network import CausalLMOutput, KimiK3ForCausalLM, KimiK3Model

__all__ = [
    "Cache",
    "CausalLMOutput",
    "DecodeStep",
    "Generated",
    "KimiK3Config",
    "KimiK3ForCausalLM",
    "KimiK3Model",
    "LinearAttnConfig",
    "NewTokens",
]
