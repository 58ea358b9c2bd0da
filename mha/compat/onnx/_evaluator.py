"""The operators for onnx's reference evaluator: the one file here that imports onnx."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from mha.compat.onnx import microsoft
from mha.compat.onnx._preview import flex_attention
from mha.compat.onnx._standard import attention, rotary_embedding, tensor_scatter

MICROSOFT = "com.microsoft"
OPERATORS: list[tuple[str, str, Callable[..., Any]]] = [
    ("", "Attention", attention),
    ("", "RotaryEmbedding", rotary_embedding),
    ("", "TensorScatter", tensor_scatter),
    ("ai.onnx.preview", "FlexAttention", flex_attention),
    (MICROSOFT, "Attention", microsoft.attention),
    (MICROSOFT, "DecoderMaskedMultiHeadAttention", microsoft.decoder_masked_multi_head_attention),
    (MICROSOFT, "GroupQueryAttention", microsoft.group_query_attention),
    (MICROSOFT, "MultiHeadAttention", microsoft.multi_head_attention),
    (MICROSOFT, "RotaryEmbedding", microsoft.rotary_embedding),
]


def new_ops() -> list[type]:
    """Implementations by `mha` for onnx.reference.ReferenceEvaluator.

    onnx hands them to no function of the model's own: onnx.inliner.inline_local_functions(model)
    makes nodes of such functions.

    Returns
    -------
    A class for each operator: Attention, RotaryEmbedding and TensorScatter of ai.onnx,
    FlexAttention of ai.onnx.preview, and those of com.microsoft, which onnx alone has no
    implementation of.

    Raises
    ------
    ImportError: onnx is not installed.

    Source: onnx.reference.op_run.OpRun.

    >>> evaluator = onnx.reference.ReferenceEvaluator(model, new_ops=mha.compat.onnx.new_ops())
    """
    ancestor = importlib.import_module("onnx.reference.op_run").OpRun
    return [_implementation(ancestor, *operator) for operator in OPERATORS]


def _implementation(ancestor: type, domain: str, name: str, function: Callable[..., Any]) -> type:
    may_return_qk = "return_qk" in inspect.signature(function).parameters

    def run(self: Any, *inputs: Any, attributes: Any = None, **given: Any) -> tuple[Any, ...]:
        """Attributes are those that a graph among the given takes from the function around it."""
        given = {name: _as_function(value, attributes) for name, value in given.items()}
        if may_return_qk:
            given["return_qk"] = any(self.onnx_node.output[3:])
        results = function(*inputs, **given)
        outputs = results if isinstance(results, tuple) else (results,)
        return tuple(output for output in outputs if output is not None)

    members: dict[str, Any] = {"op_domain": domain, "_run": run, "__doc__": function.__doc__}
    if domain:  # else onnx takes the schema of ai.onnx's operator of the same name
        members["op_schema"] = None
    return type(name, (ancestor,), members)


def _as_function(given: Any, attributes: Any) -> Any:
    """A graph of one input and one output, which is an evaluator of its own, as a function."""
    if not hasattr(given, "input_names"):
        return given
    (name,) = given.input_names

    def output(array: Any) -> Any:
        (result,) = given.run(None, {name: array}, attributes=attributes)
        return result

    return output
