"""What a model in training answers to the recipe's prompts."""

from ..generate.engine import Generator
from ..run.report import Report

SAMPLE_TOKENS = 48


def write_samples(
    generator: Generator, prompts: list[str], report: Report, *, step: int
) -> None:
    """Answer every prompt, into samples.jsonl."""
    for prompt in prompts:
        answer = generator.ask(prompt, max_tokens=SAMPLE_TOKENS).text
        report.sample({"step": step, "prompt": prompt, "answer": answer})
