"""When an adapter agrees with its framework."""

import numpy as np
from agreement import FLOOR, relative_error

# In float32 the framework need only be seen to compute the same function; in float64 it says what
# the numbers are.
SAME_FUNCTION = 1e-5
SAME_NUMBERS = 1e-13


def assert_agrees(ours, theirs, exact, case):
    """ours is as exact as theirs, both float32: the gate of tests/helpers/agreement.py, with the
    framework
    in the place of plain NumPy. exact is ours in float64."""
    assert ours.dtype == theirs.dtype == np.float32
    their_error, our_error = relative_error(theirs, exact), relative_error(ours, exact)
    assert their_error <= SAME_FUNCTION, (their_error, case)
    assert our_error <= max(2 * their_error, FLOOR[np.dtype(np.float32)]), (our_error, case)


def assert_same(ours, theirs, case, tolerance=SAME_NUMBERS):
    """The same type, and the same numbers to the tolerance."""
    assert ours.dtype == theirs.dtype
    error = relative_error(ours, theirs)
    assert error <= tolerance, (error, case)
