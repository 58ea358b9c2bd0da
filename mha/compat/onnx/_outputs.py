"""Named tuples of outputs, defined in private files, under the module that users import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, get_type_hints

Outputs = TypeVar("Outputs", bound=type)


def public_in(module: str) -> Callable[[Outputs], Outputs]:
    """The class names this module, and so do pickles; its type hints are looked up before."""

    def moved(outputs: Outputs) -> Outputs:
        outputs.__annotations__ = get_type_hints(outputs)
        outputs.__module__ = module
        return outputs

    return moved
