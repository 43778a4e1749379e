"""The version of the package, which a build reads without importing anything else."""

__version__ = "0.1.0"
