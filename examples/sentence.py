"""A trained sentence encoder whose every attention is mha: similarities, and what heads look at.

    python examples/sentence.py "A cat sits on the mat." "A kitten rests on a rug." "Shares fell."
"""

import argparse
import sys
import time
import webbrowser
from pathlib import Path

import numpy as np
from minilm import MiniLM

import mha

SENTENCES = [
    "The cat sat on the mat because it was warm.",
    "A kitten rested on the rug since it was cosy.",
    "Share prices fell sharply after the bank's report.",
    "The stock market dropped when the bank published its results.",
    "How do I bake bread without yeast?",
]
LARGEST_DIFFERENCE = 1e-5
HEADS_SHOWN = 3


def main():
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows ?
    options = arguments()
    model = MiniLM()
    ids, lengths, tokens = model.tokenize(options.sentences)
    start = time.perf_counter()
    encoded = model.encode(ids, lengths)
    milliseconds = 1000 * (time.perf_counter() - start)
    print(f"all-MiniLM-L6-v2: {len(ids)} sentences, {lengths.sum()} tokens,"
          f" {milliseconds:.0f} ms, mha {mha.__version__} ({mha.instruction_set()})\n")

    print_similarities(options.sentences, encoded.embeddings)
    sharpness = np.stack([sharpness_of_heads(weights, lengths) for weights in encoded.weights])
    layer, head = print_sharpest_heads(sharpness)
    length = lengths[0]
    print(f"\nLayer {layer}, head {head} on sentence 1 (row: from, column: to; percent)\n")
    print(mha.plot.text(encoded.weights[layer][0, head, :length, :length], tokens[0]))

    layer = layer if options.layer is None else options.layer
    save_heat_maps(encoded.weights[layer][:1, :, :length, :length], tokens[0], layer,
                   options.output)
    if options.view:
        show_page(options.sentences, encoded.weights, tokens, options.output)
    return check(model, ids, lengths, encoded)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sentences", nargs="*", help="default: five sentences on three subjects")
    parser.add_argument("--layer", type=int, choices=range(6),
                        help="whose heat maps to save (default: the layer of the sharpest head)")
    parser.add_argument("--output", type=Path, default=Path("output"),
                        help="the folder for the heat maps (default: output)")
    parser.add_argument("--view", action="store_true",
                        help="save a page with every head for all sentences, and open it")
    options = parser.parse_args()
    options.sentences = options.sentences or SENTENCES
    return options


def print_similarities(sentences, embeddings):
    """The cosine of every pair: 1 for the same meaning, about 0 for unrelated ones."""
    for number, sentence in enumerate(sentences, 1):
        print(f"{number:3} {sentence}")
    print("\ncosine " + "".join(f"{number:7}" for number in range(1, len(sentences) + 1)))
    for number, row in enumerate(embeddings @ embeddings.T, 1):
        print(f"{number:6} " + "".join(f"{cosine:7.3f}" for cosine in row))


def sharpness_of_heads(weights, lengths):
    """How sharply each head attends: the largest weight of a row, averaged over the real tokens.

    weights (batch, heads, len, len) -> (heads,); 1 is a head that always looks at one token.
    """
    largest = weights.max(axis=-1)  # (batch, heads, len)
    real = np.arange(weights.shape[-2]) < lengths[:, None]
    return (largest * real[:, None]).sum(axis=(0, 2)) / lengths.sum()


def print_sharpest_heads(sharpness):
    """A line a layer; returns layer and head of the sharpest of all."""
    print("\nThe heads that attend most sharply (mean of each token's largest weight)")
    for layer, heads in enumerate(sharpness):
        sharpest = np.argsort(-heads)[:HEADS_SHOWN]
        print(f"layer {layer}: " + ", ".join(f"head {h:2} {heads[h]:.2f}" for h in sharpest))
    return np.unravel_index(sharpness.argmax(), sharpness.shape)


def save_heat_maps(weights, tokens, layer, folder):
    try:
        figure = mha.plot.heads(weights, tokens, title=f"all-MiniLM-L6-v2, layer {layer}")
    except ImportError as error:
        print(f"\nNo heat maps: {error}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"layer_{layer}.png"
    figure.savefig(path)
    print(f"\nHeat maps of layer {layer}: {path}")


def show_page(sentences, weights_of_layers, tokens, folder):
    """A page of `mha.view` with a list of the sentences, in the browser."""
    views = []
    for item, (sentence, words) in enumerate(zip(sentences, tokens)):
        real = [weights[item, :, :len(words), :len(words)] for weights in weights_of_layers]
        views.append(mha.view.model(real, words, title=sentence))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sentences.html"
    mha.view.several(views, title="all-MiniLM-L6-v2").save(path)
    print(f"\n{path}: every head of every layer, a sentence at a time")
    if not webbrowser.open(path.resolve().as_uri()):
        print("No browser here: open the page in one.")


def check(model, ids, lengths, encoded):
    """Compare with the network on `mha.reference`, real tokens only; the exit status."""
    reference = model.encode_by_reference(ids, lengths)
    real = np.arange(ids.shape[1]) < lengths[:, None]
    in_layers = max(np.abs(ours[real] - theirs[real]).max()
                    for ours, theirs in zip(encoded.hidden, reference.hidden))
    in_embeddings = np.abs(encoded.embeddings - reference.embeddings).max()
    agrees = max(in_layers, in_embeddings) <= LARGEST_DIFFERENCE
    print(f"\nAgainst the same network on mha.reference: largest difference {in_embeddings:.1e} in"
          f" the embeddings,\n{in_layers:.1e} in the layers' outputs (at most"
          f" {LARGEST_DIFFERENCE:.0e} allowed): {'OK' if agrees else 'TOO LARGE'}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
