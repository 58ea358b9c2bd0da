"""mha.compat.flash_attn on PyTorch's tensors: outputs, gradients by autograd, caches, padding; over
flash-attention's own parameter grid, against its formula in float64, differentiated by PyTorch."""

import flash_attention_grid as grid
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from mha.compat import flash_attn as fa
from mha.compat.flash_attn import bert_padding

AXES = {"causal": (False, True), "local": (False, True), "alibi": (None, "heads", "batch"),
        "softcap": (0.0, 50.0), "dtype": (torch.float64, torch.float16, torch.bfloat16)}
CASES = [*grid.grid(grid.LENGTHS, 48, 3, **AXES), *(
    pytest.param(case, marks=pytest.mark.thorough)
    for case in [*grid.grid(grid.LENGTHS, 144, 4, **AXES), *grid.grid(grid.LONG, 24, 5, **AXES)])]
each_case = pytest.mark.parametrize("case", CASES, ids=grid.name_of)


def drawn(case, batch=2):
    generator = torch.Generator().manual_seed(0)
    (query_len, key_len), (heads, kv_heads) = case["lengths"], grid.HEADS[case["kind"]]
    q, k, v, grad = (
        torch.randn(batch, length, count, case["head_dim"], generator=generator,
                    dtype=torch.float64).to(case["dtype"])
        for length, count in ((query_len, heads), (key_len, kv_heads), (key_len, kv_heads),
                              (query_len, heads)))
    slopes = {None: None, "heads": 0.3 * torch.rand(heads, generator=generator),
              "batch": 0.3 * torch.rand(batch, heads, generator=generator)}[case["alibi"]]
    return q, k, v, grad, slopes


def by_formula(tensors, grad, slopes, s, options):
    """Output, lse and the gradients of q, k and v of one sequence."""
    inputs = [tensor.detach().double().requires_grad_() for tensor in tensors]
    own = slopes if slopes is None or slopes.ndim == 1 else slopes[s]
    output, lse, _ = grid.attention(torch, *inputs, slopes=None if own is None else own.double(),
                                    **options)
    return output, lse, torch.autograd.grad(output, inputs, grad.double())


def check(found, wanted, dtype):
    """As flash-attention's own tests: within a few roundings of the type, of the largest number."""
    rounding = {torch.float64: 1e-13, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    assert found.dtype is dtype
    scale = float(wanted.detach().abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(found.double(), wanted, rtol=rounding,
                               atol=(rounding if dtype is not torch.float64 else 1e-12) * scale)


def options_of(case):
    window = grid.window_of(case["local"], case["lengths"][1], 1)
    names = {"causal": case["causal"], "softcap": case["softcap"]}
    return {**names, "window": window}, {**names, "window_size": window}


@each_case
@pytest.mark.parametrize("packed", [False, True])
def test_dense(case, packed):
    q, k, v, grad, slopes = drawn(case)
    options, named = options_of(case)
    inputs = [q, torch.stack([k, v], dim=2)] if packed else [q, k, v]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    call = fa.flash_attn_kvpacked_func if packed else fa.flash_attn_func
    output, lse, _ = call(*inputs, alibi_slopes=slopes, return_attn_probs=True, **named)
    assert output.is_contiguous()
    grads = torch.autograd.grad(output, inputs, grad)
    grads = [grads[0], *grads[1].unbind(2)] if packed else grads
    for b in range(len(q)):
        wanted, wanted_lse, wanted_grads = by_formula((q[b], k[b], v[b]), grad[b], slopes, b,
                                                      options)
        check(output[b], wanted, q.dtype)
        torch.testing.assert_close(lse[b].double(), wanted_lse, rtol=1e-5, atol=1e-4)
        for gradient, of_wanted in zip(grads, wanted_grads, strict=True):
            check(gradient[b], of_wanted, q.dtype)


@each_case
def test_varlen(case):
    """Some sequences are empty, of queries, of keys or of both."""
    q, k, v, grad, slopes = drawn(case, batch=5)
    options, named = options_of(case)
    rng = np.random.default_rng(2)
    counts = np.array([rng.integers(max(1, most // 2), most + 1, 5) for most in case["lengths"]])
    counts[0, 1] = counts[1, 2] = counts[0, 4] = counts[1, 4] = 0
    rows = [torch.cat([tensor[s, :length] for s, length in enumerate(lengths)])
            for tensor, lengths in zip((q, k, v, grad), counts[[0, 1, 1, 0]], strict=True)]
    starts = [torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
              for lengths in counts]
    inputs = [tensor.requires_grad_() for tensor in rows[:3]]
    output = fa.flash_attn_varlen_func(*inputs, *starts, *counts.max(axis=1).tolist(),
                                       alibi_slopes=slopes, **named)
    grads = torch.autograd.grad(output, inputs, rows[3])
    for s in range(5):
        part = [slice(int(side[s]), int(side[s + 1])) for side in starts]
        if counts[0, s] and counts[1, s]:
            own = inputs[0][part[0]], inputs[1][part[1]], inputs[2][part[1]]
            wanted, _, wanted_grads = by_formula(own, rows[3][part[0]], slopes, s, options)
            check(output[part[0]], wanted, q.dtype)
            for gradient, of_wanted, of in zip(grads, wanted_grads, (0, 1, 1), strict=True):
                check(gradient[part[of]], of_wanted, q.dtype)
        else:
            assert not output[part[0]].any()
            assert not any(gradient[part[of]].any() for gradient, of in zip(grads, (0, 1, 1),
                                                                            strict=True))


@pytest.mark.parametrize("alibi", [None, "batch"])
@pytest.mark.parametrize("ragged", [False, True])
def test_dropout_draws_from_pytorch(alibi, ragged):
    """torch.manual_seed counts, and gradients are those of the weights that were kept."""
    case = {"lengths": (50, 70), "kind": "gqa", "head_dim": 16, "dtype": torch.float64,
            "alibi": alibi}
    q, k, v, grad, slopes = drawn(case)
    call, arrays, more = fa.flash_attn_func, (q, k, v), ()
    if ragged:
        call = fa.flash_attn_varlen_func
        arrays = [tensor.reshape(-1, *tensor.shape[2:]) for tensor in arrays]
        grad = grad.reshape(-1, *grad.shape[2:])
        more = torch.tensor([0, 50, 100]), torch.tensor([0, 70, 140]), 50, 70
    inputs = [tensor.requires_grad_() for tensor in arrays]
    p = 11141 / 65536
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(call(*inputs, *more, p, alibi_slopes=slopes, return_attn_probs=True))
    output, _, signed = found[0]
    assert torch.equal(output, found[1][0]) and not torch.equal(output, found[2][0])
    assert torch.equal(call(*inputs, *more, p, alibi_slopes=slopes, rng=7),
                       call(*inputs, *more, p, alibi_slopes=slopes, rng=7))
    grads = torch.autograd.grad(output, inputs, grad)
    parts = [tensor.reshape(2, -1, *tensor.shape[-2:]) for tensor in (*inputs, grad, *grads)]
    for b in range(2):
        own = [tensor[b].detach().requires_grad_() for tensor in parts[:3]]
        slopes_b = None if slopes is None else slopes[b].double()
        _, _, weights = grid.attention(torch, *own, slopes=slopes_b)
        kept = torch.where(signed[b] < 0, 0.0, weights) / (1 - p)
        wanted = torch.einsum("hqk,khd->qhd", kept, own[2].repeat_interleave(3, dim=1))
        wanted_grads = torch.autograd.grad(wanted, own, parts[3][b])
        torch.testing.assert_close(output.reshape(parts[0].shape)[b], wanted)
        for gradient, of_wanted in zip(parts[4:], wanted_grads, strict=True):
            torch.testing.assert_close(gradient[b], of_wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kvcache_is_that_of_arrays_and_writes_the_tensors(dtype):
    generator = torch.Generator().manual_seed(1)
    q, k, v, k_cache, v_cache = (
        torch.randn(2, length, heads, 32, generator=generator).to(dtype)
        for length, heads in ((3, 4), (3, 2), (3, 2), (20, 2), (20, 2)))
    angles = torch.rand(20, 8, generator=generator)
    options = {"cache_seqlens": torch.tensor([5, 9], dtype=torch.int32), "causal": True,
               "cache_leftpad": torch.tensor([1, 0], dtype=torch.int32),
               "return_softmax_lse": True}
    caches = k_cache.clone(), v_cache.clone()
    version = caches[0]._version
    output, lse = fa.flash_attn_with_kvcache(
        q.requires_grad_(), *caches, k, v, angles.cos().to(dtype), angles.sin().to(dtype),
        **options)
    assert output.dtype is dtype and not output.requires_grad and caches[0]._version > version
    wanted_caches = k_cache.double().numpy(), v_cache.double().numpy()
    wanted, wanted_lse = fa.flash_attn_with_kvcache(
        q.detach().double().numpy(), *wanted_caches, k.double().numpy(), v.double().numpy(),
        angles.cos().to(dtype).double().numpy(), angles.sin().to(dtype).double().numpy(), **options)
    bound = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]
    for found, expected in zip((output, lse, *caches), (wanted, wanted_lse, *wanted_caches),
                               strict=True):
        torch.testing.assert_close(found.double(), torch.from_numpy(expected).double(), rtol=0,
                                   atol=bound)
    assert torch.equal(caches[1][0, 5:8], v[0]) and torch.equal(caches[1][1, 12:], v_cache[1, 12:])


def test_gradients_go_through_padding():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    q, k, v = (torch.randn(2, 4, 2, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    rows, indices, starts, longest, used = bert_padding.unpad_input(q, mask)
    assert used.dtype is starts.dtype is torch.int32 and used.tolist() == [3, 1]
    assert torch.equal(indices, torch.tensor([0, 1, 2, 4]))
    others = [bert_padding.unpad_input(tensor, mask)[0] for tensor in (k, v)]
    output = fa.flash_attn_varlen_func(rows, *others, starts, starts, longest, longest)
    padded = bert_padding.pad_input(output, indices, 2, 4)
    padded.sum().backward()
    wanted = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    seen = mask.bool()[:, None, None, :]
    attended = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in wanted), attn_mask=seen).transpose(1, 2)
    (attended * mask[:, :, None, None]).sum().backward()
    torch.testing.assert_close(padded, attended * mask[:, :, None, None])
    for own, other in zip((q, k, v), wanted, strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which PyTorch's compiler looks at
def test_under_torch_compile():
    """flash_attn_func is one operator there; ragged batches break the graph and go on."""
    def model(q, k, v, starts):
        dense = fa.flash_attn_func(q, k, v, causal=True) * 2
        rows = [tensor.flatten(0, 1) for tensor in (q, k, v)]
        return dense.flatten(0, 1) + fa.flash_attn_varlen_func(*rows, starts, starts, 9, 9)

    inputs = [torch.randn(2, 9, 2, 8).requires_grad_() for _ in range(3)]
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    compiled = torch.compile(model, backend="aot_eager")
    found, wanted = (torch.autograd.grad(run(*inputs, starts).square().sum(), inputs)
                     for run in (compiled, model))
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other)
    torch.compile(lambda q: fa.flash_attn_func(q, q, q, causal=True), fullgraph=True,
                  backend="aot_eager")(inputs[0])


def test_slopes_that_change_later_are_noticed_or_do_not_count():
    """Dense: PyTorch refuses, since the tensor is saved. Of items and ragged: they were copied."""
    q = torch.randn(2, 6, 2, 8, dtype=torch.float64, requires_grad=True)
    rows, starts = q.flatten(0, 1), torch.tensor([0, 6, 12])
    slopes = torch.tensor([0.1, 0.2], dtype=torch.float64)
    output = fa.flash_attn_func(q, q, q, alibi_slopes=slopes)
    slopes.mul_(50)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    for shape in ((2,), (2, 2)):
        for attend in (lambda given: fa.flash_attn_varlen_func(
                rows, rows, rows, starts, starts, 6, 6, alibi_slopes=given),
                       lambda given: fa.flash_attn_func(q, q, q, alibi_slopes=given)):
            slopes = torch.arange(1.0, 1 + np.prod(shape), dtype=torch.float64).reshape(shape)
            if len(shape) == 1 and attend(slopes).ndim == 4:
                continue
            wanted, = torch.autograd.grad(attend(slopes).square().sum(), q, retain_graph=True)
            output = attend(slopes)
            slopes.mul_(50)
            found, = torch.autograd.grad(output.square().sum(), q, retain_graph=True)
            assert torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:Converting a tensor")
def test_slopes_go_through_transforms():
    q, slopes = torch.randn(3, 2, 6, 2, 8), torch.tensor([0.1, 0.2])
    wanted = torch.stack([fa.flash_attn_func(item, item, item, alibi_slopes=slopes) for item in q])
    found = torch.vmap(lambda item: fa.flash_attn_func(item, item, item, alibi_slopes=slopes,
                                                       return_attn_probs=True)[0])(q)
    assert torch.equal(found, wanted)
    traced = torch.jit.trace(lambda q: fa.flash_attn_func(q, q, q), q[0])
    torch.testing.assert_close(traced(q[1]), fa.flash_attn_func(q[1], q[1], q[1]))


def test_autocast_counts_for_all_of_them():
    q, starts = torch.randn(2, 6, 2, 8), torch.tensor([0, 6, 12])
    rows = q.flatten(0, 1)
    with torch.autocast("cpu"):
        assert fa.flash_attn_func(q, q, q).dtype is torch.bfloat16
        assert fa.flash_attn_varlen_func(rows, rows, rows, starts, starts, 6,
                                         6).dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:`torch.jit")
def test_gradients_under_inductor(monkeypatch):
    """Heads by token, as models make them: PyTorch's default compiler relies on the strides that
    are foretold for gradients. Told to do without vectors, it writes some all the same."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        monkeypatch.setattr("torch._inductor.config.cpp.simdlen", 1)
    x = torch.randn(2, 5, 32, requires_grad=True)

    def model(x):
        q, k, v = (part.unflatten(-1, (4, 8)) for part in (x, 2 * x, 3 * x))
        return fa.flash_attn_func(q, k, v, causal=True).square().sum()

    found, = torch.autograd.grad(torch.compile(model)(x), x)
    wanted, = torch.autograd.grad(model(x), x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_tangents_are_not_lost():
    cache = torch.zeros(1, 4, 2, 8)
    q = torch.ones(1, 1, 2, 8)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"q: .* tangent"):
        fa.flash_attn_with_kvcache(forward_ad.make_dual(q, q), cache, cache.clone(), q, q,
                                   cache_seqlens=0)
    assert not cache.any()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda q: fa.flash_attn_func(q, q.detach().numpy(), q), TypeError,
     "k: got ndarray, wanted a tensor as q is"),
    (lambda q: fa.flash_attn_func(q.to("meta"), q.to("meta"), q), ValueError,
     "q: got a tensor on meta"),
    (lambda q: fa.flash_attn_func(q, q, q, 0.1, rng=np.random.default_rng(0)), TypeError, "rng"),
    (lambda q: torch.autograd.grad(torch.autograd.grad(fa.flash_attn_varlen_func(
        q[0], q[0], q[0], [0, 4], [0, 4], 4, 4).sum(), q, create_graph=True)[0].sum(), q),
     NotImplementedError, "gradients of gradients"),
    (lambda q: make_fx(lambda x: fa.flash_attn_varlen_func(
        x, x, x, [0, 4], [0, 4], 4, 4))(q[0].detach()), NotImplementedError, "make_fx"),
    (lambda q: fa.flash_attn_func(*[torch.ones(1, 4, 2, 8, dtype=torch.int64)] * 3), TypeError,
     "q: got a tensor of torch.int64"),
    (lambda q: fa.flash_attn_func(torch.nested.nested_tensor([q[0]]), q, q), TypeError,
     "q: got a nested tensor"),
    (lambda q: fa.flash_attn_with_kvcache(
        q, torch.zeros(1, 1, 2, 8).expand(-1, 9, -1, -1), torch.zeros(1, 9, 2, 8), q, q,
        cache_seqlens=0), ValueError, "k_cache: got an array whose parts share memory"),
    (lambda q: torch.func.grad(lambda x: fa.flash_attn_varlen_func(
        x, x, x, [0, 4], [0, 4], 4, 4).sum())(q[0].detach()), NotImplementedError, "flash_attn"),
    (lambda q: fa.flash_attn_with_kvcache(q, q.detach()._neg_view(), q.detach(), q, q,
                                          cache_seqlens=0), ValueError, "k_cache: .*resolve_neg"),
])
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(1, 4, 2, 8, requires_grad=True))
