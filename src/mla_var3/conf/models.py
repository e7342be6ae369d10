"""Published MLA models: widths of their attention and number of heads.

The table is `models.json` beside this module. `source` is the Hugging Face repository whose
config.json has the numbers. `read_config` reads such a file of any other model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from mla_var3.conf import read_json, shipped
from mla_var3.errors import InvalidArgumentError, UnknownNameError


class Widths(NamedTuple):
    """Widths of an MLA layer: latent, a head's queries without rope, rope (or 0), values."""

    k: int
    d: int
    p: int
    v: int


@dataclass(frozen=True)
class Model:
    """A model as its attention sees it; `aliases` are models with the same attention.

    Name and source are those of the table, or both the path of the config that was read.
    """

    name: str
    widths: Widths
    heads: int
    source: str
    aliases: tuple[str, ...] = ()

    def heads_per_rank(self, tp: int = 1) -> int:
        """Heads of one of `tp` GPUs that share them evenly by tensor parallelism."""
        if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
            raise InvalidArgumentError("tp", "a positive integer", repr(tp))
        if self.heads % tp:
            expected = f"a divisor of the {self.heads} heads of {self.name}"
            raise InvalidArgumentError("tp", expected, tp)
        return self.heads // tp

    def sizes(self, tp: int = 1) -> dict[str, int]:
        """`h`, `d`, `p`, `k` and `v` of a problem on one GPU."""
        return {"h": self.heads_per_rank(tp), **self.widths._asdict()}


WIDTH_KEYS: Final = {
    "k": ("kv_lora_rank", "attention_kv_lora_dim"),
    "d": ("qk_nope_head_dim", "attention_qk_dim"),
    "p": ("qk_rope_head_dim", "attention_qk_rope_dim"),
    "v": ("v_head_dim", "attention_v_dim"),
}
"""Keys of a Hugging Face config: those of DeepSeek, then those of openPangu."""


@lru_cache(maxsize=1)
def models() -> Mapping[str, Model]:
    """All models of the table by name."""
    found: dict[str, Model] = {}
    for name, entry in read_json(shipped("models.json"), "a table").items():
        widths = Widths(*(entry[width] for width in Widths._fields))
        aliases = tuple(entry.get("aliases", ()))
        found[name] = Model(name, widths, entry["heads"], entry["source"], aliases)
    return MappingProxyType(found)


def model(name: str) -> Model:
    """The model of a name or alias, whatever the case."""
    if not isinstance(name, str):
        raise InvalidArgumentError("model", "the name of a model", repr(name))
    wanted = name.strip().lower()
    for known in models().values():
        if wanted in (known.name, *known.aliases):
            return known
    hint = "Of any other model give the widths, or the config.json (--config, read_config)"
    raise UnknownNameError("model", name, models(), hint)


def read_config(path: str | Path) -> Model:
    """The model of a Hugging Face config.json.

    A config without `v_head_dim` has values of `hidden_size / num_attention_heads`, as MiniCPM3.

    Raises:
        InvalidArgumentError: The file cannot be read, or is not that of an MLA model.
    """
    config = text_config(path, str(path))
    heads = config_number(path, config, ("num_attention_heads",), least=1)
    found: dict[str, int] = {}
    for name, keys in WIDTH_KEYS.items():
        if name == "v" and all(config.get(key) is None for key in keys):
            hidden = config_number(path, config, (*keys, "hidden_size"), least=heads)
            found[name] = hidden // heads
        else:
            found[name] = config_number(path, config, keys, least=0 if name == "p" else 1)
    return Model(str(path), Widths(**found), heads, str(path))


def text_config(path: str | Path, name: str) -> dict[str, Any]:
    """What a config.json, called `name` in errors, says of the text model, all or a part of it."""
    config: Any = read_json(path, "a readable config.json", name)
    if not isinstance(config, dict):
        raise InvalidArgumentError(name, "a JSON object", type(config).__name__)
    nested = config.get("text_config")
    if isinstance(nested, dict) and all(config.get(key) is None for key in WIDTH_KEYS["k"]):
        return nested
    return config


def config_number(
    path: str | Path, config: Mapping[str, Any], keys: tuple[str, ...], least: int
) -> int:
    """The first of the keys that the config has, an integer; an error names path and key."""
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        expected = "an integer, as the config of an MLA model has"
        raise InvalidArgumentError(f"{path}: {keys[0]}", expected, "nothing")
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgumentError(f"{path}: {key}", f"an integer >= {least}", repr(value))
    return value
