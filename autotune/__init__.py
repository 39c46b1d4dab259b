"""The search for the fastest correct configuration of an operator on a GPU."""
