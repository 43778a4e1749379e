"""The run directory: manifest, whole files, logger, trackers, report, process group."""
