"""Keras' own tests of its attention layers, from the installed package, with our layers.

Where they read private names, ours have them here. `run_layer_test` asks much of a Layer of Keras;
what it asks about arrays is asked of ours.
"""

import json
import os

os.environ["KERAS_BACKEND"] = "torch"  # before the first import of keras in this process

from pathlib import Path

import keras
import numpy as np
import pytest
import upstream
from keras.src import layers

from mha.compat import keras as compat

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


class WithPrivateNames:
    _query_dense = property(lambda self: self._projections["query"])
    _key_dense = property(lambda self: self._projections["key"])
    _value_dense = property(lambda self: self._projections["value"])
    _gate_dense = property(lambda self: self._projections["gate"])
    _output_dense = property(lambda self: self._projections["attention_output"])
    _sliding_window = property(lambda self: self.sliding_window)


class MultiHeadAttention(WithPrivateNames, compat.MultiHeadAttention):
    pass


class GroupedQueryAttention(WithPrivateNames, compat.GroupQueryAttention):
    pass


class LayerTest:
    """Keras' run_layer_test, as far as it is about arrays."""

    def run_layer_test(self, layer_cls, init_kwargs, input_shape, expected_output_shape,
                       expected_num_trainable_weights, **of_keras):
        layer = layer_cls(**init_kwargs)
        config = json.loads(json.dumps(layer.get_config()))
        again = layer_cls.from_config(config)
        assert json.loads(json.dumps(again.get_config())) == config
        dtype = init_kwargs.get("dtype", "float32")
        if isinstance(input_shape, dict):
            arrays = {name.removesuffix("_shape"): np.random.random(shape)
                      for name, shape in input_shape.items()}
            layer.build(**input_shape)
            assert layer.compute_output_shape(**input_shape) == expected_output_shape
        else:
            arrays = {"inputs": [np.random.random(shape) for shape in input_shape]}
            layer.build(input_shape)
            assert layer.compute_output_shape(input_shape) == expected_output_shape
        assert layer.built and len(layer.weights) == expected_num_trainable_weights
        assert all(array.dtype == dtype for array in layer.weights)
        for training in (False, True):
            output = layer(**arrays, training=training)
            assert output.shape == expected_output_shape and output.dtype == dtype
            assert np.isfinite(output.astype(np.float64)).all()


LEFT_OUT = {
    """AttentionTest.test_return_attention_scores_with_symbolic_tensors
    AttentionTest.test_symbolic_call_does_not_leak_return_attention_scores
    MultiHeadAttentionTest.test_symbolic_return_attention_scores0
    MultiHeadAttentionTest.test_symbolic_return_attention_scores1
    GroupedQueryAttentionTest.test_symbolic_shape_with_return_attention_scores
    GroupedQueryAttentionTest.test_symbolic_shape_without_return_attention_scores""":
        "symbolic tensors, of which Keras builds models: ours compute with numbers",
    """AttentionTest.test_attention_calculate_scores_with_scale
    AttentionTest.test_attention_calculate_score_mask
    MultiHeadAttentionTest.test_compute_attention_combines_causal_and_explicit_mask
    GroupedQueryAttentionTest.test_compute_attention_combines_causal_and_explicit_mask
    MultiHeadAttentionTest.test_causal_only_skipped_for_subclass
    GroupedQueryAttentionTest.test_causal_only_skipped_for_subclass""":
        "private methods of Keras' layers: ours has one call, which never stores the scores",
    """MultiHeadAttentionTest.test_query_mask_propagation
    GroupedQueryAttentionTest.test_query_mask_propagation""":
        "the output's mask: arrays carry none",
    """MultiHeadAttentionTest.test_flash_attention_with_errors
    GroupedQueryAttentionTest.test_flash_attention_with_errors""":
        "flash_attention is ignored: weights and dropout go with our one way",
    """MultiHeadAttentionTest.test_dtype_policy_map MultiHeadAttentionTest.test_quantize_int8""":
        "Keras' int8 weights",
    """MultiHeadAttentionTest.test_lora MultiHeadAttentionTest.test_mha_constraints""":
        "they act in Keras' training alone",
}

FOUND = {}
for name in ("attention", "additive_attention", "multi_head_attention", "grouped_query_attention"):
    path = Path(keras.__file__).parent / f"src/layers/attention/{name}_test.py"
    FOUND |= upstream.cases(path.read_text("utf-8"), str(path), {"layers": upstream.Names(
        layers, Attention=compat.Attention, AdditiveAttention=compat.AdditiveAttention,
        MultiHeadAttention=MultiHeadAttention, GroupedQueryAttention=GroupedQueryAttention)},
        LayerTest)
RUN, ELSEWHERE = upstream.parameters(FOUND, LEFT_OUT)


@pytest.mark.parametrize("case", RUN)
def test_of_keras(case):
    upstream.run(case)


@pytest.mark.parametrize("case", ELSEWHERE)
def test_what_is_left_out_fails(case):
    upstream.assert_fails(case)


def test_what_is_left_out_exists():
    assert upstream.stale(FOUND, LEFT_OUT) == []
