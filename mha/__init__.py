"""Multi-head attention for NumPy, with a C core.

    linear projections -> split heads -> scaled dot-product attention -> merge heads -> projection

`mha.MultiHeadAttention` is the whole figure as a layer, `mha.multi_head_attention` the same as a
function. Every step is public under its own name: `linear`, `split_heads`,
`scaled_dot_product_attention`, `merge_heads`. Gradients are in the functions that end in `_vjp`.

What is public, by use; all else in the package is internal:

    attention        MultiHeadAttention, MultiHeadLatentAttention, multi_head_attention,
                     scaled_dot_product_attention, scaled_dot_product_attention_varlen,
                     additive_attention, merge_attention
    the other steps  linear, split_heads, merge_heads
    packed weights   pack, PackedWeight
    masks            BlockMask, and mha.masks
    positions        Rotary, alibi_slopes, t5_relative_bias
    decoding         KVCache, MultiHeadAttention.new_cache, PagedCache
    gradients        multi_head_attention_vjp, scaled_dot_product_attention_vjp,
                     scaled_dot_product_attention_varlen_vjp, additive_attention_vjp, linear_vjp,
                     t5_relative_bias_vjp, scaled_dot_product_attention_backward, and vjp of a layer
    random numbers   dropout_mask
    the machine      threads, set_num_threads, get_num_threads, instruction_set, show_config

    mha.masks        causal, sliding_window, from_lengths, from_attend, from_blocked
    mha.testing      diagnose: what is wrong with an attention that you wrote yourself
    mha.reference    the same functions in plain NumPy, to read; steps, softmax
    mha.parameters   open, layouts: weights from and to other frameworks and files
    mha.plot, mha.view, mha.importance     pictures, a page to look into, which heads matter
    mha.compat, mha.dask                   other libraries' names and meanings; arrays of Dask

Submodules load when used.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("mha._core") is None:
    from mha._base.unbuilt import why_no_core
    raise ImportError(why_no_core(__path__[0]))

from mha._base.runtime import (
    get_num_threads,
    instruction_set,
    set_num_threads,
    show_config,
    threads,
)
from mha._base.runtime import warn_of_wrong_environment as _warn_of_wrong_environment
from mha._functions.dropout import dropout_mask
from mha._functions.linear_projection import linear, linear_vjp
from mha._functions.multi_head_attention import multi_head_attention, multi_head_attention_vjp
from mha._functions.packed_weight import PackedWeight, pack
from mha._functions.rotary import Rotary
from mha._functions.scaled_dot_product_attention import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_vjp,
)
from mha._layer.layer import MultiHeadAttention
from mha._version import __version__

if TYPE_CHECKING:  # what __getattr__ below loads, for type checkers and editors
    from mha import compat as compat
    from mha import dask as dask
    from mha import importance as importance
    from mha import masks as masks
    from mha import parameters as parameters
    from mha import plot as plot
    from mha import reference as reference
    from mha import testing as testing
    from mha import view as view
    from mha._functions.additive_attention import additive_attention, additive_attention_vjp
    from mha._functions.block_mask import BlockMask
    from mha._functions.heads import merge_heads, split_heads
    from mha._functions.merge_attention import merge_attention
    from mha._functions.position_biases import alibi_slopes, t5_relative_bias, t5_relative_bias_vjp
    from mha._functions.scaled_dot_product_attention_backward import (
        scaled_dot_product_attention_backward,
    )
    from mha._functions.varlen import (
        scaled_dot_product_attention_varlen,
        scaled_dot_product_attention_varlen_vjp,
    )
    from mha._layer.kv_cache import KVCache
    from mha._layer.latent_attention import MultiHeadLatentAttention
    from mha._layer.paged_cache import PagedCache

__all__ = [
    "BlockMask",
    "KVCache",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "PackedWeight",
    "PagedCache",
    "Rotary",
    "__version__",
    "additive_attention",
    "additive_attention_vjp",
    "alibi_slopes",
    "dropout_mask",
    "get_num_threads",
    "instruction_set",
    "linear",
    "linear_vjp",
    "merge_attention",
    "merge_heads",
    "multi_head_attention",
    "multi_head_attention_vjp",
    "pack",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_backward",
    "scaled_dot_product_attention_varlen",
    "scaled_dot_product_attention_varlen_vjp",
    "scaled_dot_product_attention_vjp",
    "set_num_threads",
    "show_config",
    "split_heads",
    "t5_relative_bias",
    "t5_relative_bias_vjp",
    "threads",
]

_warn_of_wrong_environment()

_SUBMODULES = ("compat", "dask", "importance", "masks", "parameters", "plot", "reference",
               "testing", "view")
_LATE = {  # names of these modules, which load when used
    "BlockMask": "_functions.block_mask",
    "KVCache": "_layer.kv_cache",
    "MultiHeadLatentAttention": "_layer.latent_attention",
    "PagedCache": "_layer.paged_cache",
    "additive_attention": "_functions.additive_attention",
    "additive_attention_vjp": "_functions.additive_attention",
    "alibi_slopes": "_functions.position_biases",
    "merge_attention": "_functions.merge_attention",
    "merge_heads": "_functions.heads",
    "scaled_dot_product_attention_backward": "_functions.scaled_dot_product_attention_backward",
    "scaled_dot_product_attention_varlen": "_functions.varlen",
    "scaled_dot_product_attention_varlen_vjp": "_functions.varlen",
    "split_heads": "_functions.heads",
    "t5_relative_bias": "_functions.position_biases",
    "t5_relative_bias_vjp": "_functions.position_biases",
}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        try:
            return importlib.import_module(f"mha.{name}")
        except ImportError as error:  # of what dask needs: hasattr() and help() go on without
            raise AttributeError(str(error)) from error
    if name in _LATE:
        module = importlib.import_module(f"mha.{_LATE[name]}")
        return globals().setdefault(name, getattr(module, name))
    from mha._base.foreign_names import no_such_name

    raise no_such_name(sys.modules[__name__], name)


def __dir__() -> list[str]:
    missing = {"dask"} if importlib.util.find_spec("dask") is None else set()
    return sorted({*__all__, *_SUBMODULES} - missing)
