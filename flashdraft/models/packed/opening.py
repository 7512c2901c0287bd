"""Which table reads a checkpoint of few bits, by the layout that its config tells."""

from __future__ import annotations

from flashdraft.models.config.weight_format import Layout, WeightFormat
from flashdraft.models.files.safetensors import SafetensorsFiles
from flashdraft.models.packed.compressed import CompressedTable
from flashdraft.models.packed.gptq import GPTQTable
from flashdraft.models.packed.nvfp4 import NVFP4Table
from flashdraft.models.packed.table import PackedTable

_TABLES: dict[Layout, type[PackedTable]] = {
    Layout.COMPRESSED: CompressedTable,
    Layout.GPTQ: GPTQTable,
    Layout.GPTQ_V2: GPTQTable,
    Layout.AWQ: GPTQTable,
    Layout.NVFP4: NVFP4Table,
}


def packed_table(files: SafetensorsFiles, formats: tuple[WeightFormat, ...]) -> PackedTable:
    """The weights and other tensors of a checkpoint, without values."""
    return _TABLES[formats[0].layout](files, formats)
