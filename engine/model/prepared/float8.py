"""A prepared model's matrices in 8-bit floats, as weights whose products round activations to them too."""

from collections.abc import Mapping

import torch

from engine.model.prepared.loading import is_of_experts, stays_coded
from kernels.coded_weight import CodedWeight
from kernels.scaled_linear import Float8Error, Float8Weight, find_way, from_codes


def float8_weights(stored: Mapping[str, object], device: torch.device, dtype: torch.dtype) -> dict[str, Float8Weight]:
    """Return those of a model's matrices that are multiplied in 8-bit floats, but for experts'; their codes are not
    copied. `stored`: matrices by name, of which those in codes count. Raises ValueError where there are none, and where
    the device has no such product."""
    coded = {
        name: weight
        for name, weight in stored.items()
        if isinstance(weight, CodedWeight) and weight.kind == "f8" and stays_coded(name) and not is_of_experts(name)
    }
    if not coded:
        raise ValueError("engine.arithmetic: fp8 is for checkpoints in FP8, and this model has no matrix in it")
    try:
        way = find_way(device, dtype)
    except Float8Error as error:
        raise ValueError(f"engine.arithmetic: fp8 cannot be had on {error}") from error
    found = {name: made for name, weight in coded.items() if (made := from_codes(weight, way)) is not None}
    if not found:
        raise ValueError(
            "engine.arithmetic: fp8 is for scales of a matrix, of rows, or of blocks whose columns are a multiple of "
            "128, and this model's are of others"
        )
    return found
