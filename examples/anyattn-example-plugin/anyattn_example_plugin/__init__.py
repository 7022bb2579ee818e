"""What this plugin offers: names, and where to find what they name. Nothing of it is imported before it is needed."""

import anyattn

contract_version = 1


@anyattn.hookimpl
def anyattn_platforms():
    return {"example": "anyattn_example_plugin.platform:probe"}


@anyattn.hookimpl
def anyattn_simulated_devices():
    return {"example1": "anyattn_example_plugin.platform:EXAMPLE1"}


@anyattn.hookimpl
def anyattn_attention_backends():
    return {"example_gather": "anyattn_example_plugin.backend:ExampleBackend"}


@anyattn.hookimpl
def anyattn_kv_allocators():
    return {"example_lowest_first": "anyattn_example_plugin.allocator:LowestFirstAllocator"}
