"""The book's layers: its cells in all four forms, and golden data by plain API and by adapter."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mha
from mha.compat import d2l as package
from mha.compat.d2l import jax, mxnet, tensorflow, torch

GOLDEN = dict(np.load(Path(__file__).parent.parent / "data" / "d2l.npz"))
LINEARS = ("W_q", "W_k", "W_v", "W_o")
FORMS = [torch, tensorflow, jax, mxnet]
QUERY, KEY_VALUE = GOLDEN["query"], GOLDEN["key_value"]

# (lengths, golden output, golden weights) of the layer.
CASES = [("valid_lens", "output", "weights"),
         ("valid_lens_per_query", "output_per_query", "weights_per_query"),
         (None, "output_unmasked", "weights_unmasked")]

each_form = pytest.mark.parametrize("form", FORMS, ids=[form.__name__ for form in FORMS])


def assert_agrees(got, wanted, bound=2e-6):
    """As near as bound, relative to the largest entry."""
    assert got.dtype == wanted.dtype == np.float32 and got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= bound * np.abs(wanted).max()


def make_layer(form, num_hiddens=100, num_heads=5, dropout=0.5, bias=False):
    """The form's layer by its own constructor, in evaluation where the form has such a mode."""
    if form is tensorflow:
        return form.MultiHeadAttention(num_hiddens, num_hiddens, num_hiddens, num_hiddens,
                                       num_heads, dropout, bias)
    if form is mxnet:
        layer = form.MultiHeadAttention(num_hiddens, num_heads, dropout, use_bias=bias)
        layer.initialize()
        return layer
    layer = form.MultiHeadAttention(num_hiddens, num_heads, dropout, bias)
    return layer.eval() if form is torch else layer


def make_additive(form, num_hiddens=8, dropout=0.1):
    if form is tensorflow:
        return form.AdditiveAttention(key_size=2, query_size=20, num_hiddens=num_hiddens,
                                      dropout=dropout)
    attention = form.AdditiveAttention(num_hiddens, dropout)
    return attention.eval() if form is torch else attention


def make_dot_product(form, dropout=0.5):
    attention = form.DotProductAttention(dropout)
    return attention.eval() if form is torch else attention


def outputs(form, returned):
    """The output of a call alone: JAX's calls return the weights with it."""
    return returned[0] if form is jax else returned


def with_golden_weights(layer, form):
    """Set in the layout of the form: weight (out, in) or kernel (in, out)."""
    for name in LINEARS:
        if form in (torch, mxnet):
            getattr(layer, name).weight = GOLDEN[name].T
        else:
            getattr(layer, name).kernel = GOLDEN[name]
    return layer


def lengths_of(name):
    return None if name is None else GOLDEN[name]


# The book's cells, changed in their imports alone.

def test_pytorch_cell():
    from mha.compat.d2l import torch as d2l
    from mha.compat.d2l.torch import MultiHeadAttention

    num_hiddens, num_heads = 100, 5
    attention = MultiHeadAttention(num_hiddens, num_heads, 0.5)
    batch_size, num_queries, num_kvpairs = 2, 4, 6
    valid_lens = d2l.tensor([3, 2])
    X = d2l.ones((batch_size, num_queries, num_hiddens))
    Y = d2l.ones((batch_size, num_kvpairs, num_hiddens))
    d2l.check_shape(attention(X, Y, Y, valid_lens),
                    (batch_size, num_queries, num_hiddens))


def test_tensorflow_cell():
    from mha.compat.d2l import tensorflow as d2l
    from mha.compat.d2l import tensorflow as tf
    from mha.compat.d2l.tensorflow import MultiHeadAttention

    num_hiddens, num_heads = 100, 5
    attention = MultiHeadAttention(num_hiddens, num_hiddens, num_hiddens,
                                   num_hiddens, num_heads, 0.5)
    batch_size, num_queries, num_kvpairs = 2, 4, 6
    valid_lens = d2l.tensor([3, 2])
    X = tf.ones((batch_size, num_queries, num_hiddens))
    Y = tf.ones((batch_size, num_kvpairs, num_hiddens))
    d2l.check_shape(attention(X, Y, Y, valid_lens, training=False),
                    (batch_size, num_queries, num_hiddens))


def test_jax_cell():
    from mha.compat.d2l import jax as d2l
    from mha.compat.d2l.jax import MultiHeadAttention

    num_hiddens, num_heads = 100, 5
    attention = MultiHeadAttention(num_hiddens, num_heads, 0.5)
    batch_size, num_queries, num_kvpairs = 2, 4, 6
    valid_lens = d2l.tensor([3, 2])
    X = d2l.ones((batch_size, num_queries, num_hiddens))
    Y = d2l.ones((batch_size, num_kvpairs, num_hiddens))
    d2l.check_shape(attention.init_with_output(d2l.get_key(), X, Y, Y, valid_lens,
                                               training=False)[0][0],
                    (batch_size, num_queries, num_hiddens))


def test_mxnet_cell():
    from mha.compat.d2l import mxnet as d2l
    from mha.compat.d2l.mxnet import MultiHeadAttention

    num_hiddens, num_heads = 100, 5
    attention = MultiHeadAttention(num_hiddens, num_heads, 0.5)
    attention.initialize()
    batch_size, num_queries, num_kvpairs = 2, 4, 6
    valid_lens = d2l.tensor([3, 2])
    X = d2l.ones((batch_size, num_queries, num_hiddens))
    Y = d2l.ones((batch_size, num_kvpairs, num_hiddens))
    d2l.check_shape(attention(X, Y, Y, valid_lens),
                    (batch_size, num_queries, num_hiddens))


def test_the_package_exports_the_pytorch_form():
    for name in torch.__all__:
        assert getattr(package, name) is getattr(torch, name)


def test_no_framework_and_no_matplotlib_is_imported():
    code = ("import sys; from mha.compat.d2l import torch, tensorflow, jax, mxnet;"
            "print({'torch', 'tensorflow', 'jax', 'mxnet', 'matplotlib'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Golden data.

@each_form
@pytest.mark.parametrize(("lengths", "output", "weights"), CASES)
def test_layer_by_adapter(form, lengths, output, weights):
    layer = with_golden_weights(make_layer(form), form)
    returned = layer(QUERY, KEY_VALUE, KEY_VALUE, lengths_of(lengths))
    assert_agrees(outputs(form, returned), GOLDEN[output])
    assert_agrees(layer.attention.attention_weights, GOLDEN[weights])
    if form is jax:
        assert_agrees(returned[1], GOLDEN[weights])


@pytest.mark.parametrize(("lengths", "output", "weights"), CASES)
def test_layer_by_plain_api(lengths, output, weights):
    layer = mha.MultiHeadAttention(100, 5, use_bias=False)
    layer.load_parameters({name: GOLDEN[name] for name in LINEARS})
    got_output, got_weights = layer(QUERY, KEY_VALUE, key_lengths=lengths_of(lengths),
                                    empty_rows="uniform", return_weights=True)
    assert_agrees(got_output, GOLDEN[output])
    assert_agrees(got_weights.reshape(10, 4, 6), GOLDEN[weights])


@each_form
def test_all_ones(form):
    layer = with_golden_weights(make_layer(form), form)
    X, Y = form.ones((2, 4, 100)), form.ones((2, 6, 100))
    assert np.array_equal(X, GOLDEN["ones_query"]) and np.array_equal(Y, GOLDEN["ones_key_value"])
    output = outputs(form, layer(X, Y, Y, form.tensor([3, 2])))
    assert_agrees(output, GOLDEN["ones_output"])
    weights = layer.attention.attention_weights
    assert weights.shape == (10, 4, 6)
    for item, length in ((weights[:5], 3), (weights[5:], 2)):
        assert (item[..., :length] == np.float32(1 / length)).all()
        assert (item[..., length:] == 0).all()


@each_form
def test_biases(form):
    layer = with_golden_weights(make_layer(form, bias=True), form)
    for name in LINEARS:
        assert not getattr(layer, name).bias.any()
        getattr(layer, name).bias = GOLDEN["b" + name[1:]]
    output = outputs(form, layer(QUERY, KEY_VALUE, KEY_VALUE, GOLDEN["valid_lens"]))
    assert_agrees(output, GOLDEN["output_biased"])


def test_biases_by_plain_api():
    names = LINEARS + tuple("b" + name[1:] for name in LINEARS)
    output = mha.multi_head_attention(
        QUERY, KEY_VALUE, KEY_VALUE, **{name: GOLDEN[name] for name in names}, num_heads=5,
        key_lengths=GOLDEN["valid_lens"])
    assert_agrees(output, GOLDEN["output_biased"])


ADDITIVE = [GOLDEN[f"additive_{name}"] for name in ("query", "key", "value")]


@each_form
def test_additive_attention_by_adapter(form):
    attention = make_additive(form)
    attention.W_q.kernel = GOLDEN["additive_W_q"]
    attention.W_k.kernel = GOLDEN["additive_W_k"]
    attention.w_v.weight = GOLDEN["additive_w_v"][None]
    returned = attention(*ADDITIVE, GOLDEN["additive_valid_lens"])
    assert_agrees(outputs(form, returned), GOLDEN["additive_output"])
    assert_agrees(attention.attention_weights, GOLDEN["additive_weights"])


def test_additive_attention_by_plain_api():
    output, weights = mha.additive_attention(
        *ADDITIVE, *(GOLDEN[f"additive_{name}"] for name in ("W_q", "W_k", "w_v")),
        key_lengths=GOLDEN["additive_valid_lens"], return_weights=True)
    assert_agrees(output, GOLDEN["additive_output"])
    assert_agrees(weights, GOLDEN["additive_weights"])


# The parts on their own.

@each_form
def test_dot_product_attention(form):
    generator = np.random.default_rng(0)
    queries, keys, values = (generator.standard_normal(shape, np.float32)
                             for shape in ((2, 1, 2), (2, 10, 2), (2, 10, 4)))
    attention = make_dot_product(form)
    output = outputs(form, attention(queries, keys, values, form.tensor([2, 6])))
    weights = attention.attention_weights
    assert weights.shape == (2, 1, 10)
    assert (weights[0, :, 2:] == 0).all() and (weights[1, :, 6:] == 0).all()
    for item, length in ((0, 2), (1, 6)):
        scores = queries[item].astype(float) @ keys[item, :length].T / np.sqrt(2)
        exponentials = np.exp(scores)
        wanted = exponentials / exponentials.sum()
        np.testing.assert_allclose(weights[item, :, :length], wanted, rtol=1e-6)
        np.testing.assert_allclose(output[item], wanted @ values[item, :length], rtol=1e-5)
    assert outputs(form, attention(queries, keys, values)).shape == (2, 1, 4)


@each_form
def test_masked_softmax(form):
    X = np.random.default_rng(1).standard_normal((2, 2, 4), np.float32) * 5
    for lengths, per_row in (([2, 3], [[2, 2], [3, 3]]), ([[1, 3], [2, 4]], [[1, 3], [2, 4]]),
                             (None, [[4, 4], [4, 4]]), ([[0, 9], [-1, 4]], [[0, 4], [0, 4]])):
        got = form.masked_softmax(X, None if lengths is None else form.tensor(lengths))
        assert got.dtype == np.float32
        for row in np.ndindex(2, 2):
            length = per_row[row[0]][row[1]]
            exponentials = np.exp(X[row].astype(float)) * (np.arange(4) < length)
            wanted = exponentials / exponentials.sum() if length else np.full(4, 0.25)
            assert_agrees(got[row], wanted.astype(np.float32))
            assert (got[row][wanted == 0] == 0).all()
    large = np.array([[[1e30, -1e30, 1e30, 0]]], np.float32)
    assert form.masked_softmax(large, None).tolist() == [[[0.5, 0, 0.5, 0]]]


@each_form
def test_transposing_heads(form):
    layer = make_layer(form, num_hiddens=12, num_heads=3)
    X = np.arange(2 * 5 * 12.0).reshape(2, 5, 12)
    heads = layer.transpose_qkv(X)
    assert heads.shape == (6, 5, 4)
    assert np.array_equal(heads[1 * 3 + 2], X[1, :, 8:])  # item 1, head 2
    assert np.array_equal(layer.transpose_output(heads), X)


@each_form
def test_attention_is_replaceable(form):
    layer = with_golden_weights(make_layer(form), form)
    layer.attention = make_additive(form, num_hiddens=7)
    output = outputs(form, layer(QUERY, KEY_VALUE, KEY_VALUE, GOLDEN["valid_lens"]))
    weights = layer.attention.attention_weights
    assert output.shape == (2, 4, 100) and weights.shape == (10, 4, 6)
    assert (weights[:5, :, 3:] == 0).all() and (weights[5:, :, 2:] == 0).all()

    # The same from the plain pieces, in float64.
    arrays = [np.asarray(array, float) for array in (QUERY, KEY_VALUE, KEY_VALUE)]
    heads = [mha.split_heads(array @ GOLDEN[name], 5) for array, name in zip(arrays, LINEARS)]
    attended = mha.additive_attention(
        *heads, layer.attention.W_q.kernel, layer.attention.W_k.kernel,
        layer.attention.w_v.kernel[:, 0], key_lengths=GOLDEN["valid_lens"])
    wanted = mha.merge_heads(attended) @ GOLDEN["W_o"]
    assert_agrees(output, wanted.astype(np.float32), 1e-5)


@each_form
def test_lengths(form):
    layer = with_golden_weights(make_layer(form), form)

    def output(lengths):
        return outputs(form, layer(QUERY, KEY_VALUE, KEY_VALUE, lengths))

    plain = output([3, 2])
    for same in (np.array([3.0, 2.0]), np.array([3, 2], np.uint8), form.tensor([3, 2]),
                 np.array([[3] * 4, [2] * 4])):
        assert np.array_equal(output(same), plain)
    assert np.array_equal(output([6, 6]), output(None))
    assert np.array_equal(output([7, 10**12]), output(None))
    assert np.array_equal(output(np.array([np.inf, 6])), output(None))
    output([0, -3])
    assert (layer.attention.attention_weights == np.float32(1 / 6)).all()
    for wrong in ([2.5, 2], [np.nan, 2]):
        with pytest.raises(ValueError, match="wanted whole numbers"):
            output(wrong)
    for wrong in (3, [3], [3, 2, 1], [[3, 2]], [[[3]], [[2]]]):
        with pytest.raises(ValueError, match="valid_lens: got shape"):
            output(wrong)
    with pytest.raises(TypeError, match="valid_lens: got an array of bool"):
        output([True, False])


@each_form
def test_sizes_are_found_at_the_first_call(form):
    layer = make_layer(form, num_hiddens=20, num_heads=4, bias=True)
    assert layer.W_q.weight is None and layer.W_q.kernel is None
    queries, keys, values = np.ones((2, 4, 7)), np.ones((2, 6, 8)), np.ones((2, 6, 9))
    output = outputs(form, layer(queries, keys, values, None))
    assert output.shape == (2, 4, 20)
    kernels = [getattr(layer, name).kernel.shape for name in LINEARS]
    assert kernels == [(7, 20), (8, 20), (9, 20), (20, 20)]
    assert layer.W_q.weight.shape == (20, 7) and layer.W_q.bias.shape == (20,)
    layer.W_o.weight[...] = 0
    assert not layer.W_o.kernel.any()
    assert not outputs(form, layer(queries, keys, values, None)).any()
    with pytest.raises(ValueError):
        layer(np.ones((2, 4, 8)), keys, values, None)
    with pytest.raises(ValueError, match=r"kernel: got shape \(3, 20\), wanted \(7, 20\)"):
        layer.W_q.kernel = np.ones((3, 20))
    with pytest.raises(ValueError, match=r"weight: got shape \(7, 20\), wanted \(20, 7\)"):
        layer.W_q.weight = np.ones((7, 20))


# Dropout, by each form's convention.

X = np.random.default_rng(2).standard_normal((2, 30, 20), np.float32)


def changes(call):
    """Whether two equal calls differ, which they do when dropout acts."""
    return not np.array_equal(call(), call())


def test_dropout_by_training_mode():
    layer = torch.MultiHeadAttention(20, 4, 0.5)
    assert layer.training and layer.attention.training
    assert changes(lambda: layer(X, X, X, None))
    assert layer.eval() is layer and not layer.attention.training
    assert not changes(lambda: layer(X, X, X, None))
    assert layer.train() is layer and layer.attention.training
    layer.attention = torch.AdditiveAttention(8, 0.5).eval()
    assert not changes(lambda: layer(X, X, X, None))
    assert changes(lambda: layer.train()(X, X, X, None))


def test_dropout_by_training_argument():
    for form in (tensorflow, jax):
        layer = make_layer(form, 20, 4)
        assert not changes(lambda: outputs(form, layer(X, X, X, None)))  # noqa: B023
        assert not changes(lambda: outputs(form, layer(X, X, X, None, training=False)))  # noqa: B023
        assert changes(lambda: outputs(form, layer(X, X, X, None, training=True)))  # noqa: B023
    assert changes(lambda: layer(X, X, X, None, True)[0])


def test_dropout_never_acts_in_mxnet():
    layer = make_layer(mxnet, 20, 4)
    assert not changes(lambda: layer(X, X, X, None))


def test_dropout_is_the_documented_mask():
    attention = torch.DotProductAttention(0.3, rng=11)
    output = attention(X, X, X)
    weights = attention.attention_weights
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)  # they are those before dropout
    seed = int(np.random.default_rng(11).integers(2**64, dtype=np.uint64))
    kept = mha.dropout_mask(weights.shape, 0.3, seed)
    fraction = (65536 - round(65536 * 0.3)) / 65536
    assert_agrees(output, (weights.astype(float) * kept / fraction @ X).astype(np.float32))


# Flax's ways.

def test_init_with_output_and_apply():
    layer = jax.MultiHeadAttention(20, 4, 0.5, bias=True)
    (output, weights), variables = layer.init_with_output(3, X, X, X, None)
    assert output.shape == (2, 30, 20) and weights.shape == (8, 30, 30)
    assert sorted(variables["params"]) == sorted(LINEARS)
    assert variables["params"]["W_q"]["kernel"].shape == (20, 20)
    assert variables["params"]["W_q"]["bias"].shape == (20,)

    other = jax.MultiHeadAttention(20, 4, 0.5, bias=True)
    assert np.array_equal(other.apply(variables, X, X, X, None)[0], output)
    assert np.array_equal(other(X, X, X, None)[0], output)
    again = other.init(3, X, X, X, None)["params"]
    assert np.array_equal(again["W_o"]["kernel"], variables["params"]["W_o"]["kernel"])
    assert not np.array_equal(other.init_with_output(4, X, X, X, None)[0][0], output)

    def trained(key):
        return other.apply(variables, X, X, X, None, training=True, rngs={"dropout": key})[0]
    assert np.array_equal(trained(5), trained(5))
    assert not np.array_equal(trained(5), trained(6))
    assert not np.array_equal(trained(5), output)

    with pytest.raises(ValueError, match="variables: got parameters of"):
        other.apply({"params": {"W_q": {}}}, X, X, X, None)
    assert jax.get_key() != jax.get_key()


def test_parameters_of_a_replaced_attention_are_nested():
    layer = jax.MultiHeadAttention(20, 4, 0.0)
    layer.attention = jax.AdditiveAttention(8, 0.0)
    (output, _), variables = layer.init_with_output(3, X, X, X, None)
    assert variables["params"]["attention"]["w_v"]["kernel"].shape == (8, 1)
    assert np.array_equal(layer.apply(variables, X, X, X, None)[0], output)


# The helpers.

@each_form
def test_helpers(form):
    assert form.tensor([3, 2]).dtype.kind == "i"
    assert form.tensor([1.0, 2.0]).dtype == np.float32
    assert form.tensor(np.ones(2)).dtype == np.float64
    assert form.tensor([1.0], dtype=np.float64).dtype == np.float64
    original = np.zeros(2)
    form.tensor(original)[0] = 1
    assert not original.any()
    assert form.ones((2, 3)).dtype == np.float32 and form.ones((2, 3)).all()
    assert form.normal(5, 0, (2, 3)).tolist() == [[5.0] * 3] * 2
    assert form.reshape(np.ones((2, 6)), (3, -1)).shape == (3, 4)
    form.check_shape(np.ones((2, 3)), (2, 3))
    with pytest.raises(AssertionError, match=r"a: got shape \(2, 3\), wanted \(3, 2\)"):
        form.check_shape(np.ones((2, 3)), (3, 2))

    class Extended(form.MultiHeadAttention):
        pass

    @form.add_to_class(Extended)
    def head_width(self):
        return self.num_hiddens // self.num_heads
    assert make_layer_of(Extended, form).head_width() == 20


def make_layer_of(layer_class, form):
    sizes = (100, 100, 100) if form is tensorflow else ()
    return layer_class(*sizes, 100, 5, 0.5)


def test_show_heatmaps():
    matrices = np.random.default_rng(3).standard_normal((2, 3, 4, 5))
    figure = torch.show_heatmaps(matrices, xlabel="Keys", ylabel="Queries",
                                 titles=["a", "b", "c"], figsize=(5, 4), cmap="Blues")
    panels = [axes for axes in figure.axes if axes.get_images()]
    shown = np.array([axes.get_images()[0].get_array() for axes in panels])
    assert np.array_equal(shown.reshape(2, 3, 4, 5), matrices)
    assert {axes.get_images()[0].get_clim() for axes in panels} == {
        (matrices.min(), matrices.max())}
    assert {axes.get_images()[0].get_cmap().name for axes in panels} == {"Blues"}
    assert [axes.get_xlabel() for axes in panels] == [""] * 3 + ["Keys"] * 3
    assert [axes.get_ylabel() for axes in panels] == ["Queries", "", ""] * 2
    assert [axes.get_title() for axes in panels[:3]] == ["a", "b", "c"]
    assert tuple(figure.get_size_inches()) == (5, 4)
    assert len(figure.axes) == 7  # six panels and one colour bar
    with pytest.raises(ValueError, match="matrices: got shape"):
        torch.show_heatmaps(matrices[0], "Keys", "Queries")
    with pytest.raises(ValueError, match="titles: got 1"):
        torch.show_heatmaps(matrices, "Keys", "Queries", ["a"])


@each_form
def test_bad_calls(form):
    with pytest.raises(ValueError, match=r"num_hiddens: got 100, wanted a multiple of num_heads"):
        make_layer(form, num_heads=3)
    with pytest.raises(ValueError, match=r"dropout: got 1\.5"):
        make_layer(form, dropout=1.5)
    with pytest.raises(TypeError, match="num_heads: got float"):
        make_layer(form, num_heads=5.0)
    layer = make_layer(form)
    for position, name in enumerate(("queries", "keys", "values")):
        arrays = [QUERY, KEY_VALUE, KEY_VALUE]
        arrays[position] = arrays[position][0]
        with pytest.raises(ValueError, match=f"{name}: got shape"):
            layer(*arrays, None)
    with pytest.raises(ValueError, match="X: got shape"):
        layer.transpose_output(np.ones((7, 4, 20)))
    with pytest.raises(ValueError, match="X: got shape"):
        form.masked_softmax(np.ones((2, 4)), None)
    with pytest.raises(ValueError, match="bias: got an array, but"):
        layer.W_q.bias = np.ones(100)
