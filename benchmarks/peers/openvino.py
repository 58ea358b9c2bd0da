"""OpenVINO, in true float32, tuned for latency."""

import numpy as np
import openvino
from openvino import opset13 as ops


def compiled(outputs, parameters, threads):
    core = openvino.Core()
    model = openvino.Model(outputs, parameters, "work")
    request = core.compile_model(model, "CPU", {
        "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False}).create_infer_request()
    return request


def as_call(request, inputs):
    tensors = [openvino.Tensor(array, shared_memory=True) for array in inputs]
    for position, tensor in enumerate(tensors):
        request.set_input_tensor(position, tensor)

    def run():
        request.infer()
        return request

    run.keeps = inputs, tensors  # the request only borrows them
    return run


def prepare_attention(work, arrays, threads):
    parameters = {name: ops.parameter(array.shape, array.dtype, name)
                  for name, array in arrays.items()}
    query, key, value = (parameters[name] for name in ("query", "key", "value"))
    if work.weights:
        scale = np.array(work.shape[-1] ** -0.5, np.float32)
        scores = ops.matmul(ops.multiply(query, scale), key, False, True)
        weights = ops.softmax(scores, -1)
        outputs = [ops.matmul(weights, value, False, False), weights]
    else:
        mask = parameters.get("mask", parameters.get("bias"))
        if mask is not None:
            outputs = [ops.scaled_dot_product_attention(query, key, value, mask)]
        else:
            outputs = [ops.scaled_dot_product_attention(query, key, value, causal=work.causal)]
    request = compiled(outputs, list(parameters.values()), threads)
    return {"": as_call(request, list(arrays.values()))}


def prepare_layer(work, arrays, threads):
    batch, length, width, heads = work.shape
    inputs = {name: arrays[name] for name in ("x", "memory") if name in arrays}
    parameters = {name: ops.parameter(array.shape, np.float32, name)
                  for name, array in inputs.items()}
    x, memory = parameters["x"], parameters.get("memory", parameters["x"])

    def split(source, name):
        projected = ops.matmul(source, ops.constant(arrays[name]), False, False)
        shaped = ops.reshape(projected, np.array([0, 0, heads, width // heads]), True)
        return ops.transpose(shaped, np.array([0, 2, 1, 3]))

    attended = ops.scaled_dot_product_attention(split(x, "W_q"), split(memory, "W_k"),
                                                split(memory, "W_v"), causal=work.causal)
    merged = ops.reshape(ops.transpose(attended, np.array([0, 2, 1, 3])),
                         np.array([batch, length, width]), False)
    output = ops.matmul(merged, ops.constant(arrays["W_o"]), False, False)
    request = compiled([output], list(parameters.values()), threads)
    return {"": as_call(request, list(inputs.values()))}


def prepare(work, arrays, threads):
    prepared = prepare_layer if work.kind == "layer" else prepare_attention
    return prepared(work, arrays, threads)


def to_numpy(request):
    return request.get_output_tensor(0).data
