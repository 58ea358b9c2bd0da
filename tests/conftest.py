"""What all tests share."""

import os
import signal

# As many tests run side by side as there are cores: NumPy's products take one. OMP_NUM_THREADS
# stays as it is: mha heeds it, and shall run on all its threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What programs print does not depend on the locale here.
os.environ["PYTHONUTF8"] = "1"

# A shell lets its background jobs ignore Ctrl-C, and the programs they start inherit that; some
# tests interrupt programs.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="the tests marked `thorough`, too")


def pytest_collection_modifyitems(config, items):
    """`make test` leaves out what takes long and what other tests see in smaller shapes."""
    if config.getoption("--all"):
        return
    thorough = [item for item in items if item.get_closest_marker("thorough")]
    if thorough and len(thorough) < len(items):  # one that is named runs
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
