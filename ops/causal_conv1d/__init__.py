"""Depthwise causal convolution of a few taps: kernels, reference, knobs and the torch functions."""
