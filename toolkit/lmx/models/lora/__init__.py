"""Low-rank adapters: one file for each kind of layer they wrap."""
