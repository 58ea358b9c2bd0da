"""GPT-3's attention layer, 96 heads of size 128 in 12,288 features: 2.4 GB of float32 weights.

    python tests/tools/large_layer.py

Too large for the test suite, so a script. It runs the layer on a short sequence, prints shape,
parameters, seconds and memory, and exits with 1 where the output differs from the same layer in
float64, or where the call took as much memory as a copy of half a weight matrix.
"""

import resource
import sys
import time

import numpy as np

import mha

EMBED_DIM, NUM_HEADS, HEAD_DIM = 12_288, 96, 128
BATCH, LENGTH = 1, 16
LARGEST_ERROR = 2e-6          # relative to the largest entry of the output
WEIGHT_BYTES = EMBED_DIM**2 * 4
LARGEST_CALL_BYTES = WEIGHT_BYTES // 2


def main():
    start = time.perf_counter()
    # The layer draws its weights in place, so that this is all the memory they ever take.
    layer = mha.MultiHeadAttention(EMBED_DIM, NUM_HEADS, use_bias=False, rng=0)
    x = np.random.default_rng(1).standard_normal((BATCH, LENGTH, EMBED_DIM), np.float32)
    print(f"layer:      {NUM_HEADS} heads x {HEAD_DIM}, {EMBED_DIM} wide,"
          f" made in {time.perf_counter() - start:.1f} s")

    before = peak_bytes()
    start = time.perf_counter()
    output, weights = layer(x, causal=True, return_weights=True)
    seconds = time.perf_counter() - start
    call_bytes = peak_bytes() - before
    print(f"shape:      {x.shape} -> {output.shape}, weights {weights.shape}")
    print(f"parameters: {layer.num_parameters:,}, {4 * WEIGHT_BYTES / 1e9:.2f} GB")
    print(f"seconds:    {seconds:.2f}")
    print(f"memory:     {peak_bytes() / 1e9:.2f} GB at its peak, {call_bytes / 1e6:.0f} MB of it"
          " by the call")

    wanted_output, wanted_weights = in_float64(layer, x)
    output_error = relative_error(output, wanted_output)
    weights_error = relative_error(weights, wanted_weights)
    print(f"error:      output {output_error:.1e}, weights {weights_error:.1e}")

    checks = {
        "the layer's head size": layer.head_dim == HEAD_DIM,
        "the number of parameters": layer.num_parameters == 4 * EMBED_DIM**2,
        "the output's shape": output.shape == x.shape and output.dtype == np.float32,
        "the weights' shape": weights.shape == (BATCH, NUM_HEADS, LENGTH, LENGTH),
        "the output's error": output_error <= LARGEST_ERROR,
        "the weights' error": weights_error <= LARGEST_ERROR,
        "the call's memory": call_bytes < LARGEST_CALL_BYTES,
    }
    wrong = [name for name, holds in checks.items() if not holds]
    print("wrong: " + ", ".join(wrong) if wrong else "correct")
    return 1 if wrong else 0


def in_float64(layer, x):
    """(output, weights) of the causal layer, a head at a time: no weight is ever whole in float64.

    The output is the sum over the heads of head times its rows of W_o.
    """
    x = x.astype(np.float64)
    visible = np.tri(LENGTH, dtype=bool)
    output = np.zeros((BATCH, LENGTH, EMBED_DIM))
    all_weights = np.empty((BATCH, NUM_HEADS, LENGTH, LENGTH))
    for head in range(NUM_HEADS):
        own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        query, key, value = (x @ weight[:, own].astype(np.float64)
                             for weight in (layer.W_q, layer.W_k, layer.W_v))
        scores = query @ key.swapaxes(-1, -2) / np.sqrt(HEAD_DIM)
        exponentials = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        weights = exponentials / exponentials.sum(-1, keepdims=True)
        all_weights[:, head] = weights
        output += weights @ value @ layer.W_o[own].astype(np.float64)
    return output, all_weights


def relative_error(got, wanted):
    """The largest difference, relative to the largest entry wanted; infinite for NaN."""
    error = np.abs(got - wanted).max() / np.abs(wanted).max()
    return error if np.isfinite(error) else np.inf


def peak_bytes():
    """The most memory that the process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere else


if __name__ == "__main__":
    sys.exit(main())
