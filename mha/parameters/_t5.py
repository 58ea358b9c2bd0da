"""T5: scores that are not scaled, and a table of biases by buckets of distances, which only the
first layer has and all others share."""

from __future__ import annotations

import numpy as np

from mha._base.arguments import as_bool, as_size
from mha._base.dtypes import rounded, stored_dtype, widened
from mha._functions.position_biases import t5_relative_bias
from mha.parameters._config import side_of
from mha.parameters._table import EQUAL_HEADS, Array, Context, Layout, Stored, linears

NAMES = {"q": "q", "k": "k", "v": "v", "o": "o"}
MOST_BUCKETS = 256  # that are tried
MOST_DISTANCE = 1 << 16  # models have 128; every head gets a bias for each
ONE_WIDTH = (("query_dim", "key_dim"), ("query_dim", "value_dim"), *EQUAL_HEADS)


def expanded(table: Array, context: Context) -> Array:
    """The table (buckets, heads) by distances."""
    name = "relative_attention_max_distance"
    distance = as_size(context.config.get(name), f"config {name!r}", 128)
    if distance > MOST_DISTANCE:
        raise ValueError(f"config {name!r}: got {distance}, wanted at most {MOST_DISTANCE}")
    numbers = t5_relative_bias(widened(table), bidirectional=_bidirectional(context),
                                   max_distance=distance)
    return rounded(numbers, stored_dtype(table.dtype))


def _bidirectional(context: Context) -> bool:
    """What the names say, since one config serves both sides of a model."""
    side = side_of(context.prefix)
    if side is not None:
        return side == "encoder"
    if context.config.get("is_decoder") is None:
        raise ValueError("config: got none for 'is_decoder', nor encoder or decoder in the prefix,"
                         " wanted which of them it is")
    return not as_bool(context.config["is_decoder"], "config 'is_decoder'")


def table_of(relative_bias: Array) -> Array:
    """The table (buckets, heads) of fewest buckets that expands to these biases, to the bits.
    Buckets that no distance has are zeros."""
    farthest, numbers = relative_bias.shape[1] // 2, widened(relative_bias)
    for buckets in range(2, MOST_BUCKETS + 1):
        for bidirectional in (True, False):
            try:
                of_distance = t5_relative_bias(
                    np.arange(buckets)[:, None], bidirectional=bidirectional,
                    max_distance=farthest)[0].astype(int)
            except ValueError:  # buckets that do not fit the distance
                continue
            table = np.zeros((buckets, len(relative_bias)), relative_bias.dtype)
            table[of_distance] = relative_bias.T
            if np.array_equal(widened(table)[of_distance].T, numbers, equal_nan=True):
                return table
    raise ValueError("relative_bias: got one that is no table of T5's buckets, wanted one as"
                     " mha.t5_relative_bias makes it")


LAYOUTS = (
    Layout("t5", ({**linears(NAMES, bias=False), "relative_attention_bias.weight": Stored(
        ("relative_bias",), ("buckets", "heads"), read=expanded, write=table_of,
        in_layer_0=r"(?<=block\.)\d+", never_under="EncDecAttention")},),
        constants={"scale": 1.0}, model_types=(
            "t5", "mt5", "pop2piano", "switch_transformers", "umt5"), equal=ONE_WIDTH),
)
