"""Recorded rates of kernels and energies: complete, positive, from records that exist."""

import pytest

from mla_var3.conf import kernel_rates as module
from mla_var3.conf.devices import load_devices
from mla_var3.conf.kernel_rates import KernelRates, energy_rates, kernel_rates
from mla_var3.errors import UnknownNameError

KERNEL = {"tflops": 1.0, "gbps": 1.0, "fixed_us": 0.0, "error": 0.1, "source": "", "date": ""}


def test_every_entry_names_a_known_device_and_an_existing_record(repo_root):
    kernels = {(device, r) for device, rates in module._kernels().items() for r in rates.values()}
    assert kernels and module._energies()
    for device, rates in {*kernels, *module._energies().items()}:
        assert device in load_devices() and (repo_root / rates.source).is_file()
        numbers = {k: v for k, v in vars(rates).items() if isinstance(v, (int, float))}
        fixed = {numbers.pop(name, 0.0) for name in ("fixed_us", "tile_us", "cut_us")}
        assert min(numbers.values()) > 0 and min(fixed) >= 0 and numbers.get("overlap", 1) >= 1


def test_overlap_joins_compute_and_memory_time():
    cubic, perfect = (KernelRates(**KERNEL | {"overlap": overlap}) for overlap in (3.0, None))
    assert perfect.work_us(2e6, 3e3) == 3.0
    assert cubic.work_us(2e6, 3e3) == pytest.approx((2**3 + 3**3) ** (1 / 3))
    assert cubic.work_us(0.0, 0.0) == 0.0


def test_an_energy_that_was_not_measured_is_refused_by_name():
    rates = energy_rates("NVIDIA H200")
    assert rates is not None
    assert rates.joules(1e12, 0.0, 0.0, "fp8") == rates.fp8_joules_per_tflop["fp8"]
    with pytest.raises(UnknownNameError, match=r"'fp8_ds_mla'.*known: fp8, fp8_per_token"):
        rates.joules(1e12, 0.0, 0.0, "fp8_ds_mla")
    assert kernel_rates("NVIDIA H200", "flash_mla", "no-dsl") is None
    assert kernel_rates("NVIDIA B200", "flash_mla", "cute-dsl") is energy_rates("B200") is None
