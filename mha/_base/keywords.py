"""Arguments that a function does not have: errors that name the one it has.

`checks_keywords` wraps a function to make the error. Where every 100 ns count a function takes
unknown keywords as **unknown, an empty dict in every good call, and raises `unknown_keyword` where
there are any; what is too many by position it takes as *more likewise. Type checkers refuse both,
since nothing is a Never; signatures and help() show the function without.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Never, TypeVar, cast

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

# What an adapter's or a function's own keywords are called elsewhere, as in foreign_names.py.
REGISTERED: list[tuple[str, str, str]] = []


def other_names(names: str, keyword: str, wanted: str = "") -> None:
    """What others call a keyword, words apart, and what to write instead."""
    REGISTERED.append((names, keyword, wanted))


# What a value that came by position may be meant for: its kind as NumPy has it, whether it is an
# array, and the keywords, of which the first that the function has is named.
MEANT = [("b", True, "mask"), ("iu", True, "key_lengths"), ("f", True, "bias"),
         ("b", False, "causal use_bias"), ("iu", False, "num_heads num_kv_heads capacity"),
         ("f", False, "dropout")]


class OwnNames:
    """Refuses to set a public name that the class does not have: a slip, which would do nothing.
    Classes derived from ours elsewhere may have what they like. Who reads one is told what it has.
    """

    def __setattr__(self, name: str, value: object) -> None:
        known = hasattr(type(self), name) or name.startswith("_")
        if not known and f"{type(self).__module__}.".startswith("mha."):
            raise _no_such_attribute(self, name)
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # checkers know the names

        def __getattr__(self, name: str) -> Any:
            following = getattr(super(), "__getattr__", None)  # a mixin's, behind this class
            if following is not None:
                return following(name)
            if name == "_state":
                raise AttributeError(f"{type(self).__name__} has no parameters yet: its __init__"
                                     " must call super().__init__(embed_dim, num_heads) first")
            return missing_attribute(self, name)


def _elsewhere(name: str) -> list[tuple[str, str]]:
    """Our keywords for what others call so, and what to write: to be tried in turn."""
    from mha._base.foreign_names import KEYWORDS  # here, since import mha has no other use for it

    return [(keyword, wanted or f"{keyword}=") for names, keyword, wanted in KEYWORDS + REGISTERED
            if name in names.split()]


def missing_attribute(owner: object, name: str) -> Any:
    """`__getattr__` of a layer or a cache: the error that says what it has."""
    if name.startswith("_") or hasattr(type(owner), name):  # a property's own error
        return object.__getattribute__(owner, name)
    raise _no_such_attribute(owner, name)


def _no_such_attribute(owner: object, name: str) -> AttributeError:
    from mha._base.foreign_names import OF_CACHES, OF_LAYERS

    known = OF_LAYERS if hasattr(type(owner), "to_state") else OF_CACHES
    names = [own for own in dir(type(owner)) if not own.startswith("_")]
    elsewhere = [keyword for keyword, _ in _elsewhere(name) if keyword in names]
    if name in known:
        wanted = known[name]
    elif elsewhere:
        wanted = elsewhere[0]
    else:
        alike = close_matches(name, names, 3) or names
        wanted = ("one of " if len(alike) > 1 else "") + ", ".join(alike)
    return AttributeError(f"{name}: {type(owner).__name__} has no such name, wanted {wanted}")


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


def checks_keywords(function: Function) -> Function:
    """The same for a function without **unknown: a keyword that it does not have is an error that
    names the one it has. It is wrapped, which takes a call some 100 ns: the steps of a small layer
    look for unknown keywords themselves.
    """
    names_its_keywords(function)

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except TypeError:
            known = _known(function)
            unknown = [name for name in keywords if name not in known]
            if not unknown:
                raise
        raise unknown_keyword(function, unknown)

    return cast(Function, checked)


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
                     f" {'=, '.join(meant or by_keyword[:3])}="
                     + ", ..." * (not meant and len(by_keyword) > 3))


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
    return [known for known in inspect.signature(function).parameters
            if known not in ("self", "cls")]


def _shown(function: Callable[..., Any]) -> str:
    """As users know it."""
    owner, _, method = function.__qualname__.rpartition(".")
    owner = "layer" if owner == "OwnParameters" else owner  # which several classes have in common
    return {"__init__": owner, "__call__": f"a call of {owner}"}.get(
        method, f"{owner}.{method}" if owner else method)


def _suggestion(name: str, known: list[str]) -> str:
    for keyword, wanted in _elsewhere(name):
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
