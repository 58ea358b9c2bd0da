"""What the calls share that go by single steps of the core: ragged ones and latent attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import as_array
from mha._base.dtypes import as_computed
from mha._functions.gradients import Gradient

Array = NDArray[Any]


def checked_gate(settings: Any, head_gate: ArrayLike) -> Array:
    """(num_heads,) in the type in which the layer computes, an array of its own."""
    gate = as_array(head_gate, "head_gate")
    gate = gate.astype(np.float32) if gate.dtype == bool else gate
    if gate.shape != (settings.num_heads,):
        raise ValueError(f"head_gate: got shape {gate.shape}, wanted ({settings.num_heads},)")
    return as_computed(gate, "head_gate", settings.dtype).copy()


def linear_backward(saved: object, grad_output: ArrayLike, which: str, wanted: set[str],
                    found: dict[str, Gradient]) -> Any:
    """The gradient of "x" where it is wanted; those of W and b go to `found`. A row of x whose
    gradient is 0, as padding's, may be NaN."""
    names = {"x": "x", f"W_{which}": "weight", f"b_{which}": "bias"}
    gradients = _core.linear_backward(saved, grad_output, True, {
        step for name, step in names.items() if name in wanted})
    found |= {name: gradients[step] for name, step in names.items() if name != "x"}
    return gradients["x"]
