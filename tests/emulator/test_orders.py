"""Streams that do their work early, late and in random orders: what is right stays so, mistakes show."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import draws
from torchtrim.capture.recording import record_call
from torchtrim.emulator import emulate
from torchtrim.emulator.orders import StreamOrder
from torchtrim.errors import UsageError

Tensor = torch.Tensor
ORDERS = draws.orders(50)
EVERY = pytest.mark.parametrize("order", ORDERS)


class Offload:
    """A small offload of what autograd saves, one object a step; each mistake is a subclass."""

    def __init__(self) -> None:
        self.out, self.back = torch.cuda.Stream(), torch.cuda.Stream()
        self.kept: list[Any] = []

    def pack(self, tensor: Tensor) -> Any:
        if tensor.is_leaf:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.out):
            host.copy_(tensor, non_blocking=True)
        saved = self.out.record_event()
        self.keep(tensor, saved)
        return host, saved

    def keep(self, tensor: Tensor, saved: Any) -> None:
        self.kept.append((tensor, saved))
        if len(self.kept) > 2:
            _, done = self.kept.pop(0)
            torch.cuda.current_stream().wait_event(done)

    def unpack(self, handle: Any) -> Tensor:
        if isinstance(handle, Tensor):
            return handle
        host, saved = handle
        device = torch.empty_like(host, device="cuda")
        self.back.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.back):
            self.before_fetch(saved)
            device.copy_(host, non_blocking=True)
        self.after_fetch()
        return device

    def before_fetch(self, saved: Any) -> None:
        self.back.wait_event(saved)

    def after_fetch(self) -> None:
        torch.cuda.current_stream().wait_stream(self.back)


class FetchRacesItsSave(Offload):
    """NVIDIA/Megatron-LM#7398: an unforeseen fetch does not wait for the copy that fills its source."""

    def before_fetch(self, saved: Any) -> None: ...


class NobodyWaitsForTheFetch(Offload):
    """huggingface/diffusers#13502: the copy is queued on a stream of its own, and compute goes on."""

    def after_fetch(self) -> None: ...


class AsksForTheStreamTooLate(Offload):
    """pytorch/torchtitan#2581: inside the side stream's block the current stream is the side stream."""

    def after_fetch(self) -> None:
        with torch.cuda.stream(self.back):
            torch.cuda.current_stream().wait_stream(self.back)


class LetsTheSourceGo(Offload):
    """The device copy is let go while the save still reads it, and the allocator was not told."""

    def keep(self, tensor: Tensor, saved: Any) -> None: ...


class RemembersTheFirstStream(Offload):
    """huggingface/trl#7195: the compute stream is asked for once, and later another one computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.cuda.Stream()

    def after_fetch(self) -> None:
        self.first.wait_stream(self.back)


class ClonesAfterTheWait(Offload):
    """huggingface/trl#7195: work that the copy rests on is queued on compute after the copy's wait."""

    def pack(self, tensor: Tensor) -> Any:
        if tensor.is_leaf:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.out.wait_stream(torch.cuda.current_stream())
        tensor = tensor.clone()
        with torch.cuda.stream(self.out):
            host.copy_(tensor, non_blocking=True)
        saved = self.out.record_event()
        self.keep(tensor, saved)
        return host, saved


class FetchesIntoItsOwnPool(Offload):
    """pytorch/torchtune#1867: what was fetched is the side stream's memory, let go while it is read."""

    def unpack(self, handle: Any) -> Tensor:
        if isinstance(handle, Tensor):
            return handle
        host, saved = handle
        with torch.cuda.stream(self.back):
            self.before_fetch(saved)
            device: Tensor = host.to("cuda", non_blocking=True)
        self.after_fetch()
        return device


def gradients(
    make: Callable[[], Offload] | None, order: str = ""
) -> tuple[list[Tensor], list[str]]:
    """Gradients of a small model, and the races."""
    torch.manual_seed(0)
    with emulate(streams=order) as emulation:
        layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh(), nn.GELU())]
        model = nn.Sequential(*layers).cuda()
        x = torch.randn(4, 8, device="cuda")
        if make is None:
            loss = model(x).square().sum()
        else:
            offload = make()
            with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
                loss = model(x).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        found = [
            parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None
        ]
        races = [] if emulation.orders is None else [one.row for one in emulation.orders.races()]
    return found, races


def is_equal(order: str, make: Callable[[], Offload] | None) -> bool:
    reference, _ = gradients(None)
    found, _ = gradients(make, order)
    return all(torch.equal(a, b) for a, b in zip(reference, found, strict=True))


@EVERY
def test_what_waits_is_right_in_every_order(order: str) -> None:
    assert is_equal(order, None)
    assert is_equal(order, Offload)
    assert gradients(Offload, order)[1] == []


LATE_IS_WRONG = (
    FetchRacesItsSave,
    NobodyWaitsForTheFetch,
    AsksForTheStreamTooLate,
    LetsTheSourceGo,
    RemembersTheFirstStream,
)


@pytest.mark.parametrize("mistake", LATE_IS_WRONG, ids=lambda one: one.__name__)
def test_a_mistake_is_wrong_where_streams_are_late(mistake: type[Offload]) -> None:
    assert is_equal("", mistake)
    assert not is_equal("late", mistake)
    assert gradients(mistake, "late")[1]


def test_work_that_is_not_waited_for_is_wrong_where_streams_are_early() -> None:
    assert is_equal("late", ClonesAfterTheWait)
    assert not is_equal("early", ClonesAfterTheWait)
    assert set(gradients(ClonesAfterTheWait, "late")[1]) == {"stream-read"}


@EVERY
def test_memory_of_a_side_stream_that_compute_still_reads(order: str) -> None:
    assert "stream-free" in gradients(FetchesIntoItsOwnPool, order)[1]


def test_a_key_of_address_and_type_is_wrong_in_any_order() -> None:
    """modelscope/ms-swift#10157: a tensor and its transpose share a copy."""
    with emulate(streams="late"):
        x = torch.randn(4, 4, device="cuda")
        copies: dict[Any, Tensor] = {}
        for one in (x, x.t()):
            copies.setdefault((one.data_ptr(), one.dtype), one.cpu().contiguous())
        (copy,) = copies.values()
        assert not torch.equal(copy.cuda(), x.t())


def test_a_random_order_is_that_of_its_seed() -> None:
    def values(order: str) -> list[list[Tensor]]:
        return [gradients(NobodyWaitsForTheFetch, order)[0] for _ in range(2)]

    for first, second in zip(*values("random:3"), strict=True):
        assert torch.equal(first, second) or bool(first.isnan().any() == second.isnan().any())


@EVERY
@pytest.mark.parametrize("told", [False, True], ids=["not told", "told"])
def test_the_allocator_may_be_told_of_a_use(order: str, told: bool) -> None:
    with emulate(streams=order) as emulation:
        assert emulation.orders is not None
        side = torch.cuda.Stream()
        x = torch.ones(8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        if told:
            x.record_stream(side)
        del x
        torch.zeros(8, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        right = torch.equal(y.cpu(), torch.full((8,), 2.0))
        rows = {race.row for race in emulation.orders.races()}
    assert rows == (set() if told else {"stream-free"})
    assert right or not told
    assert not (right and order == "late" and not told)


@EVERY
def test_random_numbers_are_drawn_in_the_order_of_the_program(order: str) -> None:
    def draw(streams: str) -> list[Tensor]:
        with emulate(streams=streams):
            torch.manual_seed(3)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                first = torch.rand(4, device="cuda")
                second = torch.empty(4, device="cuda").normal_()
            third = torch.rand(4, device="cuda")
            side.synchronize()
            return [first.cpu(), second.cpu(), third.cpu()]

    assert all(torch.equal(a, b) for a, b in zip(draw(""), draw(order), strict=True))


@EVERY
def test_a_copy_to_the_host_arrives_when_it_was_waited_for(order: str) -> None:
    with emulate(streams=order):
        host = torch.zeros(8, pin_memory=True)
        x = torch.ones(8, device="cuda")
        host.copy_(x, non_blocking=True)
        x.zero_()
        if order == "late":
            assert not host.any()
        torch.cuda.current_stream().synchronize()
        assert torch.equal(host, torch.ones(8))


@EVERY
def test_what_the_host_must_know_is_waited_for(order: str) -> None:
    with emulate(streams=order):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.arange(6.0, device="cuda") * 2
            assert float(x.sum()) == 30.0
            assert len(x.nonzero()) == 5
            assert (
                torch.nn.functional.embedding(x.long(), torch.eye(11, device="cuda")).cpu().sum()
                == 6
            )
            assert (x[x > 4]).tolist() == [6.0, 8.0, 10.0]


def test_memory_is_counted_as_if_nothing_were_late() -> None:
    def used(order: str) -> tuple[int, int]:
        with emulate(streams=order):
            side = torch.cuda.Stream()
            for _ in range(3):
                x = torch.ones(1000, device="cuda")
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    y = x * 2
                x.record_stream(side)
                del x
                torch.cuda.current_stream().wait_stream(side)
                del y
            torch.zeros(1, device="cuda")
            return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()

    assert used("late") == used("early") == used("")


def test_nothing_is_kept_of_what_is_done() -> None:
    with emulate(streams="late") as emulation:
        orders: Any = emulation.orders
        side = torch.cuda.Stream()
        for _ in range(50):
            x = torch.ones(8, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x + 1
            torch.cuda.current_stream().wait_stream(side)
            y += 1
        del x, y
        gc.collect()
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda")
        assert not orders._pending._cells
        assert len(orders._marks) <= 2
        assert len(orders.clocks._storages) <= 2


def test_the_line_of_a_race_is_told() -> None:
    with emulate(streams="late"):
        side = torch.cuda.Stream()

        def call() -> None:
            x = torch.ones(8, device="cuda")
            with torch.cuda.stream(side):
                y = x * 2
            torch.cuda.synchronize()
            y.sum()

        profile = record_call(call, device="emulated")
    (race,) = [sync for sync in profile.syncs if sync.row.startswith("stream-")]
    assert race.row == "stream-read"
    assert profile.operators[race.operator].name.startswith("aten::mul")


@pytest.mark.parametrize("text", ["", "later", "late:3", "random:x", "random:", "random:-1"])
def test_orders_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="early, late, random"):
        StreamOrder.parse(text)


@pytest.mark.parametrize("awaited", [True, False])
def test_memory_that_a_side_stream_frees_is_lost_unless_it_awaited_who_reads_it(
    awaited: bool,
) -> None:
    with emulate(streams="late"):
        mine, copies = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        there = torch.empty(4, pin_memory=True)
        with torch.cuda.stream(mine):
            made = torch.ones(4, device="cuda") * 3
        copies.wait_stream(mine)
        with torch.cuda.stream(copies):
            there.copy_(made, non_blocking=True)
        if awaited:
            mine.wait_stream(copies)
        with torch.cuda.stream(mine):
            del made
            torch.zeros(4, device="cuda").add_(1)
        torch.cuda.synchronize()
        assert torch.equal(there, torch.full((4,), 3.0)) == awaited
