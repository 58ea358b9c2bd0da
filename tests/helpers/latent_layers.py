"""Layers of latent attention, small ones, and what the reference takes of them."""

import numpy as np

import mha

SIZES = {"kv_rank": 32, "nope_dim": 16, "rope_dim": 8, "value_head_dim": 12}
KINDS = {
    "plain": {},
    "query_rank": {"query_rank": 24, "rotary": mha.Rotary(8, layout="interleaved"),
                   "use_bias": True},
    "rotary": {"rotary": mha.Rotary(4), "scale": 0.3, "use_bias": True, "norm_eps": 1e-3},
}


def latent_layer(kind="query_rank", dtype=np.float32, embed_dim=40, num_heads=4, **more):
    """Norms are near 1, biases are not zeros."""
    layer = mha.MultiHeadLatentAttention(embed_dim, num_heads, dtype=dtype, rng=0,
                                         **{**SIZES, **KINDS[kind], **more})
    rng = np.random.default_rng(1)
    for name, array in layer.parameters().items():
        if name[0] == "b" or name.endswith("_norm"):
            array[...] = rng.standard_normal(array.shape) / 3 + name.endswith("_norm")
    return layer


def as_function(layer):
    """Arguments of mha.reference.multi_head_latent_attention."""
    names = ("num_heads", "rotary", "norm_eps", "scale")
    return {**layer.parameters(), **{name: getattr(layer, name) for name in names}}


def rows(*shape, dtype=np.float32, seed=2):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def in_parts(layer, x, cuts, cache, **options):
    """The output of calls with a cache, cut so."""
    ends = [*cuts, x.shape[1]]
    return np.concatenate([layer(x[:, a:b], cache=cache, **options)
                           for a, b in zip([0, *cuts], ends, strict=True)], axis=1)
