"""The layouts: what frameworks and models call their arrays, and how these are arranged.

Here those of frameworks; those of models are in _decoders.py, _fused.py, _encoders.py and _t5.py,
named as the transformers package names a model that has them.
"""

from __future__ import annotations

from mha.parameters import _config as config
from mha.parameters import _decoders, _encoders, _fused, _latent, _t5
from mha.parameters._table import AXES, BESIDE, EQUAL_HEADS, Form, Layout, Stored, fused, linear

# The attention layers of frameworks themselves: PyTorch, Keras, Flax, ONNX Runtime.

APPENDED = "mha.compat.pytorch.MultiheadAttention, which appends a learned key and value"
SEPARATE: Form = {f"{letter}_proj_weight": Stored((f"W_{letter}",), AXES[f"W_{letter}"][::-1])
                  for letter in "qkv"}
PYTORCH: tuple[Form, ...] = tuple(
    {**weights, "in_proj_bias": Stored(("b_q", "b_k", "b_v"), (BESIDE,), optional=True),
     **linear("o", "out_proj", bias=None)}
    for weights in ({"in_proj_weight": fused("", BESIDE)[".weight"]}, SEPARATE))

NO_RMS = "a layer without normalize_qk: Flax's norms subtract the mean, which mha's do not"


def kernels(separator: str, output: str) -> Form:
    """Kernels (in, heads, head_dim) and, of the output, (heads, head_dim, out)."""
    names = {"q": "query", "k": "key", "v": "value", "o": output}
    return {f"{name}{separator}{kind}": Stored(
                (f"{parameter}_{letter}",),
                tuple(" ".join(AXES[f"{parameter}_{letter}"]).split()), kind == "bias")
            for letter, name in names.items()
            for kind, parameter in (("kernel", "W"), ("bias", "b"))}


OF_FRAMEWORKS = (
    Layout("pytorch", PYTORCH, unsupported={"bias_k": APPENDED, "bias_v": APPENDED},
           equal=EQUAL_HEADS),
    Layout("keras", (kernels("/", "attention_output"),), equal=()),
    Layout("flax", (kernels(".", "out"),), nested=True, equal=(),
           unsupported={"query_ln.scale": NO_RMS, "key_ln.scale": NO_RMS}),
    # The inputs of the operator Attention of com.microsoft, and of the MatMul and Add behind it.
    Layout("onnx", ({"weights": Stored(("W_q", "W_k", "W_v"), ("query_dim", BESIDE)),
                     "bias": Stored(("b_q", "b_k", "b_v"), (BESIDE,), optional=True),
                     "output_weights": Stored(("W_o",), AXES["W_o"]),
                     "output_bias": Stored(("b_o",), AXES["b_o"], optional=True)},),
           {"scale": config.given_only}, partial_biases=("qkv", "o")),
)


LAYOUTS = {layout.name: layout for layout in (
    *OF_FRAMEWORKS, *_decoders.LAYOUTS, *_fused.LAYOUTS, *_encoders.LAYOUTS, *_t5.LAYOUTS,
    *_latent.LAYOUTS)}
OF_MODELS = {model: layout for layout in LAYOUTS.values() for model in layout.model_types}
