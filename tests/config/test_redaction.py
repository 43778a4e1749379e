"""What looks like a token or a password is redacted, and nothing else."""

import hashlib
import random
import string

import pytest
import yaml
from lmx.config import yaml_io
from lmx.config.redaction import REDACTED, redact, redact_environment, redact_values

LETTERS = random.Random(4)


def secret(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "a1B" + "".join(LETTERS.choices(alphabet, k=count - 3))


HEX = hashlib.sha1(b"a key").hexdigest()
HUGGING_FACE = "hf_" + secret(34)
TOKENS = [
    HUGGING_FACE,
    "sk-" + secret(48),
    "sk-proj-" + secret(40) + "_" + secret(30) + "-" + secret(20),
    "sk-ant-api03-" + secret(60),
    "ghp_" + secret(36),
    "github_pat_" + secret(22) + "_" + secret(59),
    "AKIA" + "IOSFODNN7EXAMPLE",
    "ASIA" + "IOSFODNN7EXAMPL2",
]


LINES = [
    *("# my key is {}.", "model: user/name  # {}", 'prompt: "say {} twice"', "a={}"),
    *("[{}, {}]", "https://host/?key={}&x=1"),
]


@pytest.mark.parametrize("line", LINES)
def test_token_of_a_known_form_is_redacted(line):
    for token in TOKENS:
        assert redact(line.replace("{}", token)) == line.replace("{}", REDACTED)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("# token: abc123def", "# token: REDACTED"),
        ("HF_TOKEN=abc123def", "HF_TOKEN=REDACTED"),
        ("hub_token: 'abcdef1234567890' # mine", "hub_token: 'REDACTED' # mine"),
        ('{"token": "abc123def"}', '{"token": "REDACTED"}'),
        ("api_key: s3cret", "api_key: REDACTED"),
        ("OPENAI_API_KEY=s3cret", "OPENAI_API_KEY=REDACTED"),
        ("aws_secret_access_key = a/b+c1==", "aws_secret_access_key = REDACTED"),
        ("password: hunter2", "password: REDACTED"),
        ('password: "two words" # x', 'password: "REDACTED" # x'),
        ("{password: hunter2, seed: 1}", "{password: REDACTED, seed: 1}"),
        ("client-secret: 'it is'", "client-secret: 'REDACTED'"),
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer REDACTED"),
        ("authorization: Basic dXNlcjpwYXNz", "authorization: Basic REDACTED"),
        (f"# wandb: {HEX}", "# wandb: REDACTED"),
        (f"WANDB_API_KEY={HEX}", "WANDB_API_KEY=REDACTED"),
        (
            f"tracker: {{type: wandb, key: '{HEX}'}}",
            "tracker: {type: wandb, key: 'REDACTED'}",
        ),
        ("x: https://me:pa55@host/x", "x: https://me:REDACTED@host/x"),
    ],
)
def test_named_secret_is_redacted(line, expected):
    assert redact(line) == expected
    assert redact(expected) == expected


@pytest.mark.parametrize(
    "line",
    [
        f"sha256: {hashlib.sha256(b'x').hexdigest()}",
        f"model: {{path: user/name, revision: {HEX}}}",
        f"wandb run at {HEX}",
        "model: mlx-community/Qwen3-0.6B-4bit-DWQ-053125",
        "model: hf_internal_testing/tiny_random_llama_for_causal_lm_2",
        "model: user/sk-learn-text-classification-version-2",
        "model: user/task-sk-1234567890abcdefghij",
        "data: hf_downloads/model_2024_01_01_with_a_long_name",
        "tokens: 12345678",
        "max_tokens: 1234567",
        "num_tokens: 100_000",
        "loss per token: 2.5134567",
        "nats per token: 1.23456e-07",
        "pad_token: <|endoftext_0|>",
        "eos_token: </s>",
        "stop token: im_end",
        "the token: something else",
        "tokenizer: user/llama-3-tokenizer-1",
        "token: $HF_TOKEN",
        "token: null",
        "api_key: ${OPENAI_API_KEY}",
        "password: <your password>",
        "secret: REDACTED",
        "the bearer certificates",
        "learning_rate: 2e-3  # AKIA and ghp_ and hf_ and sk-",
        "time: http://host:8080/a@b",
        "keywords: [key, monkey: 1]",
    ],
)
def test_ordinary_text_stays(line):
    assert redact(line) == line


@pytest.mark.parametrize(
    "message",
    [
        "./secret: this folder is not a model",
        "runs/my-password: damaged",
        "a/token: 12 files differ from a1b2c3d4",
        "/x/api_key: 'model' is missing",
    ],
)
def test_message_about_a_path_stays(message):
    assert redact(message, keys=False) == message
    token = f"{message}: {HUGGING_FACE} at https://me:pa55@host/x"
    expected = f"{message}: {REDACTED} at https://me:{REDACTED}@host/x"
    assert redact(token, keys=False) == expected


def test_redacted_yaml_is_yaml_of_the_same_shape():
    values = {
        "a": [TOKENS[0], f"say {TOKENS[1]}: now", {"b": f"token: {TOKENS[4]}"}],
        "c": f"Bearer {TOKENS[2]}",
        "password": "two words",
        "n": 1,
        "x": None,
    }
    for text in (yaml_io.write(values), yaml.safe_dump(values, default_style='"')):
        redacted = yaml.safe_load(redact(text))
        assert redacted == {
            "a": [REDACTED, f"say {REDACTED}: now", {"b": f"token: {REDACTED}"}],
            "c": f"Bearer {REDACTED}",
            "password": REDACTED,
            "n": 1,
            "x": None,
        }
    assert redact_values(values)["a"] == redacted["a"]
    assert redact_values(values)["n"] == 1


def test_secret_variables_are_redacted(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "open sesame")
    monkeypatch.setenv("MY_NAME", "alice")
    assert redact_environment(f"alice: open sesame {HUGGING_FACE}") == (
        "alice: REDACTED REDACTED"
    )


def test_long_lines_are_redacted_in_linear_time():
    words = ("token", "a-token: ", "wandb, ", "sk-", "bearer ", "password=", "://a")
    for word in words:
        assert redact(f"{word * 10_000} {HUGGING_FACE}").endswith(REDACTED)
