"""One node as a model, for each of the three that run it: `mha`, ONNX Runtime and onnx's reference.

Tolerances are those of test_compat_pytorch.py, relative to the largest entry. Halves are compared
with the peer's float32 on the same numbers, to which ours are the nearest: the peers round every
step to halves themselves.
"""

import inspect

import ml_dtypes
import numpy as np
import onnxruntime
from configurations import COUNT
from onnx import helper
from onnx.reference import ReferenceEvaluator

from mha.compat import onnx as compat
from mha.compat.onnx import microsoft

COUNT_OF_NODES = max(COUNT, 300)  # a node takes a few milliseconds
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TOLERANCE = {np.dtype(np.float32): 2e-6, np.dtype(np.float64): 1e-13}
HALF_ULP = {np.dtype(np.float16): 2.0**-11, BFLOAT16: 2.0**-8}  # relative
SMALLEST = {np.dtype(np.float16): 2.0**-25, BFLOAT16: 2.0**-134}  # halves of the least number
MICROSOFT = "com.microsoft"
PREVIEW = "ai.onnx.preview"
FUNCTIONS = {("", "Attention"): compat.attention, ("", "RotaryEmbedding"): compat.rotary_embedding,
             ("", "TensorScatter"): compat.tensor_scatter,
             (PREVIEW, "FlexAttention"): compat.flex_attention,
             (MICROSOFT, "Attention"): microsoft.attention,
             (MICROSOFT, "DecoderMaskedMultiHeadAttention"):
                 microsoft.decoder_masked_multi_head_attention,
             (MICROSOFT, "GroupQueryAttention"): microsoft.group_query_attention,
             (MICROSOFT, "MultiHeadAttention"): microsoft.multi_head_attention,
             (MICROSOFT, "RotaryEmbedding"): microsoft.rotary_embedding}


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
    if domain == PREVIEW:  # which ONNX Runtime does not know
        opsets.append(helper.make_opsetid(PREVIEW, 1))
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
    function = FUNCTIONS[domain, operator]
    may_return_qk = "return_qk" in inspect.signature(function).parameters
    returns_qk = {"return_qk": True} if outputs[3:] and may_return_qk else {}
    results = function(*inputs, **attributes, **returns_qk)
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
