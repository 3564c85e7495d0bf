"""Bounded state: the state of an endless stream is limited to the data that later frames read.

`where` names models that adapters of `torchtrim.stream` support: trackers of transformers, whose sessions are
bounded on first use; video predictors of the `sam2` package and of SAMURAI, whose states are bounded when
propagation begins; language models with full attention, which get a cache of sinks and a window.

Options: `corrections`, `turns`, `keep` and `budget` as for `bound_session`; `sinks` and `window` for language
models. The equivalence is `BITWISE` within the live set. `keep` and `window` may drop data that is read
later, so they need a plan that says `SEMANTIC`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchtrim.errors import ApplyFailed, TorchtrimError, UsageError
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Option, Roots, TechniqueUnit
from torchtrim.records.plan import Technique
from torchtrim.step.step import Step

_OF_STATES = ("corrections", "turns", "keep", "budget")
_OF_CACHES = ("sinks", "window")
_LOSSY = ("keep", "window")


class BoundedState(TechniqueUnit):
    """Bounds the sessions, states or caches of models when they are first used."""

    name = "bounded_state"
    does = "keep only the state that later frames read"
    takes = (*_OF_STATES, *_OF_CACHES)
    equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Return none: growth is not part of one step's peak, so only a plan written by hand uses it."""
        return ()

    def edits(self, step: Step, option: Option) -> None:
        """Return None: no step has options."""

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Bound the state of the named models. Raises `ApplyFailed` for an unsupported model."""
        lossy = [name for name in _LOSSY if name in technique.options]
        if lossy and technique.equivalence != "SEMANTIC":
            raise ApplyFailed(
                f"bounded_state with {lossy[0]}= may drop data that is read later, which changes results. "
                'To allow that, write equivalence = "SEMANTIC" into the plan.'
            )
        with contextlib.ExitStack() as undo:
            for where in technique.where:
                undo.callback(_bind(module_at(roots, where), where, dict(technique.options)))
            return BoundStates(undo.pop_all())


TECHNIQUE = BoundedState()


class BoundStates:
    """Models with bounded state."""

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self._undo = undo

    def revert(self) -> None:
        """Restore the models, and make their states plain and unbounded, in reverse order."""
        self._undo.close()


def knows(module: Any) -> bool:
    """Return True if an adapter bounds this model's state without changing results."""
    return _kind(module) in (_bind_sessions, _bind_states)


def _bind(module: Any, where: str, options: dict[str, Any]) -> Callable[[], None]:
    bind = _kind(module)
    if bind is None:
        raise ApplyFailed(
            f"`{where}` is a {type(module).__name__}, and no adapter knows the layout of its state. "
            "Supported models: the video trackers of transformers, the predictors of the sam2 package and of "
            "SAMURAI, and language models of transformers. For other modules, declare the caches in your own "
            "source: torchtrim.bound_caches(module, {...})."
        )
    try:
        return bind(module, options)
    except UsageError as error:
        raise ApplyFailed(f"bounded_state on `{where}`: {error}") from error


def _kind(module: Any) -> Callable[[Any, dict[str, Any]], Callable[[], None]] | None:
    takes = inspect.signature(type(module).forward).parameters if hasattr(module, "forward") else {}
    if "inference_session" in takes:
        return _bind_sessions
    if hasattr(type(module), "propagate_in_video") and hasattr(module, "num_maskmem"):
        return _bind_states
    if "past_key_values" in takes and hasattr(module, "config"):
        return _bind_caches
    return None


def _only(options: dict[str, Any], known: Sequence[str], what: str) -> None:
    wrong = sorted(set(options) - set(known))
    if wrong:
        raise UsageError(f"{wrong[0]}= is not an option for {what}; use {', '.join(known)}.")


def _bind_sessions(model: Any, options: dict[str, Any]) -> Callable[[], None]:
    from torchtrim.stream.records import Objects
    from torchtrim.stream.sessions import bound_session

    _only(options, _OF_STATES, "sessions")
    bounds: weakref.WeakSet[Any] = weakref.WeakSet()

    def bind(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        session = kwargs.get("inference_session", args[0] if args else None)
        if session is not None and not isinstance(session.output_dict_per_obj, Objects):
            bounds.add(bound_session(session, model, **options))

    hook = model.register_forward_pre_hook(bind, with_kwargs=True)
    return functools.partial(_release, hook.remove, bounds)


def _bind_states(predictor: Any, options: dict[str, Any]) -> Callable[[], None]:
    from torchtrim.stream.predictors import bound_state
    from torchtrim.stream.records import Objects

    _only(options, tuple(one for one in _OF_STATES if one != "keep"), "states")
    bounds: weakref.WeakSet[Any] = weakref.WeakSet()
    own = vars(predictor).get("propagate_in_video")
    propagate = predictor.propagate_in_video

    @functools.wraps(propagate)
    def bounded(inference_state: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if not isinstance(inference_state.get("output_dict_per_obj"), Objects):
            bounds.add(bound_state(inference_state, predictor, **options))
        frames: Iterator[Any] = propagate(inference_state, *args, **kwargs)
        return frames

    predictor.propagate_in_video = bounded

    def put_back() -> None:
        if own is not None:
            predictor.propagate_in_video = own
        else:
            del predictor.propagate_in_video

    return functools.partial(_release, put_back, bounds)


def _release(undo: Callable[[], None], bounds: weakref.WeakSet[Any]) -> None:
    undo()
    for bound in list(bounds):
        bound.release()
    bounds.clear()


def _bind_caches(model: Any, options: dict[str, Any]) -> Callable[[], None]:
    from torchtrim.stream.kv import CallMasks, sink_cache

    _only(options, _OF_CACHES, "caches")
    if "window" not in options:
        raise UsageError(
            "a language model reads every token forever, so dropping any changes its results. To limit it "
            "to the newest tokens, pass window=, such as 1024."
        )
    try:
        sink_cache(model.config, **options)
    except TorchtrimError as error:
        raise ApplyFailed(str(error)) from error

    def bind(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        passed = kwargs.get("past_key_values")
        if passed is None and kwargs.get("use_cache") is False:
            return None
        if passed is not None and (
            type(passed).__name__ != "DynamicCache" or passed.get_seq_length()
        ):
            return None
        cache = sink_cache(model, **options)
        kwargs = kwargs | {"past_key_values": cache}
        return CallMasks(cache)(module, args, kwargs) or (args, kwargs)

    remove: Callable[[], None] = model.register_forward_pre_hook(bind, with_kwargs=True).remove
    return remove
