"""Arguments that a function does not have: errors that name the one it has.

A function takes unknown keywords as **unknown, an empty dict in every good call, and raises
`unknown_keyword` where there are any; what is too many by position it takes as *more likewise. Type
checkers refuse both, since nothing is a Never; signatures and help() show the function without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Never, TypeVar

import numpy as np

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
other_names("p", "dropout")
other_names("head_mask", "head_gate")
other_names("head_mask", "embed_dim", "nothing: head_gate= of a call, num_heads numbers")
other_names("head_mask", "value", "value= times it, as head_gate= of a layer's call does")
other_names("attn_drop attention_dropout attn_pdrop dropout_prob", "dropout")
other_names("device", "dtype", "nothing: all is computed on the CPU")
other_names("deterministic", "training", "training=, its opposite")
other_names("enable_gqa", "num_kv_heads")
other_names("enable_gqa", "key",
            "nothing: key and value with fewer heads are shared among query's")
other_names("n_heads n_head nhead heads h num_attention_heads", "num_heads")
other_names("n_kv_heads num_key_value_heads num_query_groups", "num_kv_heads")
other_names("d_model num_hiddens hidden_size hidden_dim model_dim units dim qkv_features",
            "embed_dim")
other_names("in_dim input_dim d_in in_features", "query_dim", "query_dim=, or embed_dim= for all")
other_names("d_out out_dim out_features", "output_dim", "output_dim=, or embed_dim= for all")
other_names("bias qkv_bias add_bias", "use_bias")
other_names("kdim", "key_dim")
other_names("vdim", "value_dim")
other_names("head_size dim_head d_head d_k d_kv", "head_dim")
other_names("d_v", "value_head_dim")
other_names("rope rotary_emb rope_scaling", "rotary", "rotary=, a mha.Rotary")
other_names("theta rope_theta rotary_emb_base", "base")
other_names("inv_freq", "frequencies")
other_names("attention_scaling attention_factor", "magnitude")
other_names("position_ids input_pos offset", "positions")
other_names("seq_len max_position_embeddings", "length")
other_names("past_key_value past_key_values kv_cache layer_past", "cache")
other_names("batch_size", "batch")
other_names("max_len max_length max_seq_len max_cache_len", "capacity")
other_names("cu_seqlens cu_seqlens_q sequence_starts", "starts")
other_names("batch_first", "embed_dim", "nothing: arrays are (batch, len, dim)")
other_names("q queries Q inputs_q", "query")
other_names("x inputs hidden_states", "query")
other_names("k keys K inputs_k inputs_kv context encoder_hidden_states memory", "key")
other_names("v values V inputs_v", "value")
other_names("input inputs hidden_states X", "x")
other_names("W kernel", "weight")
other_names("b", "bias")
other_names("left right", "window", "window=(left, right)")
other_names("causal mask key_lengths return_weights training", "embed_dim",
            "nothing: layer(x, {name}=...), a call, has it")
other_names("return_weights return_lse", "wrt", "nothing: a call without vjp returns them")
other_names("cache padding", "wrt", "nothing: calls with a cache have no gradients")
other_names("dropout dropout_p", "training",
            "training=True: the dropout is the layer's, given to its constructor")
other_names("bias window scale", "w_v",
            "nothing: additive attention has no dot products to scale or bias")


# What other libraries' layers have -> what to write.
ATTRIBUTES = {
    "state_dict": 'parameters(), or to_state("pytorch")',
    "load_state_dict": 'load_parameters(), or from_state(state, "pytorch", num_heads=...)',
    "get_weights": "parameters()",
    "set_weights": "load_parameters()",
    "save": "to_state(), and numpy.savez or safetensors of that",
    "shape": "embed_dim and head_dim",
    "forward": "a call, layer(x)",
    "apply": "a call, layer(x)",
    "call": "a call, layer(x)",
    "copy": "copy.deepcopy(layer)",
    "q_proj": "W_q",
    "k_proj": "W_k",
    "v_proj": "W_v",
    "o_proj": "W_o",
    "out_proj": "W_o",
    "attention_weights": "return_weights=True in a call",
    "zero_grad": "nothing: vjp() returns gradients, none are kept",
    "backward": "vjp(), whose pullback gives the gradients",
    "train": "training=True in the calls that train",
    "eval": "nothing: a call without training=True drops nothing",
    "to": "astype(dtype)",
    "half": "astype(numpy.float16)",
    "float": "astype(numpy.float32)",
    "double": "astype(numpy.float64)",
}

# What a value that came by position may be meant for: its kind as NumPy has it, whether it is an
# array, and the keywords, of which the first that the function has is named.
MEANT = [("b", True, "mask"), ("iu", True, "key_lengths"), ("f", True, "bias"),
         ("b", False, "causal use_bias"), ("iu", False, "num_heads num_kv_heads capacity"),
         ("f", False, "dropout")]

PARTS_OF_THE_LAYER = ("Parameters", "Decoding")  # which users do not know of


class OwnNames:
    """Refuses to set a public name that the class does not have: a slip, which would do nothing.
    Classes derived from ours elsewhere may have what they like. Who reads one is told what it has.
    """

    def __setattr__(self, name: str, value: object) -> None:
        known = hasattr(type(self), name) or name.startswith("_")
        if not known and type(self).__module__.startswith("mha."):
            raise AttributeError(_no_such_name(self, name))
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # checkers know the names

        def __getattr__(self, name: str) -> Any:
            following = getattr(super(), "__getattr__", None)  # a mixin's, behind this class
            if following is not None:
                return following(name)
            if name == "_state":
                raise AttributeError(f"{type(self).__name__} has no parameters yet: its __init__"
                                     " must call super().__init__(embed_dim, num_heads) first")
            if name.startswith("_") or hasattr(type(self), name):  # a property's own error
                return object.__getattribute__(self, name)
            raise AttributeError(_no_such_name(self, name))


def _no_such_name(owner: object, name: str) -> str:
    names = [own for own in dir(type(owner)) if not own.startswith("_")]
    elsewhere = [keyword for keyword, _ in ELSEWHERE.get(name, []) if keyword in names]
    if name in ATTRIBUTES and hasattr(type(owner), "to_state"):
        wanted = ATTRIBUTES[name]
    elif elsewhere:
        wanted = elsewhere[0]
    else:
        alike = close_matches(name, names, 3) or names
        wanted = ("one of " if len(alike) > 1 else "") + ", ".join(alike)
    return f"{name}: {type(owner).__name__} has no such name, wanted {wanted}"


class AnnotationText(str):
    """An annotation as it was written; shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def names_its_keywords(function: Function) -> Function:
    """Decorates a function that takes **unknown: its signature and help() show the others alone.

    Nothing is wrapped: a call is one of the function itself. Arguments that it must have are
    `nothing` where they were not given, for its own errors to come before Python's.
    """
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_as_written(parameter.annotation))
        for parameter in signature.parameters.values()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)]
    needed = [parameter.name for parameter in parameters
              if parameter.default is parameter.empty and parameter.name not in ("self", "cls")]
    call = f"{_shown(function)}({', '.join(needed)})"
    described: Any = function
    described.__defaults__ = tuple(
        _default(parameter, call) for parameter in parameters
        if parameter.kind != parameter.KEYWORD_ONLY and parameter.name not in ("self", "cls"))
    described.__kwdefaults__ = {
        parameter.name: _default(parameter, call) for parameter in parameters
        if parameter.kind == parameter.KEYWORD_ONLY}
    described.__signature__ = signature.replace(
        parameters=parameters, return_annotation=_as_written(signature.return_annotation))
    described.__annotations__ = {name: annotation for name, annotation
                                 in function.__annotations__.items()
                                 if name not in ("unknown", "more")}
    return function


class nothing:  # noqa: N801
    """What an argument is that a function must have and was not given: errors have its name."""

    def __init__(self, call: str) -> None:
        self._mha_missing_from = call

    def __array__(self, *_: object, **__: object) -> Never:
        raise TypeError("the argument is missing")

    def __repr__(self) -> str:
        return "nothing"


def _default(parameter: inspect.Parameter, call: str) -> Any:
    return nothing(call) if parameter.default is parameter.empty else parameter.default


def _as_written(annotation: Any) -> Any:
    return AnnotationText(annotation) if isinstance(annotation, str) else annotation


def unknown_keyword(function: Callable[..., Any], unknown: Iterable[str]) -> TypeError:
    """The error for the first of the unknown keywords of a call of the function."""
    name = next(iter(unknown))
    return TypeError(f"{name}: got a keyword that {_shown(function)} does not have, wanted"
                     f" {_suggestion(name, _known(function))}")


def too_many(function: Callable[..., Any], more: tuple[Any, ...]) -> TypeError:
    """The error for what a call of the function gave by position beyond what has one."""
    by_keyword = _known(function)
    by_place = [parameter.name for parameter in inspect.signature(function).parameters.values()
                if parameter.kind != parameter.KEYWORD_ONLY and parameter.name in by_keyword]
    by_keyword = by_keyword[len(by_place):]
    meant = dict.fromkeys(keyword for value in more for keyword in _meant(value, by_keyword))
    return TypeError(f"{_shown(function)}: got {len(by_place) + len(more)} arguments by position,"
                     f" wanted {', '.join(by_place)} and the rest by name:"
                     f" {'=, '.join(meant or by_keyword[:3])}=")


def meant_by_place(function: Callable[..., Any], value: Any) -> str:
    """What to write for a value that came in the place of an array and looks like an option: a
    mask, a flag, lengths; "" where it does not. Of floats only a mask that is added does: others
    may well be keys of a wrong shape."""
    for keyword in _meant(value, _known(function)):
        if keyword == "bias" and np.max(value, initial=-1) != 0:
            return ""
        return ("a " if keyword in ("mask", "bias") else "") + f"{keyword} goes by name: {keyword}="
    return ""


def _meant(value: Any, known: list[str]) -> list[str]:
    """The keyword that a value is for, as far as can be seen."""
    try:
        array = np.asarray(value)
        is_mask = array.ndim > 1 and array.any() and np.isin(array, (0, 1)).all()
    except Exception:  # whatever it is, that it came by position is the error
        return []
    kind = "b" if is_mask else array.dtype.kind  # mask= then says what to write for 0 and 1
    keywords = " ".join(names for kinds, is_array, names in MEANT
                        if kind in kinds and (array.ndim > 0) == is_array).split()
    return [keyword for keyword in keywords if keyword in known][:1]


def _known(function: Callable[..., Any]) -> list[str]:
    return [known for known in inspect.signature(function).parameters if known != "self"]


def _shown(function: Callable[..., Any]) -> str:
    """As users know it."""
    owner, _, method = function.__qualname__.rpartition(".")
    if owner in PARTS_OF_THE_LAYER:
        owner = "MultiHeadAttention"
    return {"__init__": owner, "__call__": f"a call of {owner}"}.get(
        method, f"{owner}.{method}" if owner else method)


def _suggestion(name: str, known: list[str]) -> str:
    for keyword, wanted in ELSEWHERE.get(name, []):
        if keyword in known:
            return wanted.format(name=name)
    close = close_matches(name, known, 1) or known
    return f"{close[0]}=" if len(close) == 1 else f"one of {', '.join(close)}"


def close_matches(name: str, names: Iterable[str], most: int) -> list[str]:
    """The names most alike; one alone where the letters' case is all that differs."""
    import difflib  # here, since import mha has no other use for it

    by_lower_case = {known.lower(): known for known in names}
    if name.lower() in by_lower_case:
        return [by_lower_case[name.lower()]]
    return [by_lower_case[close]
            for close in difflib.get_close_matches(name.lower(), by_lower_case, most)]
