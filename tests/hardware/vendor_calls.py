"""Vendors' functions as their published wheels declare them: what the calls of our backends are bound to.

`tests/hardware/schemas` holds, for each vendor, the declarations of the functions that are called: torch operator
schemas, or Python signatures. `refresh.py` there writes them anew from the vendor's wheel.
"""

import ast
import functools
import inspect
import json
from pathlib import Path

import torch

SCHEMAS = Path(__file__).parent / "schemas"


def wheel(vendor):
    """Distribution and version that the declarations come from, as `contract_tested_with` has them."""
    extract = _extract(vendor)
    return f"{extract['distribution']} {extract['version']}"


def declaration(vendor, name):
    """What a call of this function takes: an inspect.Signature, from the vendor's own declaration."""
    text = _extract(vendor)["functions"][name]
    return _python_signature(text) if text.startswith("def ") else _operator_signature(text)


def bound(vendor, name):
    """Decorates an emulation: each call is bound to the vendor's declaration first, which fills in the defaults.

    The emulation takes every parameter that the vendor declares, by its name. A call with an unknown, missing or
    twice given argument raises TypeError, and so does, where the declaration has types, one of another type.
    """
    signature = declaration(vendor, name)

    def decorate(emulation):
        ours, theirs = set(inspect.signature(emulation).parameters), set(signature.parameters)
        assert ours == theirs, f"{name}: the emulation and the wheel differ in {sorted(ours ^ theirs)}"

        @functools.wraps(emulation)
        def call(*args, **kwargs):
            arguments = signature.bind(*args, **kwargs)
            for key, value in arguments.arguments.items():
                _check_type(name, signature.parameters[key], value)
            arguments.apply_defaults()
            return emulation(**arguments.arguments)

        return call

    return decorate


@functools.cache
def _extract(vendor):
    return json.loads((SCHEMAS / f"{vendor}.json").read_text(encoding="utf-8"))


def _python_signature(text):
    """text: "def name(a, b: int = 1, *, c=None): ..."; defaults that are no literals stay as their source."""
    (function,) = ast.parse(text if text.endswith("...") else f"{text}: ...").body
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    kinds = [inspect.Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs)
    kinds += [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(arguments.args)
    parameters = [_parameter(*each) for each in zip(positional, kinds, defaults, strict=True)]
    if arguments.vararg is not None:
        parameters.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument, inspect.Parameter.KEYWORD_ONLY, default))
    if arguments.kwarg is not None:
        parameters.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _parameter(argument, kind, default):
    value = inspect.Parameter.empty
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except ValueError:
            value = ast.unparse(default)
    return inspect.Parameter(argument.arg, kind, default=value)


def _operator_signature(text):
    """text: "name(Tensor a, *, int b=1) -> Tensor", as torch registers operators."""
    parameters = []
    for argument in torch._C.parse_schema(text).arguments:
        kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append(inspect.Parameter(argument.name, kind, default=default, annotation=argument.type))
    return inspect.Signature(parameters)


def _check_type(name, parameter, value):
    """Of operators: what torch's own parser of arguments would refuse."""
    wanted = parameter.annotation
    if isinstance(wanted, torch._C.Type) and not _fits(wanted, value):
        raise TypeError(f"{name}: {parameter.name} must be {wanted}, not {value!r}")


def _fits(wanted, value):
    kind = wanted.kind()
    if kind == "OptionalType":
        return value is None or _fits(wanted.getElementType(), value)
    if kind == "ListType":
        return isinstance(value, list | tuple) and all(_fits(wanted.getElementType(), each) for each in value)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return {
        "TensorType": lambda: isinstance(value, torch.Tensor),
        "IntType": lambda: is_int,
        "SymIntType": lambda: is_int,
        "FloatType": lambda: is_int or isinstance(value, float),
        "NumberType": lambda: is_int or isinstance(value, float | bool),
        "BoolType": lambda: isinstance(value, bool),
        "StringType": lambda: isinstance(value, str),
    }.get(kind, lambda: True)()
