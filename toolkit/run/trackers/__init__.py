"""Where figures go besides the run folder: one tracker, one file.

A tracker's file holds its `Config`, a block of the recipe with the file's name as
`type`, and `start(config, ...)`, which gives back something with `log(row)` and
`finish(summary, code)`. All are called in a thread of their own and may raise what they
like: see `tracking.py`.
"""
