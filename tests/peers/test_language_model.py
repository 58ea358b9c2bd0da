"""The language model of the examples against the same model in PyTorch, from the same start."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
from peers import pytorch_language_model
from train_language_model import LanguageModel, Settings, Text, Training

torch.manual_seed(0)
pytestmark = pytest.mark.timeout(1500)  # both without vectors, on a busy machine


@pytest.fixture(scope="module")
def text():
    return Text()


@pytest.mark.parametrize(("steps", "reached"), [
    (15, 4.2), pytest.param(100, 3, marks=pytest.mark.thorough)])
def test_the_loss_curve_is_pytorchs(text, steps, reached):
    """Without dropout, each loss to 1e-3."""
    ours = Training(Settings(dropout=0.0), text)
    theirs = pytorch_language_model.Training(ours)
    differences = [abs(ours.step() - theirs.step()) for _ in range(steps)]
    assert max(differences) < 1e-3, max(differences)
    assert ours.losses[-1] < reached < ours.losses[0]


def test_gradients_are_pytorchs(text):
    """Every number of every gradient, to 1e-11 of its array's largest. In float64: a few inputs of
    max(0, x) are so near 0 that the rounding of float32 decides on which side they are."""
    ours = Training(Settings(dropout=0.0, blocks=2), text)
    ours.model = LanguageModel(len(text.characters), ours.settings, np.float64)
    theirs = pytorch_language_model.Training(ours)
    theirs.model.double().load(ours.model.parameters)
    _, pullback = ours.model.loss_vjp(*ours.batch_of(1)[:2])
    theirs.step()
    expected = pytorch_language_model.LanguageModel(len(text.characters), ours.settings).double()
    expected.load(pullback())  # a gradient in each parameter's place
    for (name, got), wanted in zip(theirs.model.named_parameters(), expected.parameters(),
                                   strict=True):
        largest = float(got.grad.abs().max())
        assert float((got.grad - wanted.detach()).abs().max()) < 1e-11 * largest, name


@pytest.mark.thorough
def test_with_dropout_the_losses_fall_alike(text):
    """Other masks, the same distribution: the mean of some steps is the same to 0.05."""
    ours = Training(Settings(dropout=0.3, blocks=2), text)
    theirs = pytorch_language_model.Training(ours)
    for _ in range(60):
        ours.step()
        theirs.step()
    assert abs(np.mean(ours.losses[30:]) - np.mean(theirs.losses[30:])) < 0.05
