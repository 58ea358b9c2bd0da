"""Train a small transformer language model in NumPy, its attention by mha: Python's own
documentation, character by character. The loss falls from 4.6 to about 1.35 nats a character.

    python examples/train_language_model.py [--steps 2000] [--dropout 0.1] [--text FILE]

Stop it at any point and run it again: it goes on from its last checkpoint, and ends with the same
bits as a run that was never stopped. Every function below that ends in _vjp returns its output and
a pullback, from the gradient of the output to the gradients of what went in.
"""

import argparse
import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from tqdm import tqdm

import mha

CHECKPOINT_EVERY = WARM_UP = 50
VALIDATE_EVERY = 100
VALIDATION_BATCHES = 8


@dataclass(frozen=True)
class Settings:
    """What a run depends on: the same settings give the same bits."""

    steps: int = 2000
    width: int = 128
    blocks: int = 4
    heads: int = 4
    context: int = 128  # characters that a prediction may look back on
    batch: int = 16
    dropout: float = 0.1
    learning_rate: float = 1e-3
    seed: int = 0


class Text:
    """A text, or Python's documentation, as tokens; every tenth stretch is for validation."""

    def __init__(self, text=None, stretch=2000):
        text = "\n".join(topics.values()) if text is None else text
        stretch = max(1, min(stretch, len(text) // 20))
        self.characters = sorted(set(text))
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        token_of = {character: token for token, character in enumerate(self.characters)}
        tokens = np.array([token_of[character] for character in text])
        for_validation = np.arange(len(tokens)) // stretch % 10 == 9
        self.training, self.validation = tokens[~for_validation], tokens[for_validation]

    def windows(self, tokens, settings, rng):
        """Random stretches of the tokens (batch, context), and the token after each of theirs."""
        starts = rng.integers(len(tokens) - settings.context, size=settings.batch)
        windows = tokens[starts[:, None] + np.arange(settings.context + 1)]
        return windows[:, :-1], windows[:, 1:]

    def read(self, tokens):
        return "".join(self.characters[token] for token in tokens)


def embedding_vjp(tokens, token_table, position_table):
    """(batch, length) -> (batch, length, width): a row for the token, plus one for its place."""
    length = tokens.shape[1]
    output = token_table[tokens] + position_table[:length]

    def pullback(grad):
        # A product adds up the rows of equal tokens, faster than np.add.at does.
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
    inverse = 1 / np.sqrt(variance + 1e-5)
    normal *= inverse
    output = normal * scale
    output += shift

    def pullback(grad):
        of_scale, of_shift = np.einsum("btw,btw->w", grad, normal), grad.sum(axis=(0, 1))
        of_normal = grad * scale
        along_normal = np.einsum("...i,...i->...", of_normal, normal)[..., None] / x.shape[-1]
        of_normal -= of_normal.mean(axis=-1, keepdims=True)
        of_normal -= along_normal * normal
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
    """A causal transformer that predicts the next token: layer norms come before attention and
    feed-forward, as in GPT-2 (Radford et al. 2019). All parameters are views of `self.flat`."""

    def __init__(self, num_tokens, settings, dtype=np.float32):
        self.settings = settings
        width, rng = settings.width, np.random.default_rng(settings.seed)
        self.attentions = [mha.MultiHeadAttention(width, settings.heads, dropout=settings.dropout,
                                                  rng=rng, dtype=dtype)
                           for _ in range(settings.blocks)]
        start = self._initial_parameters(num_tokens, rng)
        self.flat = np.concatenate([array.ravel() for array in start.values()], dtype=dtype)
        self.parameters = self.named(self.flat, start)
        for i, attention in enumerate(self.attentions):
            for name in attention.parameters():
                setattr(attention, name, self.parameters[f"{i}.attention.{name}"])

    def _initial_parameters(self, num_tokens, rng):
        """Name -> array, in the order in which the data meets them. What goes into max(0, x) starts
        as He et al. 2015 have it, the rest as GPT-2."""
        width, hidden = self.settings.width, 4 * self.settings.width

        def normal(*shape, deviation=0.02):
            return deviation * rng.standard_normal(shape, np.float32)

        def norm(name):
            return {f"{name}.scale": np.ones(width, np.float32),
                    f"{name}.shift": np.zeros(width, np.float32)}

        start = {"tokens": normal(num_tokens, width),
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
        return start | norm("norm") | {"W_logits": normal(width, num_tokens),
                                       "b_logits": np.zeros(num_tokens, np.float32)}

    def named(self, flat, like=None):
        """Views of a flat array by the parameters' names and shapes."""
        views, at = {}, 0
        for name, array in (like or self.parameters).items():
            views[name] = flat[at:at + array.size].reshape(array.shape)
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
        """(batch, length) -> (batch, length, num_tokens), and the pullback to all parameters."""
        parameters = self.parameters
        x, pull_embedding = embedding_vjp(tokens, parameters["tokens"], parameters["positions"])
        pull_blocks = []
        for i in range(len(self.attentions)):
            x, pull_block = self.block_vjp(i, x, rng)
            pull_blocks.append(pull_block)
        normed, pull_norm = layer_norm_vjp(x, parameters["norm.scale"], parameters["norm.shift"])
        logits, pull_logits = mha.linear_vjp(normed, parameters["W_logits"],
                                             parameters["b_logits"])

        def pullback(grad):
            gradients = {}
            grad, gradients["W_logits"], gradients["b_logits"] = pull_logits(grad)
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
            exponentials = np.exp(logits - logits.max())
            probabilities = exponentials / exponentials.sum()
            tokens.append(int(rng.choice(len(probabilities), p=probabilities)))
        return tokens[len(start):]


class Adam:
    """Kingma & Ba 2015, on one flat array, a part at a time that stays in the cache. beta_2 is 0.99
    where the paper has 0.999: a short run has to forget its first gradients sooner."""

    def __init__(self, size, beta_1=0.9, beta_2=0.99, epsilon=1e-8):
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.mean, self.square = np.zeros(size, np.float32), np.zeros(size, np.float32)

    def update(self, flat, gradient, step, learning_rate, part=1 << 15):
        """`step` counts from 1."""
        bias_1, bias_2 = 1 - self.beta_1**step, 1 - self.beta_2**step
        for first in range(0, flat.size, part):
            here = slice(first, first + part)
            grad, mean, square = gradient[here], self.mean[here], self.square[here]
            mean *= self.beta_1
            mean += (1 - self.beta_1) * grad
            square *= self.beta_2
            square += (1 - self.beta_2) * grad * grad
            scale = np.sqrt(square / bias_2)
            scale += self.epsilon
            flat[here] -= learning_rate / bias_1 * mean / scale


def read_checkpoint(path):
    """(the settings as JSON, the arrays by name), as `Training.save` wrote them."""
    with open(path, "rb") as stream, np.load(stream) as file:
        run = file["run"]
        if run.dtype.kind != "U" or not isinstance(json.loads(str(run)), dict):
            raise ValueError("run: wanted the settings as JSON")
        names = "parameters", "mean", "square", "losses", "validation_losses"
        return str(run), {name: file[name] for name in names}


def check_checkpoint(saved, num_parameters, steps):
    """ValueError unless these arrays can be those of a run of so many steps."""
    of_parameters = np.float32, (num_parameters,)
    wanted = {"parameters": of_parameters, "mean": of_parameters, "square": of_parameters,
              "losses": (np.float64, (saved["losses"].size,)),
              "validation_losses": (np.float64, (len(saved["validation_losses"]), 2))}
    for name, (dtype, shape) in wanted.items():
        array = saved[name]
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(f"{name}: got {array.dtype} of shape {array.shape}, wanted"
                             f" {np.dtype(dtype)} of shape {shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name}: got NaN or infinity")
    done, validated = len(saved["losses"]), saved["validation_losses"][:, 0]
    if not 1 <= done <= steps:
        raise ValueError(f"losses: got those of {done} steps, wanted 1 to {steps}")
    if (saved["square"] < 0).any():
        raise ValueError("square: got a negative number")
    # Whole numbers that rise from 1 to the last step at most.
    if (validated % 1 != 0).any() or (np.diff(validated, prepend=0, append=done + 1) < 1).any():
        raise ValueError(f"validation_losses: got steps {validated}, wanted some of 1 to {done}")


class Training:
    """A model on its way: everything that a checkpoint holds."""

    def __init__(self, settings, text):
        self.settings, self.text = settings, text
        self.model = LanguageModel(len(text.characters), settings)
        self.adam = Adam(self.model.flat.size)
        self.gradient = np.empty_like(self.model.flat)
        self.gradients = self.model.named(self.gradient)
        self.losses = []  # of each step
        self.validation_losses = []  # (step, loss)
        self.saved_step = 0

    def learning_rate(self, step):
        """Rises for WARM_UP steps, then falls along half a cosine to a tenth."""
        progress = step / self.settings.steps
        falling = 0.55 + 0.45 * np.cos(np.pi * progress)
        return self.settings.learning_rate * min(1, step / WARM_UP) * float(falling)

    def batch_of(self, step):
        """Tokens and targets of a step, counted from 1, and its generator: all its random numbers
        depend on the seed and the step alone."""
        rng = np.random.default_rng([self.settings.seed, step])
        return *self.text.windows(self.text.training, self.settings, rng), rng

    def step(self):
        step = len(self.losses) + 1
        tokens, targets, rng = self.batch_of(step)
        loss, pullback = self.model.loss_vjp(tokens, targets, rng)
        if not np.isfinite(loss):
            sys.exit(f"step {step}: the loss is {loss}: give a smaller --learning-rate")
        for name, gradient in pullback().items():
            self.gradients[name][...] = gradient
        self.adam.update(self.model.flat, self.gradient, step, self.learning_rate(step))
        self.losses.append(loss)
        return loss

    def validate(self):
        """The mean loss over the same batches each time, without dropout."""
        rng = np.random.default_rng(self.settings.seed)
        batches = [self.text.windows(self.text.validation, self.settings, rng)
                   for _ in range(VALIDATION_BATCHES)]
        loss = float(np.mean([self.model.loss_vjp(*batch)[0] for batch in batches]))
        self.validation_losses.append((len(self.losses), loss))
        return loss

    def save(self, path):
        """All or nothing: an interrupt leaves the old checkpoint or the new one."""
        unfinished = path.with_suffix(".unfinished.npz")
        np.savez(unfinished, run=self._identity(), parameters=self.model.flat,
                 mean=self.adam.mean, square=self.adam.square, losses=self.losses,
                 validation_losses=np.reshape(self.validation_losses, (-1, 2)))
        os.replace(unfinished, path)
        self.saved_step = len(self.losses)

    def load(self, path):
        """Go on from a checkpoint. One that is broken, or another run's, ends the program."""
        try:
            run, saved = read_checkpoint(path)
            if run == self._identity():
                check_checkpoint(saved, self.model.flat.size, self.settings.steps)
        except Exception as error:  # of a broken archive zipfile and NumPy raise almost any
            sys.exit(f"{path} is no readable checkpoint ({str(error) or type(error).__name__}):"
                     " remove it, or give --output")
        if run != self._identity():
            sys.exit(f"{path} is a checkpoint of other settings (the schedule depends on --steps,"
                     f" too) or of another text: remove it, or give --output\n"
                     f"    it:    {run}\n    wanted: {self._identity()}")
        self.model.flat[...] = saved["parameters"]
        self.adam.mean[...], self.adam.square[...] = saved["mean"], saved["square"]
        self.losses = saved["losses"].tolist()
        self.validation_losses = [(int(step), loss) for step, loss in saved["validation_losses"]]
        self.saved_step = len(self.losses)

    def _identity(self):
        return json.dumps(asdict(self.settings) | {"text": self.text.digest[:16],
                                                   "characters": self.text.characters})

    def run(self, path):
        """All steps that are missing, with checkpoints on the way."""
        progress = tqdm(total=self.settings.steps, initial=len(self.losses), unit="step")
        with progress:
            while len(self.losses) < self.settings.steps:
                progress.set_postfix(loss=f"{self.step():.3f}", refresh=False)
                progress.update()
                done = len(self.losses)
                if done % VALIDATE_EVERY == 0 or done == self.settings.steps:
                    tqdm.write(f"step {done:5}: validation loss {self.validate():.4f}")
                if done % CHECKPOINT_EVERY == 0 or done == self.settings.steps:
                    self.save(path)


def plot(training, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(np.arange(1, len(training.losses) + 1), training.losses, linewidth=0.7, alpha=0.6,
              label="training, each step")
    axes.plot(*zip(*training.validation_losses, strict=True), marker="o", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats a character)",
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
    parser.add_argument("--text", type=Path, help="a file (UTF-8) to learn from in the place of"
                        " Python's documentation")
    parser.add_argument("--output", type=Path, default=Path("output"),
                        help="folder of the checkpoint and the plot")
    parser.add_argument("--characters", type=int, default=400, help="to generate at the end")
    given = vars(parser.parse_args())
    output, characters, file = given.pop("output"), given.pop("characters"), given.pop("text")
    settings = Settings(**given)
    for name in ("steps", "width", "blocks", "heads", "context", "batch"):
        if getattr(settings, name) < 1:
            parser.error(f"--{name}: got {getattr(settings, name)}, wanted at least 1")
    if settings.width % settings.heads:
        parser.error(f"--width: got {settings.width}, wanted a multiple of --heads"
                     f" ({settings.heads})")
    if not 0 <= settings.dropout < 1:
        parser.error(f"--dropout: got {settings.dropout}, wanted a share in [0, 1)")
    if not 0 < settings.learning_rate < 1:
        parser.error(f"--learning-rate: got {settings.learning_rate}, wanted one in (0, 1)")
    if settings.seed < 0 or characters < 0:
        parser.error("--seed and --characters: wanted at least 0")
    try:
        text = Text(file and file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--text: {error}")
    return settings, text, output, characters


def train_and_write(training, path, num_characters):
    training.run(path)
    plot(training, path.with_suffix(".png"))
    print(f"loss curve: {path.with_suffix('.png')}\n")
    text, rng = training.text, np.random.default_rng(training.settings.seed)
    start = text.validation[:60]
    print(text.read(start) + "|" + text.read(training.model.generate(start, num_characters, rng)))


def main():
    settings, text, output, num_characters = arguments()
    if settings.context >= len(text.validation):
        sys.exit(f"--context: got {settings.context}, wanted fewer than the"
                 f" {len(text.validation):,} characters of the validation text")
    training = Training(settings, text)
    path = output / "language_model.npz"
    print(f"{len(text.training):,} characters to train on, {len(text.validation):,} to validate;"
          f" {training.model.flat.size:,} parameters")
    try:
        if path.exists():
            training.load(path)
            print(f"going on from step {training.saved_step} of {path}")
        output.mkdir(parents=True, exist_ok=True)
        train_and_write(training, path, num_characters)
    except KeyboardInterrupt:
        print(f"\nstopped after step {len(training.losses)}; run it again to go on from step"
              f" {training.saved_step}")
        return 130
    except OSError as error:
        sys.exit(f"cannot write to {output}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
