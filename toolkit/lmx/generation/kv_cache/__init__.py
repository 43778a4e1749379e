"""KV caches: of a sequence or several, and of prompt prefixes."""
