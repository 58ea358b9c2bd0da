"""PyTorch's attention by its own names, on NumPy arrays: nn.MultiheadAttention and the functionals.

Arguments, mask meanings, layouts and returned values are those of PyTorch 2.13; the attention is
`mha`'s. Mind that PyTorch itself has two mask meanings: True blocks in `MultiheadAttention` and
attends in `scaled_dot_product_attention`. Tensors on the CPU are accepted wherever arrays are.
`functional_attention` alone takes tensors and returns them, with gradients, under mha's own names.

Where this differs from PyTorch on purpose: arrays of another type are cast instead of refused,
errors are ValueError and TypeError, NaN or infinity behind a mask never reaches the output,
dropout draws from `rng`, and is_causal without attn_mask is always an error
(PyTorch's inference fast path forgets to check, and then attends to everything).
"""

from mha.compat.pytorch._forward import multi_head_attention_forward
from mha.compat.pytorch._functional import functional_attention, scaled_dot_product_attention
from mha.compat.pytorch._layer import IncompatibleKeys, MultiheadAttention

__all__ = ["IncompatibleKeys", "MultiheadAttention", "functional_attention",
           "multi_head_attention_forward", "scaled_dot_product_attention"]
