from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from torchtrim.dispatch.places import CallSite, Places, line_of, project_of


class Source:
    """Writes modules into folders and calls them, one the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project = root / "project"
        self.spots: tuple[CallSite | None, CallSite | None] = (None, None)

    def frame(self) -> None:
        """What the modules call: finds the place that called it."""
        self.spots = Places(str(self.project)).find(sys._getframe(1))

    def module(self, path: str, *lines: str, **names: object) -> ModuleType:
        """A module with a function `go` of these lines."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(["def go():", *(f"    {line}" for line in lines)])
        file.write_text(text)
        module = ModuleType(file.stem)
        module.__dict__.update(names, frame=self.frame)
        exec(compile(text, str(file), "exec"), module.__dict__)
        return module

    def found(self) -> list[tuple[str, int] | None]:
        """What was found: the innermost place outside of torch, and the user's own."""
        return [
            (str(Path(spot[0].co_filename).relative_to(self.root)), line_of(spot)) if spot else None
            for spot in self.spots
        ]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Modules in a temporary folder."""
    return Source(tmp_path)


def test_the_innermost_line_of_the_project(source: Source) -> None:
    inner = source.module("project/net.py", "x = 1", "frame()")
    source.module("project/train.py", "go_in()", go_in=inner.go).go()
    assert source.found() == [("project/net.py", 3), None]


def test_a_library_and_the_line_that_called_it(source: Source) -> None:
    library = source.module("lib/site-packages/timm/vit.py", "frame()")
    source.module("project/train.py", "", "go_in()", go_in=library.go).go()
    assert source.found() == [("lib/site-packages/timm/vit.py", 2), ("project/train.py", 3)]


def test_the_innermost_of_two_libraries(source: Source) -> None:
    inner = source.module("site-packages/timm/vit.py", "frame()")
    outer = source.module("site-packages/accelerate/loop.py", "go_in()", go_in=inner.go)
    source.module("project/train.py", "go_in()", go_in=outer.go).go()
    assert source.found() == [("site-packages/timm/vit.py", 2), ("project/train.py", 2)]


def test_a_folder_whose_name_begins_with_the_projects_is_another(source: Source) -> None:
    inner = source.module("project2/net.py", "frame()")
    source.module("project/train.py", "go_in()", go_in=inner.go).go()
    assert source.found() == [("project2/net.py", 2), ("project/train.py", 2)]


def test_packages_whose_name_begins_with_torch_are_libraries() -> None:
    source = Source(Path(torch.__file__).parent.parent)
    source.project = Path(__file__).parent
    code = compile("frame()", str(source.root / "torchvision" / "ops.py"), "exec")
    exec(code, {"frame": source.frame})
    spot, caller = source.spots
    assert spot is not None
    assert spot[0].co_filename.endswith("torchvision/ops.py")
    assert caller is not None
    assert caller[0].co_filename == __file__


def test_installed_packages_inside_of_the_project_are_libraries(source: Source) -> None:
    inner = source.module("project/venv/lib/site-packages/timm/vit.py", "frame()")
    source.module("project/train.py", "go_in()", go_in=inner.go).go()
    assert source.found() == [
        ("project/venv/lib/site-packages/timm/vit.py", 2),
        ("project/train.py", 2),
    ]


def test_a_project_that_is_installed_is_the_users(source: Source) -> None:
    source.project = source.root / "site-packages" / "mine"
    source.module("site-packages/mine/train.py", "frame()").go()
    assert source.found() == [("site-packages/mine/train.py", 2), None]


def test_a_path_that_is_not_absolute(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.root)
    source.project = source.root
    exec(compile("frame()", "train.py", "exec"), {"frame": source.frame})
    spot, caller = source.spots
    assert spot is not None
    assert spot[0].co_filename == "train.py"
    assert caller is None


@pytest.mark.parametrize("file", [contextlib.__file__, nn.__file__, "<string>"])
def test_torch_and_the_standard_library_are_nobodys_lines(source: Source, file: str) -> None:
    source.project = Path(__file__).parent
    exec(compile("frame()", file, "exec"), {"frame": source.frame})
    spot, caller = source.spots
    assert spot is not None
    assert spot[0].co_filename == __file__
    assert caller is None


def test_the_line_is_that_of_the_call_in_an_expression_of_many_lines(source: Source) -> None:
    source.module("project/a.py", "x = (1 +", "    (frame() or 2) +", "    3)").go()
    assert source.found()[0] == ("project/a.py", 3)


def test_no_frame_is_no_place() -> None:
    assert Places("/").find(None) == (None, None)


def test_the_project_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "repo" / "deep" / "train.py"
    script.parent.mkdir(parents=True)
    (tmp_path / "repo" / "pyproject.toml").touch()
    assert project_of(script) == tmp_path / "repo"
    (script.parent / ".git").mkdir()
    assert project_of(script) == script.parent


def test_a_script_in_no_project_has_its_folder() -> None:
    lonely = Path("/") / "nowhere" / "at" / "all.py"
    assert project_of(lonely) == lonely.parent
