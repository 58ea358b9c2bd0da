"""What is measured of latent attention: random arrays."""

import numpy as np


def arrays_of(shape):
    """query (1, heads, 1, kv_rank + rope_dim) and what a cache holds, (1, 1, positions, the same).
    """
    heads, positions, kv_rank, rope_dim = shape
    random = np.random.default_rng(0)
    return (random.standard_normal((1, heads, 1, kv_rank + rope_dim), np.float32),
            random.standard_normal((1, 1, positions, kv_rank + rope_dim), np.float32))


def scale_of(shape):
    return (shape[2] + shape[3]) ** -0.5  # keeps the scores of random numbers near 1
