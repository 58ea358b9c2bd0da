"""Steps that Ctrl-C leaves all done or none.

Python runs signal handlers between instructions of its own, at a few of them: where a function
begins, where a loop goes round and behind a call. It runs none while functions of C call each
other, and none between a look at an attribute and the call of C that stands in the same expression.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

# (function, argument, ...), all functions of C.
Step = tuple[Any, ...]


def one_go(*steps: Step) -> Iterator[Any]:
    """The steps, for `take`, which may be the next thing behind a last look at what they change."""
    return itertools.starmap(operator.call, steps)


take: Callable[[Iterator[Any]], object] = functools.partial(deque, maxlen=0)
assign = object.__setattr__  # a step: (assign, owner, name, value)
