"""A sequence that is longer than a worker's memory, through one causal layer, from file to file.

    python examples/long_document.py [--tokens 1000000] [--window 4096] [--workers 2]
        [--memory 512MB] [--folder output/long_document]

Needs Dask with its distributed scheduler: pip install "dask[array]" distributed. The layer has 4
heads and is 256 wide. What it reads is a NumPy file of float32 rows, tokens.npy in the folder, made
of random numbers where there is none; what it writes is attended.npy, of the same shape. Worker
processes read and write pieces of the files by themselves: neither file ever lies in memory as a
whole. In the end some rows are computed again, by one plain call of the layer, and compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

import numpy as np

import mha

WIDTH, HEADS = 256, 4


class Rows:
    """The rows of a NumPy file, opened anew wherever this object is sent."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        array = np.load(path, mmap_mode="r")
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __getitem__(self, rows):
        return np.load(self.path, mmap_mode="r")[rows].copy()

    def __setitem__(self, rows, values):
        np.load(self.path, mmap_mode="r+")[rows] = values


def make_rows(path: Path, tokens: int, piece: int = 65_536) -> None:
    """Random rows, written piece by piece under another name first."""
    unfinished = path.with_suffix(".part")
    rows = np.lib.format.open_memmap(unfinished, "w+", np.float32, (tokens, WIDTH))
    rng = np.random.default_rng(0)
    for first in range(0, tokens, piece):
        rows[first:first + piece] = rng.standard_normal((min(piece, tokens - first), WIDTH))
    rows.flush()
    unfinished.rename(path)


def checked_rows(path: Path, tokens: int | None) -> int:
    """How many rows a file has, if they fit; else the program ends with what is wrong."""
    array = np.load(path, mmap_mode="r")
    wanted = f"({'len' if tokens is None else tokens}, {WIDTH}) of float32"
    fits = array.dtype == np.float32 and array.ndim == 2 and array.shape[1] == WIDTH
    if not fits or len(array) == 0 or tokens not in (None, len(array)):
        sys.exit(f"{path}: got an array {array.shape} of {array.dtype}, wanted {wanted}; it is left"
                 " as it is: choose another --folder, or leave --tokens out")
    return len(array)


def attend(layer: mha.MultiHeadAttention, source: Rows, target: Rows, window: int,
           chunk: int) -> object:
    """What is to be done, as Dask sees it: nothing has run yet."""
    import dask.array as da

    import mha.dask

    rows = da.from_array(source, chunks=(chunk, WIDTH), name=False)
    attended = mha.dask.MultiHeadAttention(layer)(rows, causal=True, window=(window - 1, 0))
    return da.store(attended, target, lock=False, compute=False)


def largest_difference(layer: mha.MultiHeadAttention, source: Rows, target: Rows,
                       window: int) -> float:
    """Of some rows from what one call gives for them, relative to the largest number."""
    tokens, worst = source.shape[0], 0.0
    for end in {min(100, tokens), max(tokens // 2, 1), tokens}:
        first = max(end - 100, 0)
        seen = max(first - window + 1, 0)
        rows = source[seen:end]
        wanted = layer(rows[first - seen:], rows, causal=True, window=(window - 1, 0))
        worst = max(worst, float(np.abs(target[first:end] - wanted).max() / np.abs(wanted).max()))
    return worst


def parsed(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=None,
                        help="rows of a new file, 1,000,000 by default; else as the file has")
    parser.add_argument("--window", type=int, default=4096, help="keys that a token sees")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of one task")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--memory", default="512MB", help="of each worker")
    parser.add_argument("--folder", type=Path, default=Path("output/long_document"))
    options = parser.parse_args(arguments)
    for name in ("tokens", "window", "chunk", "workers"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}, wanted at least 1")
    missing = [name for name in ("dask", "distributed") if importlib.util.find_spec(name) is None]
    if missing:
        parser.exit(1, f"missing: {', '.join(missing)}. Install with: pip install 'dask[array]'"
                       " distributed\n")
    return options


def main() -> None:
    options = parsed()
    from distributed import Client, LocalCluster, progress

    options.folder.mkdir(parents=True, exist_ok=True)
    given, attended = options.folder / "tokens.npy", options.folder / "attended.npy"
    if not given.exists():
        tokens = options.tokens or 1_000_000
        print(f"writing {tokens:,} random rows to {given}", flush=True)
        make_rows(given, tokens)
    tokens = checked_rows(given, options.tokens)
    np.lib.format.open_memmap(attended, "w+", np.float32, (tokens, WIDTH)).flush()
    source, target = Rows(given), Rows(attended)
    layer = mha.MultiHeadAttention(WIDTH, HEADS, rng=0)
    with (LocalCluster(n_workers=options.workers, threads_per_worker=1,
                       memory_limit=options.memory) as cluster, Client(cluster) as client):
        print(f"dashboard: {client.dashboard_link}", flush=True)
        begin = time.perf_counter()
        running = client.compute(attend(layer, source, target, options.window, options.chunk))
        progress(running, notebook=False)
        running.result()
        seconds = time.perf_counter() - begin
    print(f"\n{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} a second: {attended}")
    print(f"{largest_difference(layer, source, target, options.window):.1e} is the largest"
          " difference from one call, of the rows that were compared")


if __name__ == "__main__":
    main()
