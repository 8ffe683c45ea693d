import platform
import subprocess
import sys

import pytest

from forked import python

FAULTS = """
import resource
import torch
from calgp.runs import keep_freed_memory

torch.set_num_threads(1)

def faults():
    for _ in range(20):  # the first times the pages have to come from the system (alignment may ask for a second block)
        torch.ones(16_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(16_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

default = faults()
assert keep_freed_memory()
print(default, faults())
"""


DENORMALS = """
import sys
import torch
from calgp.runs import flush_denormals

if sys.argv[1] == "flush" and not flush_denormals():
    sys.exit("this processor cannot")
torch.set_num_threads(2)
x = torch.full((4_000_000,), 1.2e-38)  # the least normal float is 1.18e-38; enough of them for both threads
print(int((x / 10 != 0).sum()), int((x != 0).sum()))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc has no mallopt")
def test_a_freed_tensor_leaves_its_pages_to_the_next():
    """64 MB are 15,625 pages of 4 KB (fewer if the system has larger ones), asked for again each time, or never."""
    # a process of its own: a fork has the memory that another one left
    done = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True)
    default, kept = map(int, done.stdout.split())
    assert default > 1000 and kept < 0.01 * default


@pytest.mark.slow
def test_denormal_numbers_are_zero_in_every_thread_and_normal_ones_are_kept():
    def kept(mode):
        done = python("-c", DENORMALS, mode)
        if "this processor cannot" in done.stderr:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        return tuple(map(int, done.stdout.split()))

    assert kept("default") == (4_000_000, 4_000_000)
    assert kept("flush") == (0, 4_000_000)
