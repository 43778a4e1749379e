"""Training on own completions: rewards, resuming, distillation, refusals."""

import pytest
from lmx.config.errors import ConfigErrors
from lmx.config.loader import load_recipe
from processes import WRONG_SHARD, in_ring
from tiny_runs import METRICS_ONLY, TRAIN, Run

LORA = {"type": "lora", "rank": 4}
GRID = {"bits": 4, "group_size": 32}
GRPO = {"type": "grpo", "rewards": ["rewards.py:vowels"]}
ROLLOUTS = {"num_generations": 4, "max_tokens": 6}
CASES = {
    "grpo-lora": {"loss": GRPO, "adapter": LORA},
    "dapo-qat": {"loss": GRPO | {"loss_type": "dapo", "beta": 0.05}, "qat": GRID},
    "gspo-full": {
        "loss": GRPO | {"importance_sampling_level": "sequence"},
        "gradient_accumulation_steps": 2,
        "rollouts": ROLLOUTS | {"num_iterations": 2},
    },
}
# A reward that an untrained model of bytes can learn.
REWARDS = """
def vowels(prompt, completion, answer):
    return sum(c in "aeiou" for c in completion) / 6
"""
PYTHON = "--allow-python"
MAIN = "import sys; from lmx.cli.main import train; sys.exit(train())"


class PythonRun(Run):
    """A run whose user allows its functions."""

    def arguments(self, *overrides):
        return super().arguments(PYTHON, *overrides)


def make_run(folder, case, base, kind=PythonRun, **train) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "rewards.py").write_text(REWARDS)
    stage = TRAIN | {"rollouts": ROLLOUTS, "batch_size": 4, "eval_batches": 2}
    return kind(folder, {"train": stage | CASES[case] | train}, model=base)


def test_training_raises_the_reward(tmp_path, base):
    run = make_run(tmp_path, "grpo-lora", base, steps=30, learning_rate=5e-3)
    assert run() == 0
    rewards = [r["reward"] for r in run.records() if r["kind"] == "train"]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    valid = [r for r in run.records() if r["kind"] == "valid"]
    assert valid[-1]["reward"] > valid[0]["reward"]
    assert valid[-1]["loss"] == -valid[-1]["reward"]
    samples = run.records("samples.jsonl")
    assert len(samples) == 30 * 4 * 4
    assert {"step", "prompt", "completion", "rewards"} <= samples[0].keys()
    assert "differ by" not in run.log


def test_reward_file_runs_only_with_the_users_word(tmp_path, base, capsys):
    run = make_run(tmp_path, "grpo-lora", base, Run)
    assert run() == 2
    error = capsys.readouterr().err
    assert "--allow-python" in error
    assert "rewards.py:vowels" in error


@pytest.mark.parametrize(
    ("text", "code", "messages"),
    [
        (
            "def vowels(**sample):\n    return 'one'\n",
            1,
            ["rewards.py:vowels returned 'one', not a number", "valid.jsonl"],
        ),
        (
            "import sys\nsys.exit(0)\n",
            2,
            ["rewards: rewards.py:vowels: ", "failed with SystemExit: 0 (line 2)"],
        ),
    ],
    ids=["no number", "exit"],
)
def test_broken_reward_loses_nothing(tmp_path, base, capsys, text, code, messages):
    run = make_run(tmp_path, "grpo-lora", base, steps=2)
    (tmp_path / "rewards.py").write_text(text)
    assert run() == code
    error = capsys.readouterr().err
    assert all(message in error for message in messages)
    assert run.json("manifest.json")["status"] == "failed"
    (tmp_path / "rewards.py").write_text(REWARDS)
    assert run() == 0


def test_reward_that_holds_the_interpreter_ends_at_its_limit(tmp_path, base, capfd):
    loss = GRPO | {"reward_timeout": 0.3}
    run = make_run(tmp_path, "grpo-lora", base, loss=loss)
    noise = "print('noise')\nimport os, re\nos.system('echo noise; echo noise >&2')\n"
    function = "    print('noise')\n    re.match('(a+)+$', 'a' * 40 + 'b')\n"
    text = f"{noise}def vowels(**sample):\n{function}"
    (tmp_path / "rewards.py").write_text(text)
    assert run() == 1
    output, error = capfd.readouterr()
    assert "rewards.py:vowels took longer than 0.3 s" in error
    assert "noise" not in output + error


def test_reward_that_fails_late_is_corrected_and_the_training_goes_on(tmp_path, base):
    run = make_run(tmp_path, "grpo-lora", base, steps=6)
    file = tmp_path / "rewards.py"
    # After the checkpoint of step 4: a step has 16 completions, a validation up to 10.
    failing = REWARDS.replace("return", "calls.append(1)\n    return")
    failing = "calls = []\n" + failing.replace("/ 6", "/ (len(calls) < 92)")
    file.write_text(failing)
    assert run() == 1
    file.write_text(REWARDS.replace("/ 6", "/ 1"))
    assert run() == 0
    assert "resuming after step 4" in run.log
    assert "going on with other reward functions" in run.log
    steps = [sample["step"] for sample in run.records("samples.jsonl")]
    assert steps == [step for step in range(1, 7) for _ in range(16)]


def test_completions_of_a_run_without_a_checkpoint_get_the_present_rewards(
    tmp_path, base
):
    run = make_run(tmp_path, "grpo-lora", base, steps=4, save_steps=100)
    assert run.run_with_signal("SIGKILL", "step", 3).returncode == -9
    (tmp_path / "rewards.py").write_text(REWARDS.replace("/ 6", "- 100"))
    assert run() == 0
    rewards = [
        value
        for sample in run.records("samples.jsonl")
        for value in sample["rewards"].values()
    ]
    assert len(rewards) == 4 * 16
    assert max(rewards) < -80


def test_changed_reward_is_another_training(tmp_path, base, capsys):
    run = make_run(tmp_path, "grpo-lora", base)
    assert run.run_with_signal("SIGTERM", "step", 4).returncode == 130
    (tmp_path / "rewards.py").write_text(REWARDS.replace("/ 6", "/ 5"))
    assert run() == 2
    assert "rewards have changed" in capsys.readouterr().err


def test_on_policy_distillation_lowers_the_divergence(tmp_path, base):
    train = TRAIN | {
        "teacher": {"loss": "reverse_kl"},
        "rollouts": ROLLOUTS | {"num_generations": 2},
        "qat": {"bits": 2, "group_size": 32},
        "learning_rate": 3e-4,
        "steps": 20,
    }
    run = Run(tmp_path, {"train": train}, {"evaluate": METRICS_ONLY}, model=base)
    assert run() == 0
    losses = [r["loss"] for r in run.records() if r["kind"] == "valid"]
    assert losses[-1] < 0.7 * losses[0]
    assert len(run.records("samples.jsonl")) == 20 * 8 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollouts": None}, "the loss grpo needs rollouts"),
        ({"rollouts": {"num_generations": 1}}, "must be at least 2"),
        ({"loss": {"type": "dpo"}}, "rollouts does not work with the loss dpo"),
        ({"loss": None}, "rollouts needs a loss such as grpo, or a teacher"),
        ({"packing": True}, "packing does not work with"),
        ({"teacher": {}}, "teacher does not work with the loss grpo"),
        (
            {"loss": None, "teacher": {"offline": True}},
            "rollouts needs an online teacher",
        ),
        ({"loss": GRPO | {"rewards": []}}, "rewards"),
        ({"loss": GRPO | {"rewards": ["a", "a"]}}, "named twice"),
    ],
)
def test_recipe_errors(tmp_path, base, changes, message):
    run = make_run(tmp_path, "grpo-lora", base, **changes)
    with pytest.raises(ConfigErrors, match=message):
        load_recipe(str(run.recipe))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "count", "steps"), [("", 2, 6), ("", 3, 1), (WRONG_SHARD, 2, 1)]
)
def test_ranks_train_on_the_same_completions(tmp_path, base, program, count, steps):
    whole = make_run(tmp_path / "whole", "grpo-lora", base, steps=steps)
    assert whole() == 0
    shared = make_run(tmp_path / "shared", "grpo-lora", base, steps=steps)
    ranks = in_ring(
        program + MAIN, *shared.arguments(), folder=shared.folder, count=count
    )
    assert [rank.returncode for rank in ranks] == [0] * count, ranks[0].stderr
    # Later ones may differ: the sum of gradients is rounded in another order.
    first, expected = (
        [r for r in run.records("samples.jsonl") if r["step"] == 1]
        for run in (shared, whole)
    )
    assert len(first) == 4 * 4
    assert (first == expected) == (not program)
    if program:
        return
    # That of the first validation, of greedy completions.
    rewards = [
        next(r["reward"] for r in run.records() if r["kind"] == "valid")
        for run in (shared, whole)
    ]
    assert rewards[0] == pytest.approx(rewards[1], rel=1e-6)
    values, expected = (
        [r["reward"] for r in run.records() if r["kind"] == "train"]
        for run in (shared, whole)
    )
    assert values == pytest.approx(expected, abs=0.1)
