"""KV caches: of one sequence, of a batch, of prompt prefixes."""
