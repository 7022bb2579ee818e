"""What the plugin offers: a backend, an allocator, a platform probe and a simulated device."""

# A frozen copy of a plugin as it was written against contract version 1. It is never edited: should it stop working,
# the contract has broken plugins that are out there, and its version has to be raised.

import anyattn

contract_version = 1


@anyattn.hookimpl
def anyattn_attention_backends():
    return {"frozen": "anyattn_frozen_v1.backend:FrozenBackend"}


@anyattn.hookimpl
def anyattn_kv_allocators():
    return {"frozen_paged": "anyattn_frozen_v1.allocator:FrozenAllocator"}


@anyattn.hookimpl
def anyattn_platforms():
    return {"frozen": "anyattn_frozen_v1.devices:probe"}


@anyattn.hookimpl
def anyattn_simulated_devices():
    return {"frozen1": "anyattn_frozen_v1.devices:FROZEN1"}
