"""Train a small transformer language model in NumPy, its attention by mha: Python's own
documentation, letter by letter.

    python examples/train_language_model.py [--steps 2000] [--dropout 0.1]

Stop it at any point and run it again: it goes on from its last checkpoint, and ends with the same
bits as a run that was never stopped. Every function below that ends in _vjp returns its output and
a pullback, from the gradient of the output to the gradients of what went in.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from tqdm import tqdm

import mha

CHECKPOINT_EVERY = 50
VALIDATE_EVERY = 100
VALIDATION_BATCHES = 8
WARM_UP = 50


@dataclass(frozen=True)
class Settings:
    """What a run depends on: the same settings give the same bits."""

    steps: int = 2000
    width: int = 128
    blocks: int = 4
    heads: int = 4
    context: int = 128  # letters that a prediction may look back on
    batch: int = 16
    dropout: float = 0.1
    learning_rate: float = 1e-3
    seed: int = 0


class Text:
    """The documentation as numbers, a letter each: every tenth stretch is kept for validation."""

    def __init__(self, stretch=2000):
        text = "\n".join(topics.values())
        self.letters = sorted(set(text))
        number_of = {letter: number for number, letter in enumerate(self.letters)}
        numbers = np.array([number_of[letter] for letter in text])
        for_validation = np.arange(len(numbers)) // stretch % 10 == 9
        self.training, self.validation = numbers[~for_validation], numbers[for_validation]

    def batch(self, numbers, settings, rng):
        """Tokens (batch, context) and the letter after each of them."""
        starts = rng.integers(len(numbers) - settings.context, size=settings.batch)
        windows = numbers[starts[:, None] + np.arange(settings.context + 1)]
        return windows[:, :-1], windows[:, 1:]

    def read(self, numbers):
        return "".join(self.letters[number] for number in numbers)


def embedding_vjp(tokens, token_table, position_table):
    """(batch, length) -> (batch, length, width): a row for the token, plus one for its place."""
    length = tokens.shape[1]
    output = token_table[tokens] + position_table[:length]

    def pullback(grad):
        one_hot = np.eye(len(token_table), dtype=grad.dtype)[tokens.ravel()]
        of_tokens = mha.linear(one_hot.T, grad.reshape(-1, grad.shape[-1]))
        of_positions = np.zeros_like(position_table)
        of_positions[:length] = grad.sum(axis=0)
        return of_tokens, of_positions

    return output, pullback


def layer_norm_vjp(x, scale, shift):
    """Each row to mean 0 and variance 1, then scaled and shifted (Ba et al. 2016)."""
    normal = x - x.mean(axis=-1, keepdims=True)
    variance = np.einsum("...i,...i->...", normal, normal)[..., None] / x.shape[-1]
    inverse = 1 / np.sqrt(variance + np.float32(1e-5))
    normal *= inverse
    output = normal * scale
    output += shift

    def pullback(grad):
        of_scale, of_shift = np.einsum("btw,btw->w", grad, normal), grad.sum(axis=(0, 1))
        of_normal = grad * scale
        along = np.einsum("...i,...i->...", of_normal, normal)[..., None] / x.shape[-1]
        of_normal -= of_normal.mean(axis=-1, keepdims=True)
        of_normal -= normal * along
        of_normal *= inverse
        return of_normal, of_scale, of_shift

    return output, pullback


def feed_forward_vjp(x, W_in, b_in, W_out, b_out):
    """max(0, x W_in + b_in) W_out + b_out (Vaswani et al. 2017, section 3.3)."""
    hidden, pull_in = mha.linear_vjp(x, W_in, b_in)
    np.maximum(hidden, 0, out=hidden)
    output, pull_out = mha.linear_vjp(hidden, W_out, b_out)

    def pullback(grad):
        of_hidden, of_W_out, of_b_out = pull_out(grad)
        of_hidden *= hidden > 0
        return *pull_in(of_hidden), of_W_out, of_b_out

    return output, pullback


def dropout_vjp(x, p, rng):
    """A share p of the numbers becomes 0, the others grow to make up for it; rng None: none do."""
    if rng is None or p == 0:
        return x, lambda grad: grad
    factors = (rng.random(x.shape, np.float32) >= p) * np.float32(1 / (1 - p))
    return x * factors, lambda grad: grad * factors


def cross_entropy_vjp(logits, targets):
    """The mean of -log softmax(logits)[target]."""
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.ravel()
    picked = np.arange(len(rows)), flat
    shifted = rows - rows.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    totals = exponentials.sum(axis=-1)
    loss = float((np.log(totals) - shifted[picked]).mean())

    def pullback():
        of_rows = exponentials / totals[:, None]
        of_rows[picked] -= 1
        of_rows /= len(rows)
        return of_rows.reshape(logits.shape)

    return loss, pullback


class LanguageModel:
    """A causal transformer that predicts the next letter: layer norms come before attention and
    feed-forward, as in GPT-2 (Radford et al. 2019). All parameters are views of `self.numbers`."""

    def __init__(self, num_letters, settings):
        self.settings = settings
        width, rng = settings.width, np.random.default_rng(settings.seed)
        self.attentions = [mha.MultiHeadAttention(width, settings.heads, dropout=settings.dropout,
                                                  rng=rng) for _ in range(settings.blocks)]
        start = self._start(num_letters, rng)
        self.numbers = np.concatenate([array.ravel() for array in start.values()])
        self.parameters = self.named(self.numbers, start)
        for i, attention in enumerate(self.attentions):
            for name in attention.parameters():
                setattr(attention, name, self.parameters[f"{i}.attention.{name}"])

    def _start(self, num_letters, rng):
        """Name -> array, in the order in which the data meets them."""
        width, hidden = self.settings.width, 4 * self.settings.width

        def normal(*shape, deviation=0.02):
            return deviation * rng.standard_normal(shape, np.float32)

        def norm(name):
            return {f"{name}.scale": np.ones(width, np.float32),
                    f"{name}.shift": np.zeros(width, np.float32)}

        start = {"tokens": normal(num_letters, width),
                 "positions": normal(self.settings.context, width)}
        for i, attention in enumerate(self.attentions):
            start |= norm(f"{i}.norm_1")
            start |= {f"{i}.attention.{name}": array
                      for name, array in attention.parameters().items()}
            start |= norm(f"{i}.norm_2")
            start |= {f"{i}.W_in": normal(width, hidden, deviation=(2 / width)**0.5),
                      f"{i}.b_in": np.zeros(hidden, np.float32),
                      f"{i}.W_out": normal(hidden, width),
                      f"{i}.b_out": np.zeros(width, np.float32)}
        return start | norm("norm") | {"W_letters": normal(width, num_letters),
                                       "b_letters": np.zeros(num_letters, np.float32)}

    def named(self, numbers, like=None):
        """Views of a flat array by the parameters' names and shapes."""
        views, at = {}, 0
        for name, array in (like or self.parameters).items():
            views[name] = numbers[at:at + array.size].reshape(array.shape)
            at += array.size
        return views

    def block_vjp(self, i, x, rng):
        """x + attention(norm(x)), then x + feed_forward(norm(x)); rng None: no dropout."""
        parameters, p = self.parameters, self.settings.dropout
        normed, pull_norm_1 = layer_norm_vjp(
            x, parameters[f"{i}.norm_1.scale"], parameters[f"{i}.norm_1.shift"])
        attended, pull_attention = self.attentions[i].vjp(
            normed, causal=True, training=rng is not None, rng=rng)
        dropped, pull_dropout_1 = dropout_vjp(attended, p, rng)
        x = x + dropped

        names = [f"{i}.{name}" for name in ("W_in", "b_in", "W_out", "b_out")]
        normed, pull_norm_2 = layer_norm_vjp(
            x, parameters[f"{i}.norm_2.scale"], parameters[f"{i}.norm_2.shift"])
        fed, pull_feed_forward = feed_forward_vjp(normed, *(parameters[name] for name in names))
        dropped, pull_dropout_2 = dropout_vjp(fed, p, rng)

        def pullback(grad):
            """The gradient of x; those of the parameters, by name."""
            of_normed, *of_weights = pull_feed_forward(pull_dropout_2(grad))
            of_x, of_scale_2, of_shift_2 = pull_norm_2(of_normed)
            grad = grad + of_x
            of_attention = pull_attention(pull_dropout_1(grad))
            of_x, of_scale_1, of_shift_1 = pull_norm_1(of_attention.query)
            gradients = dict(zip(names, of_weights, strict=True))
            gradients |= {f"{i}.attention.{name}": getattr(of_attention, name)
                          for name in self.attentions[i].parameters()}
            gradients |= {f"{i}.norm_1.scale": of_scale_1, f"{i}.norm_1.shift": of_shift_1,
                          f"{i}.norm_2.scale": of_scale_2, f"{i}.norm_2.shift": of_shift_2}
            return grad + of_x, gradients

        return x + dropped, pullback

    def logits_vjp(self, tokens, rng=None):
        """(batch, length) -> (batch, length, letters), and the pullback to all parameters."""
        parameters = self.parameters
        x, pull_embedding = embedding_vjp(tokens, parameters["tokens"], parameters["positions"])
        pull_blocks = []
        for i in range(len(self.attentions)):
            x, pull_block = self.block_vjp(i, x, rng)
            pull_blocks.append(pull_block)
        normed, pull_norm = layer_norm_vjp(x, parameters["norm.scale"], parameters["norm.shift"])
        logits, pull_letters = mha.linear_vjp(normed, parameters["W_letters"],
                                              parameters["b_letters"])

        def pullback(grad):
            gradients = {}
            grad, gradients["W_letters"], gradients["b_letters"] = pull_letters(grad)
            grad, gradients["norm.scale"], gradients["norm.shift"] = pull_norm(grad)
            for pull_block in reversed(pull_blocks):
                grad, of_block = pull_block(grad)
                gradients |= of_block
            gradients["tokens"], gradients["positions"] = pull_embedding(grad)
            return gradients

        return logits, pullback

    def loss_vjp(self, tokens, targets, rng=None):
        logits, pull_logits = self.logits_vjp(tokens, rng)
        loss, pull_loss = cross_entropy_vjp(logits, targets)
        return loss, lambda: pull_logits(pull_loss())

    def generate(self, start, count, rng, temperature=0.7):
        """`count` tokens after those of start, each drawn from softmax(logits / temperature)."""
        tokens = list(start)
        for _ in range(count):
            seen = np.array([tokens[-self.settings.context:]])
            logits = self.logits_vjp(seen)[0][0, -1].astype(np.float64) / temperature
            odds = np.exp(logits - logits.max())
            tokens.append(int(rng.choice(len(odds), p=odds / odds.sum())))
        return tokens[len(start):]


class Adam:
    """Kingma & Ba 2015, on one flat array, a stretch at a time that stays in the cache."""

    def __init__(self, size, beta_1=0.9, beta_2=0.99, epsilon=1e-8):
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.mean, self.square = np.zeros(size, np.float32), np.zeros(size, np.float32)

    def update(self, numbers, gradient, step, learning_rate, stretch=1 << 15):
        """`step` counts from 1."""
        bias_1, bias_2 = 1 - self.beta_1**step, 1 - self.beta_2**step
        for first in range(0, numbers.size, stretch):
            here = slice(first, first + stretch)
            grad, mean, square = gradient[here], self.mean[here], self.square[here]
            mean *= self.beta_1
            mean += (1 - self.beta_1) * grad
            square *= self.beta_2
            square += (1 - self.beta_2) * grad * grad
            size = np.sqrt(square / bias_2)
            size += self.epsilon
            numbers[here] -= learning_rate / bias_1 * mean / size


class Training:
    """A model on its way: everything that a checkpoint holds."""

    def __init__(self, settings, text):
        self.settings, self.text = settings, text
        self.model = LanguageModel(len(text.letters), settings)
        self.adam = Adam(self.model.numbers.size)
        self.gradient = np.empty_like(self.model.numbers)
        self.gradients = self.model.named(self.gradient)
        self.losses = []  # of each step
        self.validation = []  # (step, loss)

    def learning_rate(self, step):
        """Rises for WARM_UP steps, then falls along half a cosine to a tenth."""
        progress = step / self.settings.steps
        falling = 0.55 + 0.45 * np.cos(np.pi * progress)
        return self.settings.learning_rate * min(1, step / WARM_UP) * float(falling)

    def batch(self, number):
        """Tokens and targets of step `number`, counted from 1, and the step's generator: all its
        random numbers depend on the seed and the number alone."""
        rng = np.random.default_rng([self.settings.seed, number])
        return *self.text.batch(self.text.training, self.settings, rng), rng

    def step(self):
        number = len(self.losses) + 1
        tokens, targets, rng = self.batch(number)
        loss, pullback = self.model.loss_vjp(tokens, targets, rng)
        for name, gradient in pullback().items():
            self.gradients[name][...] = gradient
        self.adam.update(self.model.numbers, self.gradient, number, self.learning_rate(number))
        self.losses.append(loss)
        return loss

    def validate(self):
        """The mean loss over the same batches each time, without dropout."""
        rng = np.random.default_rng(self.settings.seed)
        losses = [self.model.loss_vjp(*self.text.batch(self.text.validation, self.settings, rng))[0]
                  for _ in range(VALIDATION_BATCHES)]
        self.validation.append((len(self.losses), float(np.mean(losses))))

    def save(self, path):
        """All or nothing: an interrupt leaves the old checkpoint or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished.npz")
        np.savez(unfinished, settings=json.dumps(asdict(self.settings)), numbers=self.model.numbers,
                 mean=self.adam.mean, square=self.adam.square, losses=self.losses,
                 validation=np.reshape(self.validation, (-1, 2)))
        os.replace(unfinished, path)

    def load(self, path):
        with np.load(path) as saved:
            settings = json.loads(str(saved["settings"]))
            if settings != asdict(self.settings) or saved["numbers"].size != self.gradient.size:
                raise SystemExit(f"{path} is a checkpoint of other settings or of another text"
                                 f" ({settings}): give --output, or remove it")
            self.model.numbers[...] = saved["numbers"]
            self.adam.mean[...], self.adam.square[...] = saved["mean"], saved["square"]
            self.losses = saved["losses"].tolist()
            self.validation = [(int(step), loss) for step, loss in saved["validation"]]

    def run(self, path):
        """All steps that are missing, with checkpoints on the way."""
        progress = tqdm(total=self.settings.steps, initial=len(self.losses), unit="step")
        with progress:
            while len(self.losses) < self.settings.steps:
                progress.set_postfix(loss=f"{self.step():.3f}", refresh=False)
                progress.update()
                done = len(self.losses)
                if done % VALIDATE_EVERY == 0 or done == self.settings.steps:
                    self.validate()
                    tqdm.write(f"step {done:5}: validation loss {self.validation[-1][1]:.4f}")
                if done % CHECKPOINT_EVERY == 0 or done == self.settings.steps:
                    self.save(path)


def plot(training, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(np.arange(1, len(training.losses) + 1), training.losses, linewidth=0.7, alpha=0.6,
              label="training, each step")
    axes.plot(*zip(*training.validation, strict=True), marker="o", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats a letter)",
             title="A language model in NumPy, attention by mha")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for field in fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type,
                            default=field.default)
    parser.add_argument("--output", type=Path, default=Path("output"),
                        help="folder of the checkpoint and the plot")
    parser.add_argument("--letters", type=int, default=400, help="to generate at the end")
    given = vars(parser.parse_args())
    output, letters = given.pop("output"), given.pop("letters")
    return Settings(**given), output, letters


def main():
    settings, output, letters = arguments()
    text = Text()
    training = Training(settings, text)
    path = output / "language_model.npz"
    print(f"{len(text.training):,} letters to train on, {len(text.validation):,} to validate;"
          f" {training.model.numbers.size:,} parameters")
    if path.exists():
        training.load(path)
        print(f"going on from step {len(training.losses)} of {path}")
    try:
        training.run(path)
    except KeyboardInterrupt:
        print(f"\nstopped after step {len(training.losses)}; run it again to go on from the last"
              f" checkpoint, step {len(training.losses) // CHECKPOINT_EVERY * CHECKPOINT_EVERY}")
        return 130
    plot(training, output / "language_model.png")
    print(f"loss curve: {output / 'language_model.png'}\n")
    rng = np.random.default_rng(settings.seed)
    start = text.validation[:60]
    print(text.read(start) + "|" + text.read(training.model.generate(start, letters, rng)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
