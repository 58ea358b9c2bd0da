"""Rotary embeddings: pairs of columns of queries and keys rotate with the position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import as_array, as_finite, as_int, check_kind
from mha._base.keywords import checks_keywords, names_its_keywords, unknown_keyword
from mha._functions.gradients import RotaryGradients

__all__ = ["Rotary"]

Layout = Literal["half", "interleaved"]
LAYOUTS = ("half", "interleaved")
MOST_DIMS = 1 << 16


class Rotary:
    """Rotary position embeddings (Su et al. 2021, "RoFormer"), for the heads of queries and keys.

    A pair of columns (a, b) at position p becomes (a cos - b sin, b cos + a sin) of the angle
    p * frequency, so that the dot product of a query and a key depends on how far apart they are
    alone. Angles are exact to 2^-92 of a turn whatever the position, cosine and sine within 1 ulp
    of float64 beside that, and rounded once to the type of the array; the same bits on every
    machine.

    Parameters
    ----------
    dims : int
        How many columns of a head rotate, the first ones; even, at most head_dim. The rest stay.
    base : float > 0
        Pair c rotates base ** (-2 c / dims) radians a position.
    layout : "half" or "interleaved"
        Column c rotates with c + dims/2 (Llama, GPT-NeoX), or 2c with 2c + 1 (GPT-J, the paper).
    frequencies : array (dims/2,), optional
        Radians a position, in place of those that base gives.
    magnitude : float
        Multiplies cosine and sine.

    Attributes
    ----------
    The parameters above, read-only; base is None where frequencies were given. Equal ones compare
    equal and hash alike.

    Raises
    ------
    ValueError: dims that are odd or below 2, another layout, numbers that are not finite, a wrong
    shape. TypeError: what is no number. Both name the argument.

    >>> rotary = mha.Rotary(64)
    >>> query = np.ones((2, 8, 10, 64), np.float32)  # (batch, heads, len, head_dim)
    >>> rotary(query).shape
    (2, 8, 10, 64)
    """

    __module__ = "mha"  # where users import it from, and so do pickles
    __slots__ = ("__weakref__", "_base", "_record")
    if TYPE_CHECKING:
        _base: float | None
        _record: tuple[bytes, bool, float]  # as the core takes it

    @checks_keywords
    def __init__(self, dims: int, *, base: float = 10000.0, layout: Layout = "half",
                 frequencies: ArrayLike | None = None, magnitude: float = 1.0) -> None:
        size = _even(dims)
        known_base: float | None = None
        if frequencies is None:
            known_base = as_finite(base, "base", above=0)
            from mha._functions.rotary_scaling import from_base  # here, since it loads decimal

            array = np.array(from_base(size, known_base))
        else:
            array = _checked_frequencies(frequencies, size)
        record = (array.tobytes(), checked_layout(layout, "layout") == "interleaved",
                  as_finite(magnitude, "magnitude"))
        object.__setattr__(self, "_base", known_base)
        object.__setattr__(self, "_record", record)

    @classmethod
    @checks_keywords
    def from_config(cls, mapping: Mapping[str, Any], head_dim: int, *, layout: Layout = "half",
                    length: int | None = None, layer_type: str | None = None) -> Rotary:
        """The rotary embeddings that a model's config describes.

        Parameters
        ----------
        mapping : names with values, as a config.json has them
            rope_theta (or rotary_emb_base, global_rope_theta), by default 10000; rope_scaling or
            rope_parameters (by layer type too) with rope_type (or type) "default", "linear" (Chen
            et al. 2023), "dynamic" (NTK-aware, Peng et al. 2023), "yarn" (Peng et al. 2023),
            "longrope" (Ding et al. 2024) or "llama3" (Llama Team 2024), and what each needs;
            rotary_dim, partial_rotary_factor or rotary_pct say how many columns rotate.
        head_dim : int
        layout : "half" or "interleaved"
            Not in configs: GPT-J and Cohere's models interleave, most others do not.
        length : int, optional
            The longest sequence that is meant. "longrope" takes long_factor iff it is over the
            original maximum, "dynamic" the larger of it and the maximum; frequencies are fixed
            here, since what switches while decoding cannot match one call.
        layer_type : str, optional
            Which of several kinds of layers: "full_attention", "sliding_attention", ...

        Returns
        -------
        Rotary, for arrays (..., len, head_dim).

        Raises
        ------
        ValueError: an unknown type, a key that is missing or, inside rope_scaling or
        rope_parameters, unknown or not supported (mrope_section); a value out of range, dims that
        are odd or beyond head_dim. TypeError: what is no mapping or no number.

        Source: the papers above; frequencies are computed in 40 decimal digits and rounded once.

        >>> config = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
        >>> mha.Rotary.from_config(config, 128).frequencies[:1]
        array([0.25])
        """
        from mha._functions.rotary_scaling import read_config

        read = read_config(mapping, head_dim, length, layer_type)
        if read.is_plain:
            return cls(read.dims, base=read.base, layout=layout)
        return cls(read.dims, layout=layout, frequencies=read.frequencies,
                   magnitude=read.magnitude)

    @property
    def dims(self) -> int:
        """How many columns rotate."""
        return 2 * len(self.frequencies)

    @property
    def base(self) -> float | None:
        """What the frequencies are powers of; None where they were given."""
        return self._base

    @property
    def layout(self) -> Layout:
        """Which columns rotate together: "half" or "interleaved"."""
        return "interleaved" if self._record[1] else "half"

    @property
    def frequencies(self) -> NDArray[np.float64]:
        """Radians a position, (dims/2,); read-only."""
        return np.frombuffer(self._record[0])

    @property
    def magnitude(self) -> float:
        """What cosine and sine are multiplied by."""
        return self._record[2]

    @names_its_keywords
    def __call__(self, x: ArrayLike, positions: ArrayLike | None = None,
                 **unknown: Never) -> NDArray[Any]:
        """Rotate the first dims columns of x by their positions; the rest stay.

        Parameters
        ----------
        x : array (len, head_dim), (batch, len, head_dim) or (..., heads, len, head_dim)
        positions : ints (len,) or batch axes + (len,), by default 0, 1, ...
            Of any sign; the batch axes are those before heads.

        Returns
        -------
        numpy.ndarray, shaped as x and of its type (integers become float64; halves are rounded
        once).

        Raises
        ------
        ValueError: a shape that does not fit, dims beyond head_dim. TypeError: positions that are
        not integers, a type other than float16, bfloat16, float32, float64 or integers.

        Source: Su et al. 2021, "RoFormer", equation 34.

        >>> mha.Rotary(2)([[3.0, 4.0]], positions=[0])
        array([[3., 4.]])
        """
        if unknown:
            raise unknown_keyword(Rotary.__call__, unknown)
        return _core.rotary(x, self._record, positions)

    @checks_keywords
    def vjp(self, x: ArrayLike, positions: ArrayLike | None = None,
            ) -> tuple[NDArray[Any], Callable[[ArrayLike], RotaryGradients]]:
        """The rotated x and its gradient: the vector-Jacobian product.

        Parameters
        ----------
        x, positions : as in a call
            x (..., len, head_dim). Positions are kept, not copied: they must not change before the
            pullback is called.

        Returns
        -------
        (output, pullback). pullback(grad_output) takes the gradient of a loss with respect to the
        output and returns that with respect to x, by name and shaped as x: a rotation back.

        Raises
        ------
        ValueError, TypeError: as a call.

        Source: Su et al. 2021, "RoFormer"; the transpose of a rotation is its inverse.

        >>> output, pullback = mha.Rotary(64).vjp(np.ones((8, 10, 64)))
        >>> pullback(output).x.shape
        (8, 10, 64)
        """
        output, saved = _core.rotary(x, self._record, positions, save=True)

        def pullback(grad_output: ArrayLike) -> RotaryGradients:
            """The gradient of a loss by x, from that by the output; shaped as they are."""
            return RotaryGradients(**_core.rotary_backward(saved, grad_output, None, {"x"}))

        return output, pullback

    def __eq__(self, other: object) -> bool:
        return self._record == other._record if isinstance(other, Rotary) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._record)

    def __setattr__(self, name: str, value: object) -> Never:
        raise AttributeError(f"{name}: got an assignment to a Rotary, wanted a new one")

    def __delattr__(self, name: str) -> Never:
        raise AttributeError(f"{name}: got deleted, wanted a new Rotary")

    def __copy__(self) -> Rotary:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Rotary:
        return self

    def __reduce__(self) -> tuple[Callable[..., Rotary], tuple[Any, ...]]:
        frequencies = None if self._base is not None else self.frequencies.tolist()
        return Rotary._restored, (self.dims, self._base, self.layout, frequencies, self.magnitude)

    @classmethod
    def _restored(cls, dims: int, base: float | None, layout: Layout,
                  frequencies: list[float] | None, magnitude: float) -> Rotary:
        """What pickle makes one of."""
        return cls(dims, base=10000.0 if base is None else base, layout=layout,
                   frequencies=frequencies, magnitude=magnitude)

    def __repr__(self) -> str:
        shown = [str(self.dims)]
        if self._base is None:
            first, last = self.frequencies[0], self.frequencies[-1]
            shown.append(f"frequencies=[{first:.6g}, ..., {last:.6g}]")
        else:
            shown.append(f"base={self._base:g}")
        shown.append(f"layout={self.layout!r}")
        if self.magnitude != 1:
            shown.append(f"magnitude={self.magnitude:.6g}")
        return f"Rotary({', '.join(shown)})"


def as_record(rotary: Rotary | None) -> tuple[bytes, bool, float] | None:
    """What the core takes of it."""
    if rotary is None:
        return None
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary: got {type(rotary).__name__}, wanted an mha.Rotary")
    return rotary._record


def checked_layout(layout: Any, name: str) -> Layout:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        wrong = ValueError if isinstance(layout, str) else TypeError
        raise wrong(f'{name}: got {layout!r}, wanted "half" or "interleaved"')
    return "interleaved" if layout == "interleaved" else "half"


def _even(dims: int) -> int:
    size = as_int(dims, "dims")
    if size < 2 or size % 2 or size > MOST_DIMS:
        raise ValueError(f"dims: got {size}, wanted an even number of columns from 2 to"
                         f" {MOST_DIMS}")
    return size


def _checked_frequencies(frequencies: ArrayLike, dims: int) -> NDArray[np.float64]:
    array = as_array(frequencies, "frequencies")
    check_kind(array, "frequencies", "iuf", "numbers")
    if array.shape != (dims // 2,):
        raise ValueError(f"frequencies: got shape {array.shape}, wanted ({dims // 2},)")
    real = array.astype(np.float64)
    if not np.isfinite(real).all():
        raise ValueError("frequencies: got one that is not finite, wanted radians a position")
    return real
