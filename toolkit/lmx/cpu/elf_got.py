"""Reads and changes the functions that a loaded shared library calls.

A library calls imported functions through ELF's global offset table, which the dynamic
linker fills. Layouts are those of <elf.h> and <link.h> for 64-bit x86 and Arm.
"""

import ctypes
import mmap
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path

MACHINES = ("x86_64", "aarch64")
# Tags of the dynamic section.
PLT_SIZE, STRINGS, SYMBOLS, RELA, RELA_SIZE, PLT = 2, 5, 6, 7, 8, 23
# Relocation types that hold the address of a function: GLOB_DAT and JUMP_SLOT of both
# machines.
FUNCTION_TYPES = {6, 7, 1025, 1026}
RELOCATION = struct.Struct("<QIIq")
SYMBOL_SIZE = 24
RTLD_DI_LINKMAP = 2


class _LinkMap(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_size_t),
    )


class _SymbolInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def imports(files: Iterable[Path], wanted: re.Pattern) -> dict[str, list[int]]:
    """Addresses of the table entries of imported functions, by function name.

    Args:
        files: shared libraries; those that are not loaded are skipped.
        wanted: pattern of the function names.
    """
    slots: dict[str, list[int]] = {}
    for file in files:
        try:
            library = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue
        pointer = ctypes.c_void_p()
        dlinfo = ctypes.CDLL(None).dlinfo
        handle = ctypes.c_void_p(library._handle)
        if dlinfo(handle, RTLD_DI_LINKMAP, ctypes.byref(pointer)):
            raise OSError("dlinfo fails for a loaded library")
        for name, slot in _slots(_LinkMap.from_address(pointer.value)):
            if wanted.fullmatch(name):
                slots.setdefault(name, []).append(slot)
    return slots


def write_slots(addresses: dict[int, int]) -> dict[int, int]:
    """Write addresses into table entries, into all of them or none.

    Args:
        addresses: what to write, by the address of the entry.

    Returns:
        What the entries held. Two libraries may hold different addresses of a function:
        an entry that was not called yet points into its own library.

    Raises:
        OSError: an entry cannot be written.
    """
    for position in addresses:
        _make_writable(position)
    slots = {p: ctypes.c_size_t.from_address(p) for p in addresses}
    previous = {position: slot.value for position, slot in slots.items()}
    for position, slot in slots.items():
        slot.value = addresses[position]
    return previous


def address(function) -> int:
    """The address of a function of a loaded library."""
    return ctypes.cast(function, ctypes.c_void_p).value


def file_of(function) -> Path:
    """The library file that holds a loaded function."""
    info = _SymbolInfo()
    dladdr = ctypes.CDLL(None).dladdr
    if not dladdr(ctypes.c_void_p(address(function)), ctypes.byref(info)):
        raise OSError("a function belongs to no loaded library")
    return Path(os.fsdecode(info.file))


def _slots(link: _LinkMap) -> Iterable[tuple[str, int]]:
    """Name and address of every table entry of a library that holds a function."""
    table = _dynamic(link)
    for start, size in ((PLT, PLT_SIZE), (RELA, RELA_SIZE)):
        if start not in table:
            continue
        raw = ctypes.string_at(table[start], table[size])
        for offset, kind, index, _ in RELOCATION.iter_unpack(raw):
            if kind in FUNCTION_TYPES:
                symbol = table[SYMBOLS] + index * SYMBOL_SIZE
                text = table[STRINGS] + ctypes.c_uint32.from_address(symbol).value
                yield ctypes.string_at(text).decode(), link.base + offset


def _dynamic(link: _LinkMap) -> dict[int, int]:
    """The library's dynamic section by tag; addresses are absolute."""
    table, entry = {}, link.dynamic
    while tag := ctypes.c_int64.from_address(entry).value:
        table[tag] = ctypes.c_uint64.from_address(entry + 8).value
        entry += 16
    for tag in {STRINGS, SYMBOLS, RELA, PLT} & table.keys():
        if table[tag] < link.base:
            table[tag] += link.base
    return table


def _make_writable(position: int) -> None:
    """Make a page of the table writable; with RELRO the linker write-protects it."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = position & -mmap.PAGESIZE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, protection):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
