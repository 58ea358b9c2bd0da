"""The options of attention, each named once on this side: type, default, meaning and source.

Functions take them as **options. `takes_options` shows them in a function's signature and
docstring, `attention_options` makes of them the record that the core takes as one argument;
csrc/python/call/options.h lists the same names in the same order. docs/options.md is written from
the texts here.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Never, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from mha._base.arguments import as_size
from mha._base.keywords import (
    AnnotationText,
    names_its_keywords,
    other_names,
    too_many,
    unknown_keyword,
)

Function = TypeVar("Function", bound=Callable[..., Any])

Window = tuple[int | None, int | None]
EmptyRows = Literal["zeros", "uniform"]
RandomSource: TypeAlias = "int | np.random.Generator | None"  # numpy.random loads when used


class AttentionOptions(NamedTuple):
    """The options of one call, as the core takes them: the defaults are those of all functions."""

    mask: ArrayLike | None = None
    bias: ArrayLike | None = None
    alibi: ArrayLike | None = None
    relative_bias: ArrayLike | None = None
    sinks: ArrayLike | None = None
    key_lengths: ArrayLike | None = None
    causal: bool = False
    query_offset: ArrayLike | None = None
    window: Window | None = None
    scale: float | None = None
    softcap: float | None = None
    empty_rows: EmptyRows = "zeros"
    dropout: float = 0.0
    rng: RandomSource = None  # an int, the seed, by the time the core sees it
    dropout_offsets: tuple[int, int, int, int] | None = None


class VisibilityKeywords(TypedDict, total=False):
    """Which query sees which key."""

    mask: ArrayLike | None
    key_lengths: ArrayLike | None
    causal: bool
    query_offset: ArrayLike | None
    empty_rows: EmptyRows


class LayerKeywords(VisibilityKeywords, total=False):
    """The options of a layer's call: its dropout belongs to the layer."""

    bias: ArrayLike | None
    alibi: ArrayLike | None
    relative_bias: ArrayLike | None
    sinks: ArrayLike | None
    window: Window | None
    scale: float | None
    softcap: float | None


class DropoutKeywords(TypedDict, total=False):
    """Dropout of a function."""

    dropout: float
    rng: RandomSource


class AttentionKeywords(LayerKeywords, DropoutKeywords, total=False):
    """All options, for type checkers."""

    dropout_offsets: tuple[int, int, int, int] | None


class VarlenKeywords(DropoutKeywords, total=False):
    """Those of a ragged batch, whose scores are no array."""

    alibi: ArrayLike | None
    relative_bias: ArrayLike | None
    sinks: ArrayLike | None
    causal: bool
    query_offset: ArrayLike | None
    window: Window | None
    scale: float | None
    softcap: float | None
    empty_rows: EmptyRows


class AdditiveKeywords(VisibilityKeywords, DropoutKeywords, total=False):
    """Those of additive attention, which has no dot products to scale."""


class Option(NamedTuple):
    """What a reader is told of an option."""

    type: str    # with shape and unit
    meaning: str
    source: str
    elsewhere: tuple[tuple[str, str], ...] = ()  # others' names for it, and what to write instead


OPTIONS = {
    "mask": Option(
        "bool array or BlockMask, optional",
        "True = attend; broadcast to the scores (..., heads, query_len, key_len).",
        "Vaswani et al. 2017, section 3.2.3",
        (("attn_mask attention_mask",
          "mask=, bool with True = attend (or bias=, floats that are added to the scores)"),
         ("key_mask query_mask value_mask", "mask=, bool with True = attend"))),
    "bias": Option(
        "float array, optional",
        "Added to the scaled scores, broadcast likewise; -inf blocks as a mask does.",
        "Raffel et al. 2020, section 2.1",
        (("attn_bias attention_bias position_bias", "bias="),)),
    "alibi": Option(
        "floats (heads,), optional",
        "Adds -alibi[h] * abs(i + query_offset - j) to the scaled score of query i and key j:"
        " `mha.alibi_slopes` has the paper's.",
        "Press et al. 2022, \"Train Short, Test Long\", section 3",
        (("alibi_slopes slopes", "alibi="),)),
    "relative_bias": Option(
        "floats (heads or 1, 2r + 1), optional",
        "Adds relative_bias[h, clip(j - i - query_offset, -r, r) + r] to the scaled score of query"
        " i and key j; -inf blocks as a mask does. `mha.t5_relative_bias` makes one of T5's table.",
        "Shaw et al. 2018, section 3.2, whose distances are clipped; a number a head as in Raffel"
        " et al. 2020, section 2.1",
        (("relative_attention_bias relative_position_bias",
          "relative_bias=, by mha.t5_relative_bias from T5's table"),)),
    "sinks": Option(
        "floats (heads,), optional",
        "One more score a head that only the denominator of softmax sees: a row's weights sum to"
        " less than 1, lse counts it, and a row that sees no key gives zeros and lse = sinks[h]."
        " 0 is softmax plus one, -inf switches a head's off. Where parts are merged, give sinks to"
        " one part alone. Not with empty_rows=\"uniform\".",
        "OpenAI 2025, \"gpt-oss-120b & gpt-oss-20b Model Card\", section 2.2; Miller 2023,"
        " \"Attention Is Off By One\"",
        (("s_aux attention_sinks", "sinks="), ("softmax1", "sinks=, zeros"))),
    "key_lengths": Option(
        "ints in [0, key_len], optional",
        "Shaped as the batch axes, or batch axes + (query_len,): keys from there on are blocked.",
        "Zhang et al., \"Dive into Deep Learning\", section 11.3",
        (("key_padding_mask src_key_padding_mask padding_mask",
          "key_lengths=, how many keys of each sequence are real; or mask=, True = attend:"
          " mha.masks.from_blocked({name})[:, None, None, :]"),
         ("valid_lens valid_len seq_lens lengths key_value_seq_lengths", "key_lengths="))),
    "causal": Option(
        "bool",
        "Key j is visible to query i iff j <= i + query_offset.",
        "Vaswani et al. 2017, section 3.2.3",
        (("is_causal", "causal= (with query_offset=0 for PyTorch's upper-left triangle)"),
         ("use_causal_mask causal_mask look_ahead_mask", "causal="))),
    "query_offset": Option(
        "int or ints over the batch axes, optional",
        "The position of query 0 among the keys, by default key_len - query_len; 0 is PyTorch's"
        " upper-left triangle. No default (a ValueError) with key_lengths and unlike lengths, where"
        " it matters.",
        "flash-attn 2.1 (Dao 2023), whose causal mask is aligned to the lower right"),
    "window": Option(
        "(left, right), ints >= 0 or None, optional",
        "Key j is visible iff i + query_offset - left <= j <= i + query_offset + right. Offsets and"
        " windows beyond 2^60 count as 2^60.",
        "Beltagy et al. 2020, \"Longformer\", section 3.1",
        (("window_size sliding_window local_window_size", "window=(left, right)"),)),
    "scale": Option(
        "float, by default 1 / sqrt(head_dim)",
        "What dot products are multiplied by.",
        "Vaswani et al. 2017, section 3.2.1",
        (("softmax_scale sm_scale scaling scale_factor", "scale="),)),
    "softcap": Option(
        "float > 0, optional",
        "Scores become softcap * tanh(score / softcap), before bias and masks; infinity is none.",
        "Gemma Team 2024, \"Gemma 2\", section 2",
        (("soft_cap logit_cap logits_soft_cap attn_logit_softcapping", "softcap="),)),
    "empty_rows": Option(
        '"zeros" or "uniform"',
        "What a query that sees no key gets: zeros, or the mean of all values.",
        "Zhang et al., \"Dive into Deep Learning\", section 11.3"),
    "dropout": Option(
        "float in [0, 1)",
        "The probability of dropping a weight, rounded to 1/65536, by the mask of"
        " `mha.dropout_mask`; weights that are kept are divided by the kept fraction.",
        "Srivastava et al. 2014, \"Dropout\"; on the weights as in \"Dive into Deep Learning\","
        " section 11.3",
        (("dropout_p dropout_rate attention_dropout attn_dropout p_dropout", "dropout="),)),
    "rng": Option(
        "None, int or numpy.random.Generator",
        "Draws the dropout: None is fresh entropy, an int the seed, a Generator gives one uint64 a"
        " call.",
        "Salmon et al. 2011, \"Parallel Random Numbers\"",
        (("seed dropout_seed dropout_rng generator random_state", "rng="),)),
    "dropout_offsets": Option(
        "(batch, head, query, key), ints in [0, 2^32), optional",
        "Which batch item, head, query and key of the dropout's mask the first ones here are, where"
        " this is a part of a larger attention: the parts drop what the whole would.",
        "Dao 2023, \"FlashAttention-2\", section 3.1: dropout by position"),
}

ATTENTION = tuple(AttentionOptions._fields)
ADDITIVE = tuple(name for name in ATTENTION if name in AdditiveKeywords.__annotations__)
VARLEN = tuple(name for name in ATTENTION if name in VarlenKeywords.__annotations__)
LAYER = tuple(name for name in ATTENTION if name in LayerKeywords.__annotations__)

DEFAULTS = AttentionOptions()
_make = AttentionOptions.__new__

for _name, _option in OPTIONS.items():
    for _others, _wanted in _option.elsewhere:
        other_names(_others, _name, _wanted)


def attention_options(function: Callable[..., Any], given: Mapping[str, Any],
                      more: tuple[Never, ...] = ()) -> AttentionOptions:
    """The record of a call's **options; the error for a keyword names the function's own. `more` is
    what came by position beyond what has one."""
    if more:
        raise too_many(function, more)
    if not given:
        return DEFAULTS
    try:
        return _make(AttentionOptions, **given)
    except TypeError:
        raise unknown_keyword(function, [name for name in given if name not in ATTENTION]) from None


def some_options(function: Callable[..., Any], given: Mapping[str, Any],
                 names: tuple[str, ...], more: tuple[Never, ...] = ()) -> AttentionOptions:
    """`attention_options` of a function that takes only these."""
    unknown = [name for name in given if name not in names]
    if unknown:
        raise unknown_keyword(function, unknown)
    return attention_options(function, given, more)


def takes_options(names: tuple[str, ...],
                  before: str = "") -> Callable[[Function], Function]:
    """Decorates a function that takes **options: its signature, and what help() shows, have each
    by its name, in front of the parameter `before` or at the end. A line {options} of its docstring
    becomes the options' paragraphs."""

    def described(function: Function) -> Function:
        names_its_keywords(function)
        shown: Any = function
        own = shown.__signature__
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            if parameter.name == before:
                parameters += map(_parameter, names)
            parameters.append(parameter)
        if not before:
            parameters += map(_parameter, names)
        shown.__signature__ = own.replace(parameters=parameters)
        del shown.__annotations__["options"]
        shown.__annotations__ |= {name: AttentionKeywords.__annotations__[name] for name in names}
        if function.__doc__ is not None:
            function.__doc__ = re.sub(  # Python 3.13 takes the indentation away
                r"^( *)\{options\}\n", lambda found: _paragraphs(names, found[1]), function.__doc__,
                flags=re.MULTILINE)
        return function

    return described


def _parameter(name: str) -> inspect.Parameter:
    annotation = AttentionKeywords.__annotations__[name].__forward_arg__
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY,
                             default=AttentionOptions._field_defaults[name],
                             annotation=AnnotationText(annotation))


def _paragraphs(names: tuple[str, ...], indent: str) -> str:
    """As the parameters of a docstring."""
    lines = []
    for name in names:
        option = OPTIONS[name]
        lines.append(f"{indent}{name} : {option.type}\n")
        lines += [f"{indent}    {line}\n" for line in textwrap.wrap(option.meaning, 92)]
    return "".join(lines)


def as_sides(window: Any) -> Window:
    """The sides of a window, None where it is open; None is open on both."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window: got {type(window).__name__}, wanted a pair (left, right)")
    if len(window) != 2:
        raise ValueError(f"window: got {len(window)} entries, wanted two (left, right)")
    left, right = (None if side is None else as_size(side, "window", least=0) for side in window)
    return left, right


def is_block_mask(mask: object) -> bool:
    """Whether the core takes it as a BlockMask, without loading that."""
    return hasattr(type(mask), "_core_record")


def check_score_axes(ndim: int, name: str) -> None:
    """Of a mask or bias."""
    if ndim not in (2, 4):
        hint = (f"for one per batch item write {name}[:, None], for one per head {name}[None]"
                if ndim == 3 else
                f"for one per key write {name}[None], for documents {name}[:, None] == {name}")
        raise ValueError(f"{name}: got {ndim} dimensions, wanted 2 (query_len, key_len) or 4"
                         f" (batch, heads, query_len, key_len); {hint}")
