"""Every environment variable that k3dsl reads: its name, type, default and meaning, in one registry."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import platformdirs

from k3dsl.errors import ArgumentError, UnknownNameError

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable. It is read when `value` is called, so that a test or a program can change it.

    type: how a person would name the values ('folder', 'yes or no', or the choices). default: a function, since some
    defaults depend on the machine. parse: turns the text into a value and raises ValueError, saying what is expected.
    """

    name: str
    type: str
    default: Callable[[], T]
    parse: Callable[[str], T]
    doc: str

    def is_set(self) -> bool:
        """Whether the environment has a value; an empty one counts as unset."""
        return bool(os.environ.get(self.name, "").strip())

    def value(self) -> T:
        """The environment's value, or the default.

        Raises ArgumentError when the environment's value is not one that this setting can take.
        """
        if not self.is_set():
            return self.default()
        text = os.environ[self.name].strip()
        try:
            return self.parse(text)
        except ValueError as error:
            raise ArgumentError(
                f"the environment variable {self.name} is {text!r}, which is not {error}",
                fix=f"set {self.name} to {error}, or unset it (default: {self.default()})",
            ) from None


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text.lower()

    return parse


def _flag(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError("1 or 0 (or true, yes, on; false, no, off)")
    return words[text.lower()]


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError("a folder, or a path where one can be made")
    return path.absolute()


def _pack(text: str) -> Path | str:
    if text.lower() in ("auto", "off"):
        return text.lower()
    path = Path(text).expanduser()
    if path.is_dir():
        raise ValueError("auto, off, or a pack's file")
    return path.absolute()


_BACKENDS = ("auto", "torch", "triton", "tilelang")

CACHE_DIR: Setting[Path] = Setting(
    name="K3DSL_CACHE_DIR",
    type="folder",
    default=lambda: Path(platformdirs.user_cache_dir("k3dsl", appauthor=False)),
    parse=_folder,
    doc="Where generated sources and built kernels are kept between runs.",
)

BACKEND: Setting[str] = Setting(
    name="K3DSL_BACKEND",
    type=" | ".join(_BACKENDS),
    default=lambda: "auto",
    parse=_choice(*_BACKENDS),
    doc="The backend that runs a kernel. auto: triton for tensors on a GPU, torch for tensors on the CPU.",
)

CHECK: Setting[bool] = Setting(
    name="K3DSL_CHECK",
    type="1 | 0",
    default=lambda: True,
    parse=_flag,
    doc="Whether CPU runs are checked for two writers of one element and reads of what another writes; bounds always are.",
)

DUMP: Setting[Path | None] = Setting(
    name="K3DSL_DUMP",
    type="folder",
    default=lambda: None,
    parse=_folder,
    doc="A folder that every generated source is also written to. Unset: none is.",
)

PACK: Setting[Path | str] = Setting(
    name="K3DSL_PACK",
    type="auto | off | file",
    default=lambda: "auto",
    parse=_pack,
    doc="Tuned settings that ops pick up. auto: this machine's winners, then the pack of its GPU. off: none of either.",
)

_REGISTRY: dict[str, Setting[Any]] = {setting.name: setting for setting in (CACHE_DIR, BACKEND, CHECK, DUMP, PACK)}


def all() -> tuple[Setting[Any], ...]:
    """Every setting, in the order in which `k3dsl doctor` shows them."""
    return tuple(_REGISTRY.values())


def get(name: str) -> Any:
    """The value of the setting with this environment variable's name, such as 'K3DSL_CACHE_DIR'.

    Raises UnknownNameError for a name that is no setting, ArgumentError for a value that the setting cannot take.
    """
    if name not in _REGISTRY:
        raise UnknownNameError(f"unknown setting {name!r}", fix=_near(name))
    return _REGISTRY[name].value()


def misspelt() -> dict[str, str]:
    """Variables of the environment that start with K3DSL_ but are no setting, each with what to do about it."""
    return {name: _near(name) for name in sorted(os.environ) if name.startswith("K3DSL_") and name not in _REGISTRY}


def _near(name: str) -> str:
    known = ", ".join(_REGISTRY)
    near = difflib.get_close_matches(name.upper(), _REGISTRY, n=1, cutoff=0.6)
    return f"did you mean {near[0]}? The settings are {known}" if near else f"the settings are {known}"
