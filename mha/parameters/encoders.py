"""Encoders, and encoders with decoders, as the transformers package names them."""

from __future__ import annotations

from mha.parameters.decoders import NAMES
from mha.parameters.table import EQUAL_HEADS, Layout, linear, linears

OF_BART = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
OF_BERT = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
# The other side of a model may be of another width.
CROSS = (("key_dim", "value_dim"), *EQUAL_HEADS)
OF_VIT = {"q": "attention.query", "k": "attention.key", "v": "attention.value"}

LAYOUTS = (
    Layout("bert", (linears(OF_BERT),), passed_over=("output.LayerNorm.*",),
           model_types=("bert", "roberta", "xlm-roberta", "camembert"), equal=CROSS),
    Layout("bart", (linears(OF_BART),), model_types=("bart", "mbart"), equal=CROSS),
    Layout("whisper", ({**linears({letter: OF_BART[letter] for letter in "qvo"}),
                        **linear("k", OF_BART["k"], bias=False)},), model_types=("whisper",),
           equal=CROSS),
    # Files have the first names; the modules of transformers 5, whose names changed, the others.
    Layout("vit", ({**linears(OF_VIT, bias=None), **linear("o", "output.dense")},
                   {**linears({letter: NAMES[letter] for letter in "qkv"}, bias=None),
                    **linear("o", NAMES["o"])}),
           model_types=("vit", "deit"), equal=CROSS),
)
