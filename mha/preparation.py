"""What happens to queries and keys between their projection and attention: a norm of each head or
of all together, then the rotation by their positions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from numpy.typing import ArrayLike

from mha import _core
from mha.arguments import as_finite
from mha.rotary import Rotary, as_record

NORMS = ("q_norm", "k_norm")
NormOf = Literal["head", "width"]


def prepared_core(*, rotary: Rotary | None = None, positions: ArrayLike | None = None,
                  key_positions: ArrayLike | None = None, key_is_query: bool = False,
                  **norms: Any) -> Callable[..., Any]:
    """`_core.multi_head_attention` with what prepares heads; norms: q_norm, k_norm, norm_eps and
    norm_offset."""
    record = None
    if rotary is not None:
        record = as_record(rotary)
    else:
        for name, given in (("positions", positions), ("key_positions", key_positions)):
            if given is not None:
                raise ValueError(f"{name}: got positions where nothing rotates, wanted rotary= too")
    if key_positions is None and key_is_query:
        key_positions = positions
    return functools.partial(_core.multi_head_attention, rotary=record, positions=positions,
                             key_positions=key_positions, **norms)


class Preparation:
    """The constructor's arguments for it, checked."""

    __slots__ = ("norm_eps", "norm_offset", "qk_norm", "rotary")

    def __init__(self, rotary: Rotary | None, qk_norm: NormOf | None, norm_eps: float,
                 norm_offset: float, head_dim: int) -> None:
        if rotary is not None:
            as_record(rotary)
            if rotary.dims > head_dim:
                raise ValueError(f"rotary: got {rotary.dims} dims, wanted at most head_dim"
                                 f" ({head_dim})")
        if qk_norm is not None and (not isinstance(qk_norm, str)
                                    or qk_norm not in ("head", "width")):
            wrong = ValueError if isinstance(qk_norm, str) else TypeError
            raise wrong(f'qk_norm: got {qk_norm!r}, wanted "head", "width" or None')
        self.rotary = rotary
        self.qk_norm = qk_norm
        self.norm_eps = as_finite(norm_eps, "norm_eps", least=0)
        self.norm_offset = as_finite(norm_offset, "norm_offset")
