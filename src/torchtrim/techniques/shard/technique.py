"""Shard: FSDP2 replaces `DistributedDataParallel`: each rank keeps a part of parameters and states.

With `DistributedDataParallel` each rank holds every parameter, gradient and optimizer state. Here
`fully_shard` splits them over the ranks, by the repeated blocks of the model and the rest in the root: a
block's parameters are gathered before it runs and freed afterwards, and its gradients are summed over the
ranks into the part that each keeps. `reshard = false` keeps the gathered parameters until backward has used
them: one gather less of each, for more memory. `blocks` are patterns of paths below the module, such as
`layers.*`, separated by blanks, to shard other blocks than the repeated ones.

The module keeps its place, hooks, names and `no_sync`, but no longer exchanges gradients. Optimizers get the
parts instead of their parameters. Buffers are broadcast as before. `state_dict` of the model, of each of its
modules and of the optimizers returns whole tensors, and `load_state_dict` accepts them, so files do not
change. All ranks must call it: if only one does, as in `if rank == 0: torch.save(model.state_dict(), ...)`,
it raises after a minute. The file of an optimizer created after the first forward contains parts.

On two ranks every sum has two terms, and a mean is a halving: identical, bit for bit, if a step exchanges
once and nothing sums sharded tensors. On more ranks, after micro-batches that each exchange, with clipping by
a norm, and with optimizers that use norms, such as LAMB, parts are summed first: equal up to rounding.

It exchanges half as much again, so it is tried only if no other plan fits the budget, each setting in a
separate run, and other techniques plan for the rest. It refuses a script that keeps parameters in its own
list, gradients from before, communication hooks, parameters that do not contribute to the loss or that
`DistributedDataParallel` ignores, and everything that `fully_shard` refuses. For mixed precision and
parameters on the host, call `fully_shard` in the script. `where` names modules in `DistributedDataParallel`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torchtrim.executor.places import module_at, wrong_options
from torchtrim.executor.registry import Handle, MeasuredTechnique, Option, Roots, all_or_none
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.step.exchanges import ranks_of, rounds_of
from torchtrim.step.step import Step

_OPTIONS = {"reshard": bool, "blocks": str}
_HELD = ("gradient", "parameter", "optimizer_state")
_ADD_UP = ("norm", "sum", "mean", "dot", "var", "std")
_AFTER_BACKWARD = ("optimizer", "other")


class Shard(MeasuredTechnique):
    """`where` names modules in `DistributedDataParallel`. `blocks`: patterns, by default repeated blocks."""

    name = "shard"
    does = "keep a part of parameters and states on each rank"
    takes = tuple(_OPTIONS)
    equivalence = "BITWISE"
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
            if profile.modules[one.module].parent < 0 and not one.unused_bytes
        ]

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Shard the named modules. Raises `ApplyFailed`."""
        from torchtrim.executor.gradient_sync import replica_at
        from torchtrim.techniques.shard.fsdp import ShardedReplica

        if any(type(value) is not _OPTIONS.get(name) for name, value in technique.options.items()):
            takes = "the options `reshard`, true or false, and `blocks`, patterns of paths"
            raise wrong_options(technique, takes)
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
