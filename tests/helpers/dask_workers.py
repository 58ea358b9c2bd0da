"""What distributed's workers run in the tests: they import this, and no module of tests."""

import os
import time

import numpy as np

import mha
import mha.dask


class Counted(mha.MultiHeadAttention):
    """Leaves a file where it is unpickled."""

    def __setstate__(self, state):
        super().__setstate__(state)
        with open(f"{self.folder}/{os.getpid()}-{time.monotonic_ns()}", "x"):
            pass


def greedy(chunk):
    """More than the worker may have."""
    hoard = [np.ones(10_000_000) for _ in range(20)]
    time.sleep(3)
    return chunk + hoard[0][0] - 1


def out_of_memory(*_, **__):
    raise MemoryError("could not allocate a workspace of 1 bytes")


def cripple():
    mha.dask._tasks._core.scaled_dot_product_attention = out_of_memory
