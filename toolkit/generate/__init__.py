"""The KV-cached generator."""
