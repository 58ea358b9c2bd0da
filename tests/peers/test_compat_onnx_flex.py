"""FlexAttention of mha.compat.onnx against onnx's reference evaluator, over random nodes; ONNX
Runtime has no kernel for it, nor knows its name."""

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx_nodes import (
    BFLOAT16,
    COUNT_OF_NODES,
    PREVIEW,
    assert_same,
    by_runtime,
    in_float32,
    model_of,
)

from mha.compat import onnx as compat

TYPES = {1: np.float32, 10: np.float16, 11: np.float64, 16: BFLOAT16}


def modifier(rng, names, element):
    """A graph of one input and one output: some of these operators behind each other."""
    def constant(name, *numbers, shape=(), of=element):
        return helper.make_tensor(name, of, shape, numbers)

    steps = {
        "cap": ([("Div", ["", "cap"]), ("Tanh", [""]), ("Mul", ["", "cap"])],
                [constant("cap", 2.5)]),
        "bias": ([("Add", ["", "bias"])],
                 [constant("bias", *rng.normal(size=3 * 5), shape=(1, 1, 3, 5))]),
        "mask": ([("Where", ["visible", "", "blocked"])],
                 [constant("visible", *(rng.random(3 * 5) < 0.6), shape=(3, 5),
                           of=TensorProto.BOOL), constant("blocked", -np.inf)]),
        "scale": ([("Mul", ["", "factor"])], [constant("factor", 0.75)]),
    }
    nodes, constants, last = [], [], "given"
    for name in names:
        for operator, inputs in steps[name][0]:
            output = f"output{len(nodes)}"
            nodes.append(helper.make_node(operator, [each or last for each in inputs], [output]))
            last = output
        constants += steps[name][1]
    described = [helper.make_tensor_value_info(name, element, None) for name in ("given", last)]
    return helper.make_graph(nodes, "modifier", described[:1], described[1:], constants)


def flex_case(seed):
    """Inputs and attributes of one node."""
    rng = np.random.default_rng(seed)

    def chance(probability):
        return bool(rng.random() < probability)

    dtype = np.dtype([np.float32, np.float64, np.float32, np.float16, BFLOAT16][seed % 5])
    batch, kv_heads, group = (int(n) for n in rng.integers(1, 4, 3))
    size, v_size = (int(n) for n in rng.integers(1, 25, 2))
    inputs = [rng.normal(size=shape).astype(dtype) for shape in (
        (batch, kv_heads * group, 3, size), (batch, kv_heads, 5, size),
        (batch, kv_heads, 5, v_size))]
    attributes = {}
    if dtype == np.float64 or chance(0.4):  # the reference takes the root in float32: squares
        attributes["scale"] = float(rng.integers(10, 60) / 64) ** 2
    element = TensorProto.DOUBLE if dtype == np.float64 else TensorProto.FLOAT
    if chance(0.3):
        element = attributes["softmax_precision"] = TensorProto.DOUBLE
    if chance(0.7):
        names = [name for name in ("cap", "bias", "mask") if chance(0.6)] or ["bias"]
        attributes["score_mod"] = modifier(rng, names, element)
    if chance(0.5):
        attributes["prob_mod"] = modifier(rng, ["scale"], element)
    return inputs, attributes


def run(inputs, attributes, new_ops=None):
    proto, given = model_of(PREVIEW, "FlexAttention", inputs, ["Y"], attributes, 26)
    return ReferenceEvaluator(proto, new_ops=new_ops).run(None, given)[0]


def as_function(graph):
    evaluator = ReferenceEvaluator(graph, opsets={"": 26})
    return lambda array: evaluator.run(None, {"given": array})[0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of onnx's reference
@pytest.mark.parametrize("seed", range(COUNT_OF_NODES))
def test_flex_attention_is_the_references(seed):
    inputs, attributes = flex_case(seed)
    ours = run(inputs, attributes, compat.new_ops())
    functions = {name: as_function(value) if name.endswith("_mod") else value
                 for name, value in attributes.items()}
    assert ours.tobytes() == compat.flex_attention(*inputs, **functions).tobytes()
    theirs = run(in_float32(inputs), attributes)
    theirs = np.where(np.isnan(theirs), 0, theirs)  # of queries that see no key
    assert_same(ours, theirs, inputs[0].dtype)


def test_cases_cover_every_feature():
    cases = [attributes for _, attributes in map(flex_case, range(300))]
    for name in ("score_mod", "prob_mod", "scale", "softmax_precision"):
        assert sum(name in attributes for attributes in cases) > 60


@pytest.mark.parametrize("precision", TYPES)
def test_functions_get_the_precision(precision):
    found = []

    def seen(array):
        found.append(array.dtype)
        return array

    x = np.ones((1, 1, 2, 4), BFLOAT16)
    compat.flex_attention(x, x, x, score_mod=seen, prob_mod=seen, softmax_precision=precision)
    assert found == [np.dtype(TYPES[precision])] * 2


def test_onnx_runtime_does_not_know_it():
    x = np.ones((1, 1, 2, 4), np.float32)
    with pytest.raises(Exception, match="FlexAttention"):
        by_runtime(PREVIEW, "FlexAttention", [x, x, x], ["Y"], {}, 26)
