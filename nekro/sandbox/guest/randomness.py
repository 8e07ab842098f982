"""Random numbers that follow from the seed of the run: a program that is run again gets the same ones.

The host derives the seed from the run's id with its key: the same in each attempt, and unknown to others.
``os.urandom`` and what builds on it (``secrets``, ``SystemRandom``, ``uuid4``) yield the output of SHAKE-256
over the seed, unpredictable without it. Generators without a seed, in ``random`` and ``numpy``, are
seeded from it.

Each module that asks has a stream of its own. Otherwise what a package draws at its import, which some runs
have done before they begin, would shift the numbers that the code gets.

What does not come from here: ``/dev/urandom`` as a file, ``ssl.RAND_bytes`` and generators of other C
libraries, ``_random.Random``, and processes that the code starts other than by a fork.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from typing import TYPE_CHECKING

from nekro.sandbox.guest.readings import unbound

if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

__all__ = ["RANDOMNESS", "Randomness"]

#: Modules that draw for their caller.
OF_CALLER = ("random", "secrets", "tempfile")


class Randomness:
    """The source of the run's random numbers: the system's until ``begin``."""

    def __init__(self) -> None:
        self._seed = b""
        self._counts: dict[str, count[int]] = {}
        self._forks = count(1)
        self._fork = 0

    def install(self) -> None:
        """Replace the functions of ``os``; code runs later."""
        system, get_system = os.urandom, os.getrandom

        @unbound(system)
        def urandom(size: int, /) -> bytes:
            return self.draw(size, sys._getframe(1)) if self._seed else system(size)

        @unbound(get_system)
        def getrandom(size: int, flags: int = 0) -> bytes:
            return self.draw(size, sys._getframe(1)) if self._seed else get_system(size, flags)

        os.urandom, os.getrandom = urandom, getrandom
        # Registered before the action of `random`, which seeds anew.
        os.register_at_fork(before=self._count_fork, after_in_child=self._differ)

    def begin(self, seed: str) -> None:
        """Seed everything; modules that are imported later are seeded by ``actions``."""
        self._seed = bytes.fromhex(seed)
        self._forks = count(1)  # the fork server's are counted too
        for name, (_, seed_module) in self.actions().items():
            module = sys.modules.get(name)
            if module is not None:
                seed_module(module)
        names = sys.modules.get("tempfile")
        if names is not None:
            names.__dict__["_name_sequence"] = None

    def actions(self) -> dict[str, tuple[None, Any]]:
        """Return what to do after the import of each module, as for ``ImportWatch``."""
        return {
            "random": (None, self._seed_random),
            "uuid": (None, self._seed_uuid),
            "numpy.random": (None, self._seed_numpy),
        }

    def draw(self, size: int, frame: FrameType | None) -> bytes:
        """Return the next bytes for the module whose frame asks."""
        from _sha3 import shake_256  # type: ignore[import-not-found]

        if size < 0:
            raise ValueError("negative argument not allowed")
        while frame is not None and frame.f_globals.get("__name__") in OF_CALLER and frame.f_back is not None:
            frame = frame.f_back
        name = "" if frame is None else str(frame.f_globals.get("__name__"))
        number = next(self._counts.setdefault(name, count()))
        result: bytes = shake_256(self._seed + f"{number} {name}".encode()).digest(size)
        return result

    def _number(self, name: str, size: int) -> int:
        """Return a number for one generator of the system's."""
        from _sha3 import shake_256

        return int.from_bytes(shake_256(self._seed + f"of {name}".encode()).digest(size))

    def _seed_random(self, module: Any) -> None:
        generator = module._inst
        if not hasattr(module.Random.seed, "__wrapped__"):
            self._replace_seed(module)
        if self._seed:
            generator.seed(self._number("random", 32))

    def _replace_seed(self, module: Any) -> None:
        __import__("_sha3")  # here, so that it is shared by the forks of a template
        original = module.Random.seed

        def seed(generator: Any, a: Any = None, version: int = 2) -> None:
            if a is None and self._seed:
                a = int.from_bytes(self.draw(32, sys._getframe(1)))
            original(generator, a, version)

        seed.__qualname__, seed.__doc__ = original.__qualname__, original.__doc__
        seed.__wrapped__ = original  # type: ignore[attr-defined]
        module.Random.seed = seed
        module.seed = module._inst.seed
        # After the module's own action, which seeds from the system.
        os.register_at_fork(after_in_child=lambda: self._seed_random(module))

    def _seed_uuid(self, module: Any) -> None:
        # The C library's function reads its own clock.
        module._generate_time_safe = None
        if self._seed:
            module._node = self._number("uuid", 6) | 1 << 40  # a multicast address: that of no device

    def _seed_numpy(self, module: Any) -> None:
        if self._seed:
            module.seed(self._number("numpy.random", 4))

    def _count_fork(self) -> None:
        self._fork = next(self._forks)

    def _differ(self) -> None:
        """Give a fork numbers of its own, the same in each attempt."""
        if not self._seed:
            return
        from _sha3 import shake_256

        self._seed = shake_256(self._seed + b"fork %d" % self._fork).digest(32)
        self._counts, self._forks = {}, count(1)


RANDOMNESS = Randomness()
