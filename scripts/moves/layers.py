"""Edits of tests/test_layers.py that both steps need: packages are named by their folders."""

from engine import Step

FILE = "tests/test_layers.py"


def by_folder(step: Step) -> None:
    """Let ``nekro/base`` be a package."""
    step.edit(
        FILE,
        (
            "#: From the bottom; a package may import itself and the packages before it.\n",
            "#: From the bottom, by their folders; a package may import itself and the packages before it.\n",
        ),
        (
            '''def part_of(package: str, module: str) -> str | None:
    """Return the part of a package that contains a module, "*" for none; None for other packages' modules."""
    top, _, rest = module.partition(".")
    if top != package:
        return None
    name = rest.partition(".")[0]
''',
            '''def dotted(folder: str) -> str:
    """Return the module name of a package's folder."""
    return folder.replace("/", ".")


@functools.cache
def package_of(module: str) -> str | None:
    """Return the package that contains a module; None for a module that is not of the product."""
    found = [p for p in PACKAGES if module == dotted(p) or module.startswith(f"{dotted(p)}.")]
    return max(found, key=len, default=None)


def part_of(package: str, module: str) -> str | None:
    """Return the part of a package that contains a module, "*" for none; None for other packages' modules."""
    if package_of(module) != package:
        return None
    name = module.removeprefix(dotted(package)).removeprefix(".").partition(".")[0]
''',
        ),
        (
            '''    top = module.partition(".")[0]
    if top == package or top not in PACKAGES:
        return True
''',
            '''    imported = package_of(module)
    if imported == package or imported is None:
        return True
''',
        ),
        (
            "    return top in ORDER[: ORDER.index(package)]\n",
            "    return imported in ORDER[: ORDER.index(package)]\n",
        ),
        (
            '''    assert sorted(shipped) == sorted(PACKAGES)
''',
            '''    assert sorted(shipped) == sorted({package.partition("/")[0] for package in PACKAGES})
''',
        ),
        (
            '''    assert sorted(OWN_PACKAGES) == sorted(ORDER)
''',
            '''    assert sorted(OWN_PACKAGES) == sorted({package.partition("/")[0] for package in ORDER})
''',
        ),
        (
            '''    guest = ROOT / "sandbox" / "guest"
    inside = {module for path, module in imports_of("sandbox") if path.is_relative_to(guest)}
''',
            '''    guest = ROOT / "nekro" / "sandbox" / "guest"
    inside = {module for path, module in imports_of("nekro/sandbox") if path.is_relative_to(guest)}
''',
        ),
        (
            '''imports_of("codec") if path.name == "tagged.py"}
    names = {module.partition(".")[0] for module in inside - {"codec.tagged"}}
    assert names <= set(sys.stdlib_module_names) | {"sandbox"}
''',
            '''imports_of("nekro/wire") if path.name == "tagged.py"}
    ours = {"nekro.wire.tagged"} | {module for module in inside if module.startswith("nekro.sandbox.guest.")}
    names = {module.partition(".")[0] for module in inside - ours}
    assert names <= set(sys.stdlib_module_names)
''',
        ),
        (
            '''    modules = [module for module in product_graph() if module.partition(".")[0] == "gateway"]
''',
            '''    modules = [module for module in product_graph() if package_of(module) == "nekro/gateway"]
''',
        ),
        (
            '''        "print(*(name for name in sys.modules if name.partition('.')[0] == 'sandbox'))"
''',
            '''        "print(*(name for name in sys.modules if name.startswith('nekro.sandbox')))"
''',
        ),
        (
            '''    assert sorted(done.stdout.split()) == ["sandbox", "sandbox.models"]
''',
            '''    assert sorted(done.stdout.split()) == ["nekro.sandbox", "nekro.sandbox.models"]
''',
        ),
    )


def table(step: Step, names: dict[str, str]) -> None:
    """Rename packages in ORDER, ONLY, FORBIDDEN_LIBRARIES, PARTS, CYCLIC_PARTS and LARGE_FOLDERS."""
    file = step.root / FILE
    text = file.read_text("utf-8")
    head, mark, rest = text.partition("#: Largest number of modules in one folder")
    for old, new in names.items():
        # Entries of ORDER, and keys of the tables' first level.
        head = head.replace(f'\n    "{old}",\n', f'\n    "{new}",\n')
        head = head.replace(f'\n    "{old}": ', f'\n    "{new}": ')
    file.write_text(head + mark + rest, "utf-8")
