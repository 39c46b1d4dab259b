"""The command line, top of the stack."""
