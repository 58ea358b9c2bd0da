"""The generating example: with its cache it writes what it writes without, in every manner."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from example_programs import EXAMPLES, loaded

pytestmark = pytest.mark.thorough

# Python's own documentation differs by version.
PROSE = Path(__file__).parent.parent / "data" / "prose.txt"
generate, training = loaded("generate", "train_language_model")

NUM_TOKENS = 11
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module", params=[np.float32, np.float64])
def model(request):
    """One that has not learnt anything, but is sure of what it says."""
    settings = training.Settings(width=16, blocks=2, heads=2, context=20)
    model = training.LanguageModel(NUM_TOKENS, settings, request.param)
    model.flat += 0.3 * np.random.default_rng(0).standard_normal(model.flat.size)
    return model


@pytest.fixture(scope="module")
def decoder(model):
    return generate.Decoder(model)


def greedy(logits):
    return int(logits.argmax())


def written_out(model, prompt, count):
    """The likeliest tokens by the trainer's own forward pass over all that is seen."""
    tokens, context = list(prompt), model.settings.context
    for _ in range(count):
        start = 0
        while len(tokens) - start > context:
            start += context - context // 2
        tokens.append(greedy(model.logits_vjp(np.array([tokens[start:]]))[0][0, -1]))
    return tokens[len(prompt):]


def test_logits_are_the_models(model, decoder):
    tokens = np.random.default_rng(1).integers(NUM_TOKENS, size=(2, 20))
    wanted = model.logits_vjp(tokens)[0]
    got = decoder.logits(tokens, decoder.new_caches(2))
    assert got.dtype == model.flat.dtype
    precision = np.finfo(model.flat.dtype).eps
    assert np.abs(got - wanted).max() < 100 * precision * np.abs(wanted).max()


@pytest.mark.parametrize("size", [1, 3, 7])
def test_logits_have_the_same_bits_with_and_without_cache(decoder, size):
    tokens = np.random.default_rng(2).integers(NUM_TOKENS, size=(2, 84))
    with_cache, without = (generate.Reader(decoder, 2, cached) for cached in (True, False))
    for at in range(0, 84, size):
        got, wanted = (reader.read(tokens[:, at:at + size]) for reader in (with_cache, without))
        assert np.array_equal(got[:, -1], wanted[:, -1])
        assert with_cache.caches[0].lengths[0] <= 20


def test_it_writes_what_the_model_says_is_likeliest(model, decoder):
    wanted = written_out(model, PROMPT, 70)
    assert len(set(wanted)) > 2
    for cached in (True, False):
        reader = generate.Reader(decoder, cached=cached)
        assert list(generate.sample(reader, PROMPT, 70, greedy)) == wanted


def test_draws_are_the_same_with_and_without_cache(decoder):
    texts = []
    for cached in (True, False):
        rng = np.random.default_rng(3)
        reader = generate.Reader(decoder, cached=cached)
        texts.append(list(generate.sample(
            reader, PROMPT, 60, lambda logits, rng=rng: generate.draw(logits, rng, 1.0, 0, 1.0))))
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 4


@pytest.mark.parametrize("ahead", [1, 3, 8, 50])
@pytest.mark.parametrize("count", [1, 2, 75])
def test_speculation_gives_the_very_tokens_of_greedy_decoding(decoder, ahead, count):
    for prompt in (PROMPT, 4 * PROMPT, 12 * PROMPT):
        wanted = list(generate.sample(generate.Reader(decoder), prompt, count, greedy))
        got = generate.speculate(generate.Reader(decoder), prompt, count, ahead)
        assert list(got) == wanted


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_speculation_with_any_share_of_right_guesses(decoder, right, monkeypatch):
    wanted = list(generate.sample(generate.Reader(decoder), PROMPT, 60, greedy))
    rng, calls = np.random.default_rng(4), []

    def guess(tokens, count):
        ahead = wanted[len(tokens) - len(PROMPT):][:count]
        return [token if rng.random() < right else (token + 1) % NUM_TOKENS for token in ahead]

    monkeypatch.setattr(generate, "guess", guess)
    reader = generate.Reader(decoder)
    read = reader.read
    monkeypatch.setattr(reader, "read", lambda tokens: calls.append(tokens) or read(tokens))
    assert list(generate.speculate(reader, PROMPT, 60, 4)) == wanted
    assert len(calls) < 25 if right == 1 else len(calls) > 25
    assert (len(calls) == 60) == (right == 0)


def test_guesses_follow_the_longest_end_that_stood_before():
    assert generate.guess([1, 2, 3, 9, 2, 3, 7, 1, 2, 3], 3) == [9, 2, 3]
    assert generate.guess([5, 2, 8, 2], 9) == [8, 2]
    assert generate.guess([1, 2, 3], 4) == []


def log_probability(decoder, prompt, tokens):
    reader = generate.Reader(decoder, cached=False)
    total, logits = 0.0, reader.read([prompt])
    for token in tokens:
        total += float(generate.log_softmax(logits[0, -1])[token])
        logits = reader.read([[token]])
    return total


@pytest.mark.parametrize("beams", [1, 2, 5])
def test_beam_search_against_one_written_out(decoder, beams):
    """Without caches: every continuation by one token of the best texts, scored from its start."""
    prompt, count = 3 * PROMPT, 8  # over the end of the context
    texts = [()]
    for _ in range(count):
        longer = [(*text, token) for text in texts for token in range(NUM_TOKENS)]
        texts = sorted(longer, key=lambda text: -log_probability(decoder, prompt, text))[:beams]
    got, total = generate.beam_search(generate.Reader(decoder), prompt, count, beams)
    assert tuple(got) == texts[0]
    assert abs(total - log_probability(decoder, prompt, got)) < 1e-12 * abs(total)
    if beams == 1:
        assert got == list(generate.sample(generate.Reader(decoder), prompt, count, greedy))


def frequencies(logits, count=4000, **options):
    rng, defaults = np.random.default_rng(5), {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    drawn = [generate.draw(logits, rng, **defaults | options) for _ in range(count)]
    return np.bincount(drawn, minlength=len(logits)) / count


@pytest.mark.parametrize(("options", "wanted"), [
    ({}, [0.1, 0.4, 0.2, 0.3]), ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
    ({"temperature": 0}, [0, 1, 0, 0]), ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
    ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]), ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
    ({"top_p": 0.4 - 1e-9}, [0, 1, 0, 0]), ({"top_p": 1e-9}, [0, 1, 0, 0]),
    ({"top_k": 3, "top_p": 0.8}, [0, 4 / 9, 2 / 9, 3 / 9])], ids=str)
def test_draws_follow_the_probabilities(options, wanted):
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3])) + 5
    got = frequencies(logits, **options)
    assert np.abs(got - wanted).max() < 0.04
    assert not got[np.array(wanted) == 0].any()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    settings = training.Settings(steps=3, width=16, blocks=1, heads=2, context=16, batch=2)
    run = training.Training(settings, training.Text(PROSE.read_text(encoding="utf-8")))
    for _ in range(3):
        run.step()
    path = tmp_path_factory.mktemp("generate") / "language_model.npz"
    run.save(path)
    return path


def program(checkpoint, *more):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "generate.py"), "--checkpoint", str(checkpoint),
         "--prompt", "the ", "--characters", "40", *more],
        capture_output=True, text=True, encoding="utf-8")


def test_a_checkpoint_is_loaded(checkpoint):
    model, characters = generate.load(checkpoint)
    text = training.Text(PROSE.read_text(encoding="utf-8"))
    assert characters == text.characters
    assert np.array_equal(model.flat, np.load(checkpoint)["parameters"])


@pytest.mark.parametrize(("more", "said"), [
    ((), "with the cache:"), (("--temperature", "0"), "with the cache:"),
    (("--speculate", "4"), "with guesses:"), (("--beams", "3"), "the log of their probability:")])
def test_the_program(checkpoint, more, said):
    run = program(checkpoint, *more)
    assert run.returncode == 0, run.stderr
    text, figures = run.stdout.rstrip("\n").rsplit("\n\n", 1)
    assert text.startswith("the |")
    assert len(text.removesuffix("\n").split("|", 1)[1]) in (39, 40)
    assert said in figures and "characters a second" in figures
    assert "ANOTHER" not in figures
    assert figures.endswith("the same text") or "--beams" in more


def test_a_seed_is_a_text(checkpoint):
    first, again, other = (program(checkpoint, "--temperature", "1.5", "--seed", seed)
                           .stdout.rsplit("\n\n", 1)[0] for seed in ("1", "1", "2"))
    assert first == again != other


@pytest.mark.parametrize(("more", "status", "said"), [
    (("--help",), 0, ""), (("--prompt", "\u0394"), 2, "--prompt: got '\u0394'"),
    (("--prompt", ""), 2, "--prompt: got ''"), (("--top-p", "0"), 2, "--top-p: got 0.0"),
    (("--temperature", "-1"), 2, "--temperature: got -1.0"), (("--top-k", "-1"), 2, "--top-k: got"),
    (("--characters", "0"), 2, "--characters: got 0"), (("--beams", "-1"), 2, "--beams: got -1"),
    (("--beams", "2", "--speculate", "2"), 2, "not allowed with"),
    (("--checkpoint", "nothing"), 1, "run `make train` first")])
def test_help_and_wrong_arguments(checkpoint, more, status, said):
    run = program(checkpoint, *more)
    assert run.returncode == status
    assert said in run.stderr and "Traceback" not in run.stderr
    if not status:
        for name in ("--temperature", "--top-k", "--top-p", "--seed", "--beams", "--speculate"):
            assert name in run.stdout
