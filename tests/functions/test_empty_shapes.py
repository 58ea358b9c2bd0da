"""Shapes some axes of which are 0, with every option, against the reference: results and gradients
(empty_shapes.py). Where there are no scores a gradient may be an empty array or zeros, and writing
to it goes past its end: this file also runs under the sanitizers, and memory/ between forbidden
pages."""

import numpy as np
import pytest
from empty_shapes import CALLS, gradients_of, has_gradients, results_of

import mha
from mha import reference


def exact(value):
    if isinstance(value, list):
        return [exact(each) for each in value]
    is_float = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return value.astype(np.float64) if is_float else value


def check(got, wanted, case):
    """As its type has it: a gradient that cancels, of a bias that all keys share, is no exact 0."""
    bound = 1e-2 if got.dtype == np.float16 else 1e-4
    assert got.shape == wanted.shape, case
    assert np.allclose(got, wanted, rtol=bound, atol=bound / 10), (case, got, wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", CALLS)
def test_empty_shapes(kind):
    for name, arguments, options in CALLS[kind]():
        shapes = [np.shape(array) for array in arguments if not isinstance(array, list)]
        case = (name, shapes, {option: np.shape(value) or value for option, value
                               in options.items()})
        wide = exact(arguments), {option: exact(value) for option, value in options.items()}
        for got, wanted in zip(results_of(mha, name, arguments, options),
                               results_of(reference, name, *wide), strict=True):
            check(got, wanted, case)
        if has_gradients(name):
            got = gradients_of(mha, name, arguments, options)
            wanted = gradients_of(reference, name, *wide)
            assert got.keys() == wanted.keys(), case
            for gradient in got:
                check(got[gradient], wanted[gradient], (gradient, *case))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("key_len", [512, 4000, 40000])
@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(1, 0), (16, 0), (0, 1), (0, 16), (0, 0)])
def test_long_keys_without_columns(head_dim, value_head_dim, key_len, threads):
    """Few queries, whose threads share the keys of a head: what they leave for each other has no
    room for columns that are not there."""
    rng = np.random.default_rng(3)
    for query_len in (1, 2, 8):
        query = rng.standard_normal((3, 1, query_len, head_dim))
        key, value = (rng.standard_normal((3, 1, key_len, columns + 3))[..., :columns]
                      for columns in (head_dim, value_head_dim))
        grad_output = rng.standard_normal((3, 1, query_len, value_head_dim))
        with mha.threads(threads):
            output, lse = mha.scaled_dot_product_attention(query, key, value, scale=1,
                                                           return_lse=True)
            _, back = mha.scaled_dot_product_attention_vjp(query, key, value, scale=1)
            gradients = back(grad_output)
        scores = query @ key.swapaxes(-1, -2)
        largest = scores.max(-1)
        exponentials = np.exp(scores - largest[..., None])
        weights = exponentials / exponentials.sum(-1, keepdims=True)
        np.testing.assert_allclose(lse, largest + np.log(exponentials.sum(-1)), rtol=1e-12)
        np.testing.assert_allclose(output, weights @ value, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(gradients.value, weights.swapaxes(-1, -2) @ grad_output,
                                   rtol=1e-9, atol=1e-12)
        if value_head_dim == 0:
            assert not gradients.query.any() and not gradients.key.any()
