"""The yardstick of CPU memory: the right number of bytes, of all threads, whatever becomes of a storage."""

import gc
import sys
import threading
import time
import warnings

import cloudpickle
import torch
import torch.distributed as dist
from torch.profiler import record_function

from minifsdp import device
from minifsdp.instruments.launch import launch
from minifsdp.instruments.watch.cpu_memory import WINDOW, allocator_peaks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

KB = 250  # elements of float32


def test_a_known_program_has_its_bytes():
    """What was there before does not count, what lives through a window does, and temporaries do."""
    before = torch.empty(100 * KB)
    gc.collect()  # what earlier tests have left would be freed in a window
    with allocator_peaks() as peaks:
        held = torch.empty(10 * KB)
        del before
        with record_function(WINDOW):
            torch.empty(5 * KB)
            torch.empty(7 * KB)
        torch.empty(50 * KB)  # outside
        with record_function(WINDOW):
            pass
        with record_function(WINDOW):
            (held + held).neg()
    assert peaks == [17_000, 10_000, 30_000]


def test_a_storage_that_is_resized_is_counted_at_its_size():
    """As `FlatParameter` has it, torch's and ours: the tensor stays, its memory comes and goes."""
    with allocator_peaks() as peaks:
        buffer = device.empty(40 * KB, torch.float32, "unsharded", torch.device("cpu"))
        device.free(buffer)
        with record_function(WINDOW):
            torch.empty(3 * KB)
        with record_function(WINDOW):
            device.allocate(buffer)
            device.free(buffer)
        with record_function(WINDOW):
            torch.empty(2 * KB)
    assert peaks == [3_000, 40_000, 2_000]


def test_what_another_thread_frees_is_free():
    """The profiler does not watch that thread; nor gloo's, when they drop the tensors of a collective."""
    with allocator_peaks() as peaks:
        mine = [torch.empty(30 * KB)]
        thread = threading.Thread(target=mine.clear)
        with record_function(WINDOW):
            thread.start()
            thread.join()
        with record_function(WINDOW):
            torch.empty(KB)
    assert peaks == [30_000, 1_000]


def test_nothing_is_no_bytes():
    with allocator_peaks() as peaks, record_function(WINDOW):
        pass
    assert peaks == [0]


def scattered():
    """Peaks of torch's reduce-scatter of 16 kB to 8 kB on gloo, and of nothing after it, over and over."""
    with allocator_peaks() as peaks:
        whole, part = torch.ones(16 * KB), torch.empty(8 * KB)
        with record_function(WINDOW), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dist.reduce_scatter_tensor(part, whole)
        for _ in range(20):
            time.sleep(0.02)
            with record_function(WINDOW):
                torch.empty(KB)
    return peaks


def test_what_gloo_stages_is_counted_and_let_go():
    """Its reduce-scatter clones the input, on a thread of its own."""
    for during, *after in launch(scattered, 2, backend="gloo"):
        assert during == 40_000
        assert min(after) == 25_000
