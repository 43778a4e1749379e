"""mlx-dspark drafts with our DFlash drafter as our generator does."""

import json
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from lmx.generation.generator import Generator
from lmx.generation.speculative.dflash import DFlashProposer
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.models.drafters.dflash import DFlashDrafter
from lmx.models.drafters.io import load_drafter, save_drafter
from lmx.models.loader import load
from tiny_dflash import trained_drafter

pytest.importorskip("mlx_vlm")
pytest.importorskip("mlx_dspark")

MAX_TOKENS, NUM_DRAFT_TOKENS = 48, 5
PROMPTS = [
    "the quick brown fox",
    "def add(left, right):",
    "lazy dog 0123",
    "over the lazy",
]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def folders(make_checkpoint, tmp_path_factory):
    """The folder of a target, and that of a drafter trained on the first prompts."""
    target = make_checkpoint(dtype="float32", **SHAPE)
    loaded = load(target)
    plain = Generator(loaded.model, loaded.tokenizer)
    texts = []
    for prompt in PROMPTS[:3]:
        tokens = loaded.tokenizer.encode(prompt)
        options = {"max_tokens": 60 - len(tokens), "stop_tokens": ()}
        texts.append(tokens + plain.generate(tokens, **options).tokens)
    drafter = trained_drafter(
        loaded.model,
        loaded.config,
        texts,
        steps=100,
        num_layers=2,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        layer_ids=[0, 2],
    )
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(folder, drafter, mx.float32)
    return target, folder


def our_rounds(loaded, drafter, prompt):
    """Our tokens, and how many every round gives."""
    lengths = []

    class Counting(DFlashProposer):
        def propose(self, context, *arguments):
            lengths.append(len(context))
            return super().propose(context, *arguments)

    generator = Generator(
        loaded.model,
        loaded.tokenizer,
        make_proposer=lambda cache: Counting(drafter, cache),
        draft_length=DraftLengthController(fixed=NUM_DRAFT_TOKENS),
    )
    tokens = generator.generate(prompt, max_tokens=MAX_TOKENS, stop_tokens=()).tokens
    return tokens, [b - a for a, b in pairwise(lengths)]


@pytest.mark.parametrize("changed", [None, "target_layer_ids", "mask_token_id"])
def test_text_and_accepted_lengths_equal_ours(folders, changed, tmp_path):
    from mlx_dspark.generate import dflash_generate
    from mlx_dspark.load import load_dflash
    from mlx_dspark.target import Target

    target, folder = folders
    loaded = load(target)
    drafter = load_drafter(folder, loaded.model)
    if changed:
        folder = with_other_value(folder, tmp_path, changed)
    theirs, _ = load_dflash(str(folder), quantize=False)
    runner = Target(loaded.model, loaded.tokenizer)
    plain = Generator(loaded.model, loaded.tokenizer)
    our_lengths, their_lengths = [], []
    for prompt in map(loaded.tokenizer.encode, PROMPTS):
        tokens, lengths = our_rounds(loaded, drafter, prompt)
        options = {"max_new_tokens": MAX_TOKENS, "prompt_ids": prompt}
        result = dflash_generate(runner, loaded.tokenizer, theirs, **options)
        expected = plain.generate(prompt, max_tokens=MAX_TOKENS, stop_tokens=())
        # Their last round may pass the limit; they stop at the end of the text.
        count = min(MAX_TOKENS, len(result.token_ids))
        assert result.token_ids[:count] == tokens[:count] == expected.tokens[:count]
        complete = min(len(lengths), len(result.accept_lengths) - 1)
        our_lengths += lengths[:complete]
        their_lengths += result.accept_lengths[:complete]
    accepted_length = np.mean(our_lengths)
    assert accepted_length > 2
    if changed:
        # The controls: an error shows only in the accepted lengths.
        assert np.mean(their_lengths) < 0.9 * accepted_length
    else:
        assert their_lengths == our_lengths


def with_other_value(folder, target, key):
    """A copy of the drafter's folder with another value in config.json."""
    config = json.loads((folder / "config.json").read_text())
    value = {"target_layer_ids": [1, 3], "mask_token_id": 7}[key]
    config[key] = config["dflash_config"][key] = value
    assert DFlashDrafter.from_config(config, place="config.json")
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    return target
