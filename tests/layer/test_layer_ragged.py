"""A layer over a ragged batch: the bits of its sequences one by one, and its gradients."""

import itertools

import numpy as np
import pytest
from agreement import relative_error
from ragged_batches import starts_of

import mha

LENGTHS = [7, 0, 63, 1, 9, 300, 0, 65]
LAYERS = [{}, {"use_bias": "qv", "num_kv_heads": 2}, {"num_kv_heads": 1, "head_dim": 5},
          {"value_head_dim": 3, "output_dim": 7}, {"sinks": True, "relative_bias": 4},
          {"window": (20, 0), "softcap": 3.0, "scale": 0.2, "alibi": [0.5, 0.2, 0.1, 0.0]}]
CALLS = [{}, {"causal": True}, {"window": (3, 2)}, {"head_gate": [1.5, 0.0, -1.0, 0.3]},
         {"query_offset": -2, "causal": True, "empty_rows": "uniform"},
         {"sinks": [1.0, 2.0, -1.0, 0.0], "alibi": [0.1, 0.2, 0.3, 0.4]},
         {"relative_bias": np.arange(7.0)[None]}]


def made(settings, dtype, seed=0):
    layer = mha.MultiHeadAttention(16, 4, dtype=dtype, rng=seed, dropout=0.3, **settings)
    rng = np.random.default_rng(1)
    for array in layer.parameters().values():
        array += 0.1 * rng.standard_normal(array.shape).astype(dtype)
    return layer, rng.standard_normal((sum(LENGTHS), 16)).astype(dtype), starts_of(LENGTHS)


def fitting(settings, options):
    return not ("sinks" in settings and "empty_rows" in options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("settings", LAYERS)
@pytest.mark.parametrize("frozen", [False, True])
def test_every_sequence_gets_the_bits_that_it_gets_alone(settings, dtype, frozen):
    layer, x, starts = made(settings, dtype)
    if frozen:
        layer.freeze()
    for options in CALLS:
        if not fitting(settings, options):
            continue
        output, lse = layer(x, starts=starts, return_lse=True, **options)
        assert np.array_equal(output, layer(x, starts=starts, **options))
        with mha.threads(5):
            assert np.array_equal(output, layer.vjp(x, starts=starts, **options)[0])
        assert output.dtype == lse.dtype == dtype
        for first, end in itertools.pairwise(starts):
            alone, alone_lse = layer(x[first:end], return_lse=True, **options)
            assert np.array_equal(output[first:end], alone), options
            assert np.array_equal(lse[:, first:end], alone_lse), options


def gradients_one_by_one(layer, x, starts, grad_output, grad_lse, options):
    """Sums over the sequences; that of query row by row."""
    total, of_query = {}, np.zeros_like(x)
    for first, end in itertools.pairwise(starts):
        _, pullback = layer.vjp(x[first:end], **options)
        found = pullback(grad_output[first:end], grad_lse[:, first:end])._asdict()
        of_query[first:end] = found.pop("query")
        for name, gradient in found.items():
            if gradient is not None:
                total[name] = total.get(name, 0) + gradient
    return total | {"query": of_query}


@pytest.mark.parametrize("settings", LAYERS)
def test_gradients_are_the_sums_of_those_one_by_one(settings):
    layer, x, starts = made(settings, np.float64)
    rng = np.random.default_rng(2)
    for options in CALLS:
        if not fitting(settings, options):
            continue
        output, pullback = layer.vjp(x, starts=starts, **options)
        grad_output = rng.standard_normal(output.shape)
        grad_lse = np.where(np.isfinite(layer(x, starts=starts, return_lse=True, **options)[1]),
                            rng.standard_normal((4, len(x))), 0)
        wanted = gradients_one_by_one(layer, x, starts, grad_output, grad_lse, options)
        got = pullback(grad_output, grad_lse)
        for name in got._fields:
            assert (getattr(got, name) is None) == (name not in wanted), name
            if name in wanted:
                assert relative_error(getattr(got, name), wanted[name]) < 1e-12, (name, options)


@pytest.mark.parametrize("name", ["query", "W_q", "b_k", "W_v", "W_o", "head_gate", "sinks"])
def test_wrt_gives_what_it_names(name):
    layer, x, starts = made({"sinks": True}, np.float32)
    options = {"starts": starts, "head_gate": [1, 2, 3, 4]}
    output, pullback = layer.vjp(x, **options)
    wanted = pullback(output)
    got = layer.vjp(x, wrt=[name], **options)[1](output)
    assert [one for one in got._fields if getattr(got, one) is not None] == [name]
    assert np.array_equal(getattr(got, name), getattr(wanted, name))


def test_gates_may_be_bools():
    layer, x, starts = made({}, np.float32)
    bools, numbers = ({"starts": starts, "head_gate": np.array([1, 0, 1, 1], dtype)}
                      for dtype in (bool, np.float32))
    (output, pullback), (wanted, other) = layer.vjp(x, **bools), layer.vjp(x, **numbers)
    assert np.array_equal(output, wanted) and np.array_equal(layer(x, **bools), wanted)
    assert np.array_equal(pullback(output).head_gate, other(output).head_gate)


def test_dropout_acts_in_training_and_goes_by_the_number_of_the_sequence():
    layer, x, _ = made({}, np.float32)
    twice = np.concatenate([x[:30], x[:30]])
    output = layer(twice, starts=[0, 30, 60], training=True, rng=5)
    assert np.array_equal(output, layer.vjp(twice, starts=[0, 30, 60], training=True, rng=5)[0])
    assert np.array_equal(output[:30], layer(x[:30], training=True, rng=5))
    assert np.array_equal(output, np.concatenate(layer(twice.reshape(2, 30, 16), training=True,
                                                       rng=5)))
    assert not np.array_equal(output[:30], output[30:])


def test_no_rows():
    layer, x, _ = made({}, np.float32)
    for starts in ([0], [0, 0]):
        output, pullback = layer.vjp(x[:0], starts=starts)
        assert output.shape == (0, 16)
        gradients = pullback(output)
        assert gradients.query.shape == (0, 16)
        assert not gradients.W_q.any()


BAD = [
    ({"starts": [1, 5]}, ValueError, "starts: got 1 at first, wanted 0"),
    ({"starts": [0, 3, 2, 5]}, ValueError, "starts: got 2 after 3, wanted starts that never fall"),
    ({"starts": [0, 6]}, ValueError, "starts: got 6 at last, wanted 5, the number of rows of"),
    ({"starts": []}, ValueError, "starts: got shape (0,), wanted (sequences + 1,)"),
    ({"starts": 5}, ValueError, "starts: got shape (), wanted (sequences + 1,)"),
    ({"starts": [0, 5.0]}, TypeError, "starts: got an array of float64, wanted ints"),
    ({"starts": np.array([0, 2**64 - 1], np.uint64)}, ValueError,
     "starts: got 9223372036854775807 at last, wanted 5"),
    ({"query": np.ones((1, 5, 16))}, ValueError, "query: got shape (1, 5, 16), wanted (total_len,"),
    ({"query": np.ones((5, 15))}, ValueError, "query: got shape (5, 15), wanted (total_len, 16)"),
    ({"query": np.ones((5, 16), bool)}, TypeError, "query: got an array of bool"),
    ({"mask": np.ones((5, 5), bool)}, ValueError, "mask: got one for a ragged batch, wanted none:"),
    ({"bias": np.ones((5, 5))}, ValueError, "bias: got one for a ragged batch, wanted none:"),
    ({"key_lengths": 3}, ValueError, "key_lengths: got one for a ragged batch, wanted none:"),
    ({"key": np.ones((5, 16))}, ValueError, "key: got one with starts, wanted none:"),
    ({"value": np.ones((5, 16))}, ValueError, "value: got one with starts, wanted none:"),
    ({"head_gate": [1.0]}, ValueError, "head_gate: got shape (1,), wanted (4,)"),
    ({"query_offset": [1, 2, 3]}, ValueError, "query_offset: got shape (3,), wanted an int or"),
]
OF_CALLS = [
    ({"return_weights": True}, ValueError, "return_weights: got one with starts, wanted none:"),
    ({"lengths": [5]}, ValueError, "lengths: got one with starts, wanted none:"),
    ({"padding": "left"}, ValueError, "padding: got one with starts, wanted none:"),
    ({"cache": mha.MultiHeadAttention(16, 4).new_cache(2)}, TypeError,
     "cache: got KVCache with starts, wanted a layer of a mha.PagedCache"),
    ({"return_lse": 1}, TypeError, "return_lse: got int, wanted True or False"),
]


@pytest.mark.parametrize("index", range(len(BAD + OF_CALLS)))
def test_bad_input(index):
    bad, error, message = (BAD + OF_CALLS)[index]
    layer = mha.MultiHeadAttention(16, 4, rng=0)
    arguments = {"query": np.ones((5, 16), np.float32), "starts": [0, 2, 5]} | bad
    for function in (layer, layer.vjp)[:1 if index >= len(BAD) else 2]:
        with pytest.raises(error) as raised:
            function(**arguments)
        assert str(raised.value).startswith(message), raised.value


def test_other_widths_of_key_and_value():
    layer = mha.MultiHeadAttention(16, 4, key_dim=8)
    with pytest.raises(ValueError, match=r"starts: got some for query_dim, key_dim and value_dim"):
        layer(np.ones((5, 16)), starts=[0, 5])


def test_one_row_of_any_layout():
    """Of a frozen layer too: a row of a transposed array has gaps between its numbers."""
    states = np.random.default_rng(1).standard_normal((64, 5)).astype(np.float32)
    layer = mha.MultiHeadAttention(64, 4, rng=0)
    for x in (states[:, :1].T, np.ascontiguousarray(states[::-1, :1].T)[:, ::-1],
              np.broadcast_to(states[:1, :1], (1, 64))):
        wanted = layer.unfreeze()(x.copy("C"), starts=[0, 1])
        assert np.array_equal(layer.unfreeze()(x, starts=[0, 1]), wanted)
        assert np.array_equal(layer.freeze()(x, starts=[0, 1]), wanted)
