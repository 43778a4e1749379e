"""The column `system`, and messages with a weight, as in files for OpenAI."""

import pytest
from lmx.data.chat.rendering import ChatTemplate
from lmx.data.preference import encode_pairs
from lmx.data.tokenization import texts_of
from lmx.errors import UserError
from reading import read
from test_tokenization import CHATML, build_tokenizer, encode_one, trained_texts

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Is it warm in Rome?"}
ANSWER = {"role": "assistant", "content": "Yes."}
WORSE = {"role": "assistant", "content": "Who knows?"}
UNTRAINED = WORSE | {"weight": 0}
RECORDS = {
    "chat": {"messages": [USER, ANSWER]},
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": USER["content"]},
            {"from": "gpt", "value": ANSWER["content"]},
        ]
    },
    "completion": {"prompt": USER["content"], "completion": ANSWER["content"]},
    "instruction": {"instruction": USER["content"], "output": ANSWER["content"]},
    "preference": {"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]},
    "preference of text": {
        "prompt": USER["content"],
        "chosen": ANSWER["content"],
        "rejected": WORSE["content"],
    },
    "label": {
        "prompt": USER["content"],
        "completion": ANSWER["content"],
        "label": True,
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(CHATML)


@pytest.mark.parametrize("name", RECORDS)
def test_system_column_is_the_first_message(write, name):
    plain = RECORDS[name]
    for empty in (None, "", " "):
        assert read(write([plain | {"system": empty}])) == read(write([plain]))
    record = read(write([plain | {"system": SYSTEM["content"]}]))
    assert record.messages == (SYSTEM, USER, ANSWER)
    assert record.prompt is record.completion is None
    if name.startswith("preference"):
        assert record.rejected == (SYSTEM, USER, WORSE)
    assert record.label is (True if name == "label" else None)


def test_system_message_of_a_chat_comes_before_the_column(write):
    record = read(write([{"messages": [SYSTEM, USER, ANSWER], "system": "Sing."}]))
    assert record.messages == (SYSTEM, USER, ANSWER)


def test_system_column_may_have_another_name(write):
    """OpenOrca: system_prompt, question, response."""
    row = {
        "system_prompt": "Be brief.",
        "question": USER["content"],
        "response": "Yes.",
    }
    columns = {"prompt": "question", "completion": "response"}
    path = write([row])
    assert read(path, columns=columns).messages is None
    record = read(path, columns=columns | {"system": "system_prompt"})
    assert record.messages == (SYSTEM, USER, ANSWER)


def test_system_column_needs_a_chat_template(write):
    path = write([RECORDS["completion"] | {"system": SYSTEM["content"]}])
    with pytest.raises(UserError, match="chat template") as error:
        texts_of(read(path), ChatTemplate(build_tokenizer(None)))
    assert "without system" in error.value.hint


@pytest.mark.parametrize(
    ("messages", "trained"),
    [
        ([USER, ANSWER, USER, UNTRAINED], ["Yes.<|im_end|>"]),
        (
            [USER, ANSWER | {"weight": 1}, USER, WORSE],
            ["Yes.<|im_end|>", "Who knows?<|im_end|>"],
        ),
        ([*[USER, UNTRAINED, USER, ANSWER] * 20], ["Yes.<|im_end|>"] * 20),
    ],
)
def test_turn_of_weight_0_is_read_and_not_trained(write, tokenizer, messages, trained):
    record = read(write([{"messages": messages}]))
    example = encode_one(record, tokenizer, max_seq_length=5000)
    assert trained_texts(example, tokenizer) == trained


def test_preference_pairs_share_turns_of_weight_0(write, tokenizer):
    shared = [USER, UNTRAINED, USER, ANSWER, USER]
    row = {"chosen": [*shared, ANSWER], "rejected": [*shared, WORSE]}
    settings = {"max_seq_length": 500, "loss_on": "completions"}
    encoded = encode_pairs([read(write([row]))], tokenizer, **settings)
    texts = [trained_texts(example, tokenizer) for example in encoded.examples]
    assert texts == [["Yes.<|im_end|>"], ["Who knows?<|im_end|>"]]
