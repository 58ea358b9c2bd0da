"""Which attention heads does a trained sentence encoder need? Heads of all-MiniLM-L6-v2 are pruned
in the order of five importance scores, and in random order, and the similarities of sentences
compared with those of the whole model.

    python examples/prune_heads.py [--pairs 32] [--sentences 36] [--text FILE]

The sentences are prose that ships with Python, its documentation, or your own. For the scores that
need a loss, a sentence has to find the one that follows it among all others, as in the model's own
training.
"""

import argparse
import re
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from minilm import NUM_HEADS, MiniLM

try:
    from tqdm import tqdm
except ImportError:
    sys.exit("missing: tqdm. Install what the examples need with\n"
             "    pip install --no-deps -r examples/requirements.txt")

import mha

TEMPERATURE = 0.05  # of the loss, as in the model's own training
HEADS_A_STEP = 6


def sentence_pairs(texts, shortest=40, longest=110):
    """Consecutive sentences of one paragraph, over all texts; no sentence twice."""
    pairs, seen = [], set()
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            if re.search(r"^\s|[*|=]{3}", paragraph, re.MULTILINE):
                continue  # code, tables and headings
            sentences = re.split(r"(?<=[a-z)][.])\s+(?=[A-Z])", " ".join(paragraph.split()))
            for pair in zip(sentences[::2], sentences[1::2]):
                if (all(shortest <= len(sentence) <= longest for sentence in pair)
                        and seen.isdisjoint(pair)):
                    pairs.append(pair)
                    seen.update(pair)
    return pairs


class NextSentence:
    """The loss: -log of the probability that a sentence finds its partner among all partners. The
    partners' embeddings are the whole model's throughout: heads act on the sentences alone."""

    def __init__(self, model, pairs):
        self.model = model
        self.ids, self.lengths, _ = model.tokenize([first for first, _ in pairs])
        ids, lengths, _ = model.tokenize([second for _, second in pairs])
        self.partners = model.encode(ids, lengths).embeddings

    def _log_probabilities(self, embeddings):
        logits = embeddings @ self.partners.T / TEMPERATURE
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    def loss(self, gates):
        """The mean over the sentences, with these gates (layers, heads)."""
        embeddings = self.model.encode(self.ids, self.lengths, gates).embeddings
        return -np.diagonal(self._log_probabilities(embeddings)).mean()

    def gate_gradients(self):
        """For each sentence alone: the gradient of its loss with respect to all gates."""
        for number, length in enumerate(self.lengths):
            embedding, pullback = self.model.embeddings_vjp(
                self.ids[number:number + 1, :length], self.lengths[number:number + 1])
            grad = np.exp(self._log_probabilities(embedding))
            grad[0, number] -= 1
            yield pullback(grad @ self.partners / TEMPERATURE)


def scores_of_heads(model, pairs):
    """Name -> (layers, heads): the larger, the more important."""
    task = NextSentence(model, pairs)
    weights = model.encode(task.ids, task.lengths).weights

    def of_layers(function):
        return np.array([function(layer, lengths=task.lengths) for layer in weights])

    ablation = mha.importance.ablation(task.loss, (len(model.attention_layers), NUM_HEADS))
    gradients = tqdm(task.gate_gradients(), "gradients", len(pairs), unit="sentence")
    return {"gradient": mha.importance.gradient(gradients), "ablation": ablation,
            "confidence": of_layers(mha.importance.confidence),
            "variance": of_layers(mha.importance.variance),
            "entropy (large goes first)": -of_layers(mha.importance.entropy)}


def pruning_order(scores):
    """(layer, head) from the least important on, the last head of each layer left out."""
    left = [scores.shape[1]] * scores.shape[0]
    order = []
    for flat in np.argsort(scores, axis=None, kind="stable"):
        layer, head = (int(index) for index in np.unravel_index(flat, scores.shape))
        if left[layer] > 1:
            left[layer] -= 1
            order.append((layer, head))
    return order


def similarities(model, ids, lengths):
    """The cosines of all pairs of different sentences."""
    embeddings = model.encode(ids, lengths).embeddings
    return (embeddings @ embeddings.T)[np.triu_indices(len(ids), 1)]


def curves(model, orders, counts, ids, lengths):
    """Name -> the correlation of the similarities with the whole model's, at each count."""
    whole, curves = similarities(model, ids, lengths), {}
    with tqdm(total=len(orders) * len(counts), desc="pruning", unit="model") as progress:
        for name, order in orders.items():
            curves[name] = []
            for count in counts:
                pruned = similarities(model.pruned(order[:count]), ids, lengths)
                curves[name].append(float(np.corrcoef(whole, pruned)[0, 1]))
                progress.update()
    return curves


def print_table(counts, curves, random):
    print("\ncorrelation of the similarities with the whole model's, by heads removed")
    print(f"{'heads removed':27}" + "".join(f"{count:6}" for count in counts))
    for name, values in [*curves.items(), ("random (mean)", random.mean(axis=0))]:
        print(f"{name:27}" + "".join(f"{value:6.2f}" for value in values))


def plot(counts, curves, random, scores, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained",
                                         width_ratios=[1.1, 1])
    for (name, values), marker in zip(curves.items(), "osd^v"):
        left.plot(counts, values, marker=marker, markersize=4, label=name)
    left.plot(counts, random.mean(axis=0), color="black", linestyle="--", label="random")
    left.fill_between(counts, random.min(axis=0), random.max(axis=0), color="black", alpha=0.12)
    left.set(xlabel=f"heads removed, of {scores.size}", ylim=(left.get_ylim()[0], 1.02),
             ylabel="correlation with the whole model", title="How sentence similarities hold up")
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    mha.plot.importance(scores, label="gradient score", ax=right, title="What each head is worth")
    figure.savefig(path, dpi=120)


def report_half(model, order, ids, lengths):
    """What really pruning half of the heads changes, and that it gives what gates give."""
    half = order[:sum(layer.num_heads for layer in model.attention_layers) // 2]
    gates = np.ones((len(model.attention_layers), NUM_HEADS))
    gates[tuple(zip(*half))] = 0
    small = model.pruned(half)
    gated = model.encode(ids, lengths, gates).embeddings
    difference = np.abs(small.encode(ids, lengths).embeddings - gated).max()
    print(f"\n{len(half)} heads removed by gradient score: embeddings differ from the gated model's"
          f" by at most {difference:.1e}")
    models = {"whole": model, "pruned": small}
    milliseconds = attention_milliseconds(models, ids)
    for name, each in models.items():
        parameters = sum(layer.num_parameters for layer in each.attention_layers)
        print(f"{name:7} attention: {parameters:9,} parameters,"
              f" {milliseconds[name]:5.1f} ms for {ids.size:,} tokens")
    return difference


def attention_milliseconds(models, ids, rounds=20):
    """All attention layers one after the other; the median of rounds in which models take turns."""
    width = next(iter(models.values())).attention_layers[0].embed_dim
    x = np.random.default_rng(0).standard_normal((*ids.shape, width), np.float32)
    times = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            start = time.perf_counter()
            for layer in model.attention_layers:
                layer(x)
            times[name].append(time.perf_counter() - start)
    return {name: 1000 * float(np.median(of_model)) for name, of_model in times.items()}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--pairs", type=int, default=32, help="pairs of sentences for the scores")
    parser.add_argument("--sentences", type=int, default=36, help="other ones, to compare by")
    parser.add_argument("--random", type=int, default=5, help="how many random orders")
    parser.add_argument("--text", type=Path, help="a file of prose (UTF-8) in the place of Python's"
                        " documentation")
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder of the plot")
    options = parser.parse_args()
    if min(options.pairs, options.sentences) < 2 or options.random < 1:
        parser.error("--pairs and --sentences: at least 2, --random: at least 1")
    options.texts = list(topics.values())
    if options.text is not None:
        try:
            options.texts = [options.text.read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--text: {error}")
    return options


def main():
    options = arguments()
    model = MiniLM()
    pairs = sentence_pairs(options.texts)
    rng = np.random.default_rng(0)
    rng.shuffle(pairs)
    if len(pairs) < options.pairs + options.sentences:
        source = options.text or "this Python's documentation"
        sys.exit(f"{source} has {len(pairs)} pairs of sentences that fit, wanted"
                 f" {options.pairs} + {options.sentences}: lower --pairs or --sentences")
    others = [first for first, _ in pairs[options.pairs:options.pairs + options.sentences]]
    ids, lengths, _ = model.tokenize(others)
    print(f"{options.pairs} pairs of sentences for the scores, such as\n"
          f"    {pairs[0][0]}\n    {pairs[0][1]}\nand {len(others)} other sentences to compare by")

    scores = scores_of_heads(model, pairs[:options.pairs])
    orders = {name: pruning_order(of_heads) for name, of_heads in scores.items()}
    shape = scores["gradient"].shape
    orders |= {("random", i): pruning_order(rng.random(shape)) for i in range(options.random)}
    counts = range(0, scores["gradient"].size - shape[0] + 1, HEADS_A_STEP)
    found = curves(model, orders, counts, ids, lengths)
    random = np.array([found.pop(("random", i)) for i in range(options.random)])

    print_table(counts, found, random)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "prune_heads.png"
    plot(counts, found, random, scores["gradient"], path)
    difference = report_half(model, orders["gradient"], ids, lengths)
    print(f"\nplot: {path}")
    return 0 if difference < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
