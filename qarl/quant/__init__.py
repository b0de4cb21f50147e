"""Number formats, scales and schemes; the only room that rounds numbers."""

from qarl.quant.formats import E4M3, INT4, INT8, NumberFormat, pack_int4, round_to_type, unpack_int4
from qarl.quant.qtensor import (
    QTensor,
    dequantize,
    dequantize_activations,
    dequantize_rows,
    quantize,
    quantize_activations,
    quantize_rows,
)
from qarl.quant.rules import QuantConfig, SchemePlan, plan_schemes
from qarl.quant.scheme import SCHEMES, Quantizer, Scheme, scheme_named

__all__ = [
    "E4M3",
    "INT4",
    "INT8",
    "SCHEMES",
    "NumberFormat",
    "QTensor",
    "QuantConfig",
    "Quantizer",
    "Scheme",
    "SchemePlan",
    "dequantize",
    "dequantize_activations",
    "dequantize_rows",
    "pack_int4",
    "plan_schemes",
    "quantize",
    "quantize_activations",
    "quantize_rows",
    "round_to_type",
    "scheme_named",
    "unpack_int4",
]
