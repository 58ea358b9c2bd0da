"""flash-attention by its own names, on NumPy arrays and on tensors on the CPU, with gradients.

    from mha.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
    from mha.compat.flash_attn.bert_padding import pad_input, unpad_input

Arguments, layouts and returned values are those of flash-attn 2.8; the attention is `mha`'s, on the
CPU. It takes float32 and float64 too, and any head_dim.

Where this differs from flash-attention on purpose: a query that sees no key has a log-sum-exp of
-inf, not inf; with causal and alibi_slopes the log-sum-exp is that of the scores as documented,
where their kernel adds slope * (i + seqlen_k - seqlen_q); it has a gradient; a window is what
window_size says, however wide; errors are ValueError and TypeError, before anything is written;
dropout draws from `rng`; with a block_table there are dropout and gradients, and pages may have any
length.
"""

from mha.compat.flash_attn import bert_padding, flash_attn_interface
from mha.compat.flash_attn.flash_attn_interface import *  # noqa: F403

__version__ = "2.8.3"  # of flash-attn, whose functions these are

__all__ = ["bert_padding", "flash_attn_interface"]
__all__ += flash_attn_interface.__all__
