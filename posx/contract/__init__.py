"""The contract of an encoding: the table of hooks, the base class, encodings made of others, and their checks.

Types and ranges of an encoding's fields are in `posx.contract.fields`.
"""

from posx.contract.arrays import (  # noqa: I001 (packed)
    as_float, at_least_float32, distances, exact_einsum, normal, normals, shifted_rows, wide_dtype,
)  # fmt: skip
from posx.contract.composite import (
    Chain, Composite, Tabulated, prefix_names, select_part, table_rows, tabulate_terms, walk_chain,
)  # fmt: skip
from posx.contract.encoding import (
    Encoding, abstract_params, check_defined, defined_hooks, parts, position_shape, require_encoding,
)  # fmt: skip
from posx.contract.facts import About, fact
from posx.contract.hooks import (
    FORMULA, HOOKS, MAPS, ByDistance, Features, Params, Tile, acting_hooks, bias_by_distance, distance_terms,
    select_hooks,
)  # fmt: skip
from posx.contract.value import Dims, Value, require_resolved, walk_values
from posx.lazy import module_getter

__getattr__ = module_getter(__name__)

__all__ = [
    "FORMULA", "HOOKS", "MAPS", "About", "ByDistance", "Chain", "Composite", "Dims", "Encoding", "Features", "Params",
    "Tabulated", "Tile", "Value", "abstract_params", "acting_hooks", "as_float", "at_least_float32", "bias_by_distance",
    "check_defined", "defined_hooks", "distance_terms", "distances", "exact_einsum", "fact", "normal", "normals",
    "parts", "position_shape", "prefix_names", "require_encoding", "require_resolved", "select_hooks", "select_part",
    "shifted_rows", "table_rows", "tabulate_terms", "walk_chain", "walk_values", "wide_dtype",
]  # fmt: skip
