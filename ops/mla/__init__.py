"""Gated multi-head latent attention (MLA): expanded prefill, absorbed paged decode, and the write into the latent cache."""
