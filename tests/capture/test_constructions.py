"""The line that constructed a module."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn

from torchtrim.capture.constructions import Constructions
from torchtrim.dispatch.patches import Patches
from torchtrim.dispatch.places import Places, line_of


def line(function: Callable[[], object], offset: int = 1) -> int:
    return function.__code__.co_firstlineno + offset


def conv() -> nn.Module:
    return nn.Conv2d(3, 4, 3)


class Block(nn.Module):
    def __init__(self, depth: int = 0) -> None:
        super().__init__()
        self.inner = Block(depth - 1) if depth else nn.ReLU()


class Special(Block):
    def __init__(self) -> None:
        super().__init__(1)


def special() -> Special:
    return Special()


@pytest.fixture
def known() -> Iterator[Constructions]:
    patches, found = Patches(), Constructions(Places(str(Path(__file__).parent)))
    found.watch(patches)
    yield found
    patches.undo()


def made(known: Constructions, module: nn.Module) -> tuple[str, int]:
    site = known.site(module)
    assert site is not None
    assert site[0].co_filename == __file__
    return site[0].co_name, line_of(site)


def test_a_module_of_torch_is_made_where_it_is_called(known: Constructions) -> None:
    assert made(known, conv()) == ("conv", line(conv))


def test_a_class_of_the_user_is_made_where_it_is_called_and_its_inside_inside(
    known: Constructions,
) -> None:
    model = special()
    assert made(known, model) == ("special", line(special))
    inner = model.inner
    assert isinstance(inner, Block)
    assert made(known, inner) == ("__init__", line(Block.__init__, 2))
    assert made(known, inner.inner) == ("__init__", line(Block.__init__, 2))


def test_copies_have_the_place_of_their_original(known: Constructions) -> None:
    assert made(known, copy.deepcopy(nn.Sequential(conv()))[0]) == ("conv", line(conv))
    layer = nn.TransformerEncoderLayer(8, 2)
    many = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert made(known, many.layers[1])[1] == made(known, layer)[1]


def test_made_before_watching_is_unknown_and_its_copy_is_of_the_copying() -> None:
    before, patches = conv(), Patches()
    init = nn.Module.__init__
    known = Constructions(Places(str(Path(__file__).parent)))
    known.watch(patches)
    assert known.site(before) is None
    assert made(known, pickle.loads(pickle.dumps(before)))[0].startswith("test_made_before")
    patches.undo()
    assert nn.Module.__init__ is init
    assert known.site(conv()) is None


def test_modules_are_not_kept_alive(known: Constructions) -> None:
    module = conv()
    assert known._sites
    del module
    gc.collect()
    assert not known._sites


def test_an_error_of_a_constructor_is_the_users(known: Constructions) -> None:
    with pytest.raises(TypeError, match="unexpected"):
        nn.Module(colour="red")
