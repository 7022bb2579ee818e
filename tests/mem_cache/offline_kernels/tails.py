"""What zeroes tails, with the types of its arguments, to be compiled without a device."""

from anyattn.mem_cache.kernels.tails_triton import zero_tails_kernel

TYPES = {"chunks": "*i64", "num_chunks": "i32", "pages": "*i64", "used": "*i64"}

KERNELS = [(zero_tails_kernel, TYPES, {"VECTOR": vector, "CHUNK": 8192}) for vector in (True, False)]
