"""Pages that do not lie one behind the other: read where they are, in every layout, and the pool is never copied."""

import dataclasses
import secrets

import pytest
import torch

from anyattn import AttentionSpec, ContractError, discovery
from anyattn.attention import flex_attention
from anyattn.attention.flex_attention import FlexAttentionBackend
from anyattn.attention.reference import ReferenceBackend, reference_attention
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.mem_cache.base import LayerKV
from anyattn.mem_cache.layouts import page_shape
from anyattn.testing.numerics.cases import Case
from anyattn.testing.numerics.driver import build_runtime

CPU = discovery.usable_device("cpu")
SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=48, v_head_dim=32, dtype="float32")
PAGE_SIZE = 16
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


class Flex(FlexAttentionBackend):
    """Without the compiler, on the CPU too, and for head dims that it cannot take on GPUs."""

    capabilities = dataclasses.replace(
        FlexAttentionBackend.capabilities, device_kinds=None, archs=None, packages=(), any_head_dim_pair=True
    )


@pytest.fixture(autouse=True)
def uncompiled():
    flex_attention._kernel.cache_clear()
    with torch.compiler.set_stance("force_eager"):
        yield
    flex_attention._kernel.cache_clear()


def planned(backend, layout):
    """Ten new tokens after thirty: queries, and the backend with its plan; pages have random ids up to 6."""
    case = Case(name="", spec=SPEC, page_size=PAGE_SIZE, layout=layout, steps=((30,), (10,)))
    rt = build_runtime(backend, case, CPU, secrets.randbelow(1 << 31))
    seqs = rt.new_sequences(1)
    rt.extend(seqs, [30])
    batch = rt.extend(seqs, [10])
    (step,) = rt.plan(batch).steps
    return torch.randn(10, SPEC.num_qo_heads, SPEC.head_dim), batch.kv_indices, step


def run(step, q, kv):
    out = torch.empty(10, SPEC.num_qo_heads, SPEC.vo_head_dim)
    step.run(q, kv, out)
    return out.double()


def wanted(q, kv, pages):
    k, v = (part.flatten(0, 1)[:40] for part in kv.gather(pages))
    return reference_attention(SPEC, q, k, v)[0]


def shapes(layout):
    for part, dim in (("k", SPEC.head_dim), ("v", SPEC.vo_head_dim)):
        yield part, page_shape(layout, part, page_size=PAGE_SIZE, num_kv_heads=2, dim=dim, itemsize=4)


CASES = [
    pytest.param(backend, layout, id=f"{backend.__name__} {layout}")
    for backend in (ReferenceBackend, TorchNativeBackend, Flex)
    for layout in backend.capabilities.layouts
]


@pytest.mark.parametrize(("backend", "layout"), CASES)
def test_of_a_pool_larger_than_any_memory_only_the_pages_wanted_are_read(backend, layout):
    q, _, step = planned(backend, layout)
    one = LayerKV(layout=layout, **{part: torch.randn(1, *shape) for part, shape in shapes(layout)})
    k, v = (pages.expand(1 << 40, *pages.shape[1:]) for pages in (one.k, one.v))
    endless = dataclasses.replace(one, k=k, v=v)
    assert torch.allclose(run(step, q, endless), wanted(q, one, torch.zeros(3, dtype=torch.int64)), atol=1e-5)


@pytest.mark.parametrize(("backend", "layout"), CASES)
@pytest.mark.parametrize("gap", [0, 1, 7, 16, 48])
def test_pages_may_lie_any_number_of_elements_apart(backend, layout, gap):
    q, pages, step = planned(backend, layout)
    packed = LayerKV(layout=layout, **{part: torch.randn(7, *shape) for part, shape in shapes(layout)})
    assert torch.allclose(run(step, q, apart(packed, gap)), wanted(q, packed, pages), atol=1e-5)


def apart(kv, gap):
    """The same pages with NaN between them."""

    def spread(pages):
        storage = torch.full((pages.shape[0], pages[0].numel() + gap), float("nan"))
        storage[:, : pages[0].numel()] = pages.flatten(1)
        return storage.as_strided(pages.shape, (storage.shape[1], *pages.stride()[1:]))

    return dataclasses.replace(kv, k=spread(kv.k), v=spread(kv.v))


def test_flex_attention_refuses_pages_that_are_not_packed():
    q, _, step = planned(Flex, "NHD")
    kv = LayerKV(layout="NHD", **{part: torch.randn(7, *shape) for part, shape in shapes("NHD")})
    with pytest.raises(ContractError, match="not packed"):
        run(step, q, dataclasses.replace(kv, k=kv.k.transpose(1, 2).contiguous().transpose(1, 2)))
