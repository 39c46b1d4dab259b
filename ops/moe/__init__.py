"""Stable LatentMoE: the router, sorting by expert, grouped expert products, SiTU, and the whole block."""
