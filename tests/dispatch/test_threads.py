from __future__ import annotations

import time

import pytest

from torchtrim.dispatch.threads import end_main, main_has_ended


class Ended(BaseException):
    pass


@pytest.mark.parametrize("leaves", [True, False])
def test_a_process_goes_on_if_its_program_has_ended(leaves: bool) -> None:
    called: list[bool] = []

    def program() -> None:
        end_main(Ended, 0.1, lambda: called.append(True))
        while True:
            time.sleep(0.001)

    with pytest.raises(Ended):
        program()
    if leaves:
        main_has_ended()
    time.sleep(0.3)
    assert called == [] if leaves else called == [True]
