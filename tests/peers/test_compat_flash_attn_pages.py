"""block_table of mha.compat.flash_attn on PyTorch's tensors, the program of flash-attention's own
test of paged caches among them."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from mha.compat import flash_attn as fa

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def drawn(size, dtype, most=3, batch=3):
    """Contiguous caches (batch, most * size, 2, 32), and a table and pools that hold them."""
    generator = torch.Generator().manual_seed(0)
    pages = 2 * batch * most
    table = torch.randperm(pages, dtype=torch.int32,
                           generator=generator)[:batch * most].reshape(batch, most)
    pools = [torch.randn(pages, size, 2, 32, generator=generator).to(dtype) for _ in range(2)]
    return generator, table, pools, [pool[table.long()].flatten(1, 2) for pool in pools]


@pytest.mark.parametrize("size", [256, 48])
@pytest.mark.parametrize("dtype", TYPES)
def test_kvcache_writes_the_tensors(dtype, size):
    generator, table, pools, caches = drawn(size, dtype)
    q, k, v = (torch.randn(3, 2, heads, 32, generator=generator).to(dtype) for heads in (4, 2, 2))
    angles = torch.rand(3 * size, 8, generator=generator)
    lengths = torch.tensor([0, size - 1, 2 * size], dtype=torch.int32)
    before = [pool.clone() for pool in pools]
    table[0, 1:] = table[1, 2] = -1
    versions = [pool._version for pool in pools]
    found, wanted = (fa.flash_attn_with_kvcache(
        q.requires_grad_(), *given, k, v, angles.cos().to(dtype), angles.sin().to(dtype), lengths,
        block_table=pages, causal=True, return_softmax_lse=True)
        for given, pages in ((pools, table), (caches, None)))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) and not one.requires_grad
    for pool, old, cache, version in zip(pools, before, caches, versions, strict=True):
        assert pool._version > version
        for s, length in enumerate(lengths.tolist()):
            for p in (length, length + 1):
                old[table[s, p // size], p % size] = cache[s, p]
        assert torch.equal(pool, old)


@pytest.mark.parametrize("slopes", [None, torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 2 + [[0.0] * 4])])
@pytest.mark.parametrize("size", [256, 48])
@pytest.mark.parametrize("dtype", TYPES)
def test_varlen_and_its_gradients(dtype, size, slopes):
    """Pages that two sequences share have the sum of their gradients."""
    generator, table, pools, _ = drawn(size, dtype)
    table[1, 0] = table[0, 0]
    lengths = [2 * size, size + 7, 5]
    sequences = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    where = table[sequences, positions // size].long(), positions % size
    table[2, 1:] = -5
    q = torch.randn(9, 4, 32, generator=generator).to(dtype)
    grad = torch.randn(9, 4, 32, generator=generator).to(dtype)
    starts = torch.tensor([0, 3, 4, 9]), torch.from_numpy(np.cumsum([0, *lengths]))
    options = {"causal": True, "window_size": (300, -1), "alibi_slopes": slopes}
    plain = fa.flash_attn_varlen_func(q, *pools, *starts, 5, 2 * size, block_table=table, **options)
    assert not plain.requires_grad
    found, wanted = [], []
    for results, paged in ((found, True), (wanted, False)):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in (q, *pools)]
        own = inputs[1:] if paged else [pool[where] for pool in inputs[1:]]
        output = fa.flash_attn_varlen_func(inputs[0], *own, *starts, 5, 2 * size,
                                           block_table=table if paged else None, **options)
        results += [output, *torch.autograd.grad(output, inputs, grad)]
    assert torch.equal(plain, found[0])
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    assert found[2][table[0, 0]].any() and not found[2][table[2, 0], 5:].any()


def test_dropout_draws_from_pytorch():
    _, table, pools, caches = drawn(256, torch.float64)
    q = torch.randn(6, 4, 32, dtype=torch.float64)
    starts = torch.tensor([0, 2, 4, 6]), torch.tensor([0, 768, 1536, 2304])
    results = []
    for given, pages in ((pools, table), ([cache.flatten(0, 1) for cache in caches], None)):
        torch.manual_seed(3)
        results.append(fa.flash_attn_varlen_func(q, *given, *starts, 2, 768, 0.25,
                                                 block_table=pages, return_attn_probs=True))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert (results[0][2] < 0).any()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_under_torch_compile():
    _, table, pools, _ = drawn(256, torch.float32)

    def model(q):
        return fa.flash_attn_varlen_func(q, *pools, [0, 1, 2, 3], [0, 5, 300, 310], 1, 295,
                                         block_table=table) * 2

    q = torch.randn(3, 4, 32)
    assert torch.equal(torch.compile(model, backend="aot_eager")(q), model(q))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_tangents_are_not_lost():
    _, table, pools, _ = drawn(256, torch.float32)
    q, starts = torch.randn(3, 4, 32), [0, 1, 2, 3]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        fa.flash_attn_varlen_func(forward_ad.make_dual(q, q), *pools, starts, starts, 1, 1,
                                  block_table=table)


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"block_table": torch.tensor([[0.0, 1.0, 2.0]] * 3)}, TypeError, "block_table: got an array"),
    ({"block_table": torch.tensor([[-1, 1, 2]] * 3)}, ValueError, r"got -1 at \[0, 0\]"),
    ({"block_table": torch.zeros(3, 2, dtype=torch.int32), "cache_seqlens": 500}, ValueError,
     "written over another"),
    ({"cache_batch_idx": torch.arange(3)}, ValueError, "cache_batch_idx: got it beside block_tab"),
    ({"v_cache": np.zeros((18, 256, 2, 32), np.float32)}, TypeError, "v_cache: got ndarray"),
])
def test_errors_change_nothing(changes, error, message):
    _, table, pools, _ = drawn(256, torch.float32)
    before = [pool.clone() for pool in pools]
    q, new = torch.ones(3, 1, 4, 32), torch.ones(3, 1, 2, 32)
    given = {"k_cache": pools[0], "v_cache": pools[1], "block_table": table, "cache_seqlens": 3,
             **changes}
    with pytest.raises(error, match=message):
        fa.flash_attn_with_kvcache(q, k=new, v=new, **given)
    assert all(map(torch.equal, pools, before))
