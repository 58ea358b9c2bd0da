"""How far results are from float64's (float64's from long double's): mha beside plain NumPy.

    python benchmarks/accuracy.py [--write]      make bench-accuracy

Errors are root mean squares, divided by the root mean square of the exact numbers, so that one
rounding of float32 is 0.6e-7. --write: accuracy.md.
"""

import argparse
from pathlib import Path

import ml_dtypes
import numpy as np
from tqdm import tqdm

import mha
from mha import reference

HERE = Path(__file__).parent
ATTENTION = {  # name: (shape of query, keys, options)
    "8 x 12 heads, 128 tokens, head_dim 64": ((8, 12, 128, 64), 128, {}),
    "12 heads, 512 tokens, head_dim 64": ((1, 12, 512, 64), 512, {}),
    "12 heads, 1,024 tokens, causal": ((1, 12, 1024, 64), 1024, {"causal": True}),
    "4 heads, 2,048 tokens, head_dim 128": ((1, 4, 2048, 128), 2048, {}),
    "1 query over 4,096 keys, 12 heads": ((1, 12, 1, 64), 4096, {}),
    "1 query over 50,000 keys, 8 heads, head_dim 128": ((1, 8, 1, 128), 50_000, {}),
    "512 tokens, scores 10 times as large": ((1, 12, 512, 64), 512, {"scale": 1.25}),
}
WITH_GRADIENTS = list(ATTENTION)[:3]
LAYERS = {"layer 8 x 128 x 768, 12 heads": (8, 128, 768, 12),
          "layer 32 x 384, 6 heads": (1, 32, 384, 6)}


def relative_error(got, exact):
    got, exact = np.asarray(got).astype(exact.dtype), np.asarray(exact)
    return float(np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)))


def attention_inputs(name):
    shape, key_len, options = ATTENTION[name]
    random = np.random.default_rng(0)
    key_shape = (*shape[:-2], key_len, shape[-1])
    return [random.standard_normal(shape), random.standard_normal(key_shape),
            random.standard_normal(key_shape)], options


def attention_rows(progress):
    """| work | mha | NumPy | ratio |, forward, then gradients."""
    for name in ATTENTION:
        inputs, options = attention_inputs(name)
        narrow = [array.astype(np.float32) for array in inputs]
        inputs = [array.astype(np.float64) for array in narrow]  # the same numbers
        exact = reference.scaled_dot_product_attention(*inputs, **options)
        yield (f"attention: {name}",
               relative_error(mha.scaled_dot_product_attention(*narrow, **options), exact),
               relative_error(reference.scaled_dot_product_attention(*narrow, **options), exact))
        progress.update()
    for name in WITH_GRADIENTS:
        inputs, options = attention_inputs(name)
        narrow = [array.astype(np.float32) for array in inputs]
        grad = np.random.default_rng(1).standard_normal(inputs[0].shape).astype(np.float32)
        wide = [array.astype(np.float64) for array in (*narrow, grad)]
        exact, theirs = (
            reference.scaled_dot_product_attention_vjp(*arrays[:3], **options)[1](arrays[3])
            for arrays in (wide, [*narrow, grad]))
        ours = mha.scaled_dot_product_attention_vjp(*narrow, **options)[1](grad)
        for argument in ("query", "key", "value"):
            yield (f"gradient of {argument}: {name}",
                   relative_error(getattr(ours, argument), exact[argument]),
                   relative_error(theirs[argument], exact[argument]))
        progress.update()


def layer_rows(progress):
    for name, (batch, length, width, heads) in LAYERS.items():
        layer = mha.MultiHeadAttention(width, heads, rng=0)
        x = np.random.default_rng(0).standard_normal((batch, length, width)).astype(np.float32)
        parameters = dict(layer.parameters())
        wide = {key: array.astype(np.float64) for key, array in parameters.items()}
        exact = reference.multi_head_attention(*[x.astype(np.float64)] * 3, **wide, num_heads=heads)
        theirs = reference.multi_head_attention(x, x, x, **parameters, num_heads=heads)
        yield name, relative_error(layer(x), exact), relative_error(theirs, exact)
        progress.update()


def type_rows(progress):
    """12 heads, 512 tokens, head_dim 64 in each type."""
    name = "12 heads, 512 tokens, head_dim 64"
    for dtype, exact_dtype, unit in ((np.float64, np.longdouble, 2**-53),
                                     (np.float32, np.float64, 2**-24),
                                     (np.float16, np.float64, 2**-11),
                                     (ml_dtypes.bfloat16, np.float64, 2**-8)):
        narrow = [array.astype(dtype) for array in attention_inputs(name)[0]]
        if exact_dtype is np.longdouble:
            narrow = [array[:, :2] for array in narrow]  # slow
        exact = reference.scaled_dot_product_attention(*(a.astype(exact_dtype) for a in narrow))
        error = relative_error(mha.scaled_dot_product_attention(*narrow), exact)
        yield np.dtype(dtype).name, error, error / unit
        progress.update()


def document():
    works = len(ATTENTION) + len(WITH_GRADIENTS) + len(LAYERS) + 4
    with tqdm(total=works, unit="work") as progress:
        compared = [*attention_rows(progress), *layer_rows(progress)]
        types = list(type_rows(progress))
    lines = ["# Accuracy", "",
             f"mha {mha.__version__} ({mha.instruction_set()}), NumPy {np.__version__}. Root mean"
             " square of the errors, relative to that of the exact numbers, which are float64's"
             " of the same inputs (long double's for float64). NumPy is `mha.reference`, the plain"
             " formula.", "",
             "| float32 | mha | NumPy | mha / NumPy |", "|---|---|---|---|",
             *(f"| {name} | {ours:.1e} | {theirs:.1e} | {ours / theirs:.2f} |"
               for name, ours, theirs in compared), "",
             "| 12 heads, 512 tokens, head_dim 64, in | mha | in roundings of that type |",
             "|---|---|---|",
             *(f"| {name} | {error:.1e} | {units:.2f} |" for name, error, units in types)]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write accuracy.md")
    options = parser.parse_args()
    text = document()
    print(text)
    if options.write:
        (HERE / "accuracy.md").write_text(text)


if __name__ == "__main__":
    main()
