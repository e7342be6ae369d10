"""The public attention calls; names are loaded when they are used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_var3.attention.cache.latent_cache import LatentCache as LatentCache
    from mla_var3.attention.cache.view import CacheView as CacheView
    from mla_var3.attention.cache.view import paged_view as paged_view
    from mla_var3.attention.call import explain as explain
    from mla_var3.attention.call import mla_attention as mla_attention
    from mla_var3.attention.call import mla_latent_attention as mla_latent_attention
    from mla_var3.attention.prefix.decompressed import decompress_prefixes as decompress_prefixes
    from mla_var3.attention.prefix.find import find_shared_prefixes as find_shared_prefixes
    from mla_var3.attention.prefix.groups import DecompressedPrefixes as DecompressedPrefixes
    from mla_var3.attention.prefix.groups import PrefixGroups as PrefixGroups
    from mla_var3.attention.prefix.layout import PrefixLayout as PrefixLayout
    from mla_var3.attention.prefix.layout import prefix_layout as prefix_layout
    from mla_var3.attention.request.masks import tree_ancestors as tree_ancestors
    from mla_var3.attention.request.shape import CallShape as CallShape
    from mla_var3.attention.select.choice import Explanation as Explanation
    from mla_var3.attention.step import Step as Step

_HOMES = {
    "CacheView": "cache.view",
    "CallShape": "request.shape",
    "DecompressedPrefixes": "prefix.groups",
    "Explanation": "select.choice",
    "LatentCache": "cache.latent_cache",
    "PrefixGroups": "prefix.groups",
    "PrefixLayout": "prefix.layout",
    "Step": "step",
    "decompress_prefixes": "prefix.decompressed",
    "explain": "call",
    "find_shared_prefixes": "prefix.find",
    "mla_attention": "call",
    "mla_latent_attention": "call",
    "paged_view": "cache.view",
    "prefix_layout": "prefix.layout",
    "tree_ancestors": "request.masks",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # found at once the next time
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
