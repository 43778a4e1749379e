"""The better candidate is kept, and the log says so."""

import mlx.core as mx
import pytest
from lmx.files.artifacts import ArtifactStore
from lmx.interfaces import Logger
from lmx.models.blockwise import TrunkHeadSplit
from lmx.models.loader import load
from lmx.pipeline.quantize import rollback
from lmx.pipeline.quantize.rollback import CandidateModel, select_candidate
from lmx.training.distillation import divergence_sum
from lmx.training.teacher_cache import cache_part_targets
from test_ptq_methods import quantize

TOKENS = [mx.random.randint(0, 320, (2, 16), key=mx.random.key(1))]


@pytest.fixture(scope="module")
def case(make_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("candidates")
    source = make_checkpoint()
    _, tensors, _ = quantize("rtn", source, folder / "q")
    targets = cache_part_targets(
        ArtifactStore(folder, print),
        "targets",
        TOKENS,
        load(source).model,
        digest="a",
        top_k=64,
        logger=Logger(),
    )
    return folder / "q", tensors, targets


def test_chunks_have_the_divergence_of_all_logits(case, monkeypatch):
    path, _, targets = case
    monkeypatch.setattr(rollback, "loss_chunk", lambda *_, **__: 5)
    model = CandidateModel(load(path).model, mx.float16)
    heads = []
    monkeypatch.setattr(
        TrunkHeadSplit,
        "logits",
        lambda split, hidden, real=TrunkHeadSplit.logits: (
            heads.append(len(hidden)) or real(split, hidden)
        ),
    )
    logits = model.model(TOKENS[0])
    expected = divergence_sum(logits, targets[0]).item() / TOKENS[0].size
    assert model.divergence(targets) == pytest.approx(expected, rel=1e-5)
    assert heads == [5, 5, 5, 5, 5, 5, 2]


def damaged(tensors, factor=1.5):
    return {k: factor * v if k.endswith("scales") else v for k, v in tensors.items()}


def select(case, **candidates):
    """The model, the name of the best candidate, all divergences and the log."""
    path, _, targets = case
    lines = []
    model = CandidateModel(load(path).model, mx.float16)
    logger = Logger()
    logger.info = lines.append
    return model, *select_candidate(model, targets, candidates, logger), lines


def test_better_candidate_is_selected(case):
    tensors = case[1]
    _, best, divergences, lines = select(case, rtn=damaged(tensors), method=tensors)
    assert best == "method"
    assert list(divergences) == ["rtn", "method"]
    assert divergences["method"] < divergences["rtn"]
    assert lines[1].startswith("method: held-out KL ")
    assert "(rtn " in lines[1]
    assert "rejected" not in lines[1]


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_worse_candidate_is_rejected(case, factor):
    tensors = case[1]
    before = CandidateModel(load(case[0]).model, mx.float16).model(TOKENS[0])
    candidates = {"rtn": tensors, "method": damaged(tensors, factor)}
    model, best, _, lines = select(case, **candidates)
    assert best == "rtn"
    assert "rejected, keeping rtn" in lines[1]
    model.set_tensors(candidates[best])
    assert mx.array_equal(model.model(TOKENS[0]), before)
