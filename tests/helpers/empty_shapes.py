"""Calls over shapes some axes of which are 0, with every option: for test_empty_shapes.py, which
compares them with the reference, and for memory/empty_between_pages.py.

A call is the name of a function of mha, which mha.reference has too, its arguments and options."""

import itertools

import numpy as np
from option_cases import fit_together, option_cases

import mha

RNG = np.random.default_rng(0)
LEARNED = ("bias", "alibi", "relative_bias", "sinks", "b_q", "b_k", "b_v", "b_o", "W_g", "b_g",
           "head_gate", "q_norm", "k_norm")
# Of one axis: whole blocks of keys and more, few queries of many keys, and ones.
KEYS = 130


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def with_empty_axes(*sizes):
    """Each set of axes 0, but for the set without any, the others as long as the sizes say."""
    for chosen in itertools.product((True, False), repeat=len(sizes)):
        if not all(chosen):
            yield tuple(size if is_there else 0
                        for size, is_there in zip(sizes, chosen, strict=True))


def layouts(array):
    """The same numbers in C order, in Fortran's, with the last axes swapped, repeated."""
    swapped = np.ascontiguousarray(np.swapaxes(array, -1, -2))
    return [array, np.asfortranarray(array), np.swapaxes(swapped, -1, -2),
            np.broadcast_to(numbers(*[1] * array.ndim), array.shape)]


def parts_of(scores):
    """The shapes that broadcast to the scores: each axis as long as theirs, or 1, or left out."""
    for axes in (2, len(scores)):
        yield from {tuple(1 if one else size for one, size in zip(ones, scores[-axes:],
                                                                  strict=True))
                    for ones in itertools.product((True, False), repeat=axes)}


def options_of(batch, heads, query_len, key_len):
    """Every option once or more, and some that meet."""
    cases = option_cases(RNG, (batch,), heads, query_len, key_len)
    yield {}
    for name, values in cases.items():
        for value in values:
            others = {"rng": 3} if name == "dropout" else {}
            yield {name: as_float32(value), **others}
    together = {name: as_float32(values[0]) for name, values in cases.items()
                if name not in ("empty_rows", "dropout")} | {"query_offset": 1}
    yield together
    yield {name: value for name, value in together.items()
           if fit_together([name, "empty_rows"])} | {"empty_rows": "uniform"}


def as_float32(value):
    is_float = isinstance(value, np.ndarray) and value.dtype == np.float64
    return value.astype(np.float32) if is_float else value


def calls_of_attention():
    for sizes in ((2, 2, 2, 3, KEYS, 4, 5), (1, 1, 1, 1, 1, 1, 1), (2, 1, 2, 1, KEYS, 33, 1)):
        group = sizes[2]
        for batch, kv_heads, query_len, key_len, head_dim, value_head_dim in with_empty_axes(
                *sizes[:2], *sizes[3:]):
            heads = group * kv_heads
            arrays = [numbers(batch, heads, query_len, head_dim),
                      numbers(batch, kv_heads, key_len, head_dim),
                      numbers(batch, kv_heads, key_len, value_head_dim)]
            for options in options_of(batch, heads, query_len, key_len):
                yield "scaled_dot_product_attention", arrays, options


def calls_with_shared_biases():
    """What broadcasts to the scores, in every layout: gradients of shared numbers are sums."""
    for sizes in ((2, 2, 3, 5), (1, 1, 3, 5)):
        for batch, heads, query_len, key_len in with_empty_axes(*sizes):
            arrays = [numbers(batch, heads, length, 4) for length in (query_len, key_len, key_len)]
            for shape in parts_of((batch, heads, query_len, key_len)):
                for bias in layouts(numbers(*shape)):
                    yield "scaled_dot_product_attention", arrays, {"bias": bias}
                yield "scaled_dot_product_attention", arrays, {"mask": np.zeros(shape, bool)}


def calls_of_halves():
    """The gradients of halves are sums of float32, rounded into arrays of their own."""
    for batch, heads, query_len, key_len, head_dim in with_empty_axes(1, 1, 3, 5, 4):
        arrays = [numbers(batch, heads, length, head_dim).astype(np.float16)
                  for length in (query_len, key_len, key_len)]
        of_heads = {"alibi": numbers(heads), "sinks": numbers(heads)}
        for options in ({}, of_heads, {"bias": numbers(query_len, key_len)},
                        {"bias": numbers(query_len, 1)}, {"relative_bias": numbers(heads, 3)}):
            yield "scaled_dot_product_attention", arrays, {
                name: value.astype(np.float16) for name, value in options.items()}


def calls_of_ragged_batches():
    for sizes in ((2, 2, 3, KEYS, 4, 5), (1, 1, 1, 1, 1, 1)):
        group = sizes[1]
        for kv_heads, query_len, key_len, head_dim, value_head_dim in with_empty_axes(
                sizes[0], *sizes[2:]):
            heads = group * kv_heads
            arrays = [numbers(query_len, heads, head_dim), numbers(key_len, kv_heads, head_dim),
                      numbers(key_len, kv_heads, value_head_dim)]
            starts = [np.array([0, 0, query_len, query_len]), np.array([0, 0, key_len, key_len])]
            of_heads = {"alibi": numbers(heads), "relative_bias": numbers(heads, 7),
                        "sinks": numbers(heads)}
            for options in ({}, {"causal": True}, of_heads, {"relative_bias": numbers(1, 1)},
                            {"window": (1, 0), "query_offset": np.array([1, 0, -1])},
                            {"dropout": 0.5, "rng": 3}):
                yield "scaled_dot_product_attention_varlen", [*arrays, *starts], options


def calls_of_additive_attention():
    for batch, heads, query_len, key_len, query_dim, hidden, value_dim in with_empty_axes(
            2, 2, 3, 9, 4, 5, 3):
        arrays = [numbers(batch, heads, query_len, query_dim), numbers(batch, heads, key_len, 4),
                  numbers(batch, heads, key_len, value_dim), numbers(query_dim, hidden),
                  numbers(4, hidden), numbers(hidden)]
        for options in ({}, {"mask": np.zeros((query_len, key_len), bool)}, {"causal": True},
                        {"key_lengths": np.zeros(batch, int), "empty_rows": "uniform"},
                        {"dropout": 0.5, "rng": 3}):
            yield "additive_attention", arrays, options


def calls_of_the_figure():
    heads = 2
    for sizes in ((2, 3, KEYS, 6, 4, 5, 7), (1, 1, 1, 1, 2, 1, 1)):
        for batch, query_len, key_len, width, head_dim, value_head_dim, output_dim in (
                with_empty_axes(*sizes)):
            arrays = [numbers(batch, query_len, width), numbers(batch, key_len, width),
                      numbers(batch, key_len, 3), numbers(width, heads * head_dim),
                      numbers(width, heads * head_dim), numbers(3, heads * value_head_dim),
                      numbers(heads * value_head_dim, output_dim)]
            biases = {"b_q": numbers(heads * head_dim), "b_k": numbers(heads * head_dim),
                      "b_v": numbers(heads * value_head_dim), "b_o": numbers(output_dim)}
            prepared = {"q_norm": numbers(head_dim), "k_norm": numbers(heads * head_dim)}
            if head_dim:
                prepared |= {"rotary": mha.Rotary(2), "positions": np.arange(query_len)}
            of_heads = {"alibi": numbers(heads), "relative_bias": numbers(heads, 3),
                        "sinks": numbers(heads), "head_gate": numbers(heads)}
            gates = [{"W_g": numbers(width, columns), "b_g": numbers(columns)}
                     for columns in (heads, heads * value_head_dim)]
            for options in ({}, biases, prepared, of_heads, *gates,
                            {"bias": numbers(query_len, key_len)},
                            {"bias": numbers(batch, 1, 1, key_len), "causal": True}):
                yield "multi_head_attention", arrays, {"num_heads": heads, **options}


def calls_of_steps():
    for rows, width, out in with_empty_axes(3, 4, 5):
        for bias in (None, numbers(out)):
            yield "linear", [numbers(2, rows, width), numbers(width, out), bias], {}
    for batch, heads, rows, columns in with_empty_axes(2, 3, 4, 6):
        array = numbers(batch, heads, rows, columns)
        yield "merge_heads", [array], {}
        yield "merge_attention", [[array, array], [array[..., 0]] * 2 if columns else
                                  [numbers(batch, heads, rows)] * 2], {}
        if heads:
            yield "split_heads", [numbers(batch, rows, heads * columns), heads], {}


CALLS = {"attention": calls_of_attention, "biases": calls_with_shared_biases,
         "halves": calls_of_halves, "ragged": calls_of_ragged_batches,
         "additive": calls_of_additive_attention, "figure": calls_of_the_figure,
         "steps": calls_of_steps}


def learned_of(options):
    return [name for name in LEARNED if options.get(name) is not None]


def has_gradients(name):
    return hasattr(mha, f"{name}_vjp")


def results_of(module, name, arguments, options):
    """Output, weights and log-sum-exp, as far as the function has them."""
    asked = {"scaled_dot_product_attention": ("weights", "lse"),
             "multi_head_attention": ("weights", "lse"), "additive_attention": ("weights",),
             "scaled_dot_product_attention_varlen": ("lse",)}.get(name, ())
    results = getattr(module, name)(*arguments, **options,
                                    **{f"return_{result}": True for result in asked})
    return results if isinstance(results, tuple) else (results,)


def gradients_of(module, name, arguments, options):
    """By name, of what there is a gradient of: for grad_output and grad_lse of ones."""
    output, pullback = getattr(module, f"{name}_vjp")(*arguments, **options)
    gradients = pullback(np.ones(output.shape, output.dtype))
    found = gradients if isinstance(gradients, dict) else gradients._asdict()
    return {name: gradient for name, gradient in found.items() if gradient is not None}
