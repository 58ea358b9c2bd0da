"""Text from the language model of train_language_model.py, a character at a time, through a cache.

    make train                                   (once: the checkpoint)
    python examples/generate.py [--prompt "The "] [--temperature 0.8] [--top-k 20] [--top-p 0.9]
    python examples/generate.py --beams 4        the likeliest continuation of four
    python examples/generate.py --speculate 8    guesses 8 characters ahead, and checks them at once

Without a cache each character costs a call over all characters before it; with one, a call over
itself. Both give the same bits, so that the texts are equal to the last character. The program
shows how fast either is.
"""

import argparse
import copy
import json
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
from train_language_model import LanguageModel, Settings, check_checkpoint, read_checkpoint

import mha


def load(path):
    """(the model, its characters) of a checkpoint."""
    run, saved = read_checkpoint(path)
    known = json.loads(run)
    settings = Settings(**{field.name: known[field.name] for field in fields(Settings)})
    model = LanguageModel(len(known["characters"]), settings)
    check_checkpoint(saved, model.flat.size, settings.steps)
    model.flat[...] = saved["parameters"]
    return model, known["characters"]


class Decoder:
    """The model without its gradients. Every step treats each row alone, so that a row's logits do
    not depend on the rows that share its call."""

    def __init__(self, model):
        self.parameters, self.context = model.parameters, model.settings.context
        self.attentions = [copy.copy(attention).freeze() for attention in model.attentions]

    def new_caches(self, batch):
        return [attention.new_cache(batch, self.context) for attention in self.attentions]

    def logits(self, tokens, caches):
        """(batch, n) behind what the caches hold -> (batch, n, num_tokens)."""
        first, n = int(caches[0].lengths[0]), tokens.shape[1]
        x = self.parameters["tokens"][tokens] + self.parameters["positions"][first:first + n]
        for i, (attention, cache) in enumerate(zip(self.attentions, caches, strict=True)):
            x = x + attention(self._norm(f"{i}.norm_1", x), cache=cache)
            hidden = self._linear(f"{i}.W_in", f"{i}.b_in", self._norm(f"{i}.norm_2", x))
            x = x + self._linear(f"{i}.W_out", f"{i}.b_out", np.maximum(hidden, 0))
        return self._linear("W_logits", "b_logits", self._norm("norm", x))

    def _linear(self, weight, bias, x):
        return mha.linear(x, self.parameters[weight], self.parameters[bias])

    def _norm(self, name, x):
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        normal = centred / np.sqrt(variance + 1e-5)
        return normal * self.parameters[f"{name}.scale"] + self.parameters[f"{name}.shift"]


class Reader:
    """Reads texts (batch, length) that grow, and says what may come next. The model has positions
    for `context` characters: where a text is longer, it sees the last half of them, then more and
    more until they are all there again."""

    def __init__(self, decoder, batch=1, cached=True):
        self.decoder, self.cached = decoder, cached
        self.tokens = np.zeros((batch, 0), int)
        self.start = 0  # of what the caches hold
        self.caches = decoder.new_caches(batch)

    def start_of(self, length):
        """The first character that is seen of a text of this length."""
        context = self.decoder.context
        hop = context - context // 2
        return -(-max(0, length - context) // hop) * hop

    def room(self):
        """How many more characters are seen before the start moves."""
        length = self.tokens.shape[1]
        return self.start_of(length) + self.decoder.context - length

    def read(self, tokens):
        """Behind each text its new tokens (batch, n) -> their logits, the last ones' at least."""
        new = np.asarray(tokens)
        self.tokens = np.concatenate([self.tokens, new], axis=1)
        start = self.start_of(self.tokens.shape[1])
        if start != self.start or not self.cached:
            self.start, new = start, self.tokens[:, start:]
            for cache in self.caches:
                cache.reset()
        return self.decoder.logits(new, self.caches)[:, -len(tokens[0]):]

    def forget(self, count):
        """The last characters, as if they had not been read."""
        self.tokens = self.tokens[:, :self.tokens.shape[1] - count]
        for cache in self.caches:
            cache.truncate(self.tokens.shape[1] - self.start)

    def select(self, indices):
        """These texts take the place of those that were read, with all that was read of them."""
        self.tokens = self.tokens[indices]
        for cache in self.caches:
            cache.select(indices)


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def draw(logits, rng, temperature, top_k, top_p):
    """A token by softmax(logits / temperature): of the top_k likeliest, and of the fewest whose
    probabilities sum to top_p (Holtzman et al. 2020, "The Curious Case of Neural Text
    Degeneration"). Temperature 0: the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[:top_k or None]
    probabilities = np.exp(log_softmax(logits[order] / temperature))
    before = np.cumsum(probabilities) - probabilities  # of the likelier ones
    kept = probabilities * (before < top_p)
    return int(rng.choice(order, p=kept / kept.sum()))


def sample(reader, prompt, count, choose):
    """Yields `count` tokens, each what `choose` makes of the logits behind all before it."""
    logits = reader.read([prompt])[0, -1]
    for made in range(count):
        token = choose(logits)
        yield token
        if made + 1 < count:
            logits = reader.read([[token]])[0, -1]


def guess(tokens, count, longest=8):
    """What followed the last time that the text's end, as much of it as can be, stood before."""
    tokens = list(tokens)
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        for at in range(len(tokens) - length - 1, -1, -1):
            if tokens[at:at + length] == tokens[-length:]:
                return tokens[at + length:at + length + count]
    return []


def speculate(reader, prompt, count, ahead):
    """Yields what `sample` does with the likeliest token each time, several a call: guesses are
    read with the token before them, and those from the first wrong one on are forgotten (Leviathan
    et al. 2023, "Fast Inference from Transformers via Speculative Decoding")."""
    token, made = int(reader.read([prompt])[0, -1].argmax()), 1
    yield token
    while made < count:
        room = min(ahead, count - made - 1, max(0, reader.room() - 1))
        guesses = guess([*reader.tokens[0], token], room) if room else []
        likeliest = reader.read([[token, *guesses]])[0].argmax(axis=-1).tolist()
        right = 0
        while right < len(guesses) and guesses[right] == likeliest[right]:
            right += 1
        reader.forget(len(guesses) - right)
        yield from likeliest[:right + 1]
        made += right + 1
        token = likeliest[right]


def beam_search(reader, prompt, count, beams):
    """(`count` tokens, the log of their probability): the likeliest of the continuations that stay
    among the `beams` likeliest ones at every length (Sutskever et al. 2014, section 3.2)."""
    totals, logits = np.zeros(1), reader.read([prompt])[:, -1]
    written = np.zeros((1, 0), int)
    for made in range(count):
        scores = totals[:, None] + log_softmax(logits)  # (texts, tokens)
        best = np.argsort(-scores, axis=None, kind="stable")[:beams]
        texts, tokens = np.divmod(best, scores.shape[1])
        totals = scores[texts, tokens]
        written = np.concatenate([written[texts], tokens[:, None]], axis=1)
        if made + 1 < count:
            reader.select(texts)
            logits = reader.read(tokens[:, None])[:, -1]
    return written[0].tolist(), float(totals[0])


def timed(tokens, show=lambda token: None):
    """(the tokens, how many a second)."""
    begin, made = time.perf_counter(), []
    for token in tokens:
        made.append(token)
        show(token)
    return made, len(made) / (time.perf_counter() - begin)


def compare(made, rate, name, others, other_rate, other_name):
    same = "the same text" if made == others else "ANOTHER TEXT"
    print(f"\n\n{name}: {rate:,.0f} characters a second; {other_name}: {other_rate:,.0f}; {same}")
    return 0 if made == others else 1


def write(decoder, characters, prompt, given):
    """The text on the screen as it comes, then how long that took."""
    def show(token):
        print(characters[token], end="", flush=True)

    def choose(rng):
        return lambda logits: draw(logits, rng, given.temperature, given.top_k, given.top_p)

    count = given.characters
    print("".join(characters[token] for token in prompt), end="|", flush=True)
    if given.beams:
        begin = time.perf_counter()
        made, total = beam_search(Reader(decoder), prompt, count, given.beams)
        print("".join(characters[token] for token in made))
        rate = count / (time.perf_counter() - begin)
        print(f"\n{rate:,.0f} characters a second; the log of their probability: {total:.2f}")
        return 0
    if given.speculate:
        made, rate = timed(speculate(Reader(decoder), prompt, count, given.speculate), show)
        plain = timed(sample(Reader(decoder), prompt, count, lambda logits: int(logits.argmax())))
        return compare(made, rate, "with guesses", *plain, "one by one")
    made, rate = timed(
        sample(Reader(decoder), prompt, count, choose(np.random.default_rng(given.seed))), show)
    without = timed(sample(Reader(decoder, cached=False), prompt, count,
                           choose(np.random.default_rng(given.seed))))
    return compare(made, rate, "with the cache", *without, "without")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("output/language_model.npz"),
                        help="what train_language_model.py wrote")
    parser.add_argument("--prompt", default="The ", help="the text to go on from")
    parser.add_argument("--characters", type=int, default=300, help="how many to write")
    parser.add_argument("--temperature", type=float, default=0.7,
                        help="divides the logits: 0 takes the likeliest each time")
    parser.add_argument("--top-k", type=int, default=0, help="draw from so many; 0: from all")
    parser.add_argument("--top-p", type=float, default=1.0,
                        help="draw from the likeliest whose probabilities sum to this")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--beams", type=int, default=0,
                       help="beam search of this width in the place of draws")
    other.add_argument("--speculate", type=int, default=0,
                       help="take the likeliest each time, guessing up to so many ahead")
    given = parser.parse_args()
    for name in ("characters", "top_k", "seed", "beams", "speculate", "temperature"):
        least = 1 if name == "characters" else 0
        if not getattr(given, name) >= least:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(given, name)}, wanted at least"
                         f" {least}")
    if not 0 < given.top_p <= 1:
        parser.error(f"--top-p: got {given.top_p}, wanted a share in (0, 1]")
    return parser, given


def main():
    parser, given = arguments()
    try:
        model, characters = load(given.checkpoint)
    except Exception as error:  # of a broken archive zipfile and NumPy raise almost any
        sys.exit(f"{given.checkpoint} is no readable checkpoint ({error}): run `make train` first,"
                 " or give --checkpoint")
    strange = sorted(set(given.prompt) - set(characters))
    if strange or not given.prompt:
        parser.error(f"--prompt: got {''.join(strange)!r}, wanted some of the characters"
                     f" {''.join(characters)!r}")
    prompt = [characters.index(character) for character in given.prompt]
    try:
        return write(Decoder(model), characters, prompt, given)
    except KeyboardInterrupt:
        print()
        return 130


if __name__ == "__main__":
    sys.exit(main())
