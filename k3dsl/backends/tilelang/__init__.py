"""The TileLang backend. TileLang itself is imported only when a kernel is lowered, built or launched through it."""
