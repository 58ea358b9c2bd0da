"""The recipes of docs/autodiff.md, as they stand there, against the libraries' own attention."""

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "autodiff.md"
RECIPES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def names_of(recipe, capsys):
    """What the recipe defines; it prints what its comment says."""
    names = {}
    exec(recipe, names)
    assert capsys.readouterr().out.rstrip() == re.search(r"^print.*# (.*)$", recipe, re.M)[1]
    return names


def close(ours, theirs, size):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=size * np.abs(theirs).max())


def test_hips_autograd(capsys):
    import autograd
    import autograd.numpy as anp

    attention = names_of(RECIPES[0], capsys)["attention"]
    query, key, value, weight = np.random.default_rng(1).standard_normal((4, 2, 3, 7, 5))

    def plain(query, key, value):
        scores = anp.einsum("...id,...jd->...ij", query, key) / 5**0.5
        scores = anp.where(np.tril(np.ones((7, 7), bool)), scores, -np.inf)
        exponentials = anp.exp(scores - anp.max(scores, axis=-1, keepdims=True))
        weights = exponentials / anp.sum(exponentials, axis=-1, keepdims=True)
        return anp.einsum("...ij,...jd->...id", weights, value)

    def loss(function, **options):
        return lambda *inputs: anp.sum(anp.tanh(function(*inputs, **options)) * weight)

    ours, theirs = loss(attention, causal=True), loss(plain)
    for argument in (0, 1, 2, (0, 2), (0, 1, 2)):
        pair = [autograd.grad(each, argument)(query, key, value) for each in (ours, theirs)]
        close(np.array(pair[0]), np.array(pair[1]), 1e-13)
    close(autograd.grad(lambda x: ours(x, x, x))(query),
          autograd.grad(lambda x: theirs(x, x, x))(query), 1e-13)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_flax(capsys, causal, compiled):
    import jax
    from flax import linen as nn

    attention_fn = names_of(RECIPES[1], capsys)["attention_fn"]
    x = jax.random.normal(jax.random.key(2), (3, 9, 24))
    mask = nn.make_causal_mask(x[..., 0], dtype=bool) if causal else None
    theirs = nn.MultiHeadDotProductAttention(num_heads=3)
    ours = nn.MultiHeadDotProductAttention(num_heads=3, attention_fn=attention_fn)
    variables = theirs.init(jax.random.key(3), x)

    def value_and_gradients(layer):
        def loss(variables, x):
            return (jax.numpy.tanh(layer.apply(variables, x, mask=mask))**2).sum()
        both = jax.value_and_grad(loss, argnums=(0, 1))
        return (jax.jit(both) if compiled else both)(variables, x)

    ours, theirs = (jax.tree.leaves(value_and_gradients(layer)) for layer in (ours, theirs))
    largest = max(np.abs(leaf).max() for leaf in theirs[1:])  # the key's bias has none
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * largest)
    with pytest.raises(NotImplementedError, match="neither bias nor dropout"):
        attention_fn(x, x, x, bias=x)
