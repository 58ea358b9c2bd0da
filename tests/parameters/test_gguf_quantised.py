"""Quantised arrays of .gguf files, and layers of them: the model's own rows, the bits of the gguf
package, blocks that stay whole."""
import gguf
import numpy as np
import pytest
from test_gguf import as_converted, written

import mha
from mha._functions.quantised import BITS, quantised
from mha._functions.quantised_array import KINDS, QuantisedArray
from mha.parameters._reading import layers_from_state

HEADS, KV_HEADS, HEAD_DIM, EMBED = 4, 2, 128, 256  # rows of 256 and 512 numbers
SIZES = {"embedding_length": EMBED, "attention__head_count": HEADS,
         "attention__head_count_kv": KV_HEADS, "attention__key_length": HEAD_DIM}
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
          "hidden_size": EMBED, "rope_theta": 5e5}
SHAPES = {"q": (HEADS * HEAD_DIM, EMBED), "k": (KV_HEADS * HEAD_DIM, EMBED),
          "v": (KV_HEADS * HEAD_DIM, EMBED), "o": (EMBED, HEADS * HEAD_DIM)}
TYPES = {kind: getattr(gguf.GGMLQuantizationType, kind.upper()) for kind in KINDS}
X = np.random.default_rng(8).standard_normal((2, 5, EMBED)).astype(np.float32)


def draw_blocks(rng, kind, shape):
    """Bytes (out, bytes of a row): what the gguf package quantises, where it does, and any others
    with small scales."""
    if kind in BITS:
        return gguf.quants.quantize(rng.standard_normal(shape).astype(np.float32), TYPES[kind])
    block = KINDS[kind]
    data = rng.integers(0, 256, (shape[0], shape[1] // block.numbers, block.nbytes), np.uint8)
    scales = slice(0, 4) if kind == "q4_k" else slice(208, 210)
    data[:, :, scales] = np.full(4, 1e-3, "<f2").view(np.uint8)[:scales.stop - scales.start]
    return data.reshape(shape[0], -1)


def model(kinds, architecture="llama"):
    """(arrays of the file, the numbers by transformers' names); kinds by letter."""
    rng = np.random.default_rng(1)
    blocks, numbers = {}, {}
    for letter, kind in kinds.items():
        name = f"{letter}_proj.weight"
        if kind == "f32":
            blocks[name] = numbers[name] = rng.standard_normal(SHAPES[letter]).astype(np.float32)
        else:
            blocks[name] = draw_blocks(rng, kind, SHAPES[letter])
            numbers[name] = gguf.quants.dequantize(blocks[name], TYPES[kind])
    stored = as_converted(blocks, architecture, 0, HEADS, KV_HEADS)
    letters = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o"}
    for name, array in stored.items():
        kind = kinds.get(letters.get(name.split(".")[2]), "f32")
        if kind != "f32":
            stored[name] = (TYPES[kind], array)
    return stored, numbers


MIXES = [*(dict.fromkeys("qkvo", kind) for kind in KINDS),
         {"q": "q8_0", "k": "q4_0", "v": "q8_0", "o": "q4_0"},
         {"q": "q4_k", "k": "q4_k", "v": "q6_k", "o": "q4_k"},
         {"q": "q8_0", "k": "f32", "v": "q6_k", "o": "q4_0"}]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("kinds", MIXES, ids=range(len(MIXES)))
def test_layers_have_the_dequantised_numbers(tmp_path, architecture, kinds):
    """Rows of query and key of Llama are in the model's order, in every kind of blocks."""
    stored, numbers = model(kinds, architecture)
    norms = {}
    if architecture == "qwen3":
        norms = {f"{letter}_norm.weight": np.full(HEAD_DIM, 1.5, np.float32) for letter in "qk"}
        stored |= {f"blk.0.attn_{letter}_norm.weight": norms["q_norm.weight"] for letter in "qk"}
    path = written(tmp_path / "model.gguf", architecture, stored, **SIZES)
    with mha.parameters.open(path) as file:
        [layer] = mha.MultiHeadAttention.from_state(file, prefix="blk.{layer}.")
    own = mha.MultiHeadAttention.from_state(
        {**numbers, **norms}, architecture,
        config={**CONFIG, "rms_norm_eps": 1e-5, "model_type": architecture})
    kept = sorted({*kinds.values()} & {*BITS})
    wanted = ", ".join(["frozen"] * bool(kept) + kept)
    assert layer.dtype == np.float32
    assert repr(layer) == (repr(own)[:-1] + f", {wanted})" if kept else repr(own))
    assert layer.num_parameters == own.num_parameters
    for name, array in own.parameters().items():
        assert layer.parameters()[name].tobytes() == array.tobytes()
    np.testing.assert_array_equal(layer(X, causal=True), own(X, causal=True))


def test_arrays_of_a_file(tmp_path):
    """Their own type and shape, and the numbers of the gguf package; nothing else is read."""
    rng = np.random.default_rng(2)
    of = gguf.GGMLQuantizationType
    blocks = {kind: draw_blocks(rng, kind, (6, 512)) for kind in KINDS}
    cube = gguf.quants.quantize(rng.standard_normal((2, 3, 64)).astype(np.float32), of.Q8_0)
    stored = {kind: (TYPES[kind], data) for kind, data in blocks.items()}
    others = {name: getattr(of, name) for name in ("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K",
                                                   "IQ4_NL", "TQ2_0")}
    for name, kind in others.items():
        numbers, nbytes = gguf.GGML_QUANT_SIZES[kind]
        stored[name] = (kind, rng.integers(0, 256, (2, 512 // numbers * nbytes), np.uint8))
    path = written(tmp_path / "model.gguf", "llama", {**stored, "cube": (of.Q8_0, cube)})
    with mha.parameters.open(path) as file:
        for kind, data in blocks.items():
            array, wanted = file[kind], gguf.quants.dequantize(data, TYPES[kind])
            assert (array.shape, array.dtype, array.nbytes) == ((6, 512), kind, data.nbytes)
            assert np.asarray(array).tobytes() == array.unpack().tobytes() == wanted.tobytes()
            packed = mha.pack(array.T)
            assert packed.dtype == (kind if kind in BITS else np.float32)
            assert packed.unpack().tobytes() == wanted.T.tobytes()
        np.testing.assert_array_equal(file["cube"], gguf.quants.dequantize(cube, of.Q8_0))
        for name in others:
            with pytest.raises(ValueError, match=rf"got {name} of type {name}, wanted one of F64,"):
                file[name]
    with open(path, "r+b") as again:
        again.truncate(again.seek(0, 2) - 40)
    with pytest.raises(ValueError, match=r"got cube, which ends at byte"):
        mha.parameters.open(path)


def handed_over(state, layout, **given):
    """The parameters of the layer as they come to what makes it."""
    names, options = given.pop("names", None), {"rotary": None}
    dtype = given.pop("dtype", None)
    return layers_from_state(state, layout, names, given.pop("transposed", None), "", None, None,
                             {"num_heads": None, "num_kv_heads": None, "head_dim": None, **given},
                             dtype, None, options, lambda settings, parameters: parameters)


@pytest.mark.parametrize("kind", BITS)
def test_blocks_of_a_layer_stay_as_they_are(tmp_path, kind):
    """In Llama's permuted rows too: what `mha.pack` makes of the model's own weights."""
    rng = np.random.default_rng(3)
    weights = {f"{letter}_proj.weight": rng.standard_normal(shape).astype(np.float32)
               for letter, shape in SHAPES.items()}
    stored = {name: (TYPES[kind], gguf.quants.quantize(array, TYPES[kind]))
              if name.endswith(("q.weight", "k.weight", "v.weight", "output.weight")) else array
              for name, array in as_converted(weights, "llama", 0, HEADS, KV_HEADS).items()}
    path = written(tmp_path / "model.gguf", "llama", stored, **SIZES)
    with mha.parameters.open(path) as file:
        state = {name.removeprefix("blk.0."): file[name] for name in file}
    parameters = handed_over(state, "llama", num_heads=HEADS, num_kv_heads=KV_HEADS)
    assert parameters.keys() == {"W_q", "W_k", "W_v", "W_o"}
    for letter, shape in SHAPES.items():
        found = parameters[f"W_{letter}"]
        wanted = quantised(weights[f"{letter}_proj.weight"].T, kind)
        assert found.shape == shape[::-1] and found.dtype == kind
        blocks = found.blocks()
        assert blocks.kind == kind
        assert blocks.numbers.tobytes() == wanted.numbers.tobytes()
        assert blocks.scales.tobytes() == wanted.scales.tobytes()


@pytest.mark.parametrize(("layout", "names"), [
    ("pytorch", ("in_proj_weight", "out_proj.weight")),
    ("gpt_neox", ("query_key_value.weight", "dense.weight"))])
def test_matrices_that_hold_three(layout, names):
    """They are cut along the outputs, in whole blocks."""
    rng = np.random.default_rng(4)
    state = {name: of_blocks("q8_0", rng, (rows, 64))
             for name, rows in zip(names, (192, 64), strict=True)}
    plain = {name: array.unpack() for name, array in state.items()}
    found = handed_over(dict(state), layout, num_heads=4)
    wanted = handed_over(plain, layout, num_heads=4)
    for name, array in wanted.items():
        assert found[name].dtype == "q8_0"
        assert found[name].blocks().dequantised().tobytes() == array.tobytes()


def of_blocks(kind, rng, shape):
    return QuantisedArray(kind, shape, draw_blocks(rng, kind, shape))


def test_matrices_of_the_other_way():
    """Weights (in, out): blocks along the inputs stay, blocks along the outputs are dequantised."""
    rng = np.random.default_rng(5)
    names = {letter: letter for letter in "qkvo"}
    for shape, is_transposed in (((64, 64), False), ((64, 64), True)):
        arrays = {letter: of_blocks("q4_0", rng, shape) for letter in "qkvo"}
        for state, stay in ((arrays, is_transposed),
                            ({name: array.T for name, array in arrays.items()}, not is_transposed)):
            found = handed_over(state, None, names=names, transposed=is_transposed, num_heads=4)
            plain = handed_over({name: array.unpack() for name, array in state.items()}, None,
                                names=names, transposed=is_transposed, num_heads=4)
            for name, array in plain.items():
                assert isinstance(found[name], QuantisedArray) == stay
                assert np.asarray(found[name]).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_layer_of_another_type_is_asked_for(dtype):
    """It has the numbers, rounded once, and no blocks."""
    rng = np.random.default_rng(6)
    names = {letter: letter for letter in "qkvo"}
    state = {letter: of_blocks("q8_0", rng, (64, 64)) for letter in "qkvo"}
    found = handed_over(state, None, names=names, transposed=True, num_heads=4, dtype=dtype)
    assert not any(isinstance(array, QuantisedArray) for array in found.values())
    layer = mha.MultiHeadAttention.from_state(state, names=names, transposed=True, num_heads=4,
                                              dtype=dtype)
    assert layer.W_k.tobytes() == state["k"].unpack().T.astype(dtype).tobytes()
    state["q"] = state["q"].unpack().astype(np.float64)
    found = handed_over(state, None, names=names, transposed=True, num_heads=4)
    assert not any(isinstance(array, QuantisedArray) for array in found.values())
    assert mha.MultiHeadAttention.from_state(state, names=names, transposed=True,
                                             num_heads=4).dtype == np.float64


def test_shapes_that_do_not_fit():
    rng = np.random.default_rng(7)
    state = {f"{letter}_proj.weight": of_blocks("q8_0", rng, (64, 64)) for letter in "qkvo"}
    state["k_proj.weight"] = of_blocks("q8_0", rng, (64, 96))
    with pytest.raises(ValueError, match=r"k_proj\.weight: got shape \(64, 96\), wanted"):
        handed_over(state, "llama", num_heads=4)
