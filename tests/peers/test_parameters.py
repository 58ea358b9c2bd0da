"""Every layout against its framework's own attention layer with random weights: outputs, and a
round trip to the very bits.

Tolerances are relative to the largest entry, as in test_compat_pytorch.py.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from configurations import COUNT
from transformers import masking_utils
from transformers.models.bart.modeling_bart import BartAttention
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.vit.modeling_vit import ViTAttention
from transformers.models.whisper.modeling_whisper import WhisperAttention

import mha

TOLERANCE = 2e-6
LAYERS = 4  # of a config

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own


class Case:
    """Random sizes, and what a framework's layer gives."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.seed = seed
        self.kv_heads = int(self.rng.integers(1, 4))
        self.heads = self.kv_heads * int(self.rng.integers(1, 4))
        self.head_dim = 2 * int(self.rng.integers(1, 9))
        self.width = self.heads * self.head_dim  # where heads divide the width
        self.free_width = self.heads * int(self.rng.integers(1, 20))
        self.batch, self.length = (int(size) for size in self.rng.integers(1, 14, 2))
        self.index = int(self.rng.integers(0, LAYERS))
        self.bias = bool(self.rng.integers(0, 2))

    def x(self, width, length=None):
        shape = self.batch, length or self.length, width
        return self.rng.standard_normal(shape).astype(np.float32)

    def fill(self, module):
        """The module with numbers that make scores of about 1, in evaluation mode."""
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                numbers = self.numbers(tuple(parameter.shape), name)
                parameter.copy_(torch.from_numpy(numbers))
        return module.eval()

    def numbers(self, shape, name=""):
        numbers = self.rng.standard_normal(shape)
        if len(shape) > 1 and "relative" not in name:
            numbers /= np.sqrt(max(shape[-1], shape[0]))  # at least the width of what goes in
        if "norm" in name.lower():
            numbers = 1 + numbers / 4
        return numbers.astype(np.float32)


def eager(config):
    config._attn_implementation = "eager"
    return config


def tensor(array):
    return torch.from_numpy(array)


def triangle(length):
    """What is added to the scores, (1, 1, length, length)."""
    blocked = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
    return blocked[None, None]


def check(layout, state, ours, theirs, passed_over=()):
    """The outputs agree, and the layer gives back the state to the bits."""
    given = {name: np.asarray(array.detach() if torch.is_tensor(array) else array)
             for name, array in state.items() if name not in passed_over}
    (layer, output), largest = ours, np.abs(theirs).max()
    assert output.shape == theirs.shape and output.dtype == np.float32
    np.testing.assert_allclose(output, theirs, rtol=0, atol=TOLERANCE * largest)
    back = layer.to_state(layout)
    assert back.keys() == given.keys()
    for name, array in given.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape, name
        assert back[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


def read(layout, state, **options):
    return mha.MultiHeadAttention.from_state(state, layout, **options)


# Decoders whose query, key and value are apart.

def rope(case, kind):
    """A random rope_parameters of the transformers package."""
    parameters = {"rope_theta": float(case.rng.choice([100.0, 10000.0, 1e6]))}
    if kind == "linear":
        return parameters | {"rope_type": "linear", "factor": 4.0}
    if kind == "llama3":
        return parameters | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "yarn":
        return parameters | {"rope_type": "yarn", "factor": 8.0,
                             "original_max_position_embeddings": 64, "truncate": False}
    return parameters | {"rope_type": "default"}


def of_both(case):
    return {kind: rope(case, "default") for kind in ("full_attention", "sliding_attention")}


DECODERS = {  # layout, module, name in it, what its config has, of a case
    "llama": ("llama", modeling_llama, "Llama", lambda case: {
        "attention_bias": case.bias, "rope_parameters": rope(case, case.rng.choice(
            ["default", "linear", "llama3", "yarn"]))}),
    "mistral": ("llama", modeling_mistral, "Mistral", lambda case: {
        "sliding_window": int(case.rng.integers(1, 9)) if case.bias else None}),
    "qwen2": ("llama", modeling_qwen2, "Qwen2", lambda case: {
        "use_sliding_window": case.bias, "sliding_window": 3, "max_window_layers": 2}),
    "qwen3": ("qwen3", modeling_qwen3, "Qwen3", lambda case: {
        "attention_bias": case.bias, "rms_norm_eps": 1e-3}),
    "qwen3_next": ("qwen3_next", modeling_qwen3_next, "Qwen3Next", lambda case: {
        "attention_bias": case.bias, "rms_norm_eps": 1e-3,
        "layer_types": ["full_attention"] * LAYERS,
        "rope_parameters": rope(case, "default") | {
            "partial_rotary_factor": 1.0 if case.head_dim % 8 else 0.25}}),
    "gemma2": ("gemma2", modeling_gemma2, "Gemma2", lambda case: {
        "query_pre_attn_scalar": 7, "sliding_window": int(case.rng.integers(1, 9)),
        "attn_logit_softcapping": 2.0 if case.bias else None}),
    "gemma3": ("gemma3", modeling_gemma3, "Gemma3", lambda case: {
        "query_pre_attn_scalar": 7, "sliding_window": int(case.rng.integers(1, 9)),
        "rms_norm_eps": 1e-3, "rope_parameters": of_both(case),
        "attn_logit_softcapping": 2.0 if case.bias else None}),  # which its layers ignore
    "olmo2": ("olmo2", modeling_olmo2, "Olmo2", lambda case: {
        "attention_bias": case.bias, "rms_norm_eps": 1e-3}),
    "gpt_oss": ("gpt_oss", modeling_gpt_oss, "GptOss", lambda case: {
        "attention_bias": case.bias, "sliding_window": int(case.rng.integers(1, 9)),
        "rope_parameters": rope(case, "yarn")}),
}


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("model", DECODERS)
def test_decoder(model, seed):
    layout, module, name, special = DECODERS[model]
    case = Case(seed)
    text = "Text" if name == "Gemma3" else ""
    settings = special(case)
    config = eager(getattr(transformers, f"{name}{text}Config")(
        hidden_size=case.free_width, num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads, head_dim=case.head_dim, num_hidden_layers=LAYERS,
        max_position_embeddings=512, **settings))
    attention = case.fill(getattr(module, f"{name}Attention")(config, case.index))
    x = case.x(case.free_width)
    positions = torch.arange(case.length)[None].expand(case.batch, -1)
    types = getattr(config, "layer_types", None)
    kind = (types[case.index],) if name == "Gemma3" else ()
    turned = getattr(module, f"{name}RotaryEmbedding")(config)(tensor(x), positions, *kind)
    slides = (types[case.index] == "sliding_attention" if types
              else getattr(config, "sliding_window", None) is not None)
    mask_of = (masking_utils.create_sliding_window_causal_mask if slides
               else masking_utils.create_causal_mask)
    mask = mask_of(config, inputs_embeds=tensor(x), attention_mask=None, past_key_values=None,
                   position_ids=positions)
    theirs = attention(tensor(x), position_embeddings=turned, attention_mask=mask)[0]
    state = attention.state_dict()
    layer = read(layout, state, config=config.to_dict(), layer_index=case.index)
    assert slides == (layer.window is not None)
    check(layout, state, (layer, layer(x, causal=True)), theirs.detach().numpy())


@pytest.mark.parametrize("model", DECODERS)
def test_whole_decoder_of_bfloat16(model):
    """A state dict of all layers, whose tensors NumPy has no type for."""
    layout, _, name, special = DECODERS[model]
    case = Case(1)
    text = "Text" if name == "Gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=LAYERS, intermediate_size=16, vocab_size=17, pad_token_id=0,
        **special(case))
    whole = case.fill(transformers.AutoModel.from_config(config)).to(torch.bfloat16)
    state = whole.state_dict(keep_vars=True)
    layers = read(layout, state, prefix="layers.{layer}.self_attn.", config=config.to_dict())
    assert len(layers) == LAYERS
    for layer, of_torch in zip(layers, whole.layers, strict=True):
        assert layer.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(
            layer.W_k.astype(np.float32), of_torch.self_attn.k_proj.weight.detach().float().T)


# The others of the transformers package: each gives (layout, state, options, x, output, call).

def bert(case):
    config = eager(transformers.BertConfig(hidden_size=case.width,
                                           num_attention_heads=case.heads))
    attention, x = case.fill(BertAttention(config)), case.x(case.width)
    theirs = attention.output.dense(attention.self(tensor(x))[0])
    return "bert", attention.state_dict(), {"config": config.to_dict()}, x, theirs, {}


def bart(case, kind=BartAttention, settings=transformers.BartConfig, layout="bart"):
    config = eager(settings(d_model=case.width, encoder_attention_heads=case.heads,
                            decoder_attention_heads=case.heads))
    attention = case.fill(kind(case.width, case.heads, config=config))
    x, memory = case.x(case.width), case.x(case.width, length=5)
    theirs = attention(tensor(x), key_value_states=tensor(memory))[0]
    return layout, attention.state_dict(), {"config": config.to_dict()}, x, theirs, {
        "key": memory}


def whisper(case):
    return bart(case, WhisperAttention, transformers.WhisperConfig, "whisper")


def gpt2(case):
    config = eager(transformers.GPT2Config(
        n_embd=case.width, n_head=case.heads, scale_attn_weights=case.bias,
        scale_attn_by_inverse_layer_idx=bool(case.rng.integers(0, 2))))
    attention, x = case.fill(GPT2Attention(config, layer_idx=case.index)), case.x(case.width)
    theirs = attention(tensor(x), attention_mask=triangle(case.length))[0]
    return "gpt2", attention.state_dict(), {
        "config": config.to_dict(), "layer_index": case.index}, x, theirs, {"causal": True}


def gpt_neox(case):
    config = eager(transformers.GPTNeoXConfig(
        hidden_size=8 * case.heads, num_attention_heads=case.heads, attention_bias=case.bias,
        rope_parameters={**rope(case, "default"), "partial_rotary_factor": 0.25}))
    attention = case.fill(modeling_gpt_neox.GPTNeoXAttention(config, layer_idx=0))
    x = case.x(8 * case.heads)
    turned = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(
        tensor(x), torch.arange(case.length)[None])
    theirs = attention(tensor(x), triangle(case.length), position_embeddings=turned)[0]
    return "gpt_neox", attention.state_dict(), {"config": config.to_dict()}, x, theirs, {
        "causal": True}


def bloom(case):
    config = eager(transformers.BloomConfig(hidden_size=case.width, n_head=case.heads))
    attention, x = case.fill(BloomAttention(config, layer_idx=0)), case.x(case.width)
    alibi = build_alibi_tensor(torch.ones(case.batch, case.length), case.heads, torch.float32)
    theirs = attention(tensor(x), torch.zeros(x.shape), alibi, triangle(case.length))[0]
    return "bloom", attention.state_dict(), {"config": config.to_dict()}, x, theirs, {
        "causal": True}


def mpt(case):
    config = eager(transformers.MptConfig(
        d_model=case.width, n_heads=case.heads, attn_config={
            "alibi_bias_max": 8 if case.bias else 5, "softmax_scale": 0.3 if case.bias else None}))
    attention, x = case.fill(MptAttention(config)), case.x(case.width)
    alibi = build_mpt_alibi_tensor(case.heads, case.length, config.attn_config.alibi_bias_max)
    blocked = torch.ones(1, 1, case.length, case.length, dtype=torch.bool).triu(1)
    theirs = attention(tensor(x), alibi, attention_mask=blocked)[0]
    return "mpt", attention.state_dict(), {"config": config.to_dict()}, x, theirs, {
        "causal": True}


def t5(case):
    config = eager(transformers.T5Config(
        d_model=case.free_width, d_kv=case.head_dim, num_heads=case.heads,
        is_decoder=case.bias, relative_attention_num_buckets=8,
        relative_attention_max_distance=11))
    attention = case.fill(T5Attention(config, has_relative_attention_bias=True, layer_idx=0))
    if not case.bias:  # a bucket that no distance has: 0 behind the query
        attention.relative_attention_bias.weight.data[4] = 0
    x = case.x(case.free_width)
    mask = triangle(case.length) if case.bias else None
    return "t5", attention.state_dict(), {"config": config.to_dict()}, x, attention(
        tensor(x), mask)[0], {"causal": case.bias}


def vit(case):
    config = eager(transformers.ViTConfig(hidden_size=case.width, qkv_bias=case.bias,
                                          num_attention_heads=case.heads))
    attention, x = case.fill(ViTAttention(config)), case.x(case.width)
    in_files = {"q_proj": "attention.query", "k_proj": "attention.key",
                "v_proj": "attention.value", "o_proj": "output.dense"}
    state = {f"{in_files[name.split('.')[0]]}.{name.split('.')[1]}": array
             for name, array in attention.state_dict().items()}
    of_module = read("vit", attention.state_dict(), config=config.to_dict())
    np.testing.assert_array_equal(of_module.W_o, attention.o_proj.weight.detach().T)
    return "vit", state, {"config": config.to_dict()}, x, attention(tensor(x))[0], {}


def torch_layer(case):
    widths = {} if case.bias else {"kdim": 5, "vdim": 7}
    attention = case.fill(torch.nn.MultiheadAttention(
        case.width, case.heads, bias=bool(case.seed % 3), batch_first=True, **widths))
    x = case.x(case.width)
    memory = case.x(widths.get("kdim", case.width), 4), case.x(widths.get("vdim", case.width), 4)
    theirs = attention(tensor(x), *map(tensor, memory))[0]
    return "pytorch", attention.state_dict(), {"num_heads": case.heads}, x, theirs, {
        "key": memory[0], "value": memory[1]}


OTHERS = [bert, bart, whisper, gpt2, gpt_neox, bloom, mpt, t5, vit, torch_layer]


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("family", OTHERS)
def test_of_torch(family, seed):
    layout, state, options, x, theirs, call = family(Case(seed))
    layer = read(layout, state, **options)
    check(layout, state, (layer, layer(x, **call)), theirs.detach().numpy(),
          passed_over=("output.LayerNorm.weight", "output.LayerNorm.bias"))


# Keras, Flax, ONNX Runtime

@pytest.fixture(scope="module")
def keras():
    import os
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras
    return keras


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("grouped", [False, True])
def test_keras(keras, grouped, seed):
    case = Case(seed)
    if grouped:
        layer = keras.layers.GroupQueryAttention(case.head_dim, case.heads, case.kv_heads,
                                                 use_bias=case.bias)
    else:
        layer = keras.layers.MultiHeadAttention(
            case.heads, case.head_dim, value_dim=int(case.rng.integers(1, 9)),
            use_bias=case.bias, output_shape=int(case.rng.integers(1, 9)))
    x = case.x(case.free_width)
    key, value = (case.x(size, 4) for size in (int(case.rng.integers(1, 9)), 6))
    layer(x, value, key)
    layer.set_weights([case.numbers(weight.shape) for weight in layer.weights])
    state = {weight.path.split("/", 1)[1]: keras.ops.convert_to_numpy(weight)
             for weight in layer.weights}
    theirs = keras.ops.convert_to_numpy(layer(x, value, key))
    ours = read("keras", state, config=layer.get_config())
    check("keras", state, (ours, ours(x, key, value)), theirs)


def flat(tree, before=""):
    return {full: array for name, value in tree.items() for full, array in (
        flat(value, f"{before}{name}.") if isinstance(value, dict)
        else {f"{before}{name}": np.asarray(value)}).items()}


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_flax(kind, seed):
    import jax
    from flax import linen, nnx
    case = Case(seed)
    case.batch, case.length = 2, 5  # few shapes, since JAX compiles for each
    case.heads, case.width, case.free_width, out = case.rng.choice(
        [[1, 6, 5, 7], [2, 12, 10, 7], [3, 12, 10, 12], [4, 12, 5, 12]]).tolist()
    x = case.x(case.free_width)
    options = {"use_bias": case.bias, "out_features": out, "precision": "highest"}
    if kind == "linen":
        module = linen.MultiHeadDotProductAttention(
            num_heads=case.heads, qkv_features=case.width, **options)
        tree = jax.tree.map(lambda leaf: case.numbers(leaf.shape),
                            jax.eval_shape(module.init, jax.random.PRNGKey(0), x))
        theirs = module.apply(tree, x)
        layer = read("flax", tree, prefix="params.")
        tree = tree["params"]
    else:
        module = nnx.MultiHeadAttention(
            case.heads, case.free_width, case.width, decode=False, rngs=nnx.Rngs(0), **options)
        tree = jax.tree.map(lambda leaf: case.numbers(leaf.shape),
                            nnx.to_pure_dict(nnx.state(module, nnx.Param)))
        nnx.update(module, tree)
        theirs = module(x)
        layer = read("flax", nnx.state(module, nnx.Param))
    output, back = layer(x), flat(layer.to_state("flax"))
    theirs = np.asarray(theirs)
    assert output.shape == theirs.shape
    np.testing.assert_allclose(output, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())
    assert {name: array.tobytes() for name, array in back.items()} == {
        name: array.tobytes() for name, array in flat(tree).items()}


@pytest.mark.parametrize("seed", range(COUNT))
def test_onnx(seed):
    import onnx
    import onnxruntime as runtime
    from onnx import TensorProto, helper, numpy_helper
    case = Case(seed)
    x, width = case.x(case.free_width), case.width
    state = {"weights": case.numbers((case.free_width, 3 * width)),
             "bias": case.numbers((3 * width,)),
             "output_weights": case.numbers((width, 9)), "output_bias": case.numbers((9,))}
    causal = int(case.bias)
    nodes = [
        helper.make_node("Attention", ["x", "weights", "bias"], ["heads"], domain="com.microsoft",
                         num_heads=case.heads, unidirectional=causal),
        helper.make_node("MatMul", ["heads", "output_weights"], ["product"]),
        helper.make_node("Add", ["product", "output_bias"], ["y"])]
    graph = helper.make_graph(
        nodes, "attention",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in state.items()])
    model = helper.make_model(graph, ir_version=9, opset_imports=[
        helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)])
    session = runtime.InferenceSession(model.SerializeToString(),
                                       providers=["CPUExecutionProvider"])
    theirs = session.run(None, {"x": x})[0]
    assert onnx.__version__
    layer = read("onnx", {array.name: numpy_helper.to_array(array)
                          for array in model.graph.initializer}, num_heads=case.heads)
    check("onnx", state, (layer, layer(x, causal=bool(causal))), theirs)
