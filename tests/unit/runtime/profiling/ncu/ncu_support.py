"""Shared by the tests of the Nsight Compute modes: a recording, a session, a stand-in for ncu.

The recording is `mla_var6_plus` (b=8, s=16, t=2048, n=512) on an H200 under Nsight Compute
2025.3.1, full set, without embedded sources; folder names in it were replaced by others of the
same length.
"""

import atexit
import functools
import lzma
import shutil
import sys
import tempfile
from pathlib import Path

from mla_var3.conf.devices import device_spec
from mla_var3.runtime.paths import find_kernel, plan_class
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling import NsightProfType
from mla_var3.runtime.profiling.lock import ClockState
from mla_var3.runtime.profiling.ncu.driver import Collection, NcuTool
from mla_var3.runtime.profiling.ncu.reader import Launch, read_launches, stage_profiles
from mla_var3.runtime.profiling.ncu.session import Session
from mla_var3.runtime.workflow import Prepared
from tests.programs import write_script

RECORDING = Path(__file__).parents[4] / "data" / "ncu" / "mla_var6_plus-h200.ncu-rep.xz"
STAGES = ("attention_block_specialized", "decompress_combine")
TOOL = NcuTool(Path("/opt/ncu"), "2025.3.1")


@functools.cache
def recording() -> bytes:
    """The recorded report."""
    return lzma.decompress(RECORDING.read_bytes())


@functools.cache
def launches() -> tuple[Launch, ...]:
    """The launches of the recording, read once per process.

    The reader goes back to the file for the machine code, so the file stays until the end.
    """
    folder = tempfile.mkdtemp(prefix="hyper-mla-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, "report.ncu-rep")
    path.write_bytes(recording())
    return tuple(read_launches(path))


def recorded_plan() -> KernelPlan:
    """The plan that was recorded."""
    plan = plan_class(find_kernel("mla_var6_plus"))(b=8, s=16, t=2048, n=512)
    return plan.for_target("sm_90")


def recorded_session(mode: NsightProfType, folder: Path) -> Session:
    """A session as `profile` would return it, made of the recording."""
    (folder / "report.ncu-rep").write_bytes(recording())
    plan = recorded_plan()
    stage = plan.plan(*plan.prepare_inputs("meta"))
    return Session(
        mode=mode,
        prepared=Prepared(plan, (), stage, device_spec("NVIDIA H200")),
        folder=folder,
        tool=TOOL,
        collection=Collection("ncu", "the package nsight is not installed"),
        clocks=ClockState(False),
        profiles=stage_profiles(launches(), STAGES, 1),
        event_us={"attention_block_specialized": 290.0, "decompress_combine": 20.0},
    )


def stand_in(path: Path, body: str) -> Path:
    """An executable Python script that plays ncu; its arguments are in `args`."""
    return write_script(path, f"#!{sys.executable}\nimport sys\nargs = sys.argv[1:]\n{body}\n")
