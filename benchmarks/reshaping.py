"""What splitting into heads costs: by copies, by views, and not at all, `make bench-reshaping`.

Three arrays (batch, len, heads * head_dim) as the input projections give them become one merged
array (batch, len, heads * head_dim) as the output projection wants it. In between stands the same
attention, by mha and by plain NumPy:

    copies    (batch, heads, len, head_dim), copied so that each head lies on its own; merged by
              another copy, as the book writes it with transpose and reshape
    views     the same axes by strides alone; mha also writes each head straight to its columns
    no split  one call for each head, on slices of columns

    python benchmarks/reshaping.py [--rounds 15] [--write]

--write: reshaping.md and reshaping.png.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

import mha

HERE = Path(__file__).parent
SHAPES = [(64, 16, 4, 32), (8, 128, 12, 64), (8, 128, 4, 256), (1, 1024, 12, 64),
          (1, 2048, 12, 64), (1, 2048, 16, 64)]


def plain_attention(query, key, value):
    """softmax(query key^T) value in NumPy, each step in place where it can be."""
    scores = query @ np.swapaxes(key, -1, -2)
    scores *= query.dtype.type(query.shape[-1] ** -0.5)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores @ value


def by_copies(attend, num_heads, arrays):
    heads = [np.ascontiguousarray(mha.split_heads(array, num_heads)) for array in arrays]
    return mha.merge_heads(attend(*heads))


def by_views(attend, num_heads, arrays):
    heads = [mha.split_heads(array, num_heads) for array in arrays]
    if attend is plain_attention:
        return mha.merge_heads(attend(*heads))
    merged = np.empty_like(arrays[0])
    attend(*heads, out=mha.split_heads(merged, num_heads))
    return merged


def without_split(attend, num_heads, arrays):
    merged = np.empty_like(arrays[0])
    width = merged.shape[-1] // num_heads
    for first in range(0, merged.shape[-1], width):
        columns = np.s_[..., first:first + width]
        if attend is plain_attention:
            merged[columns] = attend(*(array[columns] for array in arrays))
        else:
            attend(*(array[columns] for array in arrays), out=merged[columns])
    return merged


STRATEGIES = {"copies": by_copies, "views": by_views, "no split": without_split}
ENGINES = {"mha": mha.scaled_dot_product_attention, "NumPy": plain_attention}


def measure(shape, rounds):
    """(engine, strategy) -> milliseconds of each round; strategies take turns."""
    batch, length, heads, head_dim = shape
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((batch, length, heads * head_dim), np.float32) for _ in range(3)]
    calls = {(engine, strategy): partial(function, attend, heads, arrays)
             for engine, attend in ENGINES.items() for strategy, function in STRATEGIES.items()}
    wanted = calls["NumPy", "copies"]()
    for call in calls.values():
        np.testing.assert_allclose(call(), wanted, atol=1e-5)
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # brings its memory back into the caches
            begin, count = time.perf_counter(), 0
            while count == 0 or time.perf_counter() - begin < 0.02:
                call()
                count += 1
            times[name].append(1e3 * (time.perf_counter() - begin) / count)
    return times


def table(measured):
    lines = ["| batch x len, heads x head_dim | "
             + " | ".join(f"{engine}, {strategy}" for engine in ENGINES for strategy in STRATEGIES)
             + " |", "|---|" + "---|" * (len(ENGINES) * len(STRATEGIES))]
    for (batch, length, heads, head_dim), times in measured.items():
        cells = []
        for (engine, _), values in times.items():
            ratio = np.median(np.array(values) / np.array(times[engine, "copies"]))
            cells.append(f"{np.median(values):.2f} ms ({ratio:.2f})")
        lines.append(f"| {batch} x {length}, {heads} x {head_dim} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chart(measured, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [f"{batch} x {length}\n{heads} x {head_dim}"
             for batch, length, heads, head_dim in measured]
    figure, axes = plt.subplots(1, len(ENGINES), figsize=(11, 3.8), sharey=True,
                                layout="constrained")
    for ax, engine in zip(axes, ENGINES):
        for number, strategy in enumerate(STRATEGIES):
            ratios = [np.array(times[engine, strategy]) / np.array(times[engine, "copies"])
                      for times in measured.values()]
            middle = np.array([np.median(ratio) for ratio in ratios])
            spread = np.abs(np.quantile(ratios, [0.1, 0.9], axis=1) - middle)
            ax.bar(np.arange(len(names)) + 0.27 * (number - 1), middle, 0.25, yerr=spread,
                   capsize=2, label=strategy)
        ax.set_xticks(range(len(names)), names, fontsize=8)
        ax.set(title=engine, xlabel="batch x len, heads x head_dim")
        ax.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("time / time with copies")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="write reshaping.md and reshaping.png")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    measured = {shape: measure(shape, rounds) for shape in tqdm(SHAPES, unit="shape")}
    text = (f"# Splitting into heads\n\n{mha.instruction_set()}, {mha.get_num_threads()} threads,"
            f" NumPy {np.__version__}; medians of {rounds} rounds, in brackets the median of the"
            f" times divided by those with copies in the same round. What it says:"
            f" [docs/reshaping.md](../docs/reshaping.md).\n\n"
            f"{table(measured)}\n\n![times of the strategies](reshaping.png)\n")
    print(text)
    if arguments.write:
        (HERE / "reshaping.md").write_text(text)
        chart(measured, HERE / "reshaping.png")


if __name__ == "__main__":
    main()
