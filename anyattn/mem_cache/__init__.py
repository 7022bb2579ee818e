"""Where KV bytes live: cache spec, pools, allocators and page tables. Imports only `types`, `errors` and `lazy`."""
