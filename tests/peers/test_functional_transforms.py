"""functional_attention under what PyTorch does with functions: vmap, grad and jacrev of torch.func,
functionalize, make_fx, torch.compile; against the same of PyTorch's own attention, or of attention
written out in its operators."""

import itertools

import ml_dtypes  # noqa: F401 - for what mha itself returns of bfloat16
import pytest
import torch
from test_functional_attention import small, written_out
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mha
from mha.compat.pytorch import functional_attention

sdpa = torch.nn.functional.scaled_dot_product_attention
Q = torch.randn(3, 2, 4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def of_self(attend):
    return lambda x: attend(x, x, x)


def laid_out(layout, heads, length, columns):
    """(2, heads, length, columns) in memory as models have it."""
    return {
        "plain": lambda: torch.randn(2, heads, length, columns),
        "by token": lambda: torch.randn(2, length, heads, columns).transpose(1, 2),
        "columns first": lambda: torch.randn(2, heads, columns, length).transpose(2, 3),
        "one of three": lambda: torch.randn(2, length, 3, heads, columns)[:, :, 1].transpose(1, 2),
        "one for all heads": lambda: torch.randn(2, 1, length, columns).expand(-1, heads, -1, -1),
        "every second column": lambda: torch.randn(2, heads, length, 2 * columns)[..., ::2],
        "the first tokens": lambda: torch.randn(2, heads, 2 * length, columns)[:, :, :length],
    }[layout]()


LAYOUTS = ["plain", "by token", "columns first", "one of three", "one for all heads",
           "every second column", "the first tokens"]


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compilers_are_told_the_strides_of_results(layout, by_token):
    """torch.compile computes offsets by the strides of tensors without numbers."""
    for other in LAYOUTS:
        query, key, value = (laid_out(layout, 4, 5, 8), laid_out(other, 2, 6, 8),
                             laid_out(layout, 2, 6, 3))
        arguments = (query, key, value, *[None] * 6, False, None, None, None, None, None, 0.0, None,
                     by_token)
        grad = torch.randn((2, 5, 4, 3) if by_token else (2, 4, 5, 3))
        for name, given in (("attention", arguments),
                            ("attention_outputs", (*arguments, True, True)),
                            ("attention_backward", (grad, None, [True] * 3 + [False] * 4,
                                                    *arguments))):
            operator = getattr(torch.ops.mha, name)
            with FakeTensorMode() as mode:
                foretold = operator(*(mode.from_tensor(one) if isinstance(one, torch.Tensor)
                                      else one for one in given))
            found = operator(*given)
            for one, other_one in zip(*([pair] if isinstance(pair, torch.Tensor) else pair
                                        for pair in (found, foretold)), strict=True):
                assert one.shape == other_one.shape and one.dtype is other_one.dtype
                assert one.stride() == other_one.stride() or not one.numel(), (name, other)


def loss(attend):
    return lambda x: of_self(attend)(x).square().sum()


TRANSFORMS = {
    "vmap": lambda f: torch.vmap(of_self(f))(Q),
    "vmap of an inner axis": lambda f: torch.vmap(of_self(f), 1, 2)(Q),
    "vmap of queries": lambda f: torch.vmap(f, (0, None, None))(Q, Q[0], Q[1]),
    "vmap of keys": lambda f: torch.vmap(f, (None, 1, 0))(Q[0], Q.transpose(0, 1), Q),
    "vmap of vmap": lambda f: torch.vmap(torch.vmap(of_self(f)))(Q),
    "grad": lambda f: torch.func.grad(loss(f))(Q[0]),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(loss(f)))(Q),
    "grad of vmap": lambda f: torch.func.grad(
        lambda x: torch.vmap(of_self(f))(x).square().sum())(Q),
    "vjp": lambda f: torch.func.vjp(of_self(f), Q[0])[1](Q[1])[0],
    "jacrev": lambda f: torch.func.jacrev(of_self(f))(Q[0, :1, :1]),
    "jacrev by chunks": lambda f: torch.func.jacrev(of_self(f), chunk_size=4)(Q[0, :1, :1]),
    "jacobian": lambda f: torch.autograd.functional.jacobian(of_self(f), Q[0, :1, :1]),
    "functionalize": lambda f: torch.func.functionalize(of_self(f))(Q[0]),
    "vmap of functionalize": lambda f: torch.vmap(torch.func.functionalize(of_self(f)))(Q),
    "functionalize of vmap": lambda f: torch.func.functionalize(torch.vmap(of_self(f)))(Q),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform):
    close(TRANSFORMS[transform](functional_attention), TRANSFORMS[transform](sdpa))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("weighs", [False, True])
def test_several_losses_at_once(weighs):
    """torch.autograd.grad with is_grads_batched, and what is built on it."""
    found = []
    for attend in (functional_attention, sdpa):
        x = Q[0, :1, :1].clone().requires_grad_()
        y = x.detach() if weighs else x
        output = attend(x, y, y)
        losses = torch.eye(output.numel()).reshape(-1, *output.shape)
        found.append(torch.autograd.grad(output, x, losses, is_grads_batched=True)[0])
        found.append(torch.autograd.functional.jacobian(lambda x, f=attend: f(x, x, x),
                                                        x.detach(), vectorize=True))
    close(found[0], found[2])
    close(found[1], found[3])


@pytest.mark.parametrize("names", [("mask",), ("bias", "mask"), ("alibi",), ("relative_bias",),
                                   ("sinks", "bias"), ("key_lengths",)])
def test_vmap_of_any_argument(names):
    arrays = {name: leaf.detach() for name, leaf in small(
        "bias", "alibi", "relative_bias", "sinks").items()}
    arrays["mask"] = torch.rand(2, 1, 3, 6, generator=torch.Generator().manual_seed(1)) < 0.6
    arrays["key_lengths"] = torch.tensor([6, 3])
    for kinds in ((), ("query",), ("query", "key", "value")):
        given = {name: arrays[name] for name in ("query", "key", "value", *names)}
        moved = [torch.stack([given[name], given[name].roll(1, -1)]) if name in (*names, *kinds)
                 else given[name] for name in given]
        axes = tuple(0 if name in (*names, *kinds) else None for name in given)

        def attend(*leaves, given=given):
            return functional_attention(**dict(zip(given, leaves, strict=True)), query_offset=1)

        items = [attend(*[leaf if axis is None else leaf[i] for leaf, axis in zip(
            moved, axes, strict=True)]) for i in range(2)]
        assert torch.equal(torch.vmap(attend, axes)(*moved), torch.stack(items))


def test_vmap_of_nothing():
    assert torch.vmap(functional_attention)(Q[:0], Q[:0], Q[:0]).shape == Q[:0].shape


def test_vmap_and_dropout():
    def attend(x):
        return functional_attention(x, x, x, dropout=0.5)

    torch.manual_seed(0)
    same = torch.vmap(attend, randomness="same")(Q[:1].expand(2, -1, -1, -1, -1))
    assert torch.equal(same[0], same[1])
    different = torch.vmap(attend, randomness="different")(Q[:1].expand(2, -1, -1, -1, -1))
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(attend)(Q)
    fixed = torch.vmap(lambda x: functional_attention(x, x, x, dropout=0.5, rng=2**64 - 3))(Q)
    assert torch.equal(fixed[1], functional_attention(Q[1], Q[1], Q[1], dropout=0.5,
                                                      rng=2**64 - 3))


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("leaf", [False, True])
def test_make_fx_records_the_call(mode, pre_dispatch, leaf, extras):
    def attend(x):
        if extras:
            output, _, lse = functional_attention(x, x, x, return_weights=True, return_lse=True)
            return output * lse[..., None]
        return functional_attention(x, x, x, causal=True)

    x = Q[0].clone().requires_grad_(leaf)
    graph = make_fx(attend, tracing_mode=mode, pre_dispatch=pre_dispatch)(x)
    close(graph(Q[1]), attend(Q[1]))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_gradients(mode):
    graph = make_fx(torch.func.grad(loss(functional_attention)), tracing_mode=mode)(Q[0])
    close(graph(Q[1]), torch.func.grad(loss(sdpa))(Q[1]))


def test_make_fx_draws_dropout_at_each_call():
    graph = make_fx(lambda x: functional_attention(x, x, x, dropout=0.5))(Q[0])
    assert not torch.equal(graph(Q[0]), graph(Q[0]))


REFUSED = {
    "jvp": lambda f: torch.func.jvp(of_self(f), (Q[0],), (Q[0],)),
    "jacfwd": lambda f: torch.func.jacfwd(of_self(f))(Q[0]),
    "linearize": lambda f: torch.func.linearize(of_self(f), Q[0]),
    "hessian": lambda f: torch.func.hessian(loss(f))(Q[0, :1, :1]),
    "grad of grad": lambda f: torch.func.grad(
        lambda x: torch.func.grad(loss(f))(x).sum())(Q[0, :1, :1]),
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(loss(f)))(Q[0, :1, :1]),
    "functionalize of grad": lambda f: torch.func.functionalize(torch.func.grad(loss(f)))(Q[0]),
    "grad of functionalize": lambda f: torch.func.grad(torch.func.functionalize(loss(f)))(Q[0]),
    "make_fx of grad before dispatch": lambda f: make_fx(
        torch.func.grad(loss(f)), pre_dispatch=True)(Q[0]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("transform", REFUSED)
def test_what_cannot_be_transformed_is_said_plainly(transform):
    with pytest.raises(NotImplementedError, match=r"mha's attention.*wanted "):
        REFUSED[transform](functional_attention)


# Outputs beside the output


def asked(extras, function=functional_attention):
    """A function of tensors by name whose results are always a tuple."""
    def attend(**given):
        found = function(**given, return_weights=extras[0], return_lse=extras[1])
        return found if any(extras) else (found,)
    return attend


EXTRAS = list(itertools.product([False, True], repeat=2))


@pytest.mark.parametrize(("dtype", "compiled"), [
    (torch.float64, False), (torch.float32, False), (torch.float16, False), (torch.bfloat16, False),
    (torch.bfloat16, True)])
@pytest.mark.parametrize("wants_gradients", [False, True])
@pytest.mark.parametrize("extras", EXTRAS)
def test_outputs_are_those_of_mha(extras, compiled, wants_gradients, dtype):
    arrays = {name: leaf.detach().to(dtype) for name, leaf in small("bias").items()}
    plain = mha.scaled_dot_product_attention(**arrays, return_weights=extras[0],
                                             return_lse=extras[1])
    wanted = plain if any(extras) else (plain,)
    attend = asked(extras)
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    given = {name: array.requires_grad_(wants_gradients) for name, array in arrays.items()}
    found = attend(**given)
    assert len(found) == len(wanted) == 1 + sum(extras)
    assert isinstance(found, tuple)
    for got, array in zip(found, wanted, strict=True):
        assert str(got.dtype) == f"torch.{array.dtype}"
        assert (got.detach().double().numpy() == array.astype("float64")).all()
    differentiable = [wants_gradients, *[False] * extras[0], *[wants_gradients] * extras[1]]
    assert [got.requires_grad for got in found] == differentiable


@pytest.mark.parametrize("by_operator", [False, True])
@pytest.mark.parametrize("uses", ["output", "lse", "both"])
@pytest.mark.parametrize("return_weights", [False, True])
def test_gradients_through_lse(return_weights, uses, by_operator):
    arrays = {name: leaf.detach() for name, leaf in small("bias", "sinks").items()}

    def total(output, lse):
        parts = {"output": output.sin().sum(), "lse": lse.cos().sum()}
        return sum(parts.values()) if uses == "both" else parts[uses]

    def ours(*leaves):
        output, *_, lse = functional_attention(
            **dict(zip(arrays, leaves, strict=True)), return_weights=return_weights,
            return_lse=True, query_offset=1)
        return total(output, lse)

    def theirs(*leaves):
        given = dict(zip(arrays, leaves, strict=True))
        query, key = given["query"], given["key"].repeat_interleave(2, 1)
        scores = query @ key.mT * query.shape[-1]**-0.5 + given["bias"]
        sinks = given["sinks"][:, None, None].expand(*scores.shape[:-1], 1)
        return total(written_out(given, {"query_offset": 1}),
                     torch.cat([scores, sinks], -1).logsumexp(-1))

    def gradients(function):
        leaves = [array.clone().requires_grad_() for array in arrays.values()]
        return torch.autograd.grad(function(*leaves), leaves, materialize_grads=True)

    if by_operator:
        found = torch.func.grad(ours, argnums=tuple(range(len(arrays))))(*arrays.values())
    else:
        found = gradients(ours)
    for got, wanted in zip(found, gradients(theirs), strict=True):
        close(got, wanted)


def test_the_weights_are_for_looking_at():
    query = Q[0].clone().requires_grad_()
    _, weights = functional_attention(query, query, query, return_weights=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        weights.sum().backward()


def test_outputs_by_the_operator():
    x = Q[0][:, :, :, :3]
    settings = False, None, None, None, None, None, 0.0, None, False
    for extras in EXTRAS:
        torch.library.opcheck(torch.ops.mha.attention_outputs.default, (
            *[x.clone().requires_grad_() for _ in range(3)], *[None] * 6, *settings, *extras))
    grad = torch.ones(x.shape[:-1], dtype=x.dtype)
    torch.library.opcheck(torch.ops.mha.attention_backward.default, (
        None, grad, [True, True, False, False, False, False, False], x, x, x, *[None] * 6,
        *settings))


@pytest.mark.parametrize("change", [{"return_weights": 1}, {"return_lse": None}])
def test_flags_of_outputs(change):
    with pytest.raises(TypeError, match=f"{next(iter(change))}: got .*, wanted True or False"):
        functional_attention(Q[0], Q[0], Q[0], **change)
