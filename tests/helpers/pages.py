"""What the tests of mha.view in a browser share: weights, words, and waiting for what is drawn."""

import numpy as np

WORDS = ["The", "cat", "sat", "down"]


def settle(page):
    """Waits for the drawing that the last event asked for."""
    page.evaluate("() => new Promise(done => requestAnimationFrame("
                  "() => requestAnimationFrame(done)))")


def and_settle(page, action):
    """The action, and then the drawing that it asks for: a busy machine draws late."""

    def act(*arguments, **keywords):
        result = action(*arguments, **keywords)
        settle(page)
        return result

    return act


def pixel(page, canvas, x, y):
    """(red, green, blue, opacity) of a canvas at a place of the page's units."""
    return tuple(page.evaluate("""([canvas, x, y]) => {
        canvas = document.querySelector(canvas);
        const ratio = canvas.width / parseFloat(canvas.style.width);
        const read = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
        read.drawImage(canvas, Math.floor(x * ratio), Math.floor(y * ratio), 1, 1, 0, 0, 1, 1);
        return [...read.getImageData(0, 0, 1, 1).data];
    }""", [canvas, x, y]))


def random_weights(*shape):
    weights = np.exp(3 * np.random.default_rng(0).standard_normal(shape))
    return weights / weights.sum(axis=-1, keepdims=True)
