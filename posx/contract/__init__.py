"""The contract of an encoding: the table of hooks, the base class, encodings made of others, and their checks.

Types and ranges of an encoding's fields are in `posx.contract.fields`.
"""

from posx.contract.arrays import (  # noqa: I001 (packed)
    as_float, at_least_float32, distances, exact_einsum, normal, normals, shifted_rows, wide_dtype,
)  # fmt: skip
from posx.contract.composite import Chain, Composite, Tabulated, inside, prefixed, rows_at, tabulated
from posx.contract.encoding import Encoding, abstract_params, check_defined, hooks_of, parts, require_encoding
from posx.contract.facts import About, fact
from posx.contract.hooks import (
    FORMULA, HOOKS, MAPS, ByDistance, Features, Params, Tile, acting, bias_by_distance, distance_terms, of_kinds,
)  # fmt: skip
from posx.contract.value import Dims, Value, require_resolved, values_in
from posx.lazy import modules_of

__getattr__ = modules_of(__name__)

__all__ = [
    "FORMULA", "HOOKS", "MAPS", "About", "ByDistance", "Chain", "Composite", "Dims", "Encoding", "Features", "Params",
    "Tabulated", "Tile", "Value", "abstract_params", "acting", "as_float", "at_least_float32", "bias_by_distance",
    "check_defined", "distance_terms", "distances", "exact_einsum", "fact", "hooks_of", "inside", "normal", "normals",
    "of_kinds", "parts", "prefixed", "require_encoding", "require_resolved", "rows_at", "shifted_rows", "tabulated",
    "values_in", "wide_dtype",
]  # fmt: skip
