"""The network in PyTorch, built from the operators."""
