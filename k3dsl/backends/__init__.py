"""Backends: each turns IR into something that runs, under one contract (base.py)."""
