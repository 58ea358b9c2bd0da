"""ONNX Runtime: its own MultiHeadAttention and Attention operators (com.microsoft)."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

ELEMENT = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE, "bool": TensorProto.BOOL,
           "int32": TensorProto.INT32}


def session(nodes, inputs, constants, outputs, element, threads):
    graph = helper.make_graph(
        nodes, "work",
        [helper.make_tensor_value_info(name, ELEMENT[str(array.dtype)], array.shape)
         for name, array in inputs.items()],
        [helper.make_tensor_value_info(name, element, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()])
    model = helper.make_model(graph, ir_version=10, opset_imports=[
        helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    made = onnxruntime.InferenceSession(model.SerializeToString(), options,
                                        providers=["CPUExecutionProvider"])
    feed = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array)
            for name, array in inputs.items()}
    return lambda: made.run_with_ort_values(list(outputs), feed)


def prepare_attention(work, arrays, threads):
    heads = work.shape[1]
    element = ELEMENT[work.dtype]
    if work.weights or work.dtype == "float64":  # the fused operator has neither
        nodes = [helper.make_node("Mul", ["query", "scale"], ["scaled"]),
                 helper.make_node("Transpose", ["key"], ["turned"], perm=[0, 1, 3, 2]),
                 helper.make_node("MatMul", ["scaled", "turned"], ["scores"]),
                 helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
                 helper.make_node("MatMul", ["weights", "value"], ["output"])]
        constants = {"scale": np.array(work.shape[-1] ** -0.5, work.dtype)}
        outputs = ["output", "weights"] if work.weights else ["output"]
        return {"operators": session(nodes, arrays, constants, outputs, element, threads)}
    # (batch, heads, len, head_dim) -> (batch, len, heads * head_dim), as the operator wants them.
    inputs = {name: np.ascontiguousarray(arrays[name].swapaxes(1, 2)).reshape(
        work.shape[0], arrays[name].shape[2], -1) for name in ("query", "key", "value")}
    names = ["query", "key", "value", "", "", ""]
    if work.padding:
        inputs["padding"] = arrays["mask"][:, 0, 0].astype(np.int32)
        names[4] = "padding"
    if work.bias:
        inputs["bias"] = arrays["bias"]
        names[5] = "bias"
    while not names[-1]:
        names.pop()
    nodes = [helper.make_node("MultiHeadAttention", names, ["output"], domain="com.microsoft",
                              num_heads=heads, unidirectional=int(work.causal))]
    return {"MultiHeadAttention": session(nodes, inputs, {}, ["output"], element, threads)}


def prepare_layer(work, arrays, threads):
    width, heads = work.shape[2:]
    inputs = {name: arrays[name] for name in ("x", "memory") if name in arrays}
    memory = "memory" if "memory" in arrays else "x"
    weights = {name: arrays[name] for name in ("W_q", "W_k", "W_v", "W_o")}
    nodes = [helper.make_node("MatMul", ["x", "W_q"], ["query"]),
             helper.make_node("MatMul", [memory, "W_k"], ["key"]),
             helper.make_node("MatMul", [memory, "W_v"], ["value"]),
             helper.make_node("MultiHeadAttention", ["query", "key", "value"], ["merged"],
                              domain="com.microsoft", num_heads=heads,
                              unidirectional=int(work.causal)),
             helper.make_node("MatMul", ["merged", "W_o"], ["output"])]
    element = ELEMENT[work.dtype]
    calls = {"MatMul + MultiHeadAttention": session(nodes, inputs, weights, ["output"], element,
                                                    threads)}
    if memory == "x":
        constants = {"joined": np.concatenate([arrays[n] for n in ("W_q", "W_k", "W_v")], 1),
                     "none": np.zeros(3 * width, np.float32), "W_o": arrays["W_o"]}
        nodes = [helper.make_node("Attention", ["x", "joined", "none"], ["merged"],
                                  domain="com.microsoft", num_heads=heads,
                                  unidirectional=int(work.causal)),
                 helper.make_node("MatMul", ["merged", "W_o"], ["output"])]
        calls["Attention"] = session(nodes, inputs, constants, ["output"], element, threads)
    return calls


def prepare(work, arrays, threads):
    prepared = prepare_layer if work.kind == "layer" else prepare_attention
    return prepared(work, arrays, threads)


def to_numpy(result):
    return result[0].numpy()
