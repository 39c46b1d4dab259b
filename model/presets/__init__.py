"""The configurations that have a name, each a config.json as a checkpoint has it."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from k3dsl.errors import UnknownNameError

NAMES = ("K3", "K3-tiny", "K3-slice", "Kimi-Linear-48B-A3B", "Kimi-Linear-tiny")
_SHORT = {"kimik3": "K3", "kimik3tiny": "K3-tiny", "kimik3slice": "K3-slice", "kimilinear48b": "Kimi-Linear-48B-A3B"}


def canonical(name: str) -> str:
    """The name as NAMES spells it; case, '-' and '_' do not matter. Raises UnknownNameError."""
    known = {_plain(one): one for one in NAMES} | _SHORT
    if _plain(name) not in known:
        raise UnknownNameError(f"no configuration is called {name!r}", fix=f"known names: {', '.join(NAMES)}")
    return known[_plain(name)]


def read(name: str) -> dict[str, Any]:
    """The config.json of a named configuration. Raises UnknownNameError."""
    return json.loads(files(__package__).joinpath(f"{canonical(name)}.json").read_text(encoding="utf-8"))


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
