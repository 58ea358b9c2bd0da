"""Examples of the options of attention, for the tests that go through all of them: what is added
here is tested with every other option, on every path."""

import typing

import numpy as np

from mha._functions.options import AttentionOptions

# What bends scores, of any shape.
SCORES = [{"scale": -0.3}, {"softcap": 2.0}]
# Options whose arrays have gradients.
LEARNED = ("bias", "alibi", "relative_bias", "sinks")
# Options that are one number.
NUMBERS = [name for name, kind in typing.get_type_hints(AttentionOptions).items()
           if float in (kind, *typing.get_args(kind))]


def by_head(heads, dtype=np.float64):
    """What has a number or row for each head: alibi and relative_bias bend scores by distance."""
    rng = np.random.default_rng(heads)
    return [{"alibi": np.linspace(0.5, 0.01, heads).astype(dtype)},
            {"relative_bias": rng.standard_normal((heads, 9)).astype(dtype)},
            {"relative_bias": rng.standard_normal((1, 65)).astype(dtype)},
            {"sinks": rng.uniform(-2, 8, heads).astype(dtype)}]


def fit_together(names):
    """A row that sees no key gives what its sink says, not the mean of all values."""
    return not {"sinks", "empty_rows"} <= set(names)


def option_cases(rng, batch, heads, query_len, key_len):
    """One value or more for every option: name -> values. The scores are (*batch, heads, query_len,
    key_len)."""
    scores = (*batch, heads, query_len, key_len)
    bias = rng.standard_normal(scores)
    blocking = np.where(rng.random(scores[1:]) < 0.2, -np.inf, bias[:1].sum(axis=0))
    return {
        "mask": [rng.random(scores) < 0.6, rng.random((query_len, key_len)) < 0.1,
                 rng.random((*batch, 1, 1, key_len)) < 0.7, np.zeros((1, 1), bool)],
        "bias": [bias, blocking, rng.standard_normal((heads, 1, 1))],
        "alibi": [rng.uniform(-0.1, 1, heads)],
        "relative_bias": [rng.standard_normal((heads, 7)), rng.standard_normal((1, 41)),
                          rng.standard_normal((heads, 1))],
        "sinks": [3 * rng.standard_normal(heads), np.full(heads, 40.0)],
        "key_lengths": [rng.integers(0, key_len + 1, batch),
                        rng.integers(0, key_len + 1, (*batch, query_len)), [0] * batch[0]],
        "causal": [True],
        "window": [(3, 2), (None, 1), (0, None), (0, 0), (10**30, 10**30)],
        "scale": [0.0, -0.7, 1.5],
        "softcap": [0.5, np.inf, 20.0],
        "empty_rows": ["uniform"],
        "dropout": [0.4],
        "dropout_offsets": [(3, 2, 70, 13)],
        "query_offset": [0, -4, 10**30, -10**30, rng.integers(-3, key_len, batch)],
    }
