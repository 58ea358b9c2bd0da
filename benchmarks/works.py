"""The work that is measured, and what each piece has to show: one line a piece."""

from dataclasses import dataclass

import numpy as np

# module in peers/ -> name in tables and charts
PEERS = {"numpy": "NumPy", "pytorch": "PyTorch", "onnxruntime": "ONNX Runtime", "jax": "JAX",
         "openvino": "OpenVINO"}


# Whether query q sees key k, as flex_attention asks; indices are arrays or tensors.
MASK_MODS = {
    "documents of 512": lambda b, h, q, k: q // 512 == k // 512,
    "causal documents of 512": lambda b, h, q, k: (q // 512 == k // 512) & (q >= k),
    "window of 256": lambda b, h, q, k: (q >= k) & (q - k < 256),
    "prefix of 1,000": lambda b, h, q, k: (q >= k) | (k < 1000),
}

# how inputs are stored -> which of them
LAYOUTS = {"": (), "positions first": ("query", "key", "value"), "columns first": ("key", "value")}


def stored(array, layout):
    """The numbers of (batch, heads, len, columns) in another order of memory: (batch, len, heads,
    columns), as projections give them, or (batch, heads, columns, len), as some caches are."""
    first, second = (1, 2) if layout == "positions first" else (2, 3)
    return np.ascontiguousarray(array.swapaxes(first, second)).swapaxes(first, second)


@dataclass(frozen=True)
class Work:
    """Attention (batch, heads, query_len, key_len, head_dim), a layer (batch, length, width,
    heads), a step of training the language model of the examples (batch, length, width, heads,
    blocks), or a token through the layers of a decoder, the last of so many positions (batch,
    positions, width, heads, layers), or one projection (rows, in, out), or attention to latents
    (heads, positions, kv_rank, rope_dim), or what peers/quantised.py makes of a shape; its options,
    and the least ratios wanted: peer name -> peer's time / ours. The
    name "best" stands for the fastest of all peers but NumPy."""

    name: str
    kind: str  # "attention", "layer", "model", "decoder", "linear", or one of peers/quantised.py
    shape: tuple
    wanted: dict
    dtype: str = "float32"
    causal: bool = False
    padding: bool = False  # a mask (batch, 1, 1, key_len)
    mask_mod: str = ""  # a name out of MASK_MODS: a mask (query_len, key_len)
    bias: bool = False  # (1, heads, query_len, key_len)
    dense_mask: bool = False  # (1, 1, query_len, key_len), half of it hidden at random
    layout: str = ""  # of attention's inputs: see LAYOUTS
    value_dim: int = 0  # 0: head_dim
    kv_heads: int = 0  # 0: as many as heads
    weights: bool = False  # returned too
    transposed: bool = False  # a projection's weight lies as (out, in), as PyTorch stores it
    key_len: int = 0  # of a layer: 0 is self-attention
    gradients: bool = False  # forward and backward, all gradients
    dropout: float = 0.0
    reads: tuple = ()  # of the read rate: the least fractions wanted at 1 and at more threads;
    # empty where multiply-adds are the bound
    of_peak: float = 0  # of the FMA rate: the least fraction wanted
    peers: tuple = tuple(PEERS)

    @property
    def of_values(self):
        """Columns of a value."""
        return self.value_dim or self.shape[-1]

    @property
    def operations(self):
        """Floating-point operations that the figure needs (half the scores where causal). On the
        backward pass each product of projections has two, the two of attention have five."""
        visible = 0.5 if self.causal else 1
        attention_factor, projection_factor = (3.5, 3) if self.gradients else (1, 1)
        if self.kind == "attention":
            batch, heads, query_len, key_len, head_dim = self.shape
            columns = head_dim + self.of_values
            forward = 2 * batch * heads * query_len * key_len * columns * visible
            return forward * attention_factor
        batch, length, width, _, *blocks = self.shape
        if self.kind == "decoder":
            return blocks[0] * 2 * batch * width * (4 * width + 2 * length)
        if self.kind == "model":
            products = 12 * width**2  # a block's weights: four of attention, eight of feed-forward
            attention = 4 * 0.5 * batch * length * length * width
            return blocks[0] * (6 * batch * length * products + 3.5 * attention)
        key_len = self.key_len or length
        projections = 2 * batch * (2 * length + 2 * key_len) * width * width
        attention = 4 * batch * length * key_len * width * visible
        return projections * projection_factor + attention * attention_factor

    @property
    def bytes_read(self):
        """Keys and values, or the weights of a layer, or both of a decoder's layers."""
        size = np.dtype(self.dtype).itemsize
        if self.kind == "decoder":
            batch, positions, width, _, layers = self.shape
            return layers * width * (4 * width + 2 * batch * positions) * size
        if self.kind == "attention":
            batch, heads, _, key_len, head_dim = self.shape
            columns = head_dim + self.of_values
            return batch * (self.kv_heads or heads) * key_len * columns * size
        return 4 * self.shape[2] ** 2 * size

    def arrays(self):
        """The inputs, the same in every process."""
        random = np.random.default_rng(0)

        if self.kind in ("model", "row", "rows", "cache", "sequences", "latent"):
            # which make their own
            return {}

        def normal(*shape):
            return random.standard_normal(shape).astype(self.dtype)

        if self.kind == "linear":
            rows, width, out = self.shape
            weight = normal(out, width).T if self.transposed else normal(width, out)
            arrays = {"x": normal(rows, width), "weight": weight}
            return arrays | ({"grad_output": normal(rows, out)} if self.gradients else {})

        if self.kind == "decoder":
            batch, positions, width, heads, layers = self.shape
            of_heads = (layers, batch, heads, positions - 1, width // heads)
            weights = (layers, width, width)
            scale = np.dtype(self.dtype).type(width**-0.5)
            return {"x": normal(batch, 1, width), "keys": normal(*of_heads),
                    "values": normal(*of_heads),
                    **{name: normal(*weights) * scale for name in ("W_q", "W_k", "W_v", "W_o")}}

        if self.kind == "layer":
            batch, length, width, _ = self.shape
            scale = width**-0.5
            arrays = {"x": normal(batch, length, width)}
            for name in ("W_q", "W_k", "W_v", "W_o"):
                arrays[name] = normal(width, width) * np.dtype(self.dtype).type(scale)
            if self.key_len:
                arrays["memory"] = normal(batch, self.key_len, width)
            if self.gradients:
                arrays["grad_output"] = normal(batch, length, width)
            return arrays
        batch, heads, query_len, key_len, head_dim = self.shape
        kv_heads = self.kv_heads or heads
        arrays = {
            "query": normal(batch, heads, query_len, head_dim),
            "key": normal(batch, kv_heads, key_len, head_dim),
            "value": normal(batch, kv_heads, key_len, self.of_values),
        }
        if self.padding:
            lengths = random.integers(key_len // 2, key_len + 1, batch)
            arrays["mask"] = np.arange(key_len) < lengths[:, None, None, None]
        if self.mask_mod:
            arrays["mask"] = MASK_MODS[self.mask_mod](0, 0, *np.ogrid[:query_len, :key_len])
        if self.dense_mask:
            arrays["mask"] = random.random((1, 1, query_len, key_len)) < 0.5
            arrays["mask"][..., 0] = True  # libraries differ in what no key gives
        if self.gradients:
            arrays["grad_output"] = normal(batch, heads, query_len, self.of_values)
        if self.bias:
            arrays["bias"] = normal(1, heads, query_len, key_len)
        for name in LAYOUTS[self.layout]:
            arrays[name] = stored(arrays[name], self.layout)
        return arrays


def attention(batch, heads, length, head_dim, wanted, name="", query_len=0, **options):
    label = name or f"attention {batch}x{heads}x{length}x{head_dim}"
    shape = (batch, heads, query_len or length, length, head_dim)
    return Work(label, "attention", shape, wanted, **options)


def layer(batch, length, width, heads, wanted, name="", **options):
    label = name or f"layer ({batch}, {length}, {width}, {heads} heads)"
    return Work(label, "layer", (batch, length, width, heads), wanted, **options)


def model_step(ratio, dropout):
    """A step of training by examples/train_language_model.py."""
    name = "training step of a language model" + (", dropout" if dropout else "")
    return Work(name, "model", (16, 128, 128, 4, 4), {"pytorch": ratio}, dropout=dropout,
                peers=("pytorch",))


def decoder(batch, positions, width, heads, layers, ratio):
    name = f"token {positions} of a decoder ({batch}, {width}, {heads} heads, {layers} layers)"
    return Work(name, "decoder", (batch, positions, width, heads, layers), {"pytorch": ratio},
                peers=("pytorch", "numpy"), reads=(0.85, 0.70))


def gradients(shape, ratio, dropout=0.0, causal=False):
    """Attention forward and backward."""
    sizes = "x".join(str(size) for size in shape)
    name = f"gradients {'causal ' if causal else ''}{sizes}" + (", dropout" if dropout else "")
    options = {"gradients": True, "dropout": dropout, "causal": causal, "peers": ("pytorch",)}
    return attention(*shape, {"pytorch": ratio}, name, **options)


def with_torch(ratio, numpy=1.5):
    return {"pytorch": ratio, "numpy": numpy}


def with_best(ratio, numpy=1.5):
    return {"best": ratio, "numpy": numpy}


WORKS = [
    attention(8, 8, 128, 64, with_torch(1.3)),
    attention(8, 12, 128, 64, with_torch(1.3)),
    attention(1, 12, 512, 64, with_torch(1.3)),
    attention(1, 12, 1024, 32, with_torch(1.3)),
    attention(1, 8, 4096, 64, with_torch(1.3), of_peak=0.75),
    attention(1, 8, 4096, 128, {"numpy": 1.5}, of_peak=0.70),
    attention(1, 12, 1024, 64, with_torch(1.8, 5), "causal 1x12x1024x64", causal=True),
    attention(1, 12, 300, 64, with_torch(1.8, 5), "causal 1x12x300x64", causal=True),
    attention(1, 8, 2048, 128, with_torch(1.4, 5), "causal 1x8x2048x128", causal=True),
    attention(8, 12, 128, 64, with_torch(1.5), "padding mask 8x12x128x64", padding=True),
    attention(1, 12, 512, 64, with_torch(1.5), "additive bias 1x12x512x64", bias=True),
    attention(1, 12, 4096, 64, with_torch(1.2), "decode 1 query, 12 heads x 4096 keys x 64",
              query_len=1, reads=(0.85, 0.85)),
    attention(8, 12, 1024, 64, with_torch(1.2), "decode 1 query, 8x12 heads x 1024 keys x 64",
              query_len=1, reads=(0.85, 0.85)),
    attention(1, 8, 4096, 128, with_torch(2.5), "decode 1 query, 8 on 2 heads x 4096 keys x 128",
              query_len=1, kv_heads=2, peers=("numpy", "pytorch", "jax")),
    attention(1, 64, 4096, 128, {"pytorch": 2.5}, "decode 1 query, 64 on 8 heads x 4096 keys x 128",
              query_len=1, kv_heads=8, peers=("pytorch",)),
    attention(1, 8, 100_000, 128, {"pytorch": 1.1}, "decode 1 query, 8 heads x 100,000 keys x 128",
              query_len=1, reads=(0.85, 0.85), peers=("pytorch",)),
    attention(1, 64, 50_000, 128, {"pytorch": 2.5},
              "decode 1 query, 64 on 8 heads x 50,000 keys x 128", query_len=1, kv_heads=8,
              reads=(0.75, 0.75), peers=("pytorch",)),
    attention(1, 12, 512, 64, with_torch(1.3), "float64 1x12x512x64", dtype="float64",
              peers=("numpy", "pytorch", "onnxruntime")),
    attention(8, 12, 128, 64, {"pytorch": 1.5, "onnxruntime": 1.5, "numpy": 1.5},
              "weights returned 8x12x128x64", weights=True),
    layer(1, 1024, 768, 12, with_best(1.15, 5), "layer (1, 1024, 768, 12 heads) causal",
          causal=True),
    layer(8, 128, 768, 12, with_best(1.05)),
    layer(8, 64, 512, 8, with_best(1.05)),
    layer(1, 32, 768, 12, with_best(1.4)),
    layer(1, 16, 384, 12, with_best(1.4)),
    layer(1, 1, 768, 12, with_best(1.15), reads=(0.85, 0.70)),
    decoder(1, 1024, 768, 12, 12, 1.3),
    gradients((8, 12, 128, 64), 1.6),
    gradients((1, 12, 1024, 64), 1.6, causal=True),
    gradients((1, 4, 4096, 64), 1.3),
    gradients((1, 4, 2048, 128), 1.3, causal=True),
    gradients((8, 12, 128, 64), 2.0, dropout=0.1),
    gradients((1, 12, 1024, 64), 6.0, dropout=0.1, causal=True),
    gradients((1, 4, 4096, 64), 6.0, dropout=0.1),
    layer(8, 128, 768, 12, {"pytorch": 1.3}, "training step of a layer (8, 128, 768, 12 heads)",
          gradients=True, dropout=0.1, peers=("pytorch",)),
    model_step(0.8, dropout=0.0),
    model_step(1.0, dropout=0.1),
    layer(2, 4, 100, 5, with_best(2.0, 2.0), "layer d2l toy (2, 4, 100, 5 heads, 6 keys)",
          key_len=6),
]
