"""float16 and bfloat16 for the tests."""

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = [np.dtype(np.float16), BFLOAT16]
# Half the distance of 1 and the next number: the largest relative error of a rounding.
ROUNDING = {HALVES[0]: 2.0**-11, BFLOAT16: 2.0**-8}


def same_bits(one, other):
    """Whether two arrays of halves are the same, signs of zeros and kinds of NaN too."""
    assert one.dtype == other.dtype and one.dtype in HALVES
    return one.shape == other.shape and np.array_equal(one.view(np.uint16), other.view(np.uint16))
