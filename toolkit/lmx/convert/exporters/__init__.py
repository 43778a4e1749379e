"""The export formats.

A format is a module with `FOLDER`, its folder in the run directory, and
`export(folder, context)`, which writes the model into an empty folder and verifies it,
and `CARD`, what the model card in the folder says about the format.
`check_supported(config)`, if present, refuses model types that the format cannot hold,
and `check_draft(config, draft)` drafters to be trained for such a model.
"""

from . import gguf, hf, mlx, peft

FORMATS = {"mlx": mlx, "hf": hf, "peft": peft, "gguf": gguf}
