"""Every mistake of the learners gets its name, and no right code like it is blamed."""

import learners_attention
import learners_layers
import learners_masks
import learners_right
import numpy as np
import pytest

import mha
from mha import compat
from mha.testing import diagnose

MISTAKES = [*learners_attention.MISTAKES, *learners_layers.MISTAKES, *learners_masks.MISTAKES]


def softmax(scores, axis=-1):
    exponentials = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return exponentials / exponentials.sum(axis=axis, keepdims=True)


@pytest.fixture(autouse=True)
def _failures_are_not_passed_over(monkeypatch):
    monkeypatch.setenv("MHA_DIAGNOSE_RAISES", "1")


def made(source):
    """The function or class that the source defines."""
    names = {"np": np, "softmax": softmax}
    exec(source, names)
    return next(names[name] for name in ("Layer", "attention", "causal_attention") if name in names)


def test_there_are_enough_of_them():
    assert len({mistake.name for mistake in MISTAKES}) > 100


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name[:40])
def test_a_mistake_gets_its_name(mistake):
    found = diagnose(made(mistake.source(mistake.wrong)))
    assert not found
    assert mistake.name in "\n".join(found.problems), found


@pytest.mark.parametrize("source", dict.fromkeys(
    mistake.source(line) for mistake in MISTAKES for line in (mistake.right, mistake.alike)
    if line is not None), ids=lambda source: None)
def test_right_code_like_it_is_not_blamed(source):
    found = diagnose(made(source))
    assert found, found


@pytest.mark.parametrize(("note", "source"), learners_right.RIGHT)
def test_right_code_in_other_styles_is_not_blamed(note, source):
    found = diagnose(made(source))
    assert found, found
    assert any(words in str(found) for words in note.split("|")), found


@pytest.mark.parametrize("layer", [
    compat.numpy_tutorial.MultiHeadAttention, compat.numpy_tutorial.scaled_dot_product_attention,
    compat.pytorch.MultiheadAttention, compat.pytorch.MultiheadAttention(16, 4, batch_first=True),
    compat.pytorch.scaled_dot_product_attention, compat.pytorch_notebook.MultiHeadAttention,
    compat.pytorch_notebook.scaled_dot_product_attention,
    compat.d2l.torch.MultiHeadAttention, compat.d2l.torch.DotProductAttention,
    mha.reference.multi_head_attention, mha.multi_head_attention,
], ids=lambda layer: getattr(layer, "__qualname__", "an instance"))
def test_the_librarys_own_are_correct(layer):
    found = diagnose(layer)
    assert found, found
