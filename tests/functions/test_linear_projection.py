"""Steps 1 and 5 of the figure: linear."""

import itertools

import numpy as np
import pytest
from agreement import assert_accurate, relative_error

import mha
from mha import _core, reference


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 9, 13, 100, 400])
@pytest.mark.parametrize(("width", "out"), [(1, 1), (3, 31), (64, 32), (255, 33), (257, 100),
                                            (1024, 70)])
def test_against_the_reference(dtype, rows, width, out):
    rng = np.random.default_rng([rows, width])
    x, weight, bias = (rng.standard_normal(shape).astype(dtype)
                       for shape in ((rows, width), (width, out), (out,)))
    assert_accurate(mha.linear, reference.linear, [x, weight, bias], {})
    assert_accurate(mha.linear, reference.linear, [x, weight], {})


def test_accuracy_gate():
    """In every case at most twice plain NumPy's error, and no larger in the median. Without blocks
    the deepest sums would be six times worse."""
    ratios = []
    for seed, (rows, depth) in enumerate(itertools.product(
            (1, 8, 30, 100), (64, 128, 256, 384, 512, 768, 1024, 3072, 12288))):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((rows, depth), np.float32)
        weight = rng.standard_normal((depth, 100), np.float32)
        [(ours, numpys)] = assert_accurate(mha.linear, reference.linear, [x, weight], {})
        ratios.append(ours / numpys)
    assert np.median(ratios) <= 1, ratios


def test_shapes():
    weight = np.arange(12.0).reshape(3, 4)
    assert mha.linear(np.ones(3), weight).shape == (4,)
    assert mha.linear(np.ones((2, 3)), weight).shape == (2, 4)
    assert mha.linear(np.ones((5, 1, 2, 3)), weight).shape == (5, 1, 2, 4)
    assert mha.linear(np.ones((0, 3)), weight).shape == (0, 4)
    for dtype in (np.float64, np.float32, np.float16):
        of_nothing = np.ones((2, 0), dtype), np.ones((0, 4), dtype), np.arange(4, dtype=dtype)
        assert mha.linear(*of_nothing).tolist() == [[0, 1, 2, 3]] * 2
    assert mha.linear(np.ones((2, 3)), np.ones((3, 0))).shape == (2, 0)
    assert mha.linear([[1, 2]], [[1], [10]]).tolist() == [[21.0]]


@pytest.mark.parametrize("rows", [3, 50])
def test_strides(rows):
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((rows, 40)), rng.standard_normal((40, 50))
    bias = rng.standard_normal(50)
    plain = mha.linear(x, weight, bias)
    assert relative_error(plain, x @ weight + bias) < 1e-14
    layouts = (np.asfortranarray, lambda a: np.repeat(a, 2, axis=0)[::2],
               lambda a: np.repeat(a, 3, axis=-1)[..., ::3],
               lambda a: np.ascontiguousarray(a[::-1])[::-1],
               lambda a: np.ascontiguousarray(a[..., ::-1])[..., ::-1])
    for layout in layouts:
        assert np.array_equal(mha.linear(layout(x), weight, bias), plain)
        assert np.array_equal(mha.linear(x, layout(weight), bias), plain)
        assert np.array_equal(mha.linear(x, weight, layout(bias)), plain)


# How a weight (in, out) may lie: as the figure writes it, as PyTorch stores it, turned around, with
# gaps, with rows a power of two apart, and repeated.
WEIGHT_LAYOUTS = {
    "rows": np.ascontiguousarray,
    "columns": np.asfortranarray,
    "rows backwards": lambda w: np.ascontiguousarray(w[::-1])[::-1],
    "columns backwards": lambda w: np.asfortranarray(w[:, ::-1])[:, ::-1],
    "every third column": lambda w: np.repeat(w, 3, axis=1)[:, ::3],
    "every second row": lambda w: np.repeat(w, 2, axis=0)[::2],
    "part of rows": lambda w: np.pad(w, ((0, 0), (5, 1024 - w.shape[1] % 1024)))[:, 5:-(
        1024 - w.shape[1] % 1024)],
    "part of columns": lambda w: np.pad(w.T, ((0, 0), (3, 1024 - w.shape[0] % 1024)))[:, 3:-(
        1024 - w.shape[0] % 1024)].T,
    "one row repeated": lambda w: np.broadcast_to(w[:1], w.shape),
    "one column repeated": lambda w: np.broadcast_to(w[:, :1], w.shape),
}


@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_weight_of_any_layout_gives_the_bits_of_a_packed_one(dtype, layout):
    """Few rows read it as it lies, more rows pack it: the sums have one order."""
    rng = np.random.default_rng(12)
    for width, out in ((1, 1), (5, 40), (128, 32), (129, 31), (300, 257), (137, 1100), (7, 4500)):
        weight = WEIGHT_LAYOUTS[layout](rng.standard_normal((width, out)).astype(dtype))
        bias = rng.standard_normal(out).astype(dtype)
        packed = _core.pack_weight(np.ascontiguousarray(weight))
        for rows in (1, 2, 3, 4, 7, 8, 9, 15, 24, 25, 49):
            x = rng.standard_normal((rows, width)).astype(dtype)
            got = mha.linear(x, weight, bias)
            assert np.array_equal(got, mha.linear(x, packed, bias)), (width, out, rows)
            wanted = x.astype(np.longdouble) @ weight.astype(np.longdouble) + bias
            size = np.abs(x) @ np.abs(weight) + np.abs(bias)  # what sums cancel to is no measure
            assert (np.abs(got - wanted) <= 4 * np.finfo(dtype).eps * size).all()


@pytest.mark.parametrize("layout", ["rows", "columns", "every third column"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shallow_and_deep_weights_of_many_rows_give_the_same_bits(dtype, layout):
    """They are not packed as a whole: each block of rows packs them as it goes."""
    rng = np.random.default_rng(15)
    for rows, width, out in ((400, 64, 700), (770, 3, 1300), (390, 5500, 40), (500, 128, 1030)):
        x = rng.standard_normal((rows, width)).astype(dtype)
        weight = WEIGHT_LAYOUTS[layout](rng.standard_normal((width, out)).astype(dtype))
        got = mha.linear(x, weight)
        packed = _core.pack_weight(np.ascontiguousarray(weight))
        assert np.array_equal(got, mha.linear(x, packed)), (rows, width, out)
        assert np.array_equal(got[:30], mha.linear(x[:30], weight)), (rows, width, out)
        size = np.abs(x) @ np.abs(weight)
        wanted = x.astype(np.float64) @ weight.astype(np.float64)
        assert (np.abs(got - wanted) <= 4 * np.finfo(dtype).eps * size).all()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("width", "out"), [(200, 1111), (1500, 7), (1500, 64), (300, 250)])
def test_a_weight_that_is_not_packed_is_divided_among_threads(width, out, threads):
    """By columns, and a narrow weight of many rows by rows."""
    rng = np.random.default_rng(13)
    weight = rng.standard_normal((width, out), np.float32)
    for rows in (1, 6, 30, 500):
        x = rng.standard_normal((rows, width), np.float32)
        with mha.threads(1):
            alone = mha.linear(x, weight), mha.linear(x, np.asfortranarray(weight))
        with mha.threads(threads):
            assert np.array_equal(mha.linear(x, weight), alone[0])
            assert np.array_equal(mha.linear(x, np.asfortranarray(weight)), alone[0])
        assert np.array_equal(alone[1], alone[0])


# How an x (rows, depth) may lie: the figure's way, transposed, turned around, repeated, with gaps.
X_LAYOUTS = {
    "transposed": np.asfortranarray,
    "transposed, in wide rows": lambda x: np.pad(x.T, ((0, 0), (2, 300)))[:, 2:2 + len(x)].T,
    "transposed backwards": lambda x: np.ascontiguousarray(x[:, ::-1].T).T[:, ::-1],
    "one column repeated": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "one row repeated": lambda x: np.broadcast_to(x[:1], x.shape),
    "every third column": lambda x: np.repeat(x, 3, axis=1)[:, ::3],
    "rows backwards": lambda x: np.ascontiguousarray(x[::-1])[::-1],
}


@pytest.mark.parametrize("layout", X_LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_an_x_of_any_layout_gives_the_bits_of_a_contiguous_one(dtype, layout):
    """One row is transposed as well as contiguous; packed weights and plain ones, halves too."""
    rng = np.random.default_rng(16)
    for width, out in ((5, 3), (64, 64), (130, 33), (64, 300), (513, 128)):
        weight, bias = (rng.standard_normal(shape).astype(dtype) for shape in ((width, out), out))
        packed, halves = _core.pack_weight(weight), weight.astype(np.float16)
        for rows in (1, 2, 3, 5, 9, 26):
            x = X_LAYOUTS[layout](rng.standard_normal((rows, width)).astype(dtype))
            plain = np.ascontiguousarray(x)
            wanted = mha.linear(plain, weight, bias)
            size = np.abs(plain).astype(float) @ np.abs(weight).astype(float) + np.abs(bias)
            exact = plain.astype(float) @ weight.astype(float) + bias
            assert (np.abs(wanted - exact) <= 4 * np.finfo(dtype).eps * size).all()
            for threads in (1, 2):
                with mha.threads(threads):
                    assert np.array_equal(mha.linear(x, weight, bias), wanted)
                    assert np.array_equal(mha.linear(x, packed, bias), wanted)
                    of_halves = mha.linear(x, halves, bias)
            assert np.array_equal(of_halves, mha.linear(plain, halves, bias))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_transposed_x_gives_the_same_bits(dtype):
    """x^T @ grad, the gradient of a weight: not transposed, the same bits."""
    rng = np.random.default_rng(4)
    for rows, width, out in ((1, 9, 3), (2, 130, 64), (7, 300, 33), (100, 513, 40), (401, 260, 70),
                             (390, 0, 5), (900, 2, 40), (40, 50, 300), (1000, 1, 700)):
        x = rng.standard_normal((width, rows + 3)).astype(dtype)[:, 1:rows + 1].T
        weight, bias = (rng.standard_normal(shape).astype(dtype) for shape in ((width, out), out))
        plain = mha.linear(np.ascontiguousarray(x), weight, bias)
        assert np.array_equal(mha.linear(x, weight, bias), plain)
        assert np.array_equal(mha.linear(x, _core.pack_weight(weight), bias), plain)
        assert np.array_equal(mha.linear(x[:, ::-1], weight[::-1], bias),
                              mha.linear(np.ascontiguousarray(x[:, ::-1]), weight[::-1], bias))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_transposed_x_of_halves_gives_the_same_bits(threads):
    rng = np.random.default_rng(6)
    for rows, width, out in ((3, 9, 3), (100, 513, 40), (401, 260, 270), (900, 2, 40)):
        x = rng.standard_normal((width, rows)).astype(np.float16).T
        weight = rng.standard_normal((width, out), np.float32)
        with mha.threads(threads):
            got = mha.linear(x, weight)
            assert np.array_equal(got, mha.linear(np.ascontiguousarray(x), weight))


def test_packed_weights_give_the_same_bits():
    rng = np.random.default_rng(2)
    for rows in (1, 8, 9, 200):
        for width, out in ((40, 100), (300, 33)):
            x = rng.standard_normal((rows, width), np.float32)
            weight = rng.standard_normal((width, out), np.float32)
            packed = _core.pack_weight(weight)
            assert np.array_equal(mha.linear(x, packed), mha.linear(x, weight))


@pytest.mark.parametrize(("dtype", "width"), [(np.float32, 1024), (np.float64, 512),
                                              (np.float16, 2048), (np.float32, 40)])
def test_rows_in_the_same_sets_of_the_cache_give_the_same_bits(dtype, width):
    """Rows 4,096 bytes apart are copied first, in either direction, by any number of threads."""
    rng = np.random.default_rng(5)
    size = 4096 // np.dtype(dtype).itemsize * -(-width * np.dtype(dtype).itemsize // 4096)
    for rows in (7, 9, 97, 390):
        there = rng.standard_normal((rows, size)).astype(dtype)[:, :width]
        weight, bias = (rng.standard_normal(shape).astype(dtype) for shape in ((width, 600), 600))
        elsewhere = np.concatenate([there, there[:, :8]], axis=1)[:, :width]
        packed = _core.pack_weight(weight)
        for threads in (1, 2):
            with mha.threads(threads):
                for x, same in ((there, elsewhere), (there[::-1], elsewhere[::-1]),
                                (np.broadcast_to(there[0], there.shape), elsewhere[:1])):
                    wanted = np.broadcast_to(mha.linear(same, weight, bias), (rows, 600))
                    assert np.array_equal(mha.linear(x, weight, bias), wanted)
                    assert np.array_equal(mha.linear(x, packed, bias), wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_output_in_the_same_sets_of_the_cache_gives_the_same_bits(dtype):
    """Rows of the output 4,096 bytes apart: sums between chains lie elsewhere."""
    rng = np.random.default_rng(6)
    out = 4096 // np.dtype(dtype).itemsize
    for depth in (100, 128, 129, 300):
        weight = rng.standard_normal((depth, out)).astype(dtype)
        packed, narrower = _core.pack_weight(weight), _core.pack_weight(weight[:, :out - 9])
        for rows in (8, 9, 12, 13, 96, 97, 400):
            x = rng.standard_normal((rows, depth)).astype(dtype)
            wanted = mha.linear(x, narrower)
            assert np.array_equal(mha.linear(x, packed)[:, :out - 9], wanted)
            assert np.array_equal(mha.linear(x, weight)[:, :out - 9], wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_few_rows_of_a_very_deep_weight_give_the_bits_of_packed_ones(dtype):
    rng = np.random.default_rng(7)
    for depth in (8191, 8192, 8197):
        for out in (1, 40, 131):
            weight = rng.standard_normal((depth, out)).astype(dtype)
            packed = _core.pack_weight(weight)
            for rows in (1, 11, 12, 13, 16, 17):
                x = rng.standard_normal((rows, depth)).astype(dtype)
                assert np.array_equal(mha.linear(x, weight), mha.linear(x, packed))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("depth", [512, 1024, 2048, 3072, 4096, 8192])
def test_columns_in_the_same_sets_of_the_cache_give_the_same_bits(dtype, depth):
    """One row and columns a multiple of 4 KB apart: the bits of packed weights, and of any x."""
    rng = np.random.default_rng(depth)
    for out in (1, 2, 7, 16, 17, 30, 33):
        for further in (0, 1024):
            weight = rng.standard_normal((out, depth + further)).astype(dtype)[:, :depth].T
            x, bias = (rng.standard_normal(size).astype(dtype) for size in (depth, out))
            x[[0, -1]] = np.inf, -0.0
            weight[0] = np.linspace(1, 2, out)
            packed = _core.pack_weight(weight)
            for threads in (1, 2):
                with mha.threads(threads):
                    wanted = mha.linear(x, packed, bias)
                    assert np.array_equal(mha.linear(x, weight, bias), wanted)
                    finite = np.where(np.isinf(x), dtype(3), x)
                    ours = mha.linear(finite, weight)
                    assert np.array_equal(ours, mha.linear(finite, packed))
                    exact = finite.astype("f8") @ weight.astype("f8")
                    most = np.abs(finite).astype("f8") @ np.abs(weight).astype("f8")
                    assert np.all(np.abs(ours - exact) <= 8 * np.finfo(dtype).eps * most)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_few_rows_of_a_transposed_weight_give_the_bits_of_packed_ones(dtype):
    """Vectors of columns two at a time, one, or none; columns that lie apart; ends of the depth."""
    rng = np.random.default_rng(4)
    for depth in (0, 1, 5, 127, 128, 131, 300):
        for out in (1, 3, 4, 8, 9, 15, 16, 17, 24, 31, 33, 64, 70):
            weight = rng.standard_normal((out, depth + out % 3)).astype(dtype)[:, :depth].T
            packed = _core.pack_weight(weight)
            for rows in (1, 2, 3, 4, 7):
                x = rng.standard_normal((rows, depth)).astype(dtype)
                assert np.array_equal(mha.linear(x, weight), mha.linear(x, packed))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("depth", "out", "stride"), [(131, 1030, 1056), (260, 531, 544),
                                                      (70, 4500, 4512), (270, 1030, 1031)])
def test_one_row_of_a_weight_that_begins_anywhere(dtype, depth, out, stride):
    """Vectors that are read from whole lines, and the columns before and behind: the bits of a
    packed weight. Of the last shape each row begins elsewhere in a line."""
    rng = np.random.default_rng(out)
    lines = np.empty((depth + 1) * stride * np.dtype(dtype).itemsize + 64, np.uint8)
    lines = lines[-lines.ctypes.data % 64:][:(depth + 1) * stride * np.dtype(dtype).itemsize]
    numbers = rng.standard_normal(lines.size // np.dtype(dtype).itemsize).astype(dtype)
    lines.view(dtype)[:] = numbers
    x = rng.standard_normal(depth).astype(dtype)
    x[[0, -1]] = np.inf, -0.0
    for begin in range(17):
        weight = lines.view(dtype)[begin:][:depth * stride].reshape(depth, stride)[:, :out]
        packed = _core.pack_weight(weight)
        for threads in (1, 2):
            with mha.threads(threads):
                assert np.array_equal(mha.linear(x, weight), mha.linear(x, packed), equal_nan=True)
                assert np.array_equal(mha.linear(np.abs(x[1:]), weight[1:]),
                                      mha.linear(np.abs(x[1:]), _core.pack_weight(weight[1:])))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_few_rows_of_a_weight_that_caches_do_not_hold(dtype):
    """They prefetch it: a part of the columns of 17 MB and more."""
    rng = np.random.default_rng(17)
    for depth in (131, 256, 258):
        whole = np.zeros((depth, 17_000_000 // depth // np.dtype(dtype).itemsize + 7), dtype)
        for out in (5, 64, 300, 1100):
            weight = whole[:, 3:out + 3]
            weight[...] = rng.standard_normal(weight.shape)
            packed = _core.pack_weight(weight)
            for rows in (1, 2, 3, 4, 5, 8, 15, 16, 17):
                x = rng.standard_normal((rows, depth)).astype(dtype)
                assert np.array_equal(mha.linear(x, weight), mha.linear(x, packed))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_row_of_a_narrow_weight_gives_the_bits_of_a_packed_one(dtype):
    rng = np.random.default_rng(64)
    for depth in (0, 1, 127, 128, 700):
        for out in (8, 16, 32, 64, 128):
            for gap in (0, 3):
                weight = rng.standard_normal((depth, out + gap)).astype(dtype)[:, :out]
                x = rng.standard_normal(depth).astype(dtype)
                assert np.array_equal(mha.linear(x, weight),
                                      mha.linear(x, _core.pack_weight(weight)))


def test_one_row_alone_is_the_same_row():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((20, 600), np.float32)
    weight = rng.standard_normal((600, 70), np.float32)
    whole = mha.linear(x, weight)
    for row in range(20):
        assert np.array_equal(mha.linear(x[row], weight), whole[row])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_one_row_takes_the_panels_of_a_packed_weight_in_a_row(dtype):
    """Two side by side, cut ones, none: the bits of rows together, by any number of threads."""
    rng = np.random.default_rng(6)
    for width in (0, 1, 127, 128, 129, 300):
        for out in (1, 31, 32, 33, 63, 64, 65, 96, 100, 129, 260, 513):
            x = rng.standard_normal((9, width)).astype(dtype)
            weight, bias = (rng.standard_normal(shape).astype(dtype)
                            for shape in ((width, out), out))
            together = mha.linear(x, weight, bias)
            packed = _core.pack_weight(weight)
            for threads in (1, 2):
                with mha.threads(threads):
                    for row in (0, 8):
                        assert np.array_equal(mha.linear(x[row], packed, bias), together[row])
                        assert np.array_equal(mha.linear(x[row], packed),
                                              mha.linear(x[row], weight))


def test_gradients_of_any_byte_order():
    x, weight = np.ones((4, 8), np.float32), np.eye(8, dtype=np.float32)
    gradient = np.arange(32.0).reshape(4, 8)
    pullback = mha.linear_vjp(x, weight)[1]
    for dtype in (">f4", ">f8", "<f2"):
        assert np.array_equal(pullback(gradient.astype(dtype)).x, gradient)


def test_the_gradient_of_no_biases_takes_no_memory():
    x = np.lib.stride_tricks.as_strided(np.ones(2, np.float32), (2**40, 2), (0, 4))
    pullback = mha.linear_vjp(x, np.ones((2, 0), np.float32), np.ones(0, np.float32),
                              wrt=["bias"])[1]
    assert pullback(np.empty((2**40, 0), np.float32)).bias.shape == (0,)


@pytest.mark.parametrize("x", ["f2", "f4", "f8", "i4"])
@pytest.mark.parametrize("weight", ["f2", "f4", "f8", "i4"])
def test_types_of_gradients_are_those_of_the_docstring(x, weight):
    output, back = mha.linear_vjp(np.ones((2, 3), x), np.ones((3, 4), weight), np.ones(4, weight))
    gradients = back(np.ones_like(output))
    of_x = {"i4": "f8"}.get(x, x)
    arithmetic = "f8" if of_x == "f8" else "f4"
    expected = "f2" if arithmetic == "f4" and weight == "f2" else arithmetic
    assert gradients.x.dtype == of_x
    assert gradients.weight.dtype == gradients.bias.dtype == expected
