"""The store kernels with the types of their arguments and real pools' constants, to be compiled without a device."""

import torch

from anyattn.mem_cache.kernels import store_triton as kernels
from anyattn.mem_cache.kernels.store import StoreTarget
from anyattn.mem_cache.layouts import dims_of, page_shape, tokens_view

SIZES = {"num_tokens": "i32"} | {
    f"{name}_{i}": "i32" for name in ("token_stride", "head_stride", "dim_stride") for i in (0, 1)
}
CONSTANTS = (
    "DIM", "SCALES", "PAGE_STRIDE", "TOKEN_PIECE", "TOKEN_HI_STRIDE", "TOKEN_STRIDE", "HEAD_STRIDE", "DIM_PIECE",
    "DIM_HI_STRIDE", "DIM_STRIDE",
)  # fmt: skip


def target(layout, part, dtype, *, page_size, num_kv_heads, dim, scales=0):
    """Pages without storage: just their sizes and strides count."""
    shape = page_shape(layout, part, page_size=page_size, num_kv_heads=num_kv_heads, dim=dim, itemsize=dtype.itemsize)
    pages = torch.empty((3, *shape), dtype=dtype, device="meta")
    return StoreTarget(tokens_view(pages, layout, part), torch.empty(scales, device="meta") if scales else None)


def store_entry(source, pages, targets, page_size, *, vector, fp8=kernels.NO_FP8, native=False):
    first = targets[0]
    row, blocks = kernels._blocks(*(each.num_kv_heads * each.dim for each in targets))
    constants = {
        "NUM_KV_HEADS": first.num_kv_heads, "PAGE_SIZE": page_size, "VECTOR": vector, "FP8": fp8, "NATIVE": native,
        "TOKENS": kernels._ELEMENTS // row, "ROW": row, "BLOCKS_0": blocks[0],
    }  # fmt: skip
    of_targets = [each.constants for each in targets] + [kernels._NO_CONSTANTS]
    for i in (0, 1):
        constants |= {f"{name}_{i}": value for name, value in zip(CONSTANTS, of_targets[i], strict=True)}
    types = SIZES | {"slots": "*i64"}
    types |= {f"source_{i}": source for i in (0, 1)} | {f"pages_{i}": pages for i in (0, 1)}
    types |= {f"scale_{i}": "*fp32" if any(each.scale is not None for each in targets) else pages for i in (0, 1)}
    return kernels.store_kernel, types, constants


def rows_entry(source, *, native, vector, page_size, tiles, tile, tail, strides):
    names = ("VALUE_PAGE_STRIDE", "VALUE_TOKEN_STRIDE", "SCALE_PAGE_STRIDE", "SCALE_TOKEN_STRIDE", "TAIL_PAGE_STRIDE",
             "TAIL_TOKEN_STRIDE")  # fmt: skip
    constants = {
        "PAGE_SIZE": page_size, "VECTOR": vector, "NATIVE": native,
        "TOKENS": kernels._QUANTISED_ELEMENTS // (tiles * tile), "TILES": tiles, "TILE": tile, "TILE_BLOCK": tile,
        "TAIL": tail, "TAIL_BLOCK": max(tail, 1), **dict(zip(names, strides, strict=True)),
    }  # fmt: skip
    types = {
        "slots": "*i64", "num_tokens": "i32", "values": source, "token_stride": "i32", "dim_stride": "i32",
        "tail": source, "tail_token_stride": "i32", "tail_dim_stride": "i32", "value_pages": "*u8",
        "scale_pages": "*fp32", "tail_pages": "*bf16" if tail else "*u8",
    }  # fmt: skip
    return kernels.store_rows_kernel, types, constants


CAST = {"values": "*fp32", "result": "*u8"}
HEADS = {"page_size": 16, "num_kv_heads": 8, "dim": 128}
LATENT = target("NHD", "k", torch.bfloat16, page_size=64, num_kv_heads=1, dim=576)
LATENT_AND_ROPE = [StoreTarget(dims_of(LATENT.pages, first, count)) for first, count in ((0, 512), (512, 64))]

ROWS = {"page_size": 64, "tiles": 4, "tile": 128, "tail": 64}
ROW_STRIDES = (64 * 656, 656, 64 * 164, 164, 64 * 328, 328)

KERNELS = [
    store_entry("*bf16", "*bf16", [target(layout, part, torch.bfloat16, **HEADS) for part in "kv"], 16, vector=vector)
    for layout, vector in (("NHD", True), ("NHD", False), ("NZ", True), ("5D", True))
]
KERNELS += [
    store_entry("*bf16", "*bf16", LATENT_AND_ROPE, 64, vector=True),
    store_entry("*fp32", "*fp16", [LATENT], 64, vector=False),
]
KERNELS += [
    store_entry("*bf16", "*u8", [target("HND", part, dtype, **HEADS, scales=scales) for part in "kv"], 16, vector=True,
                fp8=kernels._FP8[dtype])
    for dtype, scales in ((torch.float8_e4m3fn, 8), (torch.float8_e5m2, 1), (torch.float8_e4m3fnuz, 1))
]  # fmt: skip
KERNELS += [
    rows_entry("*bf16", native=False, vector=True, **ROWS, strides=ROW_STRIDES),
    rows_entry("*fp32", native=False, vector=False, **ROWS, strides=ROW_STRIDES),
    rows_entry("*bf16", native=False, vector=True, page_size=64, tiles=1, tile=128, tail=0,
               strides=(64 * 132, 128, 64 * 33, 1, 64 * 132, 128)),
    (kernels.cast_kernel, CAST, {"FP8": kernels.E4M3, "NATIVE": False, "BLOCK": 1024}),
]  # fmt: skip
# What targets with a cast of their own launch instead; the others refuse it, which `casts_rightly` finds out.
KERNELS += [
    (kernels.cast_kernel, CAST, {"FP8": kernels.E4M3, "NATIVE": True, "BLOCK": 1024}),
    store_entry("*bf16", "*u8", [target("NHD", part, torch.float8_e4m3fn, **HEADS, scales=1) for part in "kv"], 16,
                vector=True, fp8=kernels.E4M3, native=True),
]  # fmt: skip
REFUSED = {(len(KERNELS) - 2, "sm_80"): "_fp8_bytes", (len(KERNELS) - 1, "sm_80"): "_store_block"}
