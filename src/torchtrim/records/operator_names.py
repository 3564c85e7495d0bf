"""Names of operators and modules as a person reads them."""

from __future__ import annotations

from collections.abc import Set

from torchtrim.records.profile import Profile


def base_name(operator: str) -> str:
    """`"aten::addmm.default"` -> `"aten::addmm"`: the operator without its overload."""
    return operator.partition(".")[0]


def module_paths(profile: Profile) -> Set[str]:
    """Paths of all modules, the root's name first."""
    return {module.path for module in profile.modules}


def owner(profile: Profile, storage: int, modules: Set[str]) -> str:
    """Path of the module that a named storage belongs to, or whose operator made the storage.

    The name of the optimizer for its states; empty where there is neither.
    """
    found = profile.storages[storage]
    if found.name:
        return _module_prefix(found.name, modules)
    return profile.module_of(found.birth) if found.birth >= 0 else ""


def top_levels(path: str, levels: int = 2) -> str:
    """`"net.encoder.layers.3"` -> `"net.encoder"`."""
    return ".".join(path.split(".")[:levels])


def _module_prefix(name: str, modules: Set[str]) -> str:
    """The longest module path that starts the name, else the first part of a name with several.

    States are named after their optimizer, `"AdamW.0.exp_avg"`, which is no module's path.
    """
    parts = name.split(".")[:-1]
    for length in range(len(parts), 0, -1):
        path = ".".join(parts[:length])
        if path in modules:
            return path
    return parts[0] if parts else ""
