"""The interfaces of torch that this room needs, private ones included, and a probe of them.

No other file of torchtrim touches Inductor's or AOTAutograd's internals. Importing this file imports both,
which takes seconds, so a program that compiles nothing must not.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._dynamo.utils as dynamo_utils
import torch._functorch.config as functorch_config
import torch._functorch.partitioners as partitioners
import torch._inductor.codegen.cpp as cpp_codegen
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
import torch._inductor.lowering as lowering
from torch import fx
from torch._guards import TracingContext
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from torchtrim.compiled.code import Code, Spec, hint
from torchtrim.compiled.sooner import SLICES, free_sooner
from torchtrim.errors import Unsupported

NEEDED = (
    (partitioners, "choose_saved_values_set"),
    (partitioners, "min_cut_rematerialization_partition"),
    (partitioners, "get_default_op_list"),
    (compile_fx, "compile_fx"),
    (compile_fx, "compile_fx_inner"),
    (AsyncCompile, "cpp_pybinding"),
    (PyCodeCache, "load_by_key_path"),
    (TracingContext, "try_get"),
    (inductor_config, "custom_partitioner_fn"),
    (inductor_config, "fx_graph_cache"),
    (functorch_config, "enable_autograd_cache"),
    (functorch_config, "force_non_lazy_backward_lowering"),
)
"""Each name without which nothing here works; `probe_compiled` names the missing ones."""
_VECTORS = ("TilingSelect", "CppScheduling", "KernelOpStats")
_BUILDERS = ("cpp", "cpp_pybinding", "triton", "halide", "cuda", "multi_kernel")
Choose = Callable[[fx.Graph, Any, Callable[[], list[fx.Node]]], list[fx.Node]]
"""Returns the nodes to save, of a joint graph, torch's classification, and a call for torch's own choice; or
raises `NotPlanned`."""


def check() -> None:
    """Raise `Unsupported` if this torch lacks an interface."""
    missing = [f"{owner.__name__}.{name}" for owner, name in NEEDED if not hasattr(owner, name)]
    if missing:
        raise Unsupported(
            f"torch {torch.__version__} has no {', '.join(missing)}, which plans of compiled graphs need. "
            "Without them torch.compile runs eagerly under torchtrim."
        )


def probe_compiled() -> str:
    """Return what works of this room with this torch, after compiling a small model without kernels."""
    check()
    seen: list[Code] = []
    calls: list[int] = []

    def choose(graph: fx.Graph, _: Any, own: Callable[[], list[fx.Node]]) -> list[fx.Node]:
        calls.append(len(graph.nodes))
        return own()

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.extend(dry(graph, inputs, choose))
        return graph

    layer = torch.nn.Linear(4, 4)
    torch.compile(layer, backend=backend)(torch.ones(2, 4)).sum().backward()
    directions = [code.backward for code in seen]
    if len(calls) != 1 or directions != [False, True]:
        return f"fails: {len(calls)} partitions and {len(seen)} graphs of one model"
    return f"works: {len(seen)} graphs of one model, of {calls[0]} nodes together"


class NotPlanned(Exception):
    """A graph that no plan knows."""


class Partitioner(CustomPartitionerFn):
    """A partitioner that is torch's own, except that `choose` says what forward saves for backward.

    Everything else stays torch's: tags of checkpoints, collectives, effects, random states and symbols. Where
    `choose` raises `NotPlanned`, the graph is edited to free memory sooner, and `choose` called once more.
    `key` identifies the choice in the caches' key. `failed` is called with an error of `choose`, or if it
    raises `NotPlanned` twice, and torch then partitions as it would by itself.
    """

    def __init__(
        self, choose: Choose, key: str, failed: Callable[[Exception], None] | None = None
    ) -> None:
        self._choose = choose
        self._key = hashlib.sha256(f"torchtrim 3 {key}".encode()).hexdigest()
        self._failed = failed

    def uuid(self) -> str:
        """Return the choice's key, so that caches never mix code of two choices."""
        return self._key

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the key: torch's caches also hash the pickle of each setting of Inductor."""
        return str, (self._key,)

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        untouched = copy_of(gm)
        try:
            try:
                return self._partition(gm, joint_inputs, kwargs)
            except NotPlanned:
                return self._partition(_edited(copy_of(untouched)), joint_inputs, kwargs)
        except Exception as error:  # the script must go on, with torch's own partition
            if self._failed is None:
                raise
            self._failed(error)
            return partitioners.min_cut_rematerialization_partition(
                untouched, joint_inputs, **kwargs
            )

    def _partition(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        own = partitioners.choose_saved_values_set

        def choose(graph: fx.Graph, info: Any, *args: Any, **named: Any) -> list[fx.Node]:
            return self._choose(graph, info, lambda: own(graph, info, *args, **named))

        with mock.patch.object(partitioners, "choose_saved_values_set", choose):
            forward, backward = partitioners.min_cut_rematerialization_partition(
                gm, joint_inputs, **kwargs
            )
        drawn = [node.name for node in backward.graph.nodes if draws(node)]
        again = {node.name for node in forward.graph.nodes} & set(drawn)
        if again:
            raise ValueError(f"backward draws {', '.join(sorted(again))} again")
        return forward, backward


def _edited(module: fx.GraphModule) -> fx.GraphModule:
    known: Any = getattr(lowering, "lowerings", None)
    make: Any = getattr(lowering, "make_fallback", None)
    for copies in SLICES.values() if known and make else ():
        if copies not in known:  # else Inductor lays out anew what they read, in a further copy
            make(copies, warn=False, override_decomp=True)
    free_sooner(module)
    return module


@contextlib.contextmanager
def partitioned(partitioner: Partitioner) -> Iterator[None]:
    """Have Inductor partition by this partitioner."""
    with inductor_config.patch(custom_partitioner_fn=partitioner):
        yield


@contextlib.contextmanager
def intercepted(compiler: Callable[..., Any]) -> Iterator[None]:
    """Have `compiler(graph, inputs, **options)` compile in Inductor's place."""
    original = compile_fx.compile_fx

    def instead(graph: fx.GraphModule, inputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        if args or "inner_compile" in options or not isinstance(graph, fx.GraphModule):
            return original(graph, inputs, *args, **options)
        return compiler(graph, inputs, **options)

    with mock.patch.object(compile_fx, "compile_fx", instead):
        yield


@contextlib.contextmanager
def noted(
    note: Callable[[fx.GraphModule, Sequence[Any]], None],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Iterator[None]:
    """Have `note(graph, inputs)` called before Inductor, or what is in its place, compiles a graph.

    `wrap` is given the compiled function, and returns the one to call.
    """
    original = compile_fx.compile_fx

    def noting(graph: fx.GraphModule, inputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        if "inner_compile" in options or not isinstance(graph, fx.GraphModule):
            return original(graph, inputs, *args, **options)
        note(graph, inputs)
        compiled: Any = original(graph, inputs, *args, **options)
        return compiled if wrap is None else wrap(compiled)

    with mock.patch.object(compile_fx, "compile_fx", noting):
        yield


def dry(graph: fx.GraphModule, inputs: Sequence[Any], choose: Choose, **options: Any) -> list[Code]:
    """Return the code that Inductor writes for a graph, forward first, without compiling its kernels."""
    found: list[Code] = []

    def inner(module: fx.GraphModule, given: Sequence[Any], **kwargs: Any) -> Any:
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        specs = [_spec(value) for value in given]  # before Inductor changes the graph
        outputs = _outputs(module)
        compiled: Any = compile_fx.compile_fx_inner(module, given, **kwargs)
        source = getattr(compiled, "source_code", "") or _uncomputed(module)
        constants = {
            name: spec
            for name, value in (getattr(compiled, "constants", None) or {}).items()
            if isinstance(spec := _spec(value), Spec)
        }
        backward = bool(kwargs.get("is_backward"))
        inputs = tuple(zip(names, specs, strict=True))
        found.append(Code(source, inputs, outputs, backward, constants))
        return compiled

    with contextlib.ExitStack() as stack:
        stack.enter_context(
            functorch_config.patch(
                enable_autograd_cache=False, force_non_lazy_backward_lowering=True
            )
        )
        stack.enter_context(inductor_config.patch(fx_graph_cache=False))
        stack.enter_context(partitioned(Partitioner(choose, "dry")))
        stack.enter_context(no_kernels())
        stack.enter_context(no_vectors())
        compile_fx.compile_fx(copy_of(graph), inputs, inner_compile=inner, **options)
    return found


@contextlib.contextmanager
def no_kernels() -> Iterator[None]:
    """Leave out C++ and Triton compilers: kernels do nothing."""

    def build(*_: Any, **__: Any) -> EmptyKernel:
        return EmptyKernel()

    with contextlib.ExitStack() as stack:
        for name in _BUILDERS:
            if hasattr(AsyncCompile, name):
                stack.enter_context(mock.patch.object(AsyncCompile, name, build))
        yield


@contextlib.contextmanager
def no_vectors() -> Iterator[None]:
    """Leave out the choice of vectors in C++ kernels, which takes time.

    It changes no buffer, but for loops that are fused at their outer levels: there it decides which buffers
    are local to a kernel, so it is not left out. A torch that chooses otherwise does so as ever.
    """
    if not all(hasattr(cpp_codegen, name) for name in _VECTORS):
        yield
        return
    tiling, scheduling = cpp_codegen.TilingSelect, cpp_codegen.CppScheduling
    select, fused = tiling.select_tiling, scheduling.codegen_outer_loop_node

    def outer(self: Any, node: Any) -> Any:
        with mock.patch.object(tiling, "select_tiling", select):
            return fused(self, node)

    def none(*_: Any) -> Any:
        return [], [], cpp_codegen.KernelOpStats()

    with (
        mock.patch.object(scheduling, "codegen_outer_loop_node", outer),
        mock.patch.object(tiling, "select_tiling", none),
    ):
        yield


def loaded(code: Code, constants: dict[str, Any]) -> Any:
    """Return a new module of a graph's code, whose kernels do nothing; no cache of torch's keeps it."""
    key, path = PyCodeCache.write(code.source)
    with no_kernels():
        return PyCodeCache.load_by_key_path(key, path, attrs=constants)


class Compile(NamedTuple):
    """A compile by Dynamo of a function, or of the backward of its graph, which has no name.

    `frame`: which code of the program it is. `begun`: microseconds since 1970. `reason`: why code that was
    there before did not do, with the lines of the user's source.
    """

    frame: str
    begun: int
    seconds: float
    function: str
    path: str
    line: int
    reason: str


def compiles_since(after: int) -> list[Compile]:
    """Return the compiles that began after a time, as far as Dynamo remembers: a few dozen.

    A torch without that memory has none.
    """
    remembered: Any = getattr(dynamo_utils, "get_compilation_metrics", list)
    return [_compile(one) for one in remembered() if (one.start_time_us or 0) > after]


def _compile(one: Any) -> Compile:
    return Compile(
        frame=str(one.compile_id).partition("/")[0],
        begun=one.start_time_us,
        seconds=(one.duration_us or 0) / 1e6,
        function=one.co_name or "",
        path=one.co_filename or "",
        line=one.co_firstlineno or 0,
        reason=one.recompile_reason or "",
    )


class EmptyKernel:
    """A kernel that computes nothing."""

    def __call__(self, *_: Any, **__: Any) -> None:
        """Do nothing, as a C++ kernel."""

    run = __call__


def copy_of(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph."""
    with warnings.catch_warnings():  # torch's own, of copying its tree specs
        warnings.simplefilter("ignore", FutureWarning)
        return copy.deepcopy(graph)


def compiled_node(value: torch.Tensor) -> Any:
    """Return the node of autograd that runs a compiled backward, behind the views of its result; or None."""
    node = value.grad_fn
    while node is not None and not type(node).__name__.startswith("CompiledFunction"):
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return node


def written_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs that the program writes to after the graph's forward, as AOTAutograd has found."""
    context = TracingContext.try_get()
    known = context.fw_metadata if context is not None else None
    inputs = graph.find_nodes(op="placeholder")
    return [inputs[at] for at in known.mutated_inp_runtime_indices] if known is not None else []


def operator_kinds() -> Any:
    """Return torch's lists of operators: views, those that Inductor fuses, random ones."""
    return partitioners.get_default_op_list()


def draws(node: fx.Node) -> bool:
    """Return True if a node takes random numbers from a generator.

    `inductor_random` does not: it computes them from a seed that it is given. Nor does attention that drops
    nothing, though its operator has the tag.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    seeded = torch.Tag.nondeterministic_seeded in target.tags and not _drops_nothing(node, target)
    return seeded or "inductor_seed" in str(target)


def _drops_nothing(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    for at, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(given == 0.0)
    return False


def _uncomputed(module: fx.GraphModule) -> str:
    """Return code for a graph that only returns inputs, where Inductor writes none."""
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    found = (str(names.index(name)) if name in names else "" for name in _outputs(module))
    results = ", ".join(f"args[{at}]" if at else "None" for at in found)
    return f"extern_kernels = None\ndef call(args):\n    return [{results}]\n"


def _outputs(module: fx.GraphModule) -> tuple[str, ...]:
    (values,) = next(node for node in module.graph.nodes if node.op == "output").args
    assert isinstance(values, (tuple, list))
    return tuple(getattr(value, "name", "") for value in values)


def _spec(value: Any) -> Spec | int | None:
    if isinstance(value, torch.Tensor):
        return Spec.of(value)
    return hint(value) if isinstance(value, (int, torch.SymInt)) else None
