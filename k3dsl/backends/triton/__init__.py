"""The Triton backend: prints IR as a Triton module, builds, inspects and loads it."""
