"""Layers whose tokens stand at several positions: calls, gradients, ragged batches, caches."""

import copy
import pickle

import numpy as np
import pytest
from agreement import relative_error

import mha
from mha import reference

ROTARIES = {
    "split": mha.Rotary(8, sections=(2, 1, 1)),
    "in turns": mha.Rotary(8, sections=(2, 1, 1), section_layout="interleaved"),
    "interleaved": mha.Rotary(8, sections=(1, 3), layout="interleaved", magnitude=1.2)}


def new_layer(rotary, **options):
    options = {"qk_norm": "head", "use_bias": True, "dtype": np.float64} | options
    return mha.MultiHeadAttention(24, 3, rotary=rotary, rng=0, **options)


def some(rotary, *shape, seed=0):
    """x and positions (axes,) + batch + (len,) of an image, say."""
    rng = np.random.default_rng(seed)
    count = len(rotary.sections)
    return rng.standard_normal((*shape, 24)), rng.integers(0, 40, (count, *shape))


@pytest.fixture(params=ROTARIES)
def rotary(request):
    return ROTARIES[request.param]


def by_hand(layer, x, positions, causal=False):
    """float64, one sequence: every step of its own, the rotation as Rotary has it."""
    def heads(W, b, norm=None):
        rows = (x @ W + b).reshape(len(x), 3, 8).swapaxes(0, 1)
        if norm is None:
            return rows
        rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * norm
        return layer.rotary(rows[None], positions)[0]
    query = heads(layer.W_q, layer.b_q, layer.q_norm)
    key, value = heads(layer.W_k, layer.b_k, layer.k_norm), heads(layer.W_v, layer.b_v)
    scores = query @ key.swapaxes(1, 2) / 8**0.5
    if causal:
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended = weights / weights.sum(-1, keepdims=True) @ value
    return attended.swapaxes(0, 1).reshape(len(x), 24) @ layer.W_o + layer.b_o


def test_a_call_by_hand_and_by_the_reference(rotary):
    layer = new_layer(rotary)
    x, positions = some(rotary, 4, 7)
    wanted = np.stack([by_hand(layer, x[i], positions[:, i]) for i in range(4)])
    np.testing.assert_allclose(layer(x, positions=positions), wanted, rtol=0, atol=1e-13)
    np.testing.assert_allclose(layer(x[1], positions=positions[:, 1]), wanted[1], rtol=0,
                               atol=1e-13)
    one = positions[:, 0]  # of all sequences alike
    np.testing.assert_allclose(layer(x, positions=one)[2], by_hand(layer, x[2], one), rtol=0,
                               atol=1e-13)
    steps = reference.steps(layer, x, positions=positions)
    np.testing.assert_allclose(steps["output"], wanted, rtol=0, atol=1e-13)
    of_one = reference.steps(layer, x[1], positions=positions[:, 1])
    np.testing.assert_allclose(of_one["output"], wanted[1], rtol=0, atol=1e-13)


def test_key_positions_of_their_own(rotary):
    layer = new_layer(rotary)
    x, positions = some(rotary, 4, 5)
    keys, key_positions = some(rotary, 4, 7, seed=1)
    whole = layer(x, keys, positions=positions, key_positions=key_positions)
    options = {**layer.parameters(), "rotary": rotary, "positions": positions,
               "key_positions": key_positions}
    for module in (mha, reference):
        got = module.multi_head_attention(x, keys, keys, num_heads=3, **options)
        np.testing.assert_allclose(got, whole, rtol=0, atol=1e-13)
    memory = layer.new_memory(keys, key_positions=key_positions)
    np.testing.assert_allclose(layer(x, cache=memory, positions=positions), whole, rtol=0,
                               atol=1e-13)


@pytest.mark.parametrize("batched", [True, False])
def test_gradients_against_the_reference(rotary, batched):
    layer = new_layer(rotary)
    x, positions = some(rotary, *((4, 7) if batched else (7,)))
    grad = np.random.default_rng(5).standard_normal(x.shape)
    output, pullback = layer.vjp(x, positions=positions, causal=True)
    assert np.array_equal(output, layer(x, positions=positions, causal=True))
    options = {**layer.parameters(), "rotary": rotary, "positions": positions,
               "key_positions": positions, "num_heads": 3, "causal": True}
    ours = mha.multi_head_attention_vjp(x, x, x, **options)[1](grad)
    wanted = reference.multi_head_attention_vjp(x, x, x, **options)[1](grad)
    for name in ("W_q", "W_k", "b_v", "q_norm", "k_norm"):
        for got in (pullback(grad), ours):
            assert relative_error(getattr(got, name), wanted[name]) < 1e-12


def test_positions_that_may_be_axes_or_sequences():
    layer = new_layer(ROTARIES["split"])
    x, positions = some(layer.rotary, 3, 7)
    doubtful = positions[:, 0]
    calls = [lambda: layer(x, positions=doubtful), lambda: layer.vjp(x, positions=doubtful),
             lambda: layer(x, cache=layer.new_cache(3), positions=doubtful),
             lambda: layer.new_memory(x, key_positions=doubtful)]
    for call in calls:
        with pytest.raises(ValueError, match=r"ositions: got shape \(3, 7\), which may be 3 posit"):
            call()
    with pytest.raises(ValueError, match=r"^positions: got shape \(2, 3, 7\), wanted \(7,\) or \(3"
                                         r", 7\), or the 3 position axes of the rotary's sections"):
        layer(x, cache=layer.new_cache(3), positions=positions[:2])


@pytest.mark.parametrize("count", [2, 3])
def test_a_cache_is_a_call_in_pieces(rotary, count):
    """Also where as many sequences as axes stand at default positions of their own."""
    layer = new_layer(rotary)
    x, positions = some(rotary, count, 9)
    wanted = layer(x, positions=positions, causal=True)
    cache = layer.new_cache(count)
    parts = [layer(x[:, i:j], cache=cache, positions=positions[..., i:j])
             for i, j in ((0, 4), (4, 5), (5, 9))]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), wanted, rtol=0, atol=1e-13)
    plain = layer.new_cache(count)
    layer(x[:, :4], cache=plain, lengths=[4, 2, 3][:count])
    got = layer(x[:, 4:], cache=plain)
    assert plain.lengths.tolist() == [9, 7, 8][:count]
    for row, length in enumerate([4, 2, 3][:count]):
        alone = np.concatenate([x[row, :length], x[row, 4:]])
        np.testing.assert_allclose(got[row], layer(alone, causal=True)[length:], rtol=0,
                                   atol=1e-13)


def test_behind_an_image_positions_are_required(rotary):
    layer = new_layer(rotary)
    x, image = some(rotary, 2, 9)
    message = r"^positions: got none, wanted those of these rows, . axes in front of \(2, 1\)"
    cache = layer.new_cache(2)
    layer(x[:, :2], cache=cache)                            # text
    layer(x[:, 2:3], cache=cache, positions=[2])            # where it stands anyway
    layer(x[:, 3:4], cache=cache)
    before = copy.copy(cache)
    layer(x[:, 4:8], cache=cache, positions=image[..., 4:8])
    for same in (cache, copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        with pytest.raises(ValueError, match=message):
            layer(x[:, 8:], cache=same)
        assert same.lengths.tolist() == [8, 8]
        layer(x[:, 8:], cache=same, positions=[8])          # at its place, yet behind the image
        with pytest.raises(ValueError, match=message):
            layer(x[:, 8:], cache=same)
        layer(x[:, 8:], cache=same, positions=[6])          # behind the image, along all axes
        with pytest.raises(ValueError, match=message):
            layer(x[:, 8:], cache=same)
        same.truncate([5, 0])
        same.select([1, 0])
        with pytest.raises(ValueError, match=message):
            layer(x[:, 8:], cache=same)
        same.truncate(0)
        layer(x[:, :3], cache=same)                         # nothing stands before
        layer(x[:, 3:4], cache=same)
        assert np.array_equal(same.key, before.key[:, :, :4])
    layer(x[:, 4:5], cache=before)
    cache.reset()
    layer(x[:, :3], cache=cache)
    # An empty call of an image has moved nothing; nor have rows of padding.
    layer(x[:, :0], cache=cache, positions=image[..., :0])
    moved = np.full((len(rotary.sections), 2, 3), 7)
    moved[..., 0] = 3
    layer(x[:, :3], cache=cache, lengths=[1, 1], positions=moved)
    layer(x[:, :1], cache=cache)
    # Without sections positions are as they were: none asks for them.
    plain = new_layer(mha.Rotary(8))
    cache = plain.new_cache(2)
    plain(x[:, :3], cache=cache, positions=[5, 6, 7])
    plain(x[:, :3], cache=cache)


def test_going_back_to_before_the_image_and_trees_of_text(rotary):
    """Only sequences that have such rows need positions."""
    axes, layer = len(rotary.sections), new_layer(rotary)
    x, _ = some(rotary, 2, 9)
    cache = layer.new_cache(2)
    layer(x[:, :4], cache=cache)
    image = np.broadcast_to(np.arange(4, 7), (axes, 2, 3)).copy()
    image[:, 1] = 4                                         # of sequence 1 alone
    layer(x[:, 4:7], cache=cache, positions=image)
    text, both = copy.copy(cache), copy.copy(cache)
    text.select([0])
    layer(x[:1, 7:], cache=text)
    with pytest.raises(ValueError, match=r"^positions: got none"):
        layer(x[:, 7:], cache=both)
    both.truncate([7, 4])
    got = layer(x[:, 7:], cache=both)
    alone = layer(np.concatenate([x[1, :4], x[1, 7:]]), causal=True)
    np.testing.assert_allclose(got[1], alone[4:], rtol=0, atol=1e-13)
    layer(x[:, 7:], cache=both)
    # A tree: rows 4 and 5 are two guesses for position 4, row 6 follows the second.
    tree = layer.new_cache(2)
    layer(x[:, :4], cache=tree)
    mask = np.ones((3, 7), bool)
    mask[:, 4:] = [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    layer(x[:, 4:7], cache=tree, mask=mask,
          positions=np.broadcast_to([4, 4, 5], (axes, 2, 3)))
    tree.keep(4, [[1, 2]] * 2)
    got = layer(x[:, 7:], cache=tree)
    wanted = layer(np.concatenate([x[:, :4], x[:, 5:]], axis=1), causal=True)
    np.testing.assert_allclose(got, wanted[:, 6:], rtol=0, atol=1e-13)


def test_left_padding(rotary):
    layer = new_layer(rotary)
    x, _ = some(rotary, 3, 6)
    cache = layer.new_cache(3)
    got = layer(x, cache=cache, lengths=[6, 2, 4], padding="left")
    got_next = layer(x[:, :1], cache=cache)
    for row, length in enumerate([6, 2, 4]):
        alone = np.concatenate([x[row, 6 - length:], x[row, :1]])
        wanted = layer(alone, causal=True)
        np.testing.assert_allclose(got[row, 6 - length:], wanted[:-1], rtol=0, atol=1e-13)
        np.testing.assert_allclose(got_next[row, 0], wanted[-1], rtol=0, atol=1e-13)


def test_pickles_of_caches_from_before():
    layer = new_layer(ROTARIES["split"])
    x, _ = some(layer.rotary, 2, 4)
    cache = layer.new_cache(2)
    layer(x, cache=cache)
    state = cache.__getstate__()
    del state["moved"]
    old = mha.KVCache.__new__(mha.KVCache)
    old.__setstate__(state)
    assert np.array_equal(layer(x, cache=old), layer(x, cache=cache))
    with pytest.raises(ValueError, match=r"state: got one that does not fit together \(moved"):
        old.__setstate__(state | {"moved": "3"})


def test_ragged_calls(rotary):
    layer = new_layer(rotary)
    x, positions = some(rotary, 12)
    starts = [0, 5, 5, 12]
    for where in (positions, np.arange(12)):
        got = layer(x, starts=starts, causal=True, positions=where)
        output, pullback = layer.vjp(x, starts=starts, causal=True, positions=where)
        assert np.array_equal(output, got)
        grad = np.random.default_rng(1).standard_normal(x.shape)
        of_x, of_norm = np.zeros_like(x), 0
        for first, end in ((0, 5), (5, 12)):
            rows = slice(first, end)
            alone, pull = layer.vjp(x[rows], causal=True, positions=where[..., rows])
            np.testing.assert_allclose(got[rows], alone, rtol=0, atol=1e-13)
            gradients = pull(grad[rows])
            of_x[rows], of_norm = gradients.query, of_norm + gradients.k_norm
        found = pullback(grad)
        assert relative_error(found.query, of_x) < 1e-13
        assert relative_error(found.k_norm, of_norm) < 1e-13
    np.testing.assert_allclose(layer(x, starts=starts, causal=True)[5:], layer(x[5:], causal=True),
                               rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match=r"^positions: got shape \(12, 2\), wanted \(12,\)"):
        layer(x, starts=starts, positions=np.zeros((12, 2), int))
    plain = new_layer(mha.Rotary(8))
    with pytest.raises(ValueError, match=r"^positions: got one with starts, wanted none: rows of"):
        plain(x, starts=starts, positions=np.arange(12))


def test_a_pool_of_pages(rotary):
    layer = new_layer(rotary)
    pool = mha.PagedCache(8, 3, 8, layers=2, dtype=np.float64)
    x, positions = some(rotary, 9)
    text, image = pool.new(), pool.new()
    got = layer(x, starts=[0, 4, 9], cache=pool[0], sequences=[text, image],
                positions=np.concatenate([np.broadcast_to(np.arange(4), (len(positions), 4)),
                                          positions[:, 4:]], axis=1))
    np.testing.assert_allclose(got[4:], layer(x[4:], causal=True, positions=positions[:, 4:]),
                               rtol=0, atol=1e-13)
    np.testing.assert_allclose(got[:4], layer(x[:4], causal=True), rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match=r"^positions: got none, wanted .* axes in front of \(9,"):
        layer(x, starts=[0, 4, 9], cache=pool[1], sequences=[text, image])
    layer(x[:1], starts=[0, 1], cache=pool[0], sequences=[text])  # text alone needs none
    layer(x[:1], starts=[0, 1], cache=pool[0], sequences=[image], positions=[5])  # at its place
    fork = pool.fork(image)
    for id in (image, fork):
        with pytest.raises(ValueError, match=r"^positions: got none, wanted .* in front of \(2,\)"):
            layer(x[:2], starts=[0, 1, 2], cache=pool[0], sequences=[text, id])
    assert pool.lengths([text, image]).tolist() == [0, 0]  # layer 1 has none
    layer(np.concatenate([x, x[:1]]), starts=[0, 4, 10], cache=pool[1], sequences=[text, image],
          positions=np.concatenate([positions, positions[:, :1]], axis=1))
    pool.truncate(image, 3)
    with pytest.raises(ValueError, match=r"^positions: got none"):
        layer(x[:1], starts=[0, 1], cache=pool[0], sequences=[image])
    pool.truncate(image, 0)
    layer(x[:2], starts=[0, 2], cache=pool[0], sequences=[image])
    got = layer(x[2:4], starts=[0, 2], cache=pool[0], sequences=[image])
    np.testing.assert_allclose(got, layer(x[:4], causal=True)[2:], rtol=0, atol=1e-13)


def test_windows_that_dropped_the_image(rotary):
    layer = new_layer(rotary)
    x, positions = some(rotary, 1, 300)
    wanted = layer(x, positions=positions, causal=True, window=(3, 0))
    cache = layer.new_cache(1, window=4)
    pool = mha.PagedCache(8, 3, 8, dtype=np.float64, window=4)
    id = pool.new()
    for i, j in ((0, 150), (150, 290), (290, 300)):
        part = {"positions": positions[:, 0, i:j]}
        for got in (layer(x[:, i:j], cache=cache, **part)[0],
                    layer(x[0, i:j], starts=[0, j - i], cache=pool[0], sequences=[id], **part)):
            np.testing.assert_allclose(got, wanted[0, i:j], rtol=0, atol=1e-13)
    assert cache.start == 256 and pool.pages_free == 7
    text = np.arange(300, 500)  # at its place
    layer(x[:, :200], cache=cache, positions=text)
    layer(x[0, :200], starts=[0, 200], cache=pool[0], sequences=[id], positions=text)
    layer(x[0, :200], starts=[0, 200], cache=pool[0], sequences=[id], positions=text + 200)
    with pytest.raises(ValueError, match=r"^positions: got none"):
        layer(x[:, :1], cache=cache)
    with pytest.raises(ValueError, match=r"^positions: got none"):
        layer(x[0, :1], starts=[0, 1], cache=pool[0], sequences=[id])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_other_types(rotary, dtype):
    layer = new_layer(rotary, dtype=dtype)
    wide = new_layer(rotary)
    wide.load_parameters(layer.parameters())
    x, positions = some(rotary, 2, 7)
    x = x.astype(dtype)
    got = layer(x, positions=positions)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, wide(x.astype(np.float64), positions=positions), rtol=0,
                               atol=1e-5 if dtype == np.float32 else 2e-2)


def test_a_layer_is_copied_and_pickled_with_its_sections(rotary):
    layer = new_layer(rotary)
    x, positions = some(rotary, 2, 7)
    wanted = layer(x, positions=positions)
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)),
                 copy.deepcopy(layer).freeze()):
        assert same.rotary == rotary
        np.testing.assert_allclose(same(x, positions=positions), wanted, rtol=0, atol=1e-13)
