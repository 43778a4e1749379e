"""The recipe: YAML in, a checked plan out."""
