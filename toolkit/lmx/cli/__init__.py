"""The command line: `lmx-train` and the verbs of `lmx`."""
