"""The examples run from start to end, as a reader would run them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from example_programs import EXAMPLES, loaded

# Python's own documentation differs by version.
PROSE = Path(__file__).parent.parent / "data" / "prose.txt"
PARAPHRASES = [
    "A man is playing a guitar on stage.",
    "Someone performs with a guitar in a concert.",
    "The recipe needs two eggs and a cup of flour.",
    "You need two eggs and some flour for this dish.",
]


def run_sentence(*arguments, folder):
    program = [sys.executable, str(EXAMPLES / "sentence.py"), *arguments]
    return subprocess.run(program, capture_output=True, text=True, cwd=folder, encoding="utf-8")


def cosines(printed):
    lines = printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("cosine"))
    size = len(lines[start].split()) - 1
    return np.array([line.split()[1:] for line in lines[start + 1:start + 1 + size]], float)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentence")
    finished = run_sentence(*PARAPHRASES, "--layer", "3", folder=folder)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout, folder


def test_paraphrases_are_more_similar_than_unrelated_sentences(run):
    similarity = cosines(run[0])
    np.testing.assert_allclose(np.diag(similarity), 1, atol=0.001)
    np.testing.assert_array_equal(similarity, similarity.T)
    assert similarity[0, 1] > 0.6 and similarity[2, 3] > 0.6
    assert similarity[:2, 2:].max() < 0.3


def test_every_layer_names_its_sharpest_heads(run):
    lines = [line for line in run[0].splitlines() if line.startswith("layer ")]
    assert len(lines) == 6
    for line in lines:
        sharpness = [float(part.split()[-1]) for part in line.split(",")]
        assert len(sharpness) == 3
        assert sharpness == sorted(sharpness, reverse=True)
        assert 0 < sharpness[0] <= 1


def test_the_heat_maps_are_a_picture_and_a_text(run):
    printed, folder = run
    assert (folder / "output" / "layer_3.png").read_bytes().startswith(b"\x89PNG")
    assert "[CLS]" in printed and "guitar" in printed and "█" in printed


def test_it_agrees_with_the_reference(run):
    assert "largest difference" in run[0] and run[0].rstrip().endswith("OK")


@pytest.mark.thorough
def test_padding_does_not_change_a_sentence(tmp_path):
    long = PARAPHRASES[2] + " " + PARAPHRASES[3]
    alone = cosines(run_sentence(*PARAPHRASES[:2], folder=tmp_path).stdout)
    padded = cosines(run_sentence(*PARAPHRASES[:2], long, folder=tmp_path).stdout)
    assert abs(alone[0, 1] - padded[0, 1]) <= 0.001


def test_help_and_wrong_arguments(tmp_path):
    assert "--layer" in run_sentence("--help", folder=tmp_path).stdout
    assert run_sentence("--layer", "6", folder=tmp_path).returncode == 2


@pytest.mark.thorough
@pytest.mark.parametrize("name", [
    "multi_head_attention.ipynb", "masks.ipynb", "masks_of_long_sequences.ipynb", "training.ipynb",
    "decoding.ipynb", "heads_that_matter.ipynb", "long_sequences.ipynb", "d2l.ipynb"])
def test_notebooks_run(name):
    # This test's own clock is the one that counts, also where it was stopped for a slow machine:
    # not pytest's in there, nor that of each cell.
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=0",
               "--nbmake", "--nbmake-timeout=-1", str(EXAMPLES / name)]
    finished = subprocess.run(program, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout


@pytest.mark.thorough
def test_heads_are_pruned_by_every_score(tmp_path):
    program = [sys.executable, str(EXAMPLES / "prune_heads.py"), "--pairs", "5", "--sentences", "6",
               "--random", "1", "--text", str(PROSE), "--output", str(tmp_path)]
    finished = subprocess.run(program, capture_output=True, text=True, encoding="utf-8")
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("heads removed"))
    assert lines[start].split()[2:] == [str(count) for count in range(0, 67, 6)]
    for line, name in zip(lines[start + 1:start + 7],
                          ("gradient", "ablation", "confidence", "variance", "entropy", "random")):
        assert line.startswith(name)
        correlations = [float(value) for value in line[27:].split()]
        assert correlations[0] == 1
        assert correlations[-1] < correlations[1] <= 1
    assert "whole   attention: 3,548,160 parameters" in finished.stdout
    assert (tmp_path / "prune_heads.png").read_bytes().startswith(b"\x89PNG")


def test_gate_gradients_of_the_sentence_encoder():
    """Against central differences of the loss in single gates, in float32."""
    minilm, prune_heads = loaded("minilm", "prune_heads")
    model = minilm.MiniLM()
    pairs = prune_heads.sentence_pairs([PROSE.read_text(encoding="utf-8")])
    assert len(pairs) == 36
    task = prune_heads.NextSentence(model, pairs[:4])
    gradient = np.mean(list(task.gate_gradients()), axis=0)
    for gate in [(0, 3), (2, 11), (4, 10), (5, 8)]:
        losses = []
        for step in (0.05, -0.05):
            gates = np.ones((6, 12))
            gates[gate] += step
            losses.append(task.loss(gates))
        slope = (losses[0] - losses[1]) / 0.1
        assert abs(slope - gradient[gate]) < 2e-4 + 0.05 * abs(slope), gate
