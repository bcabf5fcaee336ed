"""What a checkpoint holds, from its headers alone: names, shapes, dtypes, files and byte offsets.

    >>> open_checkpoint("recipe:glm-dsa-fp8")
    Checkpoint recipe:glm-dsa-fp8, GlmMoeDsaForCausalLM
      85 tensors, 5.1 MB in 1 file: 5 F32, 77 BF16, 3 F8_E4M3
      identity 20ece9307fc3

Tensor data is never read and nothing is ever unpickled. The reader trusts no number in a file before it has checked
it: whatever safetensors would refuse is refused here too, in one sentence.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import CannotRun
from .recipes import build_recipe

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Checkpoint", "DTYPE_BITS", "TensorInfo", "open_checkpoint", "read_header"]

# safetensors code -> bits per element; the codes that safetensors 0.8 knows.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

# safetensors' own cap on a header, in bytes.
_MAX_HEADER = 100_000_000
_MAX_JSON = 256_000_000
_MAX_TENSORS = 2_000_000
_MAX_NAME = 10_000
_MAX_DIMS = 64
_MAX_SIZE = 2**63
_DAMAGED = "the file is damaged: download or save it again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its header describes it; `start` and `end` are byte offsets in the file (not in its data part)."""

    name: str
    # safetensors code, such as "F8_E4M3"
    dtype: str
    shape: tuple[int, ...]
    # name of the file, relative to the checkpoint's folder
    file: str
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self.end - self.start


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoint:
    """A checkpoint's config and tensors; acts as a mapping from name to TensorInfo in file order."""

    # What the user typed: `recipe:NAME` or a folder.
    source: str
    # The folder, absolute.
    path: Path
    # config.json
    config: dict[str, Any]
    # Files in sorted order, within a file by offset.
    tensors: tuple[TensorInfo, ...]
    # All names in the order of the model's state dict, where state_dict.json records it; recipes do.
    state_dict_order: tuple[str, ...] | None = None

    @cached_property
    def _by_name(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for tensor in self.tensors}

    def __getitem__(self, name: str) -> TensorInfo:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors in file order."""
        return tuple(self._by_name)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Return the names of the files that hold tensors, sorted, relative to `path`."""
        return tuple(dict.fromkeys(tensor.file for tensor in self.tensors))

    @property
    def nbytes(self) -> int:
        """Return the size of all tensor data in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def architecture(self) -> str:
        """Return the first of config.json's `architectures`, such as "OPTForCausalLM"."""
        return self.config["architectures"][0]

    def identity(self) -> str:
        """Return a SHA-256 in hex over config and headers; the values of the tensors are not part of it."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for t in self.tensors:
            digest.update(json.dumps([t.file, t.name, t.dtype, t.shape, t.start, t.end]).encode())
        return digest.hexdigest()

    def frame(self) -> pd.DataFrame:
        """Return one row per tensor in file order: name, dtype, shape, file, start, end, numel, nbytes."""
        import pandas as pd

        columns = [field.name for field in fields(TensorInfo)] + ["numel", "nbytes"]
        rows = [[getattr(tensor, column) for column in columns] for tensor in self.tensors]
        return pd.DataFrame(rows, columns=columns)

    def __repr__(self) -> str:
        dtypes = ", ".join(f"{n} {dtype}" for dtype, n in Counter(t.dtype for t in self.tensors).items())
        files = f"{len(self.files)} file{'s' * (len(self.files) != 1)}"
        return (
            f"Checkpoint {self.source}, {self.architecture}\n"
            f"  {len(self):,} tensors, {self.nbytes / 1e6:,.1f} MB in {files}: {dtypes}\n"
            f"  identity {self.identity()[:12]}"
        )


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a folder with config.json and safetensors, or `recipe:NAME`, by reading headers only.

    With a model.safetensors.index.json the files it names are the checkpoint, else every *.safetensors in the folder,
    as in vLLM. Raises CannotRun with the file and its fault for anything missing, damaged or hostile.
    """
    source = str(source)
    is_recipe = source.startswith("recipe:")
    folder = build_recipe(source.removeprefix("recipe:")) if is_recipe else Path(source)
    if not os.path.isdir(folder):
        raise CannotRun(
            f"there is no folder {source!r}; give the folder that vLLM would be given (nothing is downloaded), "
            "or recipe:NAME"
        )
    config = _read_config(folder)
    weight_map = _read_index(folder)
    files = sorted(set(weight_map.values())) if weight_map else _find_safetensors(folder)

    tensors: list[TensorInfo] = []
    file_of: dict[str, str] = {}
    with _quiet_gc():
        for name in files:
            for tensor in read_header(folder / name, name):
                if (other := file_of.setdefault(tensor.name, name)) != name:
                    fault = f"tensor {_show(tensor.name)} is also in {other}"
                    _refuse(folder / name, fault, "remove the file that does not belong")
                tensors.append(tensor)
            if len(tensors) > _MAX_TENSORS:
                _refuse(folder, f"more than {_MAX_TENSORS:,} tensors", "Loadlens reads no checkpoint as large as that")
    if not tensors:
        _refuse(folder, "its safetensors files hold no tensor", "point at a folder that holds weights")
    for name, file in weight_map.items():
        if file_of.get(name) != file:
            fault = f"tensor {_show(name)} is not in {file}"
            _refuse(folder / _INDEX, fault, "fetch the files and the index of one and the same upload")
    return Checkpoint(
        source=source,
        path=folder.absolute(),
        config=config,
        tensors=tuple(tensors),
        state_dict_order=_read_state_dict_order(folder, file_of),
    )


def read_header(file: Path, name: str | None = None) -> list[TensorInfo]:
    """Read and check the header of one safetensors file; the tensors come in the order of their bytes.

    `name` goes into TensorInfo.file (default: the file's own name). Raises CannotRun for everything that safetensors
    refuses (truncated, overlapping, holes, trailing bytes, wrong sizes), and for headers over 100 MB.
    """
    header, data_start, data_size = _read_header_bytes(file)
    with _quiet_gc():
        try:
            # Objects arrive as tuples of pairs: a repeated key is still there to be seen, and arrays are lists.
            entries = json.loads(header.decode("utf-8"), object_pairs_hook=tuple)
        except (ValueError, RecursionError):
            entries = None
        if type(entries) is not tuple:
            _refuse(file, "its header is not a JSON object", _DAMAGED)
        if len(dict(entries)) != len(entries):
            repeated = Counter(key for key, _ in entries).most_common(1)[0][0]
            _refuse(file, f"its header lists {_show(repeated)} twice", _DAMAGED)
        name = file.name if name is None else name
        tensors = []
        for key, entry in entries:
            if key == "__metadata__":
                _check_metadata(file, entry)
                continue
            dtype, shape, start, end = _check_entry(file, key, entry, data_size)
            tensors.append(TensorInfo(key, dtype, shape, name, data_start + start, data_start + end))
        tensors.sort(key=attrgetter("start", "end"))
    _check_layout(file, tensors, data_start, data_start + data_size)
    return tensors


# --- one header ---


def _check_layout(file: Path, tensors: list[TensorInfo], position: int, end: int) -> None:
    """Check that the tensors cover the file's data from `position` to `end`, each byte once."""
    previous = None
    for tensor in tensors:
        if tensor.start < position:
            _refuse(file, f"tensor {_show(tensor.name)} overlaps tensor {_show(previous.name)}", _DAMAGED)
        if tensor.start > position:
            hole = f"{tensor.start - position} bytes before tensor {_show(tensor.name)}"
            _refuse(file, f"{hole} belong to no tensor", _DAMAGED)
        position, previous = tensor.end, tensor
    if position != end:
        _refuse(file, f"{end - position} bytes after the last tensor belong to no tensor", _DAMAGED)


def _read_header_bytes(file: Path) -> tuple[bytes, int, int]:
    """Return the header, the offset at which tensor data starts, and how many bytes of data there are."""
    with _open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            _refuse(file, f"it is truncated: {size} bytes cannot hold a safetensors header", _DAMAGED)
        length = int.from_bytes(prefix, "little")
        # Before any read: a hostile length must cost nothing.
        if length > _MAX_HEADER:
            fault = f"it claims a header of {length} bytes and safetensors allows {_MAX_HEADER}"
            _refuse(file, fault, "it is no safetensors file, or a damaged one: download or save it again")
        if length > size - 8:
            _refuse(file, f"it is truncated: it has {size} bytes and its header alone needs {length + 8}", _DAMAGED)
        header = stream.read(length)
    if not header.startswith(b"{"):
        _refuse(file, "its header is not a JSON object", _DAMAGED)
    # A header of 100 MB can hold far more small JSON values than tensors; decoding those would take gigabytes.
    for mark, most in ((b"{", _MAX_TENSORS), (b"[", 2 * _MAX_TENSORS), (b'"', 12 * _MAX_TENSORS)):
        if header.count(mark) > most + 1000:
            fault = f"its header describes more than {_MAX_TENSORS:,} tensors"
            _refuse(file, fault, "Loadlens reads no checkpoint as large as that")
    return header, 8 + length, size - 8 - length


def _check_entry(file: Path, name: str, entry: Any, data_size: int) -> tuple[str, tuple[int, ...], int, int]:
    """Return (dtype, shape, start, end) of one header entry; offsets count from the start of the data."""
    if not 0 < len(name) <= _MAX_NAME or (not name.isascii() and len(name.encode("utf-8", "replace")) > _MAX_NAME):
        _refuse(file, f"a tensor name is empty or longer than {_MAX_NAME:,} bytes: {_show(name)}", _DAMAGED)
    if not name.isprintable():
        _refuse(file, f"tensor name {_show(name)} has characters that cannot be printed", "rename the tensor")
    if type(entry) is not tuple:
        _refuse(file, f"tensor {_show(name)} is not described by a JSON object", _DAMAGED)
    described = dict(entry)
    if len(described) != len(entry):
        _refuse(file, f"the description of tensor {_show(name)} has a key twice", _DAMAGED)

    dtype = described.get("dtype")
    bits = DTYPE_BITS.get(dtype) if type(dtype) is str else None
    if bits is None:
        _refuse(file, f"tensor {_show(name)} has the unknown dtype {_show(dtype)}", "save it with a known dtype")
    shape = described.get("shape")
    if type(shape) is not list:
        _refuse(file, f"tensor {_show(name)} has no shape", _DAMAGED)
    if len(shape) > _MAX_DIMS:  # or the product of a million sizes would take hours
        _refuse(file, f"tensor {_show(name)} has {len(shape):,} dimensions and no framework has that many", _DAMAGED)
    for size in shape:
        if type(size) is not int or not 0 <= size < _MAX_SIZE:  # bool is an int to isinstance
            _refuse(file, f"tensor {_show(name)} has the impossible size {_show(size)} in its shape", _DAMAGED)
    offsets = described.get("data_offsets")
    if type(offsets) is not list or len(offsets) != 2 or type(offsets[0]) is not int or type(offsets[1]) is not int:
        _refuse(file, f"tensor {_show(name)} has no pair of whole-number data_offsets", _DAMAGED)
    start, end = offsets
    if not 0 <= start <= end:
        _refuse(file, f"tensor {_show(name)} has impossible data_offsets {_show(offsets)}", _DAMAGED)
    if end > data_size:
        fault = f"tensor {_show(name)} ends {_count(end - data_size)} bytes past the end of the file"
        _refuse(file, f"{fault}, which is truncated or damaged", "download or save it again")
    # Python's integers do not overflow, so neither can this product.
    if math.prod(shape) * bits != (end - start) * 8:
        fault = f"tensor {_show(name)} has {end - start} bytes, which is not the size of {dtype} {_show(shape)}"
        _refuse(file, fault, _DAMAGED)
    return dtype, tuple(shape), start, end


def _check_metadata(file: Path, entry: Any) -> None:
    if type(entry) is not tuple or not all(type(value) is str for _, value in entry):
        _refuse(file, "its __metadata__ is not an object of strings", _DAMAGED)


# --- the folder ---

_INDEX = "model.safetensors.index.json"


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not os.path.lexists(file):
        _refuse(folder, "it has no config.json", "point at the folder that vLLM would be given")
    config = _read_json(file)
    if type(config) is not dict:
        _refuse(file, "it is not a JSON object", "fetch the model's config.json again")
    names = config.get("architectures")
    if type(names) is not list or not names or not all(type(name) is str and name for name in names):
        _refuse(file, "it has no list of architectures", 'add one, such as "architectures": ["OPTForCausalLM"]')
    return config


def _read_index(folder: Path) -> dict[str, str]:
    """Return tensor name -> file of the index, or an empty dict when the folder has none."""
    file = folder / _INDEX
    if not os.path.lexists(file):
        return {}
    again = "fetch the index of this checkpoint again"
    index = _read_json(file)
    weight_map = index.get("weight_map") if type(index) is dict else None
    if type(weight_map) is not dict or not weight_map:
        _refuse(file, "it has no weight_map", again)
    for name in set(map(str, weight_map.values())):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            _refuse(file, f"it names {_show(name)}, which is outside its folder", "do not use it: it may be hostile")
        if not name.endswith(".safetensors"):
            _refuse(file, f"it names {_show(name)}, which is not a safetensors file", again)
        if not os.path.isfile(folder / name):
            _refuse(file, f"it names {_show(name)}, which is missing", "fetch that file too")
    return weight_map


def _find_safetensors(folder: Path) -> list[str]:
    # Names that start with a dot are other programs' (macOS leaves ._model.safetensors); vLLM passes over them too.
    try:
        listing = os.listdir(folder)
    except OSError as error:
        _refuse(folder, f"it cannot be listed ({error.strerror})", "check its permissions")
    files = sorted(n for n in listing if n.endswith(".safetensors") and not n.startswith("."))
    if not files:
        fault = "it holds no *.safetensors file, and .bin or .pt files are pickles, which are never unpickled here"
        _refuse(folder, fault, "save the weights as safetensors")
    return files


def _read_state_dict_order(folder: Path, names: dict[str, str]) -> tuple[str, ...] | None:
    file = folder / "state_dict.json"
    if not os.path.lexists(file):
        return None
    order = _read_json(file)
    is_names = type(order) is list and all(type(name) is str for name in order)
    if not is_names or len(order) != len(names) or set(order) != names.keys():
        _refuse(file, "it is not a list of exactly the checkpoint's tensor names", "remove it")
    return tuple(order)


def _read_json(file: Path) -> Any:
    with _open_regular(file) as stream:
        if os.fstat(stream.fileno()).st_size > _MAX_JSON:
            _refuse(file, f"it is larger than {_MAX_JSON // 10**6} MB", "fetch it again")
        content = stream.read()
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        _refuse(file, "it is not JSON", "fetch it again")


@contextmanager
def _open_regular(file: Path) -> Iterator[Any]:
    try:
        # Looked at before it is opened: opening a pipe would wait for ever.
        if not stat.S_ISREG(os.stat(file).st_mode):
            _refuse(file, "it is not a regular file", "put the file itself there")
        stream = open(file, "rb")
    except (OSError, ValueError) as error:
        _refuse(file, f"it cannot be read ({getattr(error, 'strerror', None) or error})", "check the file")
    with stream:
        yield stream


# --- refusing ---


def _refuse(where: Path, fault: str, advice: str) -> NoReturn:
    raise CannotRun(f"{where}: {fault}; {advice}")


def _show(value: Any) -> str:
    """Quote something from a file so that it is safe, and short enough, to print."""
    try:
        text = repr(value[:120] if isinstance(value, (str, list)) else value)
    except ValueError:  # a whole number of more than 4300 digits
        text = "(a huge number)"
    return text if len(text) <= 120 else f"{text[:117]}..."


def _count(number: int) -> str:
    return f"{number:,}" if number < 2**64 else "more than 2^64"


@contextmanager
def _quiet_gc() -> Iterator[None]:
    """Keep the cyclic collector from walking a million fresh tuples again and again: reading takes half as long."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
