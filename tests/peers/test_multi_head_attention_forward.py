"""mha.compat.pytorch.multi_head_attention_forward against torch.nn.functional's, static heads and
the habits of torch's modules included."""

import numpy as np
import pytest
import torch
from configurations import COUNT
from test_compat_pytorch import assert_same, random_mask, tensors

from mha.compat import pytorch as compat


def case(seed):
    """Arguments by name, and the type."""
    rng = np.random.default_rng(seed)
    dtype = (np.float32, np.float64)[seed % 2]
    heads, batch = (int(n) for n in rng.integers(1, 5, 2))
    head_dim = int(rng.integers(1, 17))
    width = heads * head_dim
    query_len, key_len = (int(n) for n in rng.integers(1, 20, 2))
    batched = rng.random() < 0.8
    batch = batch if batched else 1
    separate = rng.random() < 0.4
    kdim, vdim = (int(n) for n in rng.integers(1, 30, 2)) if separate else (width, width)
    biased, appended = rng.random() < 0.7, rng.random() < 0.3

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    def sequence(length, size):
        return normal(length, batch, size) if batched else normal(length, size)

    arguments = {
        "query": sequence(query_len, width), "key": sequence(key_len, kdim),
        "value": sequence(key_len, vdim), "embed_dim_to_check": width, "num_heads": heads,
        "in_proj_weight": None if separate else normal(3 * width, width) / width**0.5,
        "in_proj_bias": normal(3 * width) if biased else None,
        "bias_k": normal(1, 1, width) if appended else None,
        "bias_v": normal(1, 1, width) if appended else None,
        "add_zero_attn": bool(rng.random() < 0.3), "dropout_p": 0.4,
        "out_proj_weight": normal(width, width), "out_proj_bias": normal(width) if biased else None,
        "training": False, "need_weights": bool(rng.random() < 0.5),
        "average_attn_weights": bool(rng.random() < 0.5), "use_separate_proj_weight": separate}
    if separate:
        for name, size in (("q", width), ("k", kdim), ("v", vdim)):
            arguments[f"{name}_proj_weight"] = normal(width, size) / size**0.5
    if not appended:
        for name in ("static_k", "static_v"):
            if rng.random() < 0.5:
                arguments[name] = normal(batch * heads, key_len, head_dim)
    kind = rng.choice([None, "bool", "float", "causal"])
    per_head = (batch * heads,) if rng.random() < 0.5 else ()
    arguments["attn_mask"] = random_mask(rng, kind, (*per_head, query_len, key_len), dtype,
                                         true_blocks=True)
    if rng.random() < 0.3:
        arguments["key_padding_mask"] = random_mask(
            rng, "bool", (batch, key_len) if batched else (key_len,), dtype, true_blocks=True)
    if kind == "causal" and rng.random() < 0.5 and query_len == key_len:
        arguments["is_causal"] = True
    return arguments, dtype


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("seed", range(2 * COUNT))
def test_multi_head_attention_forward_is_torchs(seed):
    arguments, dtype = case(seed)
    output, weights = compat.multi_head_attention_forward(**arguments)
    torch_output, torch_weights = torch.nn.functional.multi_head_attention_forward(
        **{name: tensors(value)[0] if isinstance(value, np.ndarray) else value
           for name, value in arguments.items()})
    assert_same(output, torch_output, dtype)
    assert (weights is None) == (torch_weights is None)
    if weights is not None:
        assert_same(weights, torch_weights, dtype)


def test_parameters_are_named_and_ordered_as_torchs():
    for options in ({}, {"bias": False}, {"kdim": 5, "vdim": 7, "add_bias_kv": True}):
        theirs = torch.nn.MultiheadAttention(8, 2, **options).double().eval()
        ours = compat.MultiheadAttention(8, 2, **options).double().eval()
        wanted = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
        assert {name: array.shape for name, array in ours.named_parameters()} == wanted
        assert list(dict(ours.named_parameters())) == list(wanted)
        assert all(array.dtype == np.float64 for array in ours.parameters())
        assert ours.to(torch.device("cpu"), torch.float32).dtype == np.float32
        assert ours.to(torch.float64).dtype == np.float64
        assert len(ours.train().state_dict()) == len(wanted)
