"""What calls of the runtime do, from their names."""

import pytest

from torchtrim.traces.calls import is_between_devices, is_pageable, kind_of


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
