"""The operators of the Kimi K3 network as torch functions, each written once in the tile language."""

# Functions share their names with the folders they live in, so they are bound here, after the folders were imported.
from k3dsl.ops.kda.api import kda, kda_decode

__all__ = ["kda", "kda_decode"]
