"""The torch backend: evaluates any kernel on torch tensors, as the CPU backend and as the judge of the others."""

from k3dsl.backends.torch.dtypes import from_torch, to_torch
from k3dsl.backends.torch.evaluate import Evaluator, evaluate

__all__ = ["Evaluator", "evaluate", "from_torch", "to_torch"]
