"""The post-training quantization methods by the name that a recipe gives them."""

from . import awq, gptq, rtn

METHODS = {"rtn": rtn.quantize, "gptq": gptq.quantize, "awq": awq.quantize}
