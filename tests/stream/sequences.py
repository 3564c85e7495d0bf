"""Random sequences of what a tracker's user does, on sessions of transformers: bounded and not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from stream import tiny

FRAMES = 14
_SEVERAL = ("add", "add", "click", "click", "remove", "renumber", "on", "on", "on", "back", "reset")
Step = tuple[Any, ...]


def steps(number: int) -> list[Step]:
    """A sequence, each thing possible when its turn comes. Objects are named by numbers that never return."""
    chance = random.Random(number)
    there: list[int] = []
    done, named = 0, 0
    found: list[Step] = []
    for _ in range(chance.randrange(4, 9)):
        what = chance.choice(_SEVERAL) if there else "add"
        at = (chance.randrange(8, 56), chance.randrange(8, 56))
        if what == "add":
            named += 1
            there.append(named)
            found.append(("click", done, named, at))
        elif what == "click":
            found.append(("click", max(0, done - chance.randrange(4)), chance.choice(there), at))
        elif what == "remove":
            found.append(("remove", there.pop(chance.randrange(len(there)))))
        elif what == "renumber":
            chance.shuffle(there)
            found.append(("renumber", list(there)))
        elif what == "reset":
            there, found = [], [*found, ("reset",)]
        else:
            sign = -1 if what == "back" else 1
            order = [
                one for n in range(chance.randrange(2, 5)) if 0 <= (one := done + sign * n) < FRAMES
            ]
            found.append(("propagate", order, sign < 0))
            done = order[-1]
    return found


class Ran(NamedTuple):
    """The masks of a run, and what its session held after each propagation."""

    masks: list[torch.Tensor]
    bytes: list[int]


def run(model: Any, sequence: list[Step], bind: Callable[[Any, Any], Any] = lambda *_: None) -> Ran:
    """Run a sequence on a new session of a video that is all there."""
    session = tiny.session(model, torch.cat([tiny.image(frame) for frame in range(FRAMES)]))
    bound = bind(session, model)
    masks, sizes = [], []
    for what, *given in sequence:
        if what == "click":
            tiny.prompt(session, given[0], given[1], given[2])
            masks.append(model(session, frame_idx=given[0]).pred_masks)
        elif what == "propagate":
            masks += _propagated(model, session, *given)
            sizes.append(bound.bytes if bound is not None else 0)
        else:
            _CHANGES[what](session, *given)
    return Ran(masks, sizes)


def _propagated(model: Any, session: Any, order: list[int], reverse: bool) -> list[torch.Tensor]:
    return [model(session, frame_idx=one, reverse=reverse).pred_masks for one in order]


def _remove(session: Any, name: int) -> None:
    """Take an object out, and number those after it anew, as the original predictor does."""
    _renumber(session, [one for one in session.obj_ids if one != name])


def _renumber(session: Any, names: list[int]) -> None:
    """Number the objects in the order of these names; one that is not among them goes."""
    before = dict(session._obj_id_to_idx)
    for table in (
        session.point_inputs_per_obj,
        session.mask_inputs_per_obj,
        session.output_dict_per_obj,
        session.frames_tracked_per_obj,
    ):
        taken = {name: table.pop(index) for name, index in before.items()}
        table.update({number: taken[name] for number, name in enumerate(names)})
    session._obj_id_to_idx.clear()
    session._obj_idx_to_id.clear()
    for number, name in enumerate(names):
        session._obj_id_to_idx[name], session._obj_idx_to_id[number] = number, name
    session.obj_ids = list(names)
    session.obj_with_new_inputs = [one for one in session.obj_with_new_inputs if one in names]


def _reset(session: Any) -> None:
    session.reset_inference_session()


_CHANGES: dict[str, Callable[..., None]] = {
    "remove": _remove,
    "renumber": _renumber,
    "reset": _reset,
}
