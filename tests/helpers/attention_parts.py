"""A part of an attention as a call of its own: some of the queries, some of the keys."""

import numpy as np


def part_of_options(options, shape, queries, keys):
    """The options of queries first..end over keys first..end of an attention with these options,
    whose scores have this shape."""
    query_len, key_len = shape[-2:]
    (first_query, end_query), (first_key, end_key) = queries, keys
    part = dict(options)
    for name in ("mask", "bias"):
        if name in options:
            whole = np.broadcast_to(options[name], np.broadcast_shapes(
                np.shape(options[name]), (query_len, key_len)))
            part[name] = whole[..., first_query:end_query, first_key:end_key]
    if "key_lengths" in options:
        lengths = np.asarray(options["key_lengths"])
        if lengths.ndim == len(shape) - 2:
            lengths = lengths[..., first_query:end_query]
        part["key_lengths"] = np.clip(lengths - first_key, 0, end_key - first_key)
    offset = np.asarray(options.get("query_offset", key_len - query_len), object)
    part["query_offset"] = np.asarray(np.clip(offset, -2**60, 2**60), int) + first_query - first_key
    batch, head, query, key = options.get("dropout_offsets", (0, 0, 0, 0))
    part["dropout_offsets"] = (batch, head, query + first_query, key + first_key)
    if first_key:
        part.pop("sinks", None)  # counted once
    return part
