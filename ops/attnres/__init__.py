"""Block Attention Residuals (AttnRes): kernels, reference, input families, knobs and the torch functions."""
