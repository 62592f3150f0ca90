"""`x W^T + b`: with a plain `W`, in panels (`kernels.panels`), in codes (`kernels.coded_linear`), in 8-bit floats that
rows are rounded to as well (`kernels.scaled_linear`), or in the order in which the CPU's matrix library (oneDNN) reads
it, of which the rest of this page speaks.

A plain `[rows, columns]` weight is read badly for the few rows of a decode step. Packed once, products of four to
sixteen rows take about half the time, those of a prefill chunk the same. The packed form is opaque and fits one version
of the library on one kind of processor; its bytes can be kept in a file and mapped by every process of a host.

Bits: a row of the product does not depend on the other rows when there are four or a multiple (one row alone takes
another kernel). Packed or plain makes no difference to them.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear

from kernels.coded_weight import CodedWeight
from kernels.native import native
from kernels.panels import Panels
from kernels.scaled_linear import Float8Weight, scaled_linear

_LAYOUT_MKLDNN = 3  # c10::Layout::Mkldnn
_ROWS_HINT = 16


Weight = Tensor | Panels | CodedWeight | Float8Weight
"""A weight `[rows, columns]`: plain, packed, in panels, in codes for a GPU, or in 8-bit floats."""


class PackError(Exception):
    """This library, processor or dtype cannot pack, or cannot use packed bytes that lie elsewhere."""


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Multiply `x` `[n, columns]` -> `[n, rows]`; `weight` is plain, in panels, in codes, in 8-bit floats, or from
    `pack` or `from_bytes`. Raises RuntimeError for panels where there are no native kernels."""
    if isinstance(weight, Panels):
        kernels = native()
        if kernels is None:
            raise RuntimeError("weights in panels need the native kernels")
        return kernels.linear(x, weight, bias)
    if isinstance(weight, CodedWeight):
        from kernels.coded_linear import coded_linear, launch_configs

        return coded_linear(x, weight, bias, launch_configs(x.device, weight.kind))
    if isinstance(weight, Float8Weight):
        return scaled_linear(x, weight, bias)
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return plain_linear(x, weight, bias)


def pack(weight: Tensor) -> Tensor:
    """Return a packed copy of a plain weight. Raises PackError where that is not possible."""
    if not torch.backends.mkldnn.is_available():
        raise PackError("this PyTorch has no oneDNN")
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    except (RuntimeError, AttributeError) as error:
        raise PackError(f"{weight.dtype} cannot be packed: {str(error).splitlines()[0]}") from error
    return packed


def to_bytes(packed: Tensor) -> tuple[memoryview, bytes]:
    """Return the bytes of a packed weight (a view, good while `packed` lives) and the description `from_bytes` wants.
    """
    size = torch.ops.mkldnn._nbytes(packed)
    raw = (ctypes.c_uint8 * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    return memoryview(raw), torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy().tobytes()


def from_bytes(raw: Tensor, shape: tuple[int, int], dtype: torch.dtype, description: bytes) -> Tensor:
    """Return a packed weight whose bytes are `raw` (uint8, aligned to 64), which must outlive it. Nothing is copied.

    Raises PackError where this PyTorch cannot do so.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        create = library.aoti_torch_create_tensor_from_blob_v2
        kind = {
            torch.float32: library.aoti_torch_dtype_float32,
            torch.bfloat16: library.aoti_torch_dtype_bfloat16,
            torch.float16: library.aoti_torch_dtype_float16,
        }[dtype]
        adopt = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr  # type: ignore[attr-defined]
    except (OSError, AttributeError, KeyError) as error:
        raise PackError(f"this PyTorch cannot map packed weights: {error}") from error
    pointer, wide, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    create.argtypes = [pointer, wide, pointer, pointer, wide, small, small, small, pointer, small, pointer, wide]
    sizes, strides = (wide * 2)(*shape), (wide * 2)(shape[1], 1)
    handle = pointer()
    status = create(
        raw.data_ptr(),
        2,
        ctypes.addressof(sizes),
        ctypes.addressof(strides),
        0,
        kind(),
        library.aoti_torch_device_type_cpu(),
        0,
        ctypes.addressof(handle),
        _LAYOUT_MKLDNN,
        description,
        len(description),
    )
    if status != 0:
        raise PackError(f"this PyTorch cannot map packed weights: status {status}")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [pointer, ctypes.c_char_p, pointer]
    tensor: Tensor = adopt(capsule(handle, None, None))
    return tensor
