"""Softmax attention, forward: kernel, reference, knobs and the torch function."""
