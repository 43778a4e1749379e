"""Which function a loaded shared library calls by a name: read it, and change it.

The table of addresses (ELF's global offset table) is the interface by which Linux links
libraries; layouts are those of <elf.h> and <link.h> for 64-bit x86 and Arm.
"""

import ctypes
import mmap
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path

MACHINES = ("x86_64", "aarch64")
PLT_SIZE, STRINGS, SYMBOLS, RELA, RELA_SIZE, PLT = 2, 5, 6, 7, 8, 23
# Relocations that hold the address of a function: (GLOB_DAT, JUMP_SLOT) of both.
FUNCTION_KINDS = {6, 7, 1025, 1026}
RELOCATION = struct.Struct("<QIIq")
SYMBOL_SIZE = 24
LINK_MAP_QUESTION = 2


class _LinkMap(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_size_t),
    )


class _Where(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def imports(files: Iterable[Path], wanted: re.Pattern) -> dict[str, list[int]]:
    """Where loaded libraries keep the addresses of the functions they call.

    Args:
        files: shared libraries; those that are not loaded are passed over.
        wanted: the names of functions to find.
    """
    found: dict[str, list[int]] = {}
    for file in files:
        try:
            library = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue
        for name, slot in _slots(_link_map(library)):
            if wanted.fullmatch(name):
                found.setdefault(name, []).append(slot)
    return found


def point(slots: dict[str, list[int]], addresses: dict[str, int]) -> dict[str, int]:
    """Write an address into every slot of its name; returns what was there before."""
    before = {}
    for name, places in slots.items():
        for place in places:
            _make_writable(place)
            cell = ctypes.c_size_t.from_address(place)
            before[name] = cell.value
            cell.value = addresses[name]
    return before


def address(function) -> int:
    """The address of a function of a loaded library."""
    return ctypes.cast(function, ctypes.c_void_p).value


def file_of(function) -> Path:
    """The file a loaded function comes from."""
    where = _Where()
    dladdr = ctypes.CDLL(None).dladdr
    if not dladdr(ctypes.c_void_p(address(function)), ctypes.byref(where)):
        raise OSError("the address of a function is in no library")
    return Path(os.fsdecode(where.file))


def _link_map(library: ctypes.CDLL) -> _LinkMap:
    pointer = ctypes.c_void_p()
    dlinfo = ctypes.CDLL(None).dlinfo
    handle = ctypes.c_void_p(library._handle)
    if dlinfo(handle, LINK_MAP_QUESTION, ctypes.byref(pointer)):
        raise OSError("the loader does not tell where a library is")
    return _LinkMap.from_address(pointer.value)


def _slots(link: _LinkMap) -> Iterable[tuple[str, int]]:
    """Name and address of every slot of a library that holds a function."""
    table = _dynamic(link)
    for start, size in ((PLT, PLT_SIZE), (RELA, RELA_SIZE)):
        if start not in table:
            continue
        raw = ctypes.string_at(table[start], table[size])
        for offset, kind, index, _ in RELOCATION.iter_unpack(raw):
            if kind in FUNCTION_KINDS:
                symbol = table[SYMBOLS] + index * SYMBOL_SIZE
                text = table[STRINGS] + ctypes.c_uint32.from_address(symbol).value
                yield ctypes.string_at(text).decode(), link.base + offset


def _dynamic(link: _LinkMap) -> dict[int, int]:
    """The library's own description of itself, by tag; addresses are absolute."""
    table, at = {}, link.dynamic
    while tag := ctypes.c_int64.from_address(at).value:
        table[tag] = ctypes.c_uint64.from_address(at + 8).value
        at += 16
    for tag in {STRINGS, SYMBOLS, RELA, PLT} & table.keys():
        if table[tag] < link.base:
            table[tag] += link.base
    return table


def _make_writable(place: int) -> None:
    """A linker may have asked for the table to be closed once it is filled."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = place & -mmap.PAGESIZE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, protection):
        fault = ctypes.get_errno()
        raise OSError(fault, os.strerror(fault))
