"""Rewrites and analyses of the IR, one small module each."""
