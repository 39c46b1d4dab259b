"""The network: embedding, decoder layers, logits; loss for training, a cache for inference."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from k3dsl.backends.torch.threads import threads_for
from k3dsl.model import checkpoint, step
from k3dsl.model.arguments import (
    INTEGERS,
    check_mask,
    check_no_autocast,
    check_past,
    check_rows,
    check_shape,
    check_vocabulary,
    float_dtype,
    integer,
)
from k3dsl.model.attention_layers import KDA, MLA
from k3dsl.model.cache import Cache
from k3dsl.model.config import KimiK3Config
from k3dsl.model.functions import COMPILED, TORCH, Functions
from k3dsl.model.generate import Generated, NewTokens, Prompts, generate, stream
from k3dsl.model.layers import MLP, Query, RMSNorm, linear
from k3dsl.model.moe_layers import Experts, Gate, SparseMoE
from k3dsl.model.packing import Packing
from k3dsl.model.residual import BlockAttnRes, Residual
from k3dsl.model.step import Step
from k3dsl.ops.common import dtype_name, fail

if TYPE_CHECKING:
    from k3dsl.autotune.result import Result

SMALL_STEP = 1 << 24
"""Weights times tokens of a decode step on the CPU up to which one thread is quicker than several."""


@dataclass
class CausalLMOutput:
    """What the network returns.

    logits: fp32, [B, T, vocab] (0 where there is padding); or of the last tokens alone with logits_to_keep. loss: mean cross
    entropy of the next tokens, with labels. past: the cache, with this call's tokens in it. hidden_states: with
    output_hidden_states, the residual stream [tokens, hidden] after the embedding and after every layer, packed, and what the
    final norm gave.
    """

    logits: torch.Tensor
    loss: torch.Tensor | None = None
    past: Cache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None

    @property
    def past_key_values(self) -> Cache | None:
        """The cache under the name that transformers gives it."""
        return self.past


class DecoderLayer(nn.Module):
    """Attention and FFN with their norms, between two reads of the residual stream."""

    def __init__(self, config: KimiK3Config, layer: int, **factory: Any) -> None:
        super().__init__()
        self.layer = layer
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attn_res = config.attn_res_block_size is not None
        if self.attn_res:
            self.self_attention_res_proj = Query(hidden, **factory)
            self.self_attention_res_norm = RMSNorm(hidden, eps, **factory)
            self.mlp_res_proj = Query(hidden, **factory)
            self.mlp_res_norm = RMSNorm(hidden, eps, **factory)
        self.input_layernorm = RMSNorm(hidden, eps, **factory)
        attention = KDA if config.layer_types[layer] == "kda" else MLA
        self.self_attn = attention(config, layer, **factory)
        self.post_attention_layernorm = RMSNorm(hidden, eps, **factory)
        self.sparse = config.is_moe(layer)
        if self.sparse:
            self.block_sparse_moe = SparseMoE(config, **factory)
        else:
            self.mlp = MLP(config, config.intermediate_size, **factory)

    def forward(self, residual: Residual, step: Step) -> None:
        """Adds this layer's attention, then its FFN, to the residual stream."""
        x = residual.read(self.input_layernorm, self._site("self_attention_res"), self.layer)
        residual.add(self.self_attn(x, step))
        x = residual.read(self.post_attention_layernorm, self._site("mlp_res"))
        residual.add(self.block_sparse_moe(x, step) if self.sparse else self.mlp(x, step.functions))

    def _site(self, name: str) -> tuple[nn.Module, RMSNorm] | None:
        return (getattr(self, f"{name}_proj"), getattr(self, f"{name}_norm")) if self.attn_res else None


class KimiK3Model(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: KimiK3Config, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
        self.layers = nn.ModuleList(DecoderLayer(config, i, **factory) for i in range(config.num_hidden_layers))
        if config.attn_res_block_size is not None:
            self.output_attn_res_proj = Query(config.hidden_size, **factory)
            self.output_attn_res_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **factory)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **factory)

    def forward(self, tokens: torch.Tensor, step: Step, seen: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Packed token ids [T] to hidden states [T, hidden]. seen: gets the residual stream after every layer."""
        embedded = self.embed_tokens(tokens)
        attn_res = self.config.attn_res_block_size is not None
        residual = (
            BlockAttnRes(self.config, embedded, step.functions) if attn_res else Residual(embedded, step.functions)
        )
        for layer in self.layers:
            if seen is not None:
                seen.append(residual.total)
            layer(residual, step)
        if seen is not None:
            seen.append(residual.total)
        h = residual.read(self.norm, (self.output_attn_res_proj, self.output_attn_res_norm) if attn_res else None)
        if seen is not None:
            seen.append(h)
        return h


class KimiK3ForCausalLM(nn.Module):
    """Kimi K3 (text) or Kimi Linear as a language model, by the features of its config.

    In training mode (`model.train()`) with gradients enabled it runs on plain torch functions, through which autograd
    works: right, but slow. Otherwise it runs on the compiled ops, without gradients. `differentiable=True` or `False` in a
    call decides it by hand.

    Parameters have the names of `k3dsl.model.shapes`. A_log, dt_bias, the convolutions, KDA's output norm and the router stay
    fp32 when the model is cast.

    Args:
        config: of the network. dtype: of its weights; None: the config's. device: of all of them.
    """

    def __init__(
        self, config: KimiK3Config, *, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.config = config
        own = float_dtype("dtype", config.dtype if dtype is None else dtype)
        factory = {"dtype": own, "device": device}
        self.model = KimiK3Model(config, **factory)
        if not config.tie_word_embeddings:
            self.lm_head = linear(config.hidden_size, config.vocab_size, **factory)
        self.functions: Functions = COMPILED
        self.reset_parameters()

    # ---- making, loading, saving ---------------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: KimiK3Config | str, **settings: Any) -> KimiK3ForCausalLM:
        """A network with random weights, from a config or the name of one, in inference mode. settings: dtype, device."""
        known = KimiK3Config.from_name(config) if isinstance(config, str) else config
        if not isinstance(known, KimiK3Config):
            fail("config", f"is a {type(known).__name__}", "pass a KimiK3Config or the name of one, such as 'K3-tiny'")
        return cls(known, **settings).eval()

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        config: KimiK3Config | None = None,
    ) -> KimiK3ForCausalLM:
        """A network with the weights of a checkpoint, in inference mode.

        Args:
            folder: with config.json and safetensors files, as published or as `save_pretrained` wrote it.
            dtype: of the weights; None: as config.json says. device: that they are read to.
            config: in place of the folder's config.json.

        Raises:
            ArgumentError, CheckpointError: see `k3dsl.model.checkpoint.load_checkpoint`.
        """
        known = checkpoint.config_of(folder) if config is None else config
        dtype = None if dtype is None else float_dtype("dtype", dtype)
        exact = dtype == torch.float64
        with torch.device("meta"):
            network = cls(known, dtype=torch.float32 if exact else dtype)
        network.to_empty(device=device or "cpu")
        checkpoint.load_checkpoint(folder, known, network)
        return (network.double() if exact else network).eval()

    def save_pretrained(self, folder: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> None:
        """Writes config.json and the weights in the layout of the published checkpoint; see
        `k3dsl.model.checkpoint.save_checkpoint`."""
        checkpoint.save_checkpoint(folder, self.config, self, max_shard_size)

    def reset_parameters(self) -> None:
        """Random weights: normal with the config's initializer_range, norms 1, AttnRes queries 0 (a mean of the rows)."""
        std = self.config.initializer_range
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding, Gate)):
                nn.init.normal_(module.weight, 0.0, std)
            elif isinstance(module, Experts):
                module.reset_parameters(std)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, but for those that stay fp32."""
        return self.model.embed_tokens.weight.dtype

    def new_cache(self, rows: int, **settings: Any) -> Cache:
        """An empty cache for so many sequences, in the network's dtype and on its device; settings: see `Cache`."""
        return Cache(self.config, rows, **{"dtype": self.dtype, "device": self.device, **settings})

    # ---- running -------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: torch.Tensor,
        past: Cache | None = None,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        use_cache: bool = False,
        *,
        rows: Sequence[int] | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
        differentiable: bool | None = None,
    ) -> CausalLMOutput:
        """Logits of the next tokens.

        Args:
            input_ids: [B, T] token ids; with cu_seqlens [1, T].
            past: what came before, which this call's tokens are added to. With it, one token a sequence runs through the
                decode kernels, more through those for whole sequences (chunked prefill).
            labels: [B, T] integers, the input ids themselves, -100 where nothing is to be learnt. Token t predicts label t + 1
                of its sequence. A cache carries no gradient: that of a chunk ends where the chunk began.
            attention_mask: [B, T] of this call's tokens (or [B, earlier + T]; the last T columns count), 0 for padding, which
                may be on the left or on the right. The padding is cut out before anything is computed, for which the mask
                is read back to the host.
            cu_seqlens: [N + 1] offsets of packed sequences, in place of a mask.
            use_cache: makes a cache if `past` is None.
            rows: of the cache, one a sequence; None: the sequences are its rows, all of them. -1, in calls of one token a
                sequence alone, is padding.
            logits_to_keep: only the last so many tokens of each sequence get logits [B, logits_to_keep, vocab]; 0: all.
            output_hidden_states: also returns the residual stream, layer by layer.
            differentiable: runs on plain torch functions, with gradients; None: in training mode with gradients enabled.

        Raises:
            ArgumentError: naming the argument, the reason and the remedy.
        """
        self._check_ids(input_ids)
        batch, width = input_ids.shape
        if labels is not None:
            check_shape("labels", labels, (batch, width), f"pass a label a token: {[batch, width]}")
            if labels.dtype not in INTEGERS:
                fail("labels", f"is {dtype_name(labels.dtype)}", "pass token ids: labels.long()")
            check_vocabulary(
                "labels", labels, self.config.vocab_size, "-100 where nothing is to be learnt", ignored=-100
            )
        if attention_mask is not None:
            check_mask(attention_mask, batch, width)
        if cu_seqlens is not None:
            check_shape("cu_seqlens", cu_seqlens, (None,), "pass the offsets [N + 1] as a tensor")
        logits_to_keep = integer("logits_to_keep", logits_to_keep, 0, "pass how many of the last tokens, or 0 for all")
        wanted = self.training and torch.is_grad_enabled() if differentiable is None else differentiable
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            functions = TORCH if wanted else self._functions()
            number = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
            if past is None and use_cache:
                past = self.new_cache(number)
            if past is not None:
                check_past(past, self)
                single = width == 1 and cu_seqlens is None and labels is None and not wanted
                rows = check_rows(past, rows, number, padding=single)
                if single:
                    if logits_to_keep > 1:
                        _fail_to_keep(logits_to_keep, 1)
                    return self._decode_rows(input_ids, past, rows, attention_mask, output_hidden_states)
            elif rows is not None:
                fail("rows", "is given without past", "pass the cache whose rows they are")
            packing = self._packing(input_ids, attention_mask, cu_seqlens)
            if not packing.tokens:
                name = "input_ids" if attention_mask is None else "attention_mask"
                fail(name, "leaves no token", "pass at least one; an empty prompt starts with the bos token")
            return self._prefill(
                input_ids, packing, past, rows, labels, functions, logits_to_keep, output_hidden_states,
                packed=cu_seqlens is not None,
            )  # fmt: skip

    def _prefill(
        self,
        input_ids: torch.Tensor,
        packing: Packing,
        past: Cache | None,
        rows: Sequence[int] | None,
        labels: torch.Tensor | None,
        functions: Functions,
        keep: int,
        with_states: bool,
        packed: bool,
    ) -> CausalLMOutput:
        batch, width = input_ids.shape
        if keep and min(packing.lengths) < keep:
            _fail_to_keep(keep, min(packing.lengths))
        known = list(range(past.rows)) if past is not None and rows is None else rows
        now = step.prefill(functions, packing, past, known)
        seen: list[torch.Tensor] | None = [] if with_states else None
        with nullcontext() if past is None else past.changing(known):
            h = self.model(packing.pack(input_ids), now, seen)
            loss = None
            if labels is not None:
                logits = self._logits(h)
                loss = _loss(logits, packing.pack(labels), packing)
                logits = logits[packing.last(keep)] if keep else logits
            else:
                logits = self._logits(h[packing.last(keep)] if keep else h)
            if keep:
                logits = logits.view(*((1, -1) if packed else (batch, keep)), logits.shape[-1])
            else:
                logits = packing.unpack(logits, batch, width)
            if past is not None:
                past.advance(packing.lengths, known)
                assert now.slots is not None
                past.count(now.slots, packing.cu_seqlens.diff())
        return CausalLMOutput(logits, loss, past, None if seen is None else tuple(seen))

    def _decode_rows(
        self,
        input_ids: torch.Tensor,
        past: Cache,
        rows: Sequence[int] | None,
        mask: torch.Tensor | None,
        with_states: bool,
    ) -> CausalLMOutput:
        """One token a sequence; the mask of a token that is padding, and a row of -1, leave the cache alone."""
        known = list(range(past.rows)) if rows is None else list(rows)
        slots = (
            past.slots if rows is None else torch.tensor(known, dtype=torch.int32).to(past.device, non_blocking=True)
        )
        new = [int(row >= 0) for row in known]
        if mask is not None:
            column = mask[:, -1] != 0
            slots = torch.where(column, slots, -1)
            new = [n and int(m) for n, m in zip(new, column.tolist(), strict=True)]
        real = [row for row, n in zip(known, new, strict=True) if n]
        past.reserve([1] * len(real), real)
        with past.changing(real):
            out = self.decode(input_ids, past, slots, with_states=with_states)
            past.advance([1] * len(real), real)
        return out

    def generate(self, prompts: Prompts, **settings: Any) -> Generated:
        """Continues prompts; see `k3dsl.model.generate.generate`."""
        return generate(self, prompts, **settings)

    def stream(self, prompts: Prompts, **settings: Any) -> Iterator[NewTokens]:
        """Continues prompts, a step at a time; see `k3dsl.model.generate.stream`."""
        return stream(self, prompts, **settings)

    def warmup(self, batch: int | Sequence[int] = 1, lengths: int | Sequence[int] = 1024) -> None:
        """Builds or looks up every op for these batch sizes and prompt lengths; see `k3dsl.model.tuning.warmup`."""
        from k3dsl.model.tuning import warmup

        warmup(self, batch, lengths)

    def tune(self, batch: int = 1, length: int = 1024, **settings: Any) -> list[Result]:
        """Tunes every op at this network's shapes and keeps the winners; see `k3dsl.model.tuning.tune`."""
        from k3dsl.model.tuning import tune

        return list(tune(self, batch, length, **settings))

    def decode(
        self, input_ids: torch.Tensor, past: Cache, slots: torch.Tensor, *, with_states: bool = False
    ) -> CausalLMOutput:
        """One token of each sequence, on the device alone: what a CUDA graph holds (see k3dsl.model.generate.DecodeStep).

        Args:
            input_ids: [B, 1]. slots: [B] int32, the cache's row of each, -1 for padding. Room for the tokens is reserved
            (`Cache.reserve`), and `Cache.advance` is left to the caller.
        """
        small = past.device.type == "cpu" and slots.shape[0] * self._weights <= SMALL_STEP
        with torch.no_grad(), threads_for(small):
            now = step.decode(self._functions(), past, slots)
            seen: list[torch.Tensor] | None = [] if with_states else None
            h = self.model(input_ids.flatten(), now, seen)
            past.count(slots, torch.ones_like(slots))
            return CausalLMOutput(self._logits(h)[:, None], None, past, None if seen is None else tuple(seen))

    @cached_property
    def _weights(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def _functions(self) -> Functions:
        """Those of inference. No op is compiled for fp64."""
        if self.config.experts_mxfp4 and self.dtype not in (torch.bfloat16, torch.float64):
            remedy = "load or make the network with dtype=torch.bfloat16, or model.to(torch.bfloat16)"
            fail("dtype", f"is {dtype_name(self.dtype)}, and MXFP4 experts are multiplied as bfloat16", remedy)
        return TORCH if self.dtype == torch.float64 else self.functions

    def _logits(self, h: torch.Tensor) -> torch.Tensor:
        weight = self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return nn.functional.linear(h, weight).to(torch.promote_types(h.dtype, torch.float32))

    def _packing(self, input_ids: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> Packing:
        batch, width = input_ids.shape
        if cu_seqlens is not None:
            if mask is not None:
                fail("attention_mask", "is given beside cu_seqlens", "pass one of the two")
            if batch != 1:
                fail("input_ids", f"has {batch} rows, with cu_seqlens it needs one", "pack the sequences into [1, T]")
            return Packing.of_offsets(cu_seqlens.to(input_ids.device), width)
        if mask is None:
            return Packing.of([width] * batch, input_ids.device)
        return Packing.of_mask(mask[:, mask.shape[1] - width :].to(input_ids.device))

    def _check_ids(self, input_ids: object) -> None:
        if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.int32, torch.int64):
            what = dtype_name(input_ids.dtype) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
            fail("input_ids", f"is {what}", "pass token ids as an int64 tensor [B, T]")
        if input_ids.dim() != 2 or input_ids.shape[0] == 0:
            fail("input_ids", f"has shape {list(input_ids.shape)}", "pass [B, T] with at least one row")
        if input_ids.device != self.device:
            fail(
                "input_ids",
                f"is on {input_ids.device}, the network on {self.device}",
                f"input_ids.to({str(self.device)!r})",
            )
        check_vocabulary(
            "input_ids", input_ids, self.config.vocab_size, "check the tokenizer, and that ids are not labels"
        )
        check_no_autocast(self.device)


def _fail_to_keep(keep: int, tokens: int) -> NoReturn:
    reason = f"is {keep}, but a sequence has {tokens} token{'s'[: tokens != 1]}"
    fail("logits_to_keep", reason, "pass at most the length of the shortest")


def _loss(logits: torch.Tensor, labels: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Mean cross entropy of the next label; the last token of a sequence predicts nothing."""
    last = packing.cu_seqlens[1:].long() - 1
    shifted = torch.nn.functional.pad(labels[1:], (0, 1), value=-100)
    shifted = shifted.index_fill(0, last[last >= 0], -100)
    return nn.functional.cross_entropy(logits, shifted.long())
