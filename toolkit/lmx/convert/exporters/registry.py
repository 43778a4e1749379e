"""The export formats by the name that a recipe gives them."""

from . import gguf, hf, mlx, peft

FORMATS = {"mlx": mlx, "dense": hf, "peft": peft, "gguf": gguf}
