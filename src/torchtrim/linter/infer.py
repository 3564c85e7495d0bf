"""Infers the kind of every expression of a source; in doubt, unknown rather than wrong.

One walk gives every expression its kind and reports those that synchronize the host.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce

from torchtrim.linter import torch_names as names
from torchtrim.linter.kinds import (
    ARRAY,
    DTYPE,
    PLAIN,
    UNKNOWN,
    ValueKind,
    device,
    function,
    joined,
    mapping,
    part_of,
    placed,
    places,
    sequence,
    tensor,
    together,
    valued,
)
from torchtrim.linter.plain_calls import (
    KNOWN_MODULES,
    called_held,
    called_name,
    called_on,
    communicated,
    own_method,
    referred,
)
from torchtrim.linter.scope import KindScope, Names, Wait, changing, guard, is_self
from torchtrim.linter.torch_calls import InferredCall, called_function
from torchtrim.source.nodes import called
from torchtrim.syncs.lookup import is_from

Places = list[tuple[ast.expr, ValueKind]]


def is_mask(place: ast.expr, kind: ValueKind, base: ValueKind) -> bool:
    """Return True for a boolean tensor that may be on a device.

    A tensor of unknown type counts as a mask if its name says so.
    """
    if kind.single or not (kind.waits or (kind.what == "unknown" and base.what == "tensor")):
        return False
    return kind.dtype == "bool" or (not kind.dtype and _is_named_mask(place))


def _is_named_mask(place: ast.expr) -> bool:
    if isinstance(place, ast.Call) and len(place.args) == 1:
        return called(place.func) in ("cat", "concat") and _is_named_mask(place.args[0])
    return called(place).endswith(("mask", "masks"))


def read(node: ast.Subscript, base: ValueKind, places: Places, wait: Wait) -> ValueKind:
    """Infer `base[indices]` and report its syncs. `places` are the expressions within the brackets."""
    if base.what in ("plain", "array"):
        return base
    masks = sum(is_mask(place, kind, base) for place, kind in places)
    if masks and base.what in ("tensor", "unknown") and base.on in ("", "device"):
        wait("mask-index", node)
        return tensor(base.on, base.dtype)
    if base.what == "sequence":
        return _of_sequence(node, base, places, wait)
    if base.what != "tensor":
        return UNKNOWN
    _bounds(places, wait)
    if _from_host(base, places):
        wait("host-index", node)
    return tensor(base.on, base.dtype)


def written(
    node: ast.Subscript, base: ValueKind, places: Places, value: ValueKind, wait: Wait
) -> None:
    """Report the syncs of `base[indices] = value`."""
    if base.what not in ("tensor", "unknown") or base.on in ("host", "mixed"):
        return
    masks = sum(is_mask(place, kind, base) for place, kind in places)
    if masks and (value.waits or masks > 1):
        wait("mask-assign", node)
    elif base.what == "tensor" and not masks:
        _bounds(places, wait)
        if _from_host(base, places):
            wait("host-index-assign", node)
        elif (
            value.what == "plain"
            and not is_from("2.15")
            and any(kind.waits and kind.dtype == "int" and not kind.single for _, kind in places)
        ):
            # Copied to the device; torch 2.15 and later creates the number there.
            wait("assigned-number", node)


def _of_sequence(node: ast.Subscript, base: ValueKind, places: Places, wait: Wait) -> ValueKind:
    if any(isinstance(place, ast.Slice) for place, _ in places):
        return sequence(part_of(base)) if base.items else base
    if len(places) == 1 and places[0][1].waits and places[0][1].sure:
        wait("item", node)
    at = places[0][0].value if len(places) == 1 and isinstance(places[0][0], ast.Constant) else ""
    return dict(base.items).get(str(at), part_of(base))


def _bounds(places: Places, wait: Wait) -> None:
    """Report tensors used as bounds of a slice: `x[:t]` reads `t` as a number."""
    for place, kind in places:
        bounded = isinstance(place, ast.Slice) and kind.what == "sequence" and part_of(kind).waits
        if bounded or (kind.waits and kind.single and kind.dtype == "int" and kind.sure):
            wait("item", place)


def _from_host(base: ValueKind, places: Places) -> bool:
    """Return True if a list or a host tensor indexes a tensor that is on the device."""
    if not base.waits:
        return False
    for place, kind in places:
        listed = isinstance(place, ast.List) and place.elts
        # Beside another index a name of numbers is a list of them; alone it may be a tuple of indices.
        named = isinstance(place, ast.Name | ast.Attribute) and len(places) > 1
        if (listed or named) and kind == sequence(PLAIN):
            return True
        if kind.what == "tensor" and kind.on == "host" and not kind.single and base.on == "device":
            return kind.dtype != "bool"
    return False


_SETTINGS = ("config", "cfg", "args", "hparams", "opt", "kwargs", "logger")
_CONFIGURATIONS = ("config", "cfg", "hparams")


class KindInference(KindScope):
    """Infers kinds of expressions in an environment of names."""

    def value(self, node: ast.expr | None) -> ValueKind:
        """Infer the kind of an expression."""
        if node is None:
            return UNKNOWN
        handle = _HANDLERS.get(type(node))
        kind = handle(self, node) if handle is not None else PLAIN
        if self.kinds is not None:
            self._keep(node, kind)
        return kind

    def _keep(self, node: ast.expr, kind: ValueKind) -> None:
        """Record the kind of an expression, joining it with those of earlier visits."""
        assert self.kinds is not None
        if isinstance(node, ast.Name) and changing(node.id) in self.env:
            kind = UNKNOWN
        self.kinds[node] = joined(self.kinds[node], kind) if node in self.kinds else kind

    def held(self, node: ast.expr | None) -> ValueKind:
        """Infer the kind of an expression that is stored, which may be a function."""
        kind = self.value(node)
        return referred(self, node) if kind == UNKNOWN else kind

    def truth(self, node: ast.expr) -> ValueKind:
        """Infer an expression used as a condition, which reads a tensor."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.truth(node.operand)
            return PLAIN
        if isinstance(node, ast.BoolOp):
            return self._bool_operation(node)
        kind = self.value(node)
        if kind.waits and kind.sure:
            self.wait("item", node)
        return kind

    def assign(self, target: ast.expr, kind: ValueKind, node: ast.expr | None = None) -> None:
        """Bind the target of an assignment."""
        if isinstance(target, ast.Name):
            self.env[target.id] = kind
            if self.kinds is not None:
                self.env.pop(changing(target.id), None)
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target, kind, node)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, sequence(kind))
        elif isinstance(target, ast.Subscript):
            if self._put(target, kind):
                return
            base, places = self.value(target.value), self._places(target.slice)
            written(target, base, places, kind, self.wait)
        elif isinstance(target, ast.Attribute):
            self.value(target.value)
            if is_self(target.value) and self.this is not None and not _is_none(node):
                self.this.set(target.attr, kind)

    def _put(self, target: ast.Subscript, kind: ValueKind) -> bool:
        """Bind an item of a named dict. Return True if the target is one."""
        name = getattr(target.value, "id", "")
        base = self.env.get(name, UNKNOWN)
        if base.what != "mapping":
            return False
        if (key := _text(target.slice)) is not None:
            self.env[name] = mapping(dict(base.items) | {key: kind}, base.part)
        else:
            self.value(target.slice)
            self.env[name] = mapping({}, kind if base.part is None else joined(base.part, kind))
        return True

    def _unpack(self, target: ast.Tuple | ast.List, kind: ValueKind, node: ast.expr | None) -> None:
        if isinstance(node, ast.Tuple | ast.List) and len(node.elts) == len(target.elts):
            for element, value in zip(target.elts, node.elts, strict=True):
                with self.silent():
                    inner = self.value(value)
                self.assign(element, inner)
            return
        known = placed(kind, len(target.elts)) or [part_of(kind)] * len(target.elts)
        for element, inner in zip(target.elts, known, strict=True):
            self.assign(element, inner)

    def _name(self, node: ast.Name) -> ValueKind:
        if (found := self.env.get(node.id)) is not None:
            return PLAIN if found == UNKNOWN and node.id in _CONFIGURATIONS else found
        if node.id in self.file.imports:
            return _imported(self.file.imports[node.id])
        if (found := self.file.own.get(node.id)) is not None:
            return found
        return PLAIN if node.id in _SETTINGS else UNKNOWN

    def _attribute(self, node: ast.Attribute) -> ValueKind:
        if (full := self.dotted(node)) is not None:
            return _imported(full)
        name = node.attr
        if is_self(node.value) and self.this is not None:
            if (known := self.this.attribute(name)) is not None:
                return PLAIN if known == UNKNOWN and name in _CONFIGURATIONS else known
            return PLAIN if name == "training" else _named(name)
        base = self.value(node.value)
        if base.what == "tensor":
            return _of_tensor(base, name)
        if base.what in ("plain", "array"):
            return base
        if base.what == "sequence" and name in ("values", "indices", "inverse", "counts"):
            return part_of(base)
        if name == "grad":
            return tensor()
        return tensor(sure=False) if name in ("logits", "last_hidden_state") else _named(name)

    def _subscript(self, node: ast.Subscript) -> ValueKind:
        base = self.value(node.value)
        if base.what == "mapping":
            self.value(node.slice)
            return valued(base, _text(node.slice))
        return read(node, base, self._places(node.slice), self.wait)

    def _places(self, node: ast.expr) -> Places:
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        return [(part, self.value(part)) for part in parts]

    def _slice(self, node: ast.Slice) -> ValueKind:
        bounds = [self.value(bound) for bound in (node.lower, node.upper, node.step)]
        read = next((kind for kind in bounds if kind.waits and kind.sure), None)
        return sequence(read) if read is not None else PLAIN

    def _binary(self, node: ast.BinOp) -> ValueKind:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Mult) and isinstance(node.left, ast.List) and right.waits:
            self.wait("item", node)
            return left
        return computed(left, right, node.op)

    def _unary(self, node: ast.UnaryOp) -> ValueKind:
        if isinstance(node.op, ast.Not):
            self.truth(node.operand)
            return PLAIN
        kind = self.value(node.operand)
        if kind.what == "tensor":
            return tensor(kind.on, kind.dtype, single=kind.single, sure=kind.sure)
        return kind

    def _compare(self, node: ast.Compare) -> ValueKind:
        kinds = [self.value(node.left), *map(self.value, node.comparators)]
        if any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            return PLAIN
        if isinstance(node.ops[0], ast.In | ast.NotIn):
            if kinds[1].waits and kinds[1].sure:
                self.wait("item", node)
            return PLAIN
        if any(
            _is_none(side) or _text(side) is not None for side in (node.left, *node.comparators)
        ):
            return PLAIN
        if not (tensors := [kind for kind in kinds if kind.what == "tensor"]):
            return PLAIN if all(kind.what == "plain" for kind in kinds) else UNKNOWN
        sure = all(kind.sure or kind.what != "tensor" for kind in kinds) or len(tensors) > 1
        single = all(kind.single or kind.what == "plain" for kind in kinds)
        made = tensor(together(*kinds), "bool", single=single, sure=sure)
        if len(node.ops) > 1 and made.waits:
            self.wait("item", node)
        return made

    def _bool_operation(self, node: ast.BoolOp) -> ValueKind:
        kinds: list[ValueKind] = []
        is_and = isinstance(node.op, ast.And)
        quiet = self.quiet
        with self._inner_scope():
            for value in node.values:
                named = isinstance(value, ast.Name | ast.Attribute | ast.Constant)
                kinds.append(self.value(value) if named else self.truth(value))
                implied = guard(value)
                self.narrow(implied.when_true if is_and else implied.when_false)
                self.quiet += implied.true if is_and else implied.false
        self.quiet = quiet
        return PLAIN if all(kind == PLAIN for kind in kinds) else UNKNOWN

    def _conditional(self, node: ast.IfExp) -> ValueKind:
        self.truth(node.test)
        implied = guard(node.test)
        true = self._branch(node.body, implied.true, implied.when_true)
        false = self._branch(node.orelse, implied.false, implied.when_false)
        if _is_none(node.body):
            return false
        return true if _is_none(node.orelse) else joined(true, false)

    def _branch(self, node: ast.expr, never: bool, known: Names) -> ValueKind:
        with self._inner_scope(), self.silent(never):
            self.narrow(known)
            return self.value(node)

    @contextmanager
    def _inner_scope(self) -> Iterator[None]:
        """Forget the names bound inside the block when it ends."""
        before = dict(self.env)
        yield
        self.env = before

    def _listed(self, node: ast.List | ast.Tuple | ast.Set) -> ValueKind:
        kinds = list(map(self.value, node.elts))
        if isinstance(node, ast.Tuple) and not any(isinstance(x, ast.Starred) for x in node.elts):
            return places(kinds)
        return sequence(reduce(joined, kinds) if kinds else UNKNOWN)

    def _dict(self, node: ast.Dict) -> ValueKind:
        items: dict[str, ValueKind] = {}
        rest: ValueKind | None = None
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                self.value(key)
            kind, text = self.held(value), _text(key)
            if text is not None:
                items[text] = kind
            else:
                kind = part_of(kind) if key is None else kind
                rest = kind if rest is None else joined(rest, kind)
        return mapping(items, rest)

    def _comprehended(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> ValueKind:
        with self._inner_scope():
            for generator in node.generators:
                self.loop(generator.target, generator.iter)
                for test in generator.ifs:
                    self.truth(test)
                    self.narrow(guard(test).when_true)
            if not isinstance(node, ast.DictComp):
                return sequence(self.value(node.elt))
            self.value(node.key)
            return mapping({}, self.value(node.value))

    def loop(self, target: ast.expr, node: ast.expr) -> None:
        """Bind the target of `for` to the kind of an item."""
        inner = target.elts if isinstance(target, ast.Tuple) else []
        call = node if inner and isinstance(node, ast.Call) else None
        method = call.func if call is not None else None
        if isinstance(method, ast.Attribute) and method.attr == "items" and len(inner) == 2:
            base = self.value(method.value)
            if base.what == "mapping":
                self.assign(inner[0], PLAIN)
                self.assign(inner[1], base.part or UNKNOWN)
                return
        name = getattr(method, "id", "")
        if call is None or name not in ("enumerate", "zip"):
            self.assign(target, part_of(self.value(node)))
            return
        if name == "enumerate":
            self.assign(inner[0], PLAIN)
            inner = inner[1:]
        for element, argument in zip(inner, call.args, strict=False):
            self.loop(element, argument)

    def _lambda(self, node: ast.Lambda) -> ValueKind:
        arguments = node.args
        with self._inner_scope():
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                self.env[argument.arg] = UNKNOWN
            return function(gives=self.value(node.body))

    def _walrus(self, node: ast.NamedExpr) -> ValueKind:
        kind = self.value(node.value)
        self.assign(node.target, kind)
        return kind

    def _formatted(self, node: ast.JoinedStr) -> ValueKind:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                kind = self.value(part.value)
                if kind.waits and kind.sure:
                    self.wait("item", part.value)
        return PLAIN

    def _awaited(self, node: ast.Await | ast.Yield | ast.YieldFrom) -> ValueKind:
        self.yields += not isinstance(node, ast.Await)
        self.value(node.value)
        return UNKNOWN

    def _call(self, node: ast.Call) -> ValueKind:
        function = node.func
        args = tuple(map(self.value, node.args))
        words = {
            word.arg or f"**{number}": self.value(word.value)
            for number, word in enumerate(node.keywords)
        }
        call = InferredCall(node, args, words, self.wait)
        communicated(self, function, call)
        full = self.dotted(function)
        if full is not None and full.startswith(KNOWN_MODULES):
            return called_function(full, call)
        if isinstance(function, ast.Name):
            return called_name(self, function, call)
        if not isinstance(function, ast.Attribute):
            return called_held(self, self.value(function), call)
        owner = function.value
        if is_self(owner) and self.this is not None:
            return own_method(self, self.this, function.attr, call)
        result = UNKNOWN if full is None else self.file.outside(full)
        if result != UNKNOWN:
            return result
        return called_on(self, owner, self.value(owner), function.attr, call)


def computed(left: ValueKind, right: ValueKind, operator: ast.operator) -> ValueKind:
    """Infer the result of a binary operator."""
    kinds = (left, right)
    if tensors := [kind for kind in kinds if kind.what == "tensor"]:
        types = {kind.dtype for kind in tensors}
        same = types.pop() if len(types) == 1 else ""
        keeps = isinstance(operator, (ast.BitAnd, ast.BitOr, ast.BitXor)) or same == "int"
        dtype = same if keeps and not isinstance(operator, ast.Div) else ""
        single = all(kind.single or kind.what == "plain" for kind in kinds)
        return tensor(together(*kinds), dtype, single=single)
    if any(kind.what == "array" for kind in kinds):
        return ARRAY
    if left.what == "sequence":
        return left
    return PLAIN if left.what == "plain" and right.what == "plain" else UNKNOWN


def _imported(full: str) -> ValueKind:
    last = full.rpartition(".")[2]
    if full.startswith("torch.") and full.count(".") == 1 and last in names.DTYPES:
        return ValueKind(
            "dtype", dtype="bool" if last == "bool" else "int" if last in _WHOLE else ""
        )
    return PLAIN if full.startswith(("math.", "numpy.pi", "numpy.inf")) else UNKNOWN


_WHOLE = ("int", "long", "short", "int8", "int16", "int32", "int64", "uint8")


def _of_tensor(base: ValueKind, name: str) -> ValueKind:
    if name == "device":
        return device(base.on)
    if name == "dtype":
        return ValueKind("dtype", dtype=base.dtype)
    if name in names.TENSOR_ATTRIBUTES:
        return tensor(base.on, base.dtype, single=base.single)
    return PLAIN if name in names.HOST_ATTRIBUTES else UNKNOWN


def _named(name: str) -> ValueKind:
    if name == "device" or name.endswith("_device"):
        return device("")
    if name == "dtype":
        return DTYPE
    return PLAIN if name in _SETTINGS or name == "shape" else UNKNOWN


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


_HANDLERS: dict[type, Callable[..., ValueKind]] = {
    ast.Name: KindInference._name,
    ast.Attribute: KindInference._attribute,
    ast.Subscript: KindInference._subscript,
    ast.Slice: KindInference._slice,
    ast.BinOp: KindInference._binary,
    ast.UnaryOp: KindInference._unary,
    ast.Compare: KindInference._compare,
    ast.BoolOp: KindInference._bool_operation,
    ast.IfExp: KindInference._conditional,
    ast.Call: KindInference._call,
    ast.List: KindInference._listed,
    ast.Tuple: KindInference._listed,
    ast.Set: KindInference._listed,
    ast.Dict: KindInference._dict,
    ast.ListComp: KindInference._comprehended,
    ast.SetComp: KindInference._comprehended,
    ast.GeneratorExp: KindInference._comprehended,
    ast.DictComp: KindInference._comprehended,
    ast.Lambda: KindInference._lambda,
    ast.NamedExpr: KindInference._walrus,
    ast.JoinedStr: KindInference._formatted,
    ast.Starred: lambda infer, node: part_of(infer.value(node.value)),
    ast.Await: KindInference._awaited,
    ast.Yield: KindInference._awaited,
    ast.YieldFrom: KindInference._awaited,
}
