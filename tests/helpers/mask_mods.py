"""Masks as functions of batch, head, query and key, as flex_attention takes them: one of each kind
that programs use. `ids` are numbers of the tokens: NumPy arrays or tensors."""


def causal(batch, head, query, key):
    return query >= key


def sliding_window(batch, head, query, key):
    return (query - key < 90) & (query >= key)


def prefix_lm(lengths):
    """The first keys of each batch item are visible to all of its queries."""
    return lambda batch, head, query, key: (key < lengths[batch]) | (query >= key)


def documents(ids):
    return lambda batch, head, query, key: (ids[query] == ids[key]) & (query >= key)


def neighbours(width, reach):
    """Tokens of a picture, row by row, that are near each other in both directions (NATTEN)."""
    def mod(batch, head, query, key):
        down = abs(query // width - key // width)
        right = abs(query % width - key % width)
        return (down <= reach) & (right <= reach)

    return mod


def dilated_window(steps, dilation):
    def mod(batch, head, query, key):
        apart = query - key
        return (apart >= 0) & (apart < steps * dilation) & (apart % dilation == 0)

    return mod


def transfusion(firsts, ends):
    """Causal text, and pictures between firsts and ends whose tokens all see each other."""
    def mod(batch, head, query, key):
        result = query >= key
        for first, end in zip(firsts, ends, strict=True):
            inside = (query >= first) & (query < end) & (key >= first) & (key < end)
            result = result | inside
        return result

    return mod


def flamingo(picture_of_text, picture_of_key):
    """Cross attention: a token of text sees the picture in front of it."""
    return lambda batch, head, query, key: picture_of_text[query] == picture_of_key[key]


def shared_question(answers):
    """A question (id 0) and several answers to it, which do not see each other."""
    def mod(batch, head, query, key):
        return (query >= key) & ((answers[key] == 0) | (answers[query] == answers[key]))

    return mod


def by_head(batch, head, query, key):
    return (query - key) % (head + 2) == 0


def every_kind(ids, picture_of_key, prefix_lengths):
    """One of each, by name."""
    return {
        "causal": causal,
        "sliding window": sliding_window,
        "prefix LM": prefix_lm(prefix_lengths),
        "documents": documents(ids),
        "neighbours": neighbours(22, 3),
        "dilated window": dilated_window(40, 3),
        "transfusion": transfusion([20, 150], [90, 300]),
        "flamingo": flamingo(ids, picture_of_key),
        "shared question": shared_question(ids),
        "by head": by_head,
    }
