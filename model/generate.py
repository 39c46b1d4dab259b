"""Generating text: prefill of ragged prompts, then a token at a time, on a GPU as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, SupportsIndex

import torch

from k3dsl.errors import NonFiniteError
from k3dsl.model.arguments import INTEGERS, check_past, integer, integers
from k3dsl.model.cache import Cache
from k3dsl.model.sampling import Sampling, sample
from k3dsl.ops.common import fail

if TYPE_CHECKING:
    from k3dsl.model.network import KimiK3ForCausalLM

Prompts = torch.Tensor | Sequence[Sequence[int]] | Sequence[int]


@dataclass(frozen=True)
class NewTokens:
    """One step of a batch: the token of each row, None for a row that has stopped; and why a row stops after this step,
    'eos' or 'length', else None."""

    tokens: tuple[int | None, ...]
    stopped: tuple[str | None, ...]


@dataclass(frozen=True)
class Generated:
    """What came of each prompt. tokens: the new ones, an eos that ended a row included. stopped: 'eos' or 'length'. past: the
    cache; it holds every token but the last of each row."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    stopped: tuple[str, ...]
    past: Cache

    def sequences(self, pad: int = 0) -> torch.Tensor:
        """Prompts and new tokens as [B, longest], padded on the right."""
        rows = [(*a, *b) for a, b in zip(self.prompts, self.tokens, strict=True)]
        width = max(map(len, rows))
        return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])


@lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that steps are captured on: one for all, since cuBLAS keeps a workspace of 32 MiB for each it has seen."""
    return torch.cuda.Stream(device)


class DecodeStep:
    """One token for some rows of a cache, again and again: static buffers, and on a GPU one CUDA graph.

    Rows that take part may change between calls; the rest of the batch is padding, which owns no row.

    Args:
        batch: most rows of one call. graph: whether to capture; None: on a GPU.
    """

    def __init__(self, model: KimiK3ForCausalLM, cache: Cache, batch: int, *, graph: bool | None = None) -> None:
        self.model, self.cache, self.batch = model, cache, batch
        self.graph_wanted = cache.device.type == "cuda" if graph is None else graph
        if self.graph_wanted and cache.device.type != "cuda":
            fail("graph", f"is asked for on {cache.device}", "CUDA graphs need a GPU; leave it out")
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=cache.device)
        self.slots = torch.full((batch,), -1, dtype=torch.int32, device=cache.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor | None = None
        self._generation = -1

    def __call__(self, tokens: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits [B, vocab] after tokens [B] of rows [B]; -1 is padding. They are overwritten by the next call.

        Raises ArgumentError for more rows than the batch, rows that do not exist, and a cache that is full.
        """
        number = len(rows)
        if number > self.batch or tokens.shape != (number,):
            fail(
                "tokens",
                f"has shape {list(tokens.shape)} for {number} rows",
                f"pass one each of at most {self.batch} rows",
            )
        real = [row for row in rows if row >= 0]
        self.cache.check_rows(real)
        self.cache.reserve([1] * len(real), real)
        self.ids[:number, 0] = tokens
        padded = [*rows, *[-1] * (self.batch - number)]
        self.slots.copy_(torch.tensor(padded, dtype=torch.int32), non_blocking=True)
        with self.cache.changing(real):
            logits = self._run()
            self.cache.advance([1] * len(real), real)
        return logits[:number, 0]

    def again(self) -> torch.Tensor:
        """The last call's step once more, for timing: on a GPU the graph alone, without anything on the host.

        Only the device counts its tokens; the caller sees to it that there is room for them.
        """
        return self._run()

    def _run(self) -> torch.Tensor:
        if not self.graph_wanted:
            return self.model.decode(self.ids, self.cache, self.slots).logits
        if self._graph is None or self._generation != self.cache.generation:
            self._capture()
        assert self._graph is not None
        assert self._logits is not None
        self._graph.replay()
        return self._logits

    def _capture(self) -> None:
        """Runs once with nothing but padding, so that all code is built, then captures."""
        wanted = self.slots.clone()
        self.slots.fill_(-1)
        stream = _side_stream(self.cache.device)
        stream.wait_stream(torch.cuda.current_stream(self.cache.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.model.decode(self.ids, self.cache, self.slots)
        torch.cuda.current_stream(self.cache.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._logits = self.model.decode(self.ids, self.cache, self.slots).logits
        self._generation = self.cache.generation
        self.slots.copy_(wanted)


def prefill(
    model: KimiK3ForCausalLM, prompts: Sequence[Sequence[int]], cache: Cache, rows: Sequence[int], chunk: int = 0
) -> torch.Tensor:
    """Logits [B, vocab] after each prompt, whose tokens are added to its row of the cache.

    chunk: most tokens of a prompt in one call, so that memory stays bounded; 0: all at once.
    """
    found: list[torch.Tensor | None] = [None] * len(prompts)
    done = [0] * len(prompts)
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        now = [i for i, p in enumerate(prompts) if done[i] < len(p)]
        parts = [list(prompts[i][done[i] : done[i] + chunk] if chunk else prompts[i]) for i in now]
        offsets = [0]
        for part in parts:
            offsets.append(offsets[-1] + len(part))
        ids = torch.tensor([[t for part in parts for t in part]], dtype=torch.int64).to(cache.device)
        with torch.no_grad():
            out = model(
                ids, past=cache, cu_seqlens=torch.tensor(offsets), rows=[rows[i] for i in now], logits_to_keep=1,
                differentiable=False,
            ).logits[0]  # fmt: skip
        for n, i in enumerate(now):
            done[i] += len(parts[n])
            found[i] = out[n]
    return torch.stack([x for x in found if x is not None])


def stream(
    model: KimiK3ForCausalLM,
    prompts: Prompts,
    *,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    past: Cache | None = None,
    prefill_chunk: int = 0,
) -> Iterator[NewTokens]:
    """Yields the tokens of each step as they are drawn; arguments as `generate`."""
    texts = token_lists(prompts, attention_mask)
    prefill_chunk = integer("prefill_chunk", prefill_chunk, 0, "pass most prompt tokens of a call, or 0 for all")
    how = Sampling(temperature, top_k, top_p)
    remedy = "pass a token id, or several; an empty list for none"
    ends = frozenset(
        model.config.eos_token_ids if eos_token_id is None else integers("eos_token_id", eos_token_id, remedy)
    )
    if seed is not None:
        seed = integer("seed", seed, 0, "pass an integer")
        if generator is not None:
            fail("seed", "is given beside a generator", "pass one of the two")
        generator = torch.Generator(model.device).manual_seed(seed)
    cache = _cache_for(model, texts, past, max_new_tokens)
    return _steps(model, texts, cache, max_new_tokens, how, ends, generator, prefill_chunk)


def _steps(
    model: KimiK3ForCausalLM,
    texts: Sequence[Sequence[int]],
    cache: Cache,
    most: int,
    how: Sampling,
    ends: frozenset[int],
    generator: torch.Generator | None,
    chunk: int,
) -> Iterator[NewTokens]:
    rows = list(range(len(texts)))
    logits = prefill(model, texts, cache, rows, chunk)
    step = DecodeStep(model, cache, len(texts))
    for number in range(most):
        drawn = draw(logits, rows, how, generator, number)
        tokens = [t if row >= 0 else None for t, row in zip(drawn.tolist(), rows, strict=True)]
        stopped = tuple(
            None if t is None else "eos" if t in ends else "length" if number == most - 1 else None for t in tokens
        )
        rows = [-1 if t is None or why else row for t, why, row in zip(tokens, stopped, rows, strict=True)]
        yield NewTokens(tuple(tokens), stopped)
        if all(row < 0 for row in rows):
            return
        logits = step(drawn, rows)


def draw(
    logits: torch.Tensor, rows: Sequence[int], how: Sampling, generator: torch.Generator | None, number: int
) -> torch.Tensor:
    """The next token [B] of each row. Rows of -1 are padding: what they draw means nothing.

    Raises NonFiniteError when the logits of a row are not all finite; a token drawn from those would mean nothing either.
    """
    bad = ~torch.isfinite(logits).all(-1)
    # one look at the device: a row that is not finite is drawn from zeros, and its token is replaced by -1
    tokens = sample(torch.where(bad[:, None], 0.0, logits), how, generator)
    marked = torch.where(bad, -1, tokens).cpu()
    for row, token in zip(rows, marked.tolist(), strict=True):
        if row >= 0 and token < 0:
            raise NonFiniteError(
                f"row {row}: the logits of new token {number + 1} are not finite",
                fix="reset the row (Cache.reset) before it is used again; check the weights with output_hidden_states=True, "
                "and the dtype: fp16 overflows where bfloat16 does not",
            )
    return tokens


def generate(
    model: KimiK3ForCausalLM,
    prompts: Prompts,
    *,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    past: Cache | None = None,
    prefill_chunk: int = 0,
    on_tokens: Callable[[NewTokens], None] | None = None,
) -> Generated:
    """Continues prompts of any lengths as one batch, until each has drawn an end token or enough tokens.

    Args:
        prompts: lists of token ids, one list, or ids [B, T] whose padding attention_mask marks with 0.
        max_new_tokens: of each row. temperature, top_k, top_p: see `Sampling`; 0 is greedy.
        eos_token_id: ids of tokens that end a row, as numbers or a tensor; None: the config's; an empty list: none.
        seed, generator: of the draws; the same seed gives the same tokens for the same batch on the same device.
        past: a cache whose rows hold what comes before the prompts; else one is made.
        prefill_chunk: most prompt tokens of a row in one call; 0: all.
        on_tokens: called with each step's tokens as they come; `stream` gives them as an iterator.

    Raises:
        ArgumentError: naming the argument, the reason and the remedy.
        NonFiniteError: logits that are not finite, naming the row; no token is made of them.
    """
    texts = token_lists(prompts, attention_mask)
    cache = _cache_for(model, texts, past, max_new_tokens)
    tokens: list[list[int]] = [[] for _ in texts]
    stopped = [""] * len(texts)
    for new in stream(
        model, texts, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        eos_token_id=eos_token_id, seed=seed, generator=generator, past=cache, prefill_chunk=prefill_chunk,
    ):  # fmt: skip
        for row, (token, why) in enumerate(zip(new.tokens, new.stopped, strict=True)):
            if token is not None:
                tokens[row].append(token)
                stopped[row] = why or stopped[row]
        if on_tokens is not None:
            on_tokens(new)
    return Generated(tuple(map(tuple, texts)), tuple(map(tuple, tokens)), tuple(stopped), cache)


def token_lists(prompts: Prompts, attention_mask: torch.Tensor | None = None) -> list[list[int]]:
    """Prompts as lists of token ids, padding cut out. Raises ArgumentError for none, or an empty one."""
    if isinstance(prompts, torch.Tensor):
        ids = prompts if prompts.dim() == 2 else prompts[None]
        if ids.dim() != 2 or ids.dtype not in INTEGERS:
            fail("prompts", f"is {prompts.dtype} of shape {list(prompts.shape)}", "pass token ids [B, T]")
        held = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.to(ids.device) != 0
        if held.shape != ids.shape:
            fail("attention_mask", f"has shape {list(held.shape)}, prompts {list(ids.shape)}", "pass one as wide")
        texts = [row[mask].tolist() for row, mask in zip(ids, held, strict=True)]
    else:
        if attention_mask is not None:
            fail("attention_mask", "is given beside lists", "lists need no padding; leave it out")
        remedy = "pass lists of integers, or one tensor [B, T]"
        if not isinstance(prompts, (list, tuple)):
            fail("prompts", f"is a {type(prompts).__name__}", remedy)
        rows: list[object] = list(prompts)
        if rows and isinstance(rows[0], SupportsIndex) and not (isinstance(rows[0], torch.Tensor) and rows[0].dim()):
            rows = [rows]
        texts = [integers("prompts", row, remedy) for row in rows]
    if not texts:
        fail("prompts", "is empty", "pass at least one prompt")
    for row, text in enumerate(texts):
        if not text:
            fail("prompts", f"has no tokens in row {row}", "start it with the bos token")
    return texts


def _cache_for(
    model: KimiK3ForCausalLM, texts: Sequence[Sequence[int]], past: Cache | None, max_new_tokens: int
) -> Cache:
    """What the rows are kept in; checks both."""
    more = integer("max_new_tokens", max_new_tokens, 1, "pass at least 1")
    if past is None:
        return model.new_cache(len(texts), capacity=max(map(len, texts)) + more)
    check_past(past, model)
    if past.rows != len(texts):
        fail("past", f"holds {past.rows} sequences, prompts {len(texts)}", "pass one prompt for each of its rows")
    return past
