"""The well-known mistakes of a layer around its attention, as attention_mistakes.py has the others.

A layer's inputs are (batch, len, d_model), its heads (batch, heads, len, d).
"""

import itertools
from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np

from mha import reference
from mha.testing._diagnosis.aliases import Array, Inputs
from mha.testing._diagnosis.attention_mistakes import AFTERWARDS, swapped

Split: TypeAlias = Callable[[Array, int], Array]  # of (batch, len, d_model) and the heads


class Project(Protocol):
    """The projection of the merged heads: x with the matrix of this name, and its bias alone."""

    def __call__(self, x: Array, name: str) -> Array: ...

    def bias(self, name: str) -> Array: ...


# Which matrix makes query, key and value; None: they stay as they are.
PROJECT: dict[str, tuple[str | None, str | None, str | None]] = {
    "": ("W_q", "W_k", "W_v"),
    "the values are not projected with W_v": ("W_q", "W_k", None),
    "the keys are not projected with W_k": ("W_q", None, "W_v"),
    "the queries are not projected with W_q": (None, "W_k", "W_v"),
    "queries and keys are not projected": (None, None, "W_v"),
    "query, key and value are not projected": (None, None, None),
    "the values are projected with W_k": ("W_q", "W_k", "W_k"),
    "the values are projected with W_q": ("W_q", "W_k", "W_q"),
    "the keys are projected with W_q": ("W_q", "W_q", "W_v"),
    "the keys are projected with W_v": ("W_q", "W_v", "W_v"),
    "the queries are projected with W_k": ("W_k", "W_k", "W_v"),
    "the queries are projected with W_v": ("W_v", "W_k", "W_v"),
    "query, key and value are all projected with W_q": ("W_q", "W_q", "W_q"),
    "query, key and value are all projected with W_k": ("W_k", "W_k", "W_k"),
    "query, key and value are all projected with W_v": ("W_v", "W_v", "W_v"),
    "the matrices of key and value are swapped: W_v makes the keys, W_k the values":
        ("W_q", "W_v", "W_k"),
    "the matrices of query and key are swapped: W_k makes the queries, W_q the keys":
        ("W_k", "W_q", "W_v"),
    "the matrices of query and value are swapped: W_v makes the queries, W_q the values":
        ("W_v", "W_k", "W_q"),
    "the matrices are in another order: W_k, W_v, W_q": ("W_k", "W_v", "W_q"),
    "the matrices are in another order: W_v, W_q, W_k": ("W_v", "W_q", "W_k"),
    "the values are projected with W_o": ("W_q", "W_k", "W_o"),
}
TRANSPOSED: dict[str, tuple[str, ...]] = {  # which matrices are used the other way round
    "": (),
    **{f"{name} is transposed, unlike the other matrices": (name,)
       for name in ("W_q", "W_k", "W_v", "W_o")},
    **{f"{first} and {second} are transposed, unlike the other matrices": (first, second)
       for first, second in (("W_q", "W_k"), ("W_k", "W_v"), ("W_q", "W_v"))},
}
BIAS_STAYS = "the bias stays in its place"  # where a matrix went elsewhere: no mistake of its own
# Which bias each of W_q, W_k, W_v and W_o gets, or how many times its own; None: none.
BIAS: dict[str, dict[str, str | int | None]] = {
    "": {},
    **{f"the bias {name} is not added": {name: None} for name in ("b_q", "b_k", "b_v", "b_o")},
    "no bias is added": dict.fromkeys(("b_q", "b_k", "b_v", "b_o")),
    "the biases b_q, b_k and b_v are not added": dict.fromkeys(("b_q", "b_k", "b_v")),
    **{f"the bias {name} is {words}": {name: times} for name in ("b_q", "b_k", "b_v", "b_o")
       for words, times in (("added twice", 2), ("subtracted instead of added", -1))},
    **{f"{name} is added instead of {own}": {own: name}
       for own, name in itertools.permutations(("b_q", "b_k", "b_v", "b_o"), 2)},
    BIAS_STAYS: {},
}


def no_transpose(x: Array, heads: int) -> Array:
    return x.reshape(x.shape[0], heads, x.shape[1], -1)


def interleaved(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], -1, heads).transpose(0, 3, 1, 2)


def _first_head(x: Array, heads: int) -> Array:
    split = reference.split_heads(x, heads)
    return np.broadcast_to(split[:, :1], split.shape)


def _batch_lost(x: Array, heads: int) -> Array:
    return x.reshape(heads, x.shape[0], x.shape[1], -1).swapaxes(0, 1)


def _transposed_features(x: Array, heads: int) -> Array:
    return swapped(x).reshape(x.shape[0], heads, x.shape[1], -1)


WITHOUT_TRANSPOSE = ("reshaped without the transpose: reshape to (batch, len, heads, d), then swap"
                     " the middle axes")
SPLIT: dict[str, tuple[Split, ...]] = {  # how query, key and value are split into heads
    "": (reference.split_heads,) * 3,
    f"heads {WITHOUT_TRANSPOSE}": (no_transpose,) * 3,
    "heads interleaved: a head takes every num_heads-th column instead of neighbouring ones":
        (interleaved,) * 3,
    "never split into heads": (lambda x, heads: x[:, None],) * 3,
    "heads split over the batch: the batch axis comes first in the reshape": (_batch_lost,) * 3,
    "every head uses the first head's columns: heads share the first head's weights":
        (_first_head,) * 3,
    "heads split after a transpose of the whole projection": (_transposed_features,) * 3,
    **{f"the heads of the {role} are {how}": tuple(
        split if place == index else reference.split_heads for place in range(3))
        for index, role in enumerate(("query", "key", "value"))
        for how, split in ((WITHOUT_TRANSPOSE, no_transpose), ("interleaved", interleaved),
                           ("all those of the first head", _first_head))},
    **{f"the heads of {role}s alone are split rightly, the others {WITHOUT_TRANSPOSE}": tuple(
        reference.split_heads if place == index else no_transpose for place in range(3))
        for index, role in enumerate(("query", "key", "value"))},
}
ORDER: dict[str, tuple[int, int, int]] = {  # which heads meet as query, as key and as value
    "": (0, 1, 2),
    "key and value are swapped between the projections and the scores": (0, 2, 1),
    "query and value are swapped between the projections and the scores": (2, 1, 0),
}
GROUP: dict[str, Callable[[Array, int], Array]] = {  # how a key head serves several query heads
    "": lambda x, group: np.repeat(x, group, axis=-3),
    "grouped heads are interleaved the wrong way: neighbouring query heads share a key head, so"
    " repeat each key head (np.repeat), not the whole list (np.tile)":
        lambda x, group: np.concatenate([x] * group, axis=-3),
    "every query head uses the first key head":
        lambda x, group: np.repeat(x[..., :1, :, :], group * x.shape[-3], axis=-3),
}


# From the output of the heads, and query, key and value as heads, to what is merged.
ATTENDED: dict[str, Callable[[Array, Inputs], Array]] = {
    "": lambda attended, heads: attended,
    **{f"within the heads: {name}": change for name, change in AFTERWARDS.items() if name
       and not any(words in name for words in ("axes", "axis", "batch", "queries", "only",
                                               "transposed", "flattened", "sqrt"))},
}


def _tiled(x: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """One head's output in the place of every head's."""
    def merge(attended: Array) -> Array:
        return np.concatenate([x(attended)] * attended.shape[1], axis=-1)
    return merge


def _rows(attended: Array, *axes: int) -> Array:
    """Reshaped to (batch, len, heads * d) after these axes were put in order."""
    batch, _, length, _ = attended.shape
    return np.ascontiguousarray(attended.transpose(axes or (0, 1, 2, 3))).reshape(batch, length, -1)


MERGE: dict[str, Callable[[Array], Array]] = {
    "": reference.merge_heads,
    "heads reshaped without the transpose when merging: swap the middle axes, then reshape": _rows,
    "heads interleaved when merging": lambda x: _rows(x, 0, 2, 3, 1),
    "heads concatenated in reverse order": lambda x: reference.merge_heads(x[:, ::-1]),
    "heads concatenated in another order: shifted by one": lambda x:
        reference.merge_heads(np.roll(x, 1, axis=1)),
    "heads summed instead of concatenated": lambda x: x.sum(1),
    "heads averaged instead of concatenated": lambda x: x.mean(1),
    "heads combined by their maximum instead of concatenated": lambda x: x.max(1),
    "only the first head is used": lambda x: x[:, 0],
    "only the last head is used": lambda x: x[:, -1],
    "heads multiplied instead of concatenated": lambda x: x.prod(1),
    "the sum of the heads is repeated instead of concatenating them": _tiled(lambda x: x.sum(1)),
    "the mean of the heads is repeated instead of concatenating them": _tiled(lambda x: x.mean(1)),
    "the first head is repeated instead of concatenating all": _tiled(lambda x: x[:, 0]),
    "the last head is repeated instead of concatenating all": _tiled(lambda x: x[:, -1]),
    "heads concatenated along the sequence instead of the features": lambda x:
        x.reshape(x.shape[0], -1, x.shape[-1]),
    "heads are not merged": lambda x: x,
    "the features of each head are reversed when merging": lambda x:
        reference.merge_heads(x[..., ::-1]),
    "heads transposed wrongly when merging: (batch, d, len, heads) is reshaped": lambda x:
        _rows(x, 0, 3, 2, 1),
    "heads transposed wrongly when merging: (heads, batch, len, d) is reshaped": lambda x:
        _rows(x, 1, 0, 2, 3),
    "the merged heads mix batch and sequence": lambda x:
        _rows(x, 2, 0, 1, 3),
    "only the first num_heads - 1 heads are merged, the last is lost": lambda x:
        reference.merge_heads(np.concatenate([x[:, :-1], 0 * x[:, -1:]], axis=1)),
}


def _with(name: str) -> Callable[[Array, Project, Array], Array]:
    return lambda merged, project, query: project(merged, name)


# From the merged heads, project(x, name) and the query to the output.
OUTPUT: dict[str, Callable[[Array, Project, Array], Array]] = {
    "": lambda merged, project, query: project(merged, "W_o"),
    "forgot the output projection W_o": lambda merged, project, query: merged,
    "the output projection W_o is applied twice": lambda merged, project, query:
        project(project(merged, "W_o"), "W_o"),
    **{f"the output is projected with {name} instead of W_o": _with(name)
       for name in ("W_q", "W_k", "W_v")},
    "the output is projected with W_v before W_o": lambda merged, project, query:
        project(project(merged, "W_v"), "W_o"),
    "the query is added before the output projection: a residual connection is no part of"
    " attention": lambda merged, project, query: project(merged + query, "W_o"),
    "the bias b_o is added before W_o instead of after it": lambda merged, project, query:
        project(merged + project.bias("b_o"), "W_o") - project.bias("b_o"),
}
