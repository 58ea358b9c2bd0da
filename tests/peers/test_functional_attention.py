"""functional_attention against attention written out in PyTorch, over random configurations.

Outputs and gradients are held to the gate of the design (tests/helpers/agreement.py), PyTorch's
float32 in
NumPy's place: the error against float64 is at most twice that of the same formula in float32, or
1e-6. Dropout is compared by its mask, which mha.dropout_mask gives.
"""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from configurations import COUNT

import mha
from mha.compat.pytorch import _memory as memory
from mha.compat.pytorch import _operators as operators
from mha.compat.pytorch import _tensors as tensors
from mha.compat.pytorch import functional_attention

FLOOR = 1e-6
NAMES = ("query", "key", "value", "bias", "alibi", "relative_bias", "sinks")


def visible(shape, options, arrays):
    """Which key each query sees, and the distances from query to key."""
    query_len, key_len = shape[-2:]
    offset = options.get("query_offset", key_len - query_len)
    distance = torch.arange(key_len) - torch.arange(query_len)[:, None] - offset
    seen = torch.ones(shape, dtype=torch.bool)
    left, right = options.get("window") or (None, None)
    for bound, hidden in ((0 if options.get("causal") else None, lambda bound: distance > bound),
                          (right, lambda bound: distance > bound),
                          (left, lambda bound: distance < -bound)):
        if bound is not None:
            seen &= ~hidden(bound)
    if "mask" in arrays:
        seen &= arrays["mask"]
    if "key_lengths" in arrays:
        lengths = arrays["key_lengths"]
        axes = len(shape) - lengths.ndim
        seen &= torch.arange(key_len) < lengths.reshape(*lengths.shape, *[1] * axes)
    return seen, distance


def written_out(arrays, options):
    """The same attention in PyTorch's own operators, in the type of its arguments."""
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    if query.ndim > 3:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (array.repeat_interleave(groups, -3) for array in (key, value))
    scores = query @ key.mT * (options.get("scale") or query.shape[-1]**-0.5)
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    seen, distance = visible(scores.shape, options, arrays)
    if "bias" in arrays:
        scores = scores + arrays["bias"]
    if "alibi" in arrays:
        scores = scores - arrays["alibi"][:, None, None] * distance.abs()
    if "relative_bias" in arrays:
        reach = arrays["relative_bias"].shape[1] // 2
        scores = scores + arrays["relative_bias"][:, distance.clip(-reach, reach) + reach]
    scores = scores.masked_fill(~seen, -torch.inf)
    largest = scores.detach().amax(-1, keepdim=True)
    if "sinks" in arrays:
        largest = torch.maximum(largest, arrays["sinks"].detach()[:, None, None])
    largest = largest.clamp(min=-1e30)
    powers = torch.exp(scores - largest)
    total = powers.sum(-1, keepdim=True)
    if "sinks" in arrays:
        total = total + torch.exp(arrays["sinks"][:, None, None] - largest)
    weights = powers / torch.where(total == 0, 1, total)
    if options.get("dropout"):
        kept = mha.dropout_mask(tuple(weights.shape), options["dropout"], options["rng"])
        share = 1 - np.floor(65536 * options["dropout"] + 0.5) / 65536
        weights = weights * torch.from_numpy(kept) / share
    return weights @ value


def case(seed):
    """Tensors by name, and the other options."""
    rng = np.random.default_rng(seed)
    axes = int(rng.integers(2, 6))
    heads, kv_heads = rng.choice([(1, 1), (4, 2), (6, 2), (3, 3)])
    leading = tuple(rng.integers(1, 4, max(axes - 3, 1 if axes == 3 else 0)))
    query_len, key_len = (int(n) for n in rng.integers(1, 70, 2))
    head_dim, value_head_dim = (int(n) for n in rng.integers(1, 40, 2))
    of_heads = ((int(heads),), (int(kv_heads),)) if axes > 3 else ((), ())
    scores = (*leading, *of_heads[0], query_len, key_len)
    sizes = {"query": (*leading, *of_heads[0], query_len, head_dim),
             "key": (*leading, *of_heads[1], key_len, head_dim),
             "value": (*leading, *of_heads[1], key_len, value_head_dim)}
    if rng.random() < 0.3:
        cut = int(rng.integers(0, len(scores) - 1))
        # A number for each key: softmax ignores what keys share, so that its gradient is 0.
        sizes["bias"] = (*(1 if rng.random() < 0.3 else size for size in scores[cut:-1]), key_len)
    per_head = {"alibi": (int(heads),), "relative_bias": (int(heads), 2 * int(rng.integers(9)) + 1),
                "sinks": (int(heads),)}
    if axes > 3:
        sizes.update({name: size for name, size in per_head.items() if rng.random() < 0.25})
    arrays = {name: torch.from_numpy(rng.standard_normal(size)) for name, size in sizes.items()}
    if "alibi" in arrays:  # slopes, as the paper has them
        arrays["alibi"] = arrays["alibi"].abs() / 4
    options = {"query_offset": int(rng.integers(-3, 10))}
    if rng.random() < 0.3:
        arrays["mask"] = torch.from_numpy(rng.random(scores[int(rng.integers(0, 2)):]) < 0.7)
    if axes > 2 and rng.random() < 0.2:
        arrays["key_lengths"] = torch.from_numpy(rng.integers(0, key_len + 1, leading))
    choices = {"causal": True, "window": (int(rng.integers(0, 30)), None), "scale": 0.3,
               "softcap": 2.0, "dropout": 0.25}
    options.update({name: value for name, value in choices.items() if rng.random() < 0.35})
    if "dropout" in options:
        options["rng"] = int(rng.integers(2**63))
    return arrays, options


def typed(arrays, dtype, by_token):
    """Leaves of the type that want gradients; by_token lays rows of heads side by side."""
    found = {}
    for name, array in arrays.items():
        if name in NAMES:
            array = array.to(dtype)
            if by_token and array.ndim > 2 and name in NAMES[:3]:
                array = array.transpose(-2, -3).contiguous().transpose(-2, -3)
            array = array.detach().requires_grad_()
        found[name] = array
    return found


def results(function, arrays, weights):
    """The output and the gradients of its weighed sum, in float64."""
    output = function(arrays)
    leaves = [arrays[name] for name in NAMES if name in arrays]
    gradients = torch.autograd.grad((output * weights.to(output.dtype)).sum(), leaves,
                                    allow_unused=True)
    return [None if each is None else each.detach().double() for each in (output, *gradients)]


@pytest.mark.parametrize("seed", range(COUNT))
def test_outputs_and_gradients_agree_with_pytorch(seed):
    drawn, options = case(seed)

    def ours(arrays):
        return functional_attention(**arrays, **options)

    def theirs(arrays):
        return written_out(arrays, options)

    shape = (*drawn["query"].shape[:-1], drawn["value"].shape[-1])
    weights = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))
    single = typed(drawn, torch.float32, bool(seed % 2))
    widened = {name: array.detach().double().requires_grad_() if name in NAMES else array
               for name, array in single.items()}
    exact = results(theirs, widened, weights)
    plain = results(theirs, typed(drawn, torch.float32, False), weights)
    # A gradient may be exactly 0 (that of the only key): then the others say what is small.
    scale = max(float(wanted.abs().max()) for wanted in exact)
    for got, wanted, torchs in zip(results(ours, single, weights), exact, plain, strict=True):
        largest = float(wanted.abs().max())
        error, torch_error = (float((each - wanted).abs().max()) for each in (got, torchs))
        floor = FLOOR * (largest if largest > 1e-9 * scale else scale)
        assert error <= max(2 * torch_error, floor), (error, torch_error)
    double = results(ours, typed(drawn, torch.float64, bool(seed % 2)), weights)
    for got, wanted in zip(double, results(theirs, typed(drawn, torch.float64, False), weights),
                           strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12 * max(1.0, scale))


GRADCHECKS = {
    "plain": {}, "causal": {"causal": True, "query_offset": 1},
    "window, softcap, scale": {"window": (2, 1), "query_offset": 0, "softcap": 1.5, "scale": 0.4},
    "dropout": {"dropout": 0.4, "rng": 5}, "mask": {"mask": True},
}


def small(*names):
    torch.manual_seed(0)
    sizes = {"query": (2, 4, 3, 5), "key": (2, 2, 6, 5), "value": (2, 2, 6, 3), "bias": (4, 3, 6),
             "alibi": (4,), "relative_bias": (4, 5), "sinks": (4,)}
    return {name: torch.randn(sizes[name], dtype=torch.float64, requires_grad=True)
            for name in ("query", "key", "value", *names)}


@pytest.mark.parametrize("extra", [(), ("bias",), ("sinks", "relative_bias", "alibi")])
@pytest.mark.parametrize("options", GRADCHECKS.values(), ids=GRADCHECKS.keys())
def test_gradcheck(options, extra):
    arrays = small(*extra)
    options = {"query_offset": 1, **options}
    if "mask" in options:
        options["mask"] = torch.rand(2, 1, 3, 6) < 0.6
    assert torch.autograd.gradcheck(
        lambda *leaves: functional_attention(**dict(zip(arrays, leaves, strict=True)), **options),
        tuple(arrays.values()))


def test_a_gradient_whose_negation_is_put_off():
    """From the imaginary part of a conj() PyTorch sends one that NumPy cannot read."""
    found = []
    for attend in (functional_attention, torch.nn.functional.scaled_dot_product_attention):
        arrays = {name: leaf[:, :2] for name, leaf in small().items()}
        output = attend(*arrays.values())
        number = torch.complex(torch.zeros_like(output), output)
        loss = (number.conj() * torch.full_like(number, 1 + 2j)).real.sum()
        found.append(torch.autograd.grad(loss, list(arrays.values())))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def operator_arguments(settings, dtype=torch.float32, extra=("bias", "sinks")):
    arrays = {name: array.to(dtype) for name, array in small(*extra).items()}
    arrays["mask"] = torch.rand(2, 1, 3, 6) < 0.6
    leaves = [array.detach().requires_grad_() if (array := arrays.get(name)) is not None
              and name in NAMES else arrays.get(name) for name in operators.NAMES]
    default = {"causal": False, "query_offset": 0, "window": None, "scale": None, "softcap": None,
               "dropout": 0.0, "seed": None, "by_token": False}
    return [*leaves, *operators.flat(tuple((default | settings).values()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("settings", [
    {}, {"by_token": True}, {"causal": True, "window": (2, None), "softcap": 2.0, "scale": 0.3},
    {"dropout": 0.3, "seed": torch.tensor(7)}])
def test_opcheck(settings, dtype):
    arguments = operator_arguments(settings, dtype)
    torch.library.opcheck(torch.ops.mha.attention.default, tuple(arguments))
    grad = torch.randn(torch.ops.mha.attention(*arguments).shape).to(dtype)
    arguments = [argument.detach() if isinstance(argument, torch.Tensor) else argument
                 for argument in arguments]
    torch.library.opcheck(torch.ops.mha.attention_backward.default,
                          (grad, None, [True, False, True, True, False, False, True], *arguments))


def test_the_operator_is_the_function_and_its_way_back():
    arguments = operator_arguments({"causal": True})
    leaves = [leaf for leaf in arguments[:7] if leaf is not None]
    by_operator = torch.ops.mha.attention(*arguments)
    ours = tensors.attention(*arguments[:9], causal=True, query_offset=0)
    assert torch.equal(by_operator, ours)
    for left, right in zip(*(torch.autograd.grad(output.square().sum(), leaves)
                             for output in (by_operator, ours)), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("query_len", [1, 9])
def test_halves_round_float32_once(dtype, by_token, query_len):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, length, 4, 16).to(dtype).transpose(1, 2).requires_grad_()
                         for length in (query_len, 12, 12))
    sinks = torch.randn(4).to(dtype).requires_grad_()
    wide = [leaf.detach().float().requires_grad_() for leaf in (query, key, value, sinks)]
    halves = tensors.attention(query, key, value, sinks=sinks, by_token=by_token)
    floats = tensors.attention(*wide[:3], sinks=wide[3], by_token=by_token)
    with torch.no_grad():
        assert torch.equal(halves, tensors.attention(query, key, value, sinks=sinks,
                                                     by_token=by_token))
    assert halves.dtype == dtype
    assert torch.equal(halves, floats.to(dtype))
    grad = torch.randn(halves.shape).to(dtype)
    for half, single in zip(torch.autograd.grad(halves, (query, key, value, sinks), grad),
                            torch.autograd.grad(floats, wide, grad.float()), strict=True):
        assert half.dtype == dtype
        torch.testing.assert_close(half.float(), single, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("exchanges", [True, False])
def test_memory_is_shared(dtype, exchanges, monkeypatch):
    if not exchanges:  # PyTorch before 2.10
        monkeypatch.setattr(memory, "EXCHANGE", None)
    tensor = torch.randn(2, 7, 3, 8).to(dtype).transpose(1, 2)[:, :, 1:]
    [array] = memory.arrays_of((tensor,), ["query"])
    assert array.ctypes.data == tensor.data_ptr()
    assert array.strides == tuple(step * tensor.element_size() for step in tensor.stride())
    assert memory.tensor_of(array).data_ptr() == tensor.data_ptr()
    assert torch.equal(memory.tensor_of(array), tensor)
    by_token = memory.tensor_of(array[None], True)
    assert by_token.data_ptr() == tensor.data_ptr()
    assert torch.equal(by_token, tensor[None].transpose(1, 2))


def test_the_table_is_used(monkeypatch):
    """A tenth of a token's time under PyTorch would be lost else, unnoticed."""
    monkeypatch.setattr(memory, "array_of", None)
    monkeypatch.setattr(torch, "from_numpy", None)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        query = torch.randn(1, 2, 3, 4, dtype=dtype, requires_grad=True)
        tensors.attention(query, query, query, mask=torch.ones(3, 3, dtype=torch.bool),
                          key_lengths=torch.tensor([2])).sum().backward()


def test_zeros_without_memory():
    """PyTorch has a tensor of zeros that is only said to be so."""
    query = torch.randn(1, 2, 3, 4)
    nothing = torch._efficientzerotensor((1, 2, 3, 4), dtype=torch.float32)
    assert torch.equal(tensors.attention(query, nothing, nothing), torch.zeros(1, 2, 3, 4))


def test_dropout_follows_pytorchs_generator():
    query = torch.randn(1, 2, 8, 4)
    drawn = []
    for seed, compiled in itertools.product((3, 4), (False, True)):
        function = (torch.compile(functional_attention, backend="aot_eager", fullgraph=True)
                    if compiled else functional_attention)
        torch.manual_seed(seed)
        drawn.append(function(query, query, query, dropout=0.5))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[2], drawn[3])
    assert not torch.equal(drawn[0], drawn[2])
    generator = torch.Generator().manual_seed(4)
    assert torch.equal(functional_attention(query, query, query, dropout=0.5, rng=generator),
                       drawn[2])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_compute_the_same(use_reentrant):
    query = torch.randn(1, 2, 8, 4, requires_grad=True)

    def attend(query):
        return functional_attention(query, query, query, dropout=0.5)

    gradients = []
    for function in (attend, lambda query: torch.utils.checkpoint.checkpoint(
            attend, query, use_reentrant=use_reentrant)):
        torch.manual_seed(0)
        gradients.append(torch.autograd.grad(function(query).square().sum(), query)[0]
                         if not use_reentrant else backward(function, query))
    assert torch.equal(*gradients)


def backward(function, leaf):
    leaf.grad = None
    function(leaf).square().sum().backward()
    return leaf.grad


def test_autocast_takes_what_sdpa_takes():
    query = torch.randn(1, 2, 8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert functional_attention(query, query.half(), query).dtype == torch.bfloat16


def test_autograd_refuses_what_it_must():
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    output = functional_attention(query, query, query)
    first = torch.autograd.grad(output.sum(), query, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(output.sum(), query)[0])
    with pytest.raises(RuntimeError, match="a second time"):
        output.sum().backward()
    key = query.detach().clone()
    output = functional_attention(query, key, key)
    key.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_tangents_are_refused():
    x = torch.randn(1, 2, 5, 8)
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(functional_attention(x, x, x), functional_attention(x, x, x))
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="key: got a tensor with a tangent"):
            functional_attention(x, dual, x)


SECOND_GRADIENTS = {
    "penalty": lambda loss, x: torch.autograd.grad(
        loss(x), x, create_graph=True)[0].square().sum().backward(),
    "of a constant's": lambda loss, x: torch.autograd.grad(torch.autograd.grad(
        (loss(x) * torch.ones(())).sum(), x, create_graph=True)[0].sum(), x),
    "hessian": torch.autograd.functional.hessian,
    "hvp": lambda loss, x: torch.autograd.functional.hvp(loss, x, torch.ones_like(x)),
}


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("which", SECOND_GRADIENTS)
@pytest.mark.parametrize("attend", [functional_attention, lambda *heads: torch.ops.mha.attention(
    *heads, *[None] * 6, False, *[None] * 5, 0.0, None, False)], ids=["function", "operator"])
def test_gradients_of_gradients_are_an_error(attend, which, power):
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no gradients of gradients"):
        SECOND_GRADIENTS[which](lambda x: (attend(x, x, x)**power).sum(), x)


def test_what_the_way_back_needs_is_freed_with_the_saved_tensors():
    class Watched(np.ndarray):
        pass

    key = np.zeros((1, 2, 5, 8), np.float32).view(Watched)
    watch = weakref.ref(key)
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    loss = functional_attention(query, *[torch.from_numpy(key)] * 2).sum()
    del key
    gc.collect()
    assert watch() is not None
    loss.backward()
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize(("change", "error", "text"), [
    ({"query": np.zeros((1, 2, 3, 4))}, TypeError, "query: got ndarray, wanted a tensor"),
    ({"mask": np.ones((3, 3), bool)}, TypeError, "mask: got ndarray, wanted a tensor"),
    ({"key": torch.zeros(1, 2, 3, 5)}, ValueError, "key"),
    ({"value": torch.zeros(1, 2, 3, 4).to_sparse()}, TypeError, "value: got a sparse tensor"),
    ({"mask": torch.zeros(3, 3)}, TypeError, "mask"),
    ({"rng": np.random.default_rng(), "dropout": 0.5}, TypeError, "rng: got Generator"),
    ({"rng": -1, "dropout": 0.5}, ValueError, "rng: got -1"),
    ({"dropout": 1.0}, ValueError, "dropout"),
    ({"query_offset": 1.5}, TypeError, "query_offset: got float, wanted an int"),
])
def test_errors_name_the_argument(change, error, text):
    arguments = {name: torch.zeros(1, 2, 3, 4) for name in ("query", "key", "value")}
    with pytest.raises(error, match=text):
        functional_attention(**{**arguments, **change})


def test_tensors_without_numbers_get_their_shape():
    query, key = torch.zeros(2, 4, 3, 8, device="meta"), torch.zeros(2, 2, 5, 8, device="meta")
    assert functional_attention(query, key, key[..., :6]).shape == (2, 4, 3, 6)
    assert tensors.attention(query, key, key[..., :6], by_token=True).shape == (2, 3, 4, 6)
