"""One module for each library: prepare(work, arrays, threads) gives {variant: call}; a call
computes the work once and returns the output (and the weights, where asked for)."""
