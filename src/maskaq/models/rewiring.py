"""Make a module's own code call our products: its methods are recompiled with some of their calls replaced.

A method that calls `F.scaled_dot_product_attention(q, k, v, ...)` becomes one that calls
`self.products.attention(q, k, v, ...)`, and `a @ b` becomes `self.products.multiply("forward.0", a, b)`, as does an
`einsum` of two tensors that is such a product: the same source, compiled again in a subclass. So nothing is intercepted
while the model runs, and compilers and exporters see plain code.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from maskaq.errors import ModelError

CHILD = "products"
"""The name of the child that owns the products."""


def rewired(cls: type[nn.Module], methods: Iterable[str], matmuls: bool) -> type[nn.Module]:
    """A subclass of the same name whose methods call `self.products`.

    Args:
        matmuls: whether products written as `a @ b` are replaced too.
    """
    return _rewired(cls, tuple(sorted(methods)), matmuls)  # type: ignore[arg-type]


def method_of(cls: type, code: Any) -> str | None:
    """The name of the method of a class that has this code; None if it is no method of it."""
    for base in cls.__mro__:
        for name, member in vars(base).items():
            function = inspect.unwrap(member) if isinstance(member, FunctionType) else None
            if function is not None and function.__code__ is code:
                return name
    return None


@cache
def _rewired(cls: type[nn.Module], methods: tuple[str, ...], matmuls: bool) -> type[nn.Module]:
    members = {name: _recompiled(cls, name, matmuls) for name in methods}
    return type(cls.__name__, (cls,), {**members, "__module__": cls.__module__, "__doc__": cls.__doc__})


def _recompiled(cls: type, name: str, matmuls: bool) -> Any:
    owner = next(base for base in cls.__mro__ if name in vars(base))
    function = inspect.unwrap(vars(owner)[name])
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise ModelError(
            f"the source of {owner.__name__}.{name} cannot be read, and maskaq needs it to find the products of its "
            "attention: put the class into a file"
        ) from error
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition: Any = tree.body[0]
    definition.decorator_list = []
    _Calls(definition.args.args[0].arg, name, matmuls, function.__globals__).visit(definition)
    # `super()` and `__class__` in a method are names of an enclosing scope, as are names of a function around a class.
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    enclosing = {"__class__": owner} | {key: cell.cell_contents for key, cell in cells}
    outer: Any = ast.parse(f"def outer({', '.join(enclosing)}):\n    return None").body[0]
    outer.body = [definition, ast.parse(f"return {definition.name}").body[0]]
    tree.body = [outer]
    ast.fix_missing_locations(ast.increment_lineno(tree, first - 1))
    names: dict[str, Any] = {}
    exec(compile(tree, inspect.getsourcefile(function) or "<unknown>", "exec"), function.__globals__, names)
    return names["outer"](**enclosing)


def product_of(equation: str) -> tuple[list[int], list[int], list[int]] | None:
    """How to permute a and b so that `a @ b` is this einsum, and then the product; None if it is no such product.

    >>> product_of("b h i d, b h j d -> b i h j")
    ([0, 1, 2, 3], [0, 1, 3, 2], [0, 2, 1, 3])
    """
    found = re.fullmatch(r"(\w+),(\w+)->(\w+)", equation.replace(" ", ""))
    if found is None:
        return None
    a, b, out = found.groups()
    shared = [axis for axis in a if axis in b and axis in out]
    rows, columns, summed = set(a) - set(b), set(b) - set(a), (set(a) & set(b)) - set(out)
    is_product = len(rows) == len(columns) == len(summed) == 1 and set(out) == {*shared, *rows, *columns}
    if not is_product or any(len(set(axes)) < len(axes) for axes in (a, b, out)):
        return None
    product = [*shared, *rows, *columns]
    orders = (a, [*shared, *rows, *summed]), (b, [*shared, *summed, *columns]), (product, list(out))
    left, right, result = ([list(axes).index(axis) for axis in order] for axes, order in orders)
    return left, right, result


def _permuted(value: Any, order: list[Any]) -> ast.Call:
    return ast.Call(ast.Attribute(value, "permute", ast.Load()), order, [])


class _Calls(ast.NodeTransformer):
    """Puts our calls in the place of those that multiply activations."""

    def __init__(self, self_name: str, method: str, matmuls: bool, names: Mapping[str, Any]) -> None:
        self.self_name, self.method, self.matmuls, self.names = self_name, method, matmuls, names
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = self._value(node.func)
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if function is F.scaled_dot_product_attention or called == "scaled_dot_product_attention":
            node.func = self._products("attention")
        elif self.matmuls and not node.keywords:
            operands: list[Any] = []
            if function is torch.einsum:
                return self._einsum(node)
            if function is torch.matmul or function is torch.bmm:
                operands = node.args
            elif isinstance(node.func, ast.Attribute) and called in ("matmul", "bmm"):
                operands = [node.func.value, *node.args]
            return self._multiply(*operands) if len(operands) == 2 else node
        return node

    def _value(self, node: ast.AST) -> Any:
        """What a dotted name is in the module of the method; None of a local one."""
        if isinstance(node, ast.Attribute):
            return getattr(self._value(node.value), node.attr, None)
        return self.names.get(node.id) if isinstance(node, ast.Name) else None

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        is_product = self.matmuls and isinstance(node.op, ast.MatMult)
        return self._multiply(node.left, node.right) if is_product else node

    def _einsum(self, node: ast.Call) -> ast.Call:
        """a and b with their axes in the order of a product, multiplied; the product's axes in the order asked for."""
        equation = getattr(node.args[0], "value", None) if len(node.args) == 3 else None
        orders = product_of(equation) if isinstance(equation, str) else None
        if orders is None:
            return node
        left, right, product = ([ast.Constant(axis) for axis in order] for order in orders)
        operands = zip(node.args[1:], (left, right), strict=True)
        return _permuted(self._multiply(*(_permuted(operand, order) for operand, order in operands)), product)

    def _multiply(self, left: Any, right: Any) -> ast.Call:
        place = ast.Constant(f"{self.method}.{self.count}")
        self.count += 1
        return ast.Call(self._products("multiply"), [place, left, right], [])

    def _products(self, method: str) -> ast.Attribute:
        products = ast.Attribute(ast.Name(self.self_name, ast.Load()), CHILD, ast.Load())
        return ast.Attribute(products, method, ast.Load())
