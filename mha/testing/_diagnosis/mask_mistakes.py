"""The well-known mistakes of masks: how they act on the scores, and which pairs they leave.

`visible` is bool, True where a query may attend to a key, as everywhere in mha.
"""

import numpy as np

from mha.testing._diagnosis.aliases import Array, MaskEntry, Visibility
from mha.testing._diagnosis.attention_mistakes import as_it_is, softmax

ONE_BLOCKS = ("your mask's 1 means blocked; here True means attend: mha.masks.from_blocked(mask)"
              " turns yours into ours")
ADDITIVE = "your mask is added to the scores: 0 attends, -inf blocks; here that is bias="


def _fill(number: float) -> MaskEntry:
    return MaskEntry(lambda s, visible: np.where(visible, s, number), as_it_is)


def _add(number: float) -> MaskEntry:
    return MaskEntry(lambda s, visible: s + np.where(visible, 0, number), as_it_is)


MASK: dict[str, MaskEntry] = {  # what it does to the scores, and to the weights
    "": _fill(-1e9),
    "the mask is ignored (adding -1e-9 does nothing either: -1e9 is meant)":
        MaskEntry(as_it_is, as_it_is),
    "the mask is applied after the softmax: rows no longer sum to 1":
        MaskEntry(as_it_is, lambda w, visible: np.where(visible, w, 0)),
    "the mask is added after the softmax (or fills the weights with -1e9): the scores need it":
        MaskEntry(as_it_is, lambda w, visible: np.where(visible, w, w - 1e9)),
    "the mask is applied after the softmax, by another softmax":
        MaskEntry(as_it_is, lambda w, visible: softmax(np.where(visible, w, -1e9))),
    "blocked scores become 0 (or a number as small as 1e-9), which still gets weight: fill with"
    " -inf, or -1e9": _fill(0),
    "blocked scores become 1, which still gets weight: fill with -inf, or -1e9": _fill(1),
    "the mask has the wrong sign: blocked keys get all the weight": _fill(1e9),
    "the mask's 0 and 1 are added to the scores as they are: blocked scores need -inf, or -1e9":
        MaskEntry(lambda s, visible: s + visible, as_it_is),
    "the mask's 0 and 1 are subtracted from the scores: blocked scores need -inf, or -1e9":
        MaskEntry(lambda s, visible: s - visible, as_it_is),
    "blocked scores are multiplied by -1e9: negative ones become the largest":
        MaskEntry(lambda s, visible: np.where(visible, s, s * -1e9), as_it_is),
    "blocked scores are multiplied by 1e9": MaskEntry(
        lambda s, visible: np.where(visible, s, s * 1e9), as_it_is),
}
INFINITE = _fill(-np.inf)  # right, too; but what spoils the softmax makes NaN of it
STILL = "which still gets weight: fill with -inf, or -1e9"


def filled(number: float) -> dict[str, MaskEntry]:
    """The entry of MASK for blocked scores that become a number, and for one that is added."""
    return {f"blocked scores become {number:.3g}, {STILL}": _fill(number),
            f"{number:.3g} is added to blocked scores, {STILL}": _add(number)}


def causal(query_len: int, key_len: int, shift: int = 0) -> Array:
    """Key j is visible to query i iff j <= i + key_len - query_len + shift."""
    return np.tri(query_len, key_len, key_len - query_len + shift, dtype=bool)


def causal_from_start(query_len: int, key_len: int, shift: int = 0) -> Array:
    """Key j is visible to query i iff j <= i + shift."""
    return np.tri(query_len, key_len, shift, dtype=bool)


CAUSAL = "the causal mask is always on: no query sees a later key"
CAUSAL_FROM_START = "the causal mask is always on, and counts from the first key"
OFF_BY_ONE = "the causal mask is off by one: "
UNSEEN, FUTURE = "a query does not see its own key", "a query sees the next key, one of the future"
# What is visible without any mask.
ALWAYS: dict[str, Visibility] = {
    CAUSAL: causal,
    CAUSAL_FROM_START: causal_from_start,
    OFF_BY_ONE + UNSEEN: lambda q, k: causal(q, k, -1),
    OFF_BY_ONE + FUTURE: lambda q, k: causal(q, k, 1),
    OFF_BY_ONE + UNSEEN + " (counted from the first key)": lambda q, k: causal_from_start(q, k, -1),
    OFF_BY_ONE + FUTURE + " (counted from the first key)": lambda q, k: causal_from_start(q, k, 1),
    "the causal mask is upside down (upper triangle): a query sees its own and later keys, not"
    " earlier ones": lambda q, k: ~causal(q, k, -1),
    "the causal mask is upside down (upper triangle): a query sees only later keys": lambda q, k:
        ~causal(q, k),
    "the causal mask is upside down (upper triangle): a query sees its own and later keys, not"
    " earlier ones (counted from the first key)": lambda q, k: ~causal_from_start(q, k, -1),
    "the causal mask is upside down (upper triangle): a query sees only later keys (counted from"
    " the first key)": lambda q, k: ~causal_from_start(q, k),
    "a query does not see its own key: the diagonal is blocked":
        lambda q, k: ~np.eye(q, k, dtype=bool),
    "a query sees its own key only: all but the diagonal is blocked":
        lambda q, k: np.eye(q, k, dtype=bool),
}
# The same, and the entry of MASK by which the rest is blocked.
TRIANGLE: dict[str, tuple[Visibility | None, str]] = {
    "": (None, ""),
    **{name: (visible, "") for name, visible in ALWAYS.items()},
    **{f"the causal mask is always on, and wrong: {how}": (causal_from_start, how)
       for how in MASK if how and "ignored" not in how},
}
