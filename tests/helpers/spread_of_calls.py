"""A spread of calls over steps, shapes and options; prints a hash of all results' bytes.

Run by test_same_bits.py in processes with different MHA_ISA and MHA_NUM_THREADS."""

import hashlib

import numpy as np
from option_cases import SCORES, by_head

import mha


def calls():
    rng = np.random.default_rng(2026)
    for dtype in (np.float32, np.float64):
        def draw(*shape, dtype=dtype):
            return rng.standard_normal(shape).astype(dtype)

        for query_len, key_len, head_dim in ((1, 1, 1), (1, 700, 64), (3, 90, 41), (7, 1100, 130),
                                             (5, 9, 3), (25, 129, 65), (49, 300, 8),
                                             (130, 1000, 130)):
            query = draw(2, 4, query_len, head_dim)
            key, value = draw(2, 2, key_len, head_dim), draw(2, 2, key_len, head_dim // 2 + 5)
            mask = rng.random((query_len, key_len)) < 0.7
            bias = draw(4, query_len, key_len)
            for options in ({}, {"causal": True}, {"mask": mask}, {"bias": bias},
                            {"window": (30, 5)},
                            {"key_lengths": [key_len // 2, 0], "empty_rows": "uniform"},
                            *SCORES, *by_head(4, dtype), {"dropout": 0.2, "rng": 4},
                            {"scale": -1.0}):
                yield mha.scaled_dot_product_attention(query, key, value, return_weights=True,
                                                       return_lse=True, **options)
            for options in ({"causal": True}, {"mask": mask}, {"bias": bias[0]}, *SCORES,
                            *by_head(4, dtype),
                            {"bias": bias[:, :1]}, {"bias": bias[:, :, :1]},
                            {"dropout": 0.2, "rng": 4, "scale": -1.0},
                            {"key_lengths": [key_len // 2, 0], "empty_rows": "uniform"}):
                output, pullback = mha.scaled_dot_product_attention_vjp(query, key, value,
                                                                        **options)
                gradients = pullback(np.cos(output), np.sin(output[..., 0]))
                yield tuple(gradient for gradient in gradients if gradient is not None)
        query, key = draw(1, 2, 5000, 6), draw(1, 1, 700, 6)  # chunks of keys over threads
        output, pullback = mha.scaled_dot_product_attention_vjp(query, key, key, causal=True,
                                                                bias=draw(1, 2, 1, 1))
        yield tuple(gradient for gradient in pullback(output) if gradient is not None)
        for options in by_head(2, dtype):
            output, pullback = mha.scaled_dot_product_attention_vjp(query, key, key, causal=True,
                                                                    **options)
            yield tuple(gradient for gradient in pullback(output) if gradient is not None)
        for rows, width, out in ((1, 5, 7), (9, 300, 65), (500, 130, 33)):
            yield mha.linear(draw(rows, width), draw(width, out), draw(out))
        yield mha.additive_attention(draw(3, 30, 6), draw(3, 200, 4), draw(3, 200, 5), draw(6, 70),
                                     draw(4, 70), draw(70), return_weights=True)
        for queries, options in ((30, {}), (3000, {"dropout": 0.1, "rng": 1, "causal": True})):
            output, pullback = mha.additive_attention_vjp(
                draw(1, 2, queries, 6), draw(1, 1, 700, 4), draw(1, 1, 700, 5), draw(6, 20),
                draw(4, 20), draw(20), **options)
            yield tuple(pullback(np.cos(output), output[..., 0]))
        yield mha.merge_attention([draw(40, 6), draw(40, 6)], [draw(40), draw(40)])
        for rotary in (mha.Rotary(34, magnitude=1.1), mha.Rotary(64, layout="interleaved")):
            turned, pullback = rotary.vjp(draw(2, 3, 200, 64), np.arange(200) * 9973 - 10**6)
            yield turned, pullback(np.cos(turned)).x
        layer = mha.MultiHeadAttention(96, 6, num_kv_heads=2, dtype=dtype, rng=1)
        x = draw(2, 150, 96)
        for norm, embed_dim in (("head", 96), ("width", 96), ("head", 256)):
            prepared = mha.MultiHeadAttention(embed_dim, 4, dtype=dtype, rng=1, qk_norm=norm,
                                              rotary=mha.Rotary(embed_dim // 8))
            rows = draw(2, 150, embed_dim)
            yield prepared(rows, causal=True)
            output, pullback = prepared.vjp(rows, causal=True)
            yield tuple(gradient for gradient in pullback(output) if gradient is not None)
        yield layer(x, causal=True, return_weights=True)
        output, pullback = layer.vjp(x, causal=True, head_gate=[1, 0, 2, 1, 1, 1])
        yield tuple(gradient for gradient in pullback(output) if gradient is not None)
        yield layer.freeze()(x, causal=True)
        for gate in ("element", "head"):
            gated = mha.MultiHeadAttention(96, 6, output_gate=gate, dtype=dtype, rng=1)
            yield gated(x, causal=True)
            output, pullback = gated.vjp(x, causal=True, head_gate=[1, 0, 2, 1, 1, 1])
            yield tuple(gradient for gradient in pullback(output) if gradient is not None)


def digest():
    sha = hashlib.sha256()
    for results in calls():
        for result in results if isinstance(results, tuple) else (results,):
            sha.update((result + 0.0).tobytes())  # + 0.0: the sign of zero is not promised
    return sha.hexdigest()


if __name__ == "__main__":
    print(mha.instruction_set(), mha.get_num_threads(), digest())
