"""Shard: FSDP2 replaces `DistributedDataParallel`: each rank keeps a part of parameters and states.

With `DistributedDataParallel` each rank holds every parameter, gradient and optimizer state. Here
`fully_shard` splits them over the ranks, by the repeated blocks of the model and the rest in the root: a
block's parameters are gathered before it runs and freed afterwards, and its gradients are summed over the
ranks into the part that each keeps. `reshard = false` keeps the gathered parameters until backward has used
them: one gather less of each, for more memory. `blocks` are patterns of paths below the module, such as
`layers.*`, separated by blanks, to shard other blocks than the repeated ones.

The module stays in place, and so do its hooks, names and `no_sync`, but it no longer exchanges gradients.
Optimizers get the parts instead of their parameters. Buffers are broadcast as before. `state_dict` of the
model, of each of its modules and of the optimizers returns whole tensors, and `load_state_dict` accepts them,
so files do not change. All ranks must call it, since each has a part: if only one does, as in `if rank == 0:
torch.save(model.state_dict(), ...)`, it raises after a minute and says so. The file of an optimizer created
after the first forward contains parts.

On two ranks every sum has two terms, and a mean is a halving: identical, bit for bit, if a step exchanges
once and nothing sums sharded tensors. On more ranks, after micro-batches that each exchange, with clipping by
a norm, and with optimizers that use norms, such as LAMB, the results are equal up to rounding: parts are
summed first.

It exchanges half as much again, so it is tried only if no other plan fits the budget, each setting in a run
of its own, and other techniques plan for the rest. It refuses a script that keeps parameters in a list of its
own, gradients from before, communication hooks, parameters that do not contribute to the loss or that
`DistributedDataParallel` ignores, and everything that `fully_shard` refuses. For mixed precision and
parameters on the host, call `fully_shard` in the script. `where` names modules in `DistributedDataParallel`.
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
    """`where` names modules in `DistributedDataParallel`.

    `reshard`: free a block's parameters after its forward. `blocks`: patterns of paths below the module, by
    default the repeated blocks.
    """

    name = "shard"
    takes = tuple(_OPTIONS)
    equivalence: Equivalence = "BITWISE"
    helps: tuple[str, ...] = ()
    ways = 2

    def options(self, step: Step) -> Sequence[Option]:
        """Return each replica that uses all of its parameters, with both settings of `reshard`."""
        profile = step.profile
        if profile is None or profile.world < 2:
            return []
        less: Equivalence | None = None if _adds_up_alike(profile) else "ROUNDING"
        return [
            Option(self.name, profile.modules[one.module].path, (), None, (("reshard", on),), less)
            for on in (True, False)
            for one in profile.replicas
            if _uses_all_parameters(profile, one)
        ]

    def edits(self, step: Step, option: Option) -> None:
        """Return None: the saving is measured by a run."""

    def apply(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """Shard the named modules. Raises `ApplyFailed`."""
        from torchtrim.executor.gradient_sync import replica_at
        from torchtrim.techniques.shard.fsdp import ShardedReplica

        for name, value in technique.options.items():
            if type(value) is not _OPTIONS.get(name):
                raise ApplyFailed(
                    "shard has the options `reshard`, true or false, and `blocks`, patterns of paths; "
                    f"the plan has {technique.options!r}."
                )
        reshard = technique.options.get("reshard", True) is True
        blocks = tuple(str(technique.options.get("blocks", "")).split())
        return all_or_none(
            technique.where,
            lambda where: ShardedReplica(
                where, replica_at(where, module_at(roots, where), self.name), reshard, blocks
            ),
        )

    def bars(self, technique: Technique) -> Collection[str]:
        """Return the techniques that change the exchange of `DistributedDataParallel`."""
        return ("data_parallel", "compress_gradients")


TECHNIQUE = Shard()


def _uses_all_parameters(profile: Profile, replica: Replica) -> bool:
    return profile.modules[replica.module].parent < 0 and not replica.unused_bytes


def _adds_up_alike(profile: Profile) -> bool:
    """Return True if no sum has more than two terms, which another order could round differently."""
    if ranks_of(profile) > 2 or rounds_of(profile).rounds > 1:
        return False
    held = {n for n, one in enumerate(profile.storages) if one.kind in _HELD}
    return not any(
        operator.phase in _AFTER_BACKWARD
        and any(name in operator.name for name in _ADD_UP)
        and held & {use.storage for use in operator.inputs}
        for operator in profile.operators
    )
