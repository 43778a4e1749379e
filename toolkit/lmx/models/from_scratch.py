"""Models from scratch: configuration, byte-level BPE tokenizer, initial weights."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from ..config.model import ScratchModelConfig
from .dtypes import DTYPES
from .loader import build_model

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# ChatML; the generation markers tell other tools where the assistant's tokens are.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE and write the files of a chat tokenizer.

    Every digit is one token, so that numbers of any length are split alike.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    # A completion ends with the end of a turn or the end of a document.
    generation_config = {"eos_token_id": [2, 0], "pad_token_id": 0}
    _write_json(folder / "generation_config.json", generation_config)


def llama_config(scratch: ScratchModelConfig) -> dict:
    """The config.json, in Hugging Face's keys, of a Llama-type model."""
    config, heads = scratch.model_dump(), scratch.num_attention_heads
    dtype = config.pop("dtype")
    # Most keys have Hugging Face's names.
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": scratch.num_key_value_heads or heads,
        "head_dim": scratch.hidden_size // heads,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
    }


def initial_weights(config: dict, seed: int) -> dict[str, mx.array]:
    """Normal weights of standard deviation 0.02, smaller in residual projections.

    GPT-2's rule: the two projections of a block that add to the residual stream are
    scaled by 1 / sqrt(2 * layers). Norm weights stay one.
    """
    residual_std = 0.02 / math.sqrt(2 * config["num_hidden_layers"])
    key = mx.random.key(seed)
    weights = {}
    for path, value in tree_flatten(build_model(config).parameters()):
        if value.ndim > 1:
            key, value_key = mx.random.split(key)
            is_residual = path.endswith(("o_proj.weight", "down_proj.weight"))
            std = residual_std if is_residual else 0.02
            value = mx.random.normal(value.shape, scale=std, key=value_key)
        weights[path] = value.astype(DTYPES[config["torch_dtype"]])
    return weights


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
