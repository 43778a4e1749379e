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
    from toolkit import blas

    blas.use()
    from toolkit.data.formats import Rows
    from toolkit.draft.answers import mean_length, prompts
    from toolkit.draft.economics import measure
    from toolkit.draft.trial import Rival, Trial
    from toolkit.generate.sampling import Sampling
    from toolkit.model.load import load

    target, draft = load(settings["target"]), load(settings["draft"])
    rows = Rows(settings["rows"], split="valid")
    count = settings["prompts"]
    asked = prompts(rows, target.tokenizer, count=count, longest=LONGEST_PROMPT)
    costs = measure(target.model, draft.model, prompt=mean_length(asked))
    trial = Trial(
        target.model,
        Rival(draft.model, costs),
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
