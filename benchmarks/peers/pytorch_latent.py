"""PyTorch's attention of one token to absorbed latents: products and a softmax, with the latents in
one array as a cache may hold them or in two, and its fused attention."""

import torch
import torch.nn.functional as F  # noqa: N812

from .latent_arrays import arrays_of, scale_of


def prepare(work, arrays, threads):
    torch.set_num_threads(threads)
    query, key = map(torch.from_numpy, arrays_of(work.shape))
    kv_rank = work.shape[2]
    value, scale = key[..., :kv_rank], scale_of(work.shape)
    rows, latents = query[0, :, 0], key[0, 0]  # (heads, columns), (positions, columns)
    first, rope = latents[:, :kv_rank].contiguous(), latents[:, kv_rank:].contiguous()
    row_first, row_rope = rows[:, :kv_rank].contiguous(), rows[:, kv_rank:].contiguous()

    def products():
        return torch.softmax(rows @ latents.T * scale, -1) @ latents[:, :kv_rank]

    def products_of_two():
        scores = row_first @ first.T + row_rope @ rope.T
        return torch.softmax(scores * scale, -1) @ first

    def heads_as_queries():
        return F.scaled_dot_product_attention(query.transpose(1, 2), key, value, scale=scale)

    def grouped():
        return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)

    def shown(call):
        def measured():
            with torch.inference_mode():
                return call()
        return measured

    return {"matmul and softmax": shown(products), "of two arrays": shown(products_of_two),
            "SDPA, heads as queries": shown(heads_as_queries), "SDPA, grouped": shown(grouped)}


def to_numpy(result):
    """(1, heads, 1, kv_rank)."""
    return result.reshape(1, -1, 1, result.shape[-1]).numpy()
