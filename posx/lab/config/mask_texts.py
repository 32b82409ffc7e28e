"""The text of a mask, as `model.mask_policy` has it."""

from __future__ import annotations

from posx.attention.masks import Mask, causal, full, window
from posx.encodings.grammar import parse
from posx.errors import ConfigError
from posx.parsing import to_type

#: The masks of `model.mask_policy`, and their fields.
MASKS = {"causal": (), "full": (), "window": ("size", "sinks")}


def parse_mask(text: str, over: Mask = causal()) -> Mask:
    """Return the mask that a text names: causal, full, window(size=512), window(size=512, sinks=4).

    Fields of a window that the text does not name are as in the mask `over`. Raises ConfigError.
    """
    spec = parse(text)
    name, given = (
        (spec["name"], {key: spec[key] for key in spec if key != "name"}) if isinstance(spec, dict) else ("", {})
    )
    if name not in MASKS or given.keys() - set(MASKS[name]):
        raise ConfigError(f"mask {text!r} is unknown. The masks are: causal, full, window(size=512, sinks=4).")
    if name != "window":
        return causal() if name == "causal" else full()
    trained = {"size": over.window, "sinks": over.sinks}
    size, sinks = (to_type(given.get(key, trained[key]), int, f"mask {text!r}: {key}") for key in MASKS[name])
    if size < 1:
        raise ConfigError(f"mask {text!r}: size must be at least 1. Give window(size=512, sinks={sinks}).")
    return window(size, sinks)


def mask_text(mask: Mask) -> str:
    """Return the text that `parse_mask` reads."""
    if not mask.causal:
        return "full"
    sinks = f", sinks={mask.sinks}" if mask.sinks else ""
    return f"window(size={mask.window}{sinks})" if mask.window else "causal"
