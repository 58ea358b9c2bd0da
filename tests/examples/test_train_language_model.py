"""The training example: right gradients, a falling loss, and the same bits after any interrupt."""

import importlib.util
import pickle
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.thorough

PROGRAM = Path(__file__).parents[2] / "examples" / "train_language_model.py"
# Python's own documentation differs by version.
PROSE = Path(__file__).parent.parent / "data" / "prose.txt"
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


@pytest.fixture(scope="module")
def saved_training(tmp_path_factory):
    """A training of a few steps, its checkpoint, and what the checkpoint holds."""
    program = module()
    settings = program.Settings(steps=3, width=8, blocks=1, heads=2, context=8, batch=2)
    training = program.Training(settings, program.Text())
    for _ in range(3):
        training.step()
        training.validate()
    folder = tmp_path_factory.mktemp("checkpoints")
    training.save(folder / "language_model.npz")
    return training, folder / "language_model.npz", checkpoint(folder)


def state(training):
    """Everything that a checkpoint holds, to compare."""
    return [array.tobytes() for array in (training.model.flat, training.adam.mean,
                                          training.adam.square)] + [
        training.losses, training.validation_losses, training.saved_step]


def refused(training, path):
    """Whether `load` ends the program for want of a checkpoint; the training stays as it was."""
    before, refusal = state(training), ""
    try:
        training.load(path)
    except SystemExit as error:
        refusal = str(error)
    assert state(training) == before
    assert not refusal or ("is no readable checkpoint (" in refusal
                           and "): remove it, or give --output" in refusal)
    return bool(refusal)


def test_a_whole_checkpoint_is_loaded(saved_training):
    training, path, _ = saved_training
    fresh = type(training)(training.settings, training.text)
    fresh.load(path)
    assert state(fresh) == state(training)


def test_a_truncated_checkpoint_is_refused(saved_training, tmp_path):
    training, path, _ = saved_training
    whole = path.read_bytes()
    for length in [*range(0, len(whole), len(whole) // 40), *range(len(whole) - 60, len(whole))]:
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        assert refused(training, tmp_path / "cut.npz")


def test_a_checkpoint_with_a_flipped_bit_is_refused_or_the_same(saved_training, tmp_path):
    """The archive has fields that nothing reads, as its members' times."""
    training, path, _ = saved_training
    whole, rng, refusals = path.read_bytes(), np.random.default_rng(0), 0
    directory = whole.index(b"PK\x01\x02")  # the archive's table of its members
    flipped = np.concatenate([rng.integers(len(whole), size=200),
                              rng.integers(directory, len(whole), size=200)])
    for at in flipped.tolist():
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.integers(8)
        (tmp_path / "flipped.npz").write_bytes(damaged)
        refusals += refused(training, tmp_path / "flipped.npz")
    assert refusals > 200


def wrong_contents(saved):
    """(what is wrong, the members of such a checkpoint)."""
    for name, array in saved.items():
        yield f"no {name}", {kept: saved[kept] for kept in saved if kept != name}
        for wrong in (np.array(3), np.zeros((0,)), np.array([[["a"]]]), np.zeros((2, 3, 4)),
                      np.array([b"\xff"]), np.array(None), np.array([{"a": 1}], object)):
            yield f"{name}: {wrong.dtype} {wrong.shape}", saved | {name: wrong}
        if name != "run":
            yield f"{name} one too long", saved | {name: np.concatenate([array, array[:1]])}
            yield f"{name} turned", saved | {name: array[None]}
            for dtype in (np.float16, np.int64, np.complex128, ">f4", ">f8", bool, object, "U9"):
                yield f"{name} as {dtype}", saved | {name: array.astype(dtype)}
            for number in (np.nan, np.inf, -np.inf):
                changed = array.copy()
                changed[-1] = number
                yield f"{name} with {number}", saved | {name: changed}
    for run in ("", "{", "[]", "null", "3", ["{}"]):
        yield f"run {run}", saved | {"run": np.array(run)}
    yield "more losses than steps", saved | {"losses": np.ones(4)}
    yield "no losses", saved | {"losses": np.ones(0), "validation_losses": np.ones((0, 2))}
    yield "negative squares", saved | {"square": -1 - saved["square"]}
    for steps in ([0], [1, 1], [2, 1], [4], [1.5], [-1]):
        rows = np.ones((len(steps), 2))
        rows[:, 0] = steps
        yield f"validated at {steps}", saved | {"validation_losses": rows}


def test_a_checkpoint_of_wrong_contents_is_refused(saved_training, tmp_path):
    training, _, saved = saved_training
    for what, members in wrong_contents(saved):
        np.savez(tmp_path / "wrong.npz", **members)
        assert refused(training, tmp_path / "wrong.npz"), what


def test_what_is_no_archive_of_arrays_is_refused(saved_training, tmp_path):
    training, path, saved = saved_training
    assert refused(training, tmp_path)
    whole = path.read_bytes()
    huge = np.lib.format.magic(1, 0) + b"\x76\x00" + (
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (1152921504606846976,), }").ljust(118)
    member = "losses.npy"
    contents = {"empty": b"", "text": b"not an archive", "zeros": bytes(1000), "zip": b"PK\x03\x04",
                "array": np.lib.format.magic(1, 0) + b"\x00", "pickle": pickle.dumps(saved),
                "doubled": whole[:100] + whole, "huge array": huge}
    for name, broken in contents.items():
        (tmp_path / name).write_bytes(broken)
        if name != "doubled":  # which zipfile reads, as archives that extract themselves
            assert refused(training, tmp_path / name)
    np.save(tmp_path / "one.npy", saved["parameters"])
    assert refused(training, tmp_path / "one.npy")
    for inside in (b"", b"no array", huge, pickle.dumps([1.0])):
        np.savez(tmp_path / "inside.npz", **{name: saved[name] for name in saved
                                             if name != "losses"})
        with zipfile.ZipFile(tmp_path / "inside.npz", "a") as archive:
            archive.writestr(member, inside)
        assert refused(training, tmp_path / "inside.npz")


def test_a_loss_that_is_no_number_stops_the_run_before_it_is_saved():
    program = module()
    settings = program.Settings(steps=3, width=8, blocks=1, heads=2, context=8, batch=2)
    training = program.Training(settings, program.Text())
    training.model.flat[:] = np.nan
    with pytest.raises(SystemExit, match="step 1: the loss is nan: give a smaller --learning-rate"):
        training.step()
    assert training.losses == []


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
