"""The tile language under its public name: `from k3dsl.language import kernel, span, dot, loop, ...`."""

from k3dsl.frontend import *  # noqa: F403
from k3dsl.frontend import __all__ as __all__
