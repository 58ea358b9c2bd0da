"""What the package says of its decisions goes to logging, at DEBUG, and nowhere by itself."""

import logging
import subprocess
import sys
from pathlib import Path

import dask.array as da
import numpy as np

import mha

# What prints because printing is what it is called for.
PRINTERS = {"__main__.py", "_base/runtime.py", "reference/_steps.py", "view/_command.py"}


def messages(caplog, name):
    return [record.getMessage() for record in caplog.records
            if record.name == name and record.levelno == logging.DEBUG]


def test_reading_parameters_says_what_was_found(caplog):
    state = mha.MultiHeadAttention(8, 2, rng=0).to_state("pytorch", prefix="attention.")
    with caplog.at_level(logging.DEBUG, "mha"):
        mha.MultiHeadAttention.from_state(state, "pytorch", prefix="attention.", num_heads=2)
    [message] = messages(caplog, "mha.parameters._reading")
    assert message.startswith("pytorch under 'attention.': in_proj_weight (24, 8)")


def test_a_plan_on_dask_says_its_chunks(caplog):
    x = da.ones((2, 6, 4), chunks=(2, 3, 4), dtype=np.float32)
    with caplog.at_level(logging.DEBUG, "mha"):
        mha.dask.scaled_dot_product_attention(x, x, x)
    [message] = messages(caplog, "mha.dask._plan")
    assert message.endswith("2 chunks of queries, 2 of keys, computed in float32")


def test_diagnose_says_what_explains(caplog):
    with caplog.at_level(logging.DEBUG, "mha"):
        mha.testing.diagnose(lambda q, k, v: mha.reference.softmax(q @ k.T)[0] @ v)
    assert any("forgot to divide" in message
               for message in messages(caplog, "mha.testing._diagnosis.compare"))


def test_nothing_is_printed_unasked():
    program = ("import numpy as np, mha; layer = mha.MultiHeadAttention(8, 2, rng=0);"
               "layer(np.ones((2, 3, 8))); mha.MultiHeadAttention.from_state("
               "layer.to_state('pytorch'), 'pytorch', num_heads=2)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_package_has_no_print_elsewhere():
    package = Path(mha.__file__).parent
    printing = {path.relative_to(package).as_posix() for path in package.rglob("*.py")
                if any(line.strip().startswith("print(") for line in path.read_text().split("\n"))}
    assert printing == PRINTERS
