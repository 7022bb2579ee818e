"""torch-npu on the CPU: what anyattn calls of it, with the vendor's declarations and the vendor's constraints.

Every call is bound to the wheel's declaration first. Constraints are those of torch-npu 2.14.0's own documentation
(_op_plugin_docs.py, op_plugin/atb/_atb_api_docs.py) and of CANN's (ATB: ReshapeAndCacheOperation,
PagedAttentionOperation; acl: aclmdlRICaptureTask*); what they do not say is refused. Attention reads a sequence's last
page to its end and multiplies what is masked by 0.

Where the documentation of fused infer attention contradicts itself, this is what holds here: layout TND takes paged
keys and values ("KV cache layouts in the scenario of paged attention"), and with sparse_mode 3 a sequence may have no
more queries than keys, as many included, which is what every prompt has. docs/ascend.md has all such places. `.out`
leaves NaN for the LSE, which is documented to be reserved there.
"""

import functools
from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace

import torch
from paged_kernel import Loads, attend, is_capturing
from torch.utils._python_dispatch import _disable_current_modes
from vendor_calls import bound, declaration

SERVERS = ("ascend910b", "ascend910_93")
FRACTAL_NZ = 29
_16_BIT = (torch.float16, torch.bfloat16)
_MASKS = (torch.bool, torch.int8, torch.uint8)


class RefusedError(Exception):
    """What the operators do not take, by the vendor's documents."""


def require(holds, text):
    if not holds:
        raise RefusedError(text)


def operator(name, **handled):
    """Decorates an emulation that takes the arguments as one object. handled: those that may be other than default."""
    signature = declaration("ascend", name)

    def decorate(emulation):
        def taking(**arguments):
            for key, value in arguments.items():
                default = signature.parameters[key].default
                if key not in handled and default is not signature.empty and value is not default:
                    require(value == default, f"{name}: {key} is not emulated")
            return emulation(SimpleNamespace(**arguments))

        taking.__signature__ = signature
        return bound("ascend", name)(taking)

    return decorate


class Stream:
    """others: streams that it was last told to wait for, in order."""

    def __init__(self):
        self.waited_for = []
        self.wait_stream = bound_method("npu.Stream.wait_stream", self, self._wait_stream)

    def _wait_stream(self, stream):
        self.waited_for.append(stream)


def bound_method(name, owner, function):
    signature = declaration("ascend", name)

    def call(*args, **kwargs):
        arguments = signature.bind(owner, *args, **kwargs).arguments
        return function(*[value for key, value in arguments.items() if key != "self"])

    return call


class TaskGroup:
    """What is between begin and end of a group in a graph: one call, and its lengths, which an update writes anew."""

    def __init__(self, stream):
        self.stream, self.call, self.lens = stream, None, None


class Npu:
    """`torch_npu` on one kind of chip, and what it was asked for."""

    def __init__(self, arch):
        self.arch = arch
        self.default, self.current = Stream(), None
        self.group = self.updated = None
        self.formatted = []  # storages of format FRACTAL_NZ
        self.workspaces = []
        self.calls = []
        self.npu = SimpleNamespace(
            is_current_stream_capturing=bound("ascend", "npu.is_current_stream_capturing")(is_capturing),
            graph_task_group_begin=bound("ascend", "npu.graph_task_group_begin")(self._group_begin),
            graph_task_group_end=bound("ascend", "npu.graph_task_group_end")(self._group_end),
            graph_task_update_begin=bound("ascend", "npu.graph_task_update_begin")(self._update_begin),
            graph_task_update_end=bound("ascend", "npu.graph_task_update_end")(self._update_end),
            current_stream=bound("ascend", "npu.current_stream")(lambda device: self.current or self.default),
            stream=bound("ascend", "npu.stream")(self._stream),
            Stream=self._new_stream,
        )
        for version, fused in (("", _V1), ("_v2", _V2)):
            name = f"npu_fused_infer_attention_score{version}"
            setattr(self, name, self._fused(name, fused))
            workspace = operator(f"_{name}_get_max_workspace", **dict.fromkeys(_HANDLED))
            setattr(self, f"_{name}_get_max_workspace", workspace(functools.partial(self._workspace, fused)))
        self.npu_scatter_pa_kv_cache = operator("npu_scatter_pa_kv_cache")(self._scatter)
        self._npu_reshape_and_cache = operator("_npu_reshape_and_cache")(self._reshape_and_cache)
        self._npu_paged_attention = operator("_npu_paged_attention")(self._paged_attention)
        self.npu_format_cast = operator("npu_format_cast")(self._format_cast)

    # Streams, and task groups of graphs.

    def _new_stream(self, *args, **kwargs):
        declaration("ascend", "npu.Stream.__new__").bind(Stream, *args, **kwargs)
        return Stream()

    @contextmanager
    def _stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def _group_begin(self, stream):
        require(is_capturing() and self.group is None, "a task group begins while a stream captures, in no other group")
        self.group = TaskGroup(stream)

    def _group_end(self, stream):
        require(self.group is not None and self.group.stream is stream, "a task group ends on the stream of its begin")
        group, self.group = self.group, None
        require(group.call is not None, "a task group without a task")
        return group

    def _update_begin(self, stream, handle):
        require(not is_capturing(), "tasks are updated on a stream that does not capture")
        require(stream is not handle.stream, "tasks are updated on another stream than that of the capture")
        require(stream is self.current, "what is given to another stream is no update")
        require(stream.waited_for[-1:] == [handle.stream], "a replay could still be running while its tasks change")
        self.updated = handle

    def _update_end(self, stream):
        require(self.updated is not None and stream is self.current, "an update ends on the stream of its begin")
        self.updated = None

    # Fused infer attention.

    def _fused(self, name, version):
        @operator(name, **dict.fromkeys(_HANDLED))
        def functional(given):
            call = version(given)
            self.calls.append(call)
            out, lse = self._attend(call, *_lens(call))
            return out, lse if call.return_lse else torch.zeros(1)

        @operator(f"{name}.out", **dict.fromkeys((*_HANDLED, "workspace")))
        def write(given):
            call = version(given)
            self.calls.append(call)
            out, lse = given.out
            self._require_in_graphs(call)
            require(given.workspace is not None and id(given.workspace) in map(id, self.workspaces), "no workspace")
            if self.updated is not None:
                self._update(call)
                return out, lse
            lens = _lens(call)
            if self.group is not None:
                require(self.group.call is None, "one task is emulated in a group")
                self.group.call, self.group.lens = call, lens
            values, _ = self._attend(call, *lens)
            require(out.shape == values.shape and out.dtype == values.dtype, "out fits the result")
            out.copy_(values)
            lse.fill_(float("nan"))
            return out, lse

        functional.out = write
        return functional

    def _require_in_graphs(self, call):
        require(self.arch == "ascend910b", "what graphs need is for Atlas A2")
        require(not call.return_lse, "the LSE of .out is reserved")
        is_mla = call.query.shape[-1] == 512
        require(call.layout != "TND" or is_mla, "layout TND is without graphs for heads other than MLA's")

    def _workspace(self, version, given):
        call = version(given)
        self._require_in_graphs(call)
        self._check(call)
        self.workspaces.append(torch.empty(16, dtype=torch.uint8))
        return self.workspaces[-1]

    def _update(self, call):
        """The same tasks with other lengths: all that is in the graph is its tensors and how many they are."""
        self._check(call)
        captured = self.updated.call
        for key, value in vars(call).items():
            if isinstance(value, torch.Tensor):
                there = getattr(captured, key)
                same = value.data_ptr() == there.data_ptr() and value.shape == there.shape
                require(same, f"{key} is in the graph")
            elif key not in ("q_lens", "kv_lens"):
                require(value == getattr(captured, key), f"{key} is in the graph")
        for there, new in zip(self.updated.lens, _lens(call), strict=True):
            there.copy_(new)

    def _attend(self, call, qo_indptr, kv_lens):
        self._check(call)
        q = call.query.flatten(0, 1) if call.layout == "BSND" else call.query
        if call.query_rope is None:
            heads = (call.num_kv_heads, -1)
            k, v = (part.unflatten(2, heads) for part in (call.key, call.value))
        else:
            q = torch.cat([q, call.query_rope], dim=-1)
            v, rope = (part.permute(0, 3, 1, 2, 4).flatten(3) for part in (call.key, call.key_rope))
            k = torch.cat([v, rope], dim=-1)
        out, lse = attend(
            q, k, v, call.block_table, kv_lens, qo_indptr, scale=call.scale,
            causal=call.sparse_mode == 3 or call.is_one, loads=Loads(tile=call.block_size),
        )  # fmt: skip
        out = out.to(q.dtype)
        if call.layout == "BSND":
            shape = call.query.shape[:2]
            return out.view(*shape, *out.shape[1:]), lse.view(*shape, -1).transpose(1, 2).unsqueeze(3).contiguous()
        return out, lse.unsqueeze(2)

    def _check(self, call):
        require(self.arch in SERVERS, "fused infer attention is for Atlas A2 and A3")
        tensors = {key: value for key, value in vars(call).items() if isinstance(value, torch.Tensor)}
        for key, value in tensors.items():
            require(value.is_contiguous(), f"{key} must be contiguous")
        q, k, v, table = call.query, call.key, call.value, call.block_table
        require({q.dtype, k.dtype, v.dtype} <= {*_16_BIT} and q.dtype == k.dtype == v.dtype, "float16 or bfloat16")
        require(k.shape == v.shape, "keys and values must have one shape")
        heads, kv_heads, size = call.num_heads, call.num_kv_heads, call.block_size
        require(heads <= 256 and heads % kv_heads == 0, "heads")
        lengths = _qo_lens(call)
        require(len(call.kv_lens) == len(lengths) and all(length >= 0 for length in call.kv_lens), "actual_seq_kvlen")
        require(table is not None and table.dtype == torch.int32 and table.ndim == 2, "block_table is int32 [B, pages]")
        most = max(-(-length // size) for length in call.kv_lens)
        require(table.shape[0] == len(lengths) and table.shape[1] >= most, "block_table has a row for each of B")
        if not is_capturing():
            used = torch.cat([row[: -(-n // size)] for row, n in zip(table, call.kv_lens, strict=True)])
            require(bool(((used >= 0) & (used < k.shape[0])).all()), "block_table names pages that there are not")
        if call.sparse_mode == 3:
            mask = call.atten_mask
            there = mask is not None and mask.dtype in _MASKS and mask.shape == (2048, 2048)
            require(there, "sparse_mode 3 wants a mask")
            require(_is_causal(mask), "the mask hides what is above the diagonal")
            require(all(q <= k for q, k in zip(lengths, call.kv_lens, strict=True)), "more queries than keys")
        else:
            require(call.sparse_mode == 0 and call.atten_mask is None, "sparse_mode 0 is emulated without a mask")
        (self._check_mla if call.query_rope is not None else self._check_heads)(call, lengths)

    def _check_heads(self, call, lengths):
        q, k, size = call.query, call.key, call.block_size
        dim = q.shape[-1]
        require(call.key_rope is None, "query_rope and key_rope come together")
        require(q.shape[-2] == call.num_heads, "num_heads is not that of query")
        require(call.num_heads // call.num_kv_heads <= 64, "query heads of a KV head")
        require(k.ndim == 3 and k.shape[1:] == (size, call.num_kv_heads * dim), "keys are (pages, page size, H)")
        require(call.num_kv_heads * dim <= 65535, "KV_N * D of pages (pages, page size, H)")
        if call.layout == "BSND":
            require(q.ndim == 4, "query is [B, S, N, D]")
            require(dim % 16 == 0 and dim <= 512, "head dim")
            one = q.shape[1] == 1
            if not one:
                require(call.num_heads * dim < 65535, "N * D of layout BSND")
        else:
            require(call.version == 2, "the first version takes no pages in layout TND")
            taken = q.ndim == 3 and q.dtype == torch.bfloat16 and dim == 128
            require(taken, "layout TND is for heads of 128, bfloat16")
            self._check_tnd(q, lengths)
            one = max(lengths) == 1
        if one:
            require(max(call.kv_lens) <= 262144, "S of one query is at most 262144")
            require(size % 16 == 0 and 0 < size <= 512, "block_size")
            require(k.numel() < 1 << 31, "elements of keys are counted in int32")
        else:
            require(size % 128 == 0 and 128 <= size <= 512, "block_size")

    def _check_mla(self, call, lengths):
        q, rope, k, key_rope = call.query, call.query_rope, call.key, call.key_rope
        require(call.version == 2 and call.layout == "TND", "MLA is emulated in the second version, layout TND")
        require(key_rope is not None, "query_rope and key_rope come together")
        require(q.shape[1:] == (call.num_heads, 512) and rope.shape == (*q.shape[:2], 64), "latents of 512, rope of 64")
        require(rope.dtype == q.dtype and key_rope.dtype == k.dtype, "rope parts have the dtype of latents")
        require(call.num_heads in (1, 2, 4, 8, 16, 32, 64, 128) and call.num_kv_heads == 1, "heads of MLA")
        require(all(1 <= length <= 16 for length in lengths), "1 to 16 queries of each sequence")
        require(call.sparse_mode == (0 if max(lengths) == 1 else 3), "one query: sparse_mode 0; several: 3")
        require(call.block_size == 128, "pages in NZ have 128 tokens")
        require(k.shape[1:] == (1, 32, 128, 16) and key_rope.shape[1:] == (1, 4, 128, 16), "NZ of latents and rope")
        require(k.shape[0] == key_rope.shape[0], "latents and rope parts have as many pages")
        require(k.numel() < 1 << 31, "elements of keys are counted in int32")
        require(max(lengths) > 1 or max(call.kv_lens) <= 262144, "S of one query is at most 262144")
        self._check_tnd(q, lengths)

    def _check_tnd(self, q, lengths):
        require(len(lengths) <= 4096, "layout TND takes up to 4096 sequences")
        require(q.shape[0] <= 1 << 20, "layout TND takes up to 1M tokens")

    # Stores.

    def _reshape_and_cache(self, given):
        key, value, slots = given.key, given.value, given.slot_indices
        parts = ((key, given.key_cache), (value, given.value_cache))
        require(slots.dtype == torch.int32 and slots.shape == (key.shape[0],), "slots are int32, one a token")
        for new, cache in parts:
            require(new.is_contiguous() and cache.is_contiguous(), "not contiguous")
            require(new.dtype == cache.dtype == key.dtype, "keys, values and caches: one dtype")
            require(new.dtype in _16_BIT, "float16 or bfloat16")
        if self.arch in SERVERS:
            for new, cache in parts:
                require(not self._is_formatted(cache), "a cache of format NZ is not emulated here")
                require(cache.ndim == 4 and cache.shape[2:] == new.shape[1:], "[pages, page size, heads, dim]")
                self._in_range(slots, cache.shape[0] * cache.shape[1])
                cache.flatten(0, 1).index_copy_(0, slots.long(), new)
            return
        require(key.shape == value.shape, "keys and values of other sizes are for Atlas A2 and A3")
        require(key.dtype == torch.float16, "the 310P takes float16")
        for new, cache in parts:
            require(self._is_formatted(cache), "the 310P wants caches of format NZ")
            self._store_nz(new, cache, slots)

    def _scatter(self, given):
        require(self.arch in SERVERS, "npu_scatter_pa_kv_cache is for Atlas A2 and A3")
        key, value, slots = given.key, given.value, given.slot_mapping
        require(slots.dtype in (torch.int32, torch.int64) and slots.is_contiguous(), "slots are int32 or int64")
        alike = key.ndim == value.ndim == 3 and key.shape[:2] == value.shape[:2]
        require(alike, "keys and values: tokens and heads alike")
        require(slots.shape == (key.shape[0],), "one slot a token")
        require(key.dtype == value.dtype == given.key_cache.dtype == given.value_cache.dtype, "one dtype")
        for new, cache in ((key, given.key_cache), (value, given.value_cache)):
            require(new.is_contiguous() and cache.is_contiguous(), "not contiguous")
            self._store_nz(new, cache, slots)

    def _store_nz(self, new, cache, slots):
        width = new.shape[1] * new.shape[2]
        require(new.shape[2] * new.element_size() % 32 == 0, "heads are of multiples of 32 bytes")
        require(cache.ndim == 4 and cache.shape[3] == 16, "NZ is [pages, heads * dim / 16, page size, 16]")
        require(cache.shape[1] * 16 == width, "heads * dim of the cache")
        if self.arch not in SERVERS:
            require(cache.shape[2] % 16 == 0, "page size of a multiple of 16")
        self._in_range(slots, cache.shape[0] * cache.shape[2])
        slots, size = slots.long(), cache.shape[2]
        by_token = cache.permute(0, 2, 1, 3)
        by_token[slots // size, slots % size] = new.flatten(1).unflatten(1, (-1, 16))

    def _in_range(self, slots, count):
        """Repeated slots, as those of the null page alone are, are not guaranteed: they get any of their tokens."""
        if not is_capturing() and slots.numel():
            require(0 <= int(slots.min()) <= int(slots.max()) < count, "slots lie in the cache")

    def _format_cast(self, given):
        require(given.acl_format == FRACTAL_NZ, "only NZ is emulated")
        require(given.self.shape[-1] % 16 == 0 and given.self.is_contiguous(), "NZ is made of pieces of 16")
        made = given.self.clone()
        self.formatted.append(made)
        return made

    def _is_formatted(self, tensor):
        return any(each.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for each in self.formatted)

    # Paged attention of the 310P.

    def _paged_attention(self, given):
        q, k, v, table, lens, out = (
            given.query, given.key_cache, given.value_cache, given.block_table, given.context_lens, given.out
        )  # fmt: skip
        require(self.arch == "ascend310p", "emulated for the 310P")
        require(self._is_formatted(k) and self._is_formatted(v), "the 310P wants caches of format NZ")
        require({q.dtype, k.dtype, v.dtype, out.dtype} == {torch.float16}, "the 310P takes float16")
        require(all(x.is_contiguous() for x in (q, k, v, table, lens, out)), "not contiguous")
        num_tokens, heads, dim = q.shape
        size, kv_heads = k.shape[2], given.num_kv_heads
        require(heads == given.num_heads and heads % kv_heads == 0, "heads")
        require(dim % 16 == 0 and 0 < dim <= 256, "head dim")
        require(size % 16 == 0 and size <= 128 and size * dim <= 128 * 128, "block_size")
        require(k.shape == v.shape == (k.shape[0], kv_heads * dim // 16, size, 16), "NZ pages of keys and values")
        require(out.shape == q.shape, "out has the shape of query")
        require(0 < num_tokens <= 2000, "up to 2000 sequences")
        require(table.dtype == lens.dtype == torch.int32, "int32")
        require(table.shape[0] == num_tokens and lens.shape == (num_tokens,), "a row and a length for each query")
        pages = [part.unflatten(1, (kv_heads, dim // 16)).permute(0, 3, 1, 2, 4).flatten(3) for part in (k, v)]
        indptr = torch.arange(num_tokens + 1, dtype=torch.int32)
        got, _ = attend(q, *pages, table, lens, indptr, scale=given.scale_value, loads=Loads(tile=size))
        out.copy_(got)


_HANDLED = (
    "atten_mask", "block_table", "query_rope", "key_rope", "num_key_value_heads", "input_layout", "sparse_mode",
    "block_size", "actual_seq_lengths", "actual_seq_lengths_kv", "num_heads", "scale", "softmax_lse_flag",
    "actual_seq_qlen", "actual_seq_kvlen", "num_query_heads", "softmax_scale", "return_softmax_lse",
)  # fmt: skip


def _V1(given):
    return _call(
        given, 1, given.actual_seq_lengths, given.actual_seq_lengths_kv, given.num_heads, given.scale,
        given.softmax_lse_flag,
    )  # fmt: skip


def _V2(given):
    return _call(
        given, 2, given.actual_seq_qlen, given.actual_seq_kvlen, given.num_query_heads, given.softmax_scale,
        given.return_softmax_lse,
    )  # fmt: skip


def _call(given, version, q_lens, kv_lens, num_heads, scale, return_lse):
    require(q_lens is not None and kv_lens is not None, "lengths must be given")
    require(given.input_layout in ("BSND", "TND"), "layouts BSND and TND are emulated")
    call = SimpleNamespace(
        version=version, query=given.query, key=given.key, value=given.value, query_rope=given.query_rope,
        key_rope=given.key_rope, atten_mask=given.atten_mask, block_table=given.block_table, layout=given.input_layout,
        q_lens=list(q_lens), kv_lens=list(kv_lens), num_heads=num_heads, scale=scale, return_lse=return_lse,
        num_kv_heads=given.num_key_value_heads or num_heads, sparse_mode=given.sparse_mode, block_size=given.block_size,
    )  # fmt: skip
    call.is_one = max(_qo_lens(call), default=0) == 1
    return call


def _qo_lens(call):
    if call.layout == "BSND":
        num_seqs, each = call.query.shape[:2]
        require(call.q_lens == [each] * num_seqs, "actual_seq_lengths are those of the query")
        return call.q_lens
    ends = call.q_lens
    require(ends and ends == sorted(ends) and ends[0] >= 0, "actual_seq_qlen of layout TND are where sequences end")
    require(ends[-1] == call.query.shape[0], "actual_seq_qlen ends with the last token")
    return [stop - start for start, stop in zip([0, *ends], ends, strict=False)]


def _lens(call):
    """qo_indptr and kv_lens as int32. No part of a graph, which reads them, and which an update writes them for."""
    with _disable_current_modes():
        indptr = [0, *accumulate(_qo_lens(call))]
        return [torch.tensor(lens, dtype=torch.int32) for lens in (indptr, call.kv_lens)]


@functools.cache
def _causal():
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def _is_causal(mask):
    return is_capturing() or torch.equal(mask.bool(), _causal())
