"""What GRPO and on-policy distillation change: means over seeds.

All trainings are recipes with `data/tiny-base` or another chat model, and held-out
questions. Finished runs in FOLDER are not repeated.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from lmx import cpu

sys.path.append(str(Path(__file__).parents[1]))
from programs import DATA

# Skills with many questions that 10 to 90 % of tiny-base's samples answer: 84 to 90 %.
SKILLS = ("compare", "count_letter", "count_words", "date")
# Temperature and completions per question.
KINDS = {"greedy": (0.0, 1), "sampled": (1.0, 4)}
GRID = {"bits": 4, "group_size": 64}
COARSE_GRID = {"bits": 2, "group_size": 32}
LORA = {"type": "lora", "rank": 16}
MAX_SEQ_LENGTH = 64
BATCH_SIZE = 128


def main() -> None:
    arguments = _arguments()
    cpu.enable()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    CASES[arguments.case](arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="keeps all runs")
    parser.add_argument(
        "--model", type=Path, default=DATA / "tiny-base", help="a chat model"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=16, help="prompts")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--num-generations", type=int, default=8, help="of GRPO")
    parser.add_argument("--max-tokens", type=int, default=12, help="of a completion")
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 4], help="of GRPO")
    parser.add_argument(
        "--questions", type=Path, help="default: data/skills/test.jsonl"
    )
    return parser.parse_args()


def grpo(arguments: argparse.Namespace) -> None:
    """GRPO on some skills: greedy and sampled exact match, before and after."""
    train, valid, questions = (
        _select(arguments.folder, source)
        for source in (
            DATA / "skills/train.jsonl",
            DATA / "skills/valid.jsonl",
            arguments.questions or DATA / "skills/test.jsonl",
        )
    )
    print(f"{arguments.model.name}; skills: {', '.join(SKILLS)}")
    row = "{:>5}  {:10}{:>8}{:>9}{:>7}   {}"
    print(row.format("bits", "completion", "before", "change", "±", "by seed"))
    for bits in arguments.bits:
        stages = [] if bits == 16 else [{"quantize": {"method": "rtn"} | _grid(bits)}]
        start = _run(arguments, f"start-{bits}", stages) if stages else arguments.model
        block = _train_block(arguments) | {
            "adapter": LORA,
            "loss": {"type": "grpo", "rewards": ["exact_match"]},
            "rollouts": {
                "num_generations": arguments.num_generations,
                "max_tokens": arguments.max_tokens,
            },
        }
        if bits < 16:
            block["qat"] = _grid(bits)
        before = _answers(arguments, start, questions)
        after = [
            _answers(
                arguments,
                _run(
                    arguments,
                    f"grpo-{bits}-{seed}",
                    [{"train": block}],
                    train,
                    valid,
                    seed,
                ),
                questions,
            )
            for seed in arguments.seeds
        ]
        for kind in before:
            first = before[kind]
            changes = [run[kind] - first for run in after]
            by_seed = " ".join(f"{100 * change.mean():+.1f}" for change in changes)
            change = np.mean(changes, axis=0)
            values = (first.mean(), change.mean(), change.std() / len(first) ** 0.5)
            cells = (f"{100 * value:.1f} %" for value in values)
            print(row.format(bits, kind, *cells, by_seed), flush=True)


def distillation(arguments: argparse.Namespace) -> None:
    """On-policy distillation of a 2-bit model, and the same tokens of the dataset."""
    data = [DATA / "skills" / f"{name}.jsonl" for name in ("train", "valid")]
    questions = arguments.questions or DATA / "skills/test.jsonl"
    shared = _train_block(arguments) | {
        "qat": COARSE_GRID,
        "teacher": {"loss": "reverse_kl"},
    }
    rollouts = {"num_generations": 1, "max_tokens": arguments.max_tokens}
    quantized = _run(arguments, "rtn", [{"quantize": {"method": "rtn"} | COARSE_GRID}])
    runs: dict[str, list[dict]] = {"before": [], "dataset": [], "on-policy": []}
    for seed in arguments.seeds:
        name = f"on-policy-{seed}"
        block = {"train": shared | {"rollouts": rollouts}}
        on_policy = _run(arguments, name, [block], *data, seed)
        trained = _trained_tokens(arguments.folder / name)
        # So many examples have the same number of trained tokens.
        size = round(trained / arguments.steps / _mean_completion(arguments, data[0]))
        block = {"train": shared | {"batch_size": max(1, size)}}
        dataset = _run(arguments, f"dataset-{seed}", [block], *data, seed)
        for method, model in (
            ("before", quantized),
            ("dataset", dataset),
            ("on-policy", on_policy),
        ):
            runs[method].append(_divergences(arguments, model, questions, seed))
        runs["dataset"][-1]["tokens"] = _trained_tokens(
            arguments.folder / f"dataset-{seed}"
        )
        runs["on-policy"][-1]["tokens"] = trained
    print("KL to the unquantized model in nats per token, means over seeds")
    row = "{:12}{:>16}{:>16}{:>14}{:>10}"
    print(row.format("trained on", "own samples", "dataset", "exact match", "tokens"))
    for method, results in runs.items():
        kinds = [("own", ".4f"), ("dataset", ".4f"), ("exact_match", ".3f")]
        cells = [_mean_cell([run[key] for run in results], form) for key, form in kinds]
        tokens = mean(run.get("tokens", 0) for run in results)
        print(row.format(method, *cells, f"{tokens:,.0f}"))
    for key in ("own", "dataset"):
        pairs = zip(runs["on-policy"], runs["dataset"], strict=True)
        ratios = [one[key] / other[key] for one, other in pairs]
        print(f"on-policy / dataset, KL on {key}: {_mean_cell(ratios, '.3f')}")


CASES = {"grpo": grpo, "distillation": distillation}


def _grid(bits: int) -> dict:
    return GRID | {"bits": bits}


def _train_block(arguments: argparse.Namespace) -> dict:
    return {
        "steps": arguments.steps,
        "batch_size": arguments.batch_size,
        "learning_rate": arguments.learning_rate,
        "eval_steps": arguments.steps,
        "eval_batches": 2,
        "logging_steps": 1,
    }


def _run(
    arguments: argparse.Namespace,
    name: str,
    stages: list[dict],
    train: Path | None = None,
    valid: Path | None = None,
    seed: int = 0,
) -> Path:
    """Run a recipe in FOLDER / NAME; returns its model."""
    import lmx

    recipe = {"model": str(arguments.model), "seed": seed}
    if train:
        recipe["data"] = {"train": str(train), "valid": str(valid)}
        recipe["data"]["max_seq_length"] = MAX_SEQ_LENGTH
    recipe["stages"] = [*stages, {"export": {"formats": ["mlx"]}}]
    run = lmx.train(recipe, output=arguments.folder / name, quiet=True)
    return run.model_path


def _select(folder: Path, source: Path) -> Path:
    """A file with the examples of SKILLS."""
    lines = source.read_text().splitlines()
    chosen = [line for line in lines if json.loads(line)["skill"] in SKILLS]
    file = folder / source.name
    file.write_text("\n".join(chosen) + "\n")
    return file


def _records(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def _trained_tokens(folder: Path) -> int:
    return _records(folder, "train")[-1]["trained_tokens"]


def _examples(tokenizer, file: Path) -> list:
    from lmx.data.dataset import RecordReader
    from lmx.data.tokenization import encode_all

    records = list(RecordReader(str(file)))
    return encode_all(records, tokenizer, max_seq_length=MAX_SEQ_LENGTH).examples


def _mean_completion(arguments: argparse.Namespace, file: Path) -> float:
    """Trained tokens per example of a file."""
    from lmx.models.loader import load_tokenizer

    examples = _examples(load_tokenizer(arguments.model), file)
    return mean(int(example.mask.sum()) for example in examples)


def _load(model: Path):
    from lmx.models.loader import load

    loaded = load(model)
    cpu.keep_dequantized(loaded.model)
    return loaded


def _sample(
    arguments: argparse.Namespace, loaded, examples: list, temperature: float, **options
) -> tuple[list, list[list]]:
    """Prompts and completions of the examples; `options` of sample_completions."""
    from lmx.generation.completions import prompt_tokens
    from lmx.generation.rollouts import sample_completions

    prompts = [prompt_tokens(example) for example in examples]
    groups = []
    for start in range(0, len(prompts), BATCH_SIZE):
        groups += sample_completions(
            loaded.model,
            prompts[start : start + BATCH_SIZE],
            max_tokens=arguments.max_tokens,
            temperature=temperature,
            stop_tokens=frozenset(loaded.tokenizer.eos_token_ids),
            **options,
        )
    return prompts, groups


def _answers(arguments, model: Path, questions: Path, kinds=tuple(KINDS)) -> dict:
    """Shares of greedy and of sampled completions that are right, by question."""
    loaded = _load(model)
    examples = _examples(loaded.tokenizer, questions)
    results = {}
    for kind in kinds:
        temperature, count = KINDS[kind]
        prompts, groups = _sample(
            arguments, loaded, examples, temperature, num_generations=count, seed=0
        )
        pairs = zip(examples, prompts, groups, strict=True)
        results[kind] = np.array(
            [_share(loaded, e.tokens[len(p) :], group) for e, p, group in pairs]
        )
    return results


def _share(loaded, answer, completions: list) -> float:
    """The share of completions that equal an answer."""
    expected = _text(loaded, answer)
    return mean(_text(loaded, each.tokens) == expected for each in completions)


def _text(loaded, tokens) -> str:
    return loaded.tokenizer.decode(list(tokens), skip_special_tokens=True).strip()


def _divergences(arguments, model: Path, questions: Path, seed: int) -> dict:
    """KL on the model's own samples and on the dataset, and exact match."""
    from lmx.data.batching import BucketBatchSampler
    from lmx.evaluation.divergence import measure_divergence
    from lmx.generation.completions import completion_example

    teacher, loaded = _load(arguments.model).model, _load(model)
    examples = _examples(loaded.tokenizer, questions)
    prompts, groups = _sample(
        arguments, loaded, examples, 1.0, num_generations=1, seed=seed
    )
    own = [
        completion_example(prompt, completion.tokens, "")
        for prompt, (completion,) in zip(prompts, groups, strict=True)
    ]

    def batches(examples):
        length = max(MAX_SEQ_LENGTH, *(len(example.tokens) for example in examples))
        sampler = BucketBatchSampler(
            examples, max_seq_length=length, batch_size=BATCH_SIZE // 2
        )
        return map(sampler, range(sampler.per_epoch))

    greedy = _answers(arguments, model, questions, ["greedy"])["greedy"]
    return {
        # KL(student || teacher), which the training lowers.
        "own": measure_divergence(loaded.model, teacher, batches(own)).kl_mean,
        # KL(teacher || student), as evaluate stages report it.
        "dataset": measure_divergence(teacher, loaded.model, batches(examples)).kl_mean,
        "exact_match": float(greedy.mean()),
    }


def _mean_cell(values: list[float], form: str) -> str:
    """Mean and standard error over seeds."""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{mean(values):{form}} ± {error:{form}}"


if __name__ == "__main__":
    main()
