"""Rotary embeddings: pairs of columns of queries and keys rotate with the position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import as_array, as_finite, as_int, as_ints, check_choice, check_kind
from mha._base.keywords import checks_keywords, names_its_keywords, unknown_keyword
from mha._functions.gradients import RotaryGradients

__all__ = ["Rotary"]

Layout = Literal["half", "interleaved"]
SectionLayout = Literal["split", "interleaved"]
# As the core takes it: frequencies, whether pairs are interleaved, magnitude; by which position
# axis each pair turns, nothing where there is one; and how many position axes there are.
Record = tuple[bytes, bool, float, bytes, int]
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
    sections : ints, optional
        Of multimodal models (Wang et al. 2024, "Qwen2-VL"), whose tokens stand at n positions: that
        in time, row and column of an image, say. How many pairs turn by each of these axes: n ints
        of at least 1, two or more of them, that sum to dims/2.
    section_layout : "split" or "interleaved"
        The first sections[0] pairs turn by axis 0, the next ones by axis 1, and so on (Qwen2-VL);
        or pair c by axis c % n as long as c // n < sections[c % n], the rest by axis 0 (Qwen3-VL).

    Attributes
    ----------
    The parameters above, read-only; base is None where frequencies were given. Equal ones compare
    equal and hash alike.

    Raises
    ------
    ValueError: dims that are odd or below 2, another layout, numbers that are not finite, a wrong
    shape, sections of another sum. TypeError: what is no number. Both name the argument.

    >>> rotary = mha.Rotary(64)
    >>> query = np.ones((2, 8, 10, 64), np.float32)  # (batch, heads, len, head_dim)
    >>> rotary(query).shape
    (2, 8, 10, 64)
    """

    __module__ = "mha"  # where users import it from, and so do pickles
    __slots__ = ("__weakref__", "_base", "_record", "_section_layout", "_sections")
    if TYPE_CHECKING:
        _base: float | None
        _record: Record
        _sections: tuple[int, ...] | None
        _section_layout: SectionLayout

    @checks_keywords
    def __init__(self, dims: int, *, base: float = 10000.0, layout: Layout = "half",
                 frequencies: ArrayLike | None = None, magnitude: float = 1.0,
                 sections: Sequence[int] | None = None,
                 section_layout: SectionLayout = "split") -> None:
        size = _even(dims)
        known_base: float | None = None
        if frequencies is None:
            known_base = as_finite(base, "base", above=0)
            from mha._functions.rotary_scaling import from_base  # here, since it loads decimal

            array = np.array(from_base(size, known_base))
        else:
            array = _checked_frequencies(frequencies, size)
        check_choice(layout, "layout", "half", "interleaved")
        check_choice(section_layout, "section_layout", "split", "interleaved")
        known_sections = None if sections is None else _checked_sections(sections, size)
        axes = () if known_sections is None else _axes_of(known_sections, section_layout)
        record = (array.tobytes(), layout == "interleaved", as_finite(magnitude, "magnitude"),
                  np.array(axes, np.int64).tobytes(), len(known_sections or (1,)))
        object.__setattr__(self, "_base", known_base)
        object.__setattr__(self, "_record", record)
        object.__setattr__(self, "_sections", known_sections)
        object.__setattr__(self, "_section_layout", section_layout)

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
            "longrope" (Ding et al. 2024), "llama3" (Llama Team 2024), "proportional" (Gemma 4) or
            "mrope", and what each needs; rotary_dim, partial_rotary_factor or rotary_pct say how
            many columns rotate; mrope_section the sections, in turns where mrope_interleaved.
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
        rope_parameters, unknown or not supported (xdrope_section); a value out of range, dims that
        are odd or beyond head_dim. TypeError: what is no mapping or no number.

        Source: the papers above; frequencies are computed in 40 decimal digits and rounded once.

        >>> config = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
        >>> mha.Rotary.from_config(config, 128).frequencies[:1]
        array([0.25])
        """
        from mha._functions.rotary_scaling import read_config

        read = read_config(mapping, head_dim, length, layer_type)
        by_axis: dict[str, Any] = read.sections
        if read.is_plain:
            return cls(read.dims, base=read.base, layout=layout, **by_axis)
        return cls(read.dims, layout=layout, frequencies=read.frequencies,
                   magnitude=read.magnitude, **by_axis)

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

    @property
    def sections(self) -> tuple[int, ...] | None:
        """How many pairs turn by each position axis; None where there is one."""
        return self._sections

    @property
    def section_layout(self) -> SectionLayout:
        """Which pairs those are: "split" or "interleaved"."""
        return self._section_layout

    @names_its_keywords
    def __call__(self, x: ArrayLike, positions: ArrayLike | None = None,
                 **unknown: Never) -> NDArray[Any]:
        """Rotate the first dims columns of x by their positions; the rest stay.

        Parameters
        ----------
        x : array (len, head_dim), (batch, len, head_dim) or (..., heads, len, head_dim)
        positions : ints (len,) or batch axes + (len,), by default 0, 1, ...
            Of any sign; the batch axes are those before heads. With n sections also (n, len) or
            (n,) + batch axes + (len,), one along each position axis; without that first axis they
            are alike. A shape (n, len) that may be either is a ValueError.

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
        return Rotary._restored, (self.dims, self._base, self.layout, frequencies, self.magnitude,
                                  self.sections, self.section_layout)

    @classmethod
    def _restored(cls, dims: int, base: float | None, layout: Layout,
                  frequencies: list[float] | None, magnitude: float,
                  sections: tuple[int, ...] | None = None,
                  section_layout: SectionLayout = "split") -> Rotary:
        """What pickle makes one of; older pickles have no sections."""
        return cls(dims, base=10000.0 if base is None else base, layout=layout,
                   frequencies=frequencies, magnitude=magnitude, sections=sections,
                   section_layout=section_layout)

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
        if self.sections is not None:
            shown.append(f"sections={self.sections}, section_layout={self.section_layout!r}")
        return f"Rotary({', '.join(shown)})"


def as_record(rotary: Rotary | None) -> Record | None:
    """What the core takes of it."""
    if rotary is None:
        return None
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary: got {type(rotary).__name__}, wanted an mha.Rotary")
    return rotary._record


def position_axes(rotary: Rotary | None) -> int:
    """How many position axes there are: 1 without sections."""
    return 1 if rotary is None else rotary._record[4]


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


def _checked_sections(sections: Sequence[int], dims: int) -> tuple[int, ...]:
    known = tuple(as_ints(sections, "sections"))
    if len(known) < 2 or min(known) < 1 or sum(known) != dims // 2:
        raise ValueError(f"sections: got {known}, wanted two ints or more of at least 1 that sum to"
                         f" {dims // 2}, the pairs of dims")
    return known


def _axes_of(sections: tuple[int, ...], layout: SectionLayout) -> list[int]:
    """By which position axis each pair turns (Wang et al. 2024, "Qwen2-VL", section 2.1)."""
    count = len(sections)
    if layout == "split":
        return [axis for axis in range(count) for _ in range(sections[axis])]
    return [pair % count if pair // count < sections[pair % count] else 0
            for pair in range(sum(sections))]
