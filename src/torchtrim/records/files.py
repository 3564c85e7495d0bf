"""Saves and loads records. Files are untrusted input: sizes are bounded, errors name the field."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from torchtrim import __version__
from torchtrim.core.words import nearest
from torchtrim.errors import UnreadableInput, UsageError
from torchtrim.records.commands import command, from_here
from torchtrim.records.operator_names import with_roles
from torchtrim.records.plan import Plan, PlanProof
from torchtrim.records.profile import Profile, check

MOST_BYTES = 2**30  # Arbitrary; bounds what a hostile file makes us read.
_MOST_PLAN_BYTES = 2**22  # Arbitrary, for the same reason.
_PIECE = 2**20  # Arbitrary; one MiB per read.
_MOST_NAME = 80  # Arbitrary; names in a message fit a line.
_NUMBER = re.compile(r"\d{1,9}")
_UPDATE = "A newer torchtrim wrote it: update, or plan again with this version."
_CORRECT = "Correct or remove that field, or plan again."
_TABLES = (
    *("techniques", "fingerprint", "predicted", "pins", "pipeline", "sizes", "graphs"),
    "certified",
)
T = TypeVar("T")


written: list[Path] = []
"""Files that this process has written, for a message after an interruption."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write the file completely or not at all. Raises `UsageError` if it cannot be written."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}. Choose a folder that exists and is writable."
        ) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.umask(mask := os.umask(0))
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
        written.append(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        if isinstance(error, OSError):
            raise UsageError(f"cannot write {path}: {error.strerror}.") from None
        raise


def read_bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file of at most `most`. Raises `UnreadableInput` for anything else."""
    try:
        with _regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = _head(file, most + 1) if size <= most else b""
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UnreadableInput(f"cannot read {path}: {why}.") from None
    if max(size, len(data)) > most:
        raise UnreadableInput(f"{path} is too large: at most {most} bytes are read.")
    return data


def read_head(path: Path, most: int) -> bytes:
    """Return the first `most` bytes of a regular file. Raises `OSError` for anything else."""
    with _regular(path) as file:
        return _head(file, most)


def _head(file: FileIO, most: int) -> bytes:
    """Return the first bytes, read in pieces: a file may report size 0, or grow during the read."""
    data = bytearray()
    while piece := file.read(min(_PIECE, most - len(data))):
        data += piece
    return bytes(data)


def _regular(path: Path) -> FileIO:
    """Open a regular file. Never blocks on a pipe, a device or a folder, even one swapped in meanwhile."""
    _check_regular(path.stat().st_mode, path)
    nonblocking = getattr(os, "O_NONBLOCK", 0)
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | nonblocking))
    try:
        _check_regular(os.fstat(file.fileno()).st_mode, path)
    except OSError:
        file.close()
        raise
    return file


def _check_regular(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder; pass a file", str(path))
    if not stat.S_ISREG(mode):
        reason = "it is a pipe, a device or a socket; copy its contents into a file and pass that"
        raise OSError(errno.EINVAL, reason, str(path))


def save_profile(profile: Profile, path: Path) -> None:
    """Save a profile as JSON."""
    write_atomically(path, msgspec.json.encode(profile))


def load_profile(path: Path) -> Profile:
    """Load a profile. Raises `UnreadableInput`, naming the field, if the file is not one."""
    profile = decode(read_bounded(path, MOST_BYTES), Profile, str(path))
    wrong = check(profile)
    if wrong is not None:
        raise UnreadableInput(f"{path} is not a valid profile: {wrong}. Record it again.")
    return profile


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection: it would take ten times as long as creating a million records."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def decode(data: bytes, kind: type[T], source: str, *, name: str = "") -> T:
    """Decode JSON into a record, called `name` in errors. Raises `UnreadableInput`, naming the field."""
    _check_version(data, kind, source)
    try:
        with without_collection():
            return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableInput(
            f"{source} is not a readable {name or kind.__name__.lower()}: {error}. "
            "It is damaged, or another program wrote it; create it again."
        ) from None


class _Versioned(msgspec.Struct):
    schema_version: int = 1


def _check_version(data: bytes, kind: type[Any], source: str) -> None:
    reads = _version_of(kind)
    try:
        version = msgspec.json.decode(data, type=_Versioned).schema_version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if reads is None or version == reads:
        return
    if kind is Profile and version < reads:
        raise UnreadableInput(
            f"an older torchtrim wrote {source}: it has schema_version {version}, and this version reads "
            f"{reads}, which adds the tensors that autograd saved. Record it again: `torchtrim diagnose "
            "SCRIPT --out FOLDER` writes FOLDER/profile.json."
        )
    raise UnreadableInput(
        f"{source} has schema_version {version}, and this torchtrim reads {reads}. "
        "Update torchtrim, or write the file again with this version."
    )


def _version_of(kind: type[Any]) -> int | None:
    fields = msgspec.structs.fields(kind)
    return next((int(f.default) for f in fields if f.name == "schema_version"), None)


def save_plan(plan: Plan, path: Path) -> None:
    """Save a plan as TOML, for people to read, edit and commit."""
    applies = command("run", "--plan", str(from_here(path)), script=plan.script)
    write_atomically(path, plan_text(plan, applies).encode())


def load_plan(path: Path) -> Plan:
    """Load a plan. Raises `UnreadableInput`, naming the field, if the file is not one."""
    return load_toml(
        path,
        Plan,
        name="plan",
        most=_MOST_PLAN_BYTES,
        newer=_UPDATE,
        correction=_CORRECT,
        upgrade=_upgraded,
    )


def _upgraded(tree: dict[str, Any]) -> dict[str, Any]:
    """Convert a plan of schema 1 to schema 2, which names roles instead of kernels."""

    def renamed(places: Any) -> Any:
        if not isinstance(places, list):
            return places
        return [with_roles(one) if isinstance(one, str) else one for one in places]

    units, pins = tree.get("techniques"), tree.get("pins")
    for unit in units if isinstance(units, list) else ():
        if isinstance(unit, dict) and "where" in unit:
            unit["where"] = renamed(unit["where"])
    if isinstance(pins, dict):
        tree["pins"] = {name: renamed(places) for name, places in pins.items()}
    return {**tree, "schema_version": 2}


def load_toml(
    path: Path,
    kind: type[T],
    *,
    name: str,
    most: int,
    newer: str,
    correction: str,
    upgrade: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> T:
    """Load a record from TOML of at most `most` bytes. Raises `UnreadableInput`, naming the field.

    `newer` and `correction` are the advice for a file of another version and for a wrong field. `upgrade`
    converts a file of the previous version.
    """
    data = read_bounded(path, most)
    tree = _toml(path, data, name)
    reads = _version_of(kind) or 1
    version = tree.get("schema_version", 1)
    if upgrade is not None and version == reads - 1:
        tree = upgrade(tree)
    elif version != reads:
        raise UnreadableInput(
            f"{path} has schema_version {version!r}, and this torchtrim reads {reads}. {newer}"
        )
    advice = newer if _is_newer(tree.get("torchtrim")) else correction
    try:
        found = msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise UnreadableInput(f"{path} is not a valid {name}: {error}. {advice}") from None
    for unknown in _unknown(tree, msgspec.to_builtins(found)):
        raise UnreadableInput(f"{path} is not a valid {name}: {unknown}. {advice}")
    return found


def _is_newer(version: object) -> bool:
    theirs, ours = (tuple(map(int, _NUMBER.findall(str(one)))) for one in (version, __version__))
    return theirs > ours


def _unknown(read: Any, known: Any, where: str = "$") -> Iterator[str]:
    """Yield a message for each field in the file that the record does not have."""
    if isinstance(read, dict) and isinstance(known, dict):
        for name, value in read.items():
            if name in known:
                yield from _unknown(value, known[name], f"{where}.{name}")
            else:
                shown = name[:_MOST_NAME]
                near = nearest(shown, known, 1)
                hint = f"; did you mean `{near[0]}`?" if near else ""
                yield f"unknown field `{where}.{shown}`{hint}"
    elif isinstance(read, list) and isinstance(known, (list, tuple)):
        for number, (one, other) in enumerate(zip(read, known, strict=True)):
            yield from _unknown(one, other, f"{where}[{number}]")


def _toml(path: Path, data: bytes, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableInput(f"{path} is not a readable {name}: {error}.") from None


def load_pins(path: Path) -> dict[str, tuple[str, ...]]:
    """Load only the user's pins from a plan, which may lack all other fields. Raises `UnreadableInput`."""
    tree = _toml(path, read_bounded(path, _MOST_PLAN_BYTES), "plan")
    pins = tree.get("pins", {})
    for unknown in _unknown(tree, dict.fromkeys(Plan.__struct_fields__)):
        advice = _UPDATE if _is_newer(tree.get("torchtrim")) else _CORRECT
        raise UnreadableInput(f"{path} is not a valid plan: {unknown}. {advice}")
    if tree.get("schema_version", 1) == 1:
        pins = _upgraded(tree).get("pins", {})
    try:
        return msgspec.convert(pins, dict[str, tuple[str, ...]])
    except msgspec.ValidationError as error:
        raise UnreadableInput(
            f'cannot read [pins] of {path}: {error}. Write lists of patterns, such as keep = ["*.attn"].'
        ) from None


def plan_text(plan: Plan, applies: str = "") -> str:
    """Return the plan as TOML. `applies`: the command that applies it."""
    shown = (
        applies if applies.isprintable() and applies else "torchtrim run SCRIPT --plan THIS_FILE"
    )
    lines = [
        f"# A plan of torchtrim. Apply it with: {shown}",
        *toml_lines(msgspec.to_builtins(plan), skip=_TABLES),
        "",
        "[fingerprint]  # a root without an entry is not checked",
        *toml_lines(plan.fingerprint),
        "",
        "# Your pins, kept when you plan again: places never to change, for a technique, or not for one:",
        '# keep = ["*.attn"]',
        '# recompute = ["*.mlp"]',
        '# never = ["replay:*.norm"]',
        "[pins]",
        *toml_lines(msgspec.to_builtins(plan.pins)),
        "",
        "[predicted]",
        *toml_lines(msgspec.to_builtins(plan.predicted)),
    ]
    if plan.certified is not None:
        lines += ["", *_proof_lines(plan.certified)]
    for technique in plan.techniques:
        skip = () if technique.assumes else ("assumes",)
        lines += ["", "[[techniques]]", *toml_lines(msgspec.to_builtins(technique), skip)]
    for one in plan.sizes:
        lines += ["", "[[sizes]]", *toml_lines(msgspec.to_builtins(one))]
    if plan.graphs:
        lines += ["", "[graphs]", *toml_lines(plan.graphs)]
    if plan.pipeline is not None:
        lines += [
            "",
            "[pipeline]",
            *toml_lines(msgspec.to_builtins(plan.pipeline), skip=("stages",)),
        ]
    for stage in plan.pipeline.stages if plan.pipeline is not None else ():
        lines += ["", "[[pipeline.stages]]", *toml_lines(msgspec.to_builtins(stage))]
    return "\n".join(lines) + "\n"


def _proof_lines(proof: PlanProof) -> list[str]:
    said = "# of the techniques below, on these inputs; torchtrim writes it"
    return [f"[certified]  {said}", *toml_lines(msgspec.to_builtins(proof))]


_PROOF = re.compile(r"^[ \t]*\[certified\].*?(?=^[ \t]*\[|\Z)", re.MULTILINE | re.DOTALL)
_PLACES = re.compile(r"^[ \t]*\[\[techniques\]\]", re.MULTILINE)


def save_proof(proof: PlanProof, path: Path) -> bool:
    """Write a certificate into a plan's file, and leave everything else in it as it is, comments too.

    Return False, with the file unchanged, if its text cannot be edited.
    """
    text = read_bounded(path, _MOST_PLAN_BYTES).decode()
    rest = _PROOF.sub("", text)
    found = _PLACES.search(rest)
    at = found.start() if found else len(rest)
    lines = "\n".join([*_proof_lines(proof), "", ""])
    edited = f"{rest[:at].rstrip()}\n\n{lines}{rest[at:]}"
    try:
        before, after = tomllib.loads(text), tomllib.loads(edited)
        is_same = msgspec.convert(after.pop("certified", None), PlanProof) == proof
    except (ValueError, RecursionError):
        return False
    before.pop("certified", None)
    if not is_same or before != after:
        return False
    write_atomically(path, edited.encode())
    return True


def toml_lines(fields: Mapping[str, Any], skip: Collection[str] = ()) -> list[str]:
    """Return a line of TOML for each field that is not None."""
    return [
        f"{_key(name)} = {_value(value)}"
        for name, value in fields.items()
        if name not in skip and value is not None
    ]


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        writable = value.encode(errors="replace").decode()
        return msgspec.json.encode(writable).decode().replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    inner = ",\n    ".join(_value(item) for item in value)
    return f"[\n    {inner},\n]" if inner else "[]"
