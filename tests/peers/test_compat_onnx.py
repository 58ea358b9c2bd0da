"""mha.compat.onnx against the cases that onnx ships, and against ONNX Runtime on random ones.

Tolerances are those of test_compat_pytorch.py, relative to the largest entry. Halves are compared
with the peer's float32 on the same numbers, to which ours are the nearest: the peers round every
step to halves themselves.

Where ONNX Runtime does not do what the standard says, the peer is onnx's reference evaluator:
`not_by_runtime` lists where and why. Comments name what else sets a peer apart.
"""

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from configurations import COUNT
from onnx import helper
from onnx.backend.test.case.node import _NodeTestCases, attention, rotaryembedding  # noqa: F401
from onnx.backend.test.runner import Runner
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator

from mha.compat import onnx as compat
from mha.compat.onnx import microsoft

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TOLERANCE = {np.dtype(np.float32): 2e-6, np.dtype(np.float64): 1e-13}
HALF_ULP = {np.dtype(np.float16): 2.0**-11, BFLOAT16: 2.0**-8}  # relative
SMALLEST = {np.dtype(np.float16): 2.0**-25, BFLOAT16: 2.0**-134}  # halves of the least number
MICROSOFT = "com.microsoft"
FUNCTIONS = {("", "Attention"): compat.attention, ("", "RotaryEmbedding"): compat.rotary_embedding,
             (MICROSOFT, "MultiHeadAttention"): microsoft.multi_head_attention,
             (MICROSOFT, "RotaryEmbedding"): microsoft.rotary_embedding}


# The cases of Attention and RotaryEmbedding that onnx ships, as Python modules. Those whose name
# has "_expanded" hold the operators that the two are made of, none of which is ours.


def test_every_case_that_onnx_ships():
    """All of them, compared as onnx compares them."""
    cases = [case for case in _NodeTestCases if "_expanded" not in case.name]
    assert len(cases) >= 101
    versions = set()
    for case in cases:
        evaluator = ReferenceEvaluator(case.model, new_ops=compat.new_ops())
        names = [value.name for value in case.model.graph.input]
        versions.add(case.model.opset_import[0].version)
        for inputs, outputs in case.data_sets:
            got = evaluator.run(None, dict(zip(names, inputs, strict=True)))
            Runner.assert_similar_outputs(outputs, got, case.rtol, case.atol, case.name)
    assert versions == {23, 24, 25}


# One node as a model, for each of the three that run it


def model_of(domain, operator, inputs, outputs, attributes, opset):
    names = ["" if array is None else f"input{index}" for index, array in enumerate(inputs)]
    while not names[-1]:
        names.pop()
    given = {name: array for name, array in zip(names, inputs) if name}
    node = helper.make_node(operator, names, outputs, domain=domain, **attributes)
    element = helper.np_dtype_to_tensor_dtype(inputs[0].dtype)
    graph = helper.make_graph(
        [node], "one_node",
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype),
                                       array.shape) for name, array in given.items()],
        [helper.make_tensor_value_info(name, element, None) for name in outputs if name])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), given


def by_runtime(*model):
    """ONNX Runtime's outputs, on its CPU provider."""
    proto, given = model_of(*model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options,
                                           providers=["CPUExecutionProvider"])
    return session.run(None, given)


def by_reference(*model):
    proto, given = model_of(*model)
    return ReferenceEvaluator(proto).run(None, given)


def by_ours(domain, operator, inputs, outputs, attributes, opset):
    """The function's outputs, once the evaluator's were found to have the same bits."""
    returns_qk = {"return_qk": True} if outputs[3:] else {}
    results = FUNCTIONS[domain, operator](*inputs, **attributes, **returns_qk)
    results = results if isinstance(results, tuple) else (results,)
    named = [result for name, result in zip(outputs, results) if name]
    proto, given = model_of(domain, operator, inputs, outputs, attributes, opset)
    evaluator = ReferenceEvaluator(proto, new_ops=compat.new_ops())
    for ours, evaluated in zip(named, evaluator.run(None, given), strict=True):
        assert ours.tobytes() == evaluated.tobytes()
    return named


def assert_same(ours, theirs, dtype):
    """Shape and type, infinities and NaN, and numbers within the tolerance."""
    assert ours.shape == theirs.shape
    assert ours.dtype == dtype
    theirs = theirs.astype(np.float64)
    ours = ours.astype(np.float64)
    finite = np.isfinite(theirs)
    np.testing.assert_array_equal(ours[~finite], theirs[~finite])
    largest = np.abs(theirs[finite]).max(initial=1e-30)
    if dtype in TOLERANCE:
        bound = TOLERANCE[dtype] * largest
    else:
        bound = (TOLERANCE[np.dtype(np.float32)] * largest
                 + np.maximum(HALF_ULP[dtype] * np.abs(theirs[finite]), SMALLEST[dtype]))
    assert (np.abs(ours[finite] - theirs[finite]) <= bound).all()


def in_float32(inputs):
    return [array if array is None or array.dtype not in HALF_ULP else array.astype(np.float32)
            for array in inputs]


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
@pytest.mark.parametrize("seed", range(COUNT))
def test_attention_is_the_peers(seed):
    inputs, outputs, attributes, opset = attention_case(seed)
    ours = by_ours("", "Attention", inputs, outputs, attributes, opset)
    theirs = attention_peer(inputs, outputs, attributes, opset)
    for our_output, their_output in zip(ours, theirs, strict=True):
        assert_same(our_output, their_output, inputs[0].dtype)


# MultiHeadAttention of com.microsoft


def multi_head_case(seed):
    """Inputs, the same as ONNX Runtime's kernel takes them, outputs and attributes."""
    rng = np.random.default_rng(seed)

    def chance(probability):
        return bool(rng.random() < probability)

    dtype = np.dtype([np.float32, np.float16, np.float32, BFLOAT16][seed % 4])
    batch, heads, q_len, kv_len = (int(size) for size in rng.integers(1, [4, 5, 20, 20]))
    size, v_size = (int(width) for width in rng.integers(1, 25, 2))
    layout = rng.choice(["apart", "by head", "keys packed", "all packed"])
    unidirectional = chance(0.4)
    if unidirectional or layout == "all packed":
        kv_len = q_len
    past_len = int(rng.integers(1, 20)) if layout != "by head" and chance(0.4) else 0
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
    others = [bias, mask, attention_bias, past_key, past_value]
    outputs = ["output", "present_key", "present_value", "qk"][:rng.choice([1, 3, 4])]
    if past_len and outputs == ["output"]:  # the kernel then forgets the past
        outputs += ["present_key", "present_value"]
    return inputs + others, kernels + others, outputs, attributes


def padding_mask(rng, batch, q_len, total_len):
    kind = rng.choice(["none", "lengths", "starts", "keys", "pairs"])
    lengths = rng.integers(0, total_len + 1, batch)
    shape = (batch, total_len) if kind == "keys" else (batch, q_len, total_len)
    found = {"none": None, "lengths": lengths,
             "starts": np.concatenate([lengths, rng.integers(0, 9, 2 * batch + 2)]),
             "keys": rng.random(shape) < 0.7, "pairs": rng.random(shape) < 0.7}[kind]
    return None if found is None else found.astype(np.int32)


@pytest.mark.parametrize("seed", range(COUNT))
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


@pytest.mark.parametrize("seed", range(COUNT))
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


@pytest.mark.parametrize("seed", range(COUNT))
def test_rotary_embedding_is_onnx_runtimes(seed):
    domain, inputs, attributes = rotary_case(seed)
    ours, = by_ours(domain, "RotaryEmbedding", inputs, ["Y"], attributes, 23)
    theirs, = by_runtime(domain, "RotaryEmbedding", in_float32(inputs), ["Y"], attributes, 23)
    assert_same(ours, theirs, inputs[0].dtype)


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
    calls = [multi_head_case(seed) for seed in range(200)]
    layouts = [tuple(None if array is None else array.ndim for array in inputs[:3])
               for inputs, *_ in calls]
    assert {layout: layouts.count(layout) > 25 for layout in layouts} == dict.fromkeys(
        [(3, 3, 3), (3, 4, 4), (3, 5, None), (5, None, None)], True)
    for index in range(3, 8):
        assert sum(inputs[index] is not None for inputs, *_ in calls) > 25
    assert {inputs[4].ndim for inputs, *_ in calls if inputs[4] is not None} == {1, 2, 3}
    for name in ("unidirectional", "scale", "mask_filter_value"):
        assert sum(name in given for *_, given in calls) > 25, name
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
