"""Compiling, launching, bundles and dispatch."""
