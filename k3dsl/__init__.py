"""A tile language and kernel compiler for the operators of the Kimi K3 network."""

__version__ = "0.1.0"
