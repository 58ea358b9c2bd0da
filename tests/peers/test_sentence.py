"""The sentence encoder of the examples against the same network computed by PyTorch."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
from minilm import NUM_HEADS, MiniLM
from sentence import SENTENCES

BATCHES = {
    "the example's": SENTENCES,
    "one": ["A single sentence."],
    "very different lengths": ["Yes.", "word " * 300, "Größe, naïve, 猫 and ☃!"],
}


@pytest.fixture(scope="module")
def model():
    return MiniLM()


def encoded_by_torch(model, ids, lengths):
    """BERT as its paper has it, mean-pooled: (batch, 384)."""
    tensors = {name: torch.from_numpy(array) for name, array in model.tensors.items()}

    def linear(x, name):
        return functional.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def norm(x, name):
        return functional.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"],
                                     tensors[f"{name}.bias"], 1e-12)

    def heads(x):
        return x.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)

    ids, lengths = torch.from_numpy(ids), torch.from_numpy(lengths)
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    x = norm(tensors["embeddings.word_embeddings.weight"][ids]
             + tensors["embeddings.position_embeddings.weight"][:ids.shape[1]]
             + tensors["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for index in range(6):
        layer = f"encoder.layer.{index}"
        attended = functional.scaled_dot_product_attention(
            *(heads(linear(x, f"{layer}.attention.self.{name}"))
              for name in ("query", "key", "value")), attn_mask=real[:, None, None])
        attended = linear(attended.transpose(1, 2).flatten(-2), f"{layer}.attention.output.dense")
        x = norm(x + attended, f"{layer}.attention.output.LayerNorm")
        inner = functional.gelu(linear(x, f"{layer}.intermediate.dense"))
        x = norm(x + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    mean = (x * real[..., None]).sum(1) / lengths[:, None]
    return functional.normalize(mean).numpy()


@pytest.mark.parametrize("batch", BATCHES)
def test_embeddings_are_those_of_pytorch(model, batch):
    ids, lengths, _ = model.tokenize(BATCHES[batch])
    with torch.no_grad():
        expected = encoded_by_torch(model, ids, lengths)
    ours = model.encode(ids, lengths).embeddings
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)
