"""Whole models as the transformers package saves them: names and prefixes in files, configs."""

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
import torch
import transformers

import mha

pytestmark = pytest.mark.filterwarnings("ignore")  # the framework's own

LAYERS = 3
SMALL = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": LAYERS,
         "vocab_size": 17, "intermediate_size": 8}
DECODER = {**SMALL, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 0}
GPT = {"hidden_size": 24, "n_head": 4, "n_layer": LAYERS, "vocab_size": 17}
BOTH = {"d_model": 24, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "vocab_size": 17,
        "encoder_attention_heads": 2, "decoder_attention_heads": 4, "pad_token_id": 0}
SIDES = [(f"{side}.layers.{{layer}}.{kind}.", f"{side}.layers", kind + ".q_proj")
         for side, kind in (("encoder", "self_attn"), ("decoder", "self_attn"),
                            ("decoder", "encoder_attn"))]
OF_DECODERS = [("layers.{layer}.self_attn.", "layers", "self_attn.q_proj")]

# layout: config, its settings, and where the layers are: prefixes, and their queries as modules
MODELS = {
    "bert": ("bert", "Bert", SMALL, [
        ("encoder.layer.{layer}.attention.", "encoder.layer", "attention.self.query")]),
    "vit": ("vit", "ViT", {**SMALL, "image_size": 8, "patch_size": 4}, [
        ("encoder.layer.{layer}.attention.", "layers", "attention.q_proj")]),
    "bart": ("bart", "Bart", BOTH, SIDES),
    "whisper": ("whisper", "Whisper", {**BOTH, "num_mel_bins": 4, "bos_token_id": 1,
                                       "eos_token_id": 2, "decoder_start_token_id": 1}, SIDES),
    "t5": ("t5", "T5", {"d_model": 24, "num_heads": 4, "d_kv": 5, "num_layers": LAYERS, "d_ff": 8,
                        "vocab_size": 17}, [
        (f"{side}.block.{{layer}}.{kind}.", f"{side}.block", kind + ".q") for side, kind in (
            ("encoder", "layer.0.SelfAttention"), ("decoder", "layer.0.SelfAttention"),
            ("decoder", "layer.1.EncDecAttention"))]),
    "gpt2": ("gpt2", "GPT2", {"n_embd": 24, "n_head": 4, "n_layer": LAYERS, "vocab_size": 17}, [
        ("h.{layer}.attn.", "h", "attn.c_attn")]),
    "gpt_neox": ("gpt_neox", "GPTNeoX", {**SMALL, "rotary_pct": 0.34}, [
        ("layers.{layer}.attention.", "layers", "attention.query_key_value")]),
    "bloom": ("bloom", "Bloom", GPT, [
        ("h.{layer}.self_attention.", "h", "self_attention.query_key_value")]),
    "mpt": ("mpt", "Mpt", {"d_model": 24, "n_heads": 4, "n_layers": LAYERS, "vocab_size": 17}, [
        ("blocks.{layer}.attn.", "blocks", "attn.Wqkv")]),
    **{model: (layout, name, DECODER, OF_DECODERS) for model, layout, name in (
        ("llama", "llama", "Llama"), ("mistral", "llama", "Mistral"), ("qwen2", "llama", "Qwen2"),
        ("qwen3", "qwen3", "Qwen3"), ("gemma2", "gemma2", "Gemma2"),
        ("gemma3", "gemma3", "Gemma3Text"), ("olmo2", "olmo2", "Olmo2"),
        ("gpt_oss", "gpt_oss", "GptOss"))},
}


@pytest.mark.parametrize(("dtype", "shard"), [(torch.float32, "5kB"), (torch.bfloat16, "1GB")],
                         ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_saved_model(model, dtype, shard, tmp_path):
    """A folder of one file or of shards, whose config says the layout."""
    layout, name, settings, places = MODELS[model]
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**settings)
    whole = transformers.AutoModel.from_config(config).to(dtype)
    whole.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "5kB")
    with mha.parameters.open(tmp_path) as state:
        for prefix, modules, query in places:
            layers = mha.MultiHeadAttention.from_state(state, prefix=prefix)
            assert len(layers) == LAYERS
            for layer, module in zip(layers, whole.get_submodule(modules), strict=True):
                weight = module.get_submodule(query).weight.detach().float().numpy()
                weight = weight if layout == "gpt2" else weight.T
                if layout in ("gpt_neox", "bloom"):
                    weight = weight.reshape(24, 4, 3, -1)[:, :, 0].reshape(24, -1)
                wanted = weight[:, :layer.W_q.shape[1]]
                assert str(layer.dtype) in str(dtype)
                np.testing.assert_array_equal(layer.W_q.astype(np.float32), wanted)
                has_table = layout == "t5" and "SelfAttention" in prefix
                assert (layer.relative_bias is not None) == has_table


def test_variables_of_keras_are_taken_as_they_are():
    import keras
    layer = keras.layers.MultiHeadAttention(2, 3, name="attention")
    x = np.ones((1, 4, 5), np.float32)
    theirs = keras.ops.convert_to_numpy(layer(x, x))
    ours = mha.MultiHeadAttention.from_state({weight.path: weight for weight in layer.weights},
                                             "keras", prefix="attention/")
    np.testing.assert_allclose(ours(x), theirs, rtol=0, atol=1e-6)
