"""What several commands take: an op, dims, settings, a target, a backend; and how their text is read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dsl.cli.output import writable
from k3dsl.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from k3dsl.targets import Target

OpName = Annotated[str, typer.Argument(metavar="OP", help="The op, as `k3dsl ops` lists it.")]
Dims = Annotated[
    list[str] | None,
    typer.Option("--dims", metavar="T=8192,H=96", help="Problem dims; the op's defaults for the rest."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A knob, an option, or a schedule field such as scan.num_warps. Repeatable."
    ),
]
TargetName = Annotated[str | None, typer.Option("--target", help="A GPU architecture, such as sm_90a or gfx942.")]
Static = Annotated[bool, typer.Option("--static", help="Compile every dim in, also those that could vary at run time.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of tables.")]
BackendName = Annotated[
    str | None,
    typer.Option(
        "--backend", help="torch (on the CPU), triton or tilelang (on this machine's GPU). Default: what is here."
    ),
]
GeneratingName = Annotated[str, typer.Option("--backend", help="What generates the code: triton or tilelang.")]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FOLDER",
        help="K3, K3-tiny, K3-slice, Kimi-Linear-48B-A3B or Kimi-Linear-tiny; or a folder with a config.json.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of the random inputs.")]
OutputFile = Annotated[
    Path | None,
    typer.Option("--output", callback=writable, help="Also write the results to this file, as JSON."),
]

_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


def parse_value(text: str) -> Any:
    """An integer, a float, true, false, none, a list with commas, else the text itself (names of dtypes among them)."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.IGNORECASE):
        return float(text)
    if "," in text:
        return tuple(parse_value(part) for part in text.split(",") if part.strip())
    return text


def _pair(text: str, option: str, example: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name.strip() or not value.strip():
        raise ArgumentError(f"{option} takes NAME=VALUE, got {text!r}", fix=f"write {option} {example}")
    return name.strip(), value.strip()


def parse_settings(texts: Iterable[str] | None) -> dict[str, Any]:
    """--set NAME=VALUE, any number of times; the last one of a name counts."""
    return {name: parse_value(value) for name, value in (_pair(t, "--set", "NAME=VALUE") for t in texts or ())}


def parse_counts(text: str, option: str, example: str) -> list[int]:
    """Counts of tokens or the like from 1k,8k,1M or plain numbers: k is 1,024, M is 1,048,576. Raises ArgumentError."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)([kKmM]?)", part.strip())
        if match is None:
            raise ArgumentError(f"{option} takes numbers with commas, got {text!r}", fix=f"write {option} {example}")
        found.append(int(match[1]) * _UNITS[match[2].lower()])
    return found


def parse_dims(texts: Iterable[str] | None) -> dict[str, int]:
    """--dims T=8192,H=96, any number of times."""
    found: dict[str, int] = {}
    for text in texts or ():
        for part in text.split(","):
            name, value = _pair(part, "--dims", "T=8192,H=96")
            if not re.fullmatch(r"[+-]?\d+", value):
                raise ArgumentError(f"dim {name} must be an integer, got {value!r}", fix="write --dims T=8192,H=96")
            if found.setdefault(name, int(value)) != int(value):
                raise ArgumentError(f"dim {name} is given as {found[name]} and as {value}", fix="give it once")
    return found


def target_named(name: str | None, fallback: str | None = None) -> Target:
    """The target of that name; without one this machine's GPU, else `fallback`."""
    from k3dsl.targets import all_targets, detect, get_target

    if name is not None:
        return get_target(name)
    here = detect()
    if here is not None:
        return here
    if fallback is None:
        known = ", ".join(target.name for target in all_targets())
        raise ArgumentError(
            "no target is named, and there is no GPU here to take it from", fix=f"--target one of {known}"
        )
    return get_target(fallback)


def generating_backend(name: str) -> str:
    """A backend that generates code. Raises ArgumentError for another."""
    from k3dsl.runtime.executable import BACKENDS
    from k3dsl.runtime.op import check_names

    check_names("backend", [name], list(BACKENDS))
    if name == "torch":
        raise ArgumentError(
            "the torch backend runs the IR directly and generates no code",
            fix="use --backend triton or tilelang; `k3dsl run` runs it",
        )
    return name


def device_for(backend: str | None) -> torch.device:
    """Where a backend runs: torch on the CPU, the others on the GPU; None takes the GPU if there is one."""
    import torch

    from k3dsl.runtime.dispatch import current_target
    from k3dsl.runtime.executable import BACKENDS
    from k3dsl.runtime.op import check_names

    if backend is not None:
        check_names("backend", [backend], list(BACKENDS))
    if backend == "torch" or (backend is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ArgumentError(
            f"backend {backend} runs on a GPU, and torch sees none here",
            fix="use --backend torch, or `k3dsl compile` to build for a GPU elsewhere",
        )
    device = torch.device("cuda", torch.cuda.current_device())
    current_target(device)
    return device
