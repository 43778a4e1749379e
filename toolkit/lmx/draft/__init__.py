"""Draft models for speculative decoding: training data, losses and benchmarks."""
