"""PyTorch's own cases of its attention, from torch.testing, with our layer and functions.

The package has the inputs of its tests of modules and of operators. The test files themselves
(test_multihead_attention.py, test_transformers.py) are in PyTorch's repository alone: it publishes
no sdist. Of them nothing is run here.
"""

import copy
import itertools
import pickle
import warnings

import numpy as np
import pytest
import torch

from mha.compat import pytorch as compat

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says what is not installed that other tests want
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
MODULE = next(info for info in module_db if info.module_cls is torch.nn.MultiheadAttention)
MOVES = 4
OPERATORS = {info.name: info for info in op_db}


def as_tensor(array):
    """Of bfloat16, too, which NumPy's arrays of ml_dtypes hold."""
    if array is None or array.dtype.name != "bfloat16":
        return None if array is None else torch.from_numpy(np.ascontiguousarray(array))
    return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)


def in_double(values):
    """Tensors of floats as float64, what is in lists and dicts too; None and numbers stay."""
    if isinstance(values, torch.Tensor):
        return values.double() if values.is_floating_point() else values
    if isinstance(values, dict):
        return {name: in_double(value) for name, value in values.items()}
    return [in_double(value) for value in values] if isinstance(values, (list, tuple)) else values


def assert_agrees(ours, theirs, exact, *moved):
    """Ours is within a few roundings of PyTorch's result in float64. Some samples have scores in
    the thousands: moved are that result for inputs each larger or smaller by one rounding, which
    say how much roundings matter."""
    if theirs is None:
        assert ours is None
        return
    found = as_tensor(ours)
    assert found.dtype == theirs.dtype and found.shape == theirs.shape
    assert torch.equal(found.isnan(), theirs.isnan())
    eps = torch.finfo(found.dtype).eps
    found, exact, *moved = (tensor.detach().double().nan_to_num() for tensor in (
        found, exact, *moved))
    roundings = 8 if theirs.dtype is torch.float64 else 4  # where PyTorch's has as many of its own
    sizes = [2 * eps * exact.abs().max(), *((one - exact).abs().max() for one in moved)]
    assert (found - exact).abs().max() <= roundings * max(sizes)


def by_a_rounding(values):
    """`in_double`, each number larger or smaller by one rounding of its type."""
    if isinstance(values, torch.Tensor) and values.is_floating_point():
        signs = torch.randint(2, values.shape) * 2 - 1
        return values.double() * (1 + signs * torch.finfo(values.dtype).eps)
    if isinstance(values, dict):
        return {name: by_a_rounding(value) for name, value in values.items()}
    return [by_a_rounding(value) for value in values] if isinstance(values, (list, tuple)) else (
        values)


class AsModule:
    """What gives tensors, for PyTorch's function."""

    def __init__(self, layer):
        self.layer = layer

    def parameters(self):
        return map(as_tensor, self.layer.parameters())

    def __call__(self, *arrays, **options):
        return tuple(map(as_tensor, self.layer(*arrays, **options)))


def modules(dtype, training):
    """(ours, PyTorch's, the sample) of each case."""
    torch.manual_seed(0)
    for sample in MODULE.module_inputs_func(MODULE, "cpu", dtype, False, training):
        arguments, options = sample.constructor_input.args, sample.constructor_input.kwargs
        theirs = torch.nn.MultiheadAttention(*arguments, **options, dtype=dtype).train(training)
        ours = compat.MultiheadAttention(*arguments, **options, dtype=dtype).train(training)
        assert ours.load_state_dict(theirs.state_dict()) == ([], [])
        yield ours, theirs, sample


@each_dtype
@pytest.mark.parametrize("training", [True, False])
def test_module_is_pytorchs(dtype, training):
    """And gives one sequence what it gives a batch of one, by PyTorch's own function for it."""
    count = 0
    for ours, theirs, sample in modules(dtype, training):
        arrays, options = sample.forward_input.args, sample.forward_input.kwargs
        found = ours(*arrays, **options)
        with torch.no_grad():
            wanted = theirs(*arrays, **options)
            double = copy.deepcopy(theirs).double()
            exact = double(*in_double(arrays), **options)
            moved = []
            for _ in range(MOVES):
                double.load_state_dict(by_a_rounding(theirs.state_dict()))
                moved.append(double(*by_a_rounding(arrays), **options))
        for results in zip(found, wanted, exact, *moved, strict=True):
            assert_agrees(*results)
        by_batch = sample.reference_fn(
            AsModule(ours), *arrays, **options)
        for our_array, one in zip(found, by_batch, strict=True):
            assert as_tensor(our_array).equal(one) or one.isnan().any()
        count += 1
    assert count >= 64


@each_dtype
def test_modules_are_copied_pickled_and_saved(dtype):
    for ours, theirs, sample in itertools.islice(modules(dtype, False), 0, None, 7):
        arrays, options = sample.forward_input.args, sample.forward_input.kwargs
        wanted = ours(*arrays, **options)[0]
        for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            np.testing.assert_array_equal(again(*arrays, **options)[0], wanted)
        back = {name: as_tensor(array) for name, array in ours.state_dict().items()}
        assert list(back) == list(theirs.state_dict())
        for name, tensor in theirs.state_dict().items():
            assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)
        assert repr(ours).startswith("MultiheadAttention(")


def compare(name, dtype, drops):
    """The results of the function for all samples but those that drop weights: by other random
    numbers. tests/compat has what those must fulfil."""
    torch.manual_seed(0)
    found = list(OPERATORS[f"nn.functional.{name}"].sample_inputs("cpu", dtype))
    compared = 0
    for sample in found:
        if drops(sample):
            continue
        arguments, theirs = (sample.input, *sample.args), getattr(torch.nn.functional, name)
        results = [getattr(compat, name)(*arguments, **sample.kwargs),
                   theirs(*arguments, **sample.kwargs),
                   theirs(*in_double(arguments), **in_double(sample.kwargs))]
        for _ in range(MOVES):
            results.append(theirs(*by_a_rounding(arguments), **by_a_rounding(sample.kwargs)))
        for result in zip(*(result if isinstance(result, tuple) else (result,)
                            for result in results), strict=True):
            assert_agrees(*result)
        compared += 1
    assert compared > len(found) / 3


@each_dtype
def test_scaled_dot_product_attention_is_pytorchs(dtype):
    compare("scaled_dot_product_attention", dtype, lambda sample: sample.kwargs["dropout_p"])


@each_dtype
def test_multi_head_attention_forward_is_pytorchs(dtype):
    compare("multi_head_attention_forward", dtype,
            lambda sample: sample.kwargs["training"] and sample.args[9])
