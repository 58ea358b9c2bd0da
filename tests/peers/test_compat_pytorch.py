"""mha.compat.pytorch against PyTorch itself, over random configurations.

Tolerances are relative to the largest entry. Two correct programs that sum in different orders
differ by some roundings of it (1.2e-7 in float32, 2.2e-16 in float64), amplified by the size of
the scores, which softmax exponentiates. Over 3,000 of the cases below, other seeds included, the
largest difference was 1.1e-6 in float32 and 1.6e-15 in float64.
"""

import numpy as np
import pytest
import torch

from mha.compat import pytorch as compat

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")

TOLERANCE = {np.float32: 2e-6, np.float64: 1e-13}
DTYPES = (np.float32, np.float64)
MASKS = (None, "bool", "float", "causal", "empty")


def assert_same(ours, theirs, dtype):
    """Same shape and type, NaN in the same places, and the numbers within the tolerance."""
    theirs = theirs.numpy()
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype == dtype
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    largest = np.nanmax(np.abs(theirs), initial=0)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE[dtype] * max(largest, 1e-30))


def tensors(*arrays):
    return [None if array is None else torch.from_numpy(array) for array in arrays]


def random_mask(rng, kind, shape, dtype, true_blocks):
    """A bool or additive mask; "empty" blocks the whole first query and a random third besides."""
    if kind is None:
        return None
    if kind == "causal":
        blocked = np.broadcast_to(np.triu(np.ones(shape[-2:], bool), 1), shape).copy()
    else:
        blocked = rng.random(shape) < 0.35
        blocked[..., :1] = False  # every query sees the first key
    if kind == "empty":
        blocked[..., 0, :] = True
    if kind == "float" or (kind == "empty" and rng.random() < 0.5):
        return np.where(blocked, -np.inf, rng.normal(size=shape)).astype(dtype)
    return blocked if true_blocks else ~blocked


# scaled_dot_product_attention: 2-D to 5-D, broadcast leading axes, grouped heads, every mask


def functional_case(seed):
    """Arrays and options, determined by the seed alone."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % 2]
    dimensions = 2 + seed // 2 % 4
    kind = MASKS[seed % 5]
    query_len, key_len = rng.integers(1, 40, 2)
    head_dim, value_head_dim = rng.integers(1, 33, 2)
    leading = tuple(rng.integers(1, 5, dimensions - 2))
    options = {"scale": rng.choice([None, 0.3, -0.4]), "is_causal": False, "enable_gqa": False}
    key_leading = value_leading = leading
    if dimensions > 2 and seed % 3 == 0:  # grouped heads, key and value not always alike
        heads = leading[-1]
        leading = (*leading[:-1], heads * int(rng.integers(1, 4)))
        value_leading = (*leading[:-1], 1 if rng.random() < 0.3 else heads)
        options["enable_gqa"] = True
    elif dimensions > 2 and seed % 3 == 1:  # leading axes of size 1, or absent
        key_leading = tuple(1 if rng.random() < 0.4 else size for size in leading)
        value_leading = leading[int(rng.integers(0, len(leading) + 1)):]
    query = rng.normal(size=(*leading, query_len, head_dim)).astype(dtype)
    key = rng.normal(size=(*key_leading, key_len, head_dim)).astype(dtype)
    value = rng.normal(size=(*value_leading, key_len, value_head_dim)).astype(dtype)
    mask_leading = leading[int(rng.integers(0, len(leading) + 1)):]
    mask = random_mask(rng, kind, (*mask_leading, query_len, key_len), dtype, true_blocks=False)
    if kind == "causal":
        mask, options["is_causal"] = None, True
    return query, key, value, mask, options, dtype


@pytest.mark.parametrize("seed", range(180))
def test_scaled_dot_product_attention_is_torch(seed):
    query, key, value, mask, options, dtype = functional_case(seed)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *tensors(query, key, value, mask), **options)
    assert_same(compat.scaled_dot_product_attention(query, key, value, mask, **options), theirs,
                dtype)


@pytest.mark.parametrize("shape", [(1, 7), (6, 1), (1, 1), (4, 1, 1), (3, 1, 6, 7), (3, 4, 1, 7)])
def test_masks_broadcast_as_in_torch(shape):
    rng = np.random.default_rng(5)
    query, key, value = (rng.normal(size=(3, 4, length, 8)) for length in (6, 7, 7))
    mask = rng.random(shape) < 0.7
    theirs = torch.nn.functional.scaled_dot_product_attention(*tensors(query, key, value, mask))
    assert_same(compat.scaled_dot_product_attention(query, key, value, mask), theirs, np.float64)


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)])
def test_zero_lengths_as_in_torch(lengths):
    query_len, key_len = lengths
    arrays = np.ones((2, 2, query_len, 4)), *[np.ones((2, 2, key_len, 4))] * 2
    theirs = torch.nn.functional.scaled_dot_product_attention(*tensors(*arrays))
    assert_same(compat.scaled_dot_product_attention(*arrays), theirs, np.float64)


# MultiheadAttention: constructor, layouts, masks, both ways with and without weights


def layer_case(seed):
    """A torch layer, its NumPy twin, and the inputs and options of one call."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % 2]
    heads = int(rng.integers(1, 5))
    width = heads * int(rng.integers(1, 17))
    separate = seed % 4 == 1
    constructor = {
        "bias": bool(rng.random() < 0.7), "batch_first": bool(rng.random() < 0.6),
        "add_bias_kv": bool(rng.random() < 0.3), "add_zero_attn": bool(rng.random() < 0.3),
        "kdim": int(rng.integers(1, 30)) if separate else None,
        "vdim": int(rng.integers(1, 30)) if separate else None}
    torch.manual_seed(seed)
    theirs = torch.nn.MultiheadAttention(
        width, heads, dtype=torch.float32 if dtype is np.float32 else torch.float64, **constructor)
    with torch.no_grad():  # biases start at zero, where an error would not show
        for parameter in theirs.parameters():
            if parameter.ndim != 2:
                parameter.normal_()
    ours = compat.MultiheadAttention(width, heads, dtype=dtype, **constructor)
    assert ours.load_state_dict(theirs.state_dict()) == ([], [])

    batch, query_len, key_len = (int(size) for size in rng.integers(1, 20, 3))
    batched = seed % 5 != 2
    self_attention = not separate and seed % 3 == 0
    if self_attention:
        key_len = query_len

    def sequences(length, size):
        leading = (batch, length) if constructor["batch_first"] else (length, batch)
        return rng.normal(size=(*(leading if batched else (length,)), size)).astype(dtype)

    query = sequences(query_len, width)
    if self_attention:
        inputs = (query, query, query)
    else:
        inputs = (query, sequences(key_len, ours.kdim), sequences(key_len, ours.vdim))

    per_head = (batch if batched else 1) * heads
    shape = (query_len, key_len) if rng.random() < 0.5 else (per_head, query_len, key_len)
    kind = MASKS[int(rng.integers(len(MASKS)))]
    padding = None
    if rng.random() < 0.4:
        padding_kind = ("bool", "float")[int(rng.random() < 0.5)]
        padding_shape = (batch, key_len) if batched else (key_len,)
        padding = random_mask(rng, padding_kind, padding_shape, dtype, true_blocks=True)
    options = {"attn_mask": random_mask(rng, kind, shape, dtype, true_blocks=True),
               "key_padding_mask": padding,
               "need_weights": bool(rng.random() < 0.6),
               "average_attn_weights": bool(rng.random() < 0.5),
               "is_causal": kind == "causal" and bool(rng.random() < 0.7)}
    if batched and padding is not None and kind == "empty":
        padding[0] = True if padding.dtype == bool else -np.inf  # a sequence of padding alone
    return theirs, ours, inputs, options, dtype


def call_torch(layer, inputs, options):
    query, key, value = inputs
    given = torch.from_numpy(query)  # one tensor thrice keeps PyTorch's fast path within reach
    if query is key is value:
        arguments = (given, given, given)
    else:
        arguments = (given, *tensors(key, value))
    masks = dict(zip(("attn_mask", "key_padding_mask"),
                     tensors(options["attn_mask"], options["key_padding_mask"])))
    with torch.no_grad():
        return layer(*arguments, **{**options, **masks})


def test_cases_cover_every_feature():
    """A generator that stopped making a kind of case would let every comparison pass."""
    functional = [functional_case(seed) for seed in range(180)]
    grouped = [case for case in functional if case[4]["enable_gqa"]]
    assert len(grouped) > 30
    assert {query.ndim for query, *_ in functional} == {2, 3, 4, 5}
    assert {query.ndim for query, *_ in grouped} == {3, 4, 5}
    assert sum(query.shape[:-2] != key.shape[:-2] for query, key, *_ in functional) > 40
    assert {None if mask is None else mask.dtype.kind for *_, mask, _, _ in functional} == {
        None, "b", "f"}
    calls = [layer_case(seed) for seed in range(150)]
    for feature in ("bias_k", "q_proj_weight", "in_proj_bias"):
        assert 10 < sum(getattr(ours, feature) is not None for _, ours, *_ in calls) < 140
    assert sum(ours.add_zero_attn for _, ours, *_ in calls) > 20
    assert sum(inputs[0].ndim == 2 for _, _, inputs, *_ in calls) > 20
    assert sum(inputs[0] is inputs[2] for _, _, inputs, *_ in calls) > 20
    for option in ("attn_mask", "key_padding_mask"):
        given = [options[option] for *_, options, _ in calls if options[option] is not None]
        assert min(sum(mask.dtype.kind == kind for mask in given) for kind in "bf") > 15
    hinted = [options["need_weights"] for *_, options, _ in calls if options["is_causal"]]
    assert min(hinted.count(True), hinted.count(False)) > 3
    empty = [np.isnan(call_torch(theirs, inputs, options)[0].numpy()).any()
             for theirs, _, inputs, options, _ in calls]
    assert sum(empty) > 10


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("seed", range(150))
def test_layer_is_torch(seed, training):
    theirs, ours, inputs, options, dtype = layer_case(seed)
    output, weights = ours.train(training)(*inputs, **options)
    torch_output, torch_weights = call_torch(theirs.train(training), inputs, options)
    assert_same(output, torch_output, dtype)
    assert (weights is None) == (torch_weights is None)
    if weights is not None:
        assert_same(weights, torch_weights, dtype)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", ["attn_mask", "attn_mask per head", "key_padding_mask", "float"])
@pytest.mark.parametrize(("num_heads", "bias", "batch_first", "same"), [
    (2, True, True, True), (1, True, True, True), (2, False, True, True), (2, True, False, True),
    (2, True, True, False)])
def test_empty_rows_are_nan_exactly_where_torch_has_them(mask, training, need_weights, num_heads,
                                                         bias, batch_first, same):
    theirs = torch.nn.MultiheadAttention(8, num_heads, bias=bias, batch_first=batch_first,
                                         dtype=torch.float64).train(training)
    ours = compat.MultiheadAttention(8, num_heads, bias=bias, batch_first=batch_first,
                                     dtype=np.float64).train(training)
    ours.load_state_dict(theirs.state_dict())
    options = {"attn_mask": None, "key_padding_mask": None, "need_weights": need_weights}
    if mask == "key_padding_mask":
        options["key_padding_mask"] = np.array([[False] * 3, [True] * 3, [False] * 3])
    else:
        options["attn_mask"] = np.zeros((3, 3), bool)
        if mask == "attn_mask per head":
            options["attn_mask"] = np.zeros((3 * num_heads, 3, 3), bool)
        options["attn_mask"][..., 1, :] = True
        if mask == "attn_mask per head":
            options["attn_mask"][1:] = False  # one head alone is empty
        if mask == "float":
            options["attn_mask"] = np.where(options["attn_mask"], -np.inf, 0.5)
    x = np.random.default_rng(0).normal(size=(3, 3, 8))
    inputs = (x, x, x) if same else (x, x.copy(), x.copy())
    output, weights = ours(*inputs, **options)
    torch_output, torch_weights = call_torch(theirs, inputs, options)
    assert_same(output, torch_output, np.float64)
    if need_weights:
        assert np.isnan(weights).any()
        assert_same(weights, torch_weights, np.float64)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("lengths", [(3, 0), (0, 3)])
def test_layer_of_zero_lengths_is_torch(lengths, need_weights):
    theirs, ours = torch.nn.MultiheadAttention(8, 2), compat.MultiheadAttention(8, 2)
    ours.load_state_dict(theirs.state_dict())
    query, key = (np.ones((length, 2, 8), np.float32) for length in lengths)
    options = {"attn_mask": None, "key_padding_mask": None, "need_weights": need_weights}
    output, weights = ours(query, key, key, **options)
    torch_output, torch_weights = call_torch(theirs, (query, key, key), options)
    assert_same(output, torch_output, np.float32)
    if need_weights:
        assert_same(weights, torch_weights, np.float32)


@pytest.mark.parametrize("num_heads", [1, 2])  # 2 heads are on the fast path
def test_causal_hint_with_another_mask_is_torch(num_heads):
    theirs = torch.nn.MultiheadAttention(8, num_heads, batch_first=True, dtype=torch.float64).eval()
    ours = compat.MultiheadAttention(8, num_heads, batch_first=True, dtype=np.float64).eval()
    ours.load_state_dict(theirs.state_dict())
    x = np.random.default_rng(0).normal(size=(2, 5, 8))
    options = {"attn_mask": np.zeros((5, 5), bool), "key_padding_mask": None,
               "is_causal": True, "need_weights": False}
    output, _ = ours(x, x, x, **options)
    assert_same(output, call_torch(theirs, (x, x, x), options)[0], np.float64)


def test_state_dict_loads_into_torch():
    for options in ({}, {"kdim": 5, "vdim": 7, "add_bias_kv": True}, {"bias": False}):
        ours = compat.MultiheadAttention(8, 2, rng=0, dtype=torch.float64, **options)
        theirs = torch.nn.MultiheadAttention(8, 2, dtype=torch.float64, **options)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        theirs.load_state_dict({name: torch.from_numpy(array)
                                for name, array in ours.state_dict().items()})
        query, key, value = (np.ones((3, 1, size)) for size in (8, ours.kdim, ours.vdim))
        output, _ = ours(query, key, value)
        assert_same(output, theirs(*tensors(query, key, value))[0].detach(), np.float64)


def test_start_is_drawn_from_torchs_distributions():
    theirs = torch.nn.MultiheadAttention(256, 8, add_bias_kv=True, kdim=64)
    ours = compat.MultiheadAttention(256, 8, add_bias_kv=True, kdim=64, rng=0).state_dict()
    for name, parameter in theirs.state_dict().items():
        assert ours[name].shape == tuple(parameter.shape)
        assert ours[name].std() == pytest.approx(float(parameter.std()), rel=0.25)
        if "weight" in name:
            assert abs(ours[name]).max() == pytest.approx(float(parameter.abs().max()), rel=1e-2)


@pytest.mark.parametrize("average", [True, False])
def test_weights_after_dropout_are_what_torch_multiplies_with(average):
    """Both return weights of which a share is exactly 0 and the rest divided by what is kept."""
    theirs = torch.nn.MultiheadAttention(64, 2, dropout=0.25)
    ours = compat.MultiheadAttention(64, 2, dropout=0.25, rng=0)
    ours.load_state_dict(theirs.state_dict())
    x = np.random.default_rng(1).normal(size=(200, 4, 64)).astype(np.float32)
    _, weights = ours(x, x, x, average_attn_weights=average)
    _, before = ours.eval()(x, x, x, average_attn_weights=average)
    _, torch_weights = call_torch(theirs, (x, x, x), {
        "average_attn_weights": average, "attn_mask": None, "key_padding_mask": None})
    dropped, torch_dropped = weights == 0, torch_weights.numpy() == 0
    assert dropped.mean() == pytest.approx(0.25 ** (2 if average else 1), rel=0.02)
    assert dropped.mean() == pytest.approx(torch_dropped.mean(), rel=0.04)
    if not average:
        np.testing.assert_allclose(weights[~dropped], before[~dropped] / 0.75, rtol=1e-6)
        np.testing.assert_allclose(torch_weights.numpy()[~torch_dropped],
                                   before[~torch_dropped] / 0.75, rtol=2e-5)


def test_tensors_are_accepted_as_they_are():
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    ours = compat.MultiheadAttention(8, 2, batch_first=True, device="cpu", dtype=torch.float32)
    ours.load_state_dict(dict(theirs.named_parameters()))  # these require a gradient
    x = torch.randn(2, 3, 8, requires_grad=True)
    mask = torch.zeros(3, 3, dtype=torch.bool)
    output, weights = ours(x, x, x, attn_mask=mask)
    torch_output, torch_weights = theirs(x, x, x, attn_mask=mask)
    assert_same(output, torch_output.detach(), np.float32)
    assert_same(weights, torch_weights.detach(), np.float32)


FLAGS = [1, 0, np.True_, np.False_, np.int64(1)]


@pytest.mark.parametrize("flag", FLAGS, ids=repr)
@pytest.mark.parametrize("name", ["need_weights", "average_attn_weights", "is_causal"])
def test_flags_that_are_no_bools(name, flag):
    theirs = torch.nn.MultiheadAttention(8, 2, dtype=torch.float64).eval()
    ours = compat.MultiheadAttention(8, 2, dtype=np.float64).eval()
    ours.load_state_dict(theirs.state_dict())
    x = np.random.default_rng(0).normal(size=(4, 3, 8))
    options = {"attn_mask": np.triu(np.ones((4, 4), bool), 1), "key_padding_mask": None, name: flag}
    found, wanted = ours(x, x, x, **options), call_torch(theirs, (x, x, x), options)
    assert_same(found[0], wanted[0], np.float64)
    assert (found[1] is None) == (wanted[1] is None)
    if wanted[1] is not None:
        assert_same(found[1], wanted[1], np.float64)


@pytest.mark.parametrize("p", [1.0, 1, True, False, np.float64(1), torch.tensor(1.0)], ids=repr)
def test_a_dropout_of_all_or_nothing(p):
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, 3, 4, 8))
    theirs = torch.nn.functional.scaled_dot_product_attention(*tensors(query, query, query),
                                                              dropout_p=p)
    assert_same(compat.scaled_dot_product_attention(query, query, query, dropout_p=p), theirs,
                np.float64)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", [None, "bool", "empty"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_that_drops_all(bias, mask, need_weights):
    theirs = torch.nn.MultiheadAttention(8, 2, dropout=1.0, bias=bias, dtype=torch.float64)
    if bias:
        torch.nn.init.normal_(theirs.out_proj.bias)
    ours = compat.MultiheadAttention(8, 2, dropout=1.0, bias=bias, dtype=np.float64)
    ours.load_state_dict(theirs.state_dict())
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3, 8))
    options = {"attn_mask": random_mask(rng, mask, (4, 4), np.float64, true_blocks=True),
               "key_padding_mask": None, "need_weights": need_weights}
    for training in (True, False):
        found = ours.train(training)(x, x, x, **options)
        wanted = call_torch(theirs.train(training), (x, x, x), options)
        assert_same(found[0], wanted[0], np.float64)
        if need_weights:
            assert_same(found[1], wanted[1], np.float64)
