"""Pages of prompts that begin alike: `cache` is what an engine drives, `radix_tree` where pages are found, `pages` who
holds them on the device, `host` in the tiers, `eviction` which go first, `events` what routers are told, `books` the
proofs, `arguments` what callers may give."""

from anyattn.mem_cache.prefix_cache.cache import Match as Match
from anyattn.mem_cache.prefix_cache.cache import PrefixCache as PrefixCache
