"""Sums of ragged segments: kernel, reference, knobs and the torch function."""
