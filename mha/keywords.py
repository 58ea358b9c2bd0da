"""Keywords that a function does not have: errors that name the one it has.

A function takes them as **unknown, an empty dict in every good call, and raises `unknown_keyword`
where there are any. Type checkers refuse them, since nothing is a Never; signatures and help()
show the function without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# What other libraries call it -> (our keywords, one of which the function must have, and what to
# write). Several entries are tried in turn.
ELSEWHERE: dict[str, list[tuple[str, str]]] = {}


def other_names(names: str, keyword: str, wanted: str = "") -> None:
    """What others call a keyword, words apart; the options' are in options.py."""
    for name in names.split():
        ELSEWHERE.setdefault(name, []).append((keyword, wanted or f"{keyword}="))


other_names("need_weights return_attention_scores output_attentions return_attention",
            "return_weights")
other_names("average_attn_weights", "return_weights",
            "return_weights=, the weights of every head: their .mean(axis=-3) is the average")
other_names("return_softmax_lse", "return_lse")
other_names("dropout_p dropout_rate p", "p")
other_names("head_mask", "head_gate")
other_names("deterministic", "training", "training=, its opposite")
other_names("enable_gqa", "num_kv_heads")
other_names("enable_gqa", "key",
            "nothing: key and value with fewer heads are shared among query's")
other_names("n_heads n_head nhead heads h num_attention_heads", "num_heads")
other_names("n_kv_heads num_key_value_heads num_query_groups", "num_kv_heads")
other_names("d_model num_hiddens hidden_size hidden_dim model_dim", "embed_dim")
other_names("bias qkv_bias add_bias", "use_bias")
other_names("kdim", "key_dim")
other_names("vdim", "value_dim")
other_names("head_size d_head d_k d_kv", "head_dim")
other_names("d_v", "value_head_dim")
other_names("theta rope_theta rotary_emb_base", "base")
other_names("inv_freq", "frequencies")
other_names("attention_scaling attention_factor", "magnitude")
other_names("position_ids input_pos offset", "positions")
other_names("seq_len max_position_embeddings", "length")
other_names("past_key_value past_key_values kv_cache layer_past", "cache")
other_names("max_len max_length max_seq_len max_cache_len", "capacity")
other_names("cu_seqlens cu_seqlens_q sequence_starts", "starts")
other_names("batch_first", "embed_dim", "nothing: arrays are (batch, len, dim)")
other_names("q queries Q", "query")
other_names("k keys K", "key")
other_names("v values V", "value")
other_names("input X", "x")
other_names("W kernel", "weight")
other_names("b", "bias")
other_names("left right", "window", "window=(left, right)")
other_names("cache padding", "wrt", "nothing: calls with a cache have no gradients")
other_names("dropout dropout_p", "training",
            "training=True: the dropout is the layer's, given to its constructor")
other_names("bias window scale", "w_v",
            "nothing: additive attention has no dot products to scale or bias")


PARTS_OF_THE_LAYER = ("Parameters", "Decoding")  # which users do not know of


class OwnNames:
    """Refuses to set a public name that the class does not have: a slip, which would do nothing.
    Classes derived from ours elsewhere may have what they like."""

    def __setattr__(self, name: str, value: object) -> None:
        known = hasattr(type(self), name) or name.startswith("_")
        if not known and type(self).__module__.startswith("mha."):
            names = [own for own in dir(type(self)) if not own.startswith("_")]
            alike = _close_matches(name, names, 3) or names
            some = "one of " if len(alike) > 1 else ""
            raise AttributeError(f"{name}: {type(self).__name__} has no such name, wanted {some}"
                                 f"{', '.join(alike)}")
        super().__setattr__(name, value)


class AnnotationText(str):
    """An annotation as it was written; shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def names_its_keywords(function: Function) -> Function:
    """Decorates a function that takes **unknown: its signature and help() show the others alone.

    Nothing is wrapped: a call is one of the function itself.
    """
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_as_written(parameter.annotation))
        for parameter in signature.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
    described: Any = function
    described.__signature__ = signature.replace(
        parameters=parameters, return_annotation=_as_written(signature.return_annotation))
    described.__annotations__ = {name: annotation for name, annotation
                                 in function.__annotations__.items() if name != "unknown"}
    return function


def _as_written(annotation: Any) -> Any:
    return AnnotationText(annotation) if isinstance(annotation, str) else annotation


def unknown_keyword(function: Callable[..., Any], unknown: Iterable[str]) -> TypeError:
    """The error for the first of the unknown keywords of a call of the function."""
    name = next(iter(unknown))
    known = [known for known in inspect.signature(function).parameters if known != "self"]
    owner, _, method = function.__qualname__.rpartition(".")
    if owner in PARTS_OF_THE_LAYER:
        owner = "MultiHeadAttention"
    callee = {"__init__": owner, "__call__": f"a call of {owner}"}.get(
        method, f"{owner}.{method}" if owner else method)
    return TypeError(f"{name}: got a keyword that {callee} does not have, wanted"
                     f" {_suggestion(name, known)}")


def _suggestion(name: str, known: list[str]) -> str:
    for keyword, wanted in ELSEWHERE.get(name, []):
        if keyword in known:
            return wanted.format(name=name)
    by_lower_case = {keyword.lower(): keyword for keyword in known}
    close = _close_matches(name.lower(), by_lower_case, 1)
    return f"{by_lower_case[close[0]]}=" if close else f"one of {', '.join(known)}"


def _close_matches(name: str, names: Iterable[str], most: int) -> list[str]:
    import difflib  # here, since import mha has no other use for it

    return difflib.get_close_matches(name, list(names), most)
