"""Dataclasses whose methods are compiled later behave like those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any, ClassVar, Generic, TypeVar

import pytest
from pydantic import TypeAdapter

from nekro_agent import lazy_dataclass
from nekro_agent.lazy_dataclass import dataclass

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Pickled:
    """At the top of the module, so that pickle finds it."""

    number: int
    names: tuple[str, ...] = ()


def _classes(decorate: Callable[..., Any]) -> dict[str, Any]:
    @decorate(frozen=True, kw_only=True)
    class Base:
        """A base."""

        kind: ClassVar[str] = "base"
        number: int
        name: str = "unnamed"
        tags: dict[str, int] = field(default_factory=dict, repr=False)
        secret: str = field(default="", compare=False)
        shown: str = field(init=False, default="")

        def __post_init__(self) -> None:
            object.__setattr__(self, "shown", f"{self.name} {self.number}")

    @decorate(frozen=True, kw_only=True)
    class Derived(Base):
        """A derived class, whose field replaces one of its base."""

        name: str = "derived"
        size: float = 1.5

    @decorate(frozen=True, kw_only=True)
    class Box(Generic[Value]):
        """A generic class."""

        value: Value

    class Port(ABC):
        @abstractmethod
        def run(self) -> int: ...

    @decorate(frozen=True, kw_only=True)
    class Adapter(Port):
        """Has an abstract base without fields."""

        count: int = 3

        def run(self) -> int:
            return self.count

    return {one.__name__: one for one in (Base, Derived, Box, Adapter)}


@pytest.fixture(params=[dataclasses.dataclass, dataclass], ids=["standard", "lazy"])
def classes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return _classes(request.param)


def test_instances_have_the_methods_of_the_standard_library(classes: dict[str, Any]) -> None:
    one = classes["Base"](number=1, secret="a")
    other = classes["Base"](number=1, secret="b")
    derived = classes["Derived"](number=2)

    assert one == other
    assert hash(classes["Box"](value=1)) == hash(classes["Box"](value=1))
    assert one != derived
    assert one.tags == {} and one.tags is not other.tags
    assert (one.kind, one.shown, derived.shown, derived.size) == ("base", "unnamed 1", "derived 2", 1.5)
    assert repr(one).endswith("Base(number=1, name='unnamed', secret='a', shown='unnamed 1')")
    assert [one.name for one in dataclasses.fields(classes["Derived"])] == [
        "number", "name", "tags", "secret", "shown", "size",
    ]  # fmt: skip
    assert dataclasses.asdict(derived)["number"] == 2
    assert dataclasses.replace(derived, size=2.0).size == 2.0
    assert classes["Adapter"]().run() == 3
    assert classes["Base"].name == "unnamed"
    assert not hasattr(classes["Base"], "tags")
    with pytest.raises(TypeError, match="positional"):
        classes["Base"](1)
    with pytest.raises(TypeError, match="required keyword-only argument"):
        classes["Base"]()
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        classes["Box"](value=1, other=2)


def test_instances_refuse_changes(classes: dict[str, Any]) -> None:
    box = classes["Box"](value=1)
    for change in (
        lambda: setattr(box, "value", 2),
        lambda: setattr(box, "other", 2),
        lambda: delattr(box, "value"),
    ):
        with pytest.raises(FrozenInstanceError):
            change()

    class Open(classes["Base"]):  # type: ignore[misc]
        """Not a dataclass: it may have attributes that are no fields."""

    opened = Open(number=1)
    opened.more = 1
    del opened.more
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'number'"):
        opened.number = 2


@pytest.mark.parametrize("use", [hash, repr, lambda one: one == one.__class__(number=1)], ids=str)
def test_an_instance_that_was_made_without_the_constructor_is_complete(
    classes: dict[str, Any], use: Callable[[Any], object]
) -> None:
    base = classes["Base"]
    made = base.__new__(base)
    made.__dict__.update(number=1, name="n", tags=(), secret="", shown="")
    use(made)
    assert dataclasses.is_dataclass(base)


def test_a_frozen_class_of_the_standard_library_may_be_derived_from_it(classes: dict[str, Any]) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class More(classes["Base"]):  # type: ignore[misc]
        more: int

    assert More(number=1, more=2).more == 2


def test_pydantic_and_pickle_take_them_before_their_first_use() -> None:
    classes = _classes(dataclass)
    made = TypeAdapter(classes["Derived"]).validate_python({"number": "3"})
    assert made == classes["Derived"](number=3)
    one = Pickled(number=1)
    assert pickle.loads(pickle.dumps(one)) == one == copy.deepcopy(one)


def test_nothing_is_compiled_before_a_class_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = dataclasses.dataclass

    def counting(*args: Any, **options: Any) -> Any:
        decorate = real(*args, **options)
        return lambda cls: compiled.append(cls.__name__) or decorate(cls)

    monkeypatch.setattr(dataclasses, "dataclass", counting)
    classes = _classes(dataclass)
    assert compiled == []
    classes["Derived"](number=1)
    classes["Derived"](number=2)
    assert sorted(compiled) == ["Base", "Derived"]


def test_threads_may_use_a_class_for_the_first_time_together() -> None:
    for _ in range(50):
        classes, failures = _classes(dataclass), []
        start = threading.Barrier(4)

        def use(classes: dict[str, Any] = classes, start: threading.Barrier = start) -> None:
            start.wait()
            try:
                assert classes["Derived"](number=1) == classes["Derived"](number=1)
            except BaseException as exc:
                failures.append(exc)  # noqa: B023 - joined in this iteration

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


def test_other_classes_are_completed_at_once() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own:
        number: int

        def __repr__(self) -> str:
            return "own"

    @dataclass
    class Plain:
        number: int = 0

    assert "__dataclass_fields__" in vars(Own) and repr(Own(number=1)) == "own"
    assert Plain(1).number == 1
    assert isinstance(vars(Plain)["__dataclass_fields__"], dict)
    assert lazy_dataclass.__all__ == ["dataclass"]
