"""Tiny random models of three attention kinds, and a byte-level tokenizer."""

import json
from dataclasses import asdict
from itertools import pairwise

import mlx.core as mx
from lmx.generation.generator import Generator
from lmx.generation.harmony import MARKS
from mlx.utils import tree_flatten

VOCABULARY = 260  # 256 bytes, then four special tokens


def byte_tokenizer(eos=("<|im_end|>",), template=None):
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|end|>", "<|pad|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe)
    fast.chat_template = template
    return TokenizerWrapper(
        fast,
        BPEStreamingDetokenizer,
        eos_token_ids=[fast.convert_tokens_to_ids(token) for token in eos],
    )


def thinking_tokenizer(template=None):
    """A byte tokenizer whose last two tokens begin and end a chain of thought."""
    tokenizer = byte_tokenizer(template=template)
    tokenizer._think_start, tokenizer._think_end = "<|end|>", "<|pad|>"
    tokenizer._think_start_tokens, tokenizer._think_end_tokens = (258,), (259,)
    return tokenizer


def harmony_tokenizer(template=None):
    """A byte tokenizer with the marks of gpt-oss, in a vocabulary of its own size."""
    tokenizer = byte_tokenizer(eos=("<|im_end|>",), template=template)
    tokenizer.add_tokens([*MARKS, "<|constrain|>"], special_tokens=True)
    return tokenizer


def _llama():
    from mlx_lm.models import llama

    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=VOCABULARY,
            max_position_embeddings=400,
        )
    )


def _qwen3():
    from mlx_lm.models import qwen3

    return qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-6,
            vocab_size=VOCABULARY,
            max_position_embeddings=400,
            rope_theta=10000.0,
            tie_word_embeddings=False,
        )
    )


def _gemma3():
    """Two of its three layers have a sliding window of 16 tokens."""
    from mlx_lm.models import gemma3_text

    return gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=32,
            num_hidden_layers=3,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=16,
            vocab_size=VOCABULARY,
            sliding_window=16,
            sliding_window_pattern=3,
            max_position_embeddings=400,
        )
    )


MODELS = {"llama": _llama, "qwen3": _qwen3, "gemma3": _gemma3}


def tiny(name):
    """Random weights, scaled up so that the most likely token changes all the time."""
    from mlx.utils import tree_map

    mx.random.seed(3)
    model = MODELS[name]()
    model.update(
        tree_map(
            lambda w: w + 0.3 * mx.random.normal(w.shape, dtype=w.dtype),
            model.parameters(),
        )
    )
    mx.eval(model.parameters())
    return model


def chatting():
    """A tiny Llama and a tokenizer with a chat template."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return Generator(tiny("llama"), byte_tokenizer(template=template))


def write_folder(generator, folder):
    """Write the generator's model as a checkpoint."""
    generator.tokenizer.eos_token = "<|im_end|>"
    generator.tokenizer.save_pretrained(folder)
    config = json.dumps(asdict(generator.model.args))
    (folder / "config.json").write_text(config)
    weights = dict(tree_flatten(generator.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


class Scripted:
    """A model without weights that continues every token as the script does."""

    def __init__(self, script):
        self.after = dict(pairwise(script))
        self.calls = []

    def __call__(self, tokens, cache=None):
        if cache is not None:
            self.calls.append(tokens.shape)
        successors = [
            [self.after.get(t, 0) for t in sequence] for sequence in tokens.tolist()
        ]
        return mx.array(successors)[..., None] == mx.arange(VOCABULARY)

    def make_cache(self):
        return []


class Played:
    """A model that plays tokens back by their position; see `Scripted`."""

    def __init__(self, tokens, vocabulary):
        self.model, self.args = tiny("llama"), None
        self.tokens, self.vocabulary = [*tokens, *[0] * 400], vocabulary

    def __call__(self, tokens, cache=None):
        start = cache[0].offset if cache else 0
        self.model(tokens % VOCABULARY, cache=cache)
        following = self.tokens[start + 1 : start + 1 + tokens.shape[1]]
        row = mx.array(following)[:, None] == mx.arange(self.vocabulary)
        return mx.broadcast_to(10.0 * row, (len(tokens), *row.shape))

    def make_cache(self):
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)


def scripted(text, *, ids=(), **options):
    tokenizer = byte_tokenizer(**options)
    script = [*tokenizer.encode("^" + text), *ids]
    return Generator(Scripted(script), tokenizer), tokenizer.encode("^")
