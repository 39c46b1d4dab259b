"""The tile IR: types, symbols, ops, printer, parser, verifier. Pure data; imports nothing else of the project."""
