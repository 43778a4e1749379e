"""A run directory with everything that the report page shows, and an HTML reader."""

import json
from html.parser import HTMLParser
from pathlib import Path

HOSTILE = "</script><img src=x onerror=\"document.title='hacked'\"><!--&"
VOID = {"meta", "wbr"}
GRID = {"bits": 4, "group_size": 64}
PROPOSER = {"acceptance_rate": 0.41, "accepted_length": 1.9, "speedup": 1.3}
ANSWERS = {"base": "one\ntwo", "quantized": HOSTILE}
RESULT = dict.fromkeys(("reference", "adapters", "draft", "rounded"))
RESULT |= {"model": "model", "facts": {}, "published": []}

REPORT = {
    "name": "try",
    "models": {
        "base": {"perplexity": 3.0, "perplexity_stderr": 0.1, "bytes": 9_000_000},
        "quantized": {
            "perplexity": 3.3,
            "perplexity_stderr": 0.1,
            "kl_mean": 0.02,
            "tasks": {"arc": {"acc,none": 0.5, "acc_stderr,none": 0.01}},
            "kl_stderr": 0.001,
            "bytes": 3_000_000,
            "generation": {"ttft_ms": {"p50": 12.5, "p90": 13.0, "p99": 14.0}},
            "layers": {
                "model.embed_tokens": {"bits": 16, "group_size": None, "error": 0.0},
                "model.layers.0.mlp.up_proj": GRID | {"error": 0.008},
                "model.layers.1.mlp.up_proj": {**GRID, "bits": 2, "error": 0.11},
                "model.layers.1.router": GRID | {"error": None},
            },
            "speculation": {"prompt_lookup": PROPOSER},
        },
    },
    "training": {
        "steps": 3,
        "trained_tokens": 12345,
        "codes": 100,
        "changed_codes": 7,
        "method": "gptq",
        "gap_recovered": {
            "fp_baseline": {"loss": 0.8, "loss_stderr": 0.05, "kl": 0.0},
            "fp_baseline_rtn": {"loss": 0.9, "loss_stderr": 0.05, "kl": 0.1},
            "qat": {"loss": 0.81, "loss_stderr": 0.05, "kl": 0.03},
            "loss": 0.9,
            "loss_stderr": 0.0123,
            "kl": None,
            "kl_stderr": None,
            "gain_retained": 0.999,
        },
    },
    "samples": [{"prompt": HOSTILE, "expected": None, "answers": ANSWERS}],
    "thresholds": [
        {"name": "kl", "value": 0.02, "limit": 0.05, "passed": True},
        {"name": "exact_match", "value": None, "limit": 0.5, "passed": False},
    ],
}
MANIFEST = {
    "name": "try",
    "command": "lmx-train try.yaml seed=1",
    "status": "done",
    "recipe_hash": "ab" * 32,
    "plan": {"1-train": "ef" * 32, "2-evaluate": "12" * 32},
    "versions": {"python": "3.11", "mlx": "0.32.4", "numpy": None},
    "machine": {"system": "Linux", "cores": 2},
    "started": "2026-01-01T10:00:00+0000",
    "ended": "2026-01-01T10:02:05+0000",
    "current_stage": "2-evaluate",
    "inputs": {},
    "stages": {
        "1-train": {
            "result": RESULT,
            "artifacts": {"model": {"a": "cd" * 32}},
            "sha256": "34" * 32,
        }
    },
}
STEP = {"learning_rate": 1e-3, "gradient_norm": None, "peak_memory_gb": 1.5}
RECORDS = [
    {"stage": "1-train", "kind": "valid", "step": 0, "loss": 3.0},
    *(
        {"stage": "1-train", "kind": "train", "step": step, "loss": 3.0 - step}
        | {"trained_tokens_per_second": 1500.0 + step, **STEP}
        for step in (1, 2)
    ),
]
SAMPLE = {"stage": "1-train", "step": 2, "prompt": "Hi", "answer": HOSTILE}
RESOLVED = "model: {path: a/b}\noutput: exports/try\nstages: [{train: {steps: 3}}]\n"


def make_run(path: Path, *, report=REPORT, manifest=MANIFEST, records=RECORDS) -> Path:
    """Write a run folder; files whose content is None are missing."""
    (path / "model").mkdir(parents=True)
    files = {
        "manifest.json": json.dumps(manifest),
        "report.json": report and json.dumps(report),
        "metrics.jsonl": records
        and "".join(json.dumps(record) + "\n" for record in records),
        "samples.jsonl": records and json.dumps(SAMPLE) + '\n{"stage": "1-tr',
        "recipe.yaml": f"# {HOSTILE}\nmodel: a/b\n",
        "resolved.yaml": RESOLVED,
        "log.txt": f"{HOSTILE}\nthe last word\n",
    }
    for name, text in files.items():
        if text is not None:
            (path / name).write_text(text)
    return path


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        tags: (name, attributes) in order.
        text: by the name of the innermost tag, joined.
        faults: tags that are closed wrongly.
    """

    def __init__(self, html: str):
        super().__init__()
        self.html = html
        self.tags, self.text, self.faults = [], {}, []
        self._open = []
        self.feed(html)
        self.close()
        self.faults += self._open

    def all(self, name: str) -> list[dict]:
        """Attributes of all tags of a name."""
        return [attributes for tag, attributes in self.tags if tag == name]

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if not self._open or self._open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data):
        if self._open:
            self.text[self._open[-1]] = self.text.get(self._open[-1], "") + data
