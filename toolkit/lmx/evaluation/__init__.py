"""Measurements: perplexity, divergence, exact match, lm-eval, latency, gap recovery."""
