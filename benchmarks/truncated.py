"""The demo model without its last layers: the only smaller models with its tokenizer that need no download.

What is left guesses badly, as nothing has trained it to end there; with all layers it is the demo model itself.
"""

from pathlib import Path

import gguf

from engine.model.prepared.cache import find_demo_model

_LAYER = "blk."


def write(path: Path, layers: int) -> None:
    """Write a GGUF file with the first `layers` layers. Raises ValueError where the model has not so many."""
    reader = gguf.GGUFReader(find_demo_model())
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    counted = gguf.Keys.LLM.BLOCK_COUNT.format(arch=architecture)
    whole = reader.fields[counted].contents()
    if not 1 <= layers <= whole:
        raise ValueError(f"{layers} layers: the demo model has {whole}")
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in (gguf.Keys.General.ARCHITECTURE, counted):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_block_count(layers)
    for tensor in reader.tensors:
        number = tensor.name.removeprefix(_LAYER).partition(".")[0]
        if not tensor.name.startswith(_LAYER) or int(number) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
