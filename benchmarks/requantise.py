"""A GGUF file with its matrices in another type, so that engines can be compared on types nobody publishes.

In: a GGUF file, a type that the gguf package can quantise (Q4_0, Q4_1, Q5_0, Q8_0, F16, F32), a new file. Out: the
same model; matrices are made dense and quantised again, vectors and everything else stay as they are.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "F32")


def requantise(source: Path, kind: str, to: Path) -> None:
    """Write `source` to `to` with matrices of this type."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(to, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        data, own = tensor.data, tensor.tensor_type
        if len(tensor.shape) > 1:
            data, own = gguf.quants.quantize(gguf.quants.dequantize(data, own), wanted), wanted
        writer.add_tensor(tensor.name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("type", choices=TYPES)
    parser.add_argument("to", type=Path)
    options = parser.parse_args()
    if options.to.exists():
        print(f"{options.to} is there already; choose another name.", file=sys.stderr)
        return 1
    requantise(options.source, options.type, options.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
