"""Text to token ids and back: a checkpoint's own tokenizer where there is one, else bytes."""

from __future__ import annotations

import codecs
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from k3dsl.ops.common import fail

if TYPE_CHECKING:
    from k3dsl.model.config import KimiK3Config

FILE = "tokenizer.json"
BYTES = 256


class Tokenizer(Protocol):
    """What generating text needs."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Token t below 256 is the byte t of UTF-8 text; the others (bos, eos, padding) are no text."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos = bos

    def encode(self, text: str) -> list[int]:
        """The bytes of a text, after the bos token if there is one."""
        return [*([] if self.bos is None else [self.bos]), *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 show as U+FFFD."""
        return codecs.decode(bytes(t for t in tokens if t < BYTES), "utf-8", "replace")


class FileTokenizer:
    """A tokenizer.json, read by the package `tokenizers`."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Loaded  # type: ignore[import-not-found,unused-ignore]

        self.loaded: Any = Loaded.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer adds."""
        return list(self.loaded.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        return str(self.loaded.decode(list(tokens)))


def tokenizer_of(config: KimiK3Config, folder: Path | None) -> Tokenizer:
    """The tokenizer of a checkpoint's folder; bytes for the small networks, whose vocabulary is made for them.

    Raises ArgumentError where text cannot become tokens.
    """
    path = None if folder is None else folder / FILE
    if path is not None and path.is_file():
        if importlib.util.find_spec("tokenizers") is None:
            fail(
                "prompt",
                f"needs {path} to be read, and the package tokenizers is not installed",
                "pip install tokenizers",
            )
        return FileTokenizer(path)
    if not BYTES <= config.vocab_size < 1024:
        fail(
            "prompt",
            f"cannot be split into tokens: the vocabulary has {config.vocab_size:,}, and there is no {FILE}",
            f"put the tokenizer's {FILE} beside config.json, or pass token ids (--ids)",
        )
    return ByteTokenizer(config.bos_token_id)
