"""mha.BlockMask: what its constructors and operators make, beside dense masks."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import mha
from mha import BlockMask

LENGTHS = [(0, 0), (0, 5), (5, 0), (1, 1), (5, 7), (128, 128), (129, 127), (300, 260), (130, 400)]
OFFSETS = [None, 0, -3, 1000, -1000]


def check(mask, dense):
    """The mask is this dense one, in canonical form."""
    dense = np.broadcast_to(dense, (mask.batch, mask.heads, mask.query_len, mask.key_len))
    np.testing.assert_array_equal(mask.to_dense(), dense)
    assert mask == BlockMask.from_dense(dense)
    assert mask.density == pytest.approx(dense.mean() if dense.size else 0)
    assert repr(mask).startswith("BlockMask(batch=")


@pytest.mark.parametrize(("query_len", "key_len"), LENGTHS)
@pytest.mark.parametrize("query_offset", OFFSETS)
def test_masks_by_position(query_len, key_len, query_offset):
    where = {"query_offset": query_offset}
    check(BlockMask.causal(query_len, key_len, **where),
          mha.masks.causal(query_len, key_len, query_offset))
    for window in [(3, 0), (None, 5), (100, 100), (0, 0), (200, None), (None, None), (2**70, 0)]:
        check(BlockMask.sliding_window(query_len, key_len, window=window, **where),
              mha.masks.sliding_window(query_len, key_len, window=window, **where))
    offset = key_len - query_len if query_offset is None else query_offset
    position = np.arange(query_len)[:, None] + offset
    for stride in (1, 2, 7, 128, 200, 1000, 10**12, 2**62, 2**63 - 1):
        check(BlockMask.strided(query_len, key_len, stride=stride, **where),
              (position - np.arange(key_len)) % stride == 0)
    indices = np.random.default_rng(0).integers(0, key_len, 3 if key_len else 0)
    check(BlockMask.global_tokens(indices, query_len, key_len, **where),
          np.isin(position, indices) | np.isin(np.arange(key_len), indices))


@pytest.mark.parametrize(("query_len", "key_len"), LENGTHS)
def test_masks_by_length(query_len, key_len):
    rng = np.random.default_rng(1)
    for lengths in (rng.integers(0, key_len + 1, 3), rng.integers(0, key_len + 1, (3, query_len))):
        check(BlockMask.from_lengths(lengths, query_len, key_len),
              np.broadcast_to(mha.masks.from_lengths(lengths, key_len),
                              (3, 1, query_len, key_len)))
    lengths = rng.integers(0, query_len + 1, 3)
    in_prefix = (np.arange(query_len) < lengths[:, None, None])[:, None]
    check(BlockMask.prefix(lengths, query_len), np.tri(query_len, dtype=bool) | in_prefix)


@pytest.mark.parametrize(("query_len", "key_len"), LENGTHS)
@pytest.mark.parametrize("documents", [1, 5, 300])
def test_documents(query_len, key_len, documents):
    """Sorted and in disorder, with padding among them."""
    rng = np.random.default_rng(2)
    queries, keys = (rng.integers(-1, documents, (2, n)) for n in (query_len, key_len))
    for q, k in ((queries, keys), (np.sort(queries), np.sort(keys))):
        check(BlockMask.documents(q, k),
              ((q[:, :, None] == k[:, None]) & (q >= 0)[:, :, None])[:, None])
    check(BlockMask.documents(queries[0]),
          (queries[0][:, None] == queries[0]) & (queries[0] >= 0)[:, None])


@pytest.mark.parametrize(("query_len", "key_len"), LENGTHS)
def test_of_a_function(query_len, key_len):
    """It sees no index beyond the lengths, and may return any shape that broadcasts."""
    rng = np.random.default_rng(3)
    table = rng.random((2, 3, query_len, key_len)) < 0.2
    given = BlockMask.from_dense(rng.random((2, 1, query_len, key_len)) < 0.01)
    arguments = {"batch": 2, "heads": 3}
    check(BlockMask.from_function(lambda b, h, q, k: table[b, h, q, k], query_len, key_len,
                                  **arguments), table)
    check(BlockMask.from_function(lambda b, h, q, k: table[b, h, q, k], query_len, key_len,
                                  **arguments, within=given), table & given.to_dense())
    every = np.arange(query_len)[:, None] >= 0
    check(BlockMask.from_function(lambda b, h, q, k: q >= 0, query_len, key_len),
          np.broadcast_to(every, (query_len, key_len)))
    check(BlockMask.from_function(lambda b, h, q, k: True, query_len, key_len),
          np.ones((query_len, key_len), bool))


def test_a_function_is_never_called_on_all_pairs():
    """Nor on blocks that `within` hides."""
    pairs = []

    def every(batch, head, query, key):
        pairs.append(np.broadcast(batch, head, query, key).size)
        return np.ones((1, 1, 1), bool)

    BlockMask.from_function(every, 3000)
    assert max(pairs) < 3000 * 3000 / 4
    pairs.clear()
    BlockMask.from_function(every, 3000, within=BlockMask.documents([0] * 128 + [-1] * 2872))
    assert sum(pairs) == 128 * 128


@pytest.mark.parametrize(("query_len", "key_len"), LENGTHS)
def test_operators(query_len, key_len):
    rng = np.random.default_rng(4)
    a = rng.random((2, 1, query_len, key_len)) < 0.1
    b = rng.random((1, 3, query_len, key_len)) < 0.9
    a[:, :, :query_len // 2], b[..., :key_len // 2] = False, True
    of_a, of_b = BlockMask.from_dense(a), BlockMask.from_dense(b)
    check(of_a & of_b, a & b)
    check(of_a | of_b, a | b)
    check(~of_a, ~a)
    check(~of_b, ~b)
    assert ~~of_a == of_a
    for _ in range(8):
        q0, q1 = np.sort(rng.integers(0, query_len + 1, 2))
        k0, k1 = np.sort(rng.integers(0, key_len + 1, 2))
        check(of_a[q0:q1, k0:k1], a[..., q0:q1, k0:k1])
    check(of_b[-5:, 3:10**9], b[..., -5:, 3:10**9])
    check(of_b[4:2, :], b[..., 4:2, :])


def test_equal_masks_compare_equal_and_are_found_by_identity():
    one, other = BlockMask.causal(200), BlockMask.prefix(0, 200)
    assert one == other
    assert one != BlockMask.causal(201)
    assert len({one, other}) == 2
    assert copy.copy(one) is copy.deepcopy(one) is one
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.__eq__(3) is NotImplemented


def test_masks_are_immutable():
    mask = BlockMask.causal(200)
    with pytest.raises(AttributeError, match="immutable"):
        mask.batch = 2
    with pytest.raises(AttributeError, match="immutable"):
        del mask._core_record
    with pytest.raises(ValueError, match="WRITEABLE"):
        mask._blocks.columns.flags.writeable = True




def test_strides_and_offsets_beyond_int64():
    diagonal = BlockMask.from_dense(np.eye(130, k=53, dtype=bool))
    for stride in (2**61, 2**63 - 1, 2**63, 2**70):
        assert BlockMask.strided(130, stride=stride, query_offset=53) == diagonal
    for stride in (2**62, 2**62 + 1, 2**70):
        for offset in (-stride, stride, 7 * stride + 3, stride - 2, stride // 2, 2**61, 2**60 - 1):
            wanted = [[(i + offset - j) % stride == 0 for j in range(130)] for i in range(130)]
            found = BlockMask.strided(130, stride=stride, query_offset=offset).to_dense()
            np.testing.assert_array_equal(found[0, 0], wanted)
    assert BlockMask.strided(130, stride=7, query_offset=7 * 2**70 + 3) == BlockMask.strided(
        130, stride=7, query_offset=3)


def test_a_picture():
    assert repr(BlockMask.causal(4)).splitlines() == [
        "BlockMask(batch=1, heads=1, query_len=4, key_len=4, density=0.625)",
        "#...", "##..", "###.", "####"]
    lines = repr(BlockMask.sliding_window(4096, window=(255, 0))).splitlines()
    assert len(lines) == 17
    assert lines[1:3] == ["+-" + "." * 30, "-++-" + "." * 28]


def test_a_million_tokens_take_little_memory():
    n = 1_000_000
    mask = BlockMask.documents(np.arange(n) // 4000) & BlockMask.sliding_window(n, window=(1024, 0))
    assert mask.nbytes < 2_000_000
    visible = sum(min(i, 1024) + 1 for i in range(4000)) * (n // 4000)
    assert mask.density == pytest.approx(visible / n**2)


def huge():
    """Of 2^80 pairs, all hidden."""
    rows = 2**33
    return BlockMask._holding((1, 1, rows * 128, 2**40, b"", b"", b"", b""))


def no_bool(batch, head, query, key):
    return query - key


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: BlockMask(), TypeError, "constructors"),
    (lambda: BlockMask.causal(-1), ValueError, "query_len: got -1"),
    (lambda: BlockMask.causal(3.0), TypeError, "query_len: got float"),
    (lambda: BlockMask.sliding_window(3, window=3), TypeError, "window: got int"),
    (lambda: BlockMask.sliding_window(3, window=(1, 2, 3)), ValueError, "window: got 3 entries"),
    (lambda: BlockMask.sliding_window(3, window=(-1, 0)), ValueError, "window: got -1"),
    (lambda: BlockMask.from_dense([[1, 0]]), TypeError, "mask: got an array of int64"),
    (lambda: BlockMask.from_dense(np.ones(3, bool)), ValueError, r"mask: got shape \(3,\)"),
    (lambda: BlockMask.from_dense(np.ones((2, 3, 3), bool)), ValueError, "could be batch or heads"),
    (lambda: BlockMask.causal(3) and BlockMask.causal(3), TypeError, "join masks with &"),
    (lambda: not BlockMask.causal(3), TypeError, "join masks with &"),
    (lambda: BlockMask.from_function(lambda q, k: q >= k, 3), TypeError, "four arrays"),
    (lambda: BlockMask.from_function(lambda b, h, q, k: q >= k and q > 1, 3), ValueError,
     "join conditions by &"),
    (lambda: BlockMask.documents(np.array([2**63, 1], np.uint64)), ValueError,
     "query_ids: got 9223372036854775808, wanted at most"),
    (lambda: BlockMask.causal(3)[1.5:, :], TypeError, "wanted ints"),
    (lambda: BlockMask.documents([0.0, 1.0]), TypeError, "query_ids: got an array of float64"),
    (lambda: BlockMask.documents([[[0]]]), ValueError, r"query_ids: got shape \(1, 1, 1\)"),
    (lambda: BlockMask.documents([[0], [1]], [[0]]), ValueError, "key_ids: got a batch of 1"),
    (lambda: BlockMask.from_lengths([3], 2, 2), ValueError, "values from 3 to 3"),
    (lambda: BlockMask.from_lengths([[1, 1, 1]], 2, 2), ValueError, r"got shape \(1, 3\)"),
    (lambda: BlockMask.from_lengths(1, 2, 2), ValueError, r"got shape \(\)"),
    (lambda: BlockMask.prefix(4, 3), ValueError, "prefix_lengths: got values from 4 to 4"),
    (lambda: BlockMask.global_tokens([3], 3), ValueError, "indices: got values from 3 to 3"),
    (lambda: BlockMask.global_tokens(3, 4), ValueError, r"indices: got shape \(\)"),
    (lambda: BlockMask.strided(3, stride=0), ValueError, "stride: got 0"),
    (lambda: BlockMask.from_function(3, 3), TypeError, "function: got int"),
    (lambda: BlockMask.from_function(no_bool, 3), TypeError, "function: got an array of int64"),
    (lambda: BlockMask.from_function(lambda b, h, q, k: np.ones((3, 3), bool), 3), ValueError,
     r"function: got bools of shape \(3, 3\)"),
    (lambda: BlockMask.from_function(no_bool, 3, within=BlockMask.causal(4)), ValueError,
     "within: got"),
    (lambda: BlockMask.from_function(no_bool, 3, within=np.ones((3, 3), bool)), TypeError,
     "within: got ndarray"),
    (lambda: BlockMask.causal(3) & BlockMask.causal(4), ValueError, "broadcasts to"),
    (lambda: BlockMask.from_lengths([1, 1], 3, 3) | BlockMask.from_lengths([1] * 3, 3, 3),
     ValueError, "broadcasts to"),
    (lambda: BlockMask.causal(3) & np.ones((3, 3), bool), TypeError, "operand|to_dense"),
    (lambda: np.asarray(BlockMask.causal(3)), TypeError, "to_dense"),
    (lambda: BlockMask.causal(3)[0], TypeError, "two slices"),
    (lambda: BlockMask.causal(3)[0:1, 0], TypeError, "two slices"),
    (lambda: BlockMask.causal(3)[::2, :], ValueError, "step 2"),
    (lambda: huge().to_dense(), MemoryError, "to_dense: got shape"),
    (lambda: BlockMask.causal(3, offset=1), TypeError, "offset"),
])
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
