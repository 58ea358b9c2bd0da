"""A whole Llama, Qwen 3 or Gemma 3 (text) in NumPy and mha: text goes on behind a prompt.

    python examples/llama.py MODEL "Once upon a time" [--quantize q8_0] [--temperature 0]
    python examples/llama.py MODEL "One prompt" "Another" ...         (all together: in less time)
    make chat MODEL=folder                       (prompts line by line; options by ARGS="...")

MODEL is a folder as Hugging Face has it (config.json, *.safetensors, tokenizer.json) or a .gguf of
llama.cpp. mha ships no weights: give those of a model that you have.

    tokens -> embeddings -> layers x (norm, attention, add, norm, feed-forward, add)
           -> norm -> logits

Sources: Touvron et al. 2023, "LLaMA"; Zhang & Sennrich 2019 (RMS norm); Shazeer 2020, "GLU Variants
Improve Transformer"; Gemma Team 2025, "Gemma 3 Technical Report".
"""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from llama_files import ModelFiles, Text, floats
from llama_terminal import arguments, prompts, show, show_together

import mha

PAGE = 128  # positions of a page of a pool
PIECE = 1 << 15  # numbers of the feed-forward network that are activated at once, in the cache


def silu(x):
    """x / (1 + exp(-x)), new."""
    out = np.maximum(x, -80)  # float32 holds no exp(89)
    np.negative(out, out=out)
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
        self.new_caches(0)  # an error at once where heads have no such cache

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

    def new_pool(self, lengths, most):
        """Pages for the longest `most` of sequences of these lengths, for all layers. Those with a
        window have no pool of their own: a prompt is one call, which needs pages for all of it
        there, too. What they see is the layers' own window."""
        pages = sorted(-(-length // PAGE) for length in lengths)[-most:]
        layer = self.layers[0].attention
        return mha.PagedCache(sum(pages), layer.num_kv_heads, layer.head_dim, layer.value_head_dim,
                              layers=len(self.layers), page_len=PAGE, dtype=self.cache)

    def next_logits_of(self, tokens, pool, ids):
        """The next tokens of several sequences, a list of each -> the logits (sequences,
        vocabulary) behind the last of each."""
        starts = np.cumsum([0, *map(len, tokens)])
        return self.logits(np.concatenate(tokens), starts[1:] - 1, lambda index, x: self.layers[
            index].attention(x, starts=starts, cache=pool[index], sequences=ids))

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
        logits = mha.linear(self._norm(x[wanted], self.last_norm), self.to_logits)
        cap = self.config.get("final_logit_softcapping")
        return logits if cap is None else cap * np.tanh(logits / cap)

    def _norm(self, x, weight):
        """x / sqrt(mean(x^2) + eps) * weight, a row at a time."""
        # Few calls of NumPy, and none of its Python code: the weights leave no room in the caches,
        # and every call loads its own instructions from memory. sums: (rows, 1)
        sums = np.add.reduce(x * x, axis=1, keepdims=True)
        normal = x / np.sqrt(sums / x.shape[1] + self.eps)
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


class Prompt(NamedTuple):
    tokens: list
    count: int  # how many may follow at most
    choose: Callable  # logits -> a token
    said: str = ""


def generate(model, prompt, ends=()):
    """Yields the tokens behind a prompt; one of `ends` is the last, and is not given. The prompt is
    one call, and then each token."""
    caches = model.new_caches(len(prompt.tokens) + prompt.count)
    logits = model.next_logits(prompt.tokens, caches)
    for made in range(1, prompt.count + 1):
        token = prompt.choose(logits)
        if token in ends:
            return
        yield token
        if made < prompt.count:
            logits = model.next_logits([token], caches)


def generate_together(model, prompts, ends=(), most=8):
    """Yields (number, token) for each that `generate` yields of a prompt, and (number, None) behind
    its last. `most` prompts are decoded at once, the others begin as these end: a step is one call,
    over one token of each that goes on and all tokens of each that begins."""
    pool = model.new_pool([len(prompt.tokens) + prompt.count for prompt in prompts], most)
    waiting, ids, tokens = dict(enumerate(prompts)), {}, {}  # by number; tokens: those not yet read
    left = [prompt.count for prompt in prompts]
    while waiting or ids:
        for number in list(waiting)[:most - len(ids)]:
            ids[number], tokens[number] = pool.new(), waiting.pop(number).tokens
        logits = model.next_logits_of(list(tokens.values()), pool, list(ids.values()))
        for number, row in zip(list(ids), logits):
            token = prompts[number].choose(row)
            tokens[number] = [token]
            left[number] -= 1
            if token not in ends:
                yield number, token
            if token in ends or not left[number]:
                pool.free(ids.pop(number))
                del tokens[number]
                yield number, None


def main():
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows ?
    given, begin = arguments(__doc__.split("\n\n")[0]), time.perf_counter()
    try:
        files = ModelFiles(given.model)
        text, ends = Text(files, given.tokenizer), files.end_tokens()
        model = Llama(files, given.quantize, given.cache)
    except (OSError, ValueError, TypeError, ImportError) as error:
        sys.exit(f"{given.model} cannot be used: {error}")
    print(f"{model.config['model_type']}, {len(model.layers)} layers, read in"
          f" {time.perf_counter() - begin:.1f} s; mha {mha.__version__} ({mha.instruction_set()}),"
          f" threads: {mha.get_num_threads()}\n", flush=True)
    longest = model.config.get("max_position_embeddings", sys.maxsize)

    def prompt_of(number, said, shown=""):
        """None where it is too long, and a sentence behind what is to be shown."""
        ids = text.tokens(given.template.replace("\\n", "\n").replace("{}", said))
        if not 0 < len(ids) < longest:
            print(f"{shown}got {len(ids)} tokens, wanted 1 to {longest - 1}\n", flush=True)
            return None
        rng = np.random.default_rng((given.seed, number))  # no draws depend on other prompts
        return Prompt(ids, min(given.tokens, longest - len(ids)), lambda logits: draw(
            logits, rng, given.temperature, given.top_k, given.top_p), said)

    try:
        if len(given.prompts) > 1 < given.together:
            known = [prompt_of(*each, f"> {each[1]}\n") for each in enumerate(given.prompts)]
            known = list(filter(None, known))
            if known:
                show_together(text, known, generate_together(model, known, ends, given.together))
            return 0
        for number, said in enumerate(prompts(given.prompts)):
            prompt = prompt_of(number, said)
            if prompt:
                show(text, prompt, generate(model, prompt, ends))
    except MemoryError as error:
        sys.exit(f"fewer --tokens, or fewer prompts --together, take less memory: {error}")
    except KeyboardInterrupt:
        print()
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
