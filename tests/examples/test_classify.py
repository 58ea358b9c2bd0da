"""examples/classify.py: the encoder among scikit-learn's parts, and what is said of attention."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from example_programs import EXAMPLES, loaded
from sklearn.base import clone
from sklearn.model_selection import cross_val_score

pytestmark = pytest.mark.thorough

classify, = loaded("classify")

SENTENCES = ["The unforgettable soup isn't hot.", "He ran.", "Our train to Vienna, late again!"]


def run_python(*arguments):
    program = [sys.executable, *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True, encoding="utf-8")


@pytest.fixture
def main(monkeypatch, capsys):
    """The program in this process, where the encoder is read already: what it prints, its exit."""
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["classify.py", *map(str, arguments)])
        try:
            classify.main()
        except SystemExit as left:
            return capsys.readouterr(), left.code
        return capsys.readouterr(), 0

    return call


@pytest.fixture(scope="module")
def labelled():
    return classify.read_labelled(classify.TOPICS)


@pytest.fixture(scope="module")
def classifier(labelled):
    sentences, topics = labelled
    return classify.text_classifier().fit(sentences[::2], topics[::2])


def test_the_sentences_are_five_topics_of_equal_size(labelled):
    sentences, topics = labelled
    assert len(set(sentences)) == len(sentences) == 120
    assert sorted(topics.count(topic) for topic in set(topics)) == [24] * 5


def test_topics_of_unseen_sentences(labelled, classifier):
    sentences, topics = labelled
    assert classifier.score(sentences[1::2], topics[1::2]) > 0.8
    shuffled = np.random.default_rng(0).permutation(topics[1::2])
    assert classifier.score(sentences[1::2], shuffled) < 0.4


def test_the_encoder_is_a_transformer_of_scikit_learn(labelled, classifier):
    encoder = classify.SentenceEmbeddings(batch_size=2)
    embeddings = encoder.fit_transform(SENTENCES)
    assert embeddings.shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)
    for sentence, embedding in zip(SENTENCES, embeddings):
        np.testing.assert_allclose(encoder.transform([sentence])[0], embedding, atol=1e-5)
    assert clone(encoder).get_params() == {"batch_size": 2}
    restored = pickle.loads(pickle.dumps(classifier))
    assert (restored.predict(SENTENCES) == classifier.predict(SENTENCES)).all()
    assert len(pickle.dumps(encoder)) < 1000
    sentences, topics = labelled
    assert cross_val_score(clone(classifier), sentences[::3], topics[::3], cv=2).mean() > 0.6


def test_attention_is_averaged_over_heads_and_real_tokens():
    weights = np.zeros((2, 2, 3, 3))
    weights[0] = [[[1, 0, 0], [0, 1, 0], [0, 1, 0]], [[0, 0, 1]] * 3]
    weights[1, :, :, :2] = 0.25, 0.75  # the third token is padding
    received = classify.attention_received(weights, np.array([3, 2]))
    np.testing.assert_allclose(received, [[1 / 6, 1 / 3, 1 / 2], [0.25, 0.75, 0]])


def test_shares_of_words_by_hand():
    looked = classify.looked_at(SENTENCES)
    assert looked[0].words() == ["The", "unforgettable", "soup", "isn't", "hot", "."]
    assert looked[2].words()[-4:] == [",", "late", "again", "!"]
    model = classify.sentence_encoder()
    for sentence, each in zip(SENTENCES, looked):  # alone: without padding
        ids, lengths, (tokens,) = model.tokenize([sentence])
        received = model.encode(ids, lengths).weights[-1][0].mean(axis=(0, 1))
        assert (tokens[0], tokens[-1]) == ("[CLS]", "[SEP]")
        np.testing.assert_allclose(each.shares.sum(), received[1:-1].sum(), atol=1e-5)
    pieces = [index for index, token in enumerate(model.tokenize(SENTENCES[:1])[2][0])
              if token in ("un", "isn", "'", "t") or token.startswith("##")]
    ids, lengths, _ = model.tokenize(SENTENCES[:1])
    received = model.encode(ids, lengths).weights[-1][0].mean(axis=(0, 1))
    assert len(pieces) > 4
    np.testing.assert_allclose(looked[0].shares[[1, 3]].sum(), received[pieces].sum(), atol=1e-5)


def test_losses_are_those_of_the_sentence_without_the_word(classifier):
    sentences = ["Melt butter!", "?"]
    first, second = classify.losses_without(classifier, sentences, classify.looked_at(sentences))
    whole, *without = classifier.predict_proba(["Melt butter!", " butter!", "Melt !"])
    wanted = [whole.max() - each[whole.argmax()] for each in without]
    np.testing.assert_allclose(first, [*wanted, np.nan], atol=1e-5)
    assert np.isnan(second).all() and len(second) == 1


def test_a_run_reports_and_draws(labelled, tmp_path):
    data = tmp_path / "some.tsv"
    rows = [f"{topic}\t{sentence}" for sentence, topic in zip(*labelled)]
    data.write_text("\n".join(rows[:6] + rows[50:56] + rows[100:106]), encoding="utf-8")
    finished = run_python(EXAMPLES / "classify.py", "--data", data, "--seed", "1",
                          "--output", tmp_path)
    assert finished.returncode == 0, finished.stderr
    printed = finished.stdout
    assert "9 sentences to train with, 9 to test" in printed
    accuracy = {line[4:24].strip(): float(line[24:].split()[0])
                for line in printed.splitlines() if "±" in line}
    assert accuracy["MiniLM's embedding"] > accuracy["TF-IDF of the words"]
    assert accuracy["always one topic"] == 0.33
    assert "precision" in printed and "the word most looked at" in printed
    assert (tmp_path / "classify.png").read_bytes().startswith(b"\x89PNG")


def test_topics_of_given_sentences(main):
    printed, status = main("The oven is too hot for this cake.", "", "?")
    assert status == 0
    first, topics, words = printed.out.splitlines()[:3]
    assert first == "The oven is too hot for this cake."
    assert topics.split()[0] == "cooking"
    assert "looked at:" in words and "oven" in words


@pytest.mark.parametrize(("text", "said"), [
    ("sport Nobody won.\n", "a topic, a tab and a sentence"), ("sport\tNobody won.\n", "topics"),
    ("a\tOne.\nb\tTwo.\nb\tThree.\n", "too few sentences of a topic")])
def test_data_that_do_not_fit_are_refused(text, said, tmp_path, main):
    data = tmp_path / "wrong.tsv"
    data.write_text(text, encoding="utf-8")
    printed, status = main("--data", data)
    assert status != 0 and said in printed.err + str(status)


def test_help_and_what_is_missing(main, tmp_path):
    assert "--data FILE" in main("--help")[0].out
    assert main("--data", tmp_path / "none.tsv")[1] == 2
    hidden = (f"import sys; sys.modules['sklearn'] = None; sys.path.insert(0, {str(EXAMPLES)!r})\n"
              "import classify")
    finished = run_python("-c", hidden)
    assert finished.returncode == 1
    assert finished.stderr.startswith("missing: scikit-learn")
