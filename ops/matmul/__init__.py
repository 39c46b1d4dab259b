"""Matrix product: kernel, reference, knobs and the torch function."""
