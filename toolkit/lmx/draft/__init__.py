"""Draft models: small ones that guess what a large one will say."""
