"""The export formats by the name that a recipe gives them."""

from . import gguf, hf, mlx, peft

FORMATS = {"mlx": mlx, "hf": hf, "peft": peft, "gguf": gguf}
