"""Softmax over rows: kernel, reference, knobs and the torch function."""
