"""What a sample depends on, as a hash: the code and the attributes of a dataset and of all that it refers to."""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import inspect
import sys
import sysconfig
import types
from pathlib import PurePath
from typing import Any

import torch

from bagua.contrib.caching.codec import elements_of

_STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
# The second and third one, in classes.
_READS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_SIMPLE = frozenset({type(None), type(...), bool, int, float, complex, str, bytes, bytearray, range})
_REMEDY = (
    "Pass fingerprint='...', a text of yours that names the data and the preprocessing, e.g. 'imagenet-256px-v1', and "
    "change it when either changes."
)


def fingerprint_of(dataset: Any) -> str:
    """32 hexadecimal digits, the same in every process and run, that change with

    - the classes of the dataset and of what its attributes refer to (transforms, for example), and with the code of
      their methods and of the functions that these call by their names;
    - the values of these attributes;
    - the version of installed packages that they come from; of Python, where code of your own is involved.

    Contents of files are not read.

    Raises:
        TypeError: the dataset refers to something whose state cannot be read, an open file for example.
    """
    digest = _Digest()
    digest.add(dataset, type(dataset).__qualname__)
    return digest.hexdigest()


class _Digest:
    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        # By id. Equal objects must give the same digest whether or not they are one object: constants of code are one
        # after it was compiled, and several after it was loaded.
        self._done: dict[int, str] = {}
        self._under_way: list[int] = []
        self._alive: list[Any] = []  # an id is used again once its object is gone

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def _feed(self, *parts: object) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
            self._hash.update(len(data).to_bytes(8, "little") + data)

    def add(self, value: Any, where: str) -> None:
        kind = type(value)
        if kind in _SIMPLE:
            self._feed(kind.__name__, repr(value))
        elif kind in (list, tuple) and all(type(one) in _SIMPLE for one in value):  # long lists of files, for example
            self._feed(f"simple {kind.__name__}", repr(value))
        elif id(value) in self._done:
            self._feed(self._done[id(value)])
        elif id(value) in self._under_way:
            self._feed("cycle", len(self._under_way) - self._under_way.index(id(value)))
        else:
            self._alive.append(value)
            self._under_way.append(id(value))
            outer, self._hash = self._hash, hashlib.blake2b(digest_size=16)
            self._add_compound(value, where)
            inner, self._hash = self._hash, outer
            self._done[self._under_way.pop()] = inner.hexdigest()
            self._feed(inner.hexdigest())

    def _add_compound(self, value: Any, where: str) -> None:
        kind = type(value)
        if kind in (list, tuple):
            self._feed(kind.__name__, len(value))
            for number, one in enumerate(value):
                self.add(one, f"{where}[{number}]")
        elif kind is dict:
            self._feed("dict", len(value))
            for key, one in value.items():
                self.add(key, where)
                self.add(one, f"{where}[{key!r}]")
        elif kind in (set, frozenset):
            self._feed(kind.__name__, *sorted(_separate(one, where) for one in value))
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value, where)
        elif kind.__module__ == "numpy" and kind.__name__ == "ndarray" and not value.dtype.hasobject:
            self._feed("ndarray", value.dtype, value.shape, value.tobytes())
        elif isinstance(value, PurePath):
            self._feed(kind.__name__, value)
        elif isinstance(value, type):
            self._add_class(value, where)
        elif isinstance(value, types.CodeType):
            self._add_code(value)
        elif isinstance(value, types.FunctionType):
            self._add_function(value, where)
        elif isinstance(value, types.MethodType):
            self._feed("method", value.__name__)
            self.add(value.__self__, where)
            self.add(value.__func__, f"{where}.{value.__name__}")
        elif isinstance(value, types.ModuleType):
            self._feed("module", value.__name__, _version(value.__name__))
        elif isinstance(value, functools.partial):
            self._feed("partial")
            self.add((value.func, value.args, value.keywords), where)
        else:
            self._add_object(value, where)

    def _add_tensor(self, value: torch.Tensor, where: str) -> None:
        try:
            self._feed("tensor", value.dtype, tuple(value.shape), *_tensor_parts(value.detach()))
        except Exception as error:  # whatever its class, layout or device raises
            what = "tensor" if type(value) is torch.Tensor else f"{type(value).__module__}.{type(value).__qualname__}"
            raise TypeError(
                f"The fingerprint of {where} cannot be computed: the elements of a {what} of layout {value.layout} on "
                f"{value.device} cannot be read ({str(error).splitlines()[0] if str(error) else type(error).__name__})."
                f"\n{_REMEDY}"
            ) from error

    def _add_class(self, value: type, where: str) -> None:
        self._feed("class", value.__module__, value.__qualname__)
        if _is_installed(value):
            self._feed(_version(value.__module__))
            return
        for base in value.__bases__:
            self.add(base, where)
        for name, member in sorted(vars(value).items()):
            if isinstance(member, staticmethod | classmethod):
                member = member.__func__
            if isinstance(member, property):
                member = (member.fget, member.fset)
            is_private = name.startswith(("__", "_abc_"))  # Python's own; of these, methods count
            if isinstance(member, types.FunctionType) or not is_private:
                self._feed(name)
                self.add(None if inspect.isdatadescriptor(member) else member, f"{value.__qualname__}.{name}")

    def _add_function(self, value: types.FunctionType, where: str) -> None:
        self._feed("function", value.__module__, value.__qualname__)
        if _is_installed(value):
            self._feed(_version(value.__module__))
            return
        self._add_code(value.__code__)
        self.add((value.__defaults__, value.__kwdefaults__), where)
        for cell in value.__closure__ or ():
            try:
                self.add(cell.cell_contents, where)
            except ValueError:  # a variable that is not set yet
                self._feed("empty")
        for name in sorted(_names(value.__code__) & set(value.__globals__)):
            self._feed(name)
            self.add(value.__globals__[name], f"{value.__module__}.{name}")

    def _add_code(self, code: types.CodeType) -> None:
        self._feed("code", sys.version_info[:2], code.co_code, code.co_names, code.co_varnames)
        for one in code.co_consts:
            self.add(one, code.co_name)

    def _add_object(self, value: Any, where: str) -> None:
        self._feed("object")
        kind = type(value)
        if hasattr(kind, "_bagua_fingerprint"):
            self._feed(kind.__module__, kind.__qualname__, value._bagua_fingerprint())
            return
        if isinstance(inner := getattr(value, "__wrapped__", None), types.FunctionType):  # functools.cache
            self._feed(kind.__module__, kind.__qualname__)
            self.add(inner, where)
            return
        if kind.__module__ == "builtins" and inspect.isroutine(value):
            self._feed(getattr(value, "__module__", None), value.__qualname__)
            return
        try:
            reducer = copyreg.dispatch_table.get(kind)
            reduced = value.__reduce_ex__(4) if reducer is None else reducer(value)
        except Exception as error:  # whatever the class raises
            raise TypeError(
                f"The fingerprint of {where} cannot be computed: a {kind.__module__}.{kind.__qualname__} has no state "
                f"that can be read ({error}).\n{_REMEDY}"
            ) from error
        if isinstance(reduced, str):
            self._feed(kind.__module__, reduced)
            return
        constructor, arguments, *state = reduced
        if constructor in (copyreg.__newobj__, copyreg.__newobj_ex__):  # type: ignore[attr-defined]
            self.add(kind, where)
            arguments = arguments[1:]
        else:
            self.add(constructor, where)
            self.add(kind, where)
        self.add(arguments, where)
        if state and isinstance(state[0], dict):
            for name, one in sorted(state[0].items(), key=lambda item: str(item[0])):
                self._feed(name)
                self.add(one, f"{where}.{name}")
        elif state:
            self.add(state[0], where)
        for items in state[1:3]:
            self.add(None if items is None else list(items), where)


def _tensor_parts(value: torch.Tensor) -> list[object]:
    """What there is to a tensor, apart from its dtype and shape."""
    if value.device.type == "meta":
        return ["meta"]  # it has no elements
    if value.is_quantized:
        if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return ["quantized", elements_of(value.int_repr()), value.q_scale(), value.q_zero_point()]
        held = [value.int_repr(), value.q_per_channel_scales(), value.q_per_channel_zero_points()]
        return ["quantized", value.q_per_channel_axis(), *map(elements_of, held)]
    if value.layout is torch.strided:
        return [elements_of(value)]
    if value.layout is torch.sparse_coo:
        value = value.coalesce()
        held = [value.indices(), value.values()]
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        held = [value.crow_indices(), value.col_indices(), value.values()]
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        held = [value.ccol_indices(), value.row_indices(), value.values()]
    else:
        held = [value.to_dense()]
    return [value.layout, *(part for one in held for part in (one.dtype, tuple(one.shape), elements_of(one)))]


def _separate(value: Any, where: str) -> str:
    digest = _Digest()
    digest.add(value, where)
    return digest.hexdigest()


def _names(code: types.CodeType) -> set[str]:
    """Names of the globals that it reads, of inner functions and classes too. co_names has those of attributes as well,
    and scripts have globals of the same names that change or have no state: `epoch`, `log`, `model`."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname in _READS_GLOBAL}
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found |= _names(one)
    return found


def _is_installed(value: Any) -> bool:
    """Part of Python or of an installed package, whose version stands for its code."""
    module = sys.modules.get(value.__module__ or "")
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ in sys.builtin_module_names
    parts = PurePath(file).parts
    return "site-packages" in parts or "dist-packages" in parts or file.startswith(_STANDARD_LIBRARY)


def _version(module: str) -> str:
    package = sys.modules.get(module.split(".")[0])
    return str(getattr(package, "__version__", ""))
