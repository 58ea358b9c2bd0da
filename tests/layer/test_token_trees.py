"""Trees of guessed tokens: a call with all nodes, then cache.keep of the branch that is right. The
cache then holds the bits of appending that branch alone, and goes on with those of plain decoding.
"""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import interrupts_of

import mha
from mha import reference

WIDTH = 64
LAYERS = {"plain": {}, "rotary": {"rotary": mha.Rotary(32)},
          "normed": {"rotary": mha.Rotary(16, layout="interleaved"), "qk_norm": "head"},
          "grouped": {"num_kv_heads": 1, "rotary": mha.Rotary(32), "sinks": True, "softcap": 4.0}}
DTYPES = [None, np.float16, ml_dtypes.bfloat16, "q8_0"]


def random_layer(name="rotary", dtype=np.float32):
    return mha.MultiHeadAttention(WIDTH, 2, dtype=dtype, rng=0, **LAYERS[name])


class Tree:
    """Nodes 0, 1, ... with the parent of each, which comes before it; -1 is the text so far."""

    def __init__(self, size, rng):
        self.parents = [int(rng.integers(-1, i)) if i else -1 for i in range(size)]
        self.paths = []
        for i, parent in enumerate(self.parents):
            self.paths.append([*(self.paths[parent] if parent >= 0 else []), i])

    def depths(self):
        return np.array([len(path) - 1 for path in self.paths])

    def mask(self):
        """(size, size): each node sees its path."""
        seen = np.zeros((len(self.paths), len(self.paths)), bool)
        for i, path in enumerate(self.paths):
            seen[i, path] = True
        return seen


def mask_of(trees, lengths):
    """(batch, 1, size, longest): all of the text, and the path of each node."""
    size = len(trees[0].paths)
    mask = np.zeros((len(trees), 1, size, max(lengths) + size), bool)
    for one, tree, length in zip(mask, trees, lengths, strict=True):
        one[0, :, :length] = True
        one[0, :, length:length + size] = tree.mask()
    return mask


def contents(cache):
    return [cache.lengths.tolist(), cache.start,
            *(array.tobytes() for array in (*cache._state.held(),))]


def branch_of(rng, tree):
    """The first nodes of some path, of any length from none on."""
    path = tree.paths[int(rng.integers(len(tree.paths)))]
    return path[:int(rng.integers(len(path) + 1))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", [5, 17, 60])
def test_the_cache_holds_the_bits_of_appending_the_branch(size, name, dtype):
    check_trees(random_layer(name), size, dtype, 2e-6)


@pytest.mark.parametrize(("of_layer", "dtype", "gate"), [
    (np.float16, None, 2e-3), (ml_dtypes.bfloat16, None, 2e-2), (ml_dtypes.bfloat16, "q8_0", 2e-2),
    (np.float64, None, 1e-14), (np.float64, np.float32, 1e-14)])
def test_of_layers_of_other_types(of_layer, dtype, gate):
    check_trees(random_layer("grouped", of_layer), 23, dtype, gate)


def check_trees(layer, size, dtype, gate):
    rng = np.random.default_rng(size)
    x = rng.standard_normal((3, 100, WIDTH)).astype(np.float32)
    cache, plain = (layer.new_cache(3, dtype=dtype) for _ in range(2))
    counts = [100, 67, 1]
    for one in (cache, plain):
        layer(x, cache=one, lengths=counts)
    for _ in range(6):
        lengths = cache.lengths.tolist()
        trees = [Tree(size, rng) for _ in range(3)]
        nodes = rng.standard_normal((3, size, WIDTH)).astype(np.float32)
        positions = None if layer.rotary is None else np.array([
            length + tree.depths() for length, tree in zip(lengths, trees, strict=True)])
        got = layer(nodes, cache=cache, mask=mask_of(trees, lengths), positions=positions)
        branches = [branch_of(rng, tree) for tree in trees]
        most = max(map(len, branches))
        indices = np.full((3, most + 2), -7)
        for row, branch in zip(indices, branches, strict=True):
            row[:len(branch)] = branch
        cache.keep(lengths, indices, [*map(len, branches)])
        rows = np.full((3, most, WIDTH), np.nan, np.float32)
        for i, branch in enumerate(branches):
            rows[i, :len(branch)] = nodes[i, branch]
        wanted = layer(rows, cache=plain, lengths=[*map(len, branches)])
        assert contents(cache) == contents(plain)
        for i, branch in enumerate(branches):  # the tree's own output, to the gate
            now, then = (rows.astype(np.float64)
                         for rows in (got[i, branch], wanted[i, :len(branch)]))
            assert np.abs(now - then).max(initial=0) <= gate * np.abs(then).max(initial=0)
        token = rng.standard_normal((3, 1, WIDTH)).astype(np.float32)
        assert np.array_equal(layer(token, cache=cache), layer(token, cache=plain))


def test_every_branch_of_a_tree():
    layer, rng = random_layer(), np.random.default_rng(0)
    tree = Tree(30, rng)
    x = rng.standard_normal((1, 130, WIDTH)).astype(np.float32)  # text across a block of keys
    nodes = rng.standard_normal((1, 30, WIDTH)).astype(np.float32)
    cache, after = layer.new_cache(1), layer.new_cache(1)
    for one in (cache, after):
        layer(x, cache=one)
    layer(nodes, cache=cache, mask=mask_of([tree], [130]), positions=130 + tree.depths())
    for path in tree.paths:
        for length in range(len(path) + 1):
            kept, plain = copy.copy(cache), copy.copy(after)
            kept.keep(130, [path[:length]] if length else np.zeros((1, 0), int))
            layer(nodes[:, path[:length]], cache=plain)
            assert contents(kept) == contents(plain)


def test_a_trees_output_against_the_reference_in_float64():
    rng = np.random.default_rng(0)
    layer, tree = random_layer("rotary", np.float64), Tree(12, rng)
    x, nodes = rng.standard_normal((1, 20, WIDTH)), rng.standard_normal((1, 12, WIDTH))
    cache = layer.new_cache(1)
    layer(x, cache=cache)
    got = layer(nodes, cache=cache, mask=mask_of([tree], [20]), positions=20 + tree.depths())
    for node, path in enumerate(tree.paths):
        rows = np.concatenate([x, nodes[:, path]], axis=1)
        query, key, value = (mha.split_heads(rows @ W, 2)
                             for W in (layer.W_q, layer.W_k, layer.W_v))
        attended = reference.scaled_dot_product_attention(
            layer.rotary(query), layer.rotary(key), value, causal=True)
        wanted = (mha.merge_heads(attended) @ layer.W_o)[:, -1]
        assert np.abs(got[:, node] - wanted).max() <= 1e-13 * np.abs(wanted).max()


@settings(max_examples=80, deadline=None)
@given(batch=st.integers(1, 3), size=st.integers(0, 9), seed=st.integers(0, 2**32),
       window=st.sampled_from([None, 1, 40, 128]))
def test_against_rows_picked_by_hand(batch, size, seed, window):
    """Any rows from any start on, in any order; of caches with windows too."""
    rng = np.random.default_rng(seed)
    cache = mha.KVCache(batch, 2, 4, 3, window=window)
    for n in (int(rng.integers(0, 300)), size):
        cache.append(rng.standard_normal((batch, 2, n, 4)), rng.standard_normal((batch, 2, n, 3)),
                     rng.integers(0, n + 1, batch) if n != size else None)
    begins = cache.lengths - rng.integers(0, size + 1, batch)
    chosen = [rng.permutation(int(there))[:rng.integers(there + 1)]
              for there in cache.lengths - begins]
    first, lengths = cache.start, cache.lengths
    wanted = [[np.concatenate([array[i, :, :begin - first],
                               array[i][:, begin - first + rows]], axis=1)
               for array in (cache.key.copy(), cache.value.copy())]
              for i, (begin, rows) in enumerate(zip(begins, chosen, strict=True))]
    indices = np.zeros((batch, size), int)
    for row, rows in zip(indices, chosen, strict=True):
        row[:len(rows)] = rows
    cache.keep(begins, indices, [*map(len, chosen)])
    assert cache.lengths.tolist() == [begin + len(rows)
                                      for begin, rows in zip(begins, chosen, strict=True)]
    assert cache.start == first
    for one in (cache, copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        for i, length in enumerate(one.lengths):
            for array, rows in zip((one.key, one.value), wanted[i], strict=True):
                assert np.array_equal(array[i, :, :length - first], rows)
                assert not array[i, :, length - first:].any()
    cache.append(np.ones((batch, 2, 1, 4)), np.ones((batch, 2, 1, 3)))
    assert (lengths >= 0).all()


def filled(**options):
    cache = mha.KVCache(2, 1, 2, **options)
    rng = np.random.default_rng(0)
    cache.append(rng.standard_normal((2, 1, 9, 2)), rng.standard_normal((2, 1, 9, 2)), [9, 6])
    return cache


def test_a_window_keeps_what_the_next_row_needs():
    cache = mha.KVCache(1, 1, 2, window=10)
    for n in (300, 9):
        cache.append(np.ones((1, 1, n, 2)), np.ones((1, 1, n, 2)))
    assert cache.start == 256
    before = contents(cache)
    with pytest.raises(ValueError, match=r"start: got \[260\], with indices lengths of \[264\],"
                                         " wanted at least 265: .* copy"):
        cache.keep(260, [[0, 1, 2, 30]])
    with pytest.raises(ValueError, match=r"start: got \[250\], wanted at least 256: .* dropped"):
        cache.keep(250, [[*range(50)]])
    assert contents(cache) == before
    cache.keep(260, [[0, 1, 2, 30, 31]])
    assert cache.lengths.tolist() == [265]


@pytest.mark.parametrize("options", [
    {"window": (9, None)}, {"alibi": mha.alibi_slopes(2)}, {"relative_bias": np.ones((2, 5))}])
def test_options_of_slots_want_rows_in_their_order(options):
    """They count slots of the cache, where siblings of a tree stand one behind the other."""
    layer, (name, _) = random_layer(), *options.items()
    x = np.ones((2, 3, WIDTH), np.float32)
    cache = layer.new_cache(2)
    layer(x, cache=cache)
    before = contents(cache)
    with pytest.raises(ValueError, match=f"positions: got ones that do not rise by 1 .* with "
                                         f"{name}, wanted such, or none of it"):
        layer(x, cache=cache, positions=[3, 4, 4], **options)
    assert contents(cache) == before
    layer(x, cache=cache, positions=[7, 8, 9], **options)
    layer(x, cache=cache, positions=[[7, 8, 5], [3, 0, 0]], lengths=[2, 1], **options)
    layer(x, cache=cache, positions=[[5, 7, 8], [0, 0, 3]], lengths=[2, 1], padding="left",
          **options)
    layer(x, cache=cache, positions=[3, 4, 4])
    with pytest.raises(ValueError, match=r"positions: .* with window"):
        layer(x, cache=layer.new_cache(2, window=9), positions=[3, 4, 4])


@pytest.mark.parametrize("step", ["line", "opcode"])
def test_control_c_leaves_all_or_nothing(step):
    before = contents(filled())
    after = filled()
    after.keep([2, 3], [[3, 1, 6], [2, 0, 1]], [3, 2])
    states = [before, contents(after)]
    for cache in interrupts_of(lambda cache: cache.keep([2, 3], [[3, 1, 6], [2, 0, 1]], [3, 2]),
                               filled, step):
        assert contents(cache) in states


@pytest.mark.parametrize("positions", [[2**63 - 1, -2**63], [-2**63, 2**63 - 1], [5, 7], [7, 6]])
def test_positions_that_do_not_rise_by_one_beside_a_window(positions):
    layer = mha.MultiHeadAttention(16, 2, rotary=mha.Rotary(8), rng=0)
    cache = layer.new_cache(1, window=3)
    with pytest.raises(ValueError, match="positions: got ones that do not rise by 1"):
        layer(np.ones((1, 2, 16)), cache=cache, positions=positions)
    assert cache.lengths.tolist() == [0]
