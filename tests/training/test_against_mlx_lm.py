"""Defects of the trainer of mlx-lm 0.32.2, and the tests that lmx lacks them.

If a defect is cheap to show, the test shows it on the same data. This proves that the
check can tell the two trainers apart.
"""

import copy
import importlib
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import pytest
import yaml
from lmx.config.lora import LoRAConfig
from lmx.data import tokenization
from lmx.data.batching import Batch, BucketBatchSampler
from lmx.data.record_formats import DataRecord
from lmx.data.tokenization import Example
from lmx.models.hooks import find_blocks
from lmx.models.loader import load_tokenizer
from lmx.models.lora import lora_model
from lmx.models.lora.layers import DoRALinear
from lmx.training.gradient_checkpointing import checkpointed
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner import datasets, dora, trainer
from mlx_lm.tuner.utils import linear_to_lora_layers
from tiny_families import member
from tiny_llamas import llama, tokens_of
from tiny_steps import make_step

THIS_FILE = "training/test_against_mlx_lm.py"
DEFECTS = {
    "the sort by length does nothing": [
        f"{THIS_FILE}::test_batching_by_length_limits_padding"
    ],
    "accumulation is a mean of means": [
        f"{THIS_FILE}::test_accumulation_weighs_tokens_equally",
        "training/test_gradient_accumulation.py::test_accumulated_gradients_equal_one_batch",
    ],
    "a sequence without trained tokens makes everything NaN": [
        f"{THIS_FILE}::test_batch_without_trained_tokens_has_no_nan",
        "data/test_tokenization.py::test_long_records_are_truncated_or_dropped",
    ],
    "resuming restores nothing but weights": [
        "training/test_checkpoint.py::test_resume_is_bit_exact_for_every_optimizer",
        "training/test_trainer.py::test_resume_after_kill_is_exact",
        "pipeline/test_resume.py::test_run_resumes_after_kill",
    ],
    "the cache of freed memory is emptied after every step": [
        f"{THIS_FILE}::test_step_does_not_clear_the_memory_cache",
    ],
    "gradient checkpointing permanently patches a class": [
        f"{THIS_FILE}::test_checkpointing_affects_one_model_temporarily",
        "training/test_gradient_checkpointing.py::test_checkpointing_leaves_other_modules_unchanged",
        "training/test_families.py::test_families_have_equal_gradients_with_less_memory",
    ],
    "DoRA on 3, 5 and 6 bits crashes": [
        f"{THIS_FILE}::test_dora_works_on_3_5_and_6_bits"
    ],
    "full fine-tuning skips embeddings, final norm and head": [
        f"{THIS_FILE}::test_full_fine_tuning_trains_all_parameters",
        "training/test_families.py::test_families_train_in_full",
    ],
    "bfloat16 weights do not change": [
        f"{THIS_FILE}::test_small_learning_rates_change_bfloat16_weights",
        "training/test_step.py::test_master_weights_are_float32",
    ],
    "gradients are not clipped": [
        "training/test_step.py::test_step_clips_the_joint_norm",
        "training/test_gradient_accumulation.py::test_clipping_applies_to_accumulated_gradients",
    ],
    "adapters are attached to routers": [
        f"{THIS_FILE}::test_adapters_skip_routers",
        "models/test_target_modules.py::test_attach_skips_routers",
    ],
    "only the last turn of a chat is trained": [
        f"{THIS_FILE}::test_every_assistant_turn_is_trained",
        "data/test_tokenization.py::test_all_assistant_turns_are_trained_with_end_of_turn",
    ],
    "the import permanently lowers the limit on open files": [
        f"{THIS_FILE}::test_import_keeps_the_open_file_limit",
        "models/test_model_loader.py::test_importing_mlx_lm_keeps_the_limit_on_open_files",
    ],
    "fusing into a quantized model loses the adapter": [
        "pipeline/test_adapters_of_quantized_models.py::test_adapter_improvement_survives_dense_export_only",
    ],
}


@pytest.mark.parametrize("test", sorted({t for ts in DEFECTS.values() for t in ts}))
def test_defect_table_names_existing_tests(test):
    path, name = test.split("::")
    text = (Path(__file__).parents[1] / path).read_text()
    assert re.search(rf"^def {name}\(", text, re.MULTILINE)


def padding(batches) -> float:
    """The share of padding in batches of ones."""
    batches = [np.array(batch) for batch in batches]
    return 1 - sum(b.sum() for b in batches) / sum(b.size for b in batches)


class Tokens(list):
    """A dataset of mlx-lm's trainer, which takes the length only of a mapping."""

    def process(self, record):
        return record["tokens"], 0


def test_batching_by_length_limits_padding():
    token_lists = [[1] * length for length in (20, 250) * 16]
    data = datasets.CacheDataset(Tokens({"tokens": record} for record in token_lists))
    theirs = trainer.iterate_batches(data, 4, 512)
    examples = [
        Example(np.array(r, np.int32), np.array(r) > 0, "f:1") for r in token_lists
    ]
    ours = BucketBatchSampler(examples, max_seq_length=512, batch_size=4).in_order()
    assert padding(tokens for tokens, _ in theirs) > 0.4
    assert padding(batch.tokens for batch in ours) < 0.2


def gradients(step, window):
    step(window, 0.0, 0)
    return np.concatenate(
        [
            np.array(step.optimizer.state[k]["v"]).ravel()
            for k in sorted(step.parameters)
        ]
    )


def mean_of_means(model, window):
    """Gradients accumulated as in mlx-lm's trainer: a mean of means."""

    def loss(parameters, tokens, mask):
        model.update(parameters)
        logits = model(tokens[:, :-1])
        losses = nn.losses.cross_entropy(logits, tokens[:, 1:]) * mask
        return losses.sum() / mask.sum()

    result = [mx.grad(loss)(model.parameters(), b.tokens, b.mask) for b in window]
    total = dict(tree_flatten(tree_map(lambda *g: sum(g) / len(g), *result)))
    return np.concatenate([np.array(total[k]).ravel() for k in sorted(total)])


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_accumulation_weighs_tokens_equally():
    long, short = tokens_of(4, 12, seed=1), tokens_of(4, 12, seed=2)
    few = mx.zeros_like(short.mask)
    few[0, :3] = True
    short = Batch(short.tokens, few, ())
    tokens = mx.concatenate([long.tokens, short.tokens])
    joined = Batch(tokens, mx.concatenate([long.mask, short.mask]), ())
    expected = gradients(make_step(llama()[0], name="sgd"), joined)
    ours = gradients(make_step(llama()[0], name="sgd"), [long, short])
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)
    assert cosine(mean_of_means(llama()[0], [long, short]), expected) < 0.9


def test_batch_without_trained_tokens_has_no_nan():
    batch = tokens_of()
    nothing = Batch(batch.tokens, mx.zeros_like(batch.mask), ())
    model, _ = llama()
    # The mask of mlx-lm for a truncated prompt: the start is past the end.
    beyond = mx.array([[99, 99]] * len(batch.tokens))
    assert mx.isnan(trainer.default_loss(model, batch.tokens, beyond)[0])
    step = make_step(model)
    before = dict(step.parameters)
    assert [v.item() for v in step(nothing, 1e-2, 0)[:4]] == [0.0, 1.0, 0.0, 0.0]
    assert all(mx.array_equal(v, before[k]) for k, v in step.parameters.items())


def test_step_does_not_clear_the_memory_cache(monkeypatch):
    """MLX clears its cache itself, above its limit."""
    calls = []
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append(1))
    step, batch = make_step(llama()[0]), tokens_of()
    for seed in range(3):
        mx.eval(step(batch, 1e-3, seed), step.parameters)
    assert calls == []
    trainer._clear_cache(trainer.TrainingArgs().clear_cache_threshold)
    assert calls == [1]


def test_checkpointing_affects_one_model_temporarily():
    model, teacher = llama()[0], llama()[0]
    block_class = type(model.layers[0])
    plain = block_class.__call__
    with checkpointed(find_blocks(model)):
        assert block_class.__call__ is plain
        assert type(teacher.layers[0]) is block_class
    assert type(model.layers[0]) is block_class
    try:
        trainer.grad_checkpoint(model.layers[0])
        assert type(teacher.layers[0]).__call__ is not plain
    finally:
        block_class.__call__ = plain


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_dora_works_on_3_5_and_6_bits(bits):
    dense = nn.Linear(64, 48)
    quantized = nn.QuantizedLinear.from_linear(dense, group_size=32, bits=bits)
    x = mx.random.normal((5, 64), key=mx.random.key(0))
    layer = DoRALinear(quantized, 4, 2.0, 0.0, mx.random.key(1))
    assert mx.allclose(layer(x), quantized(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="matmul"):
        mx.eval(dora.DoRALinear.from_base(quantized, r=4)(x))


class Arguments(SimpleNamespace):
    """Arguments of mlx-lm's trainer; a missing one is None."""

    def __getattr__(self, _):
        return None


def test_full_fine_tuning_trains_all_parameters(monkeypatch, tmp_path):
    model, _ = llama(tie_word_embeddings=False)
    everything = dict(tree_flatten(model.parameters())).keys()
    assert make_step(model).parameters.keys() == everything
    # The import changes the resolvers of PyYAML for the whole process.
    resolvers = copy.deepcopy(yaml.SafeLoader.yaml_implicit_resolvers)
    monkeypatch.setattr(yaml.SafeLoader, "yaml_implicit_resolvers", resolvers)
    theirs = importlib.import_module("mlx_lm.lora")
    monkeypatch.setattr(theirs, "train", lambda **_: None)
    arguments = Arguments(
        seed=0,
        num_layers=2,
        fine_tune_type="full",
        adapter_path=str(tmp_path),
        learning_rate=1e-4,
        optimizer="adam",
        optimizer_config={},
        iters=1,
        max_seq_length=8,
    )
    theirs.train_model(arguments, model, [], [])
    trained = dict(tree_flatten(model.trainable_parameters())).keys()
    left_out = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert everything - trained == left_out


def weight_changes(model, weights_after) -> np.ndarray:
    """Changes of the weights of a bfloat16 model, as one vector."""
    before = {k: v.astype(mx.float32) for k, v in tree_flatten(model.parameters())}
    after = weights_after(model)
    parts = [after[k].astype(mx.float32) - before[k] for k in sorted(before)]
    return np.concatenate([np.array(part).ravel() for part in parts])


@pytest.mark.slow
def test_small_learning_rates_change_bfloat16_weights():
    """Twenty steps of Adam at 1e-6. Rounding to bfloat16 loses most updates."""
    tokens = tokens_of().tokens
    batch = Batch(tokens, mx.ones((len(tokens), tokens.shape[1] - 1), mx.bool_), ())

    def bfloat16_model():
        model, _ = llama()
        model.set_dtype(mx.bfloat16)
        return model

    def by_step(compute):
        def train(model):
            step = make_step(model, compute_dtype=compute)
            for seed in range(20):
                mx.eval(step(batch, 1e-6, seed), step.parameters)
            return step.parameters

        return train

    def by_mlx_lm(model):
        optimizer = optimizers.Adam(1e-6, [0.9, 0.95], bias_correction=True)
        gradient = nn.value_and_grad(model, trainer.default_loss)
        lengths = mx.array([[1, tokens.shape[1]]] * len(tokens))
        for _ in range(20):
            optimizer.update(model, gradient(model, tokens, lengths)[1])
            mx.eval(model.parameters(), optimizer.state)
        return dict(tree_flatten(model.parameters()))

    exact = weight_changes(bfloat16_model(), by_step(mx.float32))
    assert cosine(weight_changes(bfloat16_model(), by_step(mx.bfloat16)), exact) > 0.95
    assert cosine(weight_changes(bfloat16_model(), by_mlx_lm), exact) < 0.5


def test_adapters_skip_routers():
    keys = lora_model.attach(member("qwen3_moe"), LoRAConfig(rank=1), seed=0)
    assert "mlp.switch_mlp.up_proj" in keys
    assert "mlp.gate" not in keys
    model = member("qwen3_moe")
    linear_to_lora_layers(model, 2, {"rank": 1, "scale": 1.0, "dropout": 0.0})
    assert "lora_a" in model.layers[0].mlp.gate


def test_every_assistant_turn_is_trained(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    turns = ["1+1?", "2 it is", "2+2?", "4 it is"]
    roles = ("user", "assistant") * 2
    messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]

    record = DataRecord("f:1", messages=messages)
    [example] = tokenization.encode(record, tokenizer, max_seq_length=999)
    ours = tokenizer.decode(example.tokens[example.mask].tolist())
    assert "2 it is" in ours
    assert "4 it is" in ours
    chats = datasets.ChatDataset([], tokenizer, mask_prompt=True)
    tokens, offset = chats.process({"messages": messages})
    theirs = tokenizer.decode(tokens[offset:])
    assert "2 it is" not in theirs
    assert "4 it is" in theirs


LIMIT = """
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (4000, hard))
import {module}
{work}
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (4000, hard))
"""


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="the limit is low"
)
@pytest.mark.parametrize(
    ("module", "work", "unchanged"),
    [
        ("lmx.cli.main", "", True),
        ("lmx.pipeline.train", "", True),
        (
            "lmx.models.loader",
            "lmx.models.loader.model_classes({'model_type': 'llama'})",
            True,
        ),
        ("mlx_lm.utils", "", False),
    ],
)
def test_import_keeps_the_open_file_limit(module, work, unchanged):
    code = LIMIT.format(module=module, work=work)
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert done.stdout.split()[-1] == str(unchanged)
