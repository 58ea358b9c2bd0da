"""Masks of long sequences by blocks: what is hidden takes no memory and no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mha import _core
from mha._base.arguments import (
    as_array,
    as_exact_int_array,
    as_int,
    as_size,
    check_kind,
    no_memory,
)
from mha._base.keywords import checks_keywords
from mha._functions import mask_blocks
from mha._functions.mask_blocks import BLOCK, Blocks, Candidates, Shape
from mha._functions.options import Window, as_sides

__all__ = ["BlockMask"]

Array = NDArray[Any]
MaskFunction = Callable[[Array, Array, Array, Array], ArrayLike]
FARTHEST = 1 << 60  # what offsets and windows beyond count as


class BlockMask:
    """Which query sees which key, by blocks of 128 x 128 pairs: a `mask=` for long sequences.

    It counts as a bool array (batch, heads, query_len, key_len), True = attend, whose batch and
    heads are 1 or those of the call; several batch axes count flattened. Blocks in which nothing is
    visible are absent, blocks in which all is visible carry nothing, mixed ones carry bits, and
    equal ones are stored once. Every function that takes `mask=` gives the bits of the dense mask.
    Hidden blocks take no time.

    Make one with `from_function`, `from_dense`, `causal`, `sliding_window`, `from_lengths`,
    `documents`, `prefix`, `global_tokens` or `strided`, and join them with &, | and ~. A slice
    mask[q0:q1, k0:k1] is the mask of those queries and keys.

    Attributes
    ----------
    batch, heads, query_len, key_len : int
    nbytes : int
        Bytes of memory that it takes.
    density : float
        Visible pairs / pairs; 0 without pairs.

    Masks are immutable. Equal ones compare equal; the hash is that of the object.

    Raises
    ------
    TypeError: a call of the class itself, or a BlockMask where an array is wanted. ValueError:
    operators on unequal lengths, batches or heads.

    Source: Dong et al. 2024, "Flex Attention", section 4, whose blocks are of this size.

    >>> mask = mha.BlockMask.causal(1000) & mha.BlockMask.documents([0] * 400 + [1] * 600)
    >>> round(mask.density, 3), mask.to_dense().shape
    (0.261, (1, 1, 1000, 1000))
    """

    __module__ = "mha"  # where users import it from, and so do pickles
    __slots__ = ("__weakref__", "_core_record")
    if TYPE_CHECKING:
        _core_record: tuple[int, int, int, int, bytes, bytes, bytes, bytes]  # as the core takes it
    __hash__ = object.__hash__

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        raise TypeError("BlockMask: got a call, wanted one of its constructors: from_dense(mask),"
                        " from_function, causal, sliding_window, from_lengths, documents, prefix,"
                        " global_tokens or strided")

    @classmethod
    def _of(cls, blocks: Blocks) -> BlockMask:
        arrays = (blocks.starts, blocks.columns, blocks.contents, blocks.patterns)
        return cls._holding((*blocks.shape, *(array.tobytes() for array in arrays)))

    @classmethod
    @checks_keywords
    def from_function(cls, function: MaskFunction, query_len: int, key_len: int | None = None, *,
                      batch: int = 1, heads: int = 1, within: BlockMask | None = None) -> BlockMask:
        """The pairs for which function(batch, head, query, key) is True.

        Parameters
        ----------
        function : callable of four int64 arrays that broadcast against each other
            Returns bools of any shape that broadcasts to theirs, True = attend: flex_attention's
            mask_mod. It is called on some blocks at a time, never on all pairs; without `within`
            on all blocks, which takes minutes beyond 100,000 tokens.
        query_len, key_len : int
            key_len defaults to query_len.
        batch, heads : int
            Over how many of them the function goes. With 1, all share the mask, and the function is
            asked for item or head 0 alone.
        within : BlockMask, optional
            The function is called on its blocks alone, and the mask is at most it.

        Raises
        ------
        ValueError: a negative length, a result of another shape, a `within` of other lengths.
        TypeError: what is not callable, results that are not bool.

        Source: Dong et al. 2024, "Flex Attention", section 3.2.

        >>> def band(batch, head, query, key):
        ...     return abs(query - key) <= 1
        >>> mha.BlockMask.from_function(band, 3).to_dense()[0, 0].astype(int).tolist()
        [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
        """
        shape = _shape(batch, heads, query_len, key_len)
        if not callable(function):
            raise TypeError(f"function: got {type(function).__name__}, wanted a callable (batch,"
                            " head, query, key)")
        if within is None:
            group, row, column = mask_blocks.every_block(shape)
            limits = None
        else:
            limits = _joined(shape, _blocks_of(within, "within"), "within")
            group, row = limits.places()
            column = limits.columns.astype(np.int64)

        def evaluate(which: Array) -> Array:
            found = _evaluated(function, shape, group[which], row[which], column[which])
            if limits is None:
                return found
            return found & mask_blocks.as_bools(limits.contents[which], limits.patterns)

        candidates = Candidates(group, row, column, np.arange(len(group)))
        return cls._of(mask_blocks.assemble(shape, candidates, evaluate))

    @classmethod
    @checks_keywords
    def from_dense(cls, mask: ArrayLike) -> BlockMask:
        """Of a bool array (query_len, key_len) or (batch or 1, heads or 1, query_len, key_len),
        True = attend.

        Raises
        ------
        ValueError: other than two or four axes. TypeError: other than bool.

        Source: Dong et al. 2024, "Flex Attention", section 4.

        >>> mha.BlockMask.from_dense([[True, False], [True, True]]).density
        0.75
        """
        dense = as_array(mask, "mask")
        check_kind(dense, "mask", "b", "bool with True = attend")
        if dense.ndim not in (2, 4):
            either = ": three axes could be batch or heads" if dense.ndim == 3 else ""
            raise ValueError(f"mask: got shape {dense.shape}, wanted (query_len, key_len) or"
                             f" (batch, heads, query_len, key_len){either}")
        shape = Shape(*(1,) * (4 - dense.ndim), *dense.shape)
        dense = dense.reshape(shape.batch * shape.heads, shape.query_len, shape.key_len)
        group, row, column = mask_blocks.every_block(shape)

        def evaluate(which: Array) -> Array:
            bools = np.zeros((len(which), BLOCK, BLOCK), bool)
            for i, entry in enumerate(which):
                q, k = row[entry] * BLOCK, column[entry] * BLOCK
                block = dense[group[entry], q:q + BLOCK, k:k + BLOCK]
                bools[i, :block.shape[0], :block.shape[1]] = block
            return bools

        candidates = Candidates(group, row, column, np.arange(len(group)))
        return cls._of(mask_blocks.assemble(shape, candidates, evaluate))

    @classmethod
    @checks_keywords
    def causal(cls, query_len: int, key_len: int | None = None, *,
               query_offset: int | None = None) -> BlockMask:
        """(1, 1, query_len, key_len): key j is visible to query i iff j <= i + query_offset.

        key_len defaults to query_len, query_offset to key_len - query_len.

        Raises
        ------
        ValueError: a negative length. TypeError: a length or offset that is not an int.

        Source: Vaswani et al. 2017, section 3.2.3.

        >>> mha.BlockMask.causal(2).to_dense()[0, 0].tolist()
        [[True, False], [True, True]]
        """
        return cls._window(query_len, key_len, (None, 0), query_offset)

    @classmethod
    @checks_keywords
    def sliding_window(cls, query_len: int, key_len: int | None = None, *, window: Window | None,
                       query_offset: int | None = None) -> BlockMask:
        """(1, 1, query_len, key_len): i + query_offset - left <= j <= i + query_offset + right.

        window is (left, right); None leaves a side open.

        Raises
        ------
        ValueError: a negative length or side, no pair. TypeError: one that is not an int.

        Source: Beltagy et al. 2020, "Longformer", section 3.1.

        >>> mha.BlockMask.sliding_window(3, window=(1, 0)).to_dense()[0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        """
        return cls._window(query_len, key_len, window, query_offset)

    @classmethod
    def _window(cls, query_len: int, key_len: int | None, window: Window | None,
                query_offset: int | None) -> BlockMask:
        shape = _shape(1, 1, query_len, key_len)
        positions = np.arange(shape.query_len) + _offset(shape, query_offset)
        left, right = as_sides(window)
        begin, end = np.zeros_like(positions), np.full_like(positions, shape.key_len)
        if left is not None:
            begin = np.clip(positions - min(left, FARTHEST), 0, shape.key_len)
        if right is not None:
            end = np.clip(positions + min(right, FARTHEST) + 1, 0, shape.key_len)
        return cls._of(mask_blocks.from_intervals(shape, begin[None], end[None]))

    @classmethod
    @checks_keywords
    def from_lengths(cls, key_lengths: ArrayLike, query_len: int, key_len: int) -> BlockMask:
        """Key j is visible iff j < length: padding at the end.

        Parameters
        ----------
        key_lengths : ints (batch,) or (batch, query_len), in [0, key_len]
        query_len, key_len : int

        Raises
        ------
        ValueError: a length outside [0, key_len], or another shape. TypeError: no integers.

        Source: Dive into Deep Learning, "Attention Scoring Functions": the masked softmax.

        >>> mha.BlockMask.from_lengths([1, 2], 1, 2).to_dense()[:, 0].tolist()
        [[[True, False]], [[True, True]]]
        """
        lengths = as_exact_int_array(key_lengths, "key_lengths")
        if lengths.ndim not in (1, 2):
            raise ValueError(f"key_lengths: got shape {lengths.shape}, wanted (batch,) or (batch,"
                             " query_len)")
        shape = _shape(len(lengths), 1, query_len, key_len, least_batch=0)
        if lengths.ndim == 2 and lengths.shape[1] != shape.query_len:
            raise ValueError(f"key_lengths: got shape {lengths.shape}, wanted ({shape.batch},"
                             f" {shape.query_len})")
        if lengths.size and not 0 <= lengths.min() <= lengths.max() <= shape.key_len:
            raise ValueError(f"key_lengths: got values from {lengths.min()} to {lengths.max()},"
                             f" wanted them in [0, {shape.key_len}], the key length")
        end = np.broadcast_to(lengths if lengths.ndim == 2 else lengths[:, None],
                              (shape.batch, shape.query_len))
        return cls._of(mask_blocks.from_intervals(shape, np.zeros_like(end), end))

    @classmethod
    @checks_keywords
    def documents(cls, query_ids: ArrayLike, key_ids: ArrayLike | None = None) -> BlockMask:
        """Query and key see each other iff their ids are equal and not negative.

        Parameters
        ----------
        query_ids, key_ids : ints (len,) or (batch, len)
            The document that each token belongs to; negative: padding. key_ids defaults to
            query_ids.

        Raises
        ------
        ValueError: other shapes, or batches that differ. TypeError: no integers.

        Source: Krell et al. 2021, "Efficient Sequence Packing", section 3.

        >>> mha.BlockMask.documents([0, 0, 1]).to_dense()[0, 0].astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
        """
        queries = _ids(query_ids, "query_ids")
        keys = queries if key_ids is None else _ids(key_ids, "key_ids")
        if len(queries) != len(keys):
            raise ValueError(f"key_ids: got a batch of {len(keys)}, wanted {len(queries)} as of"
                             " query_ids")
        shape = Shape(len(queries), 1, queries.shape[1], keys.shape[1])
        queries = mask_blocks.padded(queries, shape.rows, -1)
        keys = queries if key_ids is None else mask_blocks.padded(keys, shape.columns, -1)
        found = []
        for item in range(shape.batch):
            row, column = mask_blocks.blocks_that_share_ids(
                queries[item * shape.rows:(item + 1) * shape.rows],
                keys[item * shape.columns:(item + 1) * shape.columns])
            found.append((np.full(len(row), item), row, column))
        group, row, column = mask_blocks.joined(found)
        return cls._of(mask_blocks.from_products(
            shape, group, row, column, queries, keys, lambda query, key: (
                (query[:, :, None] == key[:, None, :]) & (query >= 0)[:, :, None])))

    @classmethod
    @checks_keywords
    def prefix(cls, prefix_lengths: ArrayLike, query_len: int) -> BlockMask:
        """Causal, but the first prefix_lengths[b] keys are visible to all queries.

        Parameters
        ----------
        prefix_lengths : int or ints (batch,), in [0, query_len]
        query_len : int
            Of the keys too.

        Raises
        ------
        ValueError: a length outside [0, query_len], or another shape. TypeError: no integers.

        Source: Raffel et al. 2020, section 3.2.1: the prefix LM.

        >>> mha.BlockMask.prefix(2, 3).to_dense()[0, 0].astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
        """
        lengths = np.atleast_1d(as_exact_int_array(prefix_lengths, "prefix_lengths"))
        if lengths.ndim != 1:
            raise ValueError(f"prefix_lengths: got shape {lengths.shape}, wanted (batch,)")
        shape = _shape(len(lengths), 1, query_len, None, least_batch=0)
        if lengths.size and not 0 <= lengths.min() <= lengths.max() <= shape.query_len:
            raise ValueError(f"prefix_lengths: got values from {lengths.min()} to {lengths.max()},"
                             f" wanted them in [0, {shape.query_len}], the length")
        end = np.maximum(np.arange(1, shape.query_len + 1), lengths[:, None])
        return cls._of(mask_blocks.from_intervals(shape, np.zeros_like(end), end))

    @classmethod
    @checks_keywords
    def global_tokens(cls, indices: ArrayLike, query_len: int, key_len: int | None = None, *,
                      query_offset: int | None = None) -> BlockMask:
        """A query at one of these positions sees every key, and every query sees these keys.

        Parameters
        ----------
        indices : ints (n,)
            Positions among the keys, the same for all sequences.
        query_len, key_len, query_offset : as in `causal`
            Query i stands at i + query_offset.

        Raises
        ------
        ValueError: an index outside [0, key_len), another shape. TypeError: no integers.

        Source: Beltagy et al. 2020, "Longformer", section 3.1: global attention.

        >>> mha.BlockMask.global_tokens([0], 3).to_dense()[0, 0].astype(int).tolist()
        [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
        """
        shape = _shape(1, 1, query_len, key_len)
        given = as_exact_int_array(indices, "indices")
        if given.ndim != 1:
            raise ValueError(f"indices: got shape {given.shape}, wanted (n,)")
        if given.size and not 0 <= given.min() <= given.max() < shape.key_len:
            raise ValueError(f"indices: got values from {given.min()} to {given.max()}, wanted them"
                             f" in [0, {shape.key_len}), the positions of keys")
        keys = np.zeros((1, shape.key_len), bool)
        keys[0, given] = True
        queries = np.zeros((1, shape.query_len), bool)
        places = given - _offset(shape, query_offset)
        queries[0, places[(places >= 0) & (places < shape.query_len)]] = True
        queries = mask_blocks.padded(queries, shape.rows, False)
        keys = mask_blocks.padded(keys, shape.columns, False)
        rows, columns = np.flatnonzero(queries.any(axis=1)), np.flatnonzero(keys.any(axis=1))
        of_rows = np.repeat(rows, shape.columns), np.tile(np.arange(shape.columns), len(rows))
        of_columns = np.repeat(np.arange(shape.rows), len(columns)), np.tile(columns, shape.rows)
        pairs = [row * shape.columns + column for row, column in (of_rows, of_columns)]
        row, column = np.divmod(np.union1d(*pairs), max(shape.columns, 1))
        return cls._of(mask_blocks.from_products(
            shape, np.zeros_like(row), row, column, queries, keys,
            lambda query, key: query[:, :, None] | key[:, None, :]))

    @classmethod
    @checks_keywords
    def strided(cls, query_len: int, key_len: int | None = None, *, stride: int,
                query_offset: int | None = None) -> BlockMask:
        """(1, 1, query_len, key_len): i + query_offset - j is a multiple of stride.

        Raises
        ------
        ValueError: a negative length, a stride below 1. TypeError: one that is not an int.

        Source: Child et al. 2019, "Generating Long Sequences with Sparse Transformers", section
        4.2.

        >>> mha.BlockMask.strided(3, stride=2).to_dense()[0, 0].astype(int).tolist()
        [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
        """
        shape = _shape(1, 1, query_len, key_len)
        stride = as_size(stride, "stride")
        offset = _offset(shape, None) if query_offset is None else as_int(
            query_offset, "query_offset")
        if stride > 2 * FARTHEST:  # no two tokens are so far apart; where all are, none meet
            nearest_multiple = (offset + stride // 2) // stride * stride
            offset = offset - nearest_multiple
            offset = offset if abs(offset) < FARTHEST else FARTHEST
            stride = 2 * FARTHEST
        # All blocks of a diagonal are alike. In their corner i + offset - j is `nearest`, modulo
        # the stride; elsewhere within BLOCK - 1 of it. Those that reach a multiple are mixed.
        diagonal = np.arange(-shape.columns + 1, shape.rows)  # row - column
        nearest = (offset % stride + diagonal * BLOCK) % stride
        seen = (nearest < BLOCK) | (nearest > stride - BLOCK)
        diagonal, nearest = diagonal[seen], nearest[seen]
        which, row = mask_blocks.runs(np.maximum(diagonal, 0),
                                      np.minimum(shape.rows, shape.columns + diagonal))
        kind = nearest[which]
        index = np.arange(BLOCK)
        apart = index[:, None] - index
        candidates = Candidates(np.zeros_like(row), row, row - diagonal[which], kind)
        return cls._of(mask_blocks.assemble(
            shape, candidates, lambda some: (kind[some, None, None] + apart) % stride == 0))

    @property
    def batch(self) -> int:
        """How many batch items it tells apart: 1 or those of the call."""
        return self._core_record[0]

    @property
    def heads(self) -> int:
        """How many heads it tells apart: 1 or those of the call."""
        return self._core_record[1]

    @property
    def query_len(self) -> int:
        """How many queries."""
        return self._core_record[2]

    @property
    def key_len(self) -> int:
        """How many keys."""
        return self._core_record[3]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return sum(map(len, self._core_record[4:]))

    @property
    def density(self) -> float:
        """Visible pairs / pairs; 0 without pairs."""
        pairs = self.batch * self.heads * self.query_len * self.key_len
        return int(mask_blocks.visible_of(self._blocks).sum()) / max(pairs, 1)

    @property
    def _blocks(self) -> Blocks:
        batch, heads, query_len, key_len, starts, columns, contents, patterns = self._core_record
        return Blocks(Shape(batch, heads, query_len, key_len), np.frombuffer(starts, np.int64),
                      np.frombuffer(columns, np.int32), np.frombuffer(contents, np.int32),
                      np.frombuffer(patterns, np.uint8).reshape(-1, BLOCK, BLOCK // 8))

    def to_dense(self) -> NDArray[np.bool_]:
        """The bool array (batch, heads, query_len, key_len), True = attend.

        Raises
        ------
        MemoryError: one that does not fit in memory.

        Source: Dong et al. 2024, "Flex Attention", section 4.

        >>> mha.BlockMask.causal(2).to_dense().astype(int).tolist()
        [[[[1, 0], [1, 1]]]]
        """
        try:
            return mask_blocks.to_dense(self._blocks)
        except (ValueError, MemoryError):
            raise no_memory("to_dense", tuple(self._core_record[:4])) from None

    def _part(self, items: Array, heads: slice, queries: tuple[int, int],
              keys: tuple[int, int]) -> BlockMask | None:
        """Of these batch items and heads, and of the queries and keys from begin to end; None where
        nothing is visible."""
        blocks = self._blocks
        shape = blocks.shape
        groups = np.arange(shape.batch * shape.heads).reshape(shape.batch, shape.heads)
        groups = groups[np.zeros(1, np.int64) if shape.batch == 1 else items]
        blocks = mask_blocks.of_groups(blocks, groups[:, heads] if shape.heads > 1 else groups)
        first, end = keys[0] // BLOCK, -(-keys[1] // BLOCK)
        if not ((blocks.columns >= first) & (blocks.columns < end)).any():
            return None
        part = mask_blocks.part(blocks, queries, keys)
        return BlockMask._of(part) if len(part.columns) else None

    def _shares(self, tall: int, wide: int) -> Array:
        """For pictures: how much of each of at most (tall, wide) cells is visible."""
        return mask_blocks.shares(self._blocks, tall, wide)

    def __and__(self, other: BlockMask) -> BlockMask:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self._combined(other, np.logical_and, np.intersect1d)

    def __or__(self, other: BlockMask) -> BlockMask:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self._combined(other, np.logical_or, np.union1d)

    def _combined(self, mask: BlockMask, operation: Callable[[Array, Array], Array],
                  choose: Callable[[Array, Array], Array]) -> BlockMask:
        a, b = self._blocks, mask._blocks
        batch, heads = (size if other == 1 else other
                        for size, other in zip(a.shape[:2], b.shape[:2], strict=True))
        shape = a.shape._replace(batch=batch, heads=heads)
        return BlockMask._of(mask_blocks.combine(_joined(shape, a, "BlockMask"),
                                                 _joined(shape, b, "BlockMask"), operation, choose))

    def __bool__(self) -> Never:
        raise TypeError("BlockMask: got one where True or False is wanted, as `and`, `or` and `not`"
                        " do; join masks with &, | and ~")

    def __invert__(self) -> BlockMask:
        return BlockMask._of(mask_blocks.invert(self._blocks))

    def __getitem__(self, index: tuple[slice, slice]) -> BlockMask:
        if (not isinstance(index, tuple) or len(index) != 2
                or not all(isinstance(side, slice) for side in index)):
            raise TypeError(f"BlockMask: got the index {index!r}, wanted two slices [q0:q1, k0:k1]"
                            " of queries and keys")
        bounds = []
        for side, length in zip(index, (self.query_len, self.key_len), strict=True):
            try:
                begin, end, step = side.indices(length)
            except TypeError:
                raise TypeError(f"BlockMask: got the slice {side}, wanted ints in it") from None
            if step != 1:
                raise ValueError(f"BlockMask: got a slice of step {step}, wanted 1")
            bounds.append((begin, max(end, begin)))
        return BlockMask._of(mask_blocks.part(self._blocks, *bounds))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self._core_record == other._core_record

    def __setattr__(self, name: str, value: object) -> Never:
        raise AttributeError(f"BlockMask: got {name} to set, wanted nothing: masks are immutable")

    def __delattr__(self, name: str) -> Never:
        raise AttributeError(f"BlockMask: got {name} to delete, wanted nothing: masks are"
                             " immutable")

    def __array__(self, *arguments: object, **keywords: object) -> Never:
        raise TypeError("BlockMask: got one where an array is wanted; give it as mask=, join it"
                        " with BlockMask.from_dense(array), or make an array of it by .to_dense()")

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockMask._restored, (self._core_record,)

    @classmethod
    def _restored(cls, record: tuple[Any, ...]) -> BlockMask:
        """What pickle makes one of."""
        _core.check_block_mask(record)
        return cls._holding(record)

    @classmethod
    def _holding(cls, record: tuple[Any, ...]) -> BlockMask:
        mask = object.__new__(cls)
        object.__setattr__(mask, "_core_record", record)
        return mask

    def __copy__(self) -> BlockMask:
        return self

    def __deepcopy__(self, memo: object) -> BlockMask:
        return self

    def __repr__(self) -> str:
        """With a small picture of the first batch item and head: # visible, + most, - some."""
        text = (f"BlockMask(batch={self.batch}, heads={self.heads}, query_len={self.query_len},"
                f" key_len={self.key_len}, density={self.density:.3g})")
        return "\n".join([text, *mask_blocks.picture(self._blocks)])


def _shape(batch: int, heads: int, query_len: int, key_len: int | None,
           least_batch: int = 1) -> Shape:
    query_len = as_size(query_len, "query_len", least=0)
    return Shape(as_size(batch, "batch", least=least_batch), as_size(heads, "heads"), query_len,
                 as_size(key_len, "key_len", query_len, least=0))


def _offset(shape: Shape, query_offset: int | None) -> int:
    if query_offset is None:
        return shape.key_len - shape.query_len
    return min(max(as_int(query_offset, "query_offset"), -FARTHEST), FARTHEST)


def _blocks_of(mask: object, name: str) -> Blocks:
    if not isinstance(mask, BlockMask):
        raise TypeError(f"{name}: got {type(mask).__name__}, wanted a BlockMask:"
                        " BlockMask.from_dense makes one of a bool array")
    return mask._blocks


def _joined(shape: Shape, blocks: Blocks, name: str) -> Blocks:
    """The blocks for all batch items and heads of the shape."""
    if not blocks.shape.broadcasts_to(shape):
        raise ValueError(f"{name}: got {tuple(blocks.shape)}, wanted a mask (batch, heads,"
                         f" query_len, key_len) that broadcasts to {tuple(shape)}")
    return mask_blocks.broadcast(blocks, shape)


def _ids(ids: ArrayLike, name: str) -> Array:
    given = as_exact_int_array(ids, name)
    if given.ndim not in (1, 2):
        raise ValueError(f"{name}: got shape {given.shape}, wanted (len,) or (batch, len)")
    return given if given.ndim == 2 else given[None]


def _evaluated(function: MaskFunction, shape: Shape, group: Array, row: Array,
               column: Array) -> Array:
    """What the function says about some blocks: bools (n, BLOCK, BLOCK)."""
    index = np.arange(BLOCK)
    batch, head = (side[:, None, None] for side in np.divmod(group, shape.heads))
    query = np.minimum(row[:, None] * BLOCK + index, shape.query_len - 1)[:, :, None]
    key = np.minimum(column[:, None] * BLOCK + index, shape.key_len - 1)[:, None, :]
    try:
        answer = function(batch, head, query, key)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: of tensors
        wrong = ValueError if isinstance(error, ValueError) else TypeError
        raise wrong(f"function: {error}; it is called with four arrays, batch, head, query and key:"
                    " join conditions by &, | and ~, and index arrays, not lists") from error
    found = as_array(answer, "function")
    check_kind(found, "function", "b", "bools, True = attend")
    wanted = (len(group), BLOCK, BLOCK)
    try:
        return np.broadcast_to(found, wanted)
    except ValueError:
        raise ValueError(f"function: got bools of shape {found.shape}, wanted a shape that"
                         f" broadcasts to its arguments' {wanted}") from None
