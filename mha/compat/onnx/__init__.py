"""ONNX's attention operators by their own names, on NumPy arrays.

    attention(Q, K, V, ...)                   Attention of ai.onnx, opsets 23 to 25
    rotary_embedding(X, cos_cache, ...)       RotaryEmbedding of ai.onnx, opset 23 on
    tensor_scatter(past_cache, update, ...)   TensorScatter of ai.onnx, opset 24
    flex_attention(Q, K, V, ...)              FlexAttention of ai.onnx.preview, version 1
    microsoft.attention(...)                  Attention of com.microsoft
    microsoft.multi_head_attention(...)       MultiHeadAttention of com.microsoft
    microsoft.group_query_attention(...)      GroupQueryAttention of com.microsoft
    microsoft.decoder_masked_multi_head_attention(...)
                                              DecoderMaskedMultiHeadAttention of com.microsoft
    microsoft.rotary_embedding(...)           RotaryEmbedding of com.microsoft
    new_ops()                                 all of them for onnx.reference.ReferenceEvaluator

Inputs are arguments in the operator's order, attributes are keywords, optional inputs may be None,
and flags may be bools. Only `new_ops` imports onnx.

Where this differs from the operators on purpose: halves are computed in float32 and rounded once,
so that softmax_precision can only add to it; NaN or infinity behind a mask never reaches the
output; errors are ValueError and TypeError.
"""

from mha.compat.onnx import microsoft
from mha.compat.onnx._evaluator import new_ops
from mha.compat.onnx._preview import flex_attention
from mha.compat.onnx._standard import AttentionOutputs, attention, rotary_embedding, tensor_scatter

__all__ = ["AttentionOutputs", "attention", "flex_attention", "microsoft", "new_ops",
           "rotary_embedding", "tensor_scatter"]
