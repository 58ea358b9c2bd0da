"""The core contract against PyTorch: its own attention where it has the option, torch math where
it has not (softcap, windows, lengths, lse, weights).

Tolerances as in test_compat_pytorch.py, relative to the largest entry; for lse at least to 1, the
logarithm of a sum near 1 being small by cancellation.
"""

import math

import numpy as np
import pytest
import torch

import mha

TOLERANCE = {np.float32: 2e-6, np.float64: 1e-13}


def assert_close(ours, theirs, dtype, at_least=0.0):
    theirs = theirs.numpy()
    assert ours.shape == theirs.shape
    assert ours.dtype == dtype
    infinite = np.isinf(theirs)
    np.testing.assert_array_equal(np.isinf(ours), infinite)
    assert (ours[infinite] == theirs[infinite]).all()
    largest = abs(theirs[~infinite]).max(initial=at_least)
    np.testing.assert_allclose(ours[~infinite], theirs[~infinite], rtol=0,
                               atol=TOLERANCE[dtype] * largest)


def case(seed):
    """Arrays and options of one call, determined by the seed alone."""
    rng = np.random.default_rng(1000 + seed)
    dtype = (np.float32, np.float64)[seed % 2]
    dimensions = 2 + seed // 2 % 4
    query_len, key_len = (int(size) for size in rng.integers(1, 70, 2))
    if rng.random() < 0.3:
        key_len = query_len
    head_dim, value_head_dim = rng.integers(1, 33, 2)
    batch = tuple(rng.integers(1, 4, max(dimensions - 3, 1 if dimensions == 3 else 0)))
    kv_heads = (int(rng.integers(1, 4)),) if dimensions > 3 else ()
    heads = tuple(kv * int(rng.integers(1, 4)) for kv in kv_heads)
    query = rng.normal(size=(*batch, *heads, query_len, head_dim)).astype(dtype)
    key = rng.normal(size=(*batch, *kv_heads, key_len, head_dim)).astype(dtype)
    value = rng.normal(size=(*batch, *kv_heads, key_len, value_head_dim)).astype(dtype)
    options = {"empty_rows": ("zeros", "uniform")[seed % 3 == 0]}

    scores = (*batch, *heads, query_len, key_len)
    if rng.random() < 0.4:
        options["mask"] = rng.random(broadcastable(rng, scores)) < 0.8
    if rng.random() < 0.4:
        bias = rng.normal(size=broadcastable(rng, scores)).astype(dtype)
        options["bias"] = np.where(rng.random(bias.shape) < 0.1, -np.inf, bias).astype(dtype)
    if rng.random() < 0.4:
        per_query = (query_len,) if rng.random() < 0.5 else ()
        options["key_lengths"] = rng.integers(0, key_len + 1, (*batch, *per_query))
    if rng.random() < 0.5:
        options["causal"] = True
    if rng.random() < 0.3:
        options["window"] = [(3, 5), (None, 2), (4, None), (0, 0)][int(rng.integers(4))]
    if rng.random() < 0.7 or "key_lengths" in options:
        options["query_offset"] = [0, int(rng.integers(-9, 9)), rng.integers(-5, 9, batch)][
            int(rng.integers(3))]
    if rng.random() < 0.3:
        options["scale"] = float(rng.uniform(-0.5, 0.5))
    if rng.random() < 0.3:
        options["softcap"] = float(rng.uniform(0.5, 5))
    return query, key, value, options, dtype


def broadcastable(rng, shape):
    """Some axes set to 1, some leading ones left out."""
    shape = tuple(1 if rng.random() < 0.3 else size for size in shape)
    return shape[int(rng.integers(0, len(shape) - 1)):]


def torch_visible(shape, batch_axes, options):
    """Which query sees which key, in torch, from the contract's sentences."""
    query_len, key_len = shape[-2:]
    visible = torch.ones(shape, dtype=torch.bool)
    i, j = torch.arange(query_len)[:, None], torch.arange(key_len)

    def over_scores(per_batch, own_axes):
        tensor = torch.as_tensor(per_batch)
        batch, own = tensor.shape[:batch_axes], tensor.shape[batch_axes:]
        own = own + (1,) * (own_axes - len(own))
        return tensor.reshape(*batch, *[1] * (len(shape) - 2 - len(batch)), *own)

    if "mask" in options:
        visible &= torch.from_numpy(options["mask"])
    if "key_lengths" in options:
        visible &= j < over_scores(options["key_lengths"], 2)
    position = i + over_scores(options.get("query_offset", key_len - query_len), 2)
    if options.get("causal"):
        visible &= j <= position
    left, right = options.get("window", (None, None))
    if left is not None:
        visible &= position - left <= j
    if right is not None:
        visible &= j <= position + right
    return visible


def torch_scores(query, key, value, options):
    """(scores before bias, those the positions and mask show, a value head for each query head)."""
    batch_axes = max(query.ndim - 3, 1 if query.ndim == 3 else 0)
    if query.ndim > 3:
        group = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(group, dim=-3) for tensor in (key, value))
    scores = query @ key.mT * options.get("scale", 1 / math.sqrt(query.shape[-1]))
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    return scores, torch_visible(scores.shape, batch_axes, options), value


def torch_attention(query, key, value, options):
    """(output, weights, lse) with torch's matmul, softmax and logsumexp."""
    tensors = [torch.from_numpy(array) for array in (query, key, value)]
    scores, visible, value = torch_scores(*tensors, options)
    if "bias" in options:
        scores = scores + torch.from_numpy(options["bias"])
    visible = visible & (scores != -math.inf)
    scores = scores.masked_fill(~visible, -math.inf)
    empty = ~visible.any(-1, keepdim=True)
    rest = 1 / scores.shape[-1] if options["empty_rows"] == "uniform" else 0.0
    weights = scores.softmax(-1).masked_fill(empty, rest)
    return weights @ value, weights, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("seed", range(160))
def test_every_option_is_what_torch_computes(seed):
    query, key, value, options, dtype = case(seed)
    output, weights, lse = mha.scaled_dot_product_attention(
        query, key, value, **options, return_weights=True, return_lse=True)
    torch_output, torch_weights, torch_lse = torch_attention(query, key, value, options)
    assert_close(output, torch_output, dtype)
    assert_close(weights, torch_weights, dtype)
    assert_close(lse, torch_lse, dtype, at_least=1.0)
    alone = mha.scaled_dot_product_attention(query, key, value, **options)
    assert_close(alone, torch_output, dtype)


def test_cases_cover_every_option():
    """A generator that stopped making a kind of case would let every comparison pass."""
    given = [case(seed)[3] for seed in range(160)]
    for option in ("mask", "bias", "key_lengths", "causal", "window", "query_offset", "scale",
                   "softcap"):
        assert 30 < sum(option in options for options in given) < 140
    assert 30 < sum(options["empty_rows"] == "uniform" for options in given) < 140
    empty = [torch_attention(*case(seed)[:4])[2].isinf().any() for seed in range(160)]
    assert sum(empty) > 30


@pytest.mark.parametrize("seed", range(60))
def test_causal_from_the_upper_left_bias_and_masks_are_torchs_own_attention(seed):
    rng = np.random.default_rng(2000 + seed)
    dtype = (np.float32, np.float64)[seed % 2]
    batch, heads, query_len, key_len, head_dim = (int(n) for n in rng.integers(1, 40, 5) % (
        4, 5, 40, 40, 33) + 1)
    query = rng.normal(size=(batch, heads, query_len, head_dim)).astype(dtype)
    key, value = rng.normal(size=(2, batch, heads, key_len, head_dim)).astype(dtype)
    scores = (batch, heads, query_len, key_len)
    ours, theirs = [
        ({}, {}),
        ({"causal": True, "query_offset": 0}, {"is_causal": True}),
        (mask := {"mask": rng.random(scores) < 0.5}, {"attn_mask": mask["mask"]}),
        (bias := {"bias": rng.normal(size=scores).astype(dtype)}, {"attn_mask": bias["bias"]}),
        ({"window": (2, 1), "query_offset": 0},
         {"attn_mask": mha.masks.sliding_window(query_len, key_len, window=(2, 1),
                                                query_offset=0)})][seed % 5]
    theirs = {name: torch.from_numpy(option) if name == "attn_mask" else option
              for name, option in theirs.items()}
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(array) for array in (query, key, value)), **theirs)
    assert_close(mha.scaled_dot_product_attention(query, key, value, **ours), expected, dtype)


def torch_gradients(arrays, options, grad_output, dtype):
    tensors = [torch.from_numpy(array.astype(dtype)).requires_grad_() for array in arrays.values()]
    output = differentiable_attention(dict(zip(arrays, tensors, strict=True)), options)
    return torch.autograd.grad(output, tensors, torch.from_numpy(grad_output.astype(dtype)))


def sum_to(array, shape):
    """Over the axes that an array of this shape is broadcast along."""
    array = array.sum(axis=tuple(range(array.ndim - len(shape))))
    return array.sum(axis=tuple(axis for axis, size in enumerate(shape) if size == 1),
                     keepdims=True)


def size_of_sums(arrays, options, grad_output, shape):
    """The largest root of a sum of squares of what the gradient of the bias adds up: its roundings
    stay where the sums themselves cancel."""
    whole = {**arrays, "bias": np.broadcast_to(arrays["bias"], shape).copy()}
    terms = torch_gradients(whole, options, grad_output, np.float64)[-1].numpy()
    return np.sqrt(sum_to(terms**2, arrays["bias"].shape)).max(initial=0)


@pytest.mark.parametrize("seed", range(200))
def test_gradients_are_what_torchs_autograd_gives(seed):
    """In float64: PyTorch's own error, which depends on the machine, says nothing of ours."""
    query, key, value, options, dtype = case(seed)
    arrays = {"query": query, "key": key, "value": value}
    if "bias" in options:
        arrays["bias"] = options.pop("bias")
    output, pullback = mha.scaled_dot_product_attention_vjp(**arrays, **options)
    grad_output = np.random.default_rng(seed).normal(size=output.shape).astype(dtype)
    exact = torch_gradients(arrays, options, grad_output, np.float64)
    gradients = pullback(grad_output)
    for name, wanted in zip(arrays, exact, strict=True):
        ours, wanted = getattr(gradients, name), wanted.numpy()
        assert ours.dtype == dtype
        assert ours.shape == wanted.shape
        size = abs(wanted).max(initial=0.1)
        if name == "bias":
            scores = (*output.shape[:-1], key.shape[-2])
            size = max(size, size_of_sums(arrays, options, grad_output, scores))
        assert abs(ours - wanted).max(initial=0) <= TOLERANCE[dtype] * size, name


def rms(array):
    return np.sqrt(np.mean(np.square(array, dtype=np.float64)))


@pytest.fixture(scope="module")
def errors_of_gradients():
    """(logits shifted by 300 or not, case, gradient, ours or PyTorch's or NumPy's): root mean
    squares of the errors, relative to those of the gradients."""
    errors = [[], []]
    for seed in range(60):
        rng = np.random.default_rng(seed)
        batch, heads = (int(size) for size in rng.integers(1, 5, 2))
        length, head_dim = int(rng.choice([17, 64, 128, 300, 777])), int(rng.choice([8, 32, 64]))
        query, key, value, grad_output = rng.normal(
            size=(4, batch, heads, length, head_dim)).astype(np.float32)
        shifted, causal = seed % 3 == 0, bool(seed % 2)
        if shifted:
            query[..., 0], key[..., 0] = 300 * head_dim**0.5, 1
        arrays = query, key, value
        exact, torchs = (sdpa_gradients(arrays, causal, grad_output, dtype)
                         for dtype in (np.float64, np.float32))
        ours = mha.scaled_dot_product_attention_vjp(*arrays, causal=causal)[1](grad_output)
        plain = plain_gradients(*arrays, causal, grad_output)
        errors[shifted].append([[rms(got - wanted) / rms(wanted) for got in each] for *each, wanted
                                in zip(ours, torchs, plain, exact, strict=False)])
    return [np.array(each) for each in errors]


def test_errors_of_gradients_are_no_larger_than_those_of_torch_and_numpy(errors_of_gradients):
    """Over all cases, for each of the three gradients. The largest error of a single case, or of a
    single number, is luck that differs from machine to machine."""
    for errors in errors_of_gradients:
        ours, torchs, plain = np.moveaxis(np.sqrt(np.mean(errors**2, axis=0)), -1, 0)
        assert (ours <= torchs).all(), (ours, torchs)
        assert (ours <= 1.2 * plain).all(), (ours, plain)


def test_no_case_has_much_larger_errors_of_gradients(errors_of_gradients):
    for errors in errors_of_gradients:
        ours, torchs, plain = np.moveaxis(errors, -1, 0)
        assert (ours <= 1.5 * np.maximum(torchs, plain)).all()


def plain_gradients(query, key, value, causal, grad_output):
    """The textbook's formulas in plain NumPy, in the precision of the arrays."""
    scale = query.dtype.type(query.shape[-1]**-0.5)
    scores = query @ key.swapaxes(-1, -2) * scale
    if causal:
        scores[..., ~np.tri(*scores.shape[-2:], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    of_weights = grad_output @ value.swapaxes(-1, -2)
    delta = (of_weights * weights).sum(axis=-1, keepdims=True)
    of_scores = weights * (of_weights - delta) * scale
    return (of_scores @ key, of_scores.swapaxes(-1, -2) @ query,
            weights.swapaxes(-1, -2) @ grad_output)


def sdpa_gradients(arrays, causal, grad_output, dtype):
    tensors = [torch.from_numpy(array.astype(dtype)).requires_grad_() for array in arrays]
    output = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
    gradients = torch.autograd.grad(output, tensors, torch.from_numpy(grad_output.astype(dtype)))
    return [gradient.numpy() for gradient in gradients]


def differentiable_attention(tensors, options):
    """torch_attention's output for tensors that require gradients; -inf never meets a softmax."""
    scores, visible, value = torch_scores(
        *(tensors[name] for name in ("query", "key", "value")), options)
    if "bias" in tensors:
        bias = tensors["bias"].expand(scores.shape)
        visible = visible & (bias != -math.inf)
        scores = scores + bias.masked_fill(bias == -math.inf, 0)
    empty = ~visible.any(-1, keepdim=True)
    weights = scores.masked_fill(~visible & ~empty, -math.inf).softmax(-1)
    rest = 1 / scores.shape[-1] if options["empty_rows"] == "uniform" else 0.0
    return weights.masked_fill(empty, rest) @ value
