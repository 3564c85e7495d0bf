"""Dispatch modes, storages and call sites: what recorder, emulator and dry runs share."""
