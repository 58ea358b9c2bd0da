"""What all tests share."""

import os
import signal

# As many tests run side by side as there are cores: the products of NumPy and PyTorch take one.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# A shell lets its background jobs ignore Ctrl-C, and the programs they start inherit that; some
# tests interrupt programs.
signal.signal(signal.SIGINT, signal.default_int_handler)
