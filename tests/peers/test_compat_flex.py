"""mha.compat.flex beside torch.nn.attention.flex_attention: masks, numbers, gradients."""

import warnings

import mask_mods
import pytest
import torch
from torch.nn.attention import flex_attention as theirs

import mha
from mha.compat import flex

LENGTH = 330
torch.manual_seed(0)
IDS = torch.randint(0, 5, (LENGTH,)).sort().values
MODS = mask_mods.every_kind(IDS, torch.randint(0, 5, (LENGTH,)).sort().values,
                            torch.tensor([30, 200]))
MODS["joined"] = flex.or_masks(flex.and_masks(mask_mods.causal, mask_mods.documents(IDS)),
                               mask_mods.neighbours(22, 1))


def tensors(dtype=torch.float64, kv_heads=2):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, heads, LENGTH, 16, dtype=dtype, generator=generator).requires_grad_()
            for heads in (4, kv_heads, kv_heads)]


def by_pytorch(*arguments, **options):
    """Without gradients, which it does not have on a CPU."""
    with warnings.catch_warnings():  # it warns that it is not compiled
        warnings.simplefilter("ignore")
        return theirs.flex_attention(*(tensor.detach() for tensor in arguments), **options)


@pytest.mark.parametrize("name", MODS)
def test_masks_numbers_and_gradients(name):
    """Of one mask_mod, made into a mask by each; mha takes PyTorch's mask too."""
    arguments = MODS[name], 2, 4, LENGTH, LENGTH
    their_mask = theirs.create_block_mask(*arguments, device="cpu")
    dense = theirs.create_mask(*arguments, device="cpu")
    mask = flex.create_block_mask(*arguments, device="cpu")
    assert torch.equal(torch.from_numpy(mask.to_dense()), dense)
    assert torch.equal(flex.create_mask(*arguments, device="cpu"), dense)
    wanted, lse = by_pytorch(*tensors(), block_mask=their_mask, enable_gqa=True, return_lse=True)
    for given in (mask, their_mask):
        output, own_lse = flex.flex_attention(*tensors(), block_mask=given, enable_gqa=True,
                                              return_lse=True)
        torch.testing.assert_close(output, wanted, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(own_lse, lse, rtol=1e-10, atol=1e-11)
    found, expected = [], []
    for attend, of_mask, gradients in ((flex.flex_attention, mask, found),
                                       (None, dense, expected)):
        inputs = tensors()
        if attend is None:
            key, value = (tensor.repeat_interleave(2, dim=1) for tensor in inputs[1:])
            output = torch.nn.functional.scaled_dot_product_attention(
                inputs[0], key, value, attn_mask=of_mask)
            output = torch.where(of_mask.any(-1, keepdim=True), output, 0)
        else:
            output = attend(*inputs, block_mask=of_mask, enable_gqa=True)
        (output * torch.arange(16)).sum().backward()
        gradients += [tensor.grad for tensor in inputs]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_the_gradient_of_lse():
    inputs, others = tensors(kv_heads=4), tensors(kv_heads=4)
    mask = mha.BlockMask.causal(LENGTH)
    _, lse = flex.flex_attention(*inputs, block_mask=mask, return_lse=True)
    lse.sum().backward()
    scores = others[0] @ others[1].mT / 4
    torch.logsumexp(scores.masked_fill(~torch.from_numpy(mask.to_dense()), -torch.inf),
                    -1).sum().backward()
    for one, other in zip(inputs[:2], others[:2], strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types(dtype):
    inputs = tensors(dtype, kv_heads=4)
    mask = mha.BlockMask.sliding_window(LENGTH, window=(40, 0))
    output = flex.flex_attention(*inputs, block_mask=mask)
    assert output.dtype == dtype
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.double() for tensor in inputs), attn_mask=torch.from_numpy(mask.to_dense()))
    torch.testing.assert_close(output.double(), wanted, rtol=2e-2, atol=2e-2)
    output.float().sum().backward()
    assert all(tensor.grad.dtype == dtype for tensor in inputs)


def test_compiled_models_go_around_it():
    mask = mha.BlockMask.causal(LENGTH)
    inputs = tensors(torch.float32, kv_heads=4)
    compiled = torch.compile(lambda q, k, v: flex.flex_attention(q * 2, k, v, block_mask=mask) + 1,
                             backend="eager")
    wanted = flex.flex_attention(inputs[0] * 2, *inputs[1:], block_mask=mask) + 1
    with warnings.catch_warnings():  # of what it traced itself
        warnings.simplefilter("ignore")
        torch.testing.assert_close(compiled(*inputs), wanted)


def test_a_mask_mod_of_arrays_beside_pytorch():
    """Whose functions of tensors would fail."""
    ids = IDS.numpy()
    wanted = flex.create_block_mask(MODS["documents"], 1, 1, LENGTH, LENGTH)
    for mod in (mask_mods.documents(ids), flex.and_masks(
            mask_mods.causal, lambda b, h, query, key: ids[query] == ids[key])):
        assert flex.create_block_mask(mod, 1, 1, LENGTH, LENGTH) == wanted


def test_pytorchs_mask_of_blocks_alone():
    """Without a mask_mod it is what its blocks show."""
    counts = torch.ones(1, 1, 3, dtype=torch.int32)
    blocks = torch.tensor([0, 1, 2]).reshape(1, 1, 3, 1).expand(1, 1, 3, 3).int()
    mask = theirs.BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=128,
                                           seq_lengths=(LENGTH, LENGTH))
    inputs = tensors(kv_heads=4)
    ids = torch.arange(LENGTH) // 128
    torch.testing.assert_close(
        flex.flex_attention(*inputs, block_mask=mask),
        flex.flex_attention(*inputs, block_mask=mha.BlockMask.documents(ids)))


def test_errors():
    query, key, value = tensors(kv_heads=4)
    output = flex.flex_attention(query, key, value)
    plain, = torch.autograd.grad(output.sum(), query, retain_graph=True)
    gradient, = torch.autograd.grad(output.sum(), query, create_graph=True)
    assert torch.equal(gradient, plain)
    with pytest.raises(NotImplementedError, match="no gradients of gradients"):
        torch.autograd.grad(gradient.sum(), query)
    with pytest.raises(TypeError, match="key: got ndarray"):
        flex.flex_attention(query, key.detach().numpy(), value)
    with pytest.raises(TypeError, match="query: got ndarray"):
        flex.flex_attention(query.detach().numpy(), key, value)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda q: flex.flex_attention(q, key, value).sum())(query)
    with pytest.raises(ValueError, match="on meta"):
        flex.flex_attention(query.to("meta"), key, value)
    other = theirs.create_block_mask(mask_mods.causal, 1, 1, 200, 200, device="cpu")
    with pytest.raises(ValueError, match="block_mask: got one of lengths"):
        flex.flex_attention(query, key, value, block_mask=other)


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:`torch.jit")
def test_masks_that_are_made_while_pytorch_compiles():
    def attend(query):
        mask = flex.create_block_mask(mask_mods.causal, None, None, 200, 200)
        dense = flex.create_mask(mask_mods.causal, 1, 1, 200, 200, device="cpu")
        output = flex.flex_attention(query, query, query, block_mask=mask)
        return output + torch.nn.functional.scaled_dot_product_attention(query, query, query,
                                                                         attn_mask=dense)

    query = torch.randn(1, 2, 200, 8, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(attend, backend="aot_eager")(query), attend(query))
