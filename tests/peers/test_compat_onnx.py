"""mha.compat.onnx against the cases that onnx ships, and against ONNX Runtime on random ones.

Where ONNX Runtime does not do what the standard says, the peer is onnx's reference evaluator:
`not_by_runtime` lists where and why. Comments name what else sets a peer apart.
"""

import numpy as np
import pytest
from onnx import helper
from onnx.backend.test.case.node import (  # noqa: F401
    _NodeTestCases,
    attention,
    flexattention,
    rotaryembedding,
    tensorscatter,
)
from onnx.backend.test.runner import Runner
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator
from onnx_nodes import (
    BFLOAT16,
    COUNT_OF_NODES,
    MICROSOFT,
    assert_same,
    by_ours,
    by_reference,
    by_runtime,
    in_float32,
    model_of,
)

from mha.compat import onnx as compat

# The cases of Attention, FlexAttention, RotaryEmbedding and TensorScatter that onnx ships, as
# Python modules. Those whose name has "_expanded" hold the operators that these are made of, none
# of which is ours.


def test_every_case_that_onnx_ships():
    """All of them, compared as onnx compares them."""
    cases = [case for case in _NodeTestCases if "_expanded" not in case.name]
    assert len(cases) >= 115
    versions = set()
    for case in cases:
        evaluator = ReferenceEvaluator(case.model, new_ops=compat.new_ops())
        names = [value.name for value in case.model.graph.input]
        versions.add(case.model.opset_import[0].version)
        for inputs, outputs in case.data_sets:
            got = evaluator.run(None, dict(zip(names, inputs, strict=True)))
            Runner.assert_similar_outputs(outputs, got, case.rtol, case.atol, case.name)
    assert versions == {23, 24, 25, 26}


# Attention of ai.onnx


def attention_case(seed):
    """Inputs, outputs, attributes and opset of one node, determined by the seed alone."""
    rng = np.random.default_rng(seed)

    def chance(probability):
        return bool(rng.random() < probability)

    dtype = np.dtype([np.float32, np.float16, np.float32, BFLOAT16, np.float64][seed % 5])
    opset = int(rng.choice([23, 24, 25]))
    batch, kv_heads, group = (int(size) for size in rng.integers(1, 4, 3))
    q_len, kv_len, past_len = (int(size) for size in rng.integers(1, 20, 3))
    size, v_size = (int(width) for width in rng.integers(1, 25, 2))
    heads = kv_heads * group

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    attributes = {"is_causal": int(chance(0.5))}
    if chance(0.5):
        query = normal(batch, heads, q_len, size)
        key, value = normal(batch, kv_heads, kv_len, size), normal(batch, kv_heads, kv_len, v_size)
    else:
        query = normal(batch, q_len, heads * size)
        key, value = (normal(batch, kv_len, kv_heads * width) for width in (size, v_size))
        attributes |= {"q_num_heads": heads, "kv_num_heads": kv_heads}
    if chance(0.4):
        attributes["scale"] = float(rng.integers(10, 60) / 64) ** 2  # a square in float32, too
    if chance(0.3):
        attributes["softcap"] = float(np.float32(rng.uniform(0.5, 3)))
    if chance(0.2):
        attributes["softmax_precision"] = 11 if dtype == np.float64 else int(rng.choice([1, 11]))
    if opset == 25 and chance(0.7):
        attributes["left_window_size"] = int(rng.integers(-1, 8))
        attributes["right_window_size"] = int(rng.integers(-1, 8))

    past_key = past_value = nonpad = None
    if chance(0.4):
        past_key, past_value = (normal(batch, kv_heads, past_len, width)
                                for width in (size, v_size))
    elif opset > 23 and chance(0.5):
        nonpad = rng.integers(0, kv_len + 1, batch)
    total_len = kv_len + (0 if past_key is None else past_len)
    least = 1 if nonpad is None else max(1, int(nonpad.max()))
    mask = random_mask(rng, (batch, heads, q_len, total_len), least, dtype)

    outputs = ["Y", "present_key", "present_value"] if nonpad is None else ["Y"]
    if chance(0.4):
        outputs = [*[*outputs, "", ""][:3], "qk"]
        attributes["qk_matmul_output_mode"] = int(rng.integers(0, 4))
    return [query, key, value, mask, past_key, past_value, nonpad], outputs, attributes, opset


def random_mask(rng, shape, least, dtype):
    """Bool or additive, of all ranks, sometimes with a shorter last axis; rows may be empty."""
    if rng.random() < 0.3:
        return None
    shape = (*(1 if rng.random() < 0.4 else size for size in shape[:2]), *shape[2:])
    shape = shape[rng.choice([0, 0, 1, 2, 2, 2, 3]):]
    if rng.random() < 0.2:
        shape = (*shape[:-1], int(rng.integers(least, shape[-1] + 1)))
    visible = rng.random(shape) < 0.6
    if rng.random() < 0.6:
        return visible
    return np.where(visible, rng.normal(size=shape), -np.inf).astype(dtype)


def not_by_runtime(inputs, attributes):
    """Why ONNX Runtime 1.32 is no peer for this node; None where it is."""
    query, key, _, mask, past_key, *_ = inputs
    total_len = key.shape[-2] + (0 if past_key is None else past_key.shape[2])
    if query.dtype == np.float64:
        return "it has no kernel for float64, but a function whose default scale is of float32"
    if mask is not None and mask.shape[-1] < total_len:
        return "it refuses a shorter last axis"
    if query.shape[-2] == 1 and past_key is not None and attributes["is_causal"]:
        return "its kernel lets a single query behind a past see what comes after it"
    return None


def attention_peer(inputs, outputs, attributes, opset):
    inputs = in_float32(inputs)
    mask, mode = inputs[3], attributes.get("qk_matmul_output_mode")
    if mask is not None and mask.ndim == 1:  # the one refuses it, the other fails if causal
        inputs[3] = np.tile(mask, (inputs[0].shape[-2], 1))
    node = ("", "Attention", inputs, outputs, attributes, opset)
    if not_by_runtime(inputs, attributes):
        theirs = by_reference(*node)
        if mode == 0 and "softcap" in attributes:  # which caps what the standard calls raw
            attributes = {**attributes, "softcap": 0.0}
            theirs[-1] = by_reference(*node[:4], attributes, opset)[-1]
        return theirs
    theirs = by_runtime(*node)
    if mode == 2:  # its -inf is the least float, and what a bias makes of it
        theirs[-1] = np.where(theirs[-1] < -1e37, -np.inf, theirs[-1])
    return theirs


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of onnx's reference
@pytest.mark.parametrize("seed", range(COUNT_OF_NODES))
def test_attention_is_the_peers(seed):
    inputs, outputs, attributes, opset = attention_case(seed)
    ours = by_ours("", "Attention", inputs, outputs, attributes, opset)
    theirs = attention_peer(inputs, outputs, attributes, opset)
    for our_output, their_output in zip(ours, theirs, strict=True):
        assert_same(our_output, their_output, inputs[0].dtype)


# RotaryEmbedding of both


def rotary_case(seed):
    """Domain, inputs and attributes of one node."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype([np.float32, np.float16, BFLOAT16][seed % 3])
    domain = ("", MICROSOFT)[int(rng.random() < 0.5)]
    batch, heads, length = (int(size) for size in rng.integers(1, 8, 3))
    size = 2 * int(rng.integers(1, 17))
    dims = 2 * int(rng.integers(1, size // 2 + 1)) if rng.random() < 0.5 else 0

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    by_head = bool(rng.random() < 0.5)
    x = normal(batch, heads, length, size) if by_head else normal(batch, length, heads * size)
    attributes = {"interleaved": int(rng.random() < 0.5)}
    if dims:
        attributes["rotary_embedding_dim"] = dims
    if dims or (not by_head and (not domain or rng.random() < 0.5)):
        attributes["num_heads"] = heads
    rows = int(rng.integers(length, 20))
    positions = rng.integers(0, rows, (batch, length))
    if domain and rng.random() < 0.4:
        positions = rng.integers(0, rows - length + 1, 1)
    leading = (rows,)
    if not domain and rng.random() < 0.4:
        leading, positions = (batch, length), None
    caches = [normal(*leading, (dims or size) // 2) for _ in range(2)]
    return domain, [x, positions, *caches] if domain else [x, *caches, positions], attributes


@pytest.mark.parametrize("seed", range(COUNT_OF_NODES))
def test_rotary_embedding_is_onnx_runtimes(seed):
    domain, inputs, attributes = rotary_case(seed)
    ours, = by_ours(domain, "RotaryEmbedding", inputs, ["Y"], attributes, 23)
    theirs, = by_runtime(domain, "RotaryEmbedding", in_float32(inputs), ["Y"], attributes, 23)
    assert_same(ours, theirs, inputs[0].dtype)


# TensorScatter


def scatter_case(seed):
    """Inputs and attributes of one node."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype([np.float32, np.float16, np.int64, np.float64][seed % 4])
    shape = rng.integers(1, 6, int(rng.integers(2, 5)))
    axis = int(rng.integers(1, len(shape)))
    length, spare = (int(n) for n in rng.integers([1, 0], [6, 6]))
    mode = ["linear", "circular"][int(rng.random() < 0.5)]
    arrays = []
    for shape[axis] in (length + spare, length):
        arrays.append((9 * rng.normal(size=shape)).astype(dtype))
    last = spare if mode == "linear" else 40
    indices = rng.integers(0, last + 1, shape[0]) if rng.random() < 0.8 else None
    attributes = {"mode": mode, "axis": axis - len(shape) * int(rng.random() < 0.5)}
    return [*arrays, indices], {name: value for name, value in attributes.items()
                                if value not in (-2, "linear")}  # the defaults


@pytest.mark.parametrize("seed", range(COUNT_OF_NODES))
def test_tensor_scatter_is_onnx_runtimes(seed):
    inputs, attributes = scatter_case(seed)
    node = "", "TensorScatter", inputs, ["present_cache"], attributes, 24
    assert by_ours(*node)[0].tobytes() == by_runtime(*node)[0].tobytes()


def test_cases_cover_every_feature():
    """A generator that stopped making a kind of case would let every comparison pass."""
    nodes = [attention_case(seed) for seed in range(200)]
    by_runtime_too = [not_by_runtime(inputs, attributes) is None
                      for inputs, _, attributes, _ in nodes]
    assert by_runtime_too.count(True) > 110
    assert {opset for *_, opset in nodes} == {23, 24, 25}
    assert {inputs[0].ndim for inputs, *_ in nodes} == {3, 4}
    masks = [inputs[3] for inputs, *_ in nodes if inputs[3] is not None]
    assert {(mask.ndim, mask.dtype.kind == "b") for mask in masks} == {
        (ndim, is_bool) for ndim in (1, 2, 3, 4) for is_bool in (True, False)}
    for index in (4, 6):  # past_key, nonpad_kv_seqlen
        assert sum(inputs[index] is not None for inputs, *_ in nodes) > 25
    attributes = [attributes for _, _, attributes, _ in nodes]
    for name in ("scale", "softcap", "softmax_precision", "left_window_size", "q_num_heads"):
        assert sum(name in given for given in attributes) > 25, name
    modes = [given.get("qk_matmul_output_mode") for given in attributes]
    assert min(modes.count(mode) for mode in range(4)) > 10
    scattered = [scatter_case(seed) for seed in range(200)]
    assert sum(inputs[2] is not None for inputs, _ in scattered) > 100
    for name in ("mode", "axis"):
        assert 50 < sum(name in given for _, given in scattered) < 190, name
    turns = [rotary_case(seed) for seed in range(200)]
    for domain in ("", MICROSOFT):
        of_domain = [(inputs, given) for found, inputs, given in turns if found == domain]
        assert {inputs[0].ndim for inputs, _ in of_domain} == {3, 4}
        for name in ("interleaved", "rotary_embedding_dim", "num_heads"):
            assert sum(bool(given.get(name)) for _, given in of_domain) > 25, name


def outputs_of(opset, is_causal):
    """A single query behind a past of three keys, which brings six."""
    rng = np.random.default_rng(0)
    query, *others = (rng.normal(size=(1, 1, length, 8)).astype(np.float32)
                      for length in (1, 6, 6, 3, 3))
    node = ("", "Attention", [query, *others[:2], None, *others[2:]],
            ["Y", "present_key", "present_value"], {"is_causal": is_causal}, opset)
    return by_runtime(*node)[0], by_reference(*node)[0], by_ours(*node)[0]


def test_where_onnx_runtime_is_no_peer():
    """An ONNX Runtime that learned it needs no exception in `not_by_runtime` any more."""
    runtime, reference, ours = outputs_of(24, is_causal=1)
    assert_same(runtime, outputs_of(24, is_causal=0)[1], runtime.dtype)
    assert_same(ours, reference, runtime.dtype)
    assert abs(runtime - ours).max() > 0.1
    x = np.ones((1, 1, 2, 4), np.float32)
    for inputs in ([x, x, x, np.ones((2, 1), bool)], [x, x, x, np.ones(2, bool)]):
        with pytest.raises(Exception, match="attn_mask"):
            by_runtime("", "Attention", inputs, ["Y"], {}, 24)


def test_functions_of_a_model_are_inlined_first():
    """Nodes within a model's own function are ours then, attributes of the function's included."""
    node = helper.make_node("Attention", ["x"] * 3, ["y"], q_num_heads=2, kv_num_heads=2)
    linked = node.attribute.add(name="is_causal", ref_attr_name="is_causal")
    linked.type = linked.INT
    opset = helper.make_opsetid("", 23)
    function = helper.make_function("local", "Causal", ["x"], ["y"], [node], [opset],
                                    ["is_causal"])
    x = np.random.default_rng(0).normal(size=(1, 4, 8)).astype(np.float32)
    model, given = model_of("local", "Causal", [x], ["Y"], {"is_causal": 1}, 23)
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("local", 1))
    inlined = inline_local_functions(model)
    output, = ReferenceEvaluator(inlined, new_ops=compat.new_ops()).run(None, given)
    wanted = compat.attention(x, x, x, q_num_heads=2, kv_num_heads=2, is_causal=1).Y
    assert output.tobytes() == wanted.tobytes()
