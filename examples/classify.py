"""What is a sentence about? A text classifier the way scikit-learn's users build one: a trained
sentence encoder, frozen, whose every attention is mha, and a logistic regression behind it.

    python examples/classify.py                            train, test, and draw what it looked at
    python examples/classify.py "The oven is too hot."     topics of sentences of your own
    python examples/classify.py --data FILE                a line a sentence: topic, tab, sentence

How much the heads look at a word: the last layer's weights for it, averaged over the heads and over
all tokens that look, since the encoder averages these tokens. That says where information was
fetched from and not why a topic was chosen; so the program also leaves out each word in turn and
shows whether the words looked at are the ones that count.
"""

import argparse
import functools
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from minilm import MiniLM

try:
    from sklearn.base import BaseEstimator, TransformerMixin
    from sklearn.dummy import DummyClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import ConfusionMatrixDisplay, classification_report
    from sklearn.model_selection import train_test_split
    from sklearn.pipeline import Pipeline
except ImportError:
    sys.exit("missing: scikit-learn. Install what the example needs with\n"
             "    pip install scikit-learn && pip install --no-deps -r examples/requirements.txt")

import mha

TOPICS = Path(__file__).parent / "data" / "topics.tsv"
WORD = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")  # punctuation by itself: heads like to rest on it
LOOKED_INTO = 60  # test sentences at most: each is encoded once more for each of its words
COLOURS = "YlOrRd"  # as in mha.plot


@functools.cache
def sentence_encoder():
    return MiniLM()


class SentenceEmbeddings(TransformerMixin, BaseEstimator):
    """Sentences -> their embeddings (number of sentences, 384). There is nothing to fit, and what
    is pickled with a pipeline is `batch_size` alone."""

    def __init__(self, batch_size=32):
        self.batch_size = batch_size

    def fit(self, sentences, topics=None):
        return self

    def transform(self, sentences):
        model, sentences = sentence_encoder(), list(sentences)
        # Sentences of like lengths together: less padding. It changes no embedding.
        order = np.argsort([len(sentence) for sentence in sentences], kind="stable")
        embeddings = np.empty((len(sentences), model.attention_layers[0].embed_dim), np.float32)
        for start in range(0, len(order), self.batch_size):
            batch = order[start:start + self.batch_size]
            ids, lengths, _ = model.tokenize([sentences[index] for index in batch])
            embeddings[batch] = model.encode(ids, lengths).embeddings
        return embeddings

    def __sklearn_is_fitted__(self):
        return True


def text_classifier():
    # Embeddings have length 1, so coefficients have to be large: little regularisation.
    return Pipeline([("embed", SentenceEmbeddings()),
                     ("classify", LogisticRegression(C=10, max_iter=1000))])


class Looked(NamedTuple):
    """A sentence, and how much of the heads' attention each of its words gets."""

    sentence: str
    spans: list        # (start, end) of each word and punctuation mark in the sentence
    shares: np.ndarray  # of all attention; what is missing to 1 goes to [CLS] and [SEP]

    def words(self):
        return [self.sentence[start:end] for start, end in self.spans]


def looked_at(sentences, layer=-1):
    """A `Looked` for each sentence, by one layer of the encoder."""
    model = sentence_encoder()
    ids, lengths, _ = model.tokenize(sentences)
    received = attention_received(model.encode(ids, lengths).weights[layer], lengths)
    encodings = model.tokenizer.encode_batch(sentences)
    return [Looked(sentence, *by_word(sentence, encoding.offsets, of_tokens))
            for sentence, encoding, of_tokens in zip(sentences, encodings, received)]


def attention_received(weights, lengths):
    """How much each token is looked at: weights (batch, heads, len, len), averaged over the heads
    and the real tokens that look, -> (batch, len), whose rows sum to 1."""
    real = np.arange(weights.shape[-1]) < lengths[:, None]
    return (weights.mean(axis=1) * real[..., None]).sum(axis=1) / lengths[:, None]


def by_word(sentence, offsets, of_tokens):
    """The spans of the words, and the sum of each word's pieces. [CLS] and [SEP] lie nowhere."""
    spans = [match.span() for match in WORD.finditer(sentence)]
    shares = np.zeros(len(spans))
    for (start, end), share in zip(offsets, of_tokens):
        for index, (first, last) in enumerate(spans):
            if first <= start < end <= last:
                shares[index] += share
    return spans, shares


def losses_without(classifier, sentences, looked):
    """For each sentence: by how much the probability of its predicted topic falls when each of its
    words is left out. Punctuation is never left out: NaN."""
    whole = classifier.predict_proba(sentences)
    left_out, places = [], []
    losses = [np.full(len(each.spans), np.nan) for each in looked]
    for number, each in enumerate(looked):
        for index, (start, end) in enumerate(each.spans):
            if each.sentence[start].isalnum():
                left_out.append(each.sentence[:start] + each.sentence[end:])
                places.append((number, index))
    if left_out:
        for (number, index), without in zip(places, classifier.predict_proba(left_out)):
            topic = whole[number].argmax()
            losses[number][index] = whole[number, topic] - without[topic]
    return losses


def main():
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows ?
    options = arguments()
    sentences, topics = options.labelled
    sentence_encoder()  # says what is missing, if anything is, before all else
    if options.sentences:
        print_topics(text_classifier().fit(sentences, topics), options.sentences)
        return
    try:
        train, test, train_topics, test_topics = train_test_split(
            sentences, topics, test_size=0.5, stratify=topics, random_state=options.seed)
    except ValueError as error:
        sys.exit(f"{options.data}: too few sentences of a topic to train and test: {error}")
    print(f"{len(train)} sentences to train with, {len(test)} to test; mha {mha.__version__}"
          f" ({mha.instruction_set()})\n")
    classifier = text_classifier().fit(train, train_topics)
    print_accuracies(classifier, train, train_topics, test, test_topics)
    predicted = classifier.predict(test)
    print("\n" + classification_report(test_topics, predicted, zero_division=0))

    looked = looked_at(test[:LOOKED_INTO])
    losses = losses_without(classifier, test[:LOOKED_INTO], looked)
    print_whether_attention_counts(looked, losses)
    save_picture(test_topics, predicted, looked, losses, options.output)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE",
                        help="tell these sentences' topics, by a classifier trained with all data")
    parser.add_argument("--data", type=Path, default=TOPICS, metavar="FILE",
                        help="labelled sentences, UTF-8 (default: examples/data/topics.tsv)")
    parser.add_argument("--seed", type=int, default=0,
                        help="which half of the data trains, which tests (default: 0)")
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="FOLDER",
                        help="for the picture (default: output)")
    options = parser.parse_args()
    try:
        options.labelled = read_labelled(options.data)
    except (OSError, ValueError) as error:
        parser.error(f"--data: {error}")
    return options


def read_labelled(path):
    """The sentences of a file, and their topics."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()
            if line.strip()]
    for row in rows:
        if len(row) != 2:
            raise ValueError(f"{path}: got {row}, wanted a topic, a tab and a sentence")
    topics, sentences = [row[0] for row in rows], [row[1] for row in rows]
    if len(set(topics)) < 2:
        raise ValueError(f"{path}: got {len(set(topics))} topics, wanted at least 2")
    return sentences, topics


def print_topics(classifier, sentences):
    looked = looked_at(sentences)
    losses = losses_without(classifier, sentences, looked)
    for each, loss, chances in zip(looked, losses, classifier.predict_proba(sentences)):
        first, second = np.argsort(-chances)[:2]
        print(f"{each.sentence}\n    {classifier.classes_[first]} {chances[first]:.2f},"
              f" {classifier.classes_[second]} {chances[second]:.2f}")
        words = each.words()
        most = [f"{words[index]} {each.shares[index]:.0%}" for index in by_attention(each, loss)]
        if most:
            print(f"    looked at: {', '.join(most[:3])}; \"{words[np.nanargmax(loss)]}\" counts"
                  f" most: {chances[first] - np.nanmax(loss):.2f} without it")


def by_attention(looked, loss):
    """The indices of the words, punctuation left out, from the one most looked at on."""
    return [index for index in np.argsort(-looked.shares, kind="stable")
            if not np.isnan(loss[index])]


def print_accuracies(classifier, train, train_topics, test, test_topics):
    others = {"TF-IDF of the words": Pipeline([("words", TfidfVectorizer(stop_words="english")),
                                               ("classify", LogisticRegression(C=10))]),
              "always one topic": DummyClassifier()}
    print("accuracy, and its standard error")
    for name, each in {"MiniLM's embedding": classifier, **others}.items():
        share = each.fit(train, train_topics).score(test, test_topics)
        print(f"    {name:20} {share:.2f} ± {np.sqrt(share * (1 - share) / len(test)):.2f}")


def print_whether_attention_counts(looked, losses):
    """What the topic's probability loses without the word that is most looked at."""
    on_words = np.mean([each.shares.sum() for each in looked])
    print(f"The last layer's heads give {on_words:.0%} of their attention to the words and"
          " punctuation, the rest to\n[CLS] and [SEP]. Without one of its words, the probability of"
          " a sentence's topic falls by")
    pairs = [(each, loss) for each, loss in zip(looked, losses) if not np.isnan(loss).all()]
    most = [by_attention(*pair)[0] for pair in pairs]
    falls = {"the word most looked at": [loss[index] for (_, loss), index in zip(pairs, most)],
             "any word": [np.nanmean(loss) for _, loss in pairs],
             "the word that counts most": [np.nanmax(loss) for _, loss in pairs]}
    for name, fall in falls.items():
        print(f"    {name:26} {np.mean(fall):.3f}")
    same = np.mean([np.nanargmax(loss) == index for (_, loss), index in zip(pairs, most)])
    print(f"The first and the last are the same word in {same:.0%} of the sentences.")


def save_picture(topics, predicted, looked, losses, folder):
    try:
        import matplotlib
    except ImportError:
        print("\nNo picture: pip install matplotlib")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = shown_sentences(topics[:len(looked)], predicted)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.6), width_ratios=[1, 1.3], dpi=120,
                                         layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    ConfusionMatrixDisplay.from_predictions(topics, predicted, ax=left, cmap="Blues",
                                            colorbar=False)
    share = np.mean(np.array(topics) == predicted)
    left.set_title(f"{share:.0%} of {len(topics)} test sentences are right", pad=12)
    left.set(xlabel="predicted topic", ylabel="topic")

    largest = max(each.shares[by_attention(each, loss)[:1]].max(initial=0.01)
                  for each, loss in ((looked[index], losses[index]) for index in shown))
    colours = plt.cm.ScalarMappable(plt.Normalize(0, 100 * largest), COLOURS)
    right.set(xlim=(0, 1), ylim=(len(shown), 0))
    right.set_axis_off()
    right.set_title("Where the last layer's heads look", pad=12)
    figure.colorbar(colours, ax=right, orientation="horizontal", aspect=50, shrink=0.8, pad=0,
                    label="percent of all heads' and tokens' attention\nunderlined: the word that"
                          " the prediction needs most")
    figure.canvas.draw()  # settles where the panels lie, and with it how wide words are in them
    for row, index in enumerate(shown):
        wrong = predicted[index] != topics[index]
        label = predicted[index] + (f", labelled {topics[index]}" if wrong else "")
        right.text(0.01, row + 0.14, label, fontsize=9.5, color="#b00020" if wrong else "#555555",
                   va="center")
        draw_words(right, row + 0.56, looked[index], losses[index], colours)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "classify.png"
    figure.savefig(path)
    print(f"\npicture: {path}")


def shown_sentences(topics, predicted, wrong=3):
    """The indices of each topic's first sentence that is right, and of the first wrong ones."""
    right = [index for index, topic in enumerate(topics) if topic == predicted[index]]
    first = {topics[index]: index for index in reversed(right)}
    mistakes = [index for index, topic in enumerate(topics) if topic != predicted[index]]
    return [first[topic] for topic in sorted(first)] + mistakes[:wrong]


def draw_words(ax, y, looked, loss, colours):
    """The words side by side, in boxes coloured by what attention they get, while there is room."""
    x, last, renderer = 0, 0, ax.figure.canvas.get_renderer()
    counts_most = None if np.isnan(loss).all() else np.nanargmax(loss)
    for index, ((start, end), word) in enumerate(zip(looked.spans, looked.words())):
        colour = colours.to_rgba(100 * looked.shares[index])
        dark = np.dot(colour[:3], (0.299, 0.587, 0.114)) < 0.5
        text = ax.text(x + (0.016 if start > last or not index else 0.009), y, word, fontsize=12.5,
                       va="center_baseline", color="white" if dark else "black",
                       bbox={"boxstyle": "square,pad=0.15", "facecolor": colour, "linewidth": 0})
        box = text.get_window_extent(renderer).transformed(ax.transData.inverted())
        if box.x1 > 0.97:
            text.set(text="...", color="black", bbox=None)
            return
        if index == counts_most:
            below = box.y0 + 0.28 * (box.y0 - box.y1)
            ax.plot([box.x0, box.x1], [below, below], color="black", linewidth=2)
        x, last = box.x1, end


if __name__ == "__main__":
    main()
