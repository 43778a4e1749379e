"""Decode held-out prompts with several drafts for one target, for `drafters.py`.

`drafters_runner.py SETTINGS` takes JSON with target, drafts (folders by name), prompts
(files by set), num_prompts, max_tokens, num_draft_tokens, temperatures and seed. It
prints JSON: statistics by temperature, draft and set.
"""

import json
import sys
import time
from pathlib import Path

PROGRAM = Path(__file__)
MAX_PROMPT_LENGTH = 256


def main() -> None:
    settings = json.loads(sys.argv[1])
    from lmx import cpu

    cpu.enable()
    from lmx.generation.speculative.factory import PROMPT_LOOKUP, proposer_factory
    from lmx.models.loader import load

    target = load(settings["target"])
    prompts = _prompts(settings, target.tokenizer)
    drafts = settings["drafts"]
    sources = {PROMPT_LOOKUP: PROMPT_LOOKUP} | drafts
    sources |= {f"lookup, {k}": f"{PROMPT_LOOKUP}+{v}" for k, v in drafts.items()}
    proposers = {"plain": None} | {
        name: proposer_factory(source, target, load_draft=load)
        for name, source in sources.items()
    }
    results = {}
    for temperature in settings["temperatures"]:
        results[f"{temperature:g}"] = {
            name: {
                set_name: _decode(target, make, tokens, temperature, settings)
                for set_name, tokens in prompts.items()
            }
            for name, make in proposers.items()
        }
    print(json.dumps(results))


def _prompts(settings: dict, tokenizer) -> dict[str, list[list[int]]]:
    from lmx.data.dataset import RecordReader
    from lmx.draft.dataset import select_prompts

    return {
        name: [
            prompt.tokens
            for prompt in select_prompts(
                RecordReader(file, split="valid"),
                tokenizer,
                count=settings["num_prompts"],
                max_prompt_tokens=MAX_PROMPT_LENGTH,
            )
        ]
        for name, file in settings["prompts"].items()
    }


def _decode(target, make_proposer, prompts, temperature: float, settings: dict) -> dict:
    """Rounds, accepted draft tokens and seconds of every prompt, and their text."""
    from lmx.generation.generator import Generator
    from lmx.generation.sampling import Sampling
    from lmx.generation.speculative.draft_length import DraftLengthController

    generator = Generator(
        target.model,
        target.tokenizer,
        make_proposer=make_proposer,
        draft_length=DraftLengthController(fixed=settings["num_draft_tokens"]),
    )
    rows = []
    for index, prompt in enumerate(prompts):
        sampling = Sampling(temperature=temperature, seed=settings["seed"] + index)
        responses = generator.stream(
            prompt, max_tokens=settings["max_tokens"], sampling=sampling
        )
        tokens = [next(responses).token]
        start = time.perf_counter()
        tokens += [response.token for response in responses]
        row = {"tokens": tokens, "seconds": time.perf_counter() - start}
        if stats := generator.speculative_stats:
            row |= {
                "passes": stats.rounds + stats.standard_tokens,
                "proposed": stats.proposed,
                "accepted": stats.accepted,
            }
        rows.append(row)
    return {"prompts": rows}


if __name__ == "__main__":
    main()
