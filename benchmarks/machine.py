"""What the machine can do at best, measured by machine/machine.c on the same CPUs."""

import ctypes
import os
import threading
import time
from pathlib import Path

import numpy as np

_library = ctypes.CDLL(Path(__file__).parent / "machine" / "build" / "libmachine.so")
_library.machine_fma_rate.restype = ctypes.c_double
_library.machine_fma_rate.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_double]
_library.machine_read_rate.restype = ctypes.c_double
_library.machine_read_rate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_double]

PIECE = 2048  # numbers


def _on_each(cpus, measure):
    """The sum of measure(i) of one thread on each CPU, all at once."""
    rates = [0.0] * len(cpus)

    def run(i):
        os.sched_setaffinity(0, {cpus[i]})
        rates[i] = measure(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(cpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def fma_rate(cpus, isa, dtype="float32", seconds=0.02):
    """Floating-point operations a second, all CPUs together."""
    is_float64 = int(dtype == "float64")
    return _on_each(cpus, lambda i: _library.machine_fma_rate(isa.encode(), is_float64, seconds))


def read_rate(cpus, total_bytes, seconds=0.02):
    """Bytes a second, all CPUs together reading their share of total_bytes again and again."""
    share = max(4096, int(total_bytes) // len(cpus) // 256 * 256)
    buffers = [np.ones(share, np.uint8) for _ in cpus]
    return _on_each(cpus, lambda i: _library.machine_read_rate(buffers[i].ctypes.data, share,
                                                               seconds))


def stream_rate(cpus, total_bytes, streams, seconds=0.02):
    """As read_rate, but each CPU reads so many parts of its share side by side. Of several, they
    are rows that are multiplied by the last of them, in pieces that BLAS leaves to one thread."""
    if streams == 1:
        return read_rate(cpus, total_bytes, seconds)
    pieces = max(1, int(total_bytes) // len(cpus) // (4 * PIECE * streams))
    shares = [np.ones((streams, pieces, PIECE), np.float32).swapaxes(0, 1) for _ in cpus]

    def rate_of(share):
        rows, vectors = share[:, :-1], share[:, -1, :, None]
        sums = np.empty((pieces, streams - 1, 1), np.float32)
        np.matmul(rows, vectors, out=sums)
        begin, total, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < seconds:
            np.matmul(rows, vectors, out=sums)
            total += share.nbytes
            elapsed = time.perf_counter() - begin
        return total / elapsed

    return _on_each(cpus, lambda i: rate_of(shares[i]))
