"""mha among the libraries whose threads threadpoolctl shows and limits."""

import numpy as np
import pytest
import threadpoolctl

import mha
import mha.compat.threadpoolctl


def entry():
    (found,) = (library for library in threadpoolctl.threadpool_info()
                if library["user_api"] == "mha")
    return found


@pytest.fixture(autouse=True)
def three_threads():
    before = mha.get_num_threads()
    mha.set_num_threads(3)
    yield
    mha.set_num_threads(before)


def test_info():
    found = entry()
    assert found["num_threads"] == 3
    assert found["version"] == mha.__version__
    assert found["architecture"] == mha.instruction_set()
    assert found["filepath"] == mha._core.__file__
    mha.set_num_threads(2)
    assert entry()["num_threads"] == 2


@pytest.mark.parametrize("limits", [1, {"mha": 1}])
def test_limits_hold_within_and_go_afterwards(limits):
    x = np.ones((4, 8, 100, 16), np.float32)
    with threadpoolctl.threadpool_limits(limits):
        assert entry()["num_threads"] == mha.get_num_threads() == 1
        with mha.threads(2):
            assert mha.get_num_threads() == 2
        mha.scaled_dot_product_attention(x, x, x)
    assert mha.get_num_threads() == 3


def test_others_limits_leave_mha_alone():
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        assert mha.get_num_threads() == 3
    with threadpoolctl.threadpool_limits(1, user_api="mha"):
        assert mha.get_num_threads() == 1


def test_other_extensions_of_the_same_name_are_left_alone():
    """ml_dtypes, matplotlib and many others have a _core or the like."""
    assert all(library["filepath"] == mha._core.__file__
               for library in threadpoolctl.threadpool_info() if library["user_api"] == "mha")


def test_a_limit_beyond_an_int_is_no_small_one():
    with threadpoolctl.threadpool_limits({"mha": 2**31 + 1}):
        assert mha.get_num_threads() == 256
