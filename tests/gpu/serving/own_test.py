"""Run vLLM's own test of MLA backends with our backend among them.

    python -m tests.gpu.serving.own_test CHECKOUT --ref=v0.26.0 --prepare FOLDER
    python -m tests.gpu.serving.own_test FOLDER [--every=3] [--beside] [--prefill]

The first command copies the test and its helper out of a checkout or a bare repository of vLLM, at
the version that is installed where the test will run. The second runs it as it is: cases, data,
reference and tolerances are the test's own. Its fixtures live in a conftest that needs packages
which vLLM does not, so this module has them too. The model's name in the test becomes a folder with
a DeepSeek-V3 configuration, because the machine may be offline.

Cases with a prefill backend other than FLASH_ATTN are left out; the test skips them on Hopper. With
`--prefill` our prefill backend takes its place, and requests with several query tokens go there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .one_engine import ENVIRONMENT, OURS, model_config

os.environ.update(ENVIRONMENT, VLLM_LOGGING_LEVEL="WARNING")

import pytest
import torch

from ..attention_record import cuda_is_missing, write_record
from ..compile_ahead import compile_ahead

TEST = "tests/v1/attention/test_mla_backends.py"
FILES = ("tests/__init__.py", "tests/v1/__init__.py", "tests/v1/attention/utils.py", TEST)
MODEL = "deepseek-ai/DeepSeek-R1"
HEADS = (128, 32, 16, 8)
"""Head counts of the test: 128 over its tensor parallel sizes."""
PREFILL = "FLASH_ATTN"


def prepare(checkout: Path, ref: str, folder: Path) -> None:
    """Copy the test's files at a version, and add the model's configuration."""
    for name in FILES:
        found = subprocess.run(
            ["git", "-C", str(checkout), "show", f"{ref}:{name}"], check=True, capture_output=True
        )
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found.stdout)
    sizes = {"heads": 128, "layers": 4, "hidden": 7168, "mlp": 4096, "lora": 1536}
    model = folder / MODEL / "config.json"
    model.parent.mkdir(parents=True, exist_ok=True)
    model.write_text(json.dumps(model_config(sizes)))


class Plugin:
    """The fixtures of vLLM's conftest that the test uses, and the choice of its cases.

    Attributes:
        outcomes: Cases by outcome.
        failures: The first lines of what failed.
    """

    def __init__(self, every: int, beside: bool, prefill: bool) -> None:
        self._every, self._beside, self._prefill = every, beside, prefill
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []

    @pytest.fixture
    def default_vllm_config(self) -> Iterator[Any]:
        from vllm.config import VllmConfig, set_current_vllm_config

        config = VllmConfig()
        with set_current_vllm_config(config):
            yield config

    @pytest.fixture(scope="session")
    def dist_init(self) -> Iterator[None]:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        with tempfile.TemporaryDirectory() as folder:
            with set_current_vllm_config(VllmConfig()):
                init_distributed_environment(
                    world_size=1, rank=0, distributed_init_method=f"file://{folder}/store",
                    local_rank=0, backend="nccl" if torch.cuda.is_available() else "gloo",
                )  # fmt: skip
                initialize_model_parallel(1, 1)
            yield

    @pytest.fixture(scope="session")
    def workspace_init(self) -> Iterator[None]:
        from vllm.v1.worker import workspace

        if torch.cuda.is_available():
            workspace.init_workspace_manager(torch.device("cuda:0"))
        yield
        workspace.reset_workspace_manager()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put our backend into the test's lists, and choose the cases."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        from mla_var3.integrations.vllm import flag

        ours = AttentionBackendEnum[flag()]
        assert ours.get_class().get_name() == OURS
        module: Any = items[0].getparent(pytest.Module).obj
        module.BACKENDS_TO_TEST[:] = [*module.BACKENDS_TO_TEST, ours] if self._beside else [ours]
        module.SPEC_DECODE_BACKENDS.append(ours)
        module.BACKEND_BLOCK_SIZES[ours] = (
            ours.get_class().get_supported_kernel_block_sizes()[0].base
        )
        if self._prefill:
            prefill_everything(module)
        chosen = []
        for item in items:
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            if getattr(parameters.get("prefill_backend"), "name", None) == PREFILL and (
                not self._prefill or "decode" not in parameters["batch_spec_name"]
            ):
                chosen.append(item)
        items[:] = chosen[:: self._every]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(getattr(crash, "message", report.longrepr))
            self.failures.append(f"{report.nodeid.split('::')[-1]}: {message[:300]}")


def prefill_everything(module: Any) -> None:
    """Send requests with several query tokens to our prefill backend."""
    from vllm.v1.attention.backends.mla.prefill import MLAPrefillBackendEnum

    from mla_var3.integrations import paged
    from mla_var3.integrations.vllm import flag

    run = module.run_attention_backend

    def run_with_ours(*arguments: Any, **options: Any) -> Any:
        options["prefill_backend"] = MLAPrefillBackendEnum[flag()]
        return run(*arguments, **options)

    paged.latent_crossover = lambda *arguments: 1
    module.run_attention_backend = run_with_ours


def warm_up(heads: int, eight_bits: bool) -> None:
    """Compile the programs of one head count into the cache on the disk."""
    from mla_var3.integrations import paged

    paged.warm_up(heads, 512, cache_dtype=torch.float8_e4m3fn if eight_bits else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkout for --prepare, else what it wrote")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="copy the files to FOLDER")
    parser.add_argument("--ref", default="v0.26.0", help="version of the test")
    parser.add_argument("--every", type=int, default=1, help="run every N-th case only")
    parser.add_argument("--beside", action="store_true", help="run vLLM's backends too")
    parser.add_argument("--prefill", action="store_true", help="test our prefill backend")
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--collect", action="store_true", help="only collect; needs no GPU")
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.prepare:
        prepare(folder, given.ref, given.prepare)
        return 0
    if not given.collect:
        if cuda_is_missing():
            return 1
        compile_ahead([(warm_up, (heads, bits)) for heads in HEADS for bits in (False, True)])
    from mla_var3.integrations.vllm import register

    register()
    record = given.json.resolve() if given.json else None
    plugin = Plugin(given.every, given.beside, given.prefill)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # the test imports its own package `tests`
    sys.path.insert(0, str(folder))
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    options += ["--collect-only"] if given.collect else ["--no-header", "--tb=short"]
    with contextlib.chdir(folder):  # the model is a folder there
        code = pytest.main([*options, str(folder / TEST)], plugins=[plugin])
    print(f"{TEST}: {dict(plugin.outcomes)}")
    print("\n".join(plugin.failures[:20]))
    values = {"test": TEST, "ref": given.ref, "every": given.every, "beside": given.beside}
    values |= {"prefill": given.prefill}
    outcome = {"outcomes": dict(plugin.outcomes), "failures": plugin.failures}
    write_record(record, "serving.own_test", values | outcome)
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
