"""The kernels of anyattn/mem_cache/kernels/indices_triton.py, with the types that they are compiled for offline."""

from anyattn.mem_cache.kernels.indices_triton import step_indices_kernel, step_lengths_kernel, write_new_pages_kernel

_STEP = {
    "page_table": "*i32",
    "row_stride": "i32",
    "rows": "*i32",
    "kv_lens": "*i32",
    "prefix_lens": "*i32",
    "qo_indptr": "*i32",
    "kv_indptr": "*i32",
    "num_seqs": "i32",
    "mapping": "*i32",
    "out_slots": "*i64",
    "positions": "*i64",
    "num_tokens": "i32",
    "block_table": "*i32",
    "table_stride": "i32",
    "columns": "i32",
    "kv_indices": "*i32",
    "num_indices": "i32",
}
_STEP_SIZES = {"PAGE_SIZE": 16, "TOKENS": 256, "ROWS": 8, "COLUMNS": 128, "INDICES": 1024, "WIDTH": 512}
_INDICES_ALONE = dict.fromkeys(("mapping", "out_slots", "positions", "block_table"))
_LENGTHS = {
    "prefix_lens": "*i32",
    "lengths": "*i32",
    "capacity": "i32",
    "kv_lens": "*i32",
    "qo_indptr": "*i32",
    "kv_indptr": "*i32",
    "kv_last_page_len": "*i32",
}
_NEW_PAGES = {
    "page_table": "*i32",
    "row_stride": "i32",
    "rows": "*i32",
    "first_columns": "*i32",
    "indptr": "*i32",
    "num_seqs": "i32",
    "pages": "*i32",
    "num_pages": "i32",
}

KERNELS = [
    (step_indices_kernel, _STEP, _STEP_SIZES),
    (step_indices_kernel, _STEP, _STEP_SIZES | {"mapping": None}),
    (step_indices_kernel, _STEP, _STEP_SIZES | _INDICES_ALONE | {"PAGE_SIZE": 1}),
    (step_lengths_kernel, _LENGTHS | {"num_seqs": "*i32"}, {"PAGE_SIZE": 7, "BLOCK": 1024}),
    (step_lengths_kernel, _LENGTHS | {"num_seqs": "i32"}, {"PAGE_SIZE": 16, "BLOCK": 1024}),
    (write_new_pages_kernel, _NEW_PAGES, {"PAGES": 256, "WIDTH": 512}),
]
