"""The layout of a program with names of its own: `MultiHeadAttention.from_state(names=...)`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mha._base.arguments import as_bool, printable
from mha._base.keywords import close_matches
from mha._functions.multi_head_attention import NORMS, WEIGHTS
from mha.parameters import _config as config
from mha.parameters._table import AXES, BESIDE, Form, Layout, Stored

NAME = "names="  # of the layout, in errors
LETTERS = ("q", "k", "v", "o", "qkv", "g")
# How a program calls the weight and the bias of what it names; the last is an array's own name.
ENDINGS = ((".weight", ".bias"), (".kernel", ".bias"), ("", ""))
PARAMETERS = (*AXES, *NORMS)
BUFFERS = ("mask", "*_mask", "tril")
# One side of cross-attention may be of another width; any projection may have a bias.
EQUAL = (("key_dim", "value_dim"), ("head_dim", "value_head_dim"))
BIASED = tuple("".join(letters) for count in range(1, 6)
               for letters in itertools.combinations("qkvog", count))
# The output gate's columns: one for each of the merged heads', or one a head.
GATES = ("heads value_head_dim", "heads")


# How programs call the four layers: q, W_query, to_k, v_proj, out_linear, c_proj, ...
AROUND = r"(?:(?:w|to|c)_?)?(?:{})(?:_?(?:proj|projection|lin|linear))?"
CALLED = {"q": AROUND.format("q|query"), "k": AROUND.format("k|key"),
          "v": AROUND.format("v|value"), "o": AROUND.format("o|out|output") + "|(?:c_)?proj|dense"}


def seen_names(names: Iterable[str]) -> str:
    """What an error adds where a state has names of its own: names= as a call would give it, or how
    to join a weight of each head."""
    layers = {name.removesuffix(ending) for name in names for ending in (".weight", ".kernel")
              if name.endswith(ending)}
    if any(re.search(r"heads?\.\d+\.", layer) for layer in layers):
        return ("a weight a head, wanted one for all, joined by np.concatenate, along the axis of"
                " head_dim")
    found = {letter: [layer for layer in sorted(layers) if re.fullmatch(
        pattern, layer.rpartition(".")[2], re.IGNORECASE)] for letter, pattern in CALLED.items()}
    if not all(len(layers) == 1 for layers in found.values()):
        return ""
    own = ", ".join(f'"{letter}": "{layer}"' for letter, [layer] in found.items())
    return f"if these are names of your own: names={{{own}}}, num_heads=..."


def own_layout(names: Any, transposed: bool | None) -> Layout:
    """With a form for each way in which the names can be meant."""
    checked = _checked(names)
    endings = ENDINGS if checked.keys() & set(LETTERS) else ENDINGS[-1:]
    ways = (False, True) if transposed is None else (as_bool(transposed, "transposed"),)
    gates = GATES if checked.keys() & {"g", "W_g"} else GATES[:1]
    has_norms = bool(checked.keys() & set(NORMS))
    return Layout(NAME, tuple(_form(checked, *ending, is_transposed, gate)
                              for ending in endings for gate in gates for is_transposed in ways),
                  {"norm_eps": config.norm_eps} if has_norms else {},
                  needs=("norm_eps",) * has_norms, passed_over=BUFFERS, nested=True,
                  partial_biases=BIASED, equal=EQUAL)


def _checked(names: Any) -> Mapping[str, str]:
    if not isinstance(names, Mapping):
        raise TypeError(f"names: got {type(names).__name__}, wanted a mapping as"
                        ' {"q": "W_query", "k": "W_key", "v": "W_value", "o": "out_proj"}')
    known = (*LETTERS, *PARAMETERS)
    for own, theirs in names.items():
        if not isinstance(own, str) or not isinstance(theirs, str):
            raise TypeError(f"names: got {own!r}: {theirs!r}, wanted names of ours with theirs")
        if own not in known:
            close = close_matches(own, known, 1) or known
            raise ValueError(f"names: got {printable(own)!r}, wanted one of {', '.join(close)}")
    for own, theirs in names.items():
        layer, _, ending = theirs.rpartition(".")
        if own in LETTERS and ending in ("weight", "kernel", "bias") and layer:
            raise ValueError(f"names: got {printable(theirs)!r} for {own!r}, wanted"
                             f" {printable(layer)!r}: the layer, whose weight and bias are read")
    held = [parameter for own in names for parameter in _holds(own, "W") if parameter in WEIGHTS]
    twice = sorted({parameter for parameter in held if held.count(parameter) > 1})
    missing = sorted({*WEIGHTS} - {"W_g", *held})
    if twice or missing or len(set(names.values())) < len(names):
        letters = ", ".join(parameter[-1] for parameter in missing)
        got = f"none for {letters}" if missing else f"two for {twice}" if twice else "a name twice"
        raise ValueError(f"names: got {got}, wanted one each for q, k, v, o, or for qkv and o")
    return names


def _holds(own: str, kind: str) -> tuple[str, ...]:
    """The parameters that a name of ours stands for, of a kind "W" or "b" where it is letters."""
    return tuple(f"{kind}_{letter}" for letter in own) if own in LETTERS else (own,)


def _form(names: Mapping[str, str], weight: str, bias: str, is_transposed: bool,
          gate: str) -> Form:
    form = {}
    for own, theirs in names.items():
        is_layer = own in LETTERS
        axes = _axes(_holds(own, "W")[0] if own != "qkv" else own, gate)
        own_axes = axes[::-1] if is_transposed else axes
        form[theirs + weight * is_layer] = Stored(_holds(own, "W"), own_axes)
        if is_layer and bias:
            form[theirs + bias] = Stored(_holds(own, "b"), axes[-1:], optional=True)
    return form


def _axes(own: str, gate: str) -> tuple[str, ...]:
    """Of the array, as mha has it."""
    if own == "qkv":
        return "query_dim", BESIDE
    if own in ("W_g", "b_g"):
        return ("query_dim", gate)[own == "b_g":]
    return AXES.get(own, ("head_dim",))  # a norm of each head
