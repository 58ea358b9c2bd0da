"""A whole Llama, Qwen 3 or Gemma 3 (text) in NumPy and mha: text goes on behind a prompt.

    python examples/llama.py MODEL "Once upon a time" [--quantize q8_0] [--temperature 0]
    make chat MODEL=folder                       (prompts line by line; options by ARGS="...")

MODEL is a folder as Hugging Face has it (config.json, *.safetensors, tokenizer.json) or a .gguf of
llama.cpp. mha ships no weights: give those of a model that you have.

    tokens -> embeddings -> layers x (norm, attention, add, norm, feed-forward, add)
           -> norm -> logits

Sources: Touvron et al. 2023, "LLaMA"; Zhang & Sennrich 2019 (RMS norm); Shazeer 2020, "GLU Variants
Improve Transformer"; Gemma Team 2025, "Gemma 3 Technical Report".
"""

import argparse
import sys
import time
from typing import NamedTuple

import numpy as np
from llama_files import ModelFiles, Text, floats

import mha

PIECE = 1 << 15  # numbers of the feed-forward network that are activated at once, in the cache


def silu(x):
    """x / (1 + exp(-x)), new."""
    out = np.negative(x)
    with np.errstate(over="ignore"):  # x / infinity is the 0 that it should be
        np.exp(out, out=out)
    out += 1
    return np.divide(x, out, out=out)


def gelu_tanh(x):
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), new."""
    out = x * x
    out *= 0.044715 * (2 / np.pi)**0.5
    out += (2 / np.pi)**0.5
    out *= x
    np.tanh(out, out=out)
    out += 1
    out *= x
    out *= 0.5
    return out


ACTIVATIONS = {"silu": silu, "gelu_pytorch_tanh": gelu_tanh}


class Layer(NamedTuple):
    attention: mha.MultiHeadAttention
    norms: tuple  # before attention, behind it, before the feed-forward network, behind it
    gate: mha.PackedWeight  # (width, size), and so is up
    up: mha.PackedWeight
    down: mha.PackedWeight  # (size, width)


class Llama:
    """A model for inference, computed in float32. With kind "q8_0" or "q4_0" its matrices are
    quantised, else they stay as they are stored; but halves of the attention become float32. cache
    is the type in which keys and values are kept."""

    def __init__(self, files, kind=None, cache="float32"):
        config, self.cache = files.config, cache
        self.config = config
        self.eps = config["rms_norm_eps"]
        self.layers = [self._layer(files, i, kind) for i in range(config["num_hidden_layers"])]
        self.embedding = files[files.names.embedding]  # (vocabulary, width)
        self.scale = self.embedding.shape[1]**0.5 if files.is_gemma else 1
        self.last_norm = files.norm(files.names.last_norm)
        logits = files.get(files.names.logits, self.embedding)  # where they are tied
        self.to_logits = mha.pack(logits.T, dtype=kind)  # (width, vocabulary)
        name = config.get("hidden_activation") or config.get("hidden_act") or (
            "gelu_pytorch_tanh" if files.is_gemma else "silu")
        if name not in ACTIVATIONS:
            raise ValueError(f"hidden_act: got {name!r}, wanted one of {', '.join(ACTIVATIONS)}")
        self.activation = ACTIVATIONS[name]

    @staticmethod
    def _layer(files, index, kind):
        before = files.names.layer.format(index)
        attention = mha.MultiHeadAttention.from_state(
            files.arrays, prefix=before + files.names.attention, config=files.config,
            layer_index=index)
        if attention.dtype != np.float32:
            attention = attention.astype(np.float32)
        return Layer(attention.quantize(kind) if kind else attention.freeze(),
                     tuple(name and files.norm(before + name) for name in files.names.norms),
                     *(mha.pack(files[before + name].T, dtype=kind)
                       for name in files.names.feed_forward))

    def new_caches(self, capacity):
        """A cache for each layer, of one sequence. Layers with a window need no more than that."""
        windows = [layer.attention.window for layer in self.layers]
        return [layer.attention.new_cache(1, capacity, window=window and window[0] + 1,
                                          dtype=self.cache)
                for layer, window in zip(self.layers, windows)]

    def next_logits(self, tokens, caches):
        """The next tokens of one sequence -> the logits (vocabulary,) behind the last of them."""
        return self.logits(tokens, [-1], lambda index, x: self.layers[index].attention(
            x, cache=caches[index]))[0]

    def logits(self, tokens, wanted, attend):
        """tokens (rows,) of one sequence, or of several one after the other -> the logits
        (len(wanted), vocabulary) behind the wanted rows. attend(index, x), the attention of a
        layer, (rows, width) -> (rows, width), alone knows which rows see which."""
        x = floats(self.embedding[tokens])  # (rows, width), a copy
        if self.scale != 1:
            x *= self.scale
        for index, layer in enumerate(self.layers):
            before, behind, before_feed, behind_feed = layer.norms
            attended = attend(index, self._norm(x, before))
            x += attended if behind is None else self._norm(attended, behind)
            fed = self._feed_forward(self._norm(x, before_feed), layer)
            x += fed if behind_feed is None else self._norm(fed, behind_feed)
        return mha.linear(self._norm(x[wanted], self.last_norm), self.to_logits)

    def _norm(self, x, weight):
        """x / sqrt(mean(x^2) + eps) * weight, a row at a time."""
        squares = np.einsum("ij,ij->i", x, x)  # (rows,)
        normal = x / np.sqrt(squares / x.shape[1] + self.eps)[:, None]
        normal *= weight
        return normal

    def _feed_forward(self, x, layer):
        """(activation(x W_gate) * (x W_up)) W_down: (rows, width) -> (rows, width)."""
        gate, up = mha.linear(x, layer.gate), mha.linear(x, layer.up)  # (rows, size)
        step = max(1, PIECE // gate.shape[1])
        for first in range(0, len(x), step):
            rows = slice(first, first + step)
            np.multiply(self.activation(gate[rows]), up[rows], out=gate[rows])
        return mha.linear(gate, layer.down)


def draw(logits, rng, temperature, top_k, top_p):
    """A token by softmax(logits / temperature): of the top_k likeliest (0: of all), and of the
    fewest whose probabilities sum to top_p (Holtzman et al. 2020). Temperature 0: the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    tokens = np.arange(len(logits))
    if 0 < top_k < len(logits):
        tokens = np.argpartition(-logits, top_k - 1)[:top_k]
    scaled = logits[tokens].astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    if top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]  # of the likelier ones
        probabilities[order[before >= top_p]] = 0
        probabilities /= probabilities.sum()
    return int(rng.choice(tokens, p=probabilities))


def generate(model, prompt, count, choose, ends=()):
    """Yields up to `count` tokens behind the prompt's, each what `choose` makes of the logits; one
    of `ends` is the last, and is not given. The prompt is one call, and then each token."""
    caches = model.new_caches(len(prompt) + count)
    logits = model.next_logits(prompt, caches)
    for made in range(1, count + 1):
        token = choose(logits)
        if token in ends:
            return
        yield token
        if made < count:
            logits = model.next_logits([token], caches)


def answer(model, text, ids, choose, count, ends):
    """The text behind a prompt on the screen as it comes, then how fast that was."""
    begin = time.perf_counter()
    times = []
    for piece in text.pieces(generate(model, ids, count, choose, ends)):
        times.append(time.perf_counter())
        print(piece, end="", flush=True)
    first, last = (times[0], times[-1]) if times else (time.perf_counter(),) * 2
    # The first token is the prompt's work.
    print(f"\n\nprompt: {rate(len(ids), first - begin)};"
          f" generation: {rate(len(times) - 1, last - first)}\n")


def rate(tokens, seconds):
    return f"{tokens} tokens, {tokens / seconds:,.1f} a second" if tokens > 0 else "none"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("model", help="a folder with config.json and *.safetensors, or a .gguf")
    parser.add_argument("prompts", nargs="*", help="without any: standard input, a line each")
    parser.add_argument("--tokenizer", help="a tokenizer.json, in place of the model's own")
    parser.add_argument("--template", default="{}",
                        help="what stands around each prompt ({}), as models for chats want it;"
                             " \\n is a new line")
    parser.add_argument("--quantize", choices=("q8_0", "q4_0"), help="the matrices, to so few bits")
    parser.add_argument("--cache", choices=("float32", "float16"), default="float32",
                        help="in which keys and values are kept")
    parser.add_argument("--tokens", type=int, default=128, help="how many to write at most")
    parser.add_argument("--temperature", type=float, default=0.7,
                        help="divides the logits: 0 takes the likeliest each time")
    parser.add_argument("--top-k", type=int, default=40, help="draw from so many; 0: from all")
    parser.add_argument("--top-p", type=float, default=0.95,
                        help="draw from the likeliest whose probabilities sum to this")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    given = parser.parse_args()
    for name in ("tokens", "top_k", "seed", "temperature"):
        least = 1 if name == "tokens" else 0
        if not getattr(given, name) >= least:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(given, name)}, wanted at least"
                         f" {least}")
    if not 0 < given.top_p <= 1:
        parser.error(f"--top-p: got {given.top_p}, wanted a share in (0, 1]")
    if "{}" not in given.template:
        parser.error(f"--template: got {given.template!r}, wanted {{}} where the prompt stands")
    return given


def prompts(given):
    """Those that are given, or lines as they come; what nobody has typed here is shown."""
    for prompt in given:
        print(f"> {prompt}", flush=True)
        yield prompt
    while not given:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if not sys.stdin.isatty():
            print(line, flush=True)
        yield line


def main():
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows ?
    given, begin = arguments(), time.perf_counter()
    try:
        files = ModelFiles(given.model)
        text, ends = Text(files, given.tokenizer), files.end_tokens()
        model = Llama(files, given.quantize, given.cache)
    except (OSError, ValueError, TypeError, ImportError) as error:
        sys.exit(f"{given.model} cannot be used: {error}")
    print(f"{model.config['model_type']}, {len(model.layers)} layers, read in"
          f" {time.perf_counter() - begin:.1f} s; mha {mha.__version__} ({mha.instruction_set()}),"
          f" threads: {mha.get_num_threads()}\n", flush=True)
    rng = np.random.default_rng(given.seed)
    longest = model.config.get("max_position_embeddings", sys.maxsize)

    def choose(logits):
        return draw(logits, rng, given.temperature, given.top_k, given.top_p)

    try:
        for prompt in prompts(given.prompts):
            ids = text.tokens(given.template.replace("\\n", "\n").replace("{}", prompt))
            if 0 < len(ids) < longest:
                answer(model, text, ids, choose, min(given.tokens, longest - len(ids)), ends)
            else:
                print(f"got {len(ids)} tokens, wanted 1 to {longest - 1}\n")
    except KeyboardInterrupt:
        print()
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
