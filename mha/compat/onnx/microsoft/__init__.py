"""The operators of com.microsoft, the domain of ONNX Runtime's own."""

from mha.compat.onnx.microsoft._attention import AttentionOutputs, attention
from mha.compat.onnx.microsoft._decoder_masked_multi_head_attention import (
    DecoderMaskedMultiHeadAttentionOutputs,
    decoder_masked_multi_head_attention,
)
from mha.compat.onnx.microsoft._group_query_attention import (
    GroupQueryAttentionOutputs,
    group_query_attention,
)
from mha.compat.onnx.microsoft._multi_head_attention import (
    MultiHeadAttentionOutputs,
    multi_head_attention,
)
from mha.compat.onnx.microsoft._rotary_embedding import rotary_embedding

__all__ = [
    "AttentionOutputs",
    "DecoderMaskedMultiHeadAttentionOutputs",
    "GroupQueryAttentionOutputs",
    "MultiHeadAttentionOutputs",
    "attention",
    "decoder_masked_multi_head_attention",
    "group_query_attention",
    "multi_head_attention",
    "rotary_embedding",
]
