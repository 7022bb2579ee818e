"""Whole pages moved by Triton against the same moves by torch, whose own tests are in test_pool.py."""


import pytest
import torch

from anyattn.mem_cache.kernels import pages_torch
from anyattn.mem_cache.kernels.pages import PageMover
from anyattn.mem_cache.kernels.pages_triton import TritonMover

NUM_PAGES = 6


def parts_of(widths, device, *, joined=False, shift=0):
    """Random bytes, the null page zero; in one storage, `shift` bytes into it, or in one for each part."""
    made = []
    for width in [sum(widths)] if joined else widths:
        part = torch.zeros(shift + (NUM_PAGES + 1) * width, dtype=torch.uint8)[shift:].view(NUM_PAGES + 1, width)
        part[1:] = torch.randint(256, (NUM_PAGES, width), dtype=torch.uint8)
        made.append(part)
    if joined:
        made = list(made[0].split(widths, dim=1))
    copies = []
    for part in made:  # the same bytes on the device, with the same distance from page to page
        storage = torch.zeros(shift + (NUM_PAGES + 1) * part.stride(0), dtype=torch.uint8, device=device)
        copy = storage[shift:].view(NUM_PAGES + 1, -1)[:, : part.shape[1]]
        copy.copy_(part)
        copies.append(copy)
    return made, copies


WIDTHS = {"vectors": [256, 64, 1024], "large": [8192 + 512, 20000 // 16 * 16], "bytes": [7, 256, 9001]}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_records_and_pages_are_those_that_torch_makes(widths, joined, dtype, device):
    wanted, parts = parts_of(widths, device, joined=joined)
    mover = TritonMover(parts)
    pages = torch.tensor([3, 0, 6, 3], dtype=dtype)
    width = sum(widths)
    expected, out = (torch.full((4, width), 9, dtype=torch.uint8, device=where) for where in ("cpu", device))
    pages_torch.read(wanted, pages, expected)
    mover.read(pages.to(device), out)
    assert torch.equal(out.cpu(), expected)

    data = torch.randint(256, (4, width), dtype=torch.uint8)
    targets = torch.tensor([5, 0, 1, 0], dtype=dtype)
    pages_torch.write(wanted, targets, data)
    mover.write(targets.to(device), data.to(device))
    assert all(torch.equal(part.cpu(), same) for part, same in zip(parts, wanted, strict=True))

    targets = torch.tensor([2, 0, 4, 0], dtype=dtype)
    pages_torch.copy(wanted, pages, targets)
    mover.copy(pages.to(device), targets.to(device))
    assert all(torch.equal(part.cpu(), same) for part, same in zip(parts, wanted, strict=True))
    assert not any(part[0].any() for part in parts)
    assert all(part[5].any() and torch.equal(part[2], part[3]) for part in parts)


@pytest.mark.parametrize(("shift", "rows_apart"), [(1, 0), (0, 1), (0, 16)], ids=str)
def test_alignment_is_no_condition(shift, rows_apart, device):
    wanted, parts = parts_of([64, 160], device, shift=shift)
    buffer = torch.full((2, 224 + rows_apart), 9, dtype=torch.uint8, device=device)
    mover = TritonMover(parts)
    mover.read(torch.tensor([6, 1], device=device), buffer[:, :224])
    expected = torch.empty(2, 224, dtype=torch.uint8)
    pages_torch.read(wanted, torch.tensor([6, 1]), expected)
    assert torch.equal(buffer[:, :224].cpu(), expected)
    assert (buffer[:, 224:] == 9).all()
    mover.write(torch.tensor([2, 3], device=device), buffer[:, :224])
    assert all(torch.equal(part[[2, 3]].cpu(), same[[6, 1]]) for part, same in zip(parts, wanted, strict=True))


def test_no_pages_launch_nothing(device):
    _, parts = parts_of([64], device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    mover = TritonMover(parts)
    mover.read(none, torch.empty(0, 64, dtype=torch.uint8, device=device))
    mover.copy(none, none)


def test_a_mover_on_this_device_launches_the_kernel_and_takes_numpy(device):
    np = pytest.importorskip("numpy")
    wanted, parts = parts_of([64, 16], device)
    mover = PageMover(parts)
    assert mover._triton is not None
    assert torch.equal(mover.read(np.array([2, 5])).cpu(), torch.cat([part[[2, 5]] for part in wanted], dim=1))
    mover.copy(np.array([2]), np.array([5]))
    assert all(torch.equal(part[5], part[2]) for part in parts)


def test_pages_beyond_31_bits_of_bytes_are_right(device):
    try:
        if device.type == "cpu":
            np = pytest.importorskip("numpy")
            part = torch.from_numpy(np.zeros((2200, 1 << 20), dtype=np.uint8))  # takes memory where it is written
        else:
            part = torch.zeros((2200, 1 << 20), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        pytest.skip("needs a device with 3 GB of free memory")
    part[1] = torch.randint(256, (1 << 20,), dtype=torch.uint8).to(device)
    mover = TritonMover([part])
    mover.copy(torch.tensor([1], device=device), torch.tensor([2199], device=device))
    out = torch.empty(2, 1 << 20, dtype=torch.uint8, device=device)
    mover.read(torch.tensor([2199, 2100], device=device), out)
    assert torch.equal(out[0], part[1])
    assert torch.equal(part[2199], part[1])
    assert not out[1].any()
