"""Models: loading, building, adapting, quantizing while training."""
