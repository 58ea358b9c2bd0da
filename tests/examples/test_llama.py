"""examples/llama.py: small models from folders and .gguf against plain NumPy, alone and together,
and its draws."""


import numpy as np
import pytest
from example_programs import loaded
from small_llamas import CONFIGS, VOCABULARY, draw, reference_logits, write_folder, write_gguf

import mha

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("gguf")

llama, llama_files = loaded("llama", "llama_files")

PROMPT = np.random.default_rng(7).integers(VOCABULARY, size=23).tolist()


def greedy(logits):
    return int(logits.argmax())


def model_of(path, quantised=None):
    return llama.Llama(llama.ModelFiles(path), quantised)


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
