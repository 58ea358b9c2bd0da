"""What the tests mean by agreement: float64 (or long double) references and the accuracy gate."""

import numpy as np

import mha

# Without FMA every multiply-add rounds twice, where NumPy's BLAS rounds once.
ROUNDINGS = 2 if mha.instruction_set() == "baseline" else 1
FLOOR = {np.dtype(np.float32): ROUNDINGS * 1e-6, np.dtype(np.float64): ROUNDINGS * 1e-14}
WIDER = {np.dtype(np.float32): np.float64, np.dtype(np.float64): np.longdouble}


def relative_error(got, exact):
    """max |got - exact| / max |exact| over the finite entries, which must be the same ones."""
    got, exact = np.asarray(got), np.asarray(exact)
    assert got.shape == exact.shape, (got.shape, exact.shape)
    finite = np.isfinite(exact)
    assert np.array_equal(np.isfinite(got), finite), "finite entries differ"
    same = (got == exact) | (np.isnan(got) & np.isnan(exact)) | finite
    assert same.all(), "infinities or NaN differ"
    if not finite.any():
        return 0.0
    largest = np.abs(exact[finite]).max()
    return float(np.abs(got[finite] - exact[finite]).max() / (largest or 1))


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def widened(arguments, dtype):
    """Float arrays in the wider type that the reference computes in."""
    return [argument.astype(WIDER[np.dtype(dtype)]) for argument in arguments]


def errors_of(function, reference, arguments, options):
    """(our error, plain NumPy's error) for every result of one call, against the wider type."""
    dtype = np.result_type(*arguments)
    got = as_tuple(function(*arguments, **options))
    exact = as_tuple(reference(*widened(arguments, dtype), **options))
    plain = as_tuple(reference(*arguments, **options))
    for result in got:
        assert result.dtype == dtype
    return [(relative_error(ours, wanted), relative_error(numpys, wanted))
            for ours, wanted, numpys in zip(got, exact, plain, strict=True)]


def assert_accurate(function, reference, arguments, options):
    """The gate of the design: error at most max(2 * plain NumPy's, floor). Returns the errors."""
    errors = errors_of(function, reference, arguments, options)
    floor = FLOOR[np.dtype(np.result_type(*arguments))]
    for index, (ours, numpys) in enumerate(errors):
        assert ours <= max(2 * numpys, floor), (index, ours, numpys, options)
    return errors


def by_token(array):
    """The same numbers with the rows of all heads side by side, as projections leave them."""
    return np.ascontiguousarray(np.swapaxes(array, -2, -3)).swapaxes(-2, -3)


class OnlyDlpack:
    """An array of another library that NumPy can take by DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def grouped_inputs(shape, dtype, seed=0):
    """Random query, key and value of (batch, heads, kv_heads, query_len, key_len, head_dim,
    value_head_dim)."""
    batch, heads, kv_heads, query_len, key_len, head_dim, value_head_dim = shape
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((batch, heads, query_len, head_dim)).astype(dtype)
    key = rng.standard_normal((batch, kv_heads, key_len, head_dim)).astype(dtype)
    value = rng.standard_normal((batch, kv_heads, key_len, value_head_dim)).astype(dtype)
    return query, key, value
