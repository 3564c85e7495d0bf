"""Roles of operators in the order they run: an operator that one device decomposes counts as on the others.

Dropout is one kernel on a GPU and four operators on a CPU; attention and RMSNorm are one or many, by device,
type and arguments. Operators inside such a group have names of their own, such as `dropout-div_`, and the one
that computes its result has the group's. So ordinals count what the program calls, whatever kernels run.
Views have no role, since kernels of one role return other layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from torchtrim.records.operator_names import kernels_of, role_of

ATTENTION, DROPOUT, RMS_NORM = "scaled_dot_product_attention", "dropout", "rms_norm"
RECURRENT = frozenset(("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"))
"""Modules that one kernel computes on a GPU, and one for each layer or for each moment on a CPU."""
UNNAMED = ""
"""The role of operators that no place names: views, and operators that are not torch's own."""
_VIEWS = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "expand"),
        *("transpose", "t", "permute"),
        *("slice", "select", "split", "split_with_sizes", "unbind", "squeeze", "unsqueeze"),
        *("as_strided", "diagonal", "unfold", "detach", "alias", "lift_fresh"),
    )
)
_MASKS = frozenset(("add", "add_", "masked_fill", "masked_fill_", "where"))
_DRAWS = frozenset(("empty_like", "bernoulli_", "div_", "mul_", "mul", DROPOUT))
_OF_SCORES = _MASKS | _DRAWS | {"softmax", "bmm", "clone", "_to_copy"}
"""Operators of attention between its two products."""
_READ = _OF_SCORES | {ATTENTION, "pow", "mean", "rsqrt", "scalar_tensor"}
"""Roles that depend on what the operator reads, or that others depend on."""

_STEPS = {
    ("clone", "scaled"): ("attention-clone", "scaled"),
    ("clone", "attended"): ("attention-clone", "attended"),
    ("div_", "noise"): (f"{DROPOUT}-div_", "noise"),
    ("mul_", "noise"): (f"{DROPOUT}-mul_", "noise"),
    ("scalar_tensor", ""): ("scalar_tensor", "scalar"),
    ("_to_copy", ""): ("_to_copy", "cast"),
    ("pow", ""): ("pow", "squares"),
    ("pow", "cast"): ("pow", "cast squares"),
    ("mean", "squares"): ("mean", "mean"),
    ("mean", "cast squares"): ("mean", "cast mean"),
    ("rsqrt", "norm"): (f"{RMS_NORM}-rsqrt", "inverse"),
    ("rsqrt", "cast norm"): (f"{RMS_NORM}-rsqrt", "cast inverse"),
    ("mul", "normed"): (RMS_NORM, ""),
    ("mul", "cast normed"): (RMS_NORM, "cast result"),
    ("_to_copy", "cast result"): (f"{RMS_NORM}-_to_copy", ""),
}
"""By role and mark of the first storage that it reads: the role in its group, and the mark of its result."""
_WHOLE = kernels_of("rnn") - {"mkldnn_rnn_layer"}
_EARLIER = {"mean": ("mean", "pow"), "cast mean": ("mean", "pow", "_to_copy")}
"""Operators of RMSNorm that nothing tells from the program's own until its epsilon is added."""


class OperatorOrdinal(NamedTuple):
    """One operator inside a module call: its role, and its ordinal among operators of that role."""

    name: str
    ordinal: int


def is_inside(role: str) -> bool:
    """Return True if an operator is part of what one kernel computes on other devices."""
    return "-" in role or role == "empty_like"


class OperatorRoles:
    """Names operators as they run, by their inputs: noise, scaled factors, the mean of squares.

    A storage is any key; one with a mark must not be another storage's before `clear`. After `role`, `joined`
    has the roles of operators before that belong to the operator's group after all, last first.
    """

    def __init__(self) -> None:
        self._marks: dict[Hashable, str] = {}
        self._mark = ""
        self._attends = self._is_read = False
        self.joined: tuple[str, ...] = ()

    def clear(self) -> None:
        """Forget all storages."""
        self._marks.clear()
        self._attends = False

    def role(
        self, name: str, overload: str, read: Callable[[], Sequence[Hashable]], *, recurs: bool
    ) -> str:
        """Return the role of the operator that runs next; `read` returns the storages that it reads.

        `recurs`: a recurrent module runs it.
        """
        role, self._mark, self.joined = role_of(name), "", ()
        self._is_read = role in _READ and not recurs
        if role in _VIEWS:
            return UNNAMED
        if recurs:
            return role if name in _WHOLE else f"rnn-{role}"
        if not self._is_read:
            self._attends = False
            return role
        storages = read()
        marks = [self._marks.get(storage, "") for storage in storages] or [""]
        if role == "bernoulli_":
            self._mark = "noise"
        if self._attends and role in _OF_SCORES:
            return self._of_attention(role, marks)
        self._attends = False
        return self._of_pair(role, overload, marks) or self._of_first(role, marks[0])

    @property
    def asks(self) -> bool:
        """Return True if `made` needs the storage of the operator's result."""
        return self._is_read and bool(self._mark or self._marks)

    def made(self, storage: Hashable) -> None:
        """Note the storage of the last operator's result."""
        if self._mark:
            self._marks[storage] = self._mark
        else:
            self._marks.pop(storage, None)

    def _of_pair(self, role: str, overload: str, marks: Sequence[str]) -> str:
        """Return the role of an operator that its overload or its second tensor tells, else nothing."""
        if (role, overload) == ("mul", "Scalar"):
            self._mark = "scaled"
            return "attention-scale"
        if role == "bmm" and marks == ["scaled", "scaled"]:
            self._attends, self._mark = True, "scores"
            return "attention-bmm"
        if (role, overload) == ("add_", "Scalar") and marks[0] in _EARLIER:
            self.joined, self._mark = _EARLIER[marks[0]], marks[0].replace("mean", "norm")
            return f"{RMS_NORM}-add_"
        if role == "mul" and marks[-1].endswith("inverse"):
            self._mark = marks[-1].replace("inverse", "normed")
            return f"{RMS_NORM}-mul"
        if role == "mul" and "noise" in marks:
            return DROPOUT
        if role == "where" and "scalar" in marks:
            return "mask-where"
        if role == ATTENTION:
            self._mark = "attended"
        return ""

    def _of_first(self, role: str, mark: str) -> str:
        if role == "bernoulli_":
            return f"{DROPOUT}-bernoulli_"
        named, made = _STEPS.get((role, mark), (role, ""))
        self._mark = self._mark or made
        return named

    def _of_attention(self, role: str, marks: Sequence[str]) -> str:
        if role == "bmm" and marks[0] == "weights":
            self._attends, self._mark = False, "attended"
            return ATTENTION
        if role == "softmax" or ("weights" in marks and role != "empty_like"):
            self._mark = "weights"
        elif role != "bernoulli_":
            self._mark = marks[0]
        return f"attention-{role}"
