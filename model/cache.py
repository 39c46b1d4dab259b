"""What a running sequence leaves behind: KDA states, convolution windows, and paged MLA latents."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3dsl.model.arguments import FLOATS, integer, integers
from k3dsl.ops.common import fail

if TYPE_CHECKING:
    from k3dsl.model.config import KimiK3Config

PAGE_SIZE = 64


@dataclass
class KDASlots:
    """A KDA layer's part, one slot a row. state: [rows, H, V, K] fp32. windows: [rows, W - 1, 3 H K], the raw inputs of the
    convolutions of q, k and v before the next token."""

    state: torch.Tensor
    windows: torch.Tensor


@dataclass
class MLAPages:
    """An MLA layer's part: pages [pages, page_size, rank + rope] of normed latents, each followed by its shared key part."""

    pages: torch.Tensor


class Cache:
    """The memory of `rows` sequences between calls of the model.

    KDA layers keep a state and a convolution window a row, of fixed size. MLA layers keep rank + rope numbers a token, in
    pages that all layers number alike: token t of a row lies in page `page_table[row, t // page_size]`.

    A recurrent state cannot be cut back to an earlier token. To reuse a prefix, prefill it, `fork` at that very boundary, and
    go on from the copies.

    Attributes:
        lengths: [rows] int32 on the device, the tokens of each row. page_table: [rows, most pages] int32, -1 where none is.
        layers: a KDASlots or an MLAPages for each layer. generation: a number that changes when growing moves tensors, after
            which a captured CUDA graph no longer holds.

    Args:
        rows: sequences. capacity: tokens that each row can hold before the pages grow. page_size: tokens a page, a
            multiple of 16.
        dtype: of latents and windows; states are fp32. growable: whether pages are added on demand; they are never
            added while a CUDA graph is captured.
    """

    def __init__(
        self,
        config: KimiK3Config,
        rows: int,
        *,
        capacity: int = PAGE_SIZE,
        page_size: int = PAGE_SIZE,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        growable: bool = True,
    ) -> None:
        rows = integer("rows", rows, 1, "a cache holds at least one sequence")
        page_size = integer("page_size", page_size, 1, "pass how many tokens a page holds")
        if page_size % 16:
            fail("page_size", f"is {page_size}", "pass a multiple of 16: kernels read pages in blocks")
        capacity = integer("capacity", capacity, 0, "pass how many tokens a row holds before the pages grow")
        if dtype not in FLOATS:
            fail("dtype", f"is {dtype}", "pass the network's dtype, as model.new_cache does")
        self.config = config
        self.rows, self.page_size, self.growable = rows, page_size, growable
        self.dtype, self.device = dtype, torch.device(device)
        self.layers = [
            self._kda_slots() if kind == "kda" else MLAPages(self._new_pages(0)) for kind in config.layer_types
        ]
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.page_table = torch.full((rows, 0), -1, dtype=torch.int32, device=self.device)
        self.slots = torch.arange(rows, dtype=torch.int32, device=self.device)
        self._lengths = [0] * rows  # on the host, so that nothing has to ask the device
        self._pages: list[list[int]] = [[] for _ in range(rows)]
        self._free: list[int] = []
        self._pool = 0
        self._torn: set[int] = set()
        self.generation = 0
        self._grow(rows * -(-capacity // page_size), -(-capacity // page_size))

    def _kda_slots(self) -> KDASlots:
        c = self.config
        H, D, W = c.kda_num_heads, c.kda_head_dim, c.short_conv_kernel_size
        wide = torch.promote_types(self.dtype, torch.float32)
        state = torch.zeros(self.rows, H, D, D, dtype=wide, device=self.device)
        return KDASlots(state, torch.zeros(self.rows, W - 1, 3 * H * D, dtype=self.dtype, device=self.device))

    def _new_pages(self, number: int) -> torch.Tensor:
        shape = number, self.page_size, self.config.mla_cache_width
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def length(self, row: int) -> int:
        """Tokens that a row holds."""
        return self._lengths[row]

    @property
    def capacity(self) -> int:
        """Tokens that the pages hold, over all rows."""
        return self._pool * self.page_size

    def nbytes(self) -> dict[str, int]:
        """Bytes by part: 'kda_state', 'conv_window', 'mla_latent', 'tables', and their 'total'."""
        found = {"kda_state": 0, "conv_window": 0, "mla_latent": 0, "tables": 0}
        for layer in self.layers:
            if isinstance(layer, KDASlots):
                found["kda_state"] += layer.state.nbytes
                found["conv_window"] += layer.windows.nbytes
            else:
                found["mla_latent"] += layer.pages.nbytes
        found["tables"] = self.page_table.nbytes + self.lengths.nbytes + self.slots.nbytes
        return {**found, "total": sum(found.values())}

    # ---- pages -------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: Sequence[int], rows: Sequence[int] | None = None) -> None:
        """Makes room for so many more tokens in each of the rows (all by default). Happens on the host, without waiting.

        Raises ArgumentError when the pages are full and may not grow, and for rows that a call left half changed.
        """
        rows = range(self.rows) if rows is None else rows
        if torn := sorted(self._torn.intersection(rows)):
            fail(
                "past",
                f"has rows that a call which failed or was interrupted left half changed: {torn}",
                f"empty them, past.reset({torn}), and read their tokens again",
            )
        wanted = {
            row: -(-(self._lengths[row] + more) // self.page_size) - len(self._pages[row])
            for row, more in zip(rows, tokens, strict=True)
        }
        if all(n <= 0 for n in wanted.values()):
            return
        self._check_capturing()
        need = sum(max(0, n) for n in wanted.values())
        most = max(len(self._pages[row]) + max(0, n) for row, n in wanted.items())
        if need > len(self._free) or most > self.page_table.shape[1]:
            if not self.growable:
                fail(
                    "past",
                    f"holds {self.capacity} tokens in {self._pool} pages of {self.page_size}, {len(self._free)} free, at "
                    f"most {self.page_table.shape[1] * self.page_size} tokens a row; {need} more pages are needed",
                    "make the cache with a larger capacity, reset rows that are done, or let it grow (growable=True)",
                )
            # doubling, so that token after token costs a copy only now and then
            more = max(need - len(self._free), self._pool) if need > len(self._free) else 0
            width = max(most, 2 * self.page_table.shape[1]) if most > self.page_table.shape[1] else 0
            self._grow(more, width)
        for row, n in wanted.items():
            if n <= 0:
                continue
            first = len(self._pages[row])
            taken = [self._free.pop() for _ in range(n)]
            self._pages[row] += taken
            self.page_table[row, first : first + n] = torch.tensor(taken, dtype=torch.int32).to(
                self.device, non_blocking=True
            )

    def _grow(self, pages: int, width: int) -> None:
        """Adds pages to every MLA layer, and columns to the page table up to `width`."""
        self.generation += 1
        if pages:
            for layer in self.layers:
                if isinstance(layer, MLAPages):
                    new = self._new_pages(pages)
                    layer.pages = torch.cat([layer.pages, new]) if self._pool else new
            self._free = [*range(self._pool + pages - 1, self._pool - 1, -1), *self._free]
            self._pool += pages
        if width > self.page_table.shape[1]:
            self.page_table = torch.nn.functional.pad(self.page_table, (0, width - self.page_table.shape[1]), value=-1)

    def _check_capturing(self) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            fail(
                "past", "has no room for the token, and a CUDA graph is being captured", "call past.reserve(...) before"
            )

    @contextmanager
    def changing(self, rows: Sequence[int] | None = None) -> Iterator[None]:
        """What changes rows (all by default) and their lengths; an error or an interrupt in the middle leaves them torn, which
        `reserve` refuses until they are reset."""
        try:
            yield
        except BaseException:
            self._torn.update(range(self.rows) if rows is None else rows)
            raise

    def advance(self, tokens: Sequence[int], rows: Sequence[int] | None = None) -> None:
        """Counts tokens of rows on the host; `count` does so on the device."""
        for row, more in zip(range(self.rows) if rows is None else rows, tokens, strict=True):
            self._lengths[row] += more

    def count(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Adds tokens [N] to the lengths of slots [N] on the device; a negative slot counts nothing."""
        real = slots >= 0
        self.lengths.scatter_add_(0, torch.where(real, slots, 0).long(), torch.where(real, tokens, 0).to(torch.int32))

    # ---- rows --------------------------------------------------------------------------------------------------------

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Empties rows (all by default): their states and windows are zeroed, whatever they held, their pages are free."""
        rows = range(self.rows) if rows is None else integers("rows", rows, "pass the rows to empty, as integers")
        self.check_rows(rows)
        for row in rows:
            self._free += reversed(self._pages[row])
            self._pages[row], self._lengths[row] = [], 0
        self._torn.difference_update(rows)
        index = torch.tensor(list(rows), dtype=torch.int64).to(self.device, non_blocking=True)
        for layer in self.layers:
            if isinstance(layer, KDASlots):
                layer.state.index_fill_(0, index, 0)
                layer.windows.index_fill_(0, index, 0)
        self.lengths.index_fill_(0, index, 0)
        self.page_table.index_fill_(0, index, -1)

    def fork(self, n: int) -> Cache:
        """A cache of rows * n sequences, in which row i of this one stands n times from row i * n on: for several
        continuations of the same prefix. Nothing is shared with this one."""
        n = integer("n", n, 1, "fork into at least one copy")
        twin = copy.copy(self)
        twin.rows = self.rows * n
        twin._torn = {row * n + i for row in self._torn for i in range(n)}
        twin._lengths = [length for length in self._lengths for _ in range(n)]
        twin.lengths = self.lengths.repeat_interleave(n)
        twin.slots = torch.arange(twin.rows, dtype=torch.int32, device=self.device)
        twin.page_table = torch.full((twin.rows, self.page_table.shape[1]), -1, dtype=torch.int32, device=self.device)
        sources = [page for row in self._pages for _ in range(n) for page in row]
        counts = [len(row) for row in self._pages for _ in range(n)]
        twin._pool = max(len(sources), self._pool * n)
        numbers = iter(range(len(sources)))
        twin._pages = [[next(numbers) for _ in range(count)] for count in counts]
        twin._free = [*range(twin._pool - 1, len(sources) - 1, -1)]
        index = torch.tensor(sources, dtype=torch.int64).to(self.device, non_blocking=True)
        twin.layers = []
        for layer in self.layers:
            if isinstance(layer, KDASlots):
                twin.layers.append(KDASlots(layer.state.repeat_interleave(n, 0), layer.windows.repeat_interleave(n, 0)))
            else:
                pages = self._new_pages(twin._pool)
                pages[: len(sources)] = layer.pages[index]
                twin.layers.append(MLAPages(pages))
        for row, held in enumerate(twin._pages):
            if held:
                twin.page_table[row, : len(held)] = torch.tensor(held, dtype=torch.int32).to(
                    self.device, non_blocking=True
                )
        return twin

    def check_rows(self, rows: Sequence[int]) -> None:
        """Raises ArgumentError unless the rows exist and differ."""
        for row in rows:
            if not 0 <= row < self.rows:
                fail("rows", f"names row {row} of a cache of {self.rows}", f"rows are 0 to {self.rows - 1}")
        if len(set(rows)) != len(rows):
            fail("rows", f"names a row twice: {list(rows)}", "each sequence of a call needs a row of its own")

    def places(self, slots: torch.Tensor) -> torch.Tensor:
        """Where the next token of each slot [B] goes, counted over all pages: int64, -1 for a negative slot. On the device."""
        real = slots >= 0
        where = torch.where(real, slots, 0).long()
        length = self.lengths[where].long()
        page = self.page_table[where, length // self.page_size].long()
        return torch.where(real & (page >= 0), page * self.page_size + length % self.page_size, -1)

    def places_of(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
        """Where the tokens start .. end - 1 of each row lie, one after another: int64 [tokens]. Worked out on the host."""
        found = []
        for row, start, end in zip(rows, starts, ends, strict=True):
            token = torch.arange(start, end)
            pages = torch.tensor(self._pages[row], dtype=torch.int64)
            found.append(pages[token // self.page_size] * self.page_size + token % self.page_size)
        return torch.cat(found).to(self.device, non_blocking=True)
