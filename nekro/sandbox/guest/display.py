"""Show what a program made with matplotlib and pandas; nothing here imports them.

Like the other modules of this folder it uses the standard library only: the packages may be absent.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    #: Returns what to call after the import, also after one that failed.
    Before = Callable[[ModuleType], Callable[[], None]]
    After = Callable[[ModuleType], None]

SHARED = "/app/shared"
#: Bounds of the figures of one run.
MOST_FIGURES = 8
MOST_DPI = 150
MOST_PIXELS = 3000
#: For ``print`` of a data frame: a wide frame is folded, a long one shows its head and its tail.
PANDAS_OPTIONS = {
    "display.width": 150,
    "display.max_columns": 20,
    "display.max_rows": 40,
    "display.min_rows": 20,
    "display.max_colwidth": 60,
    "display.unicode.east_asian_width": True,
}


def extend_path(directories: list[str]) -> str | None:
    """Add package directories to ``sys.path``; returns the one of the base layer, None where it is absent."""
    base = None
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for directory in directories:
        inner = f"{directory}/{version}"
        if os.path.isdir(inner):
            base = directory
            sys.path.append(inner)
        else:
            sys.path.append(directory)
    return base


class ImportWatch:
    """A finder that acts before and after the first import of a module, found by the other finders."""

    def __init__(self, actions: dict[str, tuple[Before | None, After | None]]) -> None:
        self.actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a watched module; None for every other."""
        if name not in self.actions:
            return None
        before, after = self.actions.pop(name)
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        if spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_between(module: ModuleType) -> None:
                undo = attempt(before, module)
                try:
                    execute(module)
                finally:
                    if undo is not None:
                        undo()
                attempt(after, module)

            spec.loader.exec_module = execute_between  # type: ignore[method-assign]
        return spec


def attempt(action: Callable[[ModuleType], Any] | None, module: ModuleType) -> Any:
    """Run an action and return its result; a failure is printed, as it must not fail the program's import."""
    try:
        return None if action is None else action(module)
    except Exception as exc:
        print(f"[{module.__name__} was not set up: {exc}]", file=sys.stderr)
        return None


class Display:
    """Saves and sends figures, and makes data frames readable."""

    def __init__(self, base: str | None) -> None:
        """
        Args:
            base: directory of the base layer.
        """
        self._base = base
        self._mode = "off"
        self._send: Any = None
        self._chat_key = ""
        self._shown = 0
        #: Where the files are written: the driver without mounts has another path.
        self._directory = SHARED if os.path.isdir(SHARED) else os.path.abspath("shared")

    def begin(self, run: dict[str, Any], names: dict[str, Any]) -> None:
        """Apply the run's settings, and keep the method that sends files if the run has it."""
        self._mode = run["figures"]
        self._chat_key = run["chat_key"]
        has_method = any(stub["name"] == "send_msg_file" for stub in run["stubs"])
        self._send = names["send_msg_file"] if has_method and self._mode == "send" else None

    def actions(self) -> dict[str, tuple[Before | None, After | None]]:
        """Return what to do before and after the import of each module."""
        return {
            "matplotlib": (self._prepare, None),
            "matplotlib.figure": (None, mark_saved),
            "matplotlib.pyplot": (None, self._replace_show),
            "pandas": (None, set_options),
        }

    def show_figures(self) -> None:
        """Save and send the open figures that the program did not save itself, and close them."""
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        if pyplot is None or self._mode == "off":
            return
        try:
            for number in pyplot.get_fignums():
                figure = pyplot.figure(number)
                if not getattr(figure, "_saved_by_program", False) and (figure.axes or figure.texts):
                    self._show(figure)
            pyplot.close("all")
        except Exception as exc:
            print(f"[figures were not saved: {type(exc).__name__}: {exc}]", file=sys.stderr)

    def _show(self, figure: Any) -> None:
        self._shown += 1
        if self._shown > MOST_FIGURES:
            if self._shown == MOST_FIGURES + 1:
                print(f"[more figures were not saved: at most {MOST_FIGURES} of a run are]", flush=True)
            return
        name = self._free_name()
        dpi = min(figure.dpi, MOST_DPI, MOST_PIXELS / max(*figure.get_size_inches(), 1))
        figure.savefig(f"{self._directory}/{name}", dpi=dpi)
        if self._send is None:
            print(f"[figure saved as {SHARED}/{name}]", flush=True)
            return
        try:
            self._send(self._chat_key, f"{SHARED}/{name}")
        except Exception as exc:
            print(f"[figure saved as {SHARED}/{name}, but not sent: {exc}]", flush=True)
        else:
            print(f"[figure saved as {SHARED}/{name} and sent to the chat]", flush=True)

    def _free_name(self) -> str:
        number = 1
        while os.path.lexists(f"{self._directory}/figure-{number}.png"):
            number += 1
        return f"figure-{number}.png"

    def _prepare(self, module: ModuleType) -> Callable[[], None]:
        """Leave the working directory during the import, which would read a file ``matplotlibrc`` there."""
        self._lay_fonts()
        directory = os.getcwd()
        os.chdir("/")
        return lambda: os.chdir(directory)

    def _lay_fonts(self) -> None:
        """Copy the list of fonts to where matplotlib looks for it; to make the list takes a second."""
        target = os.environ.setdefault("MPLCONFIGDIR", "/tmp/matplotlib")  # noqa: S108 - a path inside
        source = f"{self._base}/matplotlib"
        if self._base is None or not os.path.isdir(source):
            return
        os.makedirs(target, exist_ok=True)
        for name in os.listdir(source):
            if os.path.lexists(f"{target}/{name}"):  # from an earlier template
                continue
            with open(f"{source}/{name}", "rb") as file, open(f"{target}/{name}", "xb") as copy:
                copy.write(file.read())

    def _replace_show(self, pyplot: Any) -> None:
        def show(*_: object, **__: object) -> None:
            """Save the open figures, send them to the chat, and close them."""
            self.show_figures()

        pyplot.show = show


def mark_saved(module: Any) -> None:
    """Make figures know that the program saved them itself."""
    savefig = module.Figure.savefig

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = savefig(self, *args, **kwargs)
        self._saved_by_program = True
        return result

    # As by functools.wraps, which is slow to import; pyplot checks the name.
    save.__name__, save.__qualname__, save.__doc__ = savefig.__name__, savefig.__qualname__, savefig.__doc__
    save.__wrapped__ = savefig  # type: ignore[attr-defined]
    module.Figure.savefig = save


def set_options(pandas: Any) -> None:
    """Bound what ``print`` shows of a data frame."""
    for name, value in PANDAS_OPTIONS.items():
        pandas.set_option(name, value)
