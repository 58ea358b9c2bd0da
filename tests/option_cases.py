"""Examples of the options of attention, for the tests that go through all of them: what is added
here is tested with every other option, on every path."""

import typing

import numpy as np

from mha.options import AttentionOptions

# What bends scores, of any shape.
SCORES = [{"scale": -0.3}, {"softcap": 2.0}]
# Options that are one number.
NUMBERS = [name for name, kind in typing.get_type_hints(AttentionOptions).items()
           if float in (kind, *typing.get_args(kind))]


def option_cases(rng, batch, heads, query_len, key_len):
    """One value or more for every option: name -> values. The scores are (*batch, heads, query_len,
    key_len)."""
    scores = (*batch, heads, query_len, key_len)
    bias = rng.standard_normal(scores)
    blocking = np.where(rng.random(scores[1:]) < 0.2, -np.inf, bias[0])
    return {
        "mask": [rng.random(scores) < 0.6, rng.random((query_len, key_len)) < 0.1,
                 rng.random((*batch, 1, 1, key_len)) < 0.7, np.zeros((1, 1), bool)],
        "bias": [bias, blocking, rng.standard_normal((heads, 1, 1))],
        "key_lengths": [rng.integers(0, key_len + 1, batch),
                        rng.integers(0, key_len + 1, (*batch, query_len)), [0] * batch[0]],
        "causal": [True],
        "window": [(3, 2), (None, 1), (0, None), (0, 0), (10**30, 10**30)],
        "scale": [0.0, -0.7, 1.5],
        "softcap": [0.5, 20.0],
        "empty_rows": ["uniform"],
        "dropout": [0.4],
        "query_offset": [0, -4, 10**30, -10**30, rng.integers(-3, key_len, batch)],
    }
