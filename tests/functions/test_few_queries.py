"""The kernel for few queries (csrc/core/attention/few_queries.c): decoding, grouped heads, long
keys."""

import numpy as np
import pytest
from agreement import assert_accurate, grouped_inputs
from option_cases import SCORES, by_head

import mha
from mha import reference

DTYPES = [np.float32, np.float64]
# (batch, heads, kv_heads, query_len, key_len, head_dim, value_head_dim)
SHAPES = [
    (1, 2, 2, 1, 32, 64, 64),
    (2, 3, 3, 1, 100, 7, 5),
    (2, 8, 2, 1, 700, 128, 128),
    (1, 4, 2, 3, 513, 40, 72),
    (2, 2, 1, 4, 64, 33, 1),
    (1, 20, 1, 1, 1100, 64, 48),
    (1, 34, 1, 8, 1030, 32, 17),
    (1, 2, 2, 1, 9000, 16, 16),
]


def options_of(shape, dtype):
    batch, heads, _, query_len, key_len, *_ = shape
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((heads, query_len, key_len)).astype(dtype)
    bias[..., ::3] = -np.inf
    return {
        "none": {},
        "causal": {"causal": True, "query_offset": key_len // 2},
        "window": {"window": (20, 10), "query_offset": key_len // 2},
        "mask": {"mask": rng.random((batch, heads, query_len, key_len)) < 0.5},
        "padding": {"mask": np.arange(key_len) < rng.integers(1, key_len, batch)[:, None, None,
                                                                                  None]},
        "strided mask": {"mask": (rng.random((key_len, query_len)) < 0.5).T},
        "bias": {"bias": bias},
        "bias of keys": {"bias": bias[:1, :1]},
        "lengths": {"key_lengths": rng.integers(0, key_len + 1, (batch, query_len)),
                    "query_offset": 0},
        **{str(options): options for options in SCORES},
        **{f"{options}, bias": options | {"bias": bias} for options in SCORES},
        **{f"{number}": options for number, options in enumerate(by_head(heads, dtype))},
        "by head": by_head(heads, dtype)[0] | by_head(heads, dtype)[1] | by_head(heads, dtype)[3]
        | {"causal": True, "query_offset": key_len // 2, "bias": bias},
        "dropout": {"dropout": 0.3, "rng": 5},
        "negative scale": {"scale": -0.2},
        "scale 0": {"scale": 0.0},
    }


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_reference(shape, dtype):
    for options in options_of(shape, dtype).values():
        for extras in ({}, {"return_weights": True, "return_lse": True}):
            assert_accurate(mha.scaled_dot_product_attention,
                            reference.scaled_dot_product_attention, grouped_inputs(shape, dtype),
                            {**options, **extras})


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
def test_median_error_is_no_larger_than_numpys(dtype):
    ratios = []
    for seed in range(30):
        for key_len in (200, 1500, 5000):
            (ours, numpys), = assert_accurate(
                mha.scaled_dot_product_attention, reference.scaled_dot_product_attention,
                grouped_inputs((1, 4, 4, 1, key_len, 64, 64), dtype, seed), {})
            ratios.append(ours / numpys)
    assert np.median(ratios) <= (2 if mha.instruction_set() == "baseline" else 1)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nothing_leaks_from_behind_a_mask(poison):
    query, key, value = grouped_inputs((1, 4, 2, 2, 300, 40, 21), np.float32)
    mask = np.random.default_rng(2).random(300) < 0.7
    clean = mha.scaled_dot_product_attention(query, key, value, mask=mask, return_lse=True)
    key[:, :, ~mask] = poison
    value[:, :, ~mask] = poison
    dirty = mha.scaled_dot_product_attention(query, key, value, mask=mask, return_lse=True)
    for one, other in zip(clean, dirty, strict=True):
        assert np.array_equal(one, other)
    value[:, :, np.flatnonzero(mask)[5]] = poison
    visible = mha.scaled_dot_product_attention(query, key, value, mask=mask)
    assert not np.isfinite(visible).any()


def test_empty_rows_are_zeros():
    query, key, value = grouped_inputs((2, 4, 2, 2, 600, 40, 40), np.float32)
    mask = np.ones((2, 1, 2, 600), bool)
    mask[1, :, 1] = False
    output, weights, lse = mha.scaled_dot_product_attention(
        query, key, value, mask=mask, return_weights=True, return_lse=True)
    assert not output[1, :, 1].any() and not weights[1, :, 1].any()
    assert (lse[1, :, 1] == -np.inf).all() and np.isfinite(lse[0]).all()
    none = mha.scaled_dot_product_attention(query, key, value, key_lengths=[600, 0],
                                            query_offset=0)
    assert none[0].any() and not none[1].any()


def test_strides_of_a_cache():
    """Keys and values as a view of a longer, interleaved buffer."""
    rng = np.random.default_rng(3)
    buffer = rng.standard_normal((2, 900, 2, 3, 48)).astype(np.float32)
    key, value = (buffer[:, 10:710, i].swapaxes(1, 2) for i in range(2))
    query = rng.standard_normal((2, 3, 1, 48)).astype(np.float32)
    got = mha.scaled_dot_product_attention(query, key, value)
    assert np.array_equal(got, mha.scaled_dot_product_attention(query, key.copy(), value.copy()))
    backwards = mha.scaled_dot_product_attention(query, key[:, :, ::-1], value[:, :, ::-1])
    np.testing.assert_allclose(backwards, got, atol=2e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("poison", [None, np.inf, np.nan])
def test_the_bits_of_blocks_at_any_width(dtype, poison):
    """Queries alone and among 24, which the kernel for blocks takes; rows close and apart."""
    rng = np.random.default_rng(4)
    for head_dim in (*range(1, 25), 31, 33, 36, 43, 65, 100, 128, 259):
        for key_len in (7, 12, 16, 21, 35, 65, 130):
            rows = rng.standard_normal((2, key_len, 2, head_dim + head_dim // 2 + 1)).astype(dtype)
            if poison is not None:
                rows[0, key_len // 2, 0, -1] = rows[1, 0, 1, 0] = poison
            key, value = np.split(rows.swapaxes(1, 2), [head_dim], axis=-1)
            query = rng.standard_normal((2, 2, 24, head_dim)).astype(dtype)
            blocks = mha.scaled_dot_product_attention(query, key, value)
            for query_len in (1, 2, 4, 8):
                for keys in ((key, value), (key.copy(), value.copy())):
                    few = mha.scaled_dot_product_attention(query[:, :, :query_len], *keys)
                    np.testing.assert_array_equal(few, blocks[:, :, :query_len])


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("poison", [None, np.inf, np.nan])
def test_the_bits_of_blocks_by_chains(head_dim, poison):
    """Vectors of chains hold several keys each; the last one has keys of the one before."""
    rng = np.random.default_rng(6)
    for key_len in (*range(2, 20), 33, 50, 131):
        rows = rng.standard_normal((2, key_len, 2, 2 * head_dim + 8)).astype(np.float32)
        if poison is not None:
            rows[0, key_len - 1, 0, -9] = rows[1, 0, 1, 0] = poison
        key, value, _ = np.split(rows.swapaxes(1, 2), [head_dim, 2 * head_dim], axis=-1)
        query = rng.standard_normal((2, 2, 24, head_dim)).astype(np.float32)
        blocks = mha.scaled_dot_product_attention(query, key, value)
        for query_len in (1, 2, 3, 4):
            for keys in ((key, value), (key.copy(), value.copy())):
                few = mha.scaled_dot_product_attention(query[:, :, :query_len], *keys)
                np.testing.assert_array_equal(few, blocks[:, :, :query_len])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("key_len", [511, 512, 1200])
def test_the_bits_of_blocks_of_narrow_heads(dtype, key_len):
    """Four blocks of keys are summed together, but for those that a mask hides."""
    rng = np.random.default_rng(5)
    mask = np.ones(key_len, bool)
    mask[384:512] = False
    for head_dim in (1, 2, 3, 5, 8, 15, 16, 17):
        query, key, value = (rng.standard_normal((2, 2, length, columns)).astype(dtype)
                             for length, columns in ((24, 1 + head_dim // 2),
                                                     (key_len, 1 + head_dim // 2),
                                                     (key_len, head_dim)))
        value[0, 0, 390:400], value[1, 1, key_len // 3] = np.nan, np.inf
        for options in ({}, {"mask": mask}):
            with np.errstate(invalid="ignore"):
                blocks = mha.scaled_dot_product_attention(query, key, value, **options)
                for query_len in (1, 2, 3, 4, 7):
                    few = mha.scaled_dot_product_attention(query[:, :, :query_len], key, value,
                                                           **options)
                    np.testing.assert_array_equal(few, blocks[:, :, :query_len])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [None, np.inf, np.nan])
def test_heads_that_share_wide_values_have_the_bits_of_each_alone(dtype, poison):
    """As in latent attention: the values may be a part of the keys, and some columns fill no tile;
    some rows of queries, too."""
    rng = np.random.default_rng(6)
    for heads, key_len, head_dim, value_head_dim in ((16, 300, 576, 512), (19, 129, 264, 264),
                                                     (35, 65, 300, 283), (16, 513, 32, 256),
                                                     (17, 64, 330, 304), (16, 1, 260, 257)):
        query = rng.standard_normal((1, heads, 1, head_dim)).astype(dtype)
        key = rng.standard_normal((1, 1, key_len, max(head_dim, value_head_dim))).astype(dtype)
        mask = rng.random((heads, 1, key_len)) < 0.9
        mask[:, :, 0] = True
        if poison is not None:
            key[..., key_len // 2, 5] = poison
            mask[::2, :, key_len // 2] = False
        key, value = key[..., :head_dim], key[..., :value_head_dim]
        for options in ({}, {"mask": mask}):
            with np.errstate(invalid="ignore"):
                together = mha.scaled_dot_product_attention(query, key, value, **options)
                for head in range(heads):
                    one = {name: part[head:head + 1] for name, part in options.items()}
                    alone = mha.scaled_dot_product_attention(query[:, head:head + 1], key, value,
                                                             **one)
                    assert np.array_equal(together[:, head], alone[:, 0], equal_nan=True)


@pytest.mark.parametrize(("head_dim", "stride"),
                         [(64, 1024), (128, 192), (128, 1024), (256, 300), (512, 1024)])
@pytest.mark.parametrize("poison", [None, np.inf, np.nan])
def test_keys_that_lie_apart_have_the_bits_of_those_that_do_not(head_dim, stride, poison):
    """With AVX-512 all chains of some keys are in the lanes, whatever the number of keys."""
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((130, stride)).astype(np.float32)
    if poison is not None:
        rows[13, head_dim - 1] = poison
    query = rng.standard_normal((24, head_dim)).astype(np.float32)
    for key_len in (*range(1, 36), 63, 64, 65, 100, 127, 128, 129, 130):
        key, value = rows[:key_len, :head_dim], np.abs(rows[:key_len, 7:60])
        for query_len in (1, 2, 3, 4):
            apart = mha.scaled_dot_product_attention(query[:query_len], key, value)
            close = mha.scaled_dot_product_attention(query[:query_len], key.copy(), value)
            np.testing.assert_array_equal(apart, close)
            blocks = mha.scaled_dot_product_attention(query, key, value)
            np.testing.assert_array_equal(apart, blocks[:query_len])


GRADIENT_OPTIONS = {
    "none": {},
    "huge": {},
    "padding": {"key_lengths": np.array([300, 50])},
    "mask": {"mask": np.random.default_rng(6).random(400) < 0.7},
    "causal": {"causal": True, "query_offset": 30},
    "causal, mask": {"mask": np.random.default_rng(8).random(400) < 0.6, "causal": True,
                     "query_offset": 20},
    "window": {"window": (60, 20), "query_offset": 150},
    "causal, softcap": {"causal": True, "query_offset": 30, "softcap": 1.5},
    "window, dropout": {"window": (60, 20), "query_offset": 50, "dropout": 0.2, "rng": 3},
    "sinks": {"sinks": np.array([0.3, -1.0])},
    "mask, softcap": {"mask": np.random.default_rng(8).random(400) < 0.6, "softcap": 2.0},
    "bias": {"bias": np.random.default_rng(10).standard_normal((2, 24, 400))},
    "bias by keys, dropout": {"bias": np.random.default_rng(11).standard_normal((400, 24)).T,
                              "dropout": 0.4, "rng": 3},
    "bias that hides, softcap": {
        "bias": np.where(np.random.default_rng(12).random((24, 400)) < 0.6, 0.5, -np.inf),
        "softcap": 3.0},
    "bias of keys": {"bias": np.random.default_rng(13).standard_normal((2, 1, 400))},
    "bias of queries": {"bias": np.random.default_rng(14).standard_normal((24, 1))},
    "alibi": {"alibi": np.array([0.3, 0.01]), "query_offset": 100},
    "relative_bias": {"relative_bias": np.random.default_rng(15).standard_normal((2, 33)),
                      "query_offset": 100, "causal": True},
    "uniform": {"key_lengths": np.array([0, 50]), "empty_rows": "uniform", "dropout": 0.3,
                "rng": 3},
}
# One number a head.
OF_HEADS = ("sinks", "alibi", "relative_bias")


def part_of_options(options, key_len, query_len, dtype):
    """The first queries' part, in the type of a bias."""
    numbers = np.float32 if dtype == np.float16 else dtype
    part = dict(options)
    for name in ("bias", *OF_HEADS):
        if name in part:
            part[name] = part[name].astype(numbers, order="K")
    if "bias" in part:
        part["bias"] = part["bias"][..., :query_len, :key_len]
    if "mask" in part:
        part["mask"] = part["mask"][:key_len]
    if "key_lengths" in part:
        part["key_lengths"] = np.minimum(part["key_lengths"], key_len)
    return part


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("options", GRADIENT_OPTIONS)
def test_gradients_have_the_bits_of_blocks(options, dtype):
    """Queries alone and among 24, of which the others add zeros to the gradients of the keys; rows
    close and apart. What a mask hides is not finite."""
    rng = np.random.default_rng(5)
    shapes = [(16, 16, 40), (17, 30, 65), (64, 64, 130), (33, 20, 7), (100, 16, 64), (128, 40, 33),
              (8, 64, 200), (1, 1, 300), (2, 1, 70), (3, 2, 140), (1, 5, 3), (300, 259, 1),
              (64, 130, 2)]
    for head_dim, value_head_dim, key_len in shapes:
        chosen = part_of_options(GRADIENT_OPTIONS[options], key_len, 24, dtype)
        rows = rng.standard_normal((2, key_len, 2, head_dim + value_head_dim + 1)).astype(dtype)
        if "mask" in chosen:
            rows[:, ~chosen["mask"]] = np.nan
            rows[:, ~chosen["mask"], :, ::2] = np.inf
        key, value, _ = np.split(rows.swapaxes(1, 2), [head_dim, head_dim + value_head_dim], -1)
        query = rng.standard_normal((2, 2, 24, head_dim)).astype(dtype)
        if options == "huge":
            value = value * dtype(np.finfo(dtype).max / 40)
        for query_len in (1, 2, 3, 4, 8):
            grad_output = rng.standard_normal((2, 2, 24, value_head_dim)).astype(dtype)
            grad_lse = rng.standard_normal((2, 2, 24)).astype(dtype)
            grad_output[:, :, query_len:] = grad_lse[:, :, query_len:] = 0
            _, back = mha.scaled_dot_product_attention_vjp(query, key, value, **chosen)
            blocks = back(grad_output, grad_lse)
            few = query[:, :, :query_len]
            of_few = part_of_options(chosen, key_len, query_len, dtype)
            for keys in ((key, value), (key.copy(), value.copy())):
                _, back = mha.scaled_dot_product_attention_vjp(few, *keys, **of_few)
                gradients = back(grad_output[:, :, :query_len], grad_lse[:, :, :query_len])
                np.testing.assert_array_equal(gradients.query, blocks.query[:, :, :query_len])
                np.testing.assert_array_equal(gradients.key, blocks.key)
                np.testing.assert_array_equal(gradients.value, blocks.value)
                for name in OF_HEADS:
                    np.testing.assert_array_equal(getattr(gradients, name), getattr(blocks, name))
                if "bias" in chosen:
                    of_bias = blocks.bias
                    if of_bias.shape[-2] > 1:
                        of_bias = of_bias[..., :query_len, :]
                    np.testing.assert_array_equal(gradients.bias, of_bias)
                assert np.isfinite(gradients.query).all() or options == "huge"


@pytest.mark.parametrize("heads_lie", ["side by side", "one behind the other"])
@pytest.mark.parametrize(("key_len", "head_dim"), [(30, 1), (200, 5), (700, 64)])
@pytest.mark.parametrize("query_len", [0, 1, 3, 5, 50])
def test_gradients_of_keys_are_those_of_each_head_alone(query_len, key_len, head_dim, heads_lie):
    """21 key heads, which no number of threads divides, each of one or two heads. Those of 64
    columns are more than 6 MB."""
    rng = np.random.default_rng(4)
    batch, heads = 3, 7
    key, value = rng.standard_normal((2, batch, heads, key_len, head_dim)).astype(np.float32)
    if heads_lie == "side by side":
        key, value = (np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)
                      for array in (key, value))
    for group in (1, 2):
        query, grad_output = rng.standard_normal(
            (2, batch, heads * group, query_len, head_dim)).astype(np.float32)
        for window in (None, (3, 0)):
            wanted = np.zeros((2, *key.shape), np.float32)
            for item, head in np.ndindex(batch, heads):
                of_head = np.s_[item:item + 1, head * group:(head + 1) * group]
                alone = np.s_[item:item + 1, head:head + 1]
                _, back = mha.scaled_dot_product_attention_vjp(
                    query[of_head], key[alone].copy(), value[alone].copy(), window=window)
                _, wanted[0][alone], wanted[1][alone], *_ = back(grad_output[of_head])
            for threads in (1, 2, 4):
                with mha.threads(threads):
                    _, back = mha.scaled_dot_product_attention_vjp(query, key, value,
                                                                   window=window)
                    gradients = back(grad_output)
                np.testing.assert_array_equal(gradients.key, wanted[0])
                np.testing.assert_array_equal(gradients.value, wanted[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["query", "grad_output"])
def test_rows_that_are_not_finite_leave_the_keys_that_they_do_not_see(where, number, dtype):
    rng = np.random.default_rng(9)
    for query_len in (1, 2, 4):
        query, key, value, grad_output = rng.standard_normal((4, 2, 24, 20)).astype(dtype)
        {"query": query, "grad_output": grad_output}[where][:, 0, 3] = number
        grad_output[:, query_len:] = 0
        mask = np.ones((24, 24), bool)
        mask[0, ::2] = mask[1, 5] = False
        with np.errstate(invalid="ignore"):
            _, back = mha.scaled_dot_product_attention_vjp(query, key, value, mask=mask)
            blocks = back(grad_output)
            _, back = mha.scaled_dot_product_attention_vjp(query[:, :query_len], key, value,
                                                           mask=mask[:query_len])
            gradients = back(grad_output[:, :query_len])
        np.testing.assert_array_equal(gradients.query, blocks.query[:, :query_len])
        np.testing.assert_array_equal(gradients.key, blocks.key)
        np.testing.assert_array_equal(gradients.value, blocks.value)
        assert np.isfinite(gradients.key[:, ::2]).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("heads_lie", ["side by side", "one behind the other"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("options", [{}, {"window": (3, 0), "query_offset": 20},
                                     {"window": (3, None), "query_offset": 2**60}])
def test_what_comes_next_from_memory_has_the_bits_of_smaller_calls(options, dtype, heads_lie,
                                                                   threads):
    """More than 16 MB of keys and values: those of the next task are prefetched."""
    batch, heads, key_len, head_dim = (400, 8, 40, 64) if dtype == np.float32 else (800, 8, 40, 64)
    rng = np.random.default_rng(1)
    shape = (batch, heads, key_len, head_dim)
    if heads_lie == "side by side":
        shape = (batch, key_len, heads, head_dim)
    key, value = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    if heads_lie == "side by side":
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    query = rng.standard_normal((batch, heads, 1, head_dim), np.float32).astype(dtype)
    with mha.threads(threads):
        output = mha.scaled_dot_product_attention(query, key, value, **options)
        for first in range(0, batch, 100):
            part = slice(first, first + 100)
            np.testing.assert_array_equal(output[part], mha.scaled_dot_product_attention(
                query[part], key[part], value[part], **options))
