"""Reads pickles of plain values, whoever wrote them.

Sandboxed code sends ``pickle.dumps(…, 4)``. The standard ``Unpickler`` cannot be made safe for
it: what ``find_class`` allows can be poisoned by BUILD, and a few hundred bytes can hang or
fill the process (shared tuples as keys, references to references, sizes without data). Here a
machine of our own reads the few instructions that plain values need, looks no name up, calls
only the constructors in ``pickle_values``, and the result is counted before anyone gets it.
"""

from __future__ import annotations

import struct
from typing import Any

from broker_config.pickle_limits import CONTAINERS, LEAVES, PLAIN_TYPES, Budget
from broker_config.pickle_machine import Machine
from broker_config.pickle_values import NamedType
from nekro_agent.errors import ArgumentError

__all__ = ["load"]


def load(data: bytes, budget: Budget) -> object:
    """Read one pickled value.

    Raises:
        ArgumentError: it is malformed, holds anything but plain values, or exceeds the budget.
    """
    try:
        value = Machine(data, budget).run()
    except ArgumentError:
        raise
    except UnicodeDecodeError:
        raise ArgumentError("a text is no Unicode (a lone surrogate?)") from None
    except (LookupError, ValueError, TypeError, ArithmeticError, struct.error) as exc:
        raise ArgumentError(f"the pickle is malformed: {exc}") from None
    _check(value, budget)
    return value


def _check(value: object, budget: Budget) -> None:
    """Walk the value level by level, what is shared as often as it stands there.

    So references to references cost no memory, only counting, and a container inside itself is
    one that never ends.
    """
    level: list[Any] = [(value,)]
    nodes = 0
    for _ in range(budget.depth + 1):
        deeper: list[Any] = []
        for container in level:
            # Keys were checked when they came.
            items = container.values() if type(container) is dict else container
            nodes += len(items)
            if nodes > budget.nodes:
                raise ArgumentError(
                    f"the value holds more than {budget.nodes} values; send less, or a file's path"
                )
            kinds = set(map(type, items))
            if kinds <= LEAVES:
                continue
            if not kinds <= PLAIN_TYPES:
                raise _half_built(next(item for item in items if type(item) not in PLAIN_TYPES))
            deeper += [item for item in items if type(item) in CONTAINERS]
        if not deeper:
            return
        level = deeper
    raise ArgumentError(f"the value is nested deeper than {budget.depth} levels, or holds itself")


def _half_built(item: object) -> ArgumentError:
    if type(item) is NamedType:
        return ArgumentError(f"class {item.name} cannot cross the sandbox boundary; send values")
    return ArgumentError("the pickle is malformed: an unfinished value")
