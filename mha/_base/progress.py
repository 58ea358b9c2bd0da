"""Progress bars for what takes long: tqdm's, where it is installed and somebody looks."""

import contextlib
import time
import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

Item = TypeVar("Item")
SECONDS = 1.0  # what is over sooner shows none


def progress(items: Iterable[Item], description: str, unit: str,
             total: int | None = None) -> Iterator[Item]:
    """The items, with a bar beside them once a second is over, until they end; items that are a bar
    of the caller's get none. Whatever goes wrong with a bar, the items go on."""
    start, bar = time.monotonic(), None
    has_one = type(items).__module__.startswith("tqdm.")
    try:
        for done, item in enumerate(items):
            if bar is not None:
                with contextlib.suppress(Exception):  # stderr may have been closed
                    bar.update()
            elif time.monotonic() - start > SECONDS and not has_one:
                bar = _new_bar(items, description, unit, total, done)
            yield item
    finally:
        if bar is not None:
            with contextlib.suppress(Exception):
                bar.close()


def _new_bar(items: Iterable[Any], description: str, unit: str, total: int | None,
             done: int) -> Any:
    """A bar on a terminal or in a notebook; elsewhere, and without tqdm, one that shows nothing."""
    with contextlib.suppress(Exception):
        if total is None and isinstance(items, Sized):
            total = len(items)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without ipywidgets: a plain bar
            from tqdm.auto import tqdm
        in_notebook = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
        return tqdm(desc=description, unit=unit, total=total, initial=done, leave=False,
                    disable=False if in_notebook else None)
    return _NoBar()


class _NoBar:
    def update(self) -> None:
        pass

    close = update
