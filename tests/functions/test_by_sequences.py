"""A layer over many sequences gives the bits of each by itself, in whatever groups threads take
them through all steps (csrc/core/layer/by_sequences.c). A layer that is not frozen goes step by
step.
"""

import numpy as np
import pytest
from option_cases import option_cases

import mha

DTYPES = [np.float16, np.float32, np.float64]


def frozen(width=24, heads=3, dtype=np.float32, **settings):
    return step_by_step(width, heads, dtype, **settings).freeze()


def step_by_step(width=24, heads=3, dtype=np.float32, **settings):
    return mha.MultiHeadAttention(width, heads, rng=0, dtype=dtype, **settings)


def calls(rng, batch, query_len, key_len, heads):
    """Keywords of a call: every option, alone and with causal, and what only a layer has."""
    yield from ({}, {"causal": True}, {"head_gate": rng.random(heads)},
                {"return_weights": True, "return_lse": True},
                {"window": (3, 1), "alibi": np.ones(heads), "sinks": np.ones(heads)})
    for name, values in option_cases(rng, (batch,), heads, query_len, key_len).items():
        for value in values if name not in ("dropout", "dropout_offsets") else ():
            value = value[None] if np.ndim(value) == 3 else value  # layers want the batch's axis
            yield {name: value}
            yield {"causal": True, "query_offset": 1, name: value}


def bits(results):
    return [array.tobytes() for array in (results if isinstance(results, tuple) else [results])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "query_len", "key_len"), [
    (16, 7, 7), (9, 40, 40), (40, 5, 11), (4, 130, 20), (6, 96, 97), (3, 300, 500), (33, 1, 40)])
def test_groups_give_the_bits_of_each_sequence(batch, query_len, key_len, dtype):
    rng = np.random.default_rng(0)
    layer, plain = frozen(dtype=dtype), step_by_step(dtype=dtype)
    query = rng.standard_normal((batch, query_len, 24)).astype(dtype)
    memory = query if query_len == key_len else rng.standard_normal((batch, key_len, 24)
                                                                   ).astype(dtype)
    for options in calls(rng, batch, query_len, key_len, 3):
        wanted = bits(plain(query, memory, **options))
        for threads in (1, 2, 3):
            with mha.threads(threads):
                assert bits(layer(query, memory, **options)) == wanted, (options.keys(), threads)
    alone = [layer(query[i], memory[i], causal=True) for i in range(batch)]
    assert np.stack(alone).tobytes() == layer(query, memory, causal=True).tobytes()


def test_groups_agree_with_the_reference():
    rng = np.random.default_rng(1)
    layer = frozen(64, 4, np.float64)
    x = rng.standard_normal((20, 33, 64))
    lengths = rng.integers(1, 34, 20)
    with mha.threads(1):
        found = layer(x, key_lengths=lengths)
    wanted = mha.reference.multi_head_attention(
        x, x, x, layer.W_q, layer.W_k, layer.W_v, layer.W_o, b_q=layer.b_q, b_k=layer.b_k,
        b_v=layer.b_v, b_o=layer.b_o, num_heads=4, key_lengths=lengths)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_groups(threads):
    """Wide enough to be worth several threads; 26 sequences are 13 groups, or 26."""
    x = np.random.default_rng(5).standard_normal((26, 60, 128)).astype(np.float32)
    layer, plain = frozen(128, 4), step_by_step(128, 4)
    with mha.threads(threads):
        for given in (x, x[:, :50], np.tile(x, (1, 2, 1)), x[:24]):
            assert layer(given).tobytes() == plain(given).tobytes()


def test_dropout_knows_the_sequence():
    x = np.random.default_rng(2).standard_normal((12, 30, 24)).astype(np.float32)
    layer, plain = frozen(dropout=0.4), step_by_step(dropout=0.4)
    with mha.threads(1):
        assert (layer(x, training=True, rng=7) == plain(x, training=True, rng=7)).all()


def test_more_batch_axes():
    x = np.random.default_rng(3).standard_normal((5, 30, 24)).astype(np.float32)
    layer = frozen()
    arguments = [layer.W_q, layer.W_k, layer.W_v, layer.W_o]
    whole = mha.multi_head_attention(x, x, x, *arguments, num_heads=3)
    many = np.broadcast_to(x, (4, 3, 5, 30, 24))
    again = mha.multi_head_attention(many, many, many, *arguments, num_heads=3)
    assert (again == whole).all()


@pytest.mark.parametrize("settings", [{"num_kv_heads": 1}, {"qk_norm": "head"},
                                      {"use_bias": False}, {"output_dim": 40}])
def test_layers_of_other_kinds(settings):
    x = np.random.default_rng(4).standard_normal((10, 50, 24)).astype(np.float32)
    layer = frozen(**settings)
    with mha.threads(1):
        assert layer(x).tobytes() == np.stack([layer(one) for one in x]).tobytes()
