"""Compress gradients: `DistributedDataParallel` exchanges them in bfloat16, half of the bytes.

Each rank rounds its gradients to bfloat16, the ranks' gradients are summed in bfloat16, and the sum is
upcast: torch's own `bf16_compress_hook`. Gradients, parameters and optimizer state stay float32. It pays if
exchanges outlast backward and the network is slow; on one machine the two copies of each gradient can cost
more than the exchange. It lowers no peak: each bucket has a copy of half its size during its exchange.

torch registers that hook with NCCL only; gloo can sum bfloat16 too, so gloo is supported as well. The step
computes a different function: the certificate says AS ASKED if everything else equals a run with gradients
rounded by hand, and shows the losses of both. A script with its own communication hook is refused. `where`
names modules in `DistributedDataParallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchtrim.executor.places import module_at, wrong_options
from torchtrim.executor.registry import Handle, MeasuredTechnique, Option, Roots, all_or_none
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile, Replica
from torchtrim.step.exchanges import reduces_of
from torchtrim.step.step import Step

_OPTIONS = {"dtype": "bfloat16"}


class CompressGradients(MeasuredTechnique):
    """`where` names modules in `DistributedDataParallel`. `dtype`: `bfloat16`."""

    name = "compress_gradients"
    does = "exchange gradients in bfloat16"
    takes = tuple(_OPTIONS)
    equivalence = "SEMANTIC"

    def options(self, step: Step) -> Sequence[Option]:
        """Return each replica that exchanges float32."""
        profile = step.profile
        if profile is None:
            return []
        return [
            Option(self.name, profile.modules[one.module].path, (), None, (*_OPTIONS.items(),))
            for one in profile.replicas
            if _exchanges_float32(profile, one)
        ]

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Register the hook. Raises `ApplyFailed` and leaves the model unchanged."""
        from torchtrim.executor.gradient_sync import halved

        return _hooked(roots, technique, halved)

    def by_hand(self, roots: Roots, technique: Technique) -> Handle:
        """Register a hook, as a person would write it, that rounds, sums, waits and upcasts."""
        from torchtrim.executor.gradient_sync import halved_by_hand

        return _hooked(roots, technique, halved_by_hand)

    def advice(self, technique: Technique) -> str:
        """Return what to check."""
        return "compare the losses of a longer run before you keep compressed gradients"


TECHNIQUE = CompressGradients()


def _hooked(roots: Roots, technique: Technique, hook: Callable[..., Any]) -> Handle:
    from torchtrim.executor.gradient_sync import Compressed, replica_at

    if technique.options != _OPTIONS:
        raise wrong_options(technique, "one option, `dtype`, which must be bfloat16")
    return all_or_none(
        technique.where,
        lambda where: Compressed(
            where, replica_at(where, module_at(roots, where), technique.name), hook
        ),
    )


def _exchanges_float32(profile: Profile, replica: Replica) -> bool:
    uses = [use for _, one in reduces_of(profile) for use in profile.operators[one.operator].inputs]
    return replica.gradient_bytes > 0 and any(use.dtype == "float32" for use in uses)
