"""Dispatch modes, storages and call sites shared by recorder, emulator and dry runs."""
