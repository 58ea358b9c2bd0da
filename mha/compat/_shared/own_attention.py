"""Which models of the transformers package cannot be given an attention implementation, because
they attend by code of their own."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from transformers import AttentionInterface, PreTrainedModel

# What a class calls that attends itself.
_ATTENDING = {"softmax", "Softmax", "scaled_dot_product_attention", "multi_head_attention_forward"}


def keep_from_models_that_attend_themselves(names: Collection[str]) -> None:
    """Let models that attend by code of their own keep the implementation that they have without
    being asked, with a warning, where they are asked for one of these names.

    They would get masks that their code does not understand: added to the scores, a mask of bools
    hides nothing.
    """
    original = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(original)
    def get_correct_attn_implementation(self: PreTrainedModel, requested_attention: str | None,
                                        is_init_check: bool = False) -> str:
        if requested_attention is not None and requested_attention in names:
            own = own_attention(type(self), requested_attention)
            if own:
                kept = original(self, None, is_init_check)
                warnings.warn(
                    f"attn_implementation: got {requested_attention!r} for {type(self).__name__},"
                    f" which attends by code of its own ({', '.join(own)}) that asks for no"
                    f" registered implementation: it stays {kept!r}", stacklevel=3)
                return kept
        return original(self, requested_attention, is_init_check)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def own_attention(model: type[PreTrainedModel], implementation: str) -> list[str]:
    """The names of the classes that keep a model from taking a registered implementation; none
    where it takes it.

    It takes none where no code beside it asks the package's AttentionInterface, or where a table
    without that name says which class attends. Where some code asks and some attends itself, with
    masks, it is the package's flag that tells whether the latter understands those of "sdpa", which
    are mha's.
    """
    there = vars(sys.modules[model.__module__])
    classes = {name: found for name, found in there.items()
               if isinstance(found, type) and issubclass(found, nn.Module)
               and found.__module__ == model.__module__}
    tables = [found for found in there.values()
              if isinstance(found, dict) and "eager" in found and implementation not in found]
    chosen = [found.__name__ for table in tables for found in table.values()
              if isinstance(found, type) and issubclass(found, nn.Module)]
    if chosen:
        return list(dict.fromkeys(chosen))
    functions = [found for found in there.values() if isinstance(found, types.FunctionType)]
    asks = any(map(_asks, classes.values())) or any(map(_function_asks, functions))
    attending = [name for name, found in classes.items() if "Attention" in name
                 and not _asks(found)
                 and (not asks or (_ATTENDING & set(_names_in(found)) and _takes_mask(found)))]
    return [] if asks and model._supports_sdpa else attending


@functools.cache
def _asks(module: type[nn.Module]) -> bool:
    """Whether a method of the class, inherited ones too, looks at an AttentionInterface."""
    return any(_function_asks(function) for function in _methods(module))


def _function_asks(function: types.FunctionType) -> bool:
    return any(isinstance(function.__globals__.get(name), AttentionInterface)
               for code in _codes(function.__code__) for name in code.co_names)


def _takes_mask(module: type[nn.Module]) -> bool:
    """Whether a mask can reach the class; without one it cannot misunderstand it."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any("mask" in each.name or each.kind is each.VAR_KEYWORD for each in parameters)


def _names_in(module: type[nn.Module]) -> Iterator[str]:
    """The names that the methods of the class use: globals, attributes and methods."""
    for function in _methods(module):
        for code in _codes(function.__code__):
            yield from code.co_names


def _methods(module: type[nn.Module]) -> Iterator[types.FunctionType]:
    for base in module.__mro__:
        if base in (PreTrainedModel, nn.Module):
            return
        for attribute in vars(base).values():
            function: Any = inspect.unwrap(attribute) if callable(attribute) else attribute
            if isinstance(function, types.FunctionType):
                yield function


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code, and that of the functions written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
