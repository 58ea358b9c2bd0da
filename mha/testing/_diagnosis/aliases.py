"""The types of what travels between the parts: arrays, mistakes and masks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Inputs: TypeAlias = Sequence[Array]         # query, key and value
Shape: TypeAlias = tuple[int, ...]
Sizes: TypeAlias = tuple[int, int, int]     # query_len, key_len, value_dim
Mistakes: TypeAlias = Mapping[str, str]     # {step: the name of the mistake, which users are told}
Visibility: TypeAlias = Callable[[int, int], Array]  # of query_len and key_len: True = attend
MaskStep: TypeAlias = Callable[[Array, Array], Array]  # scores or weights, and what is visible
Tested: TypeAlias = Callable[..., Any]      # a function or layer that someone else wrote
TestedClass: TypeAlias = type[Any]


class MaskEntry(NamedTuple):
    """How a mask acts."""

    on_scores: MaskStep
    on_weights: MaskStep
