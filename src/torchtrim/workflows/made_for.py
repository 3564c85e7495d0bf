"""Whether a plan was made for this script, and for this torchtrim."""

from __future__ import annotations

from torchtrim.errors import ApplyFailed, UsageError
from torchtrim.executor.fingerprint import sha256_of
from torchtrim.executor.registry import check_known
from torchtrim.records.plan import Plan
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Workload


def check_script(plan: Plan, workload: Workload) -> None:
    """Raises `ApplyFailed` for a plan that was made for another script, and `UsageError` for one with a
    technique or an option that this torchtrim does not have."""
    for one in plan.techniques:
        check_known(one)
    path = workload.path if isinstance(workload, Script) else None
    if path is None or not plan.script_sha256:
        return
    if not path.is_file():
        raise UsageError(f"there is no script {path}.")
    if sha256_of(path) != plan.script_sha256:
        raise ApplyFailed(
            f"the plan was made for {plan.script}, and {path.name} is another script or has changed "
            "since. Plan again; or, if you know that it still fits, delete `script_sha256` from the plan."
        )
