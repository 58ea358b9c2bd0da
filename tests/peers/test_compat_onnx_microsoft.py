"""mha.compat.onnx.microsoft against ONNX Runtime, over random nodes; GroupQueryAttention has a file
of its own. What the CPU provider refuses is compared with NumPy in float64.
"""

import numpy as np
import pytest
from onnx_nodes import (
    BFLOAT16,
    COUNT_OF_NODES,
    MICROSOFT,
    TOLERANCE,
    assert_same,
    by_ours,
    by_runtime,
    in_float32,
)

# MultiHeadAttention of com.microsoft


def multi_head_case(seed):
    """Inputs, the same as ONNX Runtime's kernel takes them, outputs and attributes."""
    rng = np.random.default_rng(seed)

    def chance(probability):
        return bool(rng.random() < probability)

    dtype = np.dtype([np.float32, np.float16, np.float32, BFLOAT16][seed % 4])
    batch, heads, q_len, kv_len = (int(size) for size in rng.integers(1, [4, 5, 20, 20]))
    is_step = chance(0.3)
    if is_step:
        q_len = kv_len = 1
    size, v_size = (int(width) for width in rng.integers(1, 25, 2))
    layout = rng.choice(["apart", "by head", "keys packed", "all packed"])
    unidirectional = chance(0.4)
    if unidirectional or layout == "all packed":
        kv_len = q_len
    past_len = int(rng.integers(1, 20)) if layout != "by head" and chance(
        0.8 if is_step else 0.4) else 0
    if past_len or layout != "apart":
        v_size = size
    total_len = past_len + kv_len

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    query, key, value = (normal(batch, length, heads, width) for length, width in (
        (q_len, size), (kv_len, size), (kv_len, v_size)))
    kernels = [array.reshape(*array.shape[:2], -1) for array in (query, key, value)]
    if layout == "apart":
        inputs = list(kernels)
    elif layout == "by head":
        inputs = [kernels[0], *(array.swapaxes(1, 2).copy() for array in (key, value))]
        kernels = list(inputs)
    elif layout == "keys packed":
        inputs = [kernels[0], np.stack([key, value], axis=3), None]
    else:
        inputs = [np.stack([query, key, value], axis=3), None, None]

    attributes = {"num_heads": heads}
    if unidirectional:
        attributes["unidirectional"] = 1
    if chance(0.4):
        attributes["scale"] = float(np.float32(rng.uniform(0.05, 0.8)))
    bias = None  # which is rounded before it is attended with, so that halves have no exact peer
    if layout != "keys packed" and dtype == np.float32 and chance(0.5):
        bias = normal(heads * (2 * size + v_size))
    mask = padding_mask(rng, batch, q_len, total_len)
    if mask is not None and chance(0.5):  # larger ones leave the scores fewer digits
        attributes["mask_filter_value"] = -float(rng.integers(0, 8))
    elif mask is not None:
        mask = np.maximum(mask, 1) if mask.ndim == 1 else mask
        mask[..., 0] = 1
    attention_bias = past_key = past_value = None
    if chance(0.4):
        attention_bias = normal(*(1 if chance(0.4) else size for size in (batch, heads)), q_len,
                                total_len)
    if past_len:
        past_key, past_value = normal(2, batch, heads, past_len, size)
    buffers = []
    if past_len and chance(0.6):
        buffers = shared_buffers(rng, q_len, past_key, past_value, kv_len)
        past_key, past_value = buffers[:2]
        if buffers[3] is not None:  # see test_where_onnx_runtime_is_no_peer
            attention_bias = None if attention_bias is None else attention_bias[:1]
            mask = mask if mask is None or mask.ndim == 2 else None
    others = [bias, mask, attention_bias, past_key, past_value, *buffers[2:]]
    outputs = ["output", "present_key", "present_value", "qk"][:rng.choice([1, 3, 4])]
    if past_len and outputs == ["output"]:  # the kernel then forgets the past
        outputs += ["present_key", "present_value"]
    return inputs + others, kernels + others, outputs, attributes


def shared_buffers(rng, q_len, past_key, past_value, kv_len):
    """past_key and past_value in buffers of some more rows, past_sequence_length, and for single
    queries cache_indirection or None."""
    past_len = past_key.shape[2]
    rows = [(0, 0), (0, 0), (0, kv_len + int(rng.integers(0, 4))), (0, 0)]
    buffers = [np.pad(past, rows, constant_values=9) for past in (past_key, past_value)]
    beams = None
    if q_len == kv_len == 1 and rng.random() < 0.7:  # see test_where_onnx_runtime_is_no_peer
        batch = len(past_key)
        width = batch if rng.random() < 0.5 else 1
        beams = rng.integers(0, width, (batch // width, width, buffers[0].shape[2]))
    return [*buffers, np.int32([past_len]), None if beams is None else beams.astype(np.int32)]


def padding_mask(rng, batch, q_len, total_len):
    kind = rng.choice(["none", "lengths", "starts", "keys", "pairs"])
    lengths = rng.integers(0, total_len + 1, batch)
    shape = (batch, total_len) if kind == "keys" else (batch, q_len, total_len)
    found = {"none": None, "lengths": lengths,
             "starts": np.concatenate([lengths, rng.integers(0, 9, 2 * batch + 2)]),
             "keys": rng.random(shape) < 0.7, "pairs": rng.random(shape) < 0.7}[kind]
    return None if found is None else found.astype(np.int32)


@pytest.mark.parametrize("seed", range(COUNT_OF_NODES))
def test_multi_head_attention_is_onnx_runtimes(seed):
    inputs, kernels, outputs, attributes = multi_head_case(seed)
    ours = by_ours(MICROSOFT, "MultiHeadAttention", inputs, outputs, attributes, 23)
    theirs = by_runtime(MICROSOFT, "MultiHeadAttention", in_float32(kernels), outputs, attributes,
                        23)
    for name, our_output, their_output in zip(outputs, ours, theirs, strict=True):
        if name == "qk":  # its causal mask is the least float, and what a bias makes of it
            their_output = np.where(their_output < -1e37, -np.inf, their_output)
        assert_same(our_output, their_output, inputs[0].dtype)


def padded_case(seed):
    """Inputs whose queries, some of them, see padding alone, and attributes."""
    rng = np.random.default_rng(seed)
    unidirectional = bool(seed % 2)
    batch, heads, q_len, kv_len, size = (int(size) for size in rng.integers(1, [4, 5, 20, 20, 25]))
    kv_len = q_len if unidirectional else kv_len
    query, key, value = (rng.normal(size=(batch, length, heads * size)).astype(np.float32)
                         for length in (q_len, kv_len, kv_len))
    mask = (rng.random((batch, q_len, kv_len)) < 0.3).astype(np.int32)
    mask[0, 0] = 0
    return [query, key, value, None, mask], {"num_heads": heads,
                                             "unidirectional": int(unidirectional)}


def exactly(inputs, attributes):
    """In float64: the output, and which queries (batch, q_len) see more than padding."""
    query, key, value, _, mask = inputs
    query, key, value = (array.astype(np.float64).reshape(
        *array.shape[:2], attributes["num_heads"], -1).swapaxes(1, 2)
        for array in (query, key, value))
    visible = mask[:, None] > 0
    scores = query @ key.mT / query.shape[-1]**0.5 + np.where(visible, 0, -10000.0)
    if attributes["unidirectional"]:
        triangle = np.tri(scores.shape[-1], dtype=bool)
        scores, visible = np.where(triangle, scores, -np.inf), visible & triangle
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    output = weights / weights.sum(-1, keepdims=True) @ value
    return output.swapaxes(1, 2).reshape(inputs[0].shape), visible.any(-1)[:, 0]


@pytest.mark.parametrize("seed", range(COUNT_OF_NODES))
def test_where_a_query_sees_padding_alone_no_float32_is_exact(seed):
    """A score less 10,000 is a multiple of 2**-10 in float32, so that ONNX Runtime's output and
    ours are both that far from float64's, and from each other. Elsewhere they are near."""
    inputs, attributes = padded_case(seed)
    ours = by_ours(MICROSOFT, "MultiHeadAttention", inputs, ["output"], attributes, 23)[0]
    theirs = by_runtime(MICROSOFT, "MultiHeadAttention", inputs, ["output"], attributes, 23)[0]
    exact, sees = exactly(inputs, attributes)
    largest = np.abs(inputs[2]).max()
    assert not sees.all()
    for output in (ours, theirs):
        error = np.abs(output - exact)
        assert error[sees].max(initial=0) <= TOLERANCE[np.dtype(np.float32)] * largest
        assert error[~sees].max() <= 2**-10 * largest
    assert np.abs(ours - theirs)[sees].max(initial=0) <= 2 * TOLERANCE[
        np.dtype(np.float32)] * largest


# Attention: projections, and attention between them


def projected_case(seed):
    """Inputs, outputs and attributes of one node."""
    rng = np.random.default_rng(seed)

    def chance(probability):
        return bool(rng.random() < probability)

    batch, heads, length, past_len = (int(size) for size in rng.integers(1, [4, 5, 20, 20]))
    size, v_size = (int(width) for width in rng.integers(1, 17, 2))
    input_hidden = int(rng.integers(1, 33))
    past_len = past_len if chance(0.4) else 0
    attributes = {"num_heads": heads}
    if past_len or chance(0.5):
        v_size = size
    else:
        attributes["qkv_hidden_sizes"] = [heads * size, heads * size, heads * v_size]

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    width = heads * (2 * size + v_size)
    inputs = [normal(batch, length, input_hidden), normal(input_hidden, width) / 4,
              normal(width) if chance(0.7) else None]
    if chance(0.4):
        attributes["unidirectional"] = 1
    if chance(0.4):
        attributes["scale"] = float(np.float32(rng.uniform(0.05, 0.8)))
    mask = projected_mask(rng, batch, length, past_len + length)
    if mask is not None and (chance(0.5) or mask.shape == (2 * batch,)):
        attributes["mask_filter_value"] = -float(rng.integers(0, 8))
    elif mask is not None:  # larger numbers leave the scores fewer digits
        mask = np.maximum(mask, 1) if mask.ndim == 1 else mask
        mask[..., 0] = 1
    past = normal(2, batch, heads, past_len, size) if past_len else None
    bias = None
    if not past_len and chance(0.4):  # with both ONNX Runtime refuses the node
        bias = normal(*(1 if chance(0.4) else n for n in (batch, heads)), length, length)
    outputs = ["output"]
    if past_len or (size == v_size and chance(0.4)):
        outputs.append("present")
    return [*inputs, mask, past, bias, None], outputs, attributes


def projected_mask(rng, batch, length, total_len):
    kind = rng.choice(["none", "ends", "ends and starts", "lengths", "keys", "pairs", "one"])
    ends, starts = rng.integers(0, total_len + 1, (2, batch))
    found = {"none": None, "ends": ends, "ends and starts": np.concatenate([ends, starts]),
             "lengths": np.concatenate([ends, rng.integers(0, 9, 2 * batch + 2)]),
             "keys": rng.random((batch, total_len)) < 0.7,
             "pairs": rng.random((batch, length, total_len)) < 0.7,
             "one": np.zeros((int(rng.choice([1, batch])), 1))}[kind]
    return None if found is None else found.astype(np.int32)


@pytest.mark.parametrize("seed", range(COUNT_OF_NODES))
def test_attention_is_onnx_runtimes(seed):
    inputs, outputs, attributes = projected_case(seed)
    ours = by_ours(MICROSOFT, "Attention", inputs, outputs, attributes, 23)
    theirs = by_runtime(MICROSOFT, "Attention", inputs, outputs, attributes, 23)
    for our_output, their_output in zip(ours, theirs, strict=True):
        assert_same(our_output, their_output, inputs[0].dtype)


# DecoderMaskedMultiHeadAttention: one query a sequence


def step_case(seed):
    """Inputs, outputs and attributes of one node."""
    rng = np.random.default_rng(seed)

    def chance(probability):
        return bool(rng.random() < probability)

    width, heads, past_len, spare, size = (int(n) for n in rng.integers(
        [1, 1, 0, 0, 4], [4, 5, 20, 4, 25]))  # an output of one number may be next to zero
    batch = width * int(rng.integers(1, 4))

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    is_cross = chance(0.3)
    attributes = {"num_heads": heads, "output_qk": int(chance(0.4))}
    query = normal(batch, 1, heads * size)
    bias = normal(3 * heads * size) if chance(0.4) else None
    past = [None, None, None]
    beams = [None, None]
    attention_bias = None
    if is_cross:
        key, value = normal(2, batch, heads, past_len + 1, size)
    else:
        attributes["past_present_share_buffer"] = 1
        key, value = normal(2, batch, 1, heads * size)
        past = [*normal(2, batch, heads, past_len + 1 + spare, size), np.int32([past_len])]
        if chance(0.5):
            indices = rng.integers(0, width, (batch // width, width, past_len + 1 + spare))
            beams = [np.int32([width]), indices.astype(np.int32)]
        if chance(0.4):  # with beams one bias for all: see test_where_onnx_runtime_is_no_peer
            attention_bias = normal(1 if chance(0.4) or beams[0] is not None else batch,
                                    1 if chance(0.4) else heads, 1, past_len + 1)
    mask = None
    if chance(0.5):
        mask = (rng.random((batch, past_len + 1)) < 0.7).astype(np.int32)
        if chance(0.5):
            attributes["mask_filter_value"] = -float(rng.integers(0, 8))
        else:
            mask[:, 0] = 1
    if chance(0.4):
        attributes["scale"] = float(np.float32(rng.uniform(0.05, 0.8)))
    outputs = ["output", "", ""] if is_cross else ["output", "present_key", "present_value"]
    outputs = [*outputs, "qk"] if attributes["output_qk"] else outputs[:1] if is_cross else outputs
    return [query, key, value, mask, attention_bias, *past, *beams, bias], outputs, attributes


@pytest.mark.parametrize("seed", range(COUNT_OF_NODES))
def test_decoder_masked_multi_head_attention_is_onnx_runtimes(seed):
    inputs, outputs, attributes = step_case(seed)
    operator = "DecoderMaskedMultiHeadAttention"
    ours = by_ours(MICROSOFT, operator, inputs, outputs, attributes, 23)
    theirs = by_runtime(MICROSOFT, operator, inputs, outputs, attributes, 23)
    for our_output, their_output in zip(ours, theirs, strict=True):
        assert_same(our_output, their_output, inputs[0].dtype)


def rows_of_beams(buffer, beams, past_len):
    """The buffer as each sequence sees it."""
    seen = buffer.copy()
    width = beams.shape[1]
    for row in range(len(buffer)):
        for k in range(past_len):
            seen[row, :, k] = buffer[row // width * width + beams[row // width, row % width, k],
                                     :, k]
    return seen


def test_where_onnx_runtime_is_no_peer():
    """An ONNX Runtime that learned it needs no exception in the cases any more."""
    rng = np.random.default_rng(0)
    past_key, past_value = rng.normal(size=(2, 4, 2, 9, 8)).astype(np.float32)
    past_len, beams = np.int32([5]), rng.integers(0, 2, (2, 2, 9)).astype(np.int32)

    def node(length, mask, bias, past, *others):
        new = rng.normal(size=(3, 4, length, 16)).astype(np.float32)
        return [*new, None, mask, bias, *past, *others]

    def outputs(inputs):
        names = ["output", "present_key", "present_value"]
        node = MICROSOFT, "MultiHeadAttention", inputs, names, {"num_heads": 2}, 23
        return by_runtime(*node)[0], by_ours(*node)[0]

    # Beams: it does not know them with several new keys, a mask of pairs, or without buffers.
    for length, mask, others in ((2, None, [past_len, beams]), (1, None, [None, beams]),
                                 (1, np.ones((4, 1, 6), np.int32), [past_len, beams])):
        inputs = node(length, mask, None, (past_key, past_value), *others)
        runtime, ours = outputs(inputs)
        assert_same(runtime, outputs([*inputs[:9], None])[1], runtime.dtype)
        seen = [rows_of_beams(past, beams, 9 if others[0] is None else 5)
                for past in (past_key, past_value)]
        assert_same(ours, outputs([*inputs[:6], *seen, inputs[8], None])[1], runtime.dtype)
        assert abs(runtime - ours).max() > 0.1

    # With one query and several new keys it writes other caches than for the same without beams.
    inputs = node(2, None, None, (past_key, past_value), past_len, np.zeros((4, 1, 9), np.int32))
    inputs[0] = inputs[0][:, :1]
    names = ["output", "present_key", "present_value"]
    caches = [by_runtime(MICROSOFT, "MultiHeadAttention", [*inputs[:9], beams], names,
                         {"num_heads": 2}, 23)[1] for beams in (inputs[9], None)]
    assert abs(caches[0] - caches[1]).max() > 0.1

    # It gives each beam the bias of another sequence, that of its group's number.
    bias = rng.normal(size=(4, 2, 1, 6)).astype(np.float32)
    inputs = node(1, None, bias, (past_key, past_value), past_len, beams)
    runtime, ours = outputs(inputs)
    inputs[5] = bias[[0, 0, 1, 1]]
    assert_same(runtime, outputs(inputs)[1], runtime.dtype)
    assert abs(runtime - ours).max() > 0.1


REFUSED = [
    ("Attention", ("input", "weights"), {"do_rotary": 1}, "not supported in Attention CPU"),
    ("Attention", ("input", "weights", None, "positions"), {}, "4D mask"),
    ("Attention", ("input", "weights", None, None, "past", "bias"), {}, "both past and"),
    ("Attention", ("input", "weights", None, None, "past", None, "one"),
     {"past_present_share_buffer": 1}, "past_sequence_length tensor"),
    ("DecoderMaskedMultiHeadAttention", ("packed", None, None, None, None, "buffer", "buffer",
                                         "one"), {"past_present_share_buffer": 1}, "Reshape"),
    ("DecoderMaskedMultiHeadAttention", ("step", "step", "step", None, None, "buffer", "buffer"),
     {}, "past_present_share_buffer_"),
    ("DecoderMaskedMultiHeadAttention", ("step", "buffer", "buffer", None, "step_bias"), {},
     "attention bias for cross-attention"),
]


@pytest.mark.parametrize(("operator", "names", "attributes", "words"), REFUSED)
def test_what_the_cpu_provider_refuses(operator, names, attributes, words):
    """Here it works: tests/compat/test_compat_onnx_microsoft.py compares it with float64."""
    shapes = {"input": (1, 2, 4), "weights": (4, 24), "past": (2, 1, 2, 3, 4),
              "bias": (1, 2, 2, 5), "packed": (1, 1, 24), "step": (1, 1, 8),
              "buffer": (1, 2, 3, 4), "step_bias": (1, 2, 1, 3)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    arrays |= {"one": np.int32([1]), "positions": np.ones((1, 1, 2, 2), np.int32), None: None}
    inputs = [arrays[name] for name in names]
    names = ["output", "present"] if "past" in names else ["output"]
    names = ["output", "present_key", "present_value"] if len(inputs) > 6 and (
        operator != "Attention") else names
    node = MICROSOFT, operator, inputs, names, {"num_heads": 2, **attributes}, 23
    by_ours(*node)
    with pytest.raises(Exception, match=words):
        by_runtime(*node)


def test_cases_cover_every_feature():
    """A generator that stopped making a kind of case would let every comparison pass."""
    calls = [multi_head_case(seed) for seed in range(300)]
    layouts = [tuple(None if array is None else array.ndim for array in inputs[:3])
               for inputs, *_ in calls]
    assert {layout: layouts.count(layout) > 25 for layout in layouts} == dict.fromkeys(
        [(3, 3, 3), (3, 4, 4), (3, 5, None), (5, None, None)], True)
    for index in range(3, 10):
        assert sum(inputs[index] is not None for inputs, *_ in calls if index < len(inputs)) > 20
    assert {inputs[4].ndim for inputs, *_ in calls if inputs[4] is not None} == {1, 2, 3}
    for name in ("unidirectional", "scale", "mask_filter_value"):
        assert sum(name in given for *_, given in calls) > 25, name
    nodes = [projected_case(seed) for seed in range(300)]
    for index in range(2, 6):
        assert sum(inputs[index] is not None for inputs, *_ in nodes) > 50
    for name in ("unidirectional", "scale", "mask_filter_value", "qkv_hidden_sizes"):
        assert sum(name in given for *_, given in nodes) > 40, name
    steps = [step_case(seed) for seed in range(300)]
    for index in range(3, 11):
        assert sum(inputs[index] is not None for inputs, *_ in steps) > 50, index
    assert sum(inputs[8] is not None and inputs[8] > 1 for inputs, *_ in steps) > 40
    assert sum(given["output_qk"] for *_, given in steps) > 50
