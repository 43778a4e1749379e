"""Mixed precision: bits and group size by layer for a target size."""
