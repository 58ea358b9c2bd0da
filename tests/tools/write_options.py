"""Prints docs/options.md from mha/_functions/options.py: python tests/tools/write_options.py >
docs/options.md"""

import textwrap

from mha._functions.options import ADDITIVE, ATTENTION, LAYER, OPTIONS, VARLEN, AttentionOptions

HEAD = """# The options of attention

Written from mha/_functions/options.py by
`python tests/tools/write_options.py > docs/options.md`; a test compares.

Scores are scaled, then capped, then bias, alibi and relative_bias are added, then they are masked;
then the sink counts as one more score. All conditions of visibility hold together.

`scaled_dot_product_attention` and `multi_head_attention`, in the table the functions, take all of
them, by keyword, and so do their vjp. A layer's dropout belongs to the layer and acts with
`training=True`. Additive attention has no dot products to scale. Scores of a ragged batch,
scaled_dot_product_attention_varlen, are no array.
"""

OTHERS = [
    ("`return_weights`", "functions, layer, additive",
     "returns the weights too, before dropout: (..., heads, query_len, key_len)"),
    ("`return_lse`", "functions, layer, varlen",
     "returns the log-sum-exp of each row of scores, (..., heads, query_len), behind the others"),
    ("`out`", "scaled_dot_product_attention",
     "an array of the output's shape and type, which gets it"),
    ("`head_gate`", "layer, multi_head_attention",
     "(heads,): multiplies each head's output, [0 switches it off](heads.md)"),
    ("`positions`, `key_positions`", "layer, multi_head_attention",
     "where the rows stand, for rotary embeddings"),
    ("`cache`, `append`, `lengths`, `padding`", "layer",
     "earlier keys and values: [decoding](decoding.md)"),
    ("`starts`", "layer", "where the sequences of a ragged batch start"),
    ("`training`", "layer", "whether its dropout acts"),
    ("`num_heads`, `b_q` ... `b_o`, `rotary`, `q_norm` ...", "multi_head_attention",
     "what a layer has of its own"),
]


def takers(name):
    return {"functions": True, "layer": name in LAYER or name == "rng",
            "additive": name in ADDITIVE, "varlen": name in VARLEN}


def table():
    columns = list(takers("rng"))
    yield f"| option | what it is | {' | '.join(columns)} |"
    yield "|---" * (2 + len(columns)) + "|"
    for name in ATTENTION:
        ticks = " | ".join("✓" if takes else "" for takes in takers(name).values())
        yield f"| [`{name}`](#{name}) | {OPTIONS[name].type} | {ticks} |"


def wrapped(text):
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def paragraphs():
    for name in ATTENTION:
        option = OPTIONS[name]
        default = AttentionOptions._field_defaults[name]
        taking = ", ".join(taker for taker, takes in takers(name).items() if takes)
        texts = (f"{option.type}. Default: `{default!r}`. Taken by: {taking}.", option.meaning,
                 f"Source: {option.source}.")
        yield "\n\n".join([f"## `{name}`", *map(wrapped, texts)]) + "\n"


def document():
    others = (f"| {' | '.join(row)} |" for row in [("keyword", "taken by", "what it is"),
                                                   ("---",) * 3, *OTHERS])
    return "\n".join([HEAD, *table(), "", *paragraphs(), "## What else calls take\n", *others, ""])


if __name__ == "__main__":
    print(document(), end="")
