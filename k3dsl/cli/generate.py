"""`k3dsl generate`: continues prompts with a checkpoint, or with a named small network of random weights."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dsl.cli.common import BackendName, Json, device_for
from k3dsl.cli.output import print_json
from k3dsl.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from k3dsl.model import KimiK3Config, KimiK3ForCausalLM

NAME = "generate"
DTYPES = ("bfloat16", "float16", "float32")
CPU_MOST_BYTES = 1 << 30
"""Of random weights on the CPU, whose backend is there to judge results, not to be fast."""
RANDOM = "random weights: this shows that the network runs, the text means nothing"
Model = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER|NAME", help="A checkpoint's folder; or a network by name, such as K3-tiny, with random weights."
    ),
]
DType = Annotated[
    str | None, typer.Option("--dtype", help="bfloat16, float16 or float32. Default: as config.json says.")
]

Experts = Annotated[
    str | None,
    typer.Option(
        "--experts", help="mxfp4 or plain: weights of routed experts, of a network by name. Default: its own."
    ),
]


def generate_command(
    model: Model,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Text to continue. Repeatable: one batch.")
    ] = None,
    ids: Annotated[
        list[str] | None, typer.Option("--ids", metavar="1,2,3", help="Token ids in place of text. Repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Of each prompt.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw from the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Draw from the most likely tokens that sum to p.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the draws, and of random weights.")] = 0,
    dtype: DType = None,
    backend: BackendName = None,
    as_json: Json = False,
) -> None:
    """Continue prompts. Text is streamed while it is made; several prompts run as one batch and are shown at the end."""
    from k3dsl.model.tokens import tokenizer_of
    from k3dsl.runtime.dispatch import using_backend

    if not prompt and not ids:
        raise ArgumentError("there is nothing to continue", fix='pass --prompt "text" or --ids 1,2,3')
    network, folder = load(model, dtype, backend, seed)
    readable = bool(prompt) or folder is None
    tokenizer = tokenizer_of(network.config, folder) if readable else None
    texts = [*(tokenizer.encode(text) for text in prompt or () if tokenizer is not None), *map(_numbers, ids or ())]
    for number, text in enumerate(texts):
        if outside := [t for t in text if not 0 <= t < network.config.vocab_size]:
            raise ArgumentError(
                f"prompt {number + 1} has token {outside[0]}, the vocabulary {network.config.vocab_size:,}",
                fix="pass ids of this checkpoint's vocabulary",
            )
    streaming = len(texts) == 1 and not as_json and tokenizer is not None
    shown = ""
    made: list[int] = []

    def show(new: Any) -> None:
        nonlocal shown
        if not streaming or tokenizer is None or new.tokens[0] is None:
            return
        made.append(new.tokens[0])
        text = tokenizer.decode(made)
        if not text.endswith("\ufffd"):  # a character whose bytes are not all there waits
            print(text[len(shown) :], end="", flush=True)
            shown = text

    start = time.perf_counter()
    with using_backend(backend):
        out = network.generate(
            texts, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
            on_tokens=show,
        )  # fmt: skip
    seconds = time.perf_counter() - start
    count = sum(map(len, out.tokens))
    if as_json:
        rows = [
            {"prompt": list(p), "tokens": list(t), "stopped": why, "text": tokenizer.decode(t) if tokenizer else None}
            for p, t, why in zip(out.prompts, out.tokens, out.stopped, strict=True)
        ]
        print_json({"model": model, "results": rows, "seconds": seconds, "tokens_per_s": count / seconds})
        return
    if streaming and tokenizer is not None:
        print(tokenizer.decode(made)[len(shown) :])
    else:
        for number, tokens in enumerate(out.tokens):
            words = tokenizer.decode(tokens) if tokenizer is not None else " ".join(map(str, tokens))
            print(f"{number + 1}: {words}")
    speed = f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s, the first call's compiling included"
    print(speed, file=sys.stderr)


def load(
    model: str, dtype: str | None, backend: str | None, seed: int, experts: str | None = None
) -> tuple[KimiK3ForCausalLM, Path | None]:
    """The network of a folder, or the one of that name with random weights made on the backend's device; and the folder.

    experts: 'mxfp4' or 'plain', of a network by name; None: as its config says.
    """
    import torch

    from k3dsl.model import KimiK3ForCausalLM
    from k3dsl.model.info import load_config

    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError(f"unknown dtype {dtype!r}", fix=f"one of {', '.join(DTYPES)}")
    if experts not in (None, "mxfp4", "plain"):
        raise ArgumentError(f"unknown experts {experts!r}", fix="mxfp4 or plain")
    device = device_for(backend)
    wanted = None if dtype is None else getattr(torch, dtype)
    name, config = load_config(model)
    if Path(model).exists():
        if experts is not None:
            raise ArgumentError(
                "--experts is given with a checkpoint, whose experts are as they are", fix="leave it out"
            )
        return KimiK3ForCausalLM.from_pretrained(model, dtype=wanted, device=device), Path(model)
    if experts == "mxfp4":
        config = config.with_mxfp4_experts()
    elif experts == "plain":
        config = replace(config, quantization_config=None)
    _check_size(name, config if dtype is None else replace(config, dtype=dtype), device)
    print(f"{name}, {RANDOM}", file=sys.stderr)
    torch.manual_seed(seed)
    return KimiK3ForCausalLM.from_config(config, dtype=wanted, device=device), None


def _check_size(name: str, config: KimiK3Config, device: torch.device) -> None:
    """Raises ArgumentError for a network whose weights the GPU cannot hold, and on the CPU for one that is not tiny."""
    import torch

    from k3dsl.model.info import describe

    size = describe(config).weight_bytes
    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else CPU_MOST_BYTES
    if size > room:
        where = f"this GPU has {room / 1e9:.4g} GB free" if device.type == "cuda" else "the CPU is for tiny networks"
        raise ArgumentError(
            f"{name} is a configuration without weights; random ones would take {size / 1e9:.4g} GB, and {where}",
            fix="name the folder of a checkpoint, or K3-tiny",
        )


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text):
        raise ArgumentError(f"--ids takes token ids with commas, got {text!r}", fix="write --ids 1,2,3")
    return [int(t) for t in text.split(",")]
