"""What a BlockMask holds, and how it is made: blocks of 128 x 128 pairs, by rows of blocks.

Every mask is assembled from the blocks that may be visible, each of a kind: one block of a kind is
evaluated as bools, and the others of its kind are equal to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BLOCK = 128  # queries and keys of a block
FULL, HIDDEN = -1, -2  # contents of blocks without bits
AT_ONCE = 64  # blocks that are bools at a time: 1 MB
MOST_PAIRS = 1 << 22  # candidates at a time


class Shape(NamedTuple):
    """What a mask counts as: an array of this shape."""

    batch: int
    heads: int
    query_len: int
    key_len: int

    @property
    def rows(self) -> int:
        """Of blocks."""
        return -(-self.query_len // BLOCK)

    @property
    def columns(self) -> int:
        """Of blocks."""
        return -(-self.key_len // BLOCK)

    def block_numbers(self, group: Array, row: Array, column: Array) -> Array:
        """Each block's number in the order of a mask: by group, row and column."""
        return (group * self.rows + row) * self.columns + column

    def places_of(self, numbers: Array) -> tuple[Array, Array, Array]:
        """group, row, column of `block_numbers`."""
        place, column = np.divmod(numbers, max(self.columns, 1))
        group, row = np.divmod(place, max(self.rows, 1))
        return group, row, column

    def broadcasts_to(self, other: tuple[int, int, int, int]) -> bool:
        """Whether batch and heads are 1 or the other's, and the lengths the same."""
        return self[2:] == other[2:] and all(
            size in (1, wanted) for size, wanted in zip(self[:2], other[:2], strict=True))


class Blocks(NamedTuple):
    """The blocks of a mask that are not hidden. Row r of blocks of group g, the head of a batch
    item, has the entries starts[g * rows + r] to starts[g * rows + r + 1]. Equal masks have equal
    arrays."""

    shape: Shape
    starts: Array    # int64 (batch * heads * rows + 1,)
    columns: Array   # int32 (entries,): of blocks, ascending in a row
    contents: Array  # int32 (entries,): FULL, or which of the patterns
    patterns: Array  # uint8 (count, BLOCK keys, BLOCK // 8): bit q % 8 of byte q // 8 is query q

    def places(self) -> tuple[Array, Array]:
        """(group, row) of each entry."""
        rows = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        return np.divmod(rows, max(self.shape.rows, 1))

    def numbers(self) -> Array:
        """The `block_numbers` of the entries, ascending."""
        return self.shape.block_numbers(*self.places(), self.columns)


class Candidates(NamedTuple):
    """Blocks that may be visible, each once, in any order. Those of one kind are equal; of kind
    FULL they are known to be."""

    group: Array
    row: Array
    column: Array
    kind: Array


Evaluate = Callable[[Array], Array]  # which of the candidates -> bools (n, BLOCK, BLOCK)


def assemble(shape: Shape, candidates: Candidates, evaluate: Evaluate) -> Blocks:
    """Evaluates one block of every kind. What lies beyond the lengths is cut off."""
    unknown = np.flatnonzero(candidates.kind != FULL)
    last_row = candidates.row[unknown] == shape.rows - 1
    last_column = candidates.column[unknown] == shape.columns - 1
    kinds = candidates.kind[unknown] * 4 + 2 * last_row + last_column  # the last ones may be cut
    _, firsts, kind = np.unique(kinds, return_index=True, return_inverse=True)
    contents = np.full(len(firsts), HIDDEN)
    numbers: dict[bytes, int] = {}
    for begin in range(0, len(firsts), AT_ONCE):
        which = unknown[firsts[begin:begin + AT_ONCE]]
        bools = np.broadcast_to(evaluate(which), (len(which), BLOCK, BLOCK))
        contents[begin:begin + AT_ONCE] = _contents(
            bools, _lengths_of(candidates.row[which], shape.query_len),
            _lengths_of(candidates.column[which], shape.key_len), numbers)
    names = sorted(numbers)  # equal masks number their patterns alike
    order = np.empty(len(names), np.int64)
    order[[numbers[name] for name in names]] = np.arange(len(names))
    has_bits = contents >= 0
    contents[has_bits] = order[contents[has_bits]]
    patterns = np.frombuffer(b"".join(names), np.uint8).reshape(-1, BLOCK, BLOCK // 8)
    found = np.full(len(candidates.kind), FULL, np.int32)
    found[unknown] = contents[kind.reshape(-1)]
    return _in_order(shape, candidates, found, patterns)


def _lengths_of(places: Array, length: int) -> Array:
    """How many queries or keys the blocks at these places have."""
    return np.minimum(length - places * BLOCK, BLOCK)


def _contents(bools: Array, queries: Array, keys: Array, numbers: dict[bytes, int]) -> list[int]:
    """Of blocks (n, BLOCK, BLOCK), of which so many queries and keys count; new patterns are
    added to `numbers`."""
    index = np.arange(BLOCK)
    counted = (index < queries[:, None])[:, :, None] & (index < keys[:, None])[:, None, :]
    visible = bools & counted
    packed = np.packbits(visible.swapaxes(1, 2), axis=-1, bitorder="little")
    seen, pairs = visible.sum(axis=(1, 2)), queries * keys
    return [HIDDEN if seen[i] == 0 else FULL if seen[i] == pairs[i]
            else numbers.setdefault(packed[i].tobytes(), len(numbers)) for i in range(len(bools))]


def _in_order(shape: Shape, candidates: Candidates, contents: Array, patterns: Array) -> Blocks:
    """Without the hidden ones."""
    shown = contents != HIDDEN
    row = (candidates.group * shape.rows + candidates.row)[shown]
    columns, contents = candidates.column[shown].astype(np.int32), contents[shown]
    counts = np.bincount(row, minlength=shape.batch * shape.heads * shape.rows)
    keys = row * max(shape.columns, 1) + columns
    if (keys[1:] < keys[:-1]).any():
        order = np.argsort(keys)
        columns, contents = columns[order], contents[order]
    return Blocks(shape, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), columns,
                  contents, patterns)


def as_bools(contents: Array, patterns: Array) -> Array:
    """(n,) contents -> (n, BLOCK queries, BLOCK keys)."""
    found = np.zeros((len(contents), BLOCK, BLOCK), bool)
    found[contents == FULL] = True
    has_bits = contents >= 0
    by_key = np.unpackbits(patterns[contents[has_bits]], axis=-1, bitorder="little")
    found[has_bits] = by_key.swapaxes(1, 2)
    return found


def numbered(rows: Array) -> Array:
    """(n, width) -> a number for each row, equal for equal ones."""
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows], np.int64)


def every_block(shape: Shape) -> tuple[Array, Array, Array]:
    """group, row, column of all of them."""
    count = shape.batch * shape.heads, shape.rows, shape.columns
    group, row, column = (axis.reshape(-1) for axis in np.indices(count))
    return group, row, column


def runs(begin: Array, end: Array) -> tuple[Array, Array]:
    """All of begin[i] <= n < end[i]: which i, and n."""
    counts = np.maximum(end - begin, 0)
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + (
        begin[which])


def from_intervals(shape: Shape, begin: Array, end: Array) -> Blocks:
    """Query i of group g sees the keys begin[g, i] to end[g, i]."""
    groups = shape.batch * shape.heads
    empty = end <= begin
    begin, end = np.where(empty, shape.key_len, begin), np.where(empty, 0, end)
    padding = ((0, 0), (0, shape.rows * BLOCK - shape.query_len))
    by_block = (groups * shape.rows, BLOCK)
    begin, end = (np.pad(side, padding, mode="edge").reshape(by_block) if side.size
                  else np.zeros(by_block, np.int64) for side in (begin, end))
    first = begin.min(axis=1, initial=shape.key_len) // BLOCK
    place, column = runs(first, -(-end.max(axis=1, initial=0) // BLOCK))
    key = column * BLOCK
    is_full = ((begin.max(axis=1, initial=0)[place] <= key)
               & (end.min(axis=1, initial=shape.key_len)[place]
                  >= np.minimum(key + BLOCK, shape.key_len)))
    kind = np.full(len(place), FULL)
    mixed = np.flatnonzero(~is_full)
    sides = np.empty((len(mixed), 2, BLOCK), np.uint8)
    for side, found in enumerate((begin, end)):
        sides[:, side] = np.clip(found[place[mixed]] - key[mixed, None], 0, BLOCK)
    kind[mixed] = numbered(sides)

    def evaluate(which: Array) -> Array:
        index = key[which, None, None] + np.arange(BLOCK)
        rows = place[which]
        return (begin[rows][:, :, None] <= index) & (index < end[rows][:, :, None])

    group, row = np.divmod(place, max(shape.rows, 1))
    return assemble(shape, Candidates(group, row, column, kind), evaluate)


def from_products(shape: Shape, group: Array, row: Array, column: Array, queries: Array,
                  keys: Array, evaluate: Callable[[Array, Array], Array]) -> Blocks:
    """Blocks whose pairs depend on what their queries and their keys are alone: (groups * rows,
    BLOCK) and (groups * columns, BLOCK), which evaluate takes, (n, BLOCK) each."""
    query_kind = numbered(queries)
    key_kind = query_kind if keys is queries else numbered(keys)
    query_place, key_place = group * shape.rows + row, group * shape.columns + column
    kind = query_kind[query_place] * max(len(keys), 1) + key_kind[key_place]
    return assemble(shape, Candidates(group, row, column, kind),
                    lambda which: evaluate(queries[query_place[which]], keys[key_place[which]]))


def blocks_that_share_ids(queries: Array, keys: Array) -> tuple[Array, Array]:
    """Pairs (row, column) of blocks of ids, (rows, BLOCK) and (columns, BLOCK), that have an id in
    common which is not negative."""
    begun = []
    for side in (queries, keys):
        begins = side >= 0  # a run of equal ids counts once
        begins[:, 1:] &= side[:, 1:] != side[:, :-1]
        block, at = np.nonzero(begins)
        begun.append((block, side[block, at]))
    ids = np.unique(np.concatenate([name for _, name in begun]))
    places = []
    for block, name in begun:  # the blocks of each id, side by side
        blocks = max(len(queries), len(keys), 1)
        name, block = np.divmod(np.unique(np.searchsorted(ids, name) * blocks + block), blocks)
        places.append((block, np.searchsorted(name, np.arange(len(ids) + 1))))
    (row, row_starts), (column, column_starts) = places
    counts = np.diff(row_starts) * np.diff(column_starts)
    found = np.zeros(0, np.int64)
    begin = 0
    while begin < len(ids):  # so many ids that their pairs fit in memory
        end = begin + max(int(np.searchsorted(np.cumsum(counts[begin:]), MOST_PAIRS)), 1)
        which, at = runs(np.zeros(end - begin, np.int64), counts[begin:end])
        which += begin
        width = np.diff(column_starts)[which]
        pairs = (row[row_starts[which] + at // width] * len(keys)
                 + column[column_starts[which] + at % width])
        found = np.union1d(found, pairs)
        begin = end
    return np.divmod(found, max(len(keys), 1))


def broadcast(blocks: Blocks, shape: Shape) -> Blocks:
    """Of more groups: batch items and heads that were one."""
    if blocks.shape == shape:
        return blocks
    old = blocks.shape.batch * blocks.shape.heads
    return of_groups(blocks, np.broadcast_to(np.arange(old).reshape(blocks.shape[:2]), shape[:2]))


def of_groups(blocks: Blocks, groups: Array) -> Blocks:
    """Of these of its groups alone, (batch, heads)."""
    old = blocks.shape.batch * blocks.shape.heads
    shape = blocks.shape._replace(batch=groups.shape[0], heads=groups.shape[1])
    starts, ends = (side.reshape(old, shape.rows)[groups.reshape(-1)].reshape(-1)
                    for side in (blocks.starts[:-1], blocks.starts[1:]))
    _, entry = runs(starts, ends)
    return Blocks(shape, np.concatenate([[0], np.cumsum(ends - starts)]),
                  blocks.columns[entry], blocks.contents[entry], blocks.patterns)


def contents_at(blocks: Blocks, keys: Array) -> Array:
    """The contents of blocks by `Blocks.keys`; HIDDEN where there is none."""
    own = blocks.numbers()
    at = np.searchsorted(own, keys)
    found = np.full(len(keys), HIDDEN, np.int64)
    there = np.flatnonzero(at < len(own))
    there = there[own[at[there]] == keys[there]]
    found[there] = blocks.contents[at[there]]
    return found


def combine(a: Blocks, b: Blocks, operation: Callable[[Array, Array], Array],
            choose: Callable[[Array, Array], Array]) -> Blocks:
    """Pair by pair; both of one shape. `choose` says which blocks the result may have, by the
    numbers of a's and of b's: np.intersect1d or np.union1d."""
    shape = a.shape
    both = choose(a.numbers(), b.numbers())
    of_a, of_b = contents_at(a, both), contents_at(b, both)
    kind = (of_a - HIDDEN) * (len(b.patterns) - HIDDEN) + (of_b - HIDDEN)
    return assemble(shape, Candidates(*shape.places_of(both), kind), lambda which: operation(
        as_bools(of_a[which], a.patterns), as_bools(of_b[which], b.patterns)))


def invert(blocks: Blocks) -> Blocks:
    places = every_block(blocks.shape)
    contents = contents_at(blocks, blocks.shape.block_numbers(*places))
    return assemble(blocks.shape, Candidates(*places, contents - HIDDEN),
                    lambda which: ~as_bools(contents[which], blocks.patterns))


def part(blocks: Blocks, queries: tuple[int, int], keys: tuple[int, int]) -> Blocks:
    """Of the queries and keys from begin to end >= begin; a new block lies on up to four old ones.
    """
    old, (first_query, end_query), (first_key, end_key) = blocks.shape, queries, keys
    shape = Shape(old.batch, old.heads, end_query - first_query, end_key - first_key)
    group, row = blocks.places()
    row_shift, column_shift = first_query // BLOCK, first_key // BLOCK
    found = [np.zeros(0, np.int64)]
    for down in (0, 1):  # new blocks that an old one reaches into
        for right in (0, 1):
            new_row, new_column = row - row_shift - down, blocks.columns - column_shift - right
            inside = ((new_row >= 0) & (new_row < shape.rows)
                      & (new_column >= 0) & (new_column < shape.columns))
            found.append(shape.block_numbers(group, new_row, new_column)[inside])
    group, row, column = shape.places_of(np.unique(np.concatenate(found)))
    corners = np.full((len(group), 2, 2), HIDDEN)
    for down in (0, 1):
        for right in (0, 1):
            old_row, old_column = row + row_shift + down, column + column_shift + right
            there = np.flatnonzero((old_row < old.rows) & (old_column < old.columns))
            corners[there, down, right] = contents_at(
                blocks, old.block_numbers(group, old_row, old_column)[there])
    query, key = first_query % BLOCK, first_key % BLOCK

    def evaluate(which: Array) -> Array:
        four = as_bools(corners[which].reshape(-1), blocks.patterns)
        four = four.reshape(-1, 2, 2, BLOCK, BLOCK).swapaxes(2, 3)
        return four.reshape(-1, 2 * BLOCK, 2 * BLOCK)[:, query:query + BLOCK, key:key + BLOCK]

    kind = numbered(corners.reshape(-1, 4))
    return assemble(shape, Candidates(group, row, column, kind), evaluate)


def to_dense(blocks: Blocks) -> Array:
    """(batch, heads, query_len, key_len)."""
    shape = blocks.shape
    dense = np.zeros((shape.batch * shape.heads, shape.query_len, shape.key_len), bool)
    group, row = blocks.places()
    for begin in range(0, len(group), AT_ONCE):
        some = slice(begin, begin + AT_ONCE)
        bools = as_bools(blocks.contents[some], blocks.patterns)
        for i, g, r, c in zip(range(AT_ONCE), group[some], row[some], blocks.columns[some]):
            to = dense[g, r * BLOCK:(r + 1) * BLOCK, c * BLOCK:(c + 1) * BLOCK]
            to[...] = bools[i, :to.shape[0], :to.shape[1]]
    return dense.reshape(shape)


def visible_of(blocks: Blocks) -> Array:
    """How many pairs of each entry are visible."""
    _, row = blocks.places()
    pairs = (_lengths_of(row, blocks.shape.query_len).astype(np.int64)
             * _lengths_of(blocks.columns.astype(np.int64), blocks.shape.key_len))
    seen = np.array([np.unpackbits(pattern).sum(dtype=np.int64) for pattern in blocks.patterns],
                    np.int64)
    has_bits = blocks.contents >= 0
    pairs[has_bits] = seen[blocks.contents[has_bits]]
    return pairs


def padded(sides: Array, blocks: int, padding: Any) -> Array:
    """(groups, len) -> (groups * blocks, BLOCK)."""
    room = blocks * BLOCK - sides.shape[1]
    return np.pad(sides, ((0, 0), (0, room)), constant_values=padding).reshape(-1, BLOCK)


def joined(found: Sequence[tuple[Array, ...]]) -> tuple[Array, Array, Array]:
    empty = np.zeros(0, np.int64)
    group, row, column = (np.concatenate([empty, *arrays]) for arrays in (
        zip(*found, strict=True) if found else ((), (), ())))
    return group, row, column


def shares(blocks: Blocks, tall: int, wide: int) -> Array:
    """How many of the pairs are visible to the first batch item and head, from 0 to 1: at most
    (tall, wide) cells of them, queries and keys cut as equally as can be."""
    few_pairs = 1 << 20
    shape = blocks.shape._replace(batch=1, heads=1)
    if 0 in blocks.shape:
        return np.zeros((0, 0))
    entries = int(blocks.starts[shape.rows])
    first = blocks._replace(shape=shape, starts=blocks.starts[:shape.rows + 1],
                            columns=blocks.columns[:entries], contents=blocks.contents[:entries])
    if shape.query_len * shape.key_len <= few_pairs:
        row, column = np.nonzero(to_dense(first)[0, 0])
        seen, sizes = np.ones(len(row)), (np.ones(shape.query_len), np.ones(shape.key_len))
    else:
        _, row = first.places()
        column, seen = first.columns.astype(np.int64), visible_of(first)
        sizes = (_lengths_of(np.arange(shape.rows), shape.query_len),
                 _lengths_of(np.arange(shape.columns), shape.key_len))
    cells = [np.arange(len(side)) * min(len(side), most) // len(side)
             for side, most in zip(sizes, (tall, wide), strict=True)]
    pairs = np.outer(*(np.bincount(cell, side) for cell, side in zip(cells, sizes, strict=True)))
    visible = np.zeros(pairs.shape)
    np.add.at(visible, (cells[0][row], cells[1][column]), seen)
    return visible / pairs


def picture(blocks: Blocks) -> list[str]:
    """At most 16 lines of at most 32 letters: # visible, + most of it, - some, . hidden."""
    found = shares(blocks, 16, 32)
    letters = np.where(found == 0, ".", np.where(found == 1, "#", np.where(found >= 0.5, "+", "-")))
    return ["".join(line) for line in letters]
