"""The steps of multi-head attention as functions, a file a step, with their gradients and
options. `mha` has them under their names."""
