"""The page mover with the types of its arguments, to be compiled without a device."""

from anyattn.mem_cache.kernels import pages_triton as kernels

TYPES = {"chunks": "*i64", "num_chunks": "i32", "targets": "*i64", "record_stride": "i64"}

KERNELS = [
    (
        kernels.move_pages_kernel,
        TYPES | {"pages": pages, "records": "*i64" if mode == kernels.COPY else "*u8"},
        {"MODE": mode, "VECTOR": vector, "CHUNK": 8192},
    )
    for mode, pages in ((kernels.READ, "*i32"), (kernels.WRITE, "*i64"), (kernels.COPY, "*i64"))
    for vector in (True, False)
]
