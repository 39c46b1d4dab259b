"""RMSNorm in Llama's form: kernel, reference, knobs and the torch function."""
