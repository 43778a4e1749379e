"""Everything that makes MLX fast on Linux CPUs."""
