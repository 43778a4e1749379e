"""A teacher with another tokenizer: alignment by bytes, and mapped distributions."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.data.batching import BucketBatchSampler, InMemoryExamples
from lmx.data.record_formats import DataRecord
from lmx.data.token_alignment import (
    COUNT,
    ROW,
    TARGET,
    AlignedPart,
    Aligner,
    common_blocks,
)
from lmx.data.token_bytes import LETTERS, TokenBytes
from lmx.data.tokenization import encode_all
from lmx.errors import UserError
from lmx.interfaces import Logger
from lmx.training.distillation import OnlineTeacher, divergence_sum
from lmx.training.mapped_targets import MappedTeacher
from lmx.training.teacher_cache import TeacherClient, cache_teacher_targets
from lmx.training.teacher_targets import TeacherTarget
from lmx.training.token_mapping import TokenMapping
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"


def vocabulary(*merged: str, order=None, template: str | None = None) -> TokenBytes:
    """Byte-level BPE of all bytes and of `merged`, each "left|right" in Latin-1."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pairs = []
    for pair in merged:
        left, right = pair.split("|")
        spell = [
            "".join(LETTERS[b] for b in part.encode("latin-1"))
            for part in (left, right)
        ]
        pairs.append(tuple(spell))
    tokens = [*LETTERS.values(), *dict.fromkeys(a + b for a, b in pairs)]
    if order is not None:
        tokens = [tokens[n] for n in order.permutation(len(tokens))]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, pairs))
    tokenizer.pre_tokenizer, tokenizer.decoder = letters, decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = template
    return TokenBytes(TokenizerWrapper(fast), place="here")


def spell(tokens, owner: TokenBytes) -> list[str]:
    return [owner.pieces[n].decode(errors="backslashreplace") for n in tokens]


def align(record, student, teacher, length=1000, loss_on="completions"):
    """The examples of a record, their other sides, and the counts."""
    settings = {"max_seq_length": length, "loss_on": loss_on}
    encoded = encode_all([record], student.tokenizer, **settings).examples
    examples = InMemoryExamples(encoded)
    members = np.arange(len(examples))
    aligner = Aligner(student, teacher, **settings)
    sides, stats = aligner.align(examples, members, [record])
    return examples, sides, stats


def pairs_of(example, part: AlignedPart, student, teacher) -> list[tuple]:
    """(student's token, the teacher's that hold it) of every place."""
    return [
        (
            *spell([example.tokens[place[TARGET]]], student),
            spell(part.tokens[place[ROW] : place[ROW] + place[COUNT]], teacher),
        )
        for place in part.places
    ]


AB, CD, ABCD = "a|b", "c|d", "ab|cd"


@pytest.mark.parametrize(
    ("text", "ours", "theirs", "expected"),
    [
        ("xab", [AB], [AB], [("ab", ["ab"])]),
        ("xab", [], [AB], [("a", ["ab"]), ("b", ["ab"])]),
        ("xab", [AB], [], [("ab", ["a", "b"])]),
        ("xabc", ["a|b"], ["b|c"], [("ab", ["a", "bc"]), ("c", ["bc"])]),
        (
            "yxé",
            [],
            ["x|\xc3"],
            [("x", ["x\\xc3"]), ("\\xc3", ["x\\xc3"]), ("\\xa9", ["\\xa9"])],
        ),
        ("x a", [" |a"], [], [(" a", [" ", "a"])]),
    ],
    ids=["1:1", "1:n", "n:1", "n:m", "split character", "space"],
)
def test_alignment_by_hand(text, ours, theirs, expected):
    student, teacher = vocabulary(*ours), vocabulary(*theirs)
    record = DataRecord(text=text, where="w")
    (example,), ((part,),), stats = align(record, student, teacher)
    found = pairs_of(example, part, student, teacher)
    assert found == [*expected, (END, [END])]
    assert stats.trained == stats.placed == len(found)
    shifted = part.places + np.eye(6, dtype=int)[ROW]
    other = AlignedPart(part.tokens, shifted, part.text, 0)
    assert pairs_of(example, other, student, teacher) != found


def sentencepiece() -> TokenBytes:
    """SentencePiece, which adds a space before a text, and writes bytes as <0xE9>."""
    tokens = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), *"▁abx", "▁a"]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(ids, [("▁", "a")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    return TokenBytes(TokenizerWrapper(fast), place="here")


def test_sentencepiece_has_other_strings_and_the_same_bytes():
    teacher = sentencepiece()
    record = DataRecord(text="x abé", where="w")
    (example,), ((part,),), _ = align(record, vocabulary(), teacher)
    assert pairs_of(example, part, vocabulary(), teacher) == [
        *((" ", [" a"]), ("a", [" a"]), ("b", ["b"])),
        *(("\\xc3", ["\\xc3"]), ("\\xa9", ["\\xa9"]), (END, [END])),
    ]
    # Without the space that it adds to a text; é is no token.
    texts = [b" ab", b"a", "é".encode(), b"\xc3"]
    encoded = [spell(ids, teacher) for ids in teacher.encode(texts)]
    assert encoded == [[" a", "b"], ["a"], ["\\xc3", "\\xa9"], []]


def test_blocks_skip_whitespace_of_one_side():
    assert common_blocks(b" to be", b"to  be\n") == [(1, 0, 3), (4, 4, 2)]
    assert common_blocks(b"to be", b"to do") == [(0, 0, 3)]


OURS = "{% for m in messages %}[{{m.role}}]{{m.content}}<|end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"  # noqa: E501
THEIRS = "Q{% for m in messages %}{% if m.role == 'user' %}U:{{m.content}}\n{% else %} {{m.content}}<|end|>{% endif %}{% endfor %}"  # noqa: E501


def chat(*contents: str) -> DataRecord:
    roles = ("user", "assistant") * len(contents)
    messages = [
        {"role": role, "content": content}
        for role, content in zip(roles, contents, strict=False)
    ]
    return DataRecord(messages=tuple(messages), where="w")


@pytest.mark.parametrize("length", [1000, 40])
def test_turns_are_aligned_between_templates(length):
    """The teacher's template renders the messages; the answers are aligned."""
    student, teacher = vocabulary(template=OURS), vocabulary(AB, template=THEIRS)
    record = chat("hi", "ab", "more", "cab")
    (example,), ((part,),), stats = align(record, student, teacher, length)
    expected = ["ab", "ab", END, *(["c", "ab", "ab", END] if length == 1000 else [])]
    found = pairs_of(example, part, student, teacher)
    assert [other[-1] for _, other in found] == expected
    assert bytes(teacher.pieces[n][0] for n in part.tokens).startswith(b"QU:hi")
    assert stats.placed == stats.trained == len(expected)


def test_what_is_not_aligned_is_counted():
    student = vocabulary(template=OURS)
    loses = THEIRS.replace("{{m.content}}<", "{{m.content.upper()}}<")
    for template in (loses, None):
        _, sides, stats = align(
            chat("hi", "ab"), student, vocabulary(template=template)
        )
        assert not any(sides)
        assert (stats.trained, stats.placed) == (3, 0)
        assert stats.failed[0][0] == "w"


def distribution(student, teacher, text, logits) -> list[dict[str, float]]:
    """The mapped distributions at the places of a text, without small ones."""
    (example,), ((part,),), _ = align(
        DataRecord(text=text, where="w"), student, teacher
    )
    size, other = (
        max(v.tokenizer.get_vocab().values()) + 1 for v in (student, teacher)
    )
    mapping = TokenMapping(student, teacher, size, other)
    end = student.tokenizer.eos_token_id
    probs = {}
    for row, values in enumerate(logits, start=1):
        probs[row] = np.zeros(other)
        for token, value in values.items():
            number = end_id(teacher) if token == END else teacher.pieces.index(token)
            probs[row][number] = value
    found = []
    for place in part.places[: 2 if len(logits) == 1 else 1]:
        token = int(example.tokens[place[TARGET]])
        mass = mapping.distribution(part, place, token, probs, end)
        found.append(
            {student.pieces[n].decode(): mass[n] for n in np.flatnonzero(mass)}
        )
    return found


def end_id(owner: TokenBytes) -> int:
    return owner.tokenizer.eos_token_id


def test_mapped_distributions_by_hand():
    """Inside a token, of those that go on; through a longer one, by the chain rule."""
    student, teacher = vocabulary(), vocabulary(AB, "a|c")
    values = {b"ab": 0.5, b"ac": 0.2, b"a": 0.1, b"b": 0.1, END: 0.1}
    first, inside = distribution(student, teacher, "xab", [values])
    assert first == pytest.approx({"a": 0.8, "b": 0.1, END: 0.1})
    assert inside == pytest.approx({"b": 5 / 7, "c": 2 / 7})
    student, teacher = vocabulary(AB), vocabulary()
    rows = [{b"a": 0.6, b"b": 0.4}, {b"b": 0.5, b"c": 0.3, END: 0.2}]
    (longer,) = distribution(student, teacher, "xab", rows)
    assert longer == pytest.approx({"ab": 0.3, "b": 0.4, "a": 0.6 * 0.5})


class RenumberedTeacher(OnlineTeacher):
    """A model whose tokens have other numbers than its weights."""

    def __init__(self, table, numbers):
        self.table, self.numbers = table, numbers

    def hidden(self, inputs, documents=None):
        rows = self.table[self.numbers[inputs]]
        return rows + 0.3 * mx.cumsum(rows, axis=1)

    def logits(self, hidden):
        return hidden[..., self.numbers]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_renumbered_teacher_gives_the_same_loss(
    tmp_path, monkeypatch, temperature, shift
):
    """Windows of a text; an alignment that is shifted by one gives another loss."""
    monkeypatch.setenv("LMX_CACHE", str(tmp_path))
    merges = (AB, CD, ABCD, "e| ")
    student = vocabulary(*merges)
    teacher = vocabulary(*merges, order=np.random.default_rng(0))
    text = "abcd ae abab cdab e cabe dcabcd " * 4
    examples, sides, stats = align(
        DataRecord(text=text, where="w"), student, teacher, 24
    )
    assert stats.same == stats.trained
    assert len(examples) > 2
    size = student.tokenizer.eos_token_id + 1
    names = [*map(bytes, student.pieces)]
    numbers = mx.array([names.index(piece) for piece in teacher.pieces])
    table = mx.random.normal((size, size), key=mx.random.key(0))
    if shift:
        sides = [
            tuple(
                AlignedPart(
                    p.tokens, np.maximum(p.places - [0, 1, 0, 0, 0, 0], 1), p.text, 0
                )
                for p in side
            )
            for side in sides
        ]
    mapped = MappedTeacher(
        TokenMapping(student, teacher, size, size), dict(enumerate(sides))
    )
    losses = []
    for model, more in (
        (RenumberedTeacher(table, mx.arange(size)), None),
        (RenumberedTeacher(table, numbers), mapped),
    ):
        client = TeacherClient(
            lambda m=model: m, str(more), size, Logger(), mapped=more
        )
        members = np.arange(len(examples))
        targets = cache_teacher_targets(
            examples, members, client, top_k=8, temperature=temperature
        )
        losses.append(loss_of(examples, targets, size, temperature))
    if shift:
        assert abs(losses[1] - losses[0]) > 0.1
    else:
        assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def loss_of(examples, targets, size: int, temperature: float) -> float:
    batches = BucketBatchSampler(examples, max_seq_length=24, batch_size=4)
    total = count = 0
    for number in range(batches.per_epoch):
        batch = targets(batches(number))
        logits = mx.random.normal((*batch.mask.shape, size), key=mx.random.key(number))
        target = TeacherTarget(*batch.target)
        total += divergence_sum(
            logits, target, batch.mask, temperature=temperature
        ).item()
        count += batch.mask.sum().item()
    return total / count


def test_tokens_that_are_no_bytes_are_refused():
    word = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    word.decoder = decoders.WordPiece()
    fast = PreTrainedTokenizerFast(tokenizer_object=word, eos_token=END)
    with pytest.raises(UserError, match="no pieces of a text's bytes"):
        TokenBytes(TokenizerWrapper(fast), place="here")
