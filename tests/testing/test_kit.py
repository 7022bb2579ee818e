"""The kit's checks of numerics, memory and determinism pass the built-in backends, and no mutant of a good one."""

import dataclasses
import math
import secrets

import pytest
import torch

from anyattn import discovery
from anyattn.attention import flex_attention
from anyattn.attention.flex_attention import FlexAttentionBackend
from anyattn.attention.reference import ReferenceBackend, reference_attention
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.testing.check import CannotRunError, CheckFailedError
from anyattn.testing.numerics import checks as numerics
from anyattn.testing.numerics import determinism, scenarios
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case, run_case
from anyattn.types import FP8_DTYPES, KV_LAYOUTS, ints

CPU = discovery.usable_device("cpu")


def checks_of(backend):
    return [*numerics.checks(backend, CPU), *determinism.checks(backend, CPU)]


def named(backend, check_id):
    (check,) = (check for check in checks_of(backend) if check.id == check_id)
    return check


def run(check, seed):
    try:
        check.run(seed)
    except CannotRunError as reason:
        pytest.skip(str(reason))
    except CheckFailedError as failure:
        pytest.fail(f"seed {seed}: {failure}")


SIZES = {"page_sizes", "group_sizes", "head_dims", "kv_dtypes"}


def is_asked(backend, number, check):
    """Whether a check is worth its time. test_matrix.py proves by itself that the cells of a matrix cover all pairs.

    Features are the same code for all MLA dims: one set of these has them all. The reference takes sizes, the matrix,
    MLA and batches with the code that plain heads are checked with, one sequence after the other: of these a sample is
    enough.
    """
    matrix, large = "matrix: " in check.name, check.name.startswith("MLA 512+64")
    if backend is ReferenceBackend:  # in float64 the large ones take long
        sampled = matrix or check.name.startswith("MLA") or check.tier == "determinism" or check.capability in SIZES
        return not large and (not sampled or number % 4 == 0 or check.capability == "mla_dims")
    return not large or matrix or number % 4 == 0


ALL = [
    pytest.param(check, id=f"{backend.__name__} {check.id}")
    for backend in (ReferenceBackend, TorchNativeBackend)
    for number, check in enumerate(checks_of(backend))
    if is_asked(backend, number, check)
]


@pytest.mark.parametrize("check", ALL)
def test_a_built_in_backend_passes(check):
    run(check, secrets.randbelow(1 << 31))


class Flex(FlexAttentionBackend):
    """Without the compiler, on the CPU too. All its cases are run in tests/attention/test_flex_attention.py."""

    capabilities = dataclasses.replace(
        FlexAttentionBackend.capabilities,
        device_kinds=None,
        archs=None,
        packages=(),
        mla_dims=frozenset(),
        any_mla_dims=True,  # the kit then takes small ones
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("check", [pytest.param(check, id=check.id) for check in scenarios.checks(Flex, CPU)])
def test_flex_attention_passes(check):
    if "NaN in one sequence" in check.name:
        pytest.skip("only what is compiled leaves out what a mask hides; test_flex_attention.py has that")
    flex_attention._kernel.cache_clear()
    with torch.compiler.set_stance("force_eager"):
        run(check, secrets.randbelow(1 << 31))
    flex_attention._kernel.cache_clear()


class Mutant(TorchNativeBackend):
    """Wrong in one way, by what it does to the spec, the plan's input, the KV or the result."""

    def __init__(self, spec, cache, platform):
        super().__init__(spec.replace(**self.changed(spec)), cache, platform)

    def changed(self, spec):
        return {}


class WindowOneTooLong(Mutant):
    def changed(self, spec):
        return {"sliding_window": spec.sliding_window + 1}


class WindowOneTooShort(Mutant):
    def changed(self, spec):
        return {"sliding_window": max(spec.sliding_window - 1, 1)}


class WindowIgnored(Mutant):
    def changed(self, spec):
        return {"sliding_window": None}


class WindowRoundedToPages(Mutant):
    """Right where it ends within a page."""

    def changed(self, spec):
        return {"sliding_window": spec.sliding_window - (spec.sliding_window == 16)}


class SoftCapIgnored(Mutant):
    def changed(self, spec):
        return {"logits_soft_cap": None}


class ScaleIgnored(Mutant):
    def changed(self, spec):
        return {"sm_scale": 1.0}


class ScaleOfTheHeadDim(Mutant):
    def changed(self, spec):
        return {"sm_scale": None}


class TreeIgnored(Mutant):
    def plan(self, batch):
        return super().plan(dataclasses.replace(batch, tree_masks=None))


def replaced(batch, mask):
    """The batch with other tree masks."""
    masks = None if batch.tree_masks is None else tuple(None if m is None else mask(m) for m in batch.tree_masks)
    return dataclasses.replace(batch, tree_masks=masks)


class AncestorsOfAncestorsSeen(Mutant):
    def plan(self, batch):
        return super().plan(replaced(batch, lambda mask: torch.matrix_power(mask.double(), 2) > 0))


class PagesInOrder(Mutant):
    def plan(self, batch):
        return super().plan(dataclasses.replace(batch, kv_indices=batch.kv_indices.sort().values))


class PageTableReadAsInt64(Mutant):
    """Every other page, and null pages behind what lies there."""

    def plan(self, batch):
        table = torch.cat([batch.kv_indices, batch.kv_indices.new_zeros(batch.kv_indices.numel() % 2)])
        read = (table.view(torch.int64) & 0xFFFFFFFF).int()
        pages = torch.cat([read, torch.zeros_like(read)])[: batch.kv_indices.numel()]
        return super().plan(dataclasses.replace(batch, kv_indices=pages))


class PlanKeptInTheBackend(Mutant):
    def plan(self, batch):
        self.kept = super().plan(batch)

    def run(self, q, kv, plan, out, **per_head):
        return super().run(q, kv, self.kept, out, **per_head)


class KVKeptInThePlan(Mutant):
    def plan(self, batch):
        return {"plan": super().plan(batch)}

    def run(self, q, kv, plan, out, **per_head):
        return super().run(q, plan.setdefault("kv", kv), plan["plan"], out, **per_head)


class OnRun(Mutant):
    def run(self, q, kv, plan, out, *, sinks=None, alibi_slopes=None):
        q, kv, sinks, alibi_slopes = self.before(q, kv, sinks, alibi_slopes)
        lse = super().run(q, kv, plan, out, sinks=sinks, alibi_slopes=alibi_slopes)
        return self.after(out, lse)

    def before(self, q, kv, sinks, slopes):
        return q, kv, sinks, slopes

    def after(self, out, lse):
        return lse


class LSEInBase2(OnRun):
    def after(self, out, lse):
        return lse / math.log(2)


class LSETransposed(OnRun):
    def after(self, out, lse):
        return lse.T


class LSEWithHeadsBeforeTokens(OnRun):
    def after(self, out, lse):
        return lse.T.reshape(lse.shape)


class LSEOfOtherHeads(OnRun):
    def after(self, out, lse):
        return lse.flip(1)


class LSEInFloat64(OnRun):
    def after(self, out, lse):
        return lse.double()


class KScaleIgnored(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, dataclasses.replace(kv, k_scale=1.0), sinks, slopes


class VScaleIgnored(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, dataclasses.replace(kv, v_scale=1.0), sinks, slopes


class ScalesSwapped(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, dataclasses.replace(kv, k_scale=kv.v_scale, v_scale=kv.k_scale), sinks, slopes


class ScalesOfOtherHeads(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, dataclasses.replace(kv, k_scale=kv.k_scale.flip(0), v_scale=kv.v_scale.flip(0)), sinks, slopes


class OneScaleForAllHeads(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, dataclasses.replace(kv, k_scale=kv.k_scale[:1], v_scale=kv.v_scale[:1]), sinks, slopes


class SinkIgnored(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, kv, None, slopes


class FirstScalesKept(OnRun):
    """Those of whichever layer runs first."""

    kept = None

    def before(self, q, kv, sinks, slopes):
        self.kept = self.kept or (kv.k_scale, kv.v_scale)
        return q, dataclasses.replace(kv, k_scale=self.kept[0], v_scale=self.kept[1]), sinks, slopes


class FirstSinksKept(OnRun):
    kept = None

    def before(self, q, kv, sinks, slopes):
        self.kept = sinks if self.kept is None else self.kept
        return q, kv, self.kept, slopes


class MultiQueryTakenForTwoKVHeads(OnRun):
    def after(self, out, lse):
        if self.spec.num_kv_heads == 1:
            out *= 1.1
        return lse


class Float16WithFP8(OnRun):
    """Right with an fp8 cache for one dtype of q only."""

    def after(self, out, lse):
        if self.spec.dtype == "float16" and self.spec.storage_dtype in FP8_DTYPES:
            out *= 1.1
        return lse


class LSEOfTheBatch(OnRun):
    """A row's output does not depend on the batch; the last bits of its LSE do."""

    def after(self, out, lse):
        return lse if lse is None else lse * (1 + 2**-22 * (lse.shape[0] % 3))


class OtherBitsEachTime(OnRun):
    """As sums of atomic additions are."""

    def after(self, out, lse):
        out *= 1 + 2**-7 * torch.randint(2, out.shape)
        return lse


class PositionsChanged(Mutant):
    def run(self, q, kv, plan, out, **per_head):
        self.positions += 1
        return super().run(q, kv, plan, out, **per_head)

    def plan(self, batch):
        self.positions = batch.positions
        return super().plan(batch)


class TreeIgnoredWithFP8(Mutant):
    def plan(self, batch):
        masked = self.spec.storage_dtype not in FP8_DTYPES
        return super().plan(batch if masked else dataclasses.replace(batch, tree_masks=None))


class RopeIgnored(OnRun):
    """Declares MLA, and multiplies the latents only."""

    def before(self, q, kv, sinks, slopes):
        if self.spec.is_mla:
            q = q.clone()
            q[..., self.spec.kv_lora_rank :] = 0
        return q, kv, sinks, slopes


class SinkOfAtMost20(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, kv, sinks.clamp(max=20), slopes


class SinkCountedInTheLSE(OnRun):
    def before(self, q, kv, sinks, slopes):
        self.sinks = sinks
        return q, kv, sinks, slopes

    def after(self, out, lse):
        return torch.logaddexp(lse, self.sinks)


class ALiBiWithTheWrongSign(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, kv, sinks, -slopes


class ALiBiIgnored(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, kv, sinks, torch.zeros_like(slopes)


class HeadsInterleaved(OnRun):
    """Query head h reads KV head h % num_kv_heads."""

    def before(self, q, kv, sinks, slopes):
        self.order = torch.arange(q.shape[1]).view(self.spec.group_size, -1).T.flatten()
        return q[:, self.order], kv, sinks, slopes

    def after(self, out, lse):
        out[:, self.order] = out.clone()
        return lse


class QTakenToBePacked(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q.as_strided(q.shape, torch.empty(q.shape, device="meta").stride()), kv, sinks, slopes


class QTakenToLieAtMultiplesOf8(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q.as_strided(q.shape, [stride // 8 * 8 for stride in q.stride()[:2]] + [1]), kv, sinks, slopes


class QScaledInPlace(OnRun):
    def before(self, q, kv, sinks, slopes):
        q *= self.spec.scale
        return q / self.spec.scale, kv, sinks, slopes


class QRounded(OnRun):
    """To fp8, with one scale for all of q, as kernels do whose products are of fp8."""

    def before(self, q, kv, sinks, slopes):
        if self.spec.storage_dtype not in FP8_DTYPES or not q.numel():
            return q, kv, sinks, slopes
        dtype = getattr(torch, self.spec.storage_dtype)
        scale = q.abs().max().float() / torch.finfo(dtype).max
        return ((q.float() / scale).to(dtype).float() * scale).to(q.dtype), kv, sinks, slopes


class OutputOfTheLastTokenZero(OnRun):
    def after(self, out, lse):
        out[-1:] = 0
        return lse


class OutputOfTheLastTokenNotWritten(OnRun):
    def run(self, q, kv, plan, out, **per_head):
        last = out[-1:].clone()
        lse = super().run(q, kv, plan, out, **per_head)
        out[-1:] = last
        return lse


class BatchMatesMatter(OnRun):
    def run(self, q, kv, plan, out, **per_head):
        super().run(q, kv, plan, out, **per_head)
        out *= 1 + 2**-8 * (len(plan) % 2)  # one step of bfloat16, so that nothing but determinism fails


class NoMoreThan32Sequences(Mutant):
    def run(self, q, kv, plan, out, **per_head):
        out.zero_()
        return super().run(q, kv, plan[:32], out, **per_head)


class ValuesAreTheLatentsEnd(OnRun):
    def before(self, q, kv, sinks, slopes):
        rank = self.spec.vo_head_dim
        return q, dataclasses.replace(kv, k=torch.cat([kv.k[..., -rank:], kv.k[..., rank:]], dim=-1)), sinks, slopes


class HeadDimsInPiecesOf64(OnRun):
    """What is left over is left out."""

    def before(self, q, kv, sinks, slopes):
        q = q.clone()
        q[..., q.shape[-1] // 64 * 64 :] = 0
        return q, kv, sinks, slopes


class PageSizesArePowersOf2(OnRun):
    def before(self, q, kv, sinks, slopes):
        size = self.cache.page_size
        last = 1 << (size.bit_length() - 1)
        token = torch.arange(size) % last
        return q, dataclasses.replace(kv, k=kv.k[:, token], v=kv.v[:, token]), sinks, slopes


def packed(shape):
    return torch.empty(shape, device="meta").stride()


class PagesTakenToLieOneBehindTheOther(OnRun):
    def before(self, q, kv, sinks, slopes):
        k, v = (pages.as_strided(pages.shape, packed(pages.shape)) for pages in (kv.k, kv.v))
        return q, dataclasses.replace(kv, k=k, v=v), sinks, slopes


class OffsetsOf32Bits(Mutant):
    """What would lie before the pool is its null page."""

    def run(self, q, kv, plan, out, **per_head):
        apart = kv.k.stride(0)
        sequences = [
            dataclasses.replace(each, pages=torch.where(each.pages.long() * apart < 2**31, each.pages, 0))
            for each in plan
        ]
        return super().run(q, kv, sequences, out, **per_head)


class KVCacheWrittenTo(OnRun):
    def before(self, q, kv, sinks, slopes):
        kv.k[0] = 0  # what must be no number is none, and that is no reason to write there
        return q, kv, sinks, slopes


class WritesBehindOut(OnRun):
    def after(self, out, lse):
        behind = out.as_strided(out[:1].shape, out.stride(), out.storage_offset() + out.numel())
        behind.zero_()
        return lse


class Loop(ReferenceBackend):
    """The reference, to be changed where one sequence is attended."""

    capabilities = dataclasses.replace(ReferenceBackend.capabilities, layouts=KV_LAYOUTS, topk=None)

    def run(self, q, kv, plan, out, *, sinks=None, alibi_slopes=None):
        lses = torch.empty(q.shape[:2])
        for i in range(plan.num_seqs):
            rows = slice(int(plan.host.qo_indptr[i]), int(plan.host.qo_indptr[i + 1]))
            pages = plan.kv_indices[int(plan.host.kv_indptr[i]) : int(plan.host.kv_indptr[i + 1])]
            k, v = (part.flatten(0, 1)[: int(plan.host.kv_lens[i])].double() for part in kv.gather(pages))
            mask = None if plan.tree_masks is None else plan.tree_masks[i]
            options = {"tree_mask": mask, "sinks": sinks, "alibi_slopes": alibi_slopes}
            out[rows], lses[rows] = self.attend(q[rows].double(), k, v, **options)
        return lses if self.spec.return_lse else None

    def attend(self, q, k, v, **options):
        return reference_attention(self.spec, q, k, v, **options)


class CausalMaskAlignedTopLeft(Loop):
    def attend(self, q, k, v, **options):
        rows = [reference_attention(self.spec, q[i : i + 1], k[: i + 1], v[: i + 1]) for i in range(len(q))]
        return tuple(torch.cat(part) for part in zip(*rows, strict=True)) if rows else (q, q[..., 0])


class LastPartialPageDropped(Loop):
    def attend(self, q, k, v, **options):
        length = max(len(k) // self.cache.page_size * self.cache.page_size, len(q))
        return super().attend(q, k[:length], v[:length], **options)


class QueryLengthsArePowersOf2(Loop):
    """The tokens behind the largest power of two are not attended."""

    def attend(self, q, k, v, **options):
        out, lse = super().attend(q, k, v, **options)
        out[1 << (len(q).bit_length() - 1) if len(q) else 0 :] = 0
        return out, lse


class SoftmaxOfNothingIsNaN(Loop):
    def attend(self, q, k, v, **options):
        out, lse = super().attend(q, k, v, **options)
        return out.masked_fill(lse.isneginf()[..., None], float("nan")), lse


class SoftmaxWithoutItsMaximum(Loop):
    def attend(self, q, k, v, **options):
        out, lse = super().attend(q, k, v, **options)
        total = lse.float().exp()[..., None]  # overflows
        return out * total / total, lse


class KeysAreSplitAndNotWeighted(Loop):
    """Right up to 512 keys; the parts of more are averaged as if each had the same weight."""

    def attend(self, q, k, v, **options):
        if len(k) <= 512 or len(q) > 1:
            return super().attend(q, k, v, **options)
        parts = [super(KeysAreSplitAndNotWeighted, self).attend(q, *kv) for kv in zip(k.split(512), v.split(512))]  # noqa: B905
        return sum(out for out, _ in parts) / len(parts), parts[0][1]


class PagesOfOthersMultipliedByZero(ReferenceBackend):
    def run(self, q, kv, plan, out, **per_head):
        super().run(q, kv, plan, out, **per_head)
        others = plan.out_slots // plan.page_size
        out += 0.0 * kv.gather(others)[1].flatten(1)[:, 0].sum()


class OneLayoutTakenForAnother(ReferenceBackend):
    def run(self, q, kv, plan, out, **per_head):
        return super().run(q, dataclasses.replace(kv, layout="5D"), plan, out, **per_head)


class NullPageMultipliedByZero(ReferenceBackend):
    """Right with every window, but that it multiplies the values behind one by zero, where NaN stays NaN."""

    def run(self, q, kv, plan, out, **per_head):
        super().run(q, kv, plan, out, **per_head)
        for i in range(plan.num_seqs):
            rows = slice(int(plan.host.qo_indptr[i]), int(plan.host.qo_indptr[i + 1]))
            pages = plan.kv_indices[int(plan.host.kv_indptr[i]) : int(plan.host.kv_indptr[i + 1])]
            behind = (int(plan.host.kv_lens[i]) - int(plan.host.qo_lens[i])) // plan.page_size
            out[rows] += 0.0 * kv.gather(pages[:behind])[1].sum()


class RestOfTheLastPageMultipliedByZero(ReferenceBackend):
    def run(self, q, kv, plan, out, **per_head):
        super().run(q, kv, plan, out, **per_head)
        for i in range(plan.num_seqs):
            rows = slice(int(plan.host.qo_indptr[i]), int(plan.host.qo_indptr[i + 1]))
            pages = plan.kv_indices[int(plan.host.kv_indptr[i]) : int(plan.host.kv_indptr[i + 1])]
            out[rows] += 0.0 * kv.gather(pages)[1].flatten(0, 1)[int(plan.host.kv_lens[i]) :].sum()


WINDOW = "numerics/sliding_window=33, in pages that are all kept"
END = "numerics/nothing behind a sequence's end is read"
MUTANTS = [
    (FirstScalesKept, "numerics/one plan for two layers, KV float8_e4m3fn, tensor scales", "layer 1"),
    (FirstScalesKept, "numerics/one plan for two layers, KV float8_e5m2, float scales", "layer 1"),
    (FirstSinksKept, "numerics/one plan for two layers, sinks=True", "layer 1"),
    (MultiQueryTakenForTwoKVHeads, "numerics/4 query heads, KV heads: 1", "output is off"),
    (Float16WithFP8, "numerics/float16, KV float8_e4m3fn", "output is off"),
    (LSEOfTheBatch, "determinism/deterministic=True, return_lse=True", "LSE of sequence"),
    (OtherBitsEachTime, "determinism/deterministic=True", "when the same is run again"),
    (PositionsChanged, "memory/run leaves its inputs as they are", "run changed batch.positions"),
    (TreeIgnoredWithFP8, "numerics/tree_mask=True, KV float8_e4m3fn", "ignoring the tree mask"),
    (RopeIgnored, "numerics/MLA 512+64 plain", "output is off"),
    (WindowOneTooLong, WINDOW, "a window one token longer"),
    (WindowOneTooLong, "numerics/sliding_window=33", "a window one token longer"),
    (WindowOneTooShort, WINDOW, "a window one token shorter"),
    (WindowIgnored, WINDOW, "no window at all"),
    (WindowRoundedToPages, "numerics/sliding_window=16", "a window one token shorter"),
    (SoftCapIgnored, "numerics/logits_soft_cap=3.0", "ignoring the soft cap"),
    (ScaleIgnored, "numerics/sm_scale=0.3125", "ignoring sm_scale"),
    (ScaleOfTheHeadDim, "numerics/sm_scale=0.3125", "1/sqrt(head_dim) in the place of sm_scale"),
    (TreeIgnored, "numerics/tree_mask=True", "ignoring the tree mask"),
    (AncestorsOfAncestorsSeen, "numerics/tree_mask=True, masks that are no trees", "output is off"),
    (LastPartialPageDropped, END, "behind its last full page"),
    (RestOfTheLastPageMultipliedByZero, END, "what lies beyond a sequence's length was read"),
    (PagesInOrder, "numerics/pages in random order", "output is"),
    (PageTableReadAsInt64, "numerics/pages in random order", "output is NaN"),
    (PlanKeptInTheBackend, "numerics/two plans alive at once", "a plan stays valid"),
    (KVKeptInThePlan, "numerics/one plan for two layers", "layer 1"),
    (LSEInBase2, "numerics/return_lse=True", "an LSE in base 2"),
    (LSETransposed, "numerics/return_lse=True", "gave no LSE of"),
    (LSEWithHeadsBeforeTokens, "numerics/return_lse=True", "heads before tokens"),
    (LSEOfOtherHeads, "numerics/return_lse=True", "LSE is off"),
    (LSEInFloat64, "numerics/return_lse=True", "LSE is of torch.float64, and the contract says torch.float32"),
    (KScaleIgnored, "numerics/KV float8_e4m3fn, float scales", "ignoring k_scale"),
    (VScaleIgnored, "numerics/KV float8_e4m3fn, tensor scales", "ignoring v_scale"),
    (ScalesSwapped, "numerics/KV float8_e4m3fn, tensor scales", "v_scale for k_scale"),
    (ScalesOfOtherHeads, "numerics/KV float8_e4m3fn, a scale for each head", "output is off"),
    (OneScaleForAllHeads, "numerics/KV float8_e5m2, a scale for each head", "the first head's scales"),
    (QRounded, "numerics/KV float8_e4m3fn, float scales", "output is off"),
    (SinkIgnored, "numerics/sinks=True", "ignoring the sinks"),
    (SinkOfAtMost20, "numerics/sinks=True, return_lse=True, from -1e4 to 30", "output is off"),
    (SinkCountedInTheLSE, "numerics/sinks=True, return_lse=True", "counting the sink in the LSE"),
    (ALiBiWithTheWrongSign, "numerics/alibi=True", "ALiBi with the other sign"),
    (ALiBiIgnored, "numerics/alibi=True", "ignoring ALiBi"),
    (HeadsInterleaved, "numerics/8 query heads a KV head", "interleaving the heads"),
    (QTakenToBePacked, "numerics/plain", "what lies between the rows or heads of a strided q was read"),
    (QTakenToLieAtMultiplesOf8, "numerics/q at odd strides", "strided q was read"),
    (QScaledInPlace, "memory/run leaves its inputs as they are", "run changed q"),
    (OutputOfTheLastTokenZero, "numerics/decode", "output is off"),
    (OutputOfTheLastTokenNotWritten, "numerics/decode", "it was not written there"),
    (BatchMatesMatter, "determinism/deterministic=True", "deterministic is declared"),
    (NoMoreThan32Sequences, "numerics/33 sequences", "sequence 32 of 33"),
    (ValuesAreTheLatentsEnd, "numerics/MLA 64+16 plain", "output is"),
    (HeadDimsInPiecesOf64, "numerics/head dim 80, 80", "output is off"),
    (PageSizesArePowersOf2, "numerics/page size 3, NHD", "output is"),
    (PagesTakenToLieOneBehindTheOther, "numerics/joined layers, NHD", "output is"),
    (OffsetsOf32Bits, "numerics/64-bit offsets", "pages behind 2**31 elements"),
    (KVCacheWrittenTo, "memory/run leaves the KV cache as it is", "run wrote to page 0"),
    (WritesBehindOut, "memory/run writes nothing beside out", "run wrote behind out"),
    (CausalMaskAlignedTopLeft, "numerics/chunked prefill", "aligned top-left"),
    (QueryLengthsArePowersOf2, "numerics/2 to 13 new tokens", "output is off"),
    (QueryLengthsArePowersOf2, "numerics/tree_mask=True, 3, 5, 6 and 7 tokens", "output is off"),
    (SoftmaxOfNothingIsNaN, "numerics/tree_mask=True, rows that see nothing", "all that it could read were finite"),
    (SoftmaxWithoutItsMaximum, "numerics/scores beyond 100", "output is NaN"),
    (KeysAreSplitAndNotWeighted, "numerics/3000 tokens", "output is off"),
    (PagesOfOthersMultipliedByZero, "numerics/NaN in one sequence reaches no other", "another sequence"),
    (OneLayoutTakenForAnother, "numerics/page size 64, NZ", "output is"),
    (NullPageMultipliedByZero, "numerics/sliding_window=33", "the null page was read"),
]
"""Each with a check whose name says what is wrong, and what its message says."""


@pytest.mark.parametrize(
    ("mutant", "check_id", "message"), MUTANTS, ids=[f"{mutant.__name__} {check_id}" for mutant, check_id, _ in MUTANTS]
)
def test_a_mutant_is_caught(mutant, check_id, message):
    try:
        named(mutant, check_id).run(secrets.randbelow(1 << 31))
    except CannotRunError as reason:
        pytest.skip(str(reason))
    except Exception as failure:
        assert message in str(failure)  # noqa: PT017
    else:
        pytest.fail(f"{mutant.__name__} passed {check_id}")


PASSED = [
    (NullPageMultipliedByZero, WINDOW),
    (AncestorsOfAncestorsSeen, "numerics/tree_mask=True"),
    (PlanKeptInTheBackend, "numerics/plain"),
    (KVKeptInThePlan, "numerics/plain"),
    (WindowRoundedToPages, "numerics/sliding_window=33"),
    (NoMoreThan32Sequences, "numerics/plain"),
    (HeadDimsInPiecesOf64, "numerics/head dim 64, 64"),
    (PageSizesArePowersOf2, "numerics/page size 16, NHD"),
    (QTakenToLieAtMultiplesOf8, "numerics/plain"),
    (SinkOfAtMost20, "numerics/sinks=True"),
    (SoftmaxWithoutItsMaximum, "numerics/plain"),
    (KeysAreSplitAndNotWeighted, "numerics/plain"),
    (PagesOfOthersMultipliedByZero, "numerics/plain"),
    (OffsetsOf32Bits, "numerics/plain"),
    (KVCacheWrittenTo, "numerics/plain"),
    (WritesBehindOut, "numerics/plain"),
    (SoftmaxOfNothingIsNaN, "numerics/tree_mask=True"),
]
"""Mutants that other checks let pass: without the one that catches them, nothing would."""


@pytest.mark.parametrize(
    ("mutant", "check_id"), PASSED, ids=[f"{mutant.__name__} {check_id}" for mutant, check_id in PASSED]
)
def test_only_the_check_that_is_made_for_it_catches_a_mutant(mutant, check_id):
    named(mutant, check_id).run(secrets.randbelow(1 << 31))


class QRoundedAsDeclared(QRounded):
    capabilities = dataclasses.replace(TorchNativeBackend.capabilities, quantizes_q=True)


def test_a_backend_that_declares_that_it_rounds_q_is_allowed_what_that_costs():
    cases = {case.name: case for case in cases_for(QRoundedAsDeclared.capabilities)}
    for name in ("KV float8_e4m3fn, float scales", "KV float8_e4m3fn, q rounded to it"):
        assert cases[name].spec.may_quantize_q
        run_case(QRoundedAsDeclared, cases[name], CPU, secrets.randbelow(1 << 31))


class DecodeOnly(TorchNativeBackend):
    capabilities = dataclasses.replace(TorchNativeBackend.capabilities, phases=frozenset({"decode"}))

    def plan(self, batch):
        assert batch.phase == "decode"
        return super().plan(batch)


@pytest.mark.parametrize("name", ["plain", "decode", "sliding_window=33", "3000 tokens"])
def test_a_backend_of_one_phase_is_checked_in_that_phase(name):
    case = next(case for case in cases_for(DecodeOnly.capabilities) if case.name == name)
    assert check_case(DecodeOnly, case, CPU, 0).failure is None


def test_cases_are_only_those_whose_pages_can_be_made():
    pieces = dataclasses.replace(ReferenceBackend.capabilities, layouts=("5D", "NZ"), page_sizes=ints(1, 3, 16))
    found = {case.name: case for case in cases_for(pieces)}
    assert {(case.layout, case.page_size) for case in found.values()} >= {("5D", 16), ("NZ", 1), ("NZ", 3)}
    assert "page size 3, 5D" not in found
    assert found["head dim 72, 72"].layout == "5D"
    for case in found.values():
        case.spec.cache_spec(num_layers=1, page_size=case.page_size, layout=case.layout)
