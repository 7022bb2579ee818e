"""The kernels of the device allocator's books, with the types of their arguments, to be compiled without a device."""

from anyattn.mem_cache.kernels import books_triton as kernels

POINTERS = dict.fromkeys(kernels._POINTERS, "*i32") | {"words_ptr": "*i64", "last_slots_ptr": "*i64"}
TYPES = POINTERS | dict.fromkeys(kernels._SIZES, "i32")
BLOCKS = {"BLOCK_SEQS": kernels.BLOCK_SEQS, "BLOCK_PAGES": kernels.BLOCK_PAGES, "BLOCK_FREE": kernels.BLOCK_FREE}
FREE = {"BLOCK": kernels.BLOCK_FREE}
INT64_LENGTHS = {"prefix_lens_ptr": "*i64", "lengths_ptr": "*i64"}


def entry(kernel, constants, **other_types):
    types = TYPES | other_types
    used = {name: value for name, value in constants.items() if name in kernel.arg_names}
    left = {name: types[name] for name in kernel.arg_names if name not in used}
    return kernel, left, used, {"num_warps": kernels._NUM_WARPS}


KERNELS = [
    entry(kernels.alloc_kernel, BLOCKS),
    entry(kernels.extend_kernel, BLOCKS | {"PAGE_SIZE": 64, "DECODE": False}, **INT64_LENGTHS),
    entry(kernels.extend_kernel, BLOCKS | {"PAGE_SIZE": 3, "DECODE": True}),
    entry(kernels.inspect_extend_kernel, BLOCKS | {"PAGE_SIZE": 16, "DECODE": False}, lengths_ptr="*i64"),
    entry(kernels.share_kernel, {"BLOCK": kernels.BLOCK_PAGES}, pages_ptr="*i64"),
    entry(kernels.inspect_pages_kernel, FREE | {"FREE": False}),
    entry(kernels.free_kernel, FREE),
    entry(kernels.give_back_kernel, FREE),
    entry(kernels.count_freed_kernel, FREE, pages_ptr="*i64"),
    entry(kernels.push_kernel, FREE),
    entry(kernels.inspect_pages_kernel, FREE | {"FREE": True}),
]
