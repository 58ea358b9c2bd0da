"""What `import mha` offers: names, signatures, docstrings whose examples run, and what it loads."""

import copy
import doctest
import functools
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
import typing

import numpy as np
import pytest
from public_signatures import GROUPS, SIGNATURES

import mha

NAMES = ["BlockMask", "KVCache", "MultiHeadAttention", "MultiHeadLatentAttention",
         "PackedWeight", "PagedCache", "Rotary", "__version__",
         "additive_attention", "additive_attention_vjp", "alibi_slopes", "dropout_mask",
         "get_num_threads", "instruction_set", "linear", "linear_vjp", "merge_attention",
         "merge_heads", "multi_head_attention", "multi_head_attention_vjp", "pack",
         "scaled_dot_product_attention", "scaled_dot_product_attention_backward",
         "scaled_dot_product_attention_varlen",
         "scaled_dot_product_attention_varlen_vjp", "scaled_dot_product_attention_vjp",
         "set_num_threads", "show_config",
         "split_heads", "t5_relative_bias", "t5_relative_bias_vjp", "threads"]
LAZY = {"BlockMask": "_functions.block_mask", "KVCache": "_layer.kv_cache",
        "MultiHeadLatentAttention": "_layer.latent_attention",
        "PagedCache": "_layer.paged_cache",
        "additive_attention": "_functions.additive_attention",
        "additive_attention_vjp": "_functions.additive_attention",
        "alibi_slopes": "_functions.position_biases",
        "merge_attention": "_functions.merge_attention", "merge_heads": "_functions.heads",
        "scaled_dot_product_attention_backward":
            "_functions.scaled_dot_product_attention_backward",
        "scaled_dot_product_attention_varlen": "_functions.varlen",
        "scaled_dot_product_attention_varlen_vjp": "_functions.varlen",
        "split_heads": "_functions.heads", "t5_relative_bias": "_functions.position_biases",
        "t5_relative_bias_vjp": "_functions.position_biases"}
SUBMODULES = ["compat", "dask", "importance", "masks", "parameters", "plot", "reference", "testing",
              "view"]

# What layers have of one class, for whose examples one layer does.
OF_LAYERS = ("parameters", "load_parameters", "num_parameters", "astype", "freeze", "unfreeze",
             "quantize")
NEVER_RAISE = {"get_num_threads", "instruction_set", "MultiHeadAttention.parameters",
               "MultiHeadAttention.num_parameters", "MultiHeadAttention.freeze",
               "MultiHeadAttention.unfreeze", "KVCache.reset", "PagedCache.new",
               "parameters.layouts"}
NEVER_RAISE |= {f"MultiHeadLatentAttention.{name}"
                for name in ("parameters", "num_parameters", "freeze", "unfreeze")}
WITHOUT_ARRAYS = {"get_num_threads", "set_num_threads", "threads", "instruction_set", "show_config",
                  "MultiHeadAttention.dropout",
                  "MultiHeadAttention.parameters", "MultiHeadAttention.load_parameters",
                  "MultiHeadAttention.num_parameters", "MultiHeadAttention.astype",
                  "MultiHeadAttention.freeze", "MultiHeadAttention.unfreeze",
                  "MultiHeadAttention.quantize", "KVCache.reset", "PagedCache.new",
                  "PagedCache.fork", "PagedCache.free", "PagedCache.truncate",
                  "parameters.layouts", "BlockMask", "PackedWeight",
                  *(f"MultiHeadLatentAttention.{name}" for name in OF_LAYERS)}


def looked_up(name):
    found = mha
    for part in name.split("."):
        found = getattr(found, part)
    return found.fget if isinstance(found, property) else found


# Of a Rotary: its arguments.
RESULTS = ["dims", "base", "layout", "frequencies", "magnitude", "sections", "section_layout"]


def run(code):
    """What the code prints in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_public_names():
    assert sorted(mha.__all__) == NAMES
    assert dir(mha) == sorted(NAMES + SUBMODULES)
    for module in (mha.dask, mha.masks, mha.importance, mha.parameters, mha.plot, mha.view):
        assert dir(module) == sorted(module.__all__)
    for name in NAMES:
        assert hasattr(mha, name)
    assert mha.KVCache is mha._layer.kv_cache.KVCache  # which loads when used
    public_here = {name for name, value in vars(mha).items()
                   if not name.startswith("_") and not inspect.ismodule(value)}
    assert public_here - {"TYPE_CHECKING", "Any"} == set(NAMES) - {"__version__"}


def test_no_public_function_is_forgotten_here():
    functions = {name for name in NAMES if callable(getattr(mha, name))}
    functions |= {"masks." + name for name in mha.masks.__all__}
    functions |= {"parameters." + name for name in mha.parameters.__all__}
    functions |= {"dask." + name for name in mha.dask.__all__}
    for owner in (mha.MultiHeadAttention, mha.MultiHeadLatentAttention, mha.KVCache,
                  mha.PagedCache, mha.Rotary, mha.BlockMask, mha.PackedWeight):
        functions |= {f"{owner.__name__}.{name}" for name, value in inspect.getmembers(owner)
                      if (inspect.isroutine(value) or isinstance(value, property))
                      and not name.startswith("_")}
    of_caches = {"KVCache." + name for name in (
        "batch", "kv_heads", "head_dim", "value_head_dim", "dtype", "window", "keep_first",
        "capacity", "nbytes", "lengths", "start", "key", "value")}
    of_caches |= {"PagedCache." + name for name in (
        "pages", "kv_heads", "head_dim", "value_head_dim", "layers", "page_len", "dtype", "window",
        "keep_first", "pages_free", "nbytes")}
    of_masks = {"BlockMask." + name for name in (
        "batch", "heads", "query_len", "key_len", "nbytes", "density")}
    undescribed = {"MultiHeadAttention.frozen", "MultiHeadLatentAttention.frozen",
                   *("Rotary." + name for name in RESULTS)}
    of_weights = {"PackedWeight." + name for name in ("shape", "dtype", "nbytes")}
    assert functions - set(SIGNATURES) == undescribed | of_caches | of_masks | of_weights


@pytest.mark.parametrize("name", ["masks", "importance"])
def test_a_submodule_lists_its_functions_alone(name):
    module = getattr(mha, name)
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("name", SUBMODULES)
def test_submodules_load_at_first_use(name):
    assert getattr(mha, name) is importlib.import_module("mha." + name)
    assert run(f"import sys, mha; print('mha.{name}' in sys.modules); mha.{name};"
               f" print('mha.{name}' in sys.modules)") == ["False", "True"]


@pytest.mark.parametrize("name", LAZY)
def test_lazy_names_load_at_first_use(name):
    module = f"mha.{LAZY[name]}"
    assert run(f"import sys, mha; print('{module}' in sys.modules, 'decimal' in sys.modules);"
               f" mha.{name}; print('{module}' in sys.modules)") == ["False", "False", "True"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'mha' has no attribute 'atention'"):
        mha.atention  # noqa: B018


def test_python_can_say_which_name_was_meant():
    run = subprocess.run([sys.executable, "-c", "import mha; mha.MultiheadAttention"],
                         capture_output=True, text=True, check=False)
    assert run.stderr.endswith("Did you mean: 'MultiHeadAttention'?\n")


def test_import_loads_numpy_and_what_the_layer_needs():
    loaded = run("import sys, mha; print(*sys.modules)")
    assert {name for name in loaded if name.split(".")[0] == "mha"} == {
        "mha", "mha._core", "mha._version",
        *("mha._base" + name for name in (
            "", ".arguments", ".atomic", ".dtypes", ".keywords", ".pieces", ".runtime")),
        *("mha._functions" + name for name in (
            "", ".dropout", ".gradients", ".linear_projection", ".multi_head_attention",
            ".options", ".packed_weight", ".quantised", ".quantised_array", ".rotary",
            ".scaled_dot_product_attention")),
        *("mha._layer" + name for name in (
            "", ".layer", ".options", ".own_parameters", ".settings", ".state"))}
    assert "decimal" not in loaded
    beyond = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    beyond_numpy = set(run("import sys, numpy; print(*sys.modules)"))
    assert beyond - {name.split(".")[0] for name in beyond_numpy} == {"mha"}


@pytest.mark.parametrize("name", SUBMODULES)
def test_no_submodule_imports_matplotlib_or_a_peer(name):
    loaded = run(f"import sys, mha; mha.{name}; print(*sys.modules)")
    assert not {"matplotlib", "torch", "tensorflow", "jax", "mxnet", "keras"} & set(loaded)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    signature = inspect.signature(looked_up(name))
    plain = signature.replace(return_annotation=signature.empty, parameters=[
        parameter.replace(annotation=parameter.empty)
        for parameter in signature.parameters.values()])
    wanted = " ".join(SIGNATURES[name].split())
    for group, options in GROUPS.items():
        wanted = wanted.replace(group, options)
    assert str(plain) == f"({wanted})"


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_argument_and_result_is_annotated(name):
    function = looked_up(name)
    if inspect.isclass(function):
        function = function.__init__
    signature = inspect.signature(function)
    annotated = typing.get_type_hints(function)
    assert set(annotated) == {*signature.parameters, "return"} - {"self"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_docstring_has_what_a_reader_needs_and_its_examples_run(name):
    text = inspect.getdoc(looked_up(name))
    assert text.splitlines()[0].endswith((".", ":", ",")), "a first line that is a sentence"
    if name not in NEVER_RAISE:
        assert "Error: " in text or "ValueError, TypeError: " in text
        assert "Raises\n------\n" in text
    if name not in WITHOUT_ARRAYS:
        assert re.search(r"\((?:\.\.\.|\w+),[^)]*\)", text.split(">>>")[0]), "shapes"
        assert "Source: " in text or re.search(r"et al\. 20\d\d", text), "the source"
    threads = mha.get_num_threads()
    try:
        failed, tried = run_examples(name, text)
    finally:
        mha.set_num_threads(threads)
    assert tried >= 1
    assert failed == 0


# One call of each function with arguments; what it is given only has to reach it.
X = np.ones((2, 4, 8))
LAYER = mha.MultiHeadAttention(8, 2, rng=0)
RANKS = {"kv_rank": 8, "nope_dim": 4, "rope_dim": 2, "value_head_dim": 4}
LATENT = mha.MultiHeadLatentAttention(8, 2, **RANKS, rng=0)
CALLS = {
    **{name: (getattr(mha, name), 3 * [X]) for name in (
        "scaled_dot_product_attention", "scaled_dot_product_attention_vjp")},
    "scaled_dot_product_attention_backward": (
        mha.scaled_dot_product_attention_backward, [X, X, X, X, X[..., 0], X]),
    "dask.MultiHeadAttention": (mha.dask.MultiHeadAttention, [LAYER]),
    "dask.MultiHeadAttention.__call__": (mha.dask.MultiHeadAttention(LAYER), [X]),
    **{f"dask.{name}": (getattr(mha.dask, name), 3 * [X]) for name in (
        "scaled_dot_product_attention", "scaled_dot_product_attention_vjp")},
    **{name: (getattr(mha, name), [*3 * [X], [0, 2]]) for name in (
        "scaled_dot_product_attention_varlen", "scaled_dot_product_attention_varlen_vjp")},
    **{name: (getattr(mha, name), [X] * 6) for name in (
        "additive_attention", "additive_attention_vjp")},
    **{name: (functools.partial(getattr(mha, name), num_heads=2), [X] * 7) for name in (
        "multi_head_attention", "multi_head_attention_vjp")},
    "show_config": (mha.show_config, []),
    "linear": (mha.linear, [X, X]), "linear_vjp": (mha.linear_vjp, [X, X]),
    "split_heads": (mha.split_heads, [X, 2]), "merge_heads": (mha.merge_heads, [X]),
    "merge_attention": (mha.merge_attention, [[X], [X]]),
    "dropout_mask": (mha.dropout_mask, [(2, 3), 0.5, 1]),
    "alibi_slopes": (mha.alibi_slopes, [4]),
    **{name: (functools.partial(getattr(mha, name), bidirectional=True), [X]) for name in (
        "t5_relative_bias", "t5_relative_bias_vjp")},
    "set_num_threads": (mha.set_num_threads, [1]), "threads": (mha.threads, [1]),
    "MultiHeadAttention": (mha.MultiHeadAttention, [8, 2]),
    "MultiHeadAttention.__call__": (LAYER, [X]), "MultiHeadAttention.vjp": (LAYER.vjp, [X]),
    "MultiHeadAttention.load_parameters": (LAYER.load_parameters, [{}]),
    "MultiHeadAttention.astype": (LAYER.astype, ["float32"]),
    "MultiHeadAttention.from_state": (LAYER.from_state, [{}]),
    "MultiHeadAttention.to_state": (LAYER.to_state, ["bert"]),
    "MultiHeadAttention.prune_heads": (LAYER.prune_heads, [[]]),
    "MultiHeadAttention.quantize": (LAYER.quantize, ["q5_0"]),
    "MultiHeadAttention.new_cache": (LAYER.new_cache, [1]),
    "MultiHeadAttention.new_memory": (LAYER.new_memory, [X]),
    "MultiHeadLatentAttention": (functools.partial(mha.MultiHeadLatentAttention, **RANKS), [8, 2]),
    "MultiHeadLatentAttention.__call__": (LATENT, [X]),
    "MultiHeadLatentAttention.vjp": (LATENT.vjp, [X]),
    "MultiHeadLatentAttention.load_parameters": (LATENT.load_parameters, [{}]),
    "MultiHeadLatentAttention.astype": (LATENT.astype, ["float32"]),
    "MultiHeadLatentAttention.from_state": (LATENT.from_state, [{}]),
    "MultiHeadLatentAttention.to_state": (LATENT.to_state, ["deepseek_v3"]),
    "MultiHeadLatentAttention.prune_heads": (LATENT.prune_heads, [[]]),
    "MultiHeadLatentAttention.quantize": (LATENT.quantize, ["q5_0"]),
    "MultiHeadLatentAttention.new_cache": (LATENT.new_cache, [1]),
    "KVCache": (mha.KVCache, [1, 2, 4]),
    "KVCache.append": (mha.KVCache(2, 1, 8).append, [X[:, None], X[:, None]]),
    "KVCache.truncate": (mha.KVCache(2, 1, 8).truncate, [0]),
    "KVCache.keep": (mha.KVCache(2, 1, 8).keep, [0, [[], []]]),
    "KVCache.select": (mha.KVCache(2, 1, 8).select, [[0]]),
    "PagedCache": (mha.PagedCache, [1, 2, 4]),
    "PagedCache.fork": (mha.PagedCache(2, 1, 8).fork, [0]),
    "PagedCache.free": (mha.PagedCache(2, 1, 8).free, [0]),
    "PagedCache.lengths": (mha.PagedCache(2, 1, 8).lengths, [[0]]),
    "PagedCache.truncate": (mha.PagedCache(2, 1, 8).truncate, [0, 0]),
    "PagedCache.reserve": (mha.PagedCache(2, 1, 8).reserve, [[0], 1]),
    "pack": (mha.pack, [[[1.0]]]),
    "BlockMask.from_function": (mha.BlockMask.from_function, [len, 3]),
    "BlockMask.from_dense": (mha.BlockMask.from_dense, [[[True]]]),
    "BlockMask.causal": (mha.BlockMask.causal, [3]),
    "BlockMask.sliding_window": (functools.partial(mha.BlockMask.sliding_window, window=(1, 0)),
                                 [3]),
    "BlockMask.from_lengths": (mha.BlockMask.from_lengths, [[3], 3, 3]),
    "BlockMask.documents": (mha.BlockMask.documents, [[0, 1]]),
    "BlockMask.prefix": (mha.BlockMask.prefix, [1, 3]),
    "BlockMask.global_tokens": (mha.BlockMask.global_tokens, [[0], 3]),
    "BlockMask.strided": (functools.partial(mha.BlockMask.strided, stride=2), [3]),
    "Rotary": (mha.Rotary, [4]), "Rotary.__call__": (mha.Rotary(4), [X]),
    "Rotary.vjp": (mha.Rotary(4).vjp, [X]), "Rotary.from_config": (mha.Rotary.from_config, [{}, 4]),
    "parameters.open": (mha.parameters.open, ["weights.npz"]),
    "masks.causal": (mha.masks.causal, [3]),
    "masks.sliding_window": (functools.partial(mha.masks.sliding_window, window=(1, 0)), [3]),
    "masks.from_lengths": (mha.masks.from_lengths, [[3], 3]),
    "masks.from_attend": (mha.masks.from_attend, [X]),
    "masks.from_blocked": (mha.masks.from_blocked, [X]),
    **{"importance." + name: (getattr(mha.importance, name), [X]) for name in (
        "variance", "confidence", "entropy", "gradient", "rollout")},
    "importance.ablation": (mha.importance.ablation, [len, 2]),
    "reference.steps": (mha.reference.steps, [LAYER, X]),
}
FOREIGN = {  # what another library calls it: ours
    "attn_mask": "mask", "is_causal": "causal", "key_padding_mask": "key_lengths",
    "need_weights": "return_weights", "use_causal_mask": "causal", "valid_lens": "key_lengths",
    "average_attn_weights": "return_weights", "attention_mask": "mask", "dropout_p": "dropout",
    "return_attention_scores": "return_weights", "head_mask": "head_gate", "n_heads": "num_heads",
    "d_model": "embed_dim", "nhead": "num_heads", "kdim": "key_dim", "sm_scale": "scale"}


def keywords_of(name):
    return [keyword for keyword in inspect.signature(looked_up(name)).parameters
            if keyword != "self"]


def error_of(name, keyword):
    function, arguments = CALLS[name]
    with pytest.raises(TypeError) as raised:
        function(*arguments, **{keyword: None})
    message = str(raised.value)
    assert message.startswith(f"{keyword}: got a keyword that "), message
    assert name.removesuffix(".__call__").split(".")[-1] in message
    return message.split(", wanted ", 1)[1]


@pytest.mark.parametrize("name", CALLS)
def test_another_librarys_keyword_or_a_typo_names_ours(name):
    ours = keywords_of(name)
    for foreign, keyword in FOREIGN.items():
        wanted = error_of(name, foreign)
        assert re.search(rf"\b{keyword}=" if keyword in ours else "|".join(ours), wanted), wanted
    for keyword in ours:
        for typo in (keyword + "s", keyword.upper(), keyword[1:] + keyword[0]):
            if typo not in ours and len(typo) > 3:
                assert any(f"{one}=" in error_of(name, typo) for one in ours), typo
    one = f"{next(iter(ours))}="
    assert error_of(name, "zzz") == (one if len(ours) == 1 else f"one of {', '.join(ours)}")


def test_a_cache_has_no_gradients():
    for call in (LAYER.vjp, copy.copy(LAYER).freeze().vjp):
        with pytest.raises(TypeError, match=r"cache: .* wanted nothing: calls with a cache have"):
            call(X, cache=LAYER.new_cache(1))
    with pytest.raises(TypeError, match=r"a keyword that MultiHeadAttention.new_cache does not ha"):
        LAYER.new_cache(1, length=3)


def test_every_function_with_arguments_says_so():
    with_arguments = {name for name in SIGNATURES if keywords_of(name)}
    with_arguments -= {"BlockMask", "PackedWeight"}
    assert with_arguments == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_missing_argument_is_named(name):
    function, arguments = CALLS[name]
    plain = getattr(function, "func", function)  # of functools.partial
    required = [parameter.name for parameter in inspect.signature(plain).parameters.values()
                if parameter.default is parameter.empty and parameter.name != "self"]
    assert len(required) >= len(arguments)
    for count in range(len(arguments)):
        missing = "|".join(required[count:])
        with pytest.raises(TypeError, match=f"^({missing}): got nothing, wanted "):
            function(*arguments[:count]).__enter__()  # threads() looks when it begins


@pytest.mark.parametrize(("wanted", "call"), [
    ("d_model: .* wanted embed_dim=", lambda: mha.MultiHeadAttention(d_model=8, num_heads=2)),
    ("n_heads: .* wanted num_heads=", lambda: mha.MultiHeadAttention(8, n_heads=2)),
    ("embed_dim: got nothing", lambda: mha.MultiHeadAttention(num_heads=2, key_dim=4)),
    ("n_heads: .* wanted num_heads=", lambda: mha.multi_head_attention(*[X] * 7, n_heads=2)),
    ("num_heads: got nothing, wanted an int", lambda: mha.multi_head_attention(*[X] * 7)),
    ("q: .* wanted query=", lambda: LAYER(q=X, k=X, v=X)),
    ("inputs_q: .* wanted query=", lambda: LAYER(inputs_q=X)),
    ("h: .* wanted num_heads=", lambda: mha.split_heads(X, h=2)),
    ("batch_size: .* wanted batch=", lambda: LAYER.new_cache(batch_size=2)),
    ("causal: .* wanted nothing: layer.x, causal=.*, a call",
     lambda: mha.MultiHeadAttention(8, 2, causal=True)),
    ("p: .* wanted dropout=", lambda: mha.MultiHeadAttention(8, 2, p=0.1)),
    ("return_weights: .* a call without vjp", lambda: LAYER.vjp(X, return_weights=True))])
def test_a_foreign_name_comes_before_what_is_missing(wanted, call):
    with pytest.raises(TypeError, match="^" + wanted):
        call()


@pytest.mark.parametrize(("wanted", "call"), [
    ("scaled_dot_product_attention: got 4 .* wanted query, key, value and the rest by name: mask=",
     lambda: mha.scaled_dot_product_attention(X, X, X, np.ones((4, 4), bool))),
    ("scaled_dot_product_attention_vjp: got 5 .*: bias=, dropout=$",
     lambda: mha.scaled_dot_product_attention_vjp(X, X, X, np.zeros((4, 4)), 0.1)),
    ("a call of MultiHeadAttention: got 4 .*: key_lengths=", lambda: LAYER(X, X, X, [4, 3])),
    ("a call of MultiHeadAttention: got 4 .*: mask=, bias=", lambda: LAYER(X, X, X, None)),
    ("MultiHeadAttention.vjp: got 4 .*: causal=", lambda: LAYER.vjp(X, X, X, True)),
    ("MultiHeadAttention: got 3 .*: dropout=", lambda: mha.MultiHeadAttention(8, 2, 0.1)),
    ("additive_attention: got 7 .*: key_lengths=",
     lambda: mha.additive_attention(*[X] * 6, [4, 3])),
    ("additive_attention_vjp: got 7 .*: mask=",
     lambda: mha.additive_attention_vjp(*[X] * 6, np.ones((4, 4), bool))),
    ("multi_head_attention: got 8 .*: num_heads=", lambda: mha.multi_head_attention(*[X] * 7, 2)),
    ("multi_head_attention_vjp: got 8 .*: num_heads=",
     lambda: mha.multi_head_attention_vjp(*[X] * 7, 2))])
def test_what_is_too_many_by_position_is_named(wanted, call):
    with pytest.raises(TypeError, match="^" + wanted):
        call()


def test_what_a_layer_does_not_have_is_named():
    for name, wanted in {"W_Q": "W_q", "forward": r"a call, layer\(x\)", "zzz": "one of W_g",
                         "num_head": "one of num_heads",
                         "state_dict": r"parameters\(\), or to_state"}.items():
        with pytest.raises(AttributeError, match=f"{name}: .* no such name, wanted {wanted}"):
            getattr(LAYER, name)
    assert not hasattr(LAYER, "__array__") and not hasattr(LAYER, "_zzz")


@pytest.mark.parametrize("name", [*SIGNATURES, "MultiHeadAttention.frozen"])
def test_help_shows_annotations_as_they_are_written(name):
    text = pydoc.plain(pydoc.render_doc(looked_up(name)))
    assert "_SupportsArray" not in text and "**unknown" not in text
    heading = text.splitlines()[2]
    assert len(heading) < 1250, heading  # all keywords and their types, each by its short name
    if name in CALLS:
        # Long ones stand on many lines since Python 3.13.
        signature = text[:text.index("\n)")] if heading.endswith("(") else heading
        assert "'ArrayLike" not in signature
        assert ("ArrayLike" in signature) == ("ArrayLike" in str(looked_up(name).__annotations__))


def test_a_layers_docstring_names_all_its_arguments():
    text = inspect.getdoc(mha.MultiHeadAttention.__call__)
    for name in ("rng", "head_gate", "training", "return_weights", "mask", "bias"):
        assert re.search(rf"^ *(\w+, )*{name}\b.* : ", text, re.MULTILINE), name
    for documented in (mha.MultiHeadAttention, mha.MultiHeadAttention.vjp):
        text = inspect.getdoc(documented)
        assert "rng" in text and "head_gate" in text
    assert "Read-only. Wanted in place of an assignment: a new layer" in pydoc.render_doc(
        mha.MultiHeadAttention)


def run_examples(name, text):
    examples = doctest.DocTestParser().get_doctest(text, {"np": np, "mha": mha}, name, None, None)
    return doctest.DocTestRunner().run(examples)
