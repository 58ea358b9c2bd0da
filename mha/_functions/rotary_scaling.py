"""The frequencies of rotary embeddings: powers of a base, and how models stretch them to longer
sequences.

All formulas are computed in 40 decimal digits and rounded once to float64, so that they are the
same on every machine. dims columns rotate, pair c of them by frequency[c] radians a position.
"""

from __future__ import annotations

import decimal
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from mha._base.arguments import as_bool, as_ints, as_size, printable
from mha._base.keywords import close_matches

# The formulas' own context: whatever the caller's traps, digits and rounding are.
CONTEXT = decimal.Context(prec=40, rounding=decimal.ROUND_HALF_EVEN, Emin=-999999, Emax=999999,
                          traps=[decimal.DivisionByZero, decimal.InvalidOperation,
                                 decimal.Overflow])
PI = Decimal("3.141592653589793238462643383279502884197169")

# What is read inside rope_scaling and rope_parameters. Models keep there what their own type does
# not use, too; "finetuned" says how a model of YaRN came to be.
PLAIN_KEYS = frozenset((
    "rope_type", "type", "rope_theta", "rotary_emb_base", "global_rope_theta", "rotary_dim",
    "partial_rotary_factor", "rotary_pct", "max_position_embeddings",
    "original_max_position_embeddings", "finetuned", "mrope_section", "mrope_interleaved",
    "interleaved"))
SCALING_KEYS = frozenset((
    "factor", "alpha", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale",
    "mscale_all_dim", "short_factor", "long_factor", "short_mscale", "long_mscale",
    "low_freq_factor", "high_freq_factor"))
KEYS = PLAIN_KEYS | SCALING_KEYS
NOT_SUPPORTED = {
    "xdrope_section": "sections of columns whose pairs turn by different axes",
    "llama_4_scaling_beta": "queries that are scaled by their position"}
# Beginnings of model types whose mrope_section means another order of pairs; and of those whose
# sections come in turns, said or not.
OTHER_SECTIONS = ("ernie4_5_vl", "hunyuan_vl")
IN_TURNS = "qwen3"

Frequencies = list[Decimal]
# A scaled frequency for each pair, and what cosine and sine are multiplied by.
Scaled = tuple[Frequencies, Decimal]


class ConfigRotary(NamedTuple):
    """What a config says."""

    dims: int
    base: float
    is_plain: bool  # frequencies are those of the base, the magnitude is 1
    frequencies: list[float]
    magnitude: float
    sections: dict[str, Any]  # sections and section_layout, where it has several position axes


class Values(dict[str, Any]):
    """The numbers of a config's mapping; null is as good as missing."""

    def number(self, name: str, default: int | None = None,
               above: float = -math.inf) -> Decimal:
        """A finite number above `above`; without a default it must be there."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise missing(name, self)
            return Decimal(default)
        number = _decimal(value, name)
        if number <= above:
            raise ValueError(f"{name}: got {value}, wanted a number above {above:g}")
        return number

    def size(self, name: str) -> int:
        if self.get(name) is None:
            raise missing(name, self)
        return as_size(self.get(name), name)


class Scaling(NamedTuple):
    """What a scaling may ask for."""

    values: Values
    dims: int
    base: Decimal
    length: int | None
    original_is_at_top: bool  # original_max_position_embeddings, of the model

    def maximum(self) -> int:
        """The longest sequence, max_position_embeddings."""
        return self.values.size("max_position_embeddings")

    def original(self) -> int:
        """The longest sequence before the model was stretched."""
        key = "original_max_position_embeddings"
        return self.maximum() if self.values.get(key) is None else self.values.size(key)

    def factor(self, goes_by_lengths: bool = False) -> Decimal:
        """How many times longer sequences are now: what is said, unless it goes by the lengths."""
        if goes_by_lengths or self.values.get("factor") is None:
            return Decimal(self.maximum()) / self.original()
        return self.values.number("factor", above=0)


def from_base(dims: int, base: float) -> list[float]:
    """base ** (-2c/dims) for c = 0 ... dims/2 - 1 (Su et al. 2021, section 3.2.2)."""
    with decimal.localcontext(CONTEXT):
        return _rounded(_powers(dims, Decimal(base)), "base")


def read_config(mapping: Mapping[str, Any], head_dim: int, length: int | None,
                layer_type: str | None) -> ConfigRotary:
    """`Rotary.from_config`, whose docstring names the keys."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"mapping: got {type(mapping).__name__}, wanted names with values")
    if layer_type is not None and not isinstance(layer_type, str):
        raise TypeError(f"layer_type: got {type(layer_type).__name__}, wanted a name")
    columns = as_size(head_dim, "head_dim")
    longest = None if length is None else as_size(length, "length")
    # What belongs to the scaling stands there, in new configs all of it; the rest at the top.
    of_scaling = _scaling_of(mapping, layer_type)
    values = Values({**mapping, **{name: value for name, value in of_scaling.items()
                                   if value is not None}})
    name = _type_of(of_scaling)
    with decimal.localcontext(CONTEXT):
        base = _base_of(Values(of_scaling) if of_scaling.get("rope_theta") is not None else values)
        dims = _dims_of(Values({}) if name == "proportional" else values, columns)
        at_top = mapping.get("original_max_position_embeddings") is not None
        scaling = Scaling(values, dims, base, longest, at_top)
        try:
            frequencies, magnitude = SCALINGS[name](scaling)
        except decimal.DecimalException as error:
            raise ValueError(f"rope_type: got {name!r} with numbers too far apart for 40 digits,"
                             " wanted those of a model") from error
        return ConfigRotary(dims, float(base), SCALINGS[name] is default,
                            _rounded(frequencies, "rope_theta"), float(magnitude),
                            _sections_of(mapping, of_scaling, name))


def default(scaling: Scaling) -> Scaled:
    return _powers(scaling.dims, scaling.base), Decimal(1)


def linear(scaling: Scaling) -> Scaled:
    """Positions divided by factor (Chen et al. 2023, "Position Interpolation", equation 4)."""
    factor = scaling.values.number("factor", above=0)
    return [frequency / factor for frequency in default(scaling)[0]], Decimal(1)


def dynamic(scaling: Scaling) -> Scaled:
    """A larger base, so that the slowest pair is interpolated and the fastest is not: NTK-aware
    scaling, by the length where that is over the maximum (Peng et al. 2023, "YaRN", section 3.3
    and appendix A.1), or by alpha where that is given (Tencent Hunyuan Team 2024)."""
    if scaling.dims <= 2:
        raise ValueError(f"dims: got {scaling.dims}, wanted at least 4 for rope_type 'dynamic'")
    if scaling.values.get("alpha") is not None:
        stretched = scaling.values.number("alpha", above=0)
    else:
        factor = scaling.values.number("factor", above=0)
        maximum = scaling.maximum()
        length = max(scaling.length or 0, maximum)
        stretched = factor * length / maximum - (factor - 1)
    base = scaling.base * stretched ** (Decimal(scaling.dims) / (scaling.dims - 2))
    return _powers(scaling.dims, base), Decimal(1)


def yarn(scaling: Scaling) -> Scaled:
    """Pairs that turn more than beta_fast times within the original length stay, those that turn
    less than beta_slow times are interpolated, and between them it goes linearly; scores get a
    temperature (Peng et al. 2023, "YaRN", sections 3.2 to 3.4; mscale as in DeepSeek-AI 2024)."""
    values, dims = scaling.values, scaling.dims
    original, factor = scaling.original(), scaling.factor()
    fast, slow = values.number("beta_fast", 32, above=0), values.number("beta_slow", 1, above=0)
    truncate = values.get("truncate")
    truncate = True if truncate is None else as_bool(truncate, "truncate")
    if scaling.base <= 1:
        raise ValueError(f"rope_theta: got {scaling.base}, wanted more than 1 for 'yarn'")

    def pair_that_turns(times: Decimal) -> Decimal:
        """Where original * base ** (-2c/dims) = 2 pi times."""
        return dims * (original / (times * 2 * PI)).ln() / (2 * scaling.base.ln())

    first, last = pair_that_turns(fast), pair_that_turns(slow)
    if truncate:
        first = first.to_integral_value(decimal.ROUND_FLOOR)
        last = last.to_integral_value(decimal.ROUND_CEILING)
    first, last = max(first, Decimal(0)), min(last, Decimal(dims - 1))
    if first == last:
        last += Decimal("0.001")
    scaled = []
    for pair, frequency in enumerate(default(scaling)[0]):
        interpolated = min(max((pair - first) / (last - first), Decimal(0)), Decimal(1))
        scaled.append(frequency / factor * interpolated + frequency * (1 - interpolated))
    return scaled, _yarn_magnitude(values, factor)


def _yarn_magnitude(values: Values, factor: Decimal) -> Decimal:
    if values.get("attention_factor") is not None:
        return values.number("attention_factor")
    mscale, of_all = values.number("mscale", 0), values.number("mscale_all_dim", 0)
    if mscale and of_all:
        return _temperature(mscale, factor) / _temperature(of_all, factor)
    return _temperature(Decimal(1), factor)


def _temperature(mscale: Decimal, factor: Decimal) -> Decimal:
    return Decimal("0.1") * mscale * factor.ln() + 1 if factor > 1 else Decimal(1)


def latent_scale(mapping: Mapping[str, Any], head_dim: int) -> float | None:
    """What a config of latent attention scales scores by; None where it is 1 / sqrt(head_dim), as
    it is without mscale_all_dim: that of YaRN (DeepSeek-AI 2024, "DeepSeek-V2", section 3.1.4) is
    left out of cosine and sine, and squared is in the scale, for all columns alike."""
    of_scaling = _scaling_of(mapping, None)
    values = Values(of_scaling)
    with decimal.localcontext(CONTEXT):
        of_all = values.number("mscale_all_dim", 0)
        if _type_of(of_scaling) == "default" or not of_all:
            return None
        temperature = _temperature(of_all, values.number("factor", above=0))
        return float(temperature * temperature / Decimal(head_dim).sqrt())


def longrope(scaling: Scaling) -> Scaled:
    """Every pair has a factor of its own, one for short and one for long sequences (Ding et al.
    2024, "LongRoPE", section 3; magnitude as in Abdin et al. 2024, "Phi-3", or one for short and
    one for long sequences, as in Phi-3.5-MoE)."""
    values, pairs = scaling.values, scaling.dims // 2
    original = scaling.original()
    is_long = scaling.length is not None and scaling.length > original
    factors = _factors(values, "long_factor" if is_long else "short_factor", pairs)
    scaled = [frequency / factor
              for frequency, factor in zip(default(scaling)[0], factors, strict=True)]
    for magnitude in ("long_mscale" if is_long else "short_mscale", "attention_factor"):
        if values.get(magnitude) is not None:
            return scaled, values.number(magnitude)
    factor = scaling.factor(scaling.original_is_at_top)
    if factor <= 1 or original <= 1:
        return scaled, Decimal(1)
    return scaled, (1 + factor.ln() / Decimal(original).ln()).sqrt()


def _factors(values: Values, name: str, pairs: int) -> Frequencies:
    factors = values.get(name)
    if factors is None:
        raise missing(name, values)
    if isinstance(factors, np.ndarray):
        factors = factors.tolist()
    if not isinstance(factors, Sequence) or isinstance(factors, str):
        raise TypeError(f"{name}: got {type(factors).__name__}, wanted a list of numbers")
    if len(factors) != pairs:
        raise ValueError(f"{name}: got {len(factors)} numbers, wanted {pairs}, one a pair")
    found = [_decimal(factor, name) for factor in factors]
    if min(found) <= 0:
        raise ValueError(f"{name}: got {min(found)}, wanted numbers above 0")
    return found


def llama3(scaling: Scaling) -> Scaled:
    """Wavelengths up to original / high_freq_factor stay, those from original / low_freq_factor on
    are interpolated, and between them it goes linearly in turns within the original length (Llama
    Team 2024, "The Llama 3 Herd of Models", section 3.4.2, and its reference code)."""
    values = scaling.values
    factor = values.number("factor", above=0)
    low = values.number("low_freq_factor", above=0)
    high = values.number("high_freq_factor", above=float(low))
    original = scaling.original()
    scaled = []
    for frequency in default(scaling)[0]:
        turns = original * frequency / (2 * PI)  # within the original length
        kept = min(max((turns - low) / (high - low), Decimal(0)), Decimal(1))
        scaled.append((1 - kept) * frequency / factor + kept * frequency)
    return scaled, Decimal(1)


def proportional(scaling: Scaling) -> Scaled:
    """Of the pairs of a whole head a share turns, the fastest, and the others stay (Barbero et al.
    2025, "Round and Round We Go!", whose p-RoPE it is; Gemma 4)."""
    values = scaling.values
    share = values.number("partial_rotary_factor", 1, above=0)
    if share > 1:
        raise ValueError(f"partial_rotary_factor: got {share}, wanted at most 1")
    turning = int(share * scaling.dims / 2)
    factor = values.number("factor", 1, above=0)
    scaled = [frequency / factor for frequency in default(scaling)[0][:turning]]
    return scaled + [Decimal(0)] * (scaling.dims // 2 - turning), Decimal(1)


SCALINGS: dict[str, Callable[[Scaling], Scaled]] = {
    "default": default, "linear": linear, "dynamic": dynamic, "yarn": yarn, "longrope": longrope,
    "llama3": llama3, "proportional": proportional, "mrope": default}


def missing(name: str, mapping: Mapping[str, Any]) -> ValueError:
    return ValueError(f"{name}: got none among {sorted(map(str, mapping))}, wanted a value")


def _powers(dims: int, base: Decimal) -> Frequencies:
    base = +base  # of as many digits as the context has: a tiny float has hundreds
    return [base ** (Decimal(-2 * pair) / dims) for pair in range(dims // 2)]


def _rounded(frequencies: Frequencies, name: str) -> list[float]:
    """As float64, all of them finite."""
    rounded = [float(frequency) for frequency in frequencies]
    if not all(map(math.isfinite, rounded)):
        raise ValueError(f"{name}: got one that makes frequencies beyond the largest float, wanted"
                         " a larger one")
    return rounded


def _decimal(value: Any, name: str) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, Decimal)):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted a number")
    try:
        is_finite = math.isfinite(float(value))
    except (OverflowError, ValueError):  # an int beyond all floats, a signaling NaN
        is_finite = False
    if not is_finite:
        shown = "a number beyond all floats" if isinstance(value, int) else value
        raise ValueError(f"{name}: got {shown}, wanted a finite number")
    return Decimal(int(value)) if isinstance(value, numbers.Integral) else Decimal(float(value))


def _scaling_of(mapping: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """The mapping that says how frequencies are scaled; empty where there is none."""
    for name in ("rope_local_base_freq", "local_rope_theta"):  # Gemma 3, ModernBERT
        if layer_type == "sliding_attention" and mapping.get(name) is not None:
            return {"rope_theta": mapping[name]}
    name, found = _only_scaling(mapping)
    kinds = {kind: value for kind, value in found.items() if isinstance(value, Mapping)}
    _check_keys({key: value for key, value in found.items() if key not in kinds}, name)
    if not kinds:
        return found
    if layer_type not in kinds:
        raise ValueError(f"layer_type: got {layer_type!r}, wanted one of {', '.join(kinds)}")
    of_kind: Mapping[str, Any] = kinds[layer_type]
    _check_keys(of_kind, f"{name}[{layer_type!r}]")
    return of_kind


def _only_scaling(mapping: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Of the two names that a scaling may have the one that is there, and what it says."""
    said = {}
    for name in ("rope_parameters", "rope_scaling"):
        found = mapping.get(name)
        if found is not None and not isinstance(found, Mapping):
            raise TypeError(f"{name}: got {type(found).__name__}, wanted names with values")
        if found:
            said[name] = found
    if not said:
        stray = next((name for name in ("rope_type", "mrope_section", *NOT_SUPPORTED)
                      if mapping.get(name)), None)
        if stray is not None:
            raise ValueError(f"{stray}: got it outside of rope_scaling and rope_parameters, wanted"
                             ' it inside: from_config({"rope_parameters": ...}, head_dim)')
        return "rope_parameters", {}
    name, found = next(iter(said.items()))
    for key, value in said["rope_scaling"].items() if len(said) == 2 else ():
        if key not in found or not np.array_equal(found[key], value):
            raise ValueError(f"rope_scaling: got {printable(str(key))} not as in rope_parameters,"
                             " wanted one of the two")
    return name, found


def _check_keys(found: Mapping[str, Any], where: str) -> None:
    """A key that nothing here reads would be a scaling that nobody sees."""
    for key, value in found.items():
        if value is None or key in KEYS:
            continue
        shown = printable(str(key))
        if key in NOT_SUPPORTED:
            raise ValueError(f"{shown}: got it inside {where}, and mha has no"
                             f" {NOT_SUPPORTED[key]}, wanted a config without")
        close = close_matches(shown, sorted(KEYS), 1)
        wanted = repr(close[0]) if close else "one of " + ", ".join(sorted(KEYS))
        raise ValueError(f"{shown}: got an unknown key inside {where}, wanted {wanted}")


def _type_of(of_scaling: Mapping[str, Any]) -> str:
    name = of_scaling.get("rope_type")
    name = of_scaling.get("type") if name is None else name
    if name is None:
        scaled = sorted(key for key in SCALING_KEYS if of_scaling.get(key) is not None)
        if scaled:
            raise ValueError(f"rope_type: got none beside {', '.join(scaled)}, wanted one of"
                             f" {', '.join(SCALINGS)}")
        name = "default"
    if not isinstance(name, str) or name not in SCALINGS:
        raise ValueError(f"rope_type: got {name!r}, wanted one of {', '.join(SCALINGS)}")
    return name


def _sections_of(mapping: Mapping[str, Any], of_scaling: Mapping[str, Any],
                 name: str) -> dict[str, Any]:
    """sections and section_layout of mrope_section, nothing where there is none."""
    sections = of_scaling.get("mrope_section")
    said = [as_bool(of_scaling[key], key) for key in ("mrope_interleaved", "interleaved")
            if of_scaling.get(key) is not None]
    if sections is None:
        if any(said) or name == "mrope":
            raise missing("mrope_section", of_scaling)
        return {}
    model_type = str(mapping.get("model_type"))
    if model_type.startswith(OTHER_SECTIONS):
        raise ValueError(f"mrope_section: got that of model_type {model_type!r}, whose pairs are in"
                         " an order that mha does not have, wanted a config without")
    known = as_ints(sections, "mrope_section")
    in_turns = any(said) or (not said and model_type.startswith(IN_TURNS))
    return {"sections": known, "section_layout": "interleaved" if in_turns else "split"}


def _base_of(values: Values) -> Decimal:
    name = next((name for name in ("rotary_emb_base", "global_rope_theta")
                 if values.get(name) is not None), "rope_theta")
    return values.number(name, 10000, above=0)


def _dims_of(values: Values, head_dim: int) -> int:
    """How many columns of a head rotate."""
    if values.get("rotary_dim") is not None:
        dims, said = values.size("rotary_dim"), "rotary_dim"
    else:
        said = next((name for name in ("partial_rotary_factor", "rotary_pct")
                     if values.get(name) is not None), "head_dim")
        share = Decimal(1) if said == "head_dim" else values.number(said, above=0)
        dims = int(head_dim * min(float(share), 2.0))  # beyond 1 it is an error anyway
    if dims < 2 or dims % 2 or dims > head_dim:
        raise ValueError(f"{said}: got {dims} of {head_dim} columns that rotate, wanted an even"
                         f" number from 2 to {head_dim}")
    return dims
