"""examples/llama.py: small models from folders and .gguf against plain NumPy, its text, its draws,
and the program."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_llamas import CONFIGS, VOCABULARY, draw, reference_logits, write_folder, write_gguf

import mha

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("gguf")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
try:
    import llama
    import llama_files
finally:
    sys.path.remove(str(EXAMPLES))

PROMPT = np.random.default_rng(7).integers(VOCABULARY, size=23).tolist()


def greedy(logits):
    return int(logits.argmax())


def model_of(path, quantised=None):
    return llama.Llama(llama.ModelFiles(path), quantised)


def text_of(path, tokenizer=None):
    return llama_files.Text(llama_files.ModelFiles(path), tokenizer)


def model_at(path, kind, form, arrays):
    config = CONFIGS[kind]
    if form == "gguf":
        # llama.cpp's files of Gemma 3 have no query_pre_attn_scalar: it is head_dim.
        return write_gguf(path / "model.gguf", config, arrays)
    return write_folder(path / "model", config, arrays, shards=3 if form == "shards" else 1)


def config_of(kind, form):
    config = CONFIGS[kind]
    is_given = form == "gguf" and "query_pre_attn_scalar" in config
    return {**config, "query_pre_attn_scalar": config["head_dim"]} if is_given else config


@pytest.mark.parametrize("form", ["folder", "shards", "gguf"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_it_goes_on_as_the_model_does(tmp_path, kind, form):
    """Forty tokens, beyond Gemma's window: the likeliest each time, and the logits behind them."""
    config, arrays = config_of(kind, form), draw(CONFIGS[kind])
    model = model_of(model_at(tmp_path, kind, form, arrays))
    calls = []
    next_logits = model.next_logits
    model.next_logits = lambda *given: calls.append(next_logits(*given)) or calls[-1]
    made = list(llama.generate(model, llama.Prompt(PROMPT, 40, greedy)))
    wanted = reference_logits(config, arrays, PROMPT + made)[len(PROMPT) - 1:-1]
    assert made == wanted.argmax(-1).tolist() and len(set(made)) > 10
    assert len(calls) == 40 and calls[0].shape == (VOCABULARY,)
    assert all(logits.dtype == np.float32 for logits in calls)
    assert np.abs(calls - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", CONFIGS)
def test_pieces_of_any_size_give_the_same_bits(tmp_path, kind):
    """And other sequences beside them, as rows of one call."""
    model = model_of(model_at(tmp_path, kind, "folder", draw(CONFIGS[kind])))
    caches = model.new_caches(0)
    whole = model.next_logits(PROMPT, caches)
    for size in (1, 5):
        caches = model.new_caches(64)
        for at in range(0, len(PROMPT), size):
            last = model.next_logits(PROMPT[at:at + size], caches)
        assert np.array_equal(last, whole)

    ends, other = [len(PROMPT), len(PROMPT) + 9], model.new_caches(0)
    caches = model.new_caches(0)

    def attend(index, x):
        layer = model.layers[index].attention
        return np.concatenate([layer(x[:ends[0]], cache=caches[index]),
                               layer(x[ends[0]:], cache=other[index])])

    both = model.logits(PROMPT + PROMPT[:9], np.array(ends) - 1, attend)
    assert np.array_equal(both[0], whole)
    assert np.array_equal(both[1], model.next_logits(PROMPT[:9], model.new_caches(0)))


def test_windows_keep_what_they_need(tmp_path):
    model = model_of(model_at(tmp_path, "gemma3", "folder", draw(CONFIGS["gemma3"])))
    caches = model.new_caches(400)
    assert [cache.window for cache in caches] == [9] * 5 + [None, 9]
    assert max(cache.capacity for cache in caches if cache.window) < 400 == caches[5].capacity


@pytest.mark.parametrize(("cache", "share", "error"), [("float16", 1 / 2, 2e-3),
                                                       ("q8_0", 34 / 128, 2e-2)])
def test_narrower_caches(tmp_path, cache, share, error):
    """Less memory, and nearly the numbers."""
    config = CONFIGS["llama"] | {"head_dim": 32}
    files = llama.ModelFiles(write_folder(tmp_path / "model", config, draw(config)))
    (made, size), (wanted, whole) = (
        (model.next_logits(PROMPT, caches), caches[0].nbytes) for model in (
            llama.Llama(files, cache=cache), llama.Llama(files))
        for caches in [model.new_caches(64)])
    assert size == share * whole
    assert 0 < np.abs(made - wanted).max() < error * np.abs(wanted).max()


def test_heads_that_no_block_fits(tmp_path):
    files = llama.ModelFiles(model_at(tmp_path, "llama", "folder", draw(CONFIGS["llama"])))
    with pytest.raises(ValueError, match="head_dim: got 16, wanted a multiple of 32 for q8_0"):
        llama.Llama(files, cache="q8_0")


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_of_halves(tmp_path, kind):
    """As most models are stored: the bits of a model of float32 with the same numbers."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    halves = {name: array.astype(ml_dtypes.bfloat16)
              for name, array in draw(CONFIGS[kind]).items()}
    whole = {name: array.astype(np.float32) for name, array in halves.items()}
    models = [model_of(write_folder(tmp_path / name, CONFIGS[kind], arrays))
              for name, arrays in (("halves", halves), ("whole", whole))]
    assert models[0].embedding.dtype.itemsize == 2
    assert models[0].to_logits.nbytes < models[1].to_logits.nbytes
    made, wanted = (model.next_logits(PROMPT, model.new_caches(0)) for model in models)
    assert made.dtype == np.float32 and np.array_equal(made, wanted)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_numbers_as_float32(itemsize):
    """Of bfloat16 without ml_dtypes, too."""
    numbers = np.array([1.5, -2.0, 0.0, np.inf], np.float32)
    raw = (numbers.view(np.uint32) >> 16).astype(np.uint16).view([("mha_bfloat16", np.uint16)])
    stored = (raw, numbers.astype(np.float16)) if itemsize == 2 else (numbers,)
    for array in stored:
        assert llama_files.floats(array).dtype == np.float32
        assert np.array_equal(llama_files.floats(array), numbers)


def dequantised(arrays, kind):
    return {name: np.ascontiguousarray(mha.pack(array.T, dtype=kind).unpack().T)
            if array.ndim == 2 else array for name, array in arrays.items()}


@pytest.mark.parametrize("quantised", ["q8_0", "q4_0"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_quantised_models(tmp_path, kind, quantised):
    """The bits of a model with the numbers that are left."""
    arrays = draw(CONFIGS[kind])
    left = dequantised(arrays, quantised)
    embedding = "model.embed_tokens.weight"
    left.setdefault("lm_head.weight", left[embedding])  # rows that are looked up are not quantised
    left[embedding] = arrays[embedding]
    made, wanted = (model.next_logits(PROMPT, model.new_caches(0)) for model in (
        model_of(write_folder(tmp_path / "whole", CONFIGS[kind], arrays), quantised),
        model_of(write_folder(tmp_path / "left", CONFIGS[kind], left))))
    assert np.array_equal(made, wanted)


@pytest.mark.parametrize("quantised", ["q8_0", "q4_0"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_quantised_files(tmp_path, kind, quantised):
    """Matrices keep their blocks; the bits are those of a file with their numbers."""
    arrays = draw(CONFIGS[kind])
    model, other = (model_of(write_gguf(tmp_path / f"{name}.gguf", CONFIGS[kind], *stored))
                    for name, stored in (("blocks", (arrays, quantised)),
                                         ("left", (dequantised(arrays, quantised),))))
    layer = model.layers[0]
    assert quantised in repr(layer.attention) and quantised not in repr(other.layers[0].attention)
    assert {weight.dtype for weight in (model.to_logits, *layer[2:])} == {quantised}
    made, wanted = (list(each.next_logits(PROMPT, each.new_caches(0))) for each in (model, other))
    assert made == wanted


def test_activations():
    x = np.array([[-200, -30, -1, 0, 0.5, 30, 200]], np.float32)
    exact = x.astype(np.float64)
    for ours, wanted in ((llama.silu, exact / (1 + np.exp(-exact))),
                         (llama.gelu_tanh, exact / 2 * (1 + np.tanh(
                             (2 / np.pi)**0.5 * (exact + 0.044715 * exact**3))))):
        np.testing.assert_allclose(ours(x), wanted, rtol=1e-6, atol=1e-7)


def test_it_ends(tmp_path):
    model = model_of(model_at(tmp_path, "qwen3", "folder", draw(CONFIGS["qwen3"])))
    made = list(llama.generate(model, llama.Prompt(PROMPT, 12, greedy)))
    at = next(at for at in range(4, 12) if made[at] not in made[:at])
    assert list(llama.generate(model, llama.Prompt(PROMPT, 12, greedy), {made[at]})) == made[:at]
    assert list(llama.generate(model, llama.Prompt(PROMPT, 1, greedy))) == made[:1]


# Several prompts at once.

LENGTHS = (23, 1, 140, 9, 127)  # of prompts: some end in another page than they begin in
COUNTS = (30, 4, 12, 1, 5)


def prompts_of(choosers, counts=COUNTS):
    rng = np.random.default_rng(8)
    return [llama.Prompt(rng.integers(VOCABULARY, size=length).tolist(), count, choose)
            for length, count, choose in zip(LENGTHS, counts, choosers, strict=True)]


def recorded(choose, calls):
    """`choose`, which keeps what it is asked."""
    return lambda logits: calls.append(logits) or choose(logits)


def texts_of(model, prompts, **options):
    """The tokens of each prompt, all of which end, and the order in which they do."""
    made, ended = [[] for _ in prompts], []
    for number, token in llama.generate_together(model, prompts, **options):
        assert number not in ended
        if token is None:
            ended.append(number)
        else:
            made[number].append(token)
    assert sorted(ended) == list(range(len(prompts)))
    return made, ended


@pytest.mark.parametrize("most", [1, 2, 8])
@pytest.mark.parametrize(("quantised", "cache"), [(None, "float32"), ("q8_0", "q8_0")])
@pytest.mark.parametrize("kind", CONFIGS)
def test_prompts_together_have_the_bits_of_each_alone(tmp_path, kind, quantised, cache, most):
    """Longer ones than Gemma's window and than a page, and some that wait for others to end."""
    config = CONFIGS[kind] | {"head_dim": 32}
    model = llama.Llama(llama.ModelFiles(write_folder(
        tmp_path / "model", config, draw(config))), quantised, cache)
    together, alone = ([[] for _ in LENGTHS] for _ in range(2))
    made, ended = texts_of(model, prompts_of([recorded(greedy, calls) for calls in together]),
                           most=most)
    assert tuple(map(len, made)) == COUNTS
    assert ended == {1: [0, 1, 2, 3, 4], 2: [1, 2, 3, 4, 0], 8: [3, 1, 4, 2, 0]}[most]
    for prompt, tokens in zip(prompts_of([recorded(greedy, calls) for calls in alone]), made):
        assert tokens == list(llama.generate(model, prompt))
    for number, (ours, wanted) in enumerate(zip(together, alone)):
        assert len(ours) == COUNTS[number]
        assert np.array_equal(ours, wanted)


def test_steps_pages_and_ends(tmp_path):
    """Each step is one call; what has ended takes no more pages and rows."""
    model = model_of(model_at(tmp_path, "gemma3", "folder", draw(CONFIGS["gemma3"])))
    made, _ = texts_of(model, prompts_of([greedy] * 5))
    calls, pools = [], []
    new_pool, next_logits_of = model.new_pool, model.next_logits_of
    model.new_pool = lambda *given: pools.append(new_pool(*given)) or pools[-1]
    model.next_logits_of = lambda tokens, pool, ids: calls.append(
        list(map(len, tokens))) or next_logits_of(tokens, pool, ids)
    assert texts_of(model, prompts_of([greedy] * 5), most=2)[0] == made
    # 0 has 30 tokens to write; beside it 1 has 4, 2 has 12, 3 has 1, 4 has 5.
    assert calls == [[23, 1], *[[1, 1]] * 3, [1, 140], *[[1, 1]] * 11, [1, 9], [1, 127],
                     *[[1, 1]] * 4, *[[1]] * 8]
    assert pools[-1].pages == pools[-1].pages_free == 2 + 2  # those of 2 and 4, the longest
    assert pools[-1].layers == 7 and pools[-1].window is None

    at = next(at for at in range(4, 30) if made[0][at] not in made[0][:at])
    end = made[0][at]
    short, _ = texts_of(model, prompts_of([greedy] * 5), ends={end}, most=2)
    assert short[0] == made[0][:at] and pools[-1].pages_free == pools[-1].pages
    for tokens, whole in zip(short, made):
        assert tokens == (whole[:whole.index(end)] if end in whole else whole)


# Draws.

def frequencies(logits, count=4000, **options):
    rng, defaults = np.random.default_rng(5), {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    drawn = [llama.draw(logits, rng, **defaults | options) for _ in range(count)]
    return np.bincount(drawn, minlength=len(logits)) / count


@pytest.mark.parametrize(("options", "wanted"), [
    ({}, [0.1, 0.4, 0.2, 0.3]), ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
    ({"temperature": 0}, [0, 1, 0, 0]), ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
    ({"top_k": 1}, [0, 1, 0, 0]), ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
    ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7]), ({"top_p": 0.4 - 1e-6}, [0, 1, 0, 0]),
    ({"top_p": 1e-9}, [0, 1, 0, 0]), ({"top_k": 3, "top_p": 0.8}, [0, 4 / 9, 2 / 9, 3 / 9])],
    ids=str)
def test_draws_follow_the_probabilities(options, wanted):
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32)) + np.float32(5)
    got = frequencies(logits, **options)
    assert np.abs(got - wanted).max() < 0.04
    assert not got[np.array(wanted) == 0].any()


def test_a_seed_is_a_draw():
    logits = np.random.default_rng(1).standard_normal(50).astype(np.float32)
    first, again, other = ([llama.draw(logits, rng, 1.0, 20, 0.9) for _ in range(20)]
                           for rng in map(np.random.default_rng, (3, 3, 4)))
    assert first == again != other


# Text.

SPECIAL = {"<|begin|>": 270, "<|end|>": 271}
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"), ("i", "n")]


def vocabulary():
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *("".join(merge) for merge in MERGES)]
    names += [f"<unused{at}>" for at in range(len(names), 270)]
    return {name: at for at, name in enumerate(names)} | SPECIAL


def bytes_merged():
    """A small tokenizer of the kind that GPT-2 has."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary(), MERGES))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer


def metadata(**more):
    names = list(vocabulary())
    return {"model": "gpt2", "pre": "gpt-2", "tokens": names,
            "merges": [" ".join(merge) for merge in MERGES],
            "token_type": [3 if name in SPECIAL else 1 for name in names], "bos_token_id": 270,
            "eos_token_id": 271, "add_bos_token": True} | more


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = CONFIGS["llama"] | {"eos_token_id": 269}
    folder = write_folder(tmp_path_factory.mktemp("llama") / "model", config, draw(config),
                          eos_token_id=[269, 271])
    tokenizer = bytes_merged()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=["<|begin|>", "$A"], special_tokens=[("<|begin|>", 270)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_gguf(folder.parent / "model.gguf", config, draw(config), **metadata())
    return folder


TEXTS = ["the thing in there", "12 naïve 漢字, 🎉!\n\n  x", "a<|end|>b", "", "I'm 12345\t\r\n"]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole(model, text):
    """Each behind the last of its tokens, and none in parts."""
    of_folder = text_of(model)
    ids = of_folder.tokens(text)
    pieces = list(of_folder.pieces(ids))
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text.replace("<|end|>", "")
    for at in range(len(ids)):
        whole = of_folder.tokenizer.decode(ids[:at + 1])
        if "\ufffd" not in whole:
            assert "".join(pieces[:at + 1]) == whole
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_of_a_gguf(model, text):
    by_file, by_metadata = (text_of(path) for path in (
        model, model.parent / "model.gguf"))
    assert by_metadata.tokens(text) == by_file.tokens(text)
    assert by_metadata.tokens(text)[0] == 270
    assert list(by_metadata.pieces(by_file.tokens(text))) == list(
        by_file.pieces(by_file.tokens(text)))
    other = text_of(model.parent / "model.gguf", model / "tokenizer.json")
    assert other.tokens(text) == by_file.tokens(text)


@pytest.mark.parametrize(("cut", "words", "begins"), [
    ("qwen2", ["I", "'m", " in", " ", "1", "2", "3", "4", "!\n", " x"], False),
    ("llama-bpe", ["I", "'m", " in", " ", "123", "4", "!\n", " x"], True)])
def test_words_of_other_models(cut, words, begins):
    said = {f"tokenizer.ggml.{name}": value for name, value in metadata(pre=cut).items()
            if name != "add_bos_token"}
    tokenizer = llama_files.of_metadata(said)
    cuts = tokenizer.pre_tokenizer.pre_tokenize_str("I'm in 1234!\n x")
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word, _ in cuts] == words
    assert (tokenizer.encode("x").ids[0] == 270) == begins


def test_tokens_that_end_a_text(model):
    folder, file = (llama_files.ModelFiles(path) for path in (model, model.parent / "model.gguf"))
    assert folder.end_tokens() == {269, 271} and file.end_tokens() == {271}
    for said, wanted in (({}, set()), ({"eos_token_id": 3}, {3}), ({"eos_token_id": None}, set())):
        folder.config, folder.path = said, "nothing"
        assert folder.end_tokens() == wanted


# The program.

def program(*arguments, given=None):
    return subprocess.run([sys.executable, str(EXAMPLES / "llama.py"), *map(str, arguments)],
                          input=given, capture_output=True, text=True, encoding="utf-8")


def test_the_program(model):
    """Several prompts, from the command line and from standard input, a folder and a .gguf."""
    options = ("--tokens", 20, "--temperature", 0)
    runs = [program(model, "the thing", "é", *options, "--together", 1),
            program(model, *options, given="the thing\né\n"),
            program(model.parent / "model.gguf", "the thing", "é", *options, "--together", 1)]
    texts = []
    for run in runs:
        assert run.returncode == 0 and not run.stderr, run.stderr
        first, *rest = run.stdout.removesuffix("\n> \n").split("\n> ")
        assert first.startswith("llama, 2 layers, read in ")
        assert [part.split("\n")[0] for part in rest] == ["the thing", "é"]
        texts.append([part.rsplit("\n\nprompt: ", 1)[0] for part in rest])
        for part, count in zip(rest, (5, 3)):  # the thing: begin, the, Ġ, th, in, g
            figures = part.rsplit("\n\nprompt: ", 1)[1]
            assert f"{count + (count == 5)} tokens, " in figures.split(";")[0]
            assert "; generation: " in figures and figures.count(" a second") == 2
    assert texts[0] == texts[1] == texts[2]
    prompt = llama.Prompt(text_of(model).tokens("é"), 20, greedy)
    made = list(llama.generate(model_of(model), prompt, {269, 271}))
    assert texts[0][1] == "é\n" + "".join(text_of(model).pieces(made))


def shown(run):
    """{prompt: the text behind it}, and the lines that say how fast they were."""
    assert run.returncode == 0 and not run.stderr, run.stderr
    figures = re.compile(r"\n\n(prompts?: .*)\n\n?")
    parts = figures.sub("\n", run.stdout).split("\n> ")[1:]
    return ({prompt: text.rstrip("\n") for prompt, text in (part.split("\n", 1) for part in parts)},
            figures.findall(run.stdout))


def test_prompts_together(model):
    """What one by one gives, each in one piece, and how fast all were."""
    asked = ("the thing", "é", "12", "in")
    options = ("--tokens", 20, "--temperature", 1.5, "--seed", 3)
    (wanted, each), *others = (shown(program(model, *asked, *options, "--together", most))
                               for most in (1, 2, 8))
    assert sorted(wanted) == sorted(asked) and len({*wanted.values()}) == 4 == len(each)
    for found, figures in others:
        assert found == wanted
        assert len(figures) == 1
        assert figures[0].startswith("prompts: 4, of 13 tokens; generation with them: ")
        assert figures[0].endswith(" a second")


def test_draws_do_not_depend_on_other_prompts(model):
    """Neither on what they say nor on whether they fit; elsewhere in their row it has others."""
    def text(*prompts, most=8):
        return shown(program(model, *prompts, "--tokens", 25, "--temperature", 2, "--together",
                             most))[0]["the"]

    wanted = text("12", "the", "in")
    assert wanted == text("I'm in there", "the") == text("x" * 600, "the", "y")
    assert wanted == text("12", "the", most=1) != text("the", "in")


def test_seeds_and_templates(model):
    def text(*arguments):
        return program(model, *arguments, "--tokens", 30, "--temperature", 2).stdout.partition(
            "\n> ")[2].rpartition("\n\nprompt")[0]

    first, again, other = (text("the", "--seed", seed) for seed in (1, 1, 2))
    assert first == again != other
    assert text("<|end|>the\n 12", "--seed", 1).removeprefix("<|end|>the\n 12\n") == text(
        "the", "--template", "<|end|>{}\\n 12", "--seed", 1).removeprefix("the\n")


def test_a_prompt_that_is_too_long(model):
    run = program(model, "x" * 600, "x" * 500, "--temperature", 0, "--together", 1)
    assert run.returncode == 0
    assert "got 601 tokens, wanted 1 to 511" in run.stdout
    assert "prompt: 501 tokens" in run.stdout and "generation: 10 tokens" in run.stdout
    run = program(model, "x" * 600, "x" * 500, "--temperature", 0)
    assert f"\n> {'x' * 600}\ngot 601 tokens, wanted 1 to 511\n\n> {'x' * 500}\n" in run.stdout
    assert "prompts: 1, of 501 tokens; generation with them: 11 tokens, " in run.stdout
    run = program(model, "x" * 600, "x" * 700)
    assert run.returncode == 0 and not run.stderr
    assert run.stdout.count(" tokens, wanted 1 to 511\n") == 2


def test_caches_that_do_not_fit(tmp_path, model):
    run = program(model, "x", "--cache", "q8_0")
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "cannot be used: head_dim: got 16, wanted a multiple of 32 for q8_0" in run.stderr
    config = CONFIGS["llama"] | {"max_position_embeddings": 1 << 50}
    folder = write_folder(tmp_path / "model", config, draw(config))
    for prompts in (("x",), ("x", "y")):
        run = program(folder, *prompts, "--tokens", 1 << 49, "--tokenizer",
                      model / "tokenizer.json")
        assert run.returncode == 1 and "Traceback" not in run.stderr
        assert run.stderr.startswith("fewer --tokens, or fewer prompts --together, take less memor")


def test_progress_on_a_terminal(model, capsys, monkeypatch):
    """A line that is overwritten, and gone where a text is shown."""
    prompts = prompts_of([greedy] * 5, (1, 2, 3, 1, 1))
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=is_terminal: answer)
        made = llama.generate_together(model_of(model), prompts, most=2)
        llama.show_together(text_of(model), prompts, made)
        said, shown = capsys.readouterr()
        assert said.count("> ") >= 5 and "\r" not in said
        lines = [line.rstrip() for line in shown.split("\r") if line]
        if is_terminal:
            assert lines[:4] == ["prompts: 0 of 5; tokens: 1", "", "prompts: 1 of 5; tokens: 1",
                                 "prompts: 1 of 5; tokens: 2"]
            assert lines[-2:] == ["prompts: 5 of 5; tokens: 8", ""]
        else:
            assert not lines


@pytest.mark.parametrize(("arguments", "status", "said"), [
    (("--help",), 0, ""), ((), 2, "model"), (("x", "--top-p", "0"), 2, "--top-p: got 0.0, wanted"),
    (("x", "--temperature", "nan"), 2, "--temperature: got nan, wanted at least 0"),
    (("x", "--tokens", "0"), 2, "--tokens: got 0, wanted at least 1"),
    (("x", "--together", "0"), 2, "--together: got 0, wanted at least 1"),
    (("x", "--template", "x"), 2, "--template: got 'x', wanted {} where"),
    (("x", "--quantize", "q2"), 2, "--quantize: invalid choice: 'q2'"),
    (("nothing",), 1, "nothing cannot be used: path: got 'nothing', wanted a folder"),
    (("nothing.gguf",), 1, "nothing.gguf cannot be used: [Errno 2] No such file")])
def test_help_and_wrong_arguments(arguments, status, said):
    run = program(*arguments)
    assert run.returncode == status
    assert said in run.stderr and "Traceback" not in run.stderr
    if not status:
        for name in ("--quantize", "--cache", "--temperature", "--top-k", "--top-p", "--seed",
                     "--tokens", "--template", "--tokenizer", "--together"):
            assert name in run.stdout


@pytest.mark.parametrize(("more", "without", "said"), [
    ({"model_type": "mamba"}, None,
     "got a model of type 'mamba', wanted one of llama, mistral, qwen2, qwen3, gemma3_text"),
    ({"mlp_bias": True}, None, "mlp_bias: got a feed-forward network with biases, wanted none"),
    ({"hidden_act": "relu"}, None, "hidden_act: got 'relu', wanted one of silu, gelu_pytorch_tanh"),
    ({"rms_norm_eps": None}, None, "config: got none for 'rms_norm_eps', wanted a number"),
    ({"num_hidden_layers": 3}, None, "state: got what does not fit layout 'llama'"),
    ({}, "up_proj", "got no array model.layers.0.mlp.up_proj.weight, wanted a whole"),
    ({}, "embed", "got no array embed_tokens.weight, wanted a whole")])
def test_other_models(tmp_path, model, more, without, said):
    arrays = {name: array for name, array in draw(CONFIGS["llama"]).items()
              if without is None or without not in name}
    folder = write_folder(tmp_path / "model", CONFIGS["llama"] | more, arrays)
    run = program(folder, "x", "--tokenizer", model / "tokenizer.json")
    assert run.returncode == 1 and said in run.stderr and "Traceback" not in run.stderr


def test_a_gguf_of_another_model(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", CONFIGS["llama"] | {"model_type": "granite"}, {})
    run = program(path, "x")
    assert run.returncode == 1 and "got a model of type 'granite', wanted one of" in run.stderr


def test_missing_and_bad_files(tmp_path, model):
    folder = write_folder(tmp_path / "model", CONFIGS["llama"], draw(CONFIGS["llama"]))
    for run, path in ((program(folder, "x"), folder / "tokenizer.json"),
                      (program(folder, "x", "--tokenizer", "nothing"), "nothing")):
        assert run.returncode == 1 and "Traceback" not in run.stderr
        assert f"got no file {path}, wanted the model's tokenizer.json there, or by" in run.stderr
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json is no tokenizer.json: " in program(folder, "x").stderr
    (folder / "config.json").unlink()
    run = program(folder, "x", "--tokenizer", model / "tokenizer.json")
    assert run.returncode == 1 and "got a model of type None, wanted one of" in run.stderr
    (folder / "model.safetensors").unlink()
    run = program(folder, "x", "--tokenizer", model / "tokenizer.json")
    assert run.returncode == 1 and "Traceback" not in run.stderr


@pytest.mark.parametrize(("said", "kind"), [
    (metadata(model="llama"), "'llama', 'gpt-2'"), (metadata(pre="tekken"), "'gpt2', 'tekken'"),
    ({}, "None, 'gpt-2'")])
def test_a_gguf_without_a_tokenizer_of_that_kind(tmp_path, model, said, kind):
    path = write_gguf(tmp_path / "model.gguf", CONFIGS["llama"], draw(CONFIGS["llama"]), **said)
    run = program(path, "x")
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert f"got a tokenizer of kind {kind} in the file, wanted 'gpt2' and" in run.stderr
    assert "give the model's tokenizer.json by --tokenizer FILE" in run.stderr
    run = program(path, "x", "--tokenizer", model / "tokenizer.json", "--tokens", 3)
    assert run.returncode == 0, run.stderr
