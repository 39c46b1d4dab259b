"""Kimi Delta Attention: kernels, reference, inputs, knobs and the torch functions."""
