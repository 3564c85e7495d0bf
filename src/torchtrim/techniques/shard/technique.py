"""Shard: FSDP2 in the place of `DistributedDataParallel`: each rank keeps a part of parameters and states.

With `DistributedDataParallel` each rank holds every parameter, gradient and optimizer state. Here
`fully_shard` splits them over the ranks, by the blocks that the model repeats and what is left in the root: a
block's parameters are gathered before it runs and dropped afterwards, its gradients are added up over the
ranks into the part that each keeps. `reshard = false` keeps the gathered parameters until backward has used
them: one gather less of each, for more memory. `blocks` are patterns of paths below the module, such as
`layers.*`, separated by blanks, where it should not be those that repeat.

The module stays where it is, and so do its hooks, names and `no_sync`; it exchanges nothing any more.
Optimizers get the parts in the place of the parameters that they were made for. Buffers are broadcast as
before. `state_dict` of the model, of each of its modules and of the optimizers gives whole tensors and
`load_state_dict` takes them, so files are the same; all ranks have to ask for it, since each has a part:
where one asks alone, as in `if rank == 0: torch.save(model.state_dict(), ...)`, it raises after a minute and
says so. The file of an optimizer that is made after the first forward has parts.

On two ranks every sum is of two numbers, and a mean a halving: identical, bit for bit, where a step exchanges
once and nothing adds up sharded tensors. On more ranks, after micro-batches that each exchange, with clipping
by a norm, and with optimizers that use norms, such as LAMB, equal up to rounding: parts are added up first.

It exchanges half as much again, so it is tried where no other plan fits the budget, each way in a run of its
own, and other techniques plan within what is left. Refused are a script that keeps parameters in a list of
its own, gradients from before, communication hooks, parameters that have no part in the loss or that
`DistributedDataParallel` has to ignore, and what `fully_shard` refuses. Mixed precision and parameters on
the host are left to scripts that call `fully_shard`.
`where` names modules in `DistributedDataParallel`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Option, all_or_none
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile, Replica
from torchtrim.step.exchanges import ranks_of, rounds_of
from torchtrim.step.step import Step

_OPTIONS = {"reshard": bool, "blocks": str}
_HELD = ("gradient", "parameter", "optimizer_state")
_ADD_UP = ("norm", "sum", "mean", "dot", "var", "std")
_AFTER_BACKWARD = ("optimizer", "other")


class Shard:
    """`where` names modules in `DistributedDataParallel`. `reshard`: drop a block's parameters after its
    forward. `blocks`: patterns of paths below the module, none for the blocks that repeat."""

    name = "shard"
    takes = tuple(_OPTIONS)
    equivalence: Equivalence = "BITWISE"
    helps: tuple[str, ...] = ()
    ways = 2

    def options(self, step: Step) -> Sequence[Option]:
        """Each replica that uses all of its parameters, both ways."""
        profile = step.profile
        if profile is None or profile.world < 2:
            return []
        less: Equivalence | None = None if _adds_up_alike(profile) else "ROUNDING"
        return [
            Option(self.name, profile.modules[one.module].path, (), None, (("reshard", on),), less)
            for on in (True, False)
            for one in profile.replicas
            if _whole(profile, one)
        ]

    def edits(self, step: Step, option: Option) -> None:
        """None: what it saves is measured."""

    def apply(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """Shard the named modules. Raises `ApplyFailed`."""
        from torchtrim.executor.gradient_sync import replica_at
        from torchtrim.techniques.shard.fsdp import Sharded

        for name, value in technique.options.items():
            if type(value) is not _OPTIONS.get(name):
                raise ApplyFailed(
                    "shard has the options `reshard`, true or false, and `blocks`, patterns of paths, and "
                    f"the plan has {technique.options!r}."
                )
        reshard = technique.options.get("reshard", True) is True
        blocks = tuple(str(technique.options.get("blocks", "")).split())
        return all_or_none(
            technique.where,
            lambda where: Sharded(
                where, replica_at(where, module_at(roots, where), self.name), reshard, blocks
            ),
        )

    def bars(self, technique: Technique) -> Collection[str]:
        """What changes how `DistributedDataParallel` exchanges."""
        return ("data_parallel", "compress_gradients")


TECHNIQUE = Shard()


def _whole(profile: Profile, replica: Replica) -> bool:
    """Whether it is a root all of whose parameters have a part in the loss."""
    return profile.modules[replica.module].parent < 0 and not replica.unused_bytes


def _adds_up_alike(profile: Profile) -> bool:
    """Whether no sum is of more than two numbers that another order could round otherwise."""
    if ranks_of(profile) > 2 or rounds_of(profile).rounds > 1:
        return False
    held = {n for n, one in enumerate(profile.storages) if one.kind in _HELD}
    return not any(
        operator.phase in _AFTER_BACKWARD
        and any(name in operator.name for name in _ADD_UP)
        and held & {use.storage for use in operator.inputs}
        for operator in profile.operators
    )
