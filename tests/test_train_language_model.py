"""The training example: right gradients, a falling loss, and the same bits after any interrupt."""

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).parent.parent / "examples" / "train_language_model.py"
PROSE = Path(__file__).parent / "data" / "prose.txt"  # Python's documentation differs by version
SMALL = ["--steps", "150", "--width", "32", "--blocks", "2", "--heads", "2", "--context", "32",
         "--batch", "8", "--characters", "20", "--text", str(PROSE)]


def module():
    spec = importlib.util.spec_from_file_location("train_language_model", PROGRAM)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # dataclasses look it up
    spec.loader.exec_module(loaded)
    return loaded


def start(folder, *more):
    return subprocess.Popen([sys.executable, str(PROGRAM), *SMALL, "--output", str(folder), *more],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def checkpoint(folder):
    with np.load(folder / "language_model.npz") as saved:
        return {name: saved[name] for name in saved.files}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    program = start(folder)
    printed, errors = program.communicate()
    assert program.returncode == 0, errors
    return folder, printed


def test_the_loss_falls_and_is_printed_and_plotted(whole_run):
    folder, printed = whole_run
    saved = checkpoint(folder)
    validation = saved["validation_losses"]
    assert validation[:, 0].tolist() == [100, 150]
    assert validation[-1, 1] < 3.3 < 3.7 < saved["losses"][0]  # log of 45 characters: 3.8
    assert f"validation loss {validation[-1, 1]:.4f}" in printed
    assert (folder / "language_model.png").read_bytes().startswith(b"\x89PNG")
    text = printed.split("language_model.png\n\n")[1]
    assert len(text.rstrip("\n")) >= 60


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("delay", [0.0, 0.07])
def test_an_interrupted_run_ends_with_the_same_bits(whole_run, tmp_path, sent, delay):
    program = start(tmp_path)
    while not (tmp_path / "language_model.npz").exists():
        assert program.poll() is None
        time.sleep(0.001)
    time.sleep(delay)
    program.send_signal(sent)
    printed, errors = program.communicate()
    assert len(checkpoint(tmp_path)["losses"]) < 150, "it was not interrupted"
    if sent == signal.SIGINT:
        assert program.returncode == 130, errors
        assert "run it again to go on from step 50" in printed
    program = start(tmp_path)
    printed, errors = program.communicate()
    assert program.returncode == 0, errors
    assert "going on from step" in printed
    expected, got = checkpoint(whole_run[0]), checkpoint(tmp_path)
    for name, array in expected.items():
        assert np.array_equal(got[name], array), name
    assert printed.split("\n\n")[1:] == whole_run[1].split("\n\n")[1:]  # the generated text too


def test_a_checkpoint_of_other_settings_is_refused(whole_run):
    program = start(whole_run[0], "--seed", "5")
    _, errors = program.communicate()
    assert program.returncode == 1
    assert "other settings" in errors
    assert "Traceback" not in errors


def test_what_cannot_be_read_or_used_is_named(tmp_path):
    (tmp_path / "language_model.npz").write_bytes(b"PK not really")
    (tmp_path / "file").touch()
    for more, status, message in (
            ((), 1, "is no readable checkpoint"), (("--heads", "5"), 2, "--width: got 32"),
            (("--batch", "0"), 2, "--batch: got 0"), (("--dropout", "1"), 2, "--dropout: got 1.0"),
            (("--steps", "1", "--output", str(tmp_path / "file")), 1, "cannot write to")):
        program = start(tmp_path, *more)
        _, errors = program.communicate()
        assert program.returncode == status, errors
        assert message in errors
        assert "Traceback" not in errors


def test_gradients_are_those_of_the_loss():
    """Along the gradient of each array the loss rises as fast as the gradient is long. (Every
    number of them is compared with PyTorch's by `make test-peers`.) In float64, where a step may
    be so small that hardly an input of max(0, x) changes its sign between its two ends."""
    program = module()
    settings = program.Settings(width=16, blocks=2, heads=2, context=12, batch=3, dropout=0.2)
    text = program.Text(PROSE.read_text(encoding="utf-8"))
    model = program.LanguageModel(len(text.characters), settings, np.float64)
    rng = np.random.default_rng(0)
    model.flat += 0.1 * rng.standard_normal(model.flat.size)
    tokens, targets = text.windows(text.training, settings, rng)

    def loss_vjp():
        return model.loss_vjp(tokens, targets, np.random.default_rng(1))

    gradients = loss_vjp()[1]()
    assert gradients.keys() == model.parameters.keys()
    for name, gradient in gradients.items():
        length = np.linalg.norm(gradient)
        assert gradient.dtype == np.float64
        assert length > 1e-3 or name.endswith(".b_k")  # which is 0 but for rounding
        direction = gradient / max(length, 1e-4)
        start, losses = model.parameters[name].copy(), []
        for step in (1e-6, -1e-6):
            model.parameters[name][...] = start + step * direction
            losses.append(loss_vjp()[0])
        model.parameters[name][...] = start
        slope = (losses[0] - losses[1]) / 2e-6
        assert abs(slope - length) < 1e-8 + 1e-5 * length, (name, slope, length)
