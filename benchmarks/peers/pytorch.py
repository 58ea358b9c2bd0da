"""PyTorch in inference mode: fused attention, nn.MultiheadAttention, and plain operations where the
weights are wanted."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from works import MASK_MODS

from . import pytorch_language_model
from .language_model import training_of


def prepare_attention(work, arrays):
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    mask = tensors.get("mask", tensors.get("bias"))
    if work.weights:
        def with_weights():
            scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
            weights = torch.softmax(scores, -1)
            return weights @ value, weights

        return {"softmax(QK)V": with_weights}

    def fused():
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=work.causal,
                                              enable_gqa=bool(work.kv_heads))

    return {"SDPA": fused} | (compiled_flex(work, query, key, value) if work.mask_mod else {})


def compiled_flex(work, *tensors):
    """flex_attention with masks of blocks of some sizes: which is fastest differs by mask."""
    query_len, key_len = work.shape[2:4]
    torch._dynamo.reset()  # of too many masks it would compile no more
    compiled = torch.compile(flex_attention)

    def of_size(size):
        mask = create_block_mask(MASK_MODS[work.mask_mod], None, None, query_len, key_len,
                                 device="cpu", BLOCK_SIZE=size)
        return lambda: compiled(*tensors, block_mask=mask)

    return {f"flex_attention, blocks of {size}": of_size(size) for size in (64, 128, 256)}


def prepare_gradients(work, arrays):
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    grad_output = tensors.pop("grad_output")
    mask = tensors.pop("mask", tensors.pop("bias", None))
    inputs = [tensor.requires_grad_() for tensor in tensors.values()]

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=work.causal,
                                              dropout_p=work.dropout,
                                              enable_gqa=bool(work.kv_heads))

    def layer(x, *weights):
        heads = work.shape[3]
        split = [F.linear(x, weight.T).unflatten(-1, (heads, -1)).transpose(1, 2)
                 for weight in weights[:3]]
        return F.linear(attend(*split).transpose(1, 2).flatten(-2), weights[3].T)

    forward = layer if work.kind == "layer" else attend
    return {"autograd": lambda: torch.autograd.grad(forward(*inputs), inputs, grad_output)}


def prepare_model(work):
    return {"fused Adam": pytorch_language_model.Training(training_of(work)).step}


def module_of(work, tensors):
    width, heads = work.shape[2:]
    module = torch.nn.MultiheadAttention(width, heads, bias=False, batch_first=True).eval()
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([tensors[n].T for n in ("W_q", "W_k", "W_v")]))
        module.out_proj.weight.copy_(tensors["W_o"].T)
    return module


def prepare_layer(work, arrays):
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    x, memory = tensors["x"], tensors.get("memory", tensors["x"])
    width, heads = work.shape[2:]
    joined = torch.cat([tensors[name].T for name in ("W_q", "W_k", "W_v")]).contiguous()
    weights = [tensors[name].T.contiguous() for name in ("W_q", "W_k", "W_v", "W_o")]

    def split(projected):
        return projected.unflatten(-1, (heads, width // heads)).transpose(1, 2)

    def linear_and_sdpa():
        if memory is x:
            projected = F.linear(x, joined).chunk(3, -1)
        else:
            projected = F.linear(x, weights[0]), F.linear(memory, weights[1]), \
                F.linear(memory, weights[2])
        query, key, value = map(split, projected)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=work.causal)
        return F.linear(output.transpose(1, 2).flatten(-2), weights[3])

    module = module_of(work, tensors)
    length = work.shape[1]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(length) if work.causal else None

    def whole_module():
        return module(x, memory, memory, need_weights=False, attn_mask=mask,
                      is_causal=work.causal)[0]

    return {"linear + SDPA": linear_and_sdpa, "nn.MultiheadAttention": whole_module}


def prepare_decoder(work, arrays):
    """One token through layers with preallocated caches."""
    batch, positions, _, heads, layers = work.shape
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    caches = [F.pad(tensors[name], (0, 0, 0, 1)) for name in ("keys", "values")]
    joined = [torch.cat([tensors[name][number].T for name in ("W_q", "W_k", "W_v")]).contiguous()
              for number in range(layers)]
    outputs = [tensors["W_o"][number].T.contiguous() for number in range(layers)]

    def token():
        x = tensors["x"]
        for number in range(layers):
            projected = F.linear(x, joined[number]).view(batch, 1, 3, heads, -1)
            query, key, value = projected.permute(2, 0, 3, 1, 4)
            for cache, new in zip(caches, (key, value), strict=True):
                cache[number, :, :, positions - 1:] = new
            attended = F.scaled_dot_product_attention(query, caches[0][number], caches[1][number])
            x = F.linear(attended.transpose(1, 2).flatten(-2), outputs[number])
        return x

    return {"linear + SDPA": token}


def prepare(work, arrays, threads):
    torch.set_num_threads(threads)
    if work.kind == "model":
        return prepare_model(work)
    if work.gradients:
        return prepare_gradients(work, arrays)
    prepared = {"layer": prepare_layer, "decoder": prepare_decoder}
    calls = prepared.get(work.kind, prepare_attention)(work, arrays)

    def in_inference_mode(call):
        def run():
            with torch.inference_mode():
                return call()

        return run

    return {variant: in_inference_mode(call) for variant, call in calls.items()}


def to_numpy(result):
    return (result[0] if isinstance(result, tuple) else result).numpy()
