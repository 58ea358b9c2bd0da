"""Attention over Dask's arrays: sequences that outgrow a machine's memory, or patience.

Needs Dask: pip install "mha[dask]". `scaled_dot_product_attention` takes arrays that are cut
anywhere along batch, heads, queries and keys; a task computes a block of queries over a chunk of
keys, and a tree of `mha.merge_attention` joins them, exactly. Every scheduler of Dask's runs it.
"""

try:
    from mha.dask._attention import scaled_dot_product_attention
    from mha.dask._attention_vjp import scaled_dot_product_attention_vjp
    from mha.dask._layer import MultiHeadAttention
except ModuleNotFoundError as error:
    if str(error.name).startswith("mha"):
        raise
    missing = str(error.name).partition(".")[0]
    missing = "" if missing == "dask" else f", whose {missing} is missing"
    raise ImportError(f'mha.dask needs Dask{missing}: pip install "mha[dask]"') from error

__all__ = ["MultiHeadAttention", "scaled_dot_product_attention",
           "scaled_dot_product_attention_vjp"]


def __dir__() -> list[str]:
    return sorted(__all__)
