"""The search for the fastest correct settings of an operator: `tune` one, `tune_each` several; how one went is a `Result`."""

from k3dsl.autotune.result import Result
from k3dsl.autotune.tuning import Problem, problem, tune, tune_each

__all__ = ["Problem", "Result", "problem", "tune", "tune_each"]
