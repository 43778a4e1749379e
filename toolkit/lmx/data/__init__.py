"""Datasets: readers, formats, chat templates, tokenization, batching and caches."""
