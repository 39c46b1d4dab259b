"""RMSNorm of every head times an output gate: kernel, reference, knobs and the torch function."""
