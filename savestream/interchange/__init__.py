"""Conversion from and to the files of other libraries, range by range, so that models larger than memory convert."""

from savestream.interchange.conversion import ConversionInfo
from savestream.interchange.functions import export_safetensors, import_dcp, import_safetensors, import_torch

__all__ = ["ConversionInfo", "export_safetensors", "import_dcp", "import_safetensors", "import_torch"]
