"""One draft on trial for `draft_quality.py`, a process of its own.

`draft_sides.py SETTINGS` reads JSON: target, draft, rows, prompts, max_tokens,
temperatures and seed; it prints JSON, by way of sampling.
"""

import json
import sys
from pathlib import Path

PROGRAM = Path(__file__)
LONGEST_PROMPT = 256


def main() -> None:
    print(json.dumps(run(json.loads(sys.argv[1]))))


def run(settings: dict) -> dict:
    """Measure both models here, then let the draft guess what the target answers."""
    from lmx import cpu

    cpu.enable()
    from lmx.data.dataset import RowReader
    from lmx.draft.benchmark import Candidate, DraftBenchmark
    from lmx.draft.cost_model import measure_speculation_costs
    from lmx.draft.dataset import mean_prompt_length, select_prompts
    from lmx.generation.sampling import Sampling
    from lmx.models.loader import load

    target, draft = load(settings["target"]), load(settings["draft"])
    rows = RowReader(settings["rows"], split="valid")
    count = settings["prompts"]
    asked = select_prompts(rows, target.tokenizer, count=count, longest=LONGEST_PROMPT)
    costs = measure_speculation_costs(
        target.model, draft.model, prompt_length=mean_prompt_length(asked)
    )
    trial = DraftBenchmark(
        target.model,
        Candidate(draft.model, costs),
        target.tokenizer,
        {"held out": [prompt.tokens for prompt in asked]},
        max_tokens=settings["max_tokens"],
    )
    found = {}
    for heat in settings["temperatures"]:
        sampling = Sampling(temperature=heat, seed=settings["seed"])
        found[f"{heat:g}"] = trial.run(sampling).to_json()
    return {"costs": costs.to_json(), "found": found}


if __name__ == "__main__":
    main()
