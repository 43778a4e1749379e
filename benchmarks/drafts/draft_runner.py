"""Benchmark one draft model for `draft_quality.py`, as a separate process.

`draft_runner.py SETTINGS` takes JSON with target, draft, data, num_prompts, max_tokens,
temperatures and seed. It prints JSON with the results by temperature.
"""

import json
import sys
from pathlib import Path

PROGRAM = Path(__file__)
MAX_PROMPT_LENGTH = 256


def main() -> None:
    print(json.dumps(run(json.loads(sys.argv[1]))))


def run(settings: dict) -> dict:
    """Time both models, then run the draft benchmark at every temperature."""
    from lmx import cpu

    cpu.enable()
    from lmx.data.dataset import RecordReader
    from lmx.draft.benchmark import DraftBenchmark
    from lmx.draft.candidates import ModelCandidate
    from lmx.draft.cost_model import measure_speculation_costs
    from lmx.draft.dataset import mean_prompt_length, select_prompts
    from lmx.generation.sampling import Sampling
    from lmx.models.loader import load

    target, draft = load(settings["target"]), load(settings["draft"])
    prompts = select_prompts(
        RecordReader(settings["data"], split="valid"),
        target.tokenizer,
        count=settings["num_prompts"],
        max_prompt_tokens=MAX_PROMPT_LENGTH,
    )
    candidate = ModelCandidate(draft.model)
    costs = measure_speculation_costs(
        target.model, candidate, prompt_length=mean_prompt_length(prompts)
    )
    benchmark = DraftBenchmark(
        target.model,
        candidate,
        costs,
        target.tokenizer,
        {"test": [prompt.tokens for prompt in prompts]},
        max_tokens=settings["max_tokens"],
    )
    results = {}
    for temperature in settings["temperatures"]:
        sampling = Sampling(temperature=temperature, seed=settings["seed"])
        results[f"{temperature:g}"] = benchmark.run(sampling).to_json()
    return {"costs": costs.to_json(), "results": results}


if __name__ == "__main__":
    main()
