"""What `mha.testing.diagnose` is made of.

aliases.py              the types of what travels between these
signature.py            how someone else's function or layer is called and constructed, by names
torch_modules.py        modules and functions of PyTorch, as if they were of NumPy arrays
weights.py              where a layer keeps its weights, by names
subject.py              the tested callable, and the call of it
model.py                the right computation, run with any step replaced by a mistake
attention_mistakes.py   the mistakes of attention itself: inputs, scores, scale, softmax, values
layer_mistakes.py       the mistakes of a layer: projections, biases, splitting, merging, output
mask_mistakes.py        the mistakes of masks, causal flags and lengths
search.py               which mistakes give the numbers that came
options.py              the options of a signature, switched on one by one
properties.py           what can be said where no known mistake fits
"""
