"""Drafters: small networks that draft tokens from the target's hidden states."""
