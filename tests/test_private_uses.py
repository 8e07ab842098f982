"""The register of private API of Celery and kombu agrees with our source and the installed libraries."""

from __future__ import annotations

import ast

import pytest

from tests.private_api import FORMATS, USES, Use
from tests.private_uses import Found, find, resolve
from tests.test_layers import ROOT


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    return find()


def test_every_module_that_uses_private_api_is_registered(found: dict[str, Found]) -> None:
    assert sorted(use.module for use in USES) == sorted(found)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.module)
def test_the_register_names_exactly_what_a_module_uses(use: Use, found: dict[str, Found]) -> None:
    here = found.get(use.module, Found())
    assert set(use.imports.split()) == here.imports
    assert set(use.private.split()) == here.private
    assert {one.name: set(one.inherits.split()) for one in use.classes} == here.inherits


@pytest.mark.parametrize("use", USES, ids=lambda use: use.module)
def test_what_a_class_overrides_has_the_registered_parameters(use: Use, found: dict[str, Found]) -> None:
    here = found.get(use.module, Found())
    assert {one.name: dict(one.overrides) for one in use.classes} == here.overrides


@pytest.mark.parametrize("name", sorted({name for use in USES for name in use.imports.split()}))
def test_a_registered_name_exists_in_its_library(name: str) -> None:
    assert resolve(name) is not None


def test_the_tests_that_the_register_names_exist() -> None:
    named = {test for entry in (*USES, *FORMATS) for test in entry.tests}
    assert all(entry.tests for entry in (*USES, *FORMATS))
    assert {test for test in named if not exists(test)} == set()


def test_the_modules_that_rely_on_a_format_exist() -> None:
    modules = {module for one in FORMATS for module in one.modules}
    assert {name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").is_file()} == set()


def exists(test: str) -> bool:
    path, _, name = test.partition("::")
    if not (ROOT / path).is_file():
        return False
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, functions) and node.name == name for node in tree.body)
