"""Which frame is named."""

import pytest

from torchtrim.traces.stacks import (
    Frame,
    is_between_devices,
    is_pageable,
    kind_of,
    parse_frame,
    place_of,
)


def frame(text: str) -> Frame:
    found = parse_frame(text, exact=False)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "path", "line", "function"),
    [
        ("train.py(12): main", "train.py", 12, "main"),
        ("/a (b)/c.py(3): <module>", "/a (b)/c.py", 3, "<module>"),
        ("C:\\x\\y.py(7): f", "C:\\x\\y.py", 7, "f"),
    ],
)
def test_frames_of_files(name: str, path: str, line: int, function: str) -> None:
    assert frame(name) == Frame(path, line, function, False)


@pytest.mark.parametrize(
    "name", ["<built-in method to of Tensor object at 0x1>", "nn.Module: Linear_0", "", "x" * 9999]
)
def test_what_is_no_frame(name: str) -> None:
    assert parse_frame(name, exact=False) is None


@pytest.mark.parametrize(
    ("path", "torch"),
    [
        ("torch/nn/modules/module.py", True),
        ("/usr/lib/python3/site-packages/torch/_tensor.py", True),
        ("/opt/conda/lib/python3.10/dist-packages/torch/x.py", True),
        ("threading.py", True),
        ("<string>", True),
        ("torchvision/models/resnet.py", False),
        ("transformers/models/bert.py", False),
        ("/home/me/torch/train.py", False),
        ("/home/me/train.py", False),
    ],
)
def test_what_is_torch(path: str, torch: bool) -> None:
    assert Frame(path, 1, "f", False).is_torch is torch


def test_the_users_own_before_what_is_installed() -> None:
    inner = frame("/env/lib/python3.10/site-packages/lib/core.py(9): inner")
    own = frame("/home/me/train.py(5): step")
    torch = frame("/env/lib/python3.10/site-packages/torch/functional.py(3): unique")
    assert place_of([torch, inner, own]) == own
    assert place_of([torch, inner]) == inner
    assert place_of([torch]) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaStreamSynchronize", "stream"),
        ("hipStreamSynchronize", "stream"),
        ("cuStreamSynchronize_ptsz", "stream"),
        ("cudaEventSynchronize", "event"),
        ("hipEventSynchronize", "event"),
        ("cudaDeviceSynchronize", "device"),
        ("cuCtxSynchronize", "device"),
        ("cudaMemcpy", "copy"),
        ("hipMemcpy", "copy"),
        ("hipMemcpyWithStream", "copy"),
        ("cuMemcpyDtoH_v2", "copy"),
        ("cudaMemcpyAsync", "other"),
        ("hipMemcpyAsync", "other"),
        ("cudaMemcpyPeerAsync", "other"),
        ("cudaLaunchKernel", "other"),
        ("cudaEventQuery", "other"),
        ("cudaEventRecordWithFlags", "record"),
        ("cudaStreamWaitEvent", "order"),
        ("hipGetDevicePropertiesR0600", "other"),
        ("INVALID", "other"),
    ],
)
def test_what_a_call_does(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("name", "pageable", "between"),
    [
        ("Memcpy HtoD (Pageable -> Device)", True, False),
        ("Memcpy DtoH (Device -> Pageable)", True, False),
        ("Memcpy HtoD (Pinned -> Device)", False, False),
        ("Memcpy DtoH (Device -> Host)", False, False),
        ("Memcpy DtoD (Device -> Device)", False, True),
        ("Memcpy PtoP (Device -> Device)", False, True),
        ("void Pageable_kernel()", False, False),
    ],
)
def test_copies(name: str, pageable: bool, between: bool) -> None:
    assert is_pageable(name) is pageable
    assert is_between_devices(name) is between
