"""Layers of Dask's graphs that are made when somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import dask.array as da
from dask._task_spec import List, Task, TaskRef
from dask.highlevelgraph import HighLevelGraph, Layer

Plan = TypeVar("Plan")
Key = tuple[Any, ...]

__all__ = ["Key", "List", "Task", "TaskRef", "Tasks", "array_of", "join_by_tree"]


class Tasks(Layer, Generic[Plan]):
    """The tasks that `write(plan)` makes of a plan: until they are needed the plan is all that is
    kept, and all that goes to another process."""

    def __init__(self, write: Callable[[Plan], dict[Key, Task]], plan: Plan,
                 annotations: Mapping[str, Any] | None = None) -> None:
        super().__init__(annotations)
        self._write, self._plan = write, plan
        self._tasks: dict[Key, Task] | None = None

    @property
    def tasks(self) -> dict[Key, Task]:
        if self._tasks is None:
            self._tasks = self._write(self._plan)
        return self._tasks

    def __reduce__(self) -> Any:
        return type(self), (self._write, self._plan, self.annotations)

    def __getitem__(self, key: Key) -> Task:
        return self.tasks[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def is_materialized(self) -> bool:
        return self._tasks is not None

    def get_output_keys(self) -> set[Key]:
        return set(self.tasks)


def join_by_tree(tasks: dict[Key, Task], name: str, root: Key, leaves: Sequence[Key], join: Any,
                 split_every: int) -> None:
    """Adds the tasks that join the leaves, two or more, so many at a time, and these again, always
    in the same order; the last one is `root`."""
    level = 0
    while len(leaves) > 1:
        joined = []
        for first in range(0, len(leaves), split_every):
            group = leaves[first:first + split_every]
            key = root if len(leaves) <= split_every else (name, *root[1:], level, first)
            if len(group) > 1:
                tasks[key] = Task(key, join, List(*map(TaskRef, group)))
            joined.append(key if len(group) > 1 else group[0])
        leaves, level = joined, level + 1


def array_of(name: str, layer: Tasks[Any], graph: HighLevelGraph, dependencies: Iterable[str],
             chunks: tuple[tuple[int, ...], ...], dtype: Any) -> da.Array:
    """The dask array whose chunks are the layer's tasks, on top of a graph."""
    whole = HighLevelGraph({**graph.layers, name: layer},
                           {**graph.dependencies, name: set(dependencies)})
    return da.Array(whole, name, chunks=chunks, dtype=dtype)
