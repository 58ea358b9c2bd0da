"""Prints docs/options.md from mha/options.py: python tests/write_options.py > docs/options.md"""

from mha.options import ADDITIVE, ATTENTION, LAYER, OPTIONS, VARLEN, AttentionOptions

HEAD = """# The options of attention

Written from mha/options.py by `python tests/write_options.py > docs/options.md`; a test compares.

`scaled_dot_product_attention` and `multi_head_attention` take all of them, by keyword, and so do
their vjp. A layer's call takes those marked "layer": its dropout belongs to the layer and acts with
`training=True`. Additive attention has no dot products to scale: it takes those marked "additive".
Scores of a ragged batch are no array: scaled_dot_product_attention_varlen takes those marked
"varlen".
Scores are scaled, then capped, then bias, alibi and relative_bias are added, then they are masked;
then the sink joins. All conditions of visibility hold together.
"""


def paragraphs():
    for name in ATTENTION:
        option = OPTIONS[name]
        default = AttentionOptions._field_defaults[name]
        takers = ["functions"] + ["layer"] * (name in LAYER or name == "rng")
        takers += ["additive"] * (name in ADDITIVE)
        takers += ["varlen"] * (name in VARLEN)
        yield (f"## `{name}`\n\n"
               f"{option.type}. Default: `{default!r}`. Taken by: {', '.join(takers)}.\n\n"
               f"{option.meaning}\n\nSource: {option.source}.\n")


def document():
    return "\n".join([HEAD, *paragraphs()])


if __name__ == "__main__":
    print(document(), end="")
