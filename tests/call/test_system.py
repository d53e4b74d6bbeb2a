"""What is asked of each operating system, here of libraries that only write it down; and of this one in earnest."""

import ctypes
import os
import signal

import pytest

from opgrad.cpu.runtime import pool, threads
from opgrad.cpu.runtime.system import HEAP, Posix, Windows, address, system

pytestmark = pytest.mark.any_cpu

CALL = ctypes.CFUNCTYPE(ctypes.c_size_t, *[ctypes.c_size_t] * 4)


class Library:
    """A library that has some functions, each with an address, and writes down what is called with which words."""

    def __init__(self, names, results=()):
        self.names, self.results, self.called, self.functions = names, dict(results), [], {}

    def __getattr__(self, name):
        if name not in self.names:
            raise AttributeError(name)
        return self.functions.setdefault(name, self._function(name))

    def _function(self, name):
        library = self

        class Function(CALL):
            _flags_, _restype_, _argtypes_ = CALL._flags_, CALL._restype_, CALL._argtypes_

            def __call__(self, *words):
                library.called.append((name, *(getattr(word, "value", word) for word in words)))
                return library.results.get(name, 0)

        return Function(lambda *words: 0)


PTHREADS = [
    *HEAP,
    *("mmap", "munmap", "madvise", "pthread_mutex_init", "pthread_cond_init", "pthread_create"),
    *("pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait", "pthread_cond_broadcast"),
]
KERNEL32 = [
    *("InitializeSRWLock", "InitializeConditionVariable", "CreateThread", "CloseHandle"),
    *("AcquireSRWLockExclusive", "ReleaseSRWLockExclusive", "SleepConditionVariableSRW", "WakeAllConditionVariable"),
]


def macos(**results):
    library = Library(PTHREADS, results)
    return Posix(library), library


def windows(**results):
    kernel = Library(KERNEL32, results)
    return Windows(Library(HEAP), kernel), kernel


def test_macos_waits_with_pthreads():
    given, library = macos()
    assert given.waiting(640, 768) == [address(library, name) for name in PTHREADS[-4:]]
    assert library.called == [("pthread_mutex_init", 640, None), ("pthread_cond_init", 768, None)]


def test_windows_waits_with_slim_locks():
    given, kernel = windows()
    assert given.waiting(640, 768) == [address(kernel, name) for name in KERNEL32[-4:]]
    assert kernel.called == [("InitializeSRWLock", 640), ("InitializeConditionVariable", 768)]


def test_a_system_without_gettid_leaves_threads_where_they_are():
    assert macos()[0].affinity() == windows()[0].affinity() == []


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_thread_of_posix_blocks_signals_and_a_refusal_is_told():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    given, library = macos()
    assert given.start_thread(5, 7) == ""
    ((name, _, attributes, entry, argument),) = library.called
    assert (name, attributes, entry, argument) == ("pthread_create", None, 5, 7)
    assert macos(pthread_create=11)[0].start_thread(5, 7) == os.strerror(11)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_windows_closes_the_handle_of_a_thread_that_goes_on():
    handle = 0x7FF600000010  # more than 32 bits
    given, kernel = windows(CreateThread=handle)
    assert given.start_thread(5, 7) == ""
    assert kernel.called == [("CreateThread", None, 0, 5, 7, 0, None), ("CloseHandle", handle)]
    assert kernel.CreateThread.restype is ctypes.c_void_p


def test_windows_tells_why_it_refuses(monkeypatch):
    monkeypatch.setattr(ctypes, "get_last_error", lambda: 8, raising=False)
    monkeypatch.setattr(ctypes, "FormatError", lambda code: f"error {code}", raising=False)
    given, kernel = windows()
    assert given.start_thread(5, 7) == "error 8"
    assert [name for name, *_ in kernel.called] == ["CreateThread"]


@pytest.mark.parametrize("make", [macos, windows])
def test_the_pool_of_another_system(monkeypatch, make):
    """Without mappings all blocks are the heap's; functions come from the system that is asked."""
    given, _ = make()
    monkeypatch.setattr(pool, "system", lambda: given)
    made = pool._made()
    assert made.c_malloc == given.heap("malloc")
    assert made.c_free == given.heap("free")
    mappings = given.mappings() or (0, 0, 0, 0)
    assert [made.c_map, made.c_unmap, made.c_advise, made.flags] == list(mappings)


@pytest.mark.parametrize("make", [macos, windows])
def test_the_workers_of_another_system(monkeypatch, make):
    given, library = make(CreateThread=1)
    monkeypatch.setattr(threads, "system", lambda: given)
    team = threads.ThreadPool()
    assert team.start(3) == ""
    started = [call for call in library.called if call[0] in ("pthread_create", "CreateThread")]
    assert len(started) == team.workers == 3
    assert all(threads.work.address in call and team.address in call for call in started)
    assert team._block.c_get_cpu == team._block.c_set_affinity == 0
    assert library.called[0][1] == team._block.mutex


def test_this_system_has_all_that_is_asked_for():
    assert all(system().heap(name) for name in HEAP)
    block = (ctypes.c_int64 * 32)()
    assert all(system().waiting(ctypes.addressof(block), ctypes.addressof(block) + 128))
